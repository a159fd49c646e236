"""The parameters that a run begins with. With LoRA they are its frozen base: no checkpoint of the run has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.learner.train_step import init_state
from jaxrl_llm.models import lora
from jaxrl_llm.objective.algorithms import call
from jaxrl_llm.run import sft
from jaxrl_llm.run.checkpoint import checksums
from jaxrl_llm.types import expect


def of_run(config: Config, out: Path, mesh: Mesh, stopping: Callable[[], int] | None = None) -> Any:
    """From `prime` or `init`; None for random ones. With LoRA always all that the run freezes, see `lora.frozen`.

    stopping: see `sft.prime`, which finishes the supervised stage; without it the run's folder is only read.
    """
    model, freeze, params = lora.without(config.model), config.model.lora is not None, None
    if config.prime is not None:
        made = partial(sft.prime, stopping=stopping) if stopping else sft.load
        params = made(replace(config, model=model), out / "base", mesh)
    elif config.init is not None:  # of parameters that are trained there is a copy in float32
        params = call(partial(config.init, model, mesh), {"dtype": model.dtype} if freeze else {})
    elif freeze:
        params = init_state(model, optax.identity(), config.seed, mesh).params
    return lora.frozen(model, params) if freeze else params


def check(base: Any, host: dict[str, Any], run: Path) -> None:
    """ValueError unless the adapters of a checkpoint were trained on this base. host: what was saved with them."""
    other = [] if base is None else configs.differences(host.get("base"), checksums(base, {}))
    expected = "the weights on which the run's adapters were trained"
    expect(not other, f"{run}: base", f"another one ({len(other)} arrays differ)", expected)
