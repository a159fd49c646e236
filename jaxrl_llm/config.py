"""One tree of frozen dataclasses: what a run is. Validation before any device work, JSON both ways.

Functions are configuration: a field may hold a function or a `functools.partial`, and a path may go on into the
partial's keywords (`algorithm.loss.clip_high=0.3`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types as pytypes
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm import advantages, functions
from jaxrl_llm.algorithms import ALGORITHMS, Algorithm, Critic, call, wants
from jaxrl_llm.data import tokenizers
from jaxrl_llm.functions import nearest, unbound
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.optim import Optimizer
from jaxrl_llm.overrides import coerce, override
from jaxrl_llm.types import Prompt


@dataclass(frozen=True)
class Stage:
    """Part of the supervised stage: so many batches of traces, behaviours drawn with these weights."""

    batches: int
    mixture: Mapping[str, float]


@dataclass(frozen=True)
class Prime:
    """Supervised training that makes the base policy."""

    stages: tuple[Stage, ...]
    traces_per_batch: int = 64
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=2e-3, schedule="cosine", warmup=20))
    task: Callable | None = None  # None: the run's own


@dataclass(frozen=True)
class Rollout:
    prompts: int = 32  # P, per batch
    group_size: int = 8  # G
    max_prompt_tokens: int = 256
    max_response_tokens: int = 96  # the end-of-sequence token included
    temperature: float = 1.0
    top_k: int = 0  # 0: no filter. A filter makes sampler and learner differ, so it has to be allowed:
    top_p: float = 1.0
    allow_filtered: bool = False
    stop: tuple[str, ...] = ()
    slots: int = 0  # answers decoded at once; 0: those of a batch
    tokens_per_call: int = 32
    # What the sampler computes in, "": as the learner; int8 and int4: how it keeps its weights.
    dtype: Literal["", "float32", "bfloat16", "int8", "int4"] = ""
    kv_dtype: Literal["", "float32", "bfloat16", "int8"] = ""  # of its keys and values; "": as it computes
    zero_gap: bool = False  # old log-probs from the sampler's own kernels: equal to its own bit for bit
    schedule: Literal["sync", "ahead", "async"] = "sync"  # see schedules.py
    max_staleness: int = 1  # updates that an answer may be old, with schedule="async"
    budget: int = 0  # tokens that an answer may grow by before others have their turn; 0: no bound
    servers: tuple[str, ...] = ()  # host:port of samplers (jaxrl serve); none: sample in this process
    servers_ca: str | None = None  # file with the certificate that signed theirs; None: no TLS
    max_rounds: int = 10  # of sampling before a group filter gives up
    difficulty: Callable | None = None  # Prompt → number: a curriculum, one pass from the easiest to the hardest


@dataclass(frozen=True)
class Mesh:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Evaluation:
    every: int = 10  # steps; 0: only before and after
    problems: int = 512  # of the held-out split
    samples: int = 1  # answers per problem, drawn like the training ones


@dataclass(frozen=True)
class Checkpoint:
    every: int = 20  # steps
    keep: int = 2


@dataclass(frozen=True)
class Config:
    task: Callable  # () -> types.Task
    algorithm: Algorithm
    model: ModelConfig
    tokenizer: Callable = tokenizers.characters  # () -> Tokenizer
    prime: Prime | None = None  # None: random parameters
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    mesh: Mesh = Mesh()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    steps: int = 100  # batches of rollouts
    micro_batches: int = 1
    seed: int = 0
    logged_samples: int = 4  # a step, into samples.jsonl

    @property
    def total_steps(self) -> int:
        """Batches of rollouts, those from which only the critic learns included."""
        return self.steps + (0 if self.algorithm.critic is None else self.algorithm.critic.pretrain)


# --- validation ---------------------------------------------------------------------------------------------------

AT_LEAST = {
    1: "steps micro_batches rollout.prompts rollout.group_size rollout.max_prompt_tokens rollout.max_response_tokens "
    "rollout.tokens_per_call rollout.max_rounds mesh.data mesh.fsdp mesh.tensor evaluation.problems evaluation.samples "
    "checkpoint.every checkpoint.keep algorithm.updates_per_batch algorithm.epochs model.vocab_size model.layers "
    "model.width model.heads model.kv_heads model.head_width model.mlp_width",
    0: "rollout.slots rollout.budget rollout.max_staleness rollout.top_k evaluation.every logged_samples seed "
    "algorithm.length_warmup",
}


def validate(config: Config) -> Config:
    """The same config. Raises ValueError that names the field, its value and what was expected."""
    r, a, m = config.rollout, config.algorithm, config.mesh
    _types(config, "")
    for least, names in AT_LEAST.items():
        for name in names.split():
            value = attrgetter(name)(config)
            _expect(value >= least, name, value, f"at least {least}")
    _expect(config.seed < 2**31, "seed", config.seed, "less than 2^31")
    _expect(r.temperature > 0, "rollout.temperature", r.temperature, "a positive number (the learner divides by it)")
    _expect(0 < r.top_p <= 1, "rollout.top_p", r.top_p, "a number in (0, 1]")
    chosen = "top_p" if r.top_p < 1 else "top_k"
    expected = "no filter, or rollout.allow_filtered=True: the sampler-learner gap would measure the filter"
    _expect(r.allow_filtered or (r.top_k, r.top_p) == (0, 1), f"rollout.{chosen}", getattr(r, chosen), expected)
    ways, parts = m.data * m.fsdp, a.updates_per_batch * config.micro_batches
    expected = "a multiple of mesh.data × mesh.fsdp × algorithm.updates_per_batch × micro_batches = "
    expected += f"{m.data} × {m.fsdp} × {a.updates_per_batch} × {config.micro_batches}"
    _expect(r.prompts % (ways * parts) == 0, "rollout.prompts", r.prompts, expected)
    _expect(r.slots % ways == 0, "rollout.slots", r.slots, f"a multiple of mesh.data × mesh.fsdp = {ways}")
    _validate_sampler(r, ways)
    _validate_algorithm(a, config, ways)
    heads, kv_heads, head_width = config.model.heads, config.model.kv_heads, config.model.head_width
    _expect(heads % kv_heads == 0, "model.heads", heads, f"a multiple of model.kv_heads = {kv_heads}")
    _expect(head_width % 2 == 0, "model.head_width", head_width, "an even number")
    _validate_optimizer(config.optimizer, "optimizer")
    if config.prime is not None:
        _validate_prime(config.prime, ways * config.micro_batches)
    for name, make in (("task", config.task), ("tokenizer", config.tokenizer)):
        _validate_call(make, name)
    return config


def _validate_sampler(r: Rollout, ways: int) -> None:
    expected = f"0, or room for a group on each of the mesh's {ways} shards: at least {ways * r.group_size}"
    _expect(ways == 1 or r.slots == 0 or r.slots >= ways * r.group_size, "rollout.slots", r.slots, expected)
    own = r.schedule == "sync" and not r.servers and not r.budget
    expected = "False unless rollout.schedule is sync, rollout.servers is empty and rollout.budget is 0"
    _expect(own or not r.zero_gap, "rollout.zero_gap", r.zero_gap, expected)
    many = r.schedule != "sync" and not r.servers and jax.process_count() > 1
    expected = "sync with several processes that sample themselves: threads on several hosts would wait for each other"
    _expect(not many, "rollout.schedule", r.schedule, expected)
    expected = f"below rollout.max_response_tokens = {r.max_response_tokens}, or 0"
    _expect(r.budget < r.max_response_tokens, "rollout.budget", r.budget, expected)
    for i, server in enumerate(r.servers):
        host, _, port = server.rpartition(":")
        _expect(host and port.isdecimal(), f"rollout.servers.{i}", server, "host:port")


def _validate_algorithm(a: Algorithm, config: Config, ways: int) -> None:
    r, fn = config.rollout, unbound(a.advantage)[0]
    needs_two = fn.__name__ if fn in (advantages.rloo, advantages.passk) else "algorithm.group_filter"
    if a.group_filter is not None or needs_two != "algorithm.group_filter":
        _expect(r.group_size > 1, "rollout.group_size", r.group_size, f"at least 2 for {needs_two}")
    top = a.retire_above
    _expect(top is None or 0 < top <= 1, "algorithm.retire_above", top, "None or a rate in (0, 1]")
    _expect(a.resample or a.group_filter, "algorithm.resample", a.resample, "True without algorithm.group_filter")
    ordered = a.prioritized and r.difficulty is not None
    _expect(not ordered, "rollout.difficulty", r.difficulty, "None if algorithm.prioritized: one order of prompts")
    _validate_call(partial(a.prompt, Prompt(0, "")), "algorithm.prompt")
    if wants(a.reward, "n_gold"):
        named = "n_gold" in a.prompt(Prompt(0, "?")).meta
        _expect(named, "algorithm.prompt", a.prompt, "one that sets meta['n_gold'], for algorithm.reward")
    c = a.critic
    if c is not None:
        _validate_critic(c, r.prompts, ways * config.micro_batches)
    _dry_run(a, r.max_response_tokens)


def _validate_critic(c: Critic, prompts: int, ways: int) -> None:
    for name, least in (("updates", 1), ("mini_batches", 1), ("pretrain", 0)):
        _expect(getattr(c, name) >= least, f"algorithm.critic.{name}", getattr(c, name), f"at least {least}")
    for name in ("gamma", "lam"):
        _expect(0 <= getattr(c, name) <= 1, f"algorithm.critic.{name}", getattr(c, name), "a number in [0, 1]")
    _expect(c.head_std >= 0, "algorithm.critic.head_std", c.head_std, "at least 0")
    _expect(c.clip is None or c.clip > 0, "algorithm.critic.clip", c.clip, "None or a positive number")
    parts = ways * c.mini_batches
    expected = f"a divisor of rollout.prompts / (mesh.data × mesh.fsdp × micro_batches) = {prompts} / {ways}"
    _expect(prompts % parts == 0, "algorithm.critic.mini_batches", c.mini_batches, expected)
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
        "select": have,
        "token_filter": have,
        "phases": have,
        "token_advantage": have | {"rewards": row if a.critic is None else tokens},
        "advantage": of_prompts | {"mask": mask[None], "prompt_ids": ids, "state": memory, "kept": mask[:1, 0]},
        "length_reward": of_prompts,
        "reward": of_rows,
    }.items():
        fn = getattr(a, name)
        if fn is not None:
            try:
                jax.eval_shape(lambda fn=fn, given=given: call(fn, given))
            except ValueError as error:
                raise ValueError(f"algorithm.{name}: {error}") from error


def _validate_optimizer(o: Optimizer, path: str) -> None:
    for name in ("lr", "warmup", "weight_decay"):
        _expect(getattr(o, name) >= 0, f"{path}.{name}", getattr(o, name), "at least 0")
    for name in ("eps", "clip_norm"):
        _expect(getattr(o, name) > 0, f"{path}.{name}", getattr(o, name), "a positive number")
    for name in ("b1", "b2"):
        _expect(0 <= getattr(o, name) < 1, f"{path}.{name}", getattr(o, name), "a number in [0, 1)")


def _validate_prime(prime: Prime, ways: int) -> None:
    _expect(len(prime.stages) > 0, "prime.stages", prime.stages, "at least one Stage(…)")
    for i, stage in enumerate(prime.stages):
        _expect(stage.batches >= 1, f"prime.stages.{i}.batches", stage.batches, "at least 1")
        weights = list(stage.mixture.values())
        sound = min(weights, default=-1) >= 0 and sum(weights) > 0
        _expect(sound, f"prime.stages.{i}.mixture", stage.mixture, "behaviours with weights, none below 0, not all 0")
    n = prime.traces_per_batch
    divides = f"a positive multiple of mesh.data × mesh.fsdp × micro_batches = {ways}"
    _expect(n > 0 and n % ways == 0, "prime.traces_per_batch", n, divides)
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


def _expect(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def _types(node: Any, path: str) -> None:
    hints = typing.get_type_hints(type(node))
    for f in dataclasses.fields(node):
        value, where = getattr(node, f.name), f"{path}{f.name}"
        coerce(hints[f.name], value, where)
        for i, inner in enumerate(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(inner):
                _types(inner, f"{where}.{i}." if isinstance(value, tuple) else f"{where}.")


# --- JSON ---------------------------------------------------------------------------------------------------------


def to_json(node: Any, path: str = "config", keyword: bool = False) -> Any:
    """Config → what `json.dumps` takes. A function becomes module:name (path.py:name in an experiment file).

    `keyword`: inside of a partial, where functions and dataclasses say what they are, as no field's type tells.
    Raises ValueError for what could not be read back: a lambda, an inner function, an array.
    """
    inner = lambda value, name: to_json(value, f"{path}.{name}", keyword)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {f.name: inner(getattr(node, f.name), f.name) for f in dataclasses.fields(node)}
        return {"instance": functions.reference(type(node), path), "with": fields} if keyword else fields
    if isinstance(node, tuple | list):
        return [inner(v, i) for i, v in enumerate(node)]
    if isinstance(node, Mapping) and all(isinstance(k, str) for k in node):
        return {k: inner(v, k) for k, v in node.items()}
    if callable(node):
        fn, bound = unbound(node)
        reference, bound = functions.reference(fn, path), {k: to_json(v, f"{path}.{k}", True) for k, v in bound.items()}
        return {"function": reference, "with": bound} if bound or keyword else reference
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise ValueError(f"{path} is {node!r}; expected numbers, text, tuples, mappings by name, functions or dataclasses")


def from_json(data: Any, folder: Path | None = None) -> Config:
    """The inverse of `to_json`. `folder`: the run's folder, where a copy of the experiment file lies."""
    return _decode(Config, data, folder)


