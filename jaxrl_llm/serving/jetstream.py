"""The one place that imports google-jetstream, whose last release is older than the jax of this project."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace

import jax

MODULES = (
    "engine.engine_api", "engine.tokenizer_api", "engine.tokenizer_pb2", "engine.token_utils", "core.orchestrator",
    "core.proto.jetstream_pb2", "core.proto.jetstream_pb2_grpc",
)  # fmt: skip


def load() -> SimpleNamespace:
    """JetStream's modules under their own names. ImportError if google-jetstream is not installed.

    The interpreter is left as it was: the root logger keeps its level and handlers, and no stand-in stays importable.
    JetStream's messages go to the logger `jetstream`.
    """
    if importlib.util.find_spec("jetstream") is None:
        raise ImportError("google-jetstream is not installed; expected: make .venv/serve")
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # the orchestrator calls it while it runs
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    # seqio with the two classes that JetStream names and this project does not use: the real one needs TensorFlow.
    vocabularies = ModuleType("seqio.vocabularies")
    vocabularies.Vocabulary = vocabularies.SentencePieceVocabulary = type("Vocabulary", (), {})
    stand_ins = {"seqio": ModuleType("seqio"), "seqio.vocabularies": vocabularies}
    added = stand_ins if importlib.util.find_spec("seqio") is None else {}
    sys.modules.update(added)
    try:
        found = {name.rpartition(".")[2]: importlib.import_module(f"jetstream.{name}") for name in MODULES}
    finally:
        for name in added:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers
    modules = SimpleNamespace(**found)
    for module in (modules.orchestrator, modules.token_utils):
        module.logging = logging.getLogger("jetstream")  # not the functions of `logging`, which configure the root
    return modules
