"""Where the policy comes from that another one is distilled from: functions for `Config.teacher`."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.data import tokenizers
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.types import TrainState, expect


def run(folder: str = "") -> tuple[ModelConfig, Tokenizer, Callable]:
    """The newest policy of a run: its model, its tokenizer, and what reads its parameters onto a mesh.

    Raises ValueError for a folder without a run or without a checkpoint.
    """
    path = Path(folder)
    saved = any((path / "checkpoints").glob("[0-9]*")) and (path / "config.json").is_file()
    expect(saved, "teacher.folder", folder, "the folder of a run with a checkpoint (--set teacher.folder=…)")
    model = configs.load(path).model

    def parameters(mesh: Mesh) -> Any:
        from jaxrl_llm.models import transformer
        from jaxrl_llm.parallel import sharding
        from jaxrl_llm.run.checkpoint import Checkpoints

        shapes = jax.eval_shape(partial(transformer.init, model), jax.random.key(0))
        placed = sharding.shardings(transformer.logical_axes(model), shapes, mesh)
        like = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, placed)
        checkpoints, warn = Checkpoints(path / "checkpoints", read_only=True), partial(print, file=sys.stderr)
        return checkpoints.restore(TrainState(like, None, None), warn, partial=True).state.params

    return model, tokenizers.load(path / "tokenizer"), parameters