def _decode(hint: Any, data: Any, folder: Path | None) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, pytypes.UnionType):
        options = [a for a in args if a is not type(None)]
        return None if data is None else _decode(options[0], data, folder)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        if not isinstance(data, dict):
            raise ValueError(f"config: {data!r}; expected the fields of a {hint.__name__}")
        unknown = [k for k in data if k not in hints]
        if unknown:
            raise ValueError(f"config: no field {unknown[0]!r} in {hint.__name__}; {nearest(unknown[0], list(hints))}")
        try:
            return hint(**{k: _decode(hints[k], v, folder) for k, v in data.items()})
        except TypeError as error:  # a field without a default is missing
            raise ValueError(f"config: {error}") from error
    if functions.is_function(hint):
        return _plain(data, folder) if isinstance(data, dict) else functions.function(data, folder)
    if origin is tuple:
        return tuple(_decode(args[0], v, folder) for v in data)
    return data


def _plain(value: Any, folder: Path | None) -> Any:
    """One of a partial's keywords, as `to_json` wrote it; lists are tuples."""
    if isinstance(value, list):
        return tuple(_plain(v, folder) for v in value)
    if not isinstance(value, dict):
        return value
    if not {"function", "instance"} & set(value):
        return {k: _plain(v, folder) for k, v in value.items()}
    fn = functions.function(value["function"] if "function" in value else value["instance"], folder)
    keywords = {k: _plain(v, folder) for k, v in value["with"].items()}
    if "instance" in value:
        return fn(**keywords)
    return partial(fn, **keywords) if keywords else fn


