"""Whether a config can be run, before any device work."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxrl_llm.config import functions
from jaxrl_llm.config.dry_run import dry_run, one_answer_suffices
from jaxrl_llm.config.functions import unbound
from jaxrl_llm.config.overrides import coerce
from jaxrl_llm.config.tree import Checkpoint, Config, Evaluation, Mesh, Prime, Rollout, Stage
from jaxrl_llm.data import curation
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.shape import ModelConfig, RopeScaling
from jaxrl_llm.objective.algorithms import Algorithm, Critic, PromptChoice, Shaping, Updates, wants
from jaxrl_llm.types import EOS, Optimizer, Prompt, Task, expect

# What the numbers of a node may be; None is left to its type.
RULES: tuple[tuple[str, Callable, dict[type, str]], ...] = (
    ("at least 1", lambda x: x >= 1, {
        Config: "steps micro_batches", Mesh: "data fsdp tensor", Stage: "batches", Updates: "epochs",
        Rollout: "prompts group_size max_prompt_tokens max_response_tokens tokens_per_call max_rounds",
        Evaluation: "problems samples", Checkpoint: "every keep", Algorithm: "updates_per_batch",
        ModelConfig: "vocab_size layers width heads kv_heads head_width mlp_width", Critic: "updates mini_batches",
    }),
    ("at least 0", lambda x: x >= 0, {
        Config: "logged_samples abort_after seed", Rollout: "slots budget max_staleness top_k", Evaluation: "every",
        Shaping: "length_warmup", Critic: "pretrain head_std", Optimizer: "lr warmup weight_decay",
    }),
    ("a positive number", lambda x: x > 0, {
        Rollout: "temperature", Critic: "clip", Optimizer: "eps clip_norm", ModelConfig: "rope_theta norm_eps",
        RopeScaling: "factor low_freq_factor high_freq_factor original_max_position",
    }),
    ("a number in (0, 1]", lambda x: 0 < x <= 1, {Rollout: "top_p", PromptChoice: "retire_above"}),
    ("a number in [0, 1]", lambda x: 0 <= x <= 1, {Critic: "gamma lam"}),
    ("a number in [0, 1)", lambda x: 0 <= x < 1, {Optimizer: "b1 b2"}),
    ("an even number", lambda x: x % 2 == 0, {ModelConfig: "head_width"}),
    ("less than 2^31", lambda x: x < 2**31, {Config: "seed"}),
)  # fmt: skip


def validate(config: Config) -> Config:
    """The same config. Raises ValueError that names the field, its value and what was expected."""
    r, a, m = config.rollout, config.algorithm, config.mesh
    _types(config, "")
    ways, micro = m.data * m.fsdp, config.micro_batches
    whole = ways * a.updates_per_batch * micro
    left, over = divmod(r.prompts, ways * a.updates_per_batch)  # prompts of an update on a device, if it comes out even
    many = f"rollout.prompts={math.ceil(r.prompts / whole) * whole}"
    expected = "a multiple of mesh.data × mesh.fsdp × algorithm.updates_per_batch × micro_batches = "
    expected += f"{m.data} × {m.fsdp} × {a.updates_per_batch} × {micro} "
    expected += f"(--set {many if over else f'micro_batches={math.gcd(left, micro)}'})"
    expect(r.prompts % whole == 0, "rollout.prompts", r.prompts, expected)
    _validate_sampler(r, ways)
    _validate_algorithm(a, r, ways, micro)
    _validate_model(config.model)
    _validate_prime(config.prime, ways * micro)
    _validate_call(config.task, "task")
    _validate_call(config.tokenizer, "tokenizer")
    return config


def made(config: Config) -> tuple[Tokenizer, Task]:
    """What the config's functions make, prompts in their template. ValueError: no tokenizer, no task with a reward."""
    tokenizer, size = config.tokenizer(), config.model.vocab_size
    expect(isinstance(tokenizer, Tokenizer), "tokenizer()", type(tokenizer).__name__, "a data.tokenizers.Tokenizer")
    expect(tokenizer.size <= size, "model.vocab_size", size, f"at least {tokenizer.size} (tokenizer)")
    task = curation.open_task(config.task, config.algorithm.prompts.template)
    _validate_call(task.reward, "task().reward", Prompt(0, ""), "", EOS)
    return tokenizer, task


def _validate_model(m: ModelConfig) -> None:
    expect(m.heads % m.kv_heads == 0, "model.heads", m.heads, f"a multiple of model.kv_heads = {m.kv_heads}")
    if m.rope_scaling is not None:
        low, high = m.rope_scaling.low_freq_factor, m.rope_scaling.high_freq_factor
        expect(low < high, "model.rope_scaling.low_freq_factor", low, f"less than high_freq_factor = {high}")


