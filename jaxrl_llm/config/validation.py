"""Whether a config can be run, before any device work."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import jax

from jaxrl_llm.config import functions
from jaxrl_llm.config.dry_run import dry_run, one_answer_suffices
from jaxrl_llm.config.functions import unbound
from jaxrl_llm.config.overrides import coerce
from jaxrl_llm.config.tree import Config, Prime, Rollout
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.objective.algorithms import Algorithm, Critic, wants
from jaxrl_llm.types import EOS, Optimizer, Prompt, Task, expect

AT_LEAST = {
    1: "steps micro_batches rollout.prompts rollout.group_size rollout.max_prompt_tokens rollout.max_response_tokens "
    "rollout.tokens_per_call rollout.max_rounds mesh.data mesh.fsdp mesh.tensor evaluation.problems evaluation.samples "
    "checkpoint.every checkpoint.keep algorithm.updates_per_batch algorithm.updates.epochs model.vocab_size "
    "model.layers model.width model.heads model.kv_heads model.head_width model.mlp_width",
    0: "rollout.slots rollout.budget rollout.max_staleness rollout.top_k evaluation.every logged_samples seed "
    "algorithm.shaping.length_warmup",
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
    left, over = divmod(r.prompts, ways * a.updates_per_batch)  # prompts of an update on a device, if it comes out even
    many = f"rollout.prompts={math.ceil(r.prompts / (ways * parts)) * ways * parts}"
    remedy = many if over else f"micro_batches={math.gcd(left, config.micro_batches)}"
    expect(r.prompts % (ways * parts) == 0, "rollout.prompts", r.prompts, f"{expected} (--set {remedy})")
    expect(r.slots % ways == 0, "rollout.slots", r.slots, f"a multiple of mesh.data × mesh.fsdp = {ways}")
    _validate_sampler(r, ways)
    _validate_algorithm(a, config, ways)
    _validate_model(config.model)
    _validate_optimizer(config.optimizer, "optimizer")
    if config.prime is not None:
        _validate_prime(config.prime, ways * config.micro_batches)
    for name, make in (("task", config.task), ("tokenizer", config.tokenizer)):
        _validate_call(make, name)
    return config


def made(config: Config) -> tuple[Tokenizer, Task]:
    """What the config's functions make. Raises ValueError for what is no tokenizer, or no task with a reward."""
    tokenizer, task, size = config.tokenizer(), config.task(), config.model.vocab_size
    expect(isinstance(tokenizer, Tokenizer), "tokenizer()", tokenizer, "a data.tokenizers.Tokenizer (see from_hf)")
    expect(tokenizer.size <= size, "model.vocab_size", size, f"at least {tokenizer.size} (tokenizer)")
    expect(isinstance(task, Task), "task()", task, "a types.Task")
    expect(callable(task.reward), "task().reward", task.reward, "a function of prompt, response and finish")
    _validate_call(task.reward, "task().reward", Prompt(0, ""), "", EOS)
    return tokenizer, task


def _validate_model(m: ModelConfig) -> None:
    expect(m.heads % m.kv_heads == 0, "model.heads", m.heads, f"a multiple of model.kv_heads = {m.kv_heads}")
    expect(m.head_width % 2 == 0, "model.head_width", m.head_width, "an even number")
    scaling = dataclasses.asdict(m.rope_scaling) if m.rope_scaling else {}
    positive = {"rope_theta": m.rope_theta, "norm_eps": m.norm_eps}
    for name, value in (positive | {f"rope_scaling.{k}": v for k, v in scaling.items()}).items():
        expect(value > 0, f"model.{name}", value, "a positive number")
    if scaling:
        low, high = m.rope_scaling.low_freq_factor, m.rope_scaling.high_freq_factor
        expect(low < high, "model.rope_scaling.low_freq_factor", low, f"less than high_freq_factor = {high}")