def named(algorithm: str) -> Algorithm:
    """A row of ALGORITHMS. Raises ValueError with the nearest name for an unknown one."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: no such method; {nearest(algorithm, list(ALGORITHMS))}")
    return ALGORITHMS[algorithm]


def load(path: Path | str, assignments: tuple[str, ...] = (), algorithm: str | None = None) -> Config:
    """CONFIG of an experiment file, or the config.json of a run, with overrides, validated.

    algorithm: the row of ALGORITHMS that takes the place of its own before the overrides.
    """
    path = Path(path)
    if path.suffix == ".json":
        try:
            config = from_json(json.loads(path.read_text()), path.parent)
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"config {path}: {error}; expected the config.json of a run") from error
    else:
        config = getattr(functions.load_module(path), "CONFIG", None)
        if not isinstance(config, Config):
            raise ValueError(f"experiment {path}: CONFIG is {config!r}; expected CONFIG = Config(…)")
    if algorithm is not None:
        config = replace(config, algorithm=named(algorithm))
    for assignment in assignments:
        config = override(config, assignment)
    return validate(config)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two JSON trees differ, as `path: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = list(dict.fromkeys([*old, *new]))
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{path}.{n}" if path else n)]
    return [] if old == new else [f"{path}: {old} → {new}"]
