"""Whether a config can be run, before any device work."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config.functions import unbound
from jaxrl_llm.config.overrides import coerce
from jaxrl_llm.config.tree import Config, Prime, Rollout
from jaxrl_llm.objective import advantages
from jaxrl_llm.objective.algorithms import Algorithm, Critic, call, wants
from jaxrl_llm.types import Optimizer, Prompt, expect

AT_LEAST = {
    1: "steps micro_batches rollout.prompts rollout.group_size rollout.max_prompt_tokens rollout.max_response_tokens "
    "rollout.tokens_per_call rollout.max_rounds mesh.data mesh.fsdp mesh.tensor evaluation.problems evaluation.samples "
    "checkpoint.every checkpoint.keep algorithm.updates_per_batch algorithm.updates.epochs model.vocab_size "
    "model.layers model.width model.heads model.kv_heads model.head_width model.mlp_width",
    0: "rollout.slots rollout.budget rollout.max_staleness rollout.top_k evaluation.every logged_samples abort_after "
    "seed algorithm.shaping.length_warmup",
}


def validate(config: Config) -> Config:
    """The same config. Raises ValueError that names the field, its value and what was expected."""
    r, a, m = config.rollout, config.algorithm, config.mesh
    _types(config, "")
    for least, names in AT_LEAST.items():
        for name in names.split():
            value = attrgetter(name)(config)
            expect(value >= least, name, value, f"at least {least}")
    expect(config.seed < 2**31, "seed", config.seed, "less than 2^31")
    expect(r.temperature > 0, "rollout.temperature", r.temperature, "a positive number (the learner divides by it)")
    expect(0 < r.top_p <= 1, "rollout.top_p", r.top_p, "a number in (0, 1]")
    chosen = "top_p" if r.top_p < 1 else "top_k"
    expected = "no filter, or rollout.allow_filtered=True: the sampler-learner gap would measure the filter"
    expect(r.allow_filtered or (r.top_k, r.top_p) == (0, 1), f"rollout.{chosen}", getattr(r, chosen), expected)
    ways, parts = m.data * m.fsdp, a.updates_per_batch * config.micro_batches
    expected = "a multiple of mesh.data × mesh.fsdp × algorithm.updates_per_batch × micro_batches = "
    expected += f"{m.data} × {m.fsdp} × {a.updates_per_batch} × {config.micro_batches}"
    expect(r.prompts % (ways * parts) == 0, "rollout.prompts", r.prompts, expected)
    expect(r.slots % ways == 0, "rollout.slots", r.slots, f"a multiple of mesh.data × mesh.fsdp = {ways}")
    _validate_sampler(r, ways)
    _validate_algorithm(a, config, ways)
    heads, kv_heads, head_width = config.model.heads, config.model.kv_heads, config.model.head_width
    expect(heads % kv_heads == 0, "model.heads", heads, f"a multiple of model.kv_heads = {kv_heads}")
    expect(head_width % 2 == 0, "model.head_width", head_width, "an even number")
    _validate_optimizer(config.optimizer, "optimizer")
    if config.prime is not None:
        _validate_prime(config.prime, ways * config.micro_batches)
    for name, make in (("task", config.task), ("tokenizer", config.tokenizer)):
        _validate_call(make, name)
    return config


def _validate_sampler(r: Rollout, ways: int) -> None:
    expected = f"0, or room for a group on each of the mesh's {ways} shards: at least {ways * r.group_size}"
    expect(ways == 1 or r.slots == 0 or r.slots >= ways * r.group_size, "rollout.slots", r.slots, expected)
    own = r.mode == "sync" and not r.servers and not r.budget
    expected = "False unless rollout.mode is sync, rollout.servers is empty and rollout.budget is 0"
    expect(own or not r.zero_gap, "rollout.zero_gap", r.zero_gap, expected)
    many = r.mode != "sync" and not r.servers and jax.process_count() > 1
    expected = "sync with several processes that sample themselves: threads on several hosts would wait for each other"
    expect(not many, "rollout.mode", r.mode, expected)
    expected = f"below rollout.max_response_tokens = {r.max_response_tokens}, or 0"
    expect(r.budget < r.max_response_tokens, "rollout.budget", r.budget, expected)
    for i, server in enumerate(r.servers):
        host, _, port = server.rpartition(":")
        expect(host and port.isdecimal(), f"rollout.servers.{i}", server, "host:port")


def _validate_algorithm(a: Algorithm, config: Config, ways: int) -> None:
    r, fn = config.rollout, unbound(a.advantage)[0]
    needs_two = fn.__name__ if fn in (advantages.rloo, advantages.passk) else "algorithm.group_filter"
    if a.group_filter is not None or needs_two != "algorithm.group_filter":
        expect(r.group_size > 1, "rollout.group_size", r.group_size, f"at least 2 for {needs_two}")
    top = a.prompts.retire_above
    expect(top is None or 0 < top <= 1, "algorithm.prompts.retire_above", top, "None or a rate in (0, 1]")
    expect(
        a.prompts.resample or a.group_filter,
        "algorithm.prompts.resample",
        a.prompts.resample,
        "True without algorithm.group_filter",
    )
    ordered = a.prompts.prioritized and r.difficulty is not None
    expect(
        not ordered, "rollout.difficulty", r.difficulty, "None if algorithm.prompts.prioritized: one order of prompts"
    )
    _validate_call(partial(a.prompts.template, Prompt(0, "")), "algorithm.prompts.template")
    if wants(a.shaping.reward, "n_gold"):
        named = "n_gold" in a.prompts.template(Prompt(0, "?")).meta
        expect(
            named,
            "algorithm.prompts.template",
            a.prompts.template,
            "one that sets meta['n_gold'], for algorithm.shaping.reward",
        )
    c = a.critic
    if c is not None:
        _validate_critic(c, r.prompts, ways * config.micro_batches)
    _dry_run(a, r.max_response_tokens)


def _validate_critic(c: Critic, prompts: int, ways: int) -> None:
    for name, least in (("updates", 1), ("mini_batches", 1), ("pretrain", 0)):
        expect(getattr(c, name) >= least, f"algorithm.critic.{name}", getattr(c, name), f"at least {least}")
    for name in ("gamma", "lam"):
        expect(0 <= getattr(c, name) <= 1, f"algorithm.critic.{name}", getattr(c, name), "a number in [0, 1]")
    expect(c.head_std >= 0, "algorithm.critic.head_std", c.head_std, "at least 0")
    expect(c.clip is None or c.clip > 0, "algorithm.critic.clip", c.clip, "None or a positive number")
    parts = ways * c.mini_batches
    expected = f"a divisor of rollout.prompts / (mesh.data × mesh.fsdp × micro_batches) = {prompts} / {ways}"
    expect(prompts % parts == 0, "algorithm.critic.mini_batches", c.mini_batches, expected)
    _validate_optimizer(c.optimizer, "algorithm.critic.optimizer")


def _dry_run(a: Algorithm, max_len: int) -> None:
    """Trace the functions on two responses to one prompt, so that a bad hyper-parameter is known before any work."""
    tokens, row, group = jnp.zeros((2, 3)), jnp.zeros(2), jnp.zeros((1, 2))
    mask, key = jnp.ones((2, 3), bool), jax.random.key(0)
    by_token = ("logp", "old_logp", "sampler_logp", "adv", "values", "kl", "entropy", "log_router_ratio")
    have = dict.fromkeys(by_token, tokens) | {"mask": mask, "selected": mask, "key": key, "beta": 0.0}
    of_prompts = {"rewards": group, "lengths": group, "correct": group > 0, "n_tokens": group, "max_len": max_len}
    of_rows = {"rewards": row, "correct": row > 0, "n_tokens": row, "n_gold": row, "max_len": max_len}
    memory = None if a.memory is None else call(a.memory, {"n_prompts": 1})
    ids = jnp.zeros(1, int)
    for name, given in {
        "loss": have,
        "correction": have,
        "updates.select": have,
        "updates.token_filter": have,
        "updates.phases": have,
        "token_advantage": have | {"rewards": row if a.critic is None else tokens},
        "advantage": of_prompts | {"mask": mask[None], "prompt_ids": ids, "state": memory, "kept": mask[:1, 0]},
        "shaping.length_reward": of_prompts,
        "shaping.reward": of_rows,
    }.items():
        fn = attrgetter(name)(a)
        if fn is not None:
            try:
                jax.eval_shape(lambda fn=fn, given=given: call(fn, given))
            except ValueError as error:
                raise ValueError(f"algorithm.{name}: {error}") from error


def _validate_optimizer(o: Optimizer, path: str) -> None:
    for name in ("lr", "warmup", "weight_decay"):
        expect(getattr(o, name) >= 0, f"{path}.{name}", getattr(o, name), "at least 0")
    for name in ("eps", "clip_norm"):
        expect(getattr(o, name) > 0, f"{path}.{name}", getattr(o, name), "a positive number")
    for name in ("b1", "b2"):
        expect(0 <= getattr(o, name) < 1, f"{path}.{name}", getattr(o, name), "a number in [0, 1)")


def _validate_prime(prime: Prime, ways: int) -> None:
    expect(len(prime.stages) > 0, "prime.stages", prime.stages, "at least one Stage(…)")
    for i, stage in enumerate(prime.stages):
        expect(stage.batches >= 1, f"prime.stages.{i}.batches", stage.batches, "at least 1")
        weights = list(stage.mixture.values())
        sound = min(weights, default=-1) >= 0 and sum(weights) > 0
        expect(sound, f"prime.stages.{i}.mixture", stage.mixture, "behaviours with weights, none below 0, not all 0")
    n = prime.traces_per_batch
    divides = f"a positive multiple of mesh.data × mesh.fsdp × micro_batches = {ways}"
    expect(n > 0 and n % ways == 0, "prime.traces_per_batch", n, divides)
    _validate_optimizer(prime.optimizer, "prime.optimizer")
    if prime.task is not None:
        _validate_call(prime.task, "prime.task")


def _validate_call(make: Callable, name: str) -> None:
    """`make()` would get all the arguments that it needs, and none that it does not know."""
    fn, keywords = unbound(make)
    try:
        inspect.signature(fn).bind(**keywords)
    except TypeError as error:
        raise ValueError(f"{name}: {fn.__name__}: {error}") from error


def _types(node: Any, path: str) -> None:
    hints = typing.get_type_hints(type(node))
    for f in dataclasses.fields(node):
        value, where = getattr(node, f.name), f"{path}{f.name}"
        coerce(hints[f.name], value, where)
        for i, inner in enumerate(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(inner):
                _types(inner, f"{where}.{i}." if isinstance(value, tuple) else f"{where}.")
