"""Where the policy comes from that another one is distilled from: functions for `Config.teacher`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.data import tokenizers
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.types import expect


def run(folder: str = "") -> tuple[ModelConfig, Tokenizer, Callable]:
    """The newest policy of a run: its model, its tokenizer, and what reads its parameters onto a mesh.

    Raises ValueError for a folder without a run or without a checkpoint.
    """
    path = Path(folder)
    saved = any((path / "checkpoints").glob("[0-9]*")) and (path / "config.json").is_file()
    expect(saved, "teacher.folder", folder, "the folder of a run with a checkpoint (--set teacher.folder=…)")
    config = configs.load(path)

    def parameters(mesh: Mesh) -> Any:
        from jaxrl_llm.models import lora
        from jaxrl_llm.run import base, checkpoint

        found = checkpoint.newest_policy(path, config.model, mesh)
        frozen = base.of_run(config, path, mesh) if config.model.lora else None
        base.check(frozen, found.host, path)
        return lora.joined(frozen, found.state.params)

    return config.model, tokenizers.load(path / "tokenizer"), parameters


def checkpoint(source: str = "", dtype: str = "bfloat16") -> tuple[ModelConfig, Tokenizer, Callable]:
    """A checkpoint in Hugging Face's format: a folder, or OWNER/NAME of the hub; computed in this dtype and kept in it.

    Raises ValueError as models/hf.py does.
    """
    from jaxrl_llm.models import hf  # the decoder, which `jaxrl show` does not wait for

    expect(source, "teacher.source", source, "a folder, or OWNER/NAME of the hub (--set teacher.source=…)")
    model = hf.model(source, dtype=dtype)
    return model, tokenizers.load(source), lambda mesh: hf.load(model, mesh, source, dtype)
