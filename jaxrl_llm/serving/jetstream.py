"""The one place that imports google-jetstream, whose last release is older than the jax of this project."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import NamedTuple

import jax

UNUSED = {"seqio": (), "seqio.vocabularies": ("SentencePieceVocabulary", "Vocabulary")}


class Modules(NamedTuple):
    """JetStream's modules under their own names."""

    engine_api: ModuleType
    tokenizer_api: ModuleType
    tokenizer_pb2: ModuleType
    token_utils: ModuleType
    orchestrator: ModuleType
    jetstream_pb2: ModuleType
    jetstream_pb2_grpc: ModuleType


def _stand_ins() -> dict[str, ModuleType]:
    """seqio with the two classes that JetStream names and this project does not use: the real one needs TensorFlow."""
    modules = {name: ModuleType(name) for name in UNUSED}
    for name, classes in UNUSED.items():
        for cls in classes:
            setattr(modules[name], cls, type(cls, (), {}))
    return modules


def load() -> Modules:
    """JetStream's modules. ImportError if google-jetstream is not installed.

    The interpreter is left as it was: the root logger keeps its level and handlers, and no stand-in stays importable.
    JetStream's messages go to the logger `jetstream`.
    """
    if importlib.util.find_spec("jetstream") is None:
        raise ImportError("google-jetstream is not installed; expected: pip install 'jaxrl_llm[serve]'")
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # the orchestrator calls it while it runs
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    added = _stand_ins() if importlib.util.find_spec("seqio") is None else {}
    sys.modules.update(added)
    try:
        get = lambda name: importlib.import_module(f"jetstream.{name}")
        engine = [get(f"engine.{name}") for name in ("engine_api", "tokenizer_api", "tokenizer_pb2", "token_utils")]
        protocol = [get(f"core.proto.{name}") for name in ("jetstream_pb2", "jetstream_pb2_grpc")]
        modules = Modules(*engine, get("core.orchestrator"), *protocol)
    finally:
        for name in added:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers
    for module in (modules.orchestrator, modules.token_utils):
        module.logging = logging.getLogger("jetstream")  # not the functions of `logging`, which configure the root
    return modules