def _validate_sampler(r: Rollout, ways: int) -> None:
    chosen = "top_p" if r.top_p < 1 else "top_k"
    expected = "no filter, or rollout.allow_filtered=True: the sampler-learner gap would measure the filter"
    expect(r.allow_filtered or (r.top_k, r.top_p) == (0, 1), f"rollout.{chosen}", getattr(r, chosen), expected)
    expect(r.slots % ways == 0, "rollout.slots", r.slots, f"a multiple of mesh.data × mesh.fsdp = {ways}")
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


def _validate_algorithm(a: Algorithm, r: Rollout, ways: int, micro_batches: int) -> None:
    if r.group_size == 1:
        expect(a.group_filter is None, "rollout.group_size", 1, "at least 2 for algorithm.group_filter")
        expected = f"at least 2 for {unbound(a.advantage)[0].__name__}: the advantage of one answer alone is 0"
        expect(one_answer_suffices(a), "rollout.group_size", 1, expected)
    resample, template = a.prompts.resample, a.prompts.template
    expect(resample or a.group_filter, "algorithm.prompts.resample", resample, "True without algorithm.group_filter")
    expected = "None if algorithm.prompts.prioritized: one order of prompts"
    expect(not a.prompts.prioritized or r.difficulty is None, "rollout.difficulty", r.difficulty, expected)
    _validate_call(template, "algorithm.prompts.template", Prompt(0, ""))
    if wants(a.shaping.reward, "n_gold"):
        expected = "one that sets meta['n_gold'], for algorithm.shaping.reward"
        expect("n_gold" in template(Prompt(0, "?")).meta, "algorithm.prompts.template", template, expected)
    if a.critic is not None:
        of_a_device, parts = r.prompts // (ways * micro_batches), a.critic.mini_batches
        expected = "a divisor of rollout.prompts / (mesh.data × mesh.fsdp × micro_batches) = "
        expected += f"{of_a_device} (--set algorithm.critic.mini_batches={math.gcd(of_a_device, parts)})"
        expect(of_a_device % parts == 0, "algorithm.critic.mini_batches", parts, expected)
    dry_run(a, r.max_response_tokens)


def _validate_prime(prime: Prime | None, parts: int) -> None:
    """parts: data × fsdp × micro_batches, into which a batch of traces is divided."""
    if prime is None:
        return
    expect(prime.stages, "prime.stages", prime.stages, "at least one Stage(…)")
    for i, stage in enumerate(prime.stages):
        weights = list(stage.mixture.values())
        sound = min(weights, default=-1) >= 0 and sum(weights) > 0
        expect(sound, f"prime.stages.{i}.mixture", stage.mixture, "behaviours with weights, none below 0, not all 0")
    n, expected = prime.traces_per_batch, f"a positive multiple of mesh.data × mesh.fsdp × micro_batches = {parts}"
    expect(n > 0 and n % parts == 0, "prime.traces_per_batch", n, expected)
    if prime.task is not None:
        _validate_call(prime.task, "prime.task")


def _validate_call(make: Callable, name: str, *arguments: Any) -> None:
    """`make` can be called with the arguments; a function that it has bound, with as many as its annotation says."""
    bound = make if isinstance(make, partial) else partial(make)
    fn = bound.func
    try:
        inspect.signature(fn).bind(*bound.args, *arguments, **bound.keywords)
    except TypeError as error:
        raise ValueError(f"{name}: {getattr(fn, '__name__', fn)}: {error}") from error
    for keyword, value in unbound(bound)[1].items():
        hint = functions.hints(fn).get(keyword)
        if functions.is_function(hint):
            coerce(hint, value, f"{name}.{keyword}")
            taken = next(iter(typing.get_args(hint)), None)
            if isinstance(taken, list):
                _validate_call(value, f"{name}.{keyword}", *taken)


def _types(node: Any, path: str) -> None:
    hints = typing.get_type_hints(type(node))
    for f in dataclasses.fields(node):
        value, where = getattr(node, f.name), f"{path}{f.name}"
        coerce(hints[f.name], value, where)
        expect(not isinstance(value, list), where, value, "a tuple")  # --set takes a list for it: it makes a tuple
        for expected, holds, numbers in RULES:
            if value is not None and f.name in numbers.get(type(node), "").split():
                expect(holds(value), where, value, expected)
        for i, inner in enumerate(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(inner):
                _types(inner, f"{where}.{i}." if isinstance(value, tuple) else f"{where}.")
