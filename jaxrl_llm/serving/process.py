"""`jaxrl serve`: a sampler of its own, in a process that is watched and started again when it dies."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.models import transformer
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import trainer
from jaxrl_llm.sampler import weights, wire
from jaxrl_llm.serving import server, supervisor
from jaxrl_llm.types import expect


def policy(source: Path, assignments: tuple[str, ...]) -> tuple[Config, Any]:
    """The config and parameters of a run's newest checkpoint; of an experiment file, random ones until some come."""
    if not source.is_dir():
        config = configs.load(source, assignments)
        return config, jax.jit(transformer.init, static_argnums=0)(config.model, jax.random.key(config.seed))
    expect(not assignments, "set", assignments, "none for a run, whose config is kept with it")
    learner, state, _ = trainer.load_state(source)
    return learner.config, learner.whole(state.params)


def work(source: Path, assignments: tuple[str, ...], **listen: Any) -> None:
    """Serve in this process. listen: keywords of `server.serve`."""
    from jaxrl_llm.serving import backend

    listen |= wire.secrets()
    server.check_listen(**listen)  # before anything is loaded
    config, params = policy(source, assignments)
    r, model = config.rollout, trainer.sampler_model(config)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)

    def make() -> backend.DriverBackend:
        pushed = weights.push(model, params, mesh, quantized=trainer.quantized(config))
        sizes = {"slots": r.slots or r.prompts * r.group_size, "max_prompt_tokens": r.max_prompt_tokens}
        sizes |= {"max_tokens": r.max_response_tokens, "tokens_per_call": r.tokens_per_call, "kv_dtype": r.kv_dtype}
        return backend.DriverBackend(model, config.tokenizer(), pushed, mesh=mesh, **sizes)

    register = partial(backend.add_decode_service, max_waiting=r.max_waiting)
    with jax.set_mesh(mesh):
        server.serve(make, register=register, max_waiting=r.max_waiting, **listen)


def watch(source: Path, assignments: tuple[str, ...], **listen: Any) -> int:
    """Serve in a process of its own; start it again, on the same port, when JetStream has killed it."""
    server.check_listen(**wire.secrets(), **listen)
    words = [w for a in assignments for w in ("--set", a)]
    words += [w for k, v in listen.items() if v is not None for w in (f"--{k.replace('_', '-')}", str(v))]
    return supervisor.supervise([sys.executable, "-m", "jaxrl_llm.cli", "serve", str(source), *words, "--unwatched"])
