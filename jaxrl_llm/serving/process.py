"""`jaxrl serve`: a sampler of its own, in a process that is watched and started again when it dies."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.models import hf, lora, transformer
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import trainer
from jaxrl_llm.sampler import client, wire
from jaxrl_llm.sampler import weights as sampler_weights
from jaxrl_llm.serving import http, server, supervisor
from jaxrl_llm.types import expect


def policy(source: Path, assignments: tuple[str, ...]) -> tuple[Config, Any]:
    """The config and parameters of a run's newest checkpoint; of an experiment file, random ones until some come."""
    if not source.is_dir():
        config = configs.load(source, assignments)
        return config, jax.jit(transformer.init, static_argnums=0)(config.model, jax.random.key(config.seed))
    expect(not assignments, "set", assignments, "none for a run, whose config is kept with it")
    learner, state, _ = trainer.load_state(source)
    return learner.config, learner.whole(state.params)


def check(http_port: int | None, weights: Path | None, **listen: Any) -> None:
    """ValueError unless it is safe to listen so, and there is something to listen to."""
    server.check_listen(http_port=http_port, **wire.secrets(), **listen)
    usable = weights is None or (http_port is not None and weights.is_dir())
    expect(usable, "weights", weights, "a folder, and http_port")


def work(source: Path, assignments: tuple[str, ...], **listen: Any) -> None:
    """Serve in this process. listen: keywords of `server.serve`, and http_port and weights, for OpenAI's API."""
    from jaxrl_llm.serving import backend

    check(**listen)  # before anything is loaded
    listen |= wire.secrets()
    http_port, weights = listen.pop("http_port"), listen.pop("weights")
    config, params = policy(source, assignments)
    r, model, kept = config.rollout, trainer.sampler_model(config), trainer.quantized(config)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    api = http.Api(source.resolve().stem, **wire.secrets(), max_waiting=r.max_waiting, root=weights)

    def make() -> backend.DriverBackend:
        pushed = sampler_weights.push(model, params, mesh, quantized=kept)
        sizes = {"slots": r.slots or r.prompts * r.group_size, "max_prompt_tokens": r.max_prompt_tokens}
        sizes |= {"max_tokens": r.max_response_tokens, "tokens_per_call": r.tokens_per_call, "kv_dtype": r.kv_dtype}
        sizes |= {"cache": r.cache, "kv_tokens": r.kv_tokens, "prefill_tokens": r.prefill_tokens}
        return backend.DriverBackend(model, config.tokenizer(), pushed, mesh=mesh, **sizes)

    def load(folder: Path, version: int) -> None:
        with jax.set_mesh(mesh):  # in whichever thread
            loaded = hf.load(lora.without(config.model), mesh, folder)
            pushed = sampler_weights.push(lora.without(model), loaded, mesh, quantized=kept)
            api.backend.load(client.named(pushed.params), version)

    def register(made: backend.DriverBackend, grpc_server: Any) -> None:
        backend.add_decode_service(made, grpc_server, max_waiting=r.max_waiting)
        api.load, api.backend = load, made
        if bound is not None:
            print(f"http on {listen['host']}:{bound}", flush=True)

    secure = {name: listen[name] for name in ("cert", "key")}
    where = nullcontext() if http_port is None else http.listening(api, listen["host"], http_port, **secure)
    with jax.set_mesh(mesh), where as bound:
        server.serve(make, register=register, max_waiting=r.max_waiting, **listen)


def watch(source: Path, assignments: tuple[str, ...], **listen: Any) -> int:
    """Serve in a process of its own; start it again, on the same port, when JetStream has killed it."""
    check(**listen)
    words = [w for a in assignments for w in ("--set", a)]
    words += [w for k, v in listen.items() if v is not None for w in (f"--{k.replace('_', '-')}", str(v))]
    return supervisor.supervise([sys.executable, "-m", "jaxrl_llm.cli", "serve", str(source), *words, "--unwatched"])