def _validate_sampler(r: Rollout, ways: int) -> None:
    expected = f"0, or room for a group on each of the mesh's {ways} shards: at least {ways * r.group_size}"
    expect(ways == 1 or r.slots == 0 or r.slots >= ways * r.group_size, "rollout.slots", r.slots, expected)
    exact = r.mode == "sync" and not r.servers and not r.budget
    expected = "False unless rollout.mode is sync, rollout.servers is empty and rollout.budget is 0"
    expect(exact or not r.zero_gap, "rollout.zero_gap", r.zero_gap, expected)
    threads_on_hosts = r.mode != "sync" and not r.servers and jax.process_count() > 1
    expected = "sync with several processes that sample themselves: threads on several hosts would wait for each other"
    expect(not threads_on_hosts, "rollout.mode", r.mode, expected)
    expected = f"below rollout.max_response_tokens = {r.max_response_tokens}, or 0"
    expect(r.budget < r.max_response_tokens, "rollout.budget", r.budget, expected)
    expect("" not in r.stop, "rollout.stop", r.stop, "texts that are not empty")
    for i, server in enumerate(r.servers):
        host, _, port = server.rpartition(":")
        expect(host and port.isdecimal(), f"rollout.servers.{i}", server, "host:port")


def _validate_algorithm(a: Algorithm, config: Config, ways: int) -> None:
    r = config.rollout
    if r.group_size == 1:
        expect(a.group_filter is None, "rollout.group_size", 1, "at least 2 for algorithm.group_filter")
        expected = f"at least 2 for {unbound(a.advantage)[0].__name__}: the advantage of one answer alone is 0"
        expect(one_answer_suffices(a), "rollout.group_size", 1, expected)
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
    dry_run(a, r.max_response_tokens)


def _validate_critic(c: Critic, prompts: int, ways: int) -> None:
    for name, least in (("updates", 1), ("mini_batches", 1), ("pretrain", 0)):
        expect(getattr(c, name) >= least, f"algorithm.critic.{name}", getattr(c, name), f"at least {least}")
    for name in ("gamma", "lam"):
        expect(0 <= getattr(c, name) <= 1, f"algorithm.critic.{name}", getattr(c, name), "a number in [0, 1]")
    expect(c.head_std >= 0, "algorithm.critic.head_std", c.head_std, "at least 0")
    expect(c.clip is None or c.clip > 0, "algorithm.critic.clip", c.clip, "None or a positive number")
    parts = ways * c.mini_batches
    expected = f"a divisor of rollout.prompts / (mesh.data × mesh.fsdp × micro_batches) = {prompts} / {ways}"
    expected += f" (--set algorithm.critic.mini_batches={math.gcd(prompts // ways, c.mini_batches)})"
    expect(prompts % parts == 0, "algorithm.critic.mini_batches", c.mini_batches, expected)
    _validate_optimizer(c.optimizer, "algorithm.critic.optimizer")


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


def _validate_call(make: Callable, name: str, *arguments: Any) -> None:
    """`make(*arguments)` gets all that it needs, and nothing that it does not know; a function that it takes is one,
    of as many arguments as its annotation says.
    """
    inner = make if isinstance(make, partial) else partial(make)
    fn = inner.func
    try:
        inspect.signature(fn).bind(*inner.args, *arguments, **inner.keywords)
    except TypeError as error:
        raise ValueError(f"{name}: {getattr(fn, '__name__', fn)}: {error}") from error
    known = functions.hints(fn)
    for keyword, value in unbound(inner)[1].items():
        hint = known.get(keyword)
        if functions.is_function(hint):
            coerce(hint, value, f"{name}.{keyword}")
            given = typing.get_args(hint)[:1]
            if given and isinstance(given[0], list):
                _validate_call(value, f"{name}.{keyword}", *given[0])


def _types(node: Any, path: str) -> None:
    hints = typing.get_type_hints(type(node))
    for f in dataclasses.fields(node):
        value, where = getattr(node, f.name), f"{path}{f.name}"
        coerce(hints[f.name], value, where)
        expect(not isinstance(value, list), where, value, "a tuple")  # --set takes a list for it: it makes a tuple
        for i, inner in enumerate(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(inner):
                _types(inner, f"{where}.{i}." if isinstance(value, tuple) else f"{where}.")
