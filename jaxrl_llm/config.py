"""One tree of frozen dataclasses: what a run is. Overrides by path, validation before any device work, JSON both ways.

Functions are configuration: a field may hold a function or a `functools.partial`, and a path may go on into the
partial's keywords (`algorithm.loss.clip_high=0.3`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import types as pytypes
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.data import tokenizers
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.optim import Optimizer


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
    slots: int = 0  # prompts decoded at once; 0: all
    tokens_per_call: int = 32
    max_rounds: int = 10  # of sampling before a group filter gives up


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


# --- overrides ----------------------------------------------------------------------------------------------------


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _parse(text: str) -> Any:
    """A Python literal; any other text stands for itself."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def override(config: Any, assignment: str) -> Any:
    """`config` with one `path.to.field=value`. Raises ValueError with the nearest name for an unknown path."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment}: expected path.to.field=value")
    return _set(config, path.split("."), _parse(text), path)


def _set(node: Any, path: list[str], value: Any, full: str) -> Any:
    name, rest = path[0], path[1:]
    if dataclasses.is_dataclass(node):
        hints = typing.get_type_hints(type(node))
        if name not in hints:
            raise ValueError(f"{full}: no field {name!r} in {type(node).__name__}; {_nearest(name, list(hints))}")
        if rest:
            return replace(node, **{name: _set(getattr(node, name), rest, value, full)})
        return replace(node, **{name: _coerce(hints[name], value, full)})
    if callable(node):
        fn, keywords = (node.func, node.keywords) if isinstance(node, partial) else (node, {})
        known = [n for n, p in inspect.signature(fn).parameters.items() if p.default is not p.empty]
        if name not in known:
            raise ValueError(f"{full}: {fn.__name__} takes no {name!r}; {_nearest(name, known)}")
        if rest:
            raise ValueError(f"{full}: {name} of {fn.__name__} has no fields")
        return partial(fn, **{**keywords, name: value})
    if isinstance(node, tuple) and name.isdigit() and int(name) < len(node):
        i = int(name)
        return (*node[:i], _set(node[i], rest, value, full) if rest else value, *node[i + 1 :])
    if isinstance(node, Mapping) and not rest:
        return {**node, name: value}
    raise ValueError(f"{full}: {node!r} has no field {name!r}")


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` wants it, or ValueError. Ints pass for floats, lists for tuples, module:name for functions."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if origin in (typing.Union, pytypes.UnionType):
        for option in sorted(args, key=lambda a: a is not type(value)):
            try:
                return _coerce(option, value, where)
            except ValueError:
                continue
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_coerce(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    elif hint is Callable or origin is Callable or hint is typing.Callable:
        if callable(value):
            return value
        if isinstance(value, str) and ":" in value:
            return _function(value, None)
    elif origin is not None and isinstance(value, Mapping):  # Mapping[str, float]
        return dict(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = getattr(hint, "__name__", None) if origin is None else str(hint).replace("typing.", "")
    raise ValueError(f"{where}: {value!r} is not valid; expected {expected}")


# --- validation ---------------------------------------------------------------------------------------------------


def validate(config: Config) -> Config:
    """The same config. Raises ValueError that names the field, its value and what was expected."""
    r, a, m = config.rollout, config.algorithm, config.mesh
    _types(config, "")
    at_least = {
        1: {
            "steps": config.steps,
            "micro_batches": config.micro_batches,
            "rollout.prompts": r.prompts,
            "rollout.group_size": r.group_size,
            "rollout.max_prompt_tokens": r.max_prompt_tokens,
            "rollout.max_response_tokens": r.max_response_tokens,
            "rollout.tokens_per_call": r.tokens_per_call,
            "rollout.max_rounds": r.max_rounds,
            "mesh.data": m.data,
            "mesh.fsdp": m.fsdp,
            "mesh.tensor": m.tensor,
            "evaluation.problems": config.evaluation.problems,
            "evaluation.samples": config.evaluation.samples,
            "checkpoint.every": config.checkpoint.every,
            "checkpoint.keep": config.checkpoint.keep,
            "algorithm.updates_per_batch": a.updates_per_batch,
        },
        0: {"rollout.slots": r.slots, "rollout.top_k": r.top_k, "evaluation.every": config.evaluation.every},
    }
    for least, fields in at_least.items():
        for name, value in fields.items():
            _expect(value >= least, name, value, f"at least {least}")
    _expect(r.temperature > 0, "rollout.temperature", r.temperature, "a positive number (the learner divides by it)")
    _expect(0 < r.top_p <= 1, "rollout.top_p", r.top_p, "a number in (0, 1]")
    filtered = r.top_k > 0 or r.top_p < 1
    _expect(
        not filtered or r.allow_filtered,
        "rollout.top_p" if r.top_p < 1 else "rollout.top_k",
        r.top_p if r.top_p < 1 else r.top_k,
        "no filter, or rollout.allow_filtered=True: the sampler-learner gap would measure the filter",
    )
    _expect(0 <= config.seed < 2**31, "seed", config.seed, "an integer in [0, 2^31)")
    ways, parts = m.data * m.fsdp, a.updates_per_batch * config.micro_batches
    _expect(
        r.prompts % (ways * parts) == 0,
        "rollout.prompts",
        r.prompts,
        f"a multiple of mesh.data × mesh.fsdp × algorithm.updates_per_batch × micro_batches = "
        f"{m.data} × {m.fsdp} × {a.updates_per_batch} × {config.micro_batches}",
    )
    _expect(r.slots % ways == 0, "rollout.slots", r.slots, f"a multiple of mesh.data × mesh.fsdp = {ways}")
    name = getattr(a.advantage, "__name__", "")
    _expect(name != "rloo" or r.group_size > 1, "rollout.group_size", r.group_size, "at least 2 for rloo")
    if a.group_filter is not None:
        _expect(r.group_size > 1, "rollout.group_size", r.group_size, "at least 2 with algorithm.group_filter")
    return config


def _expect(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def _types(node: Any, path: str) -> None:
    hints = typing.get_type_hints(type(node))
    for f in dataclasses.fields(node):
        value, where = getattr(node, f.name), f"{path}{f.name}"
        _coerce(hints[f.name], value, where)
        if dataclasses.is_dataclass(value):
            _types(value, f"{where}.")


# --- JSON ---------------------------------------------------------------------------------------------------------


def to_json(node: Any) -> Any:
    """Config → what `json.dumps` takes. A function becomes module:name (path.py:name in an experiment file)."""
    if dataclasses.is_dataclass(node):
        return {f.name: to_json(getattr(node, f.name)) for f in dataclasses.fields(node)}
    if isinstance(node, partial):
        return {"function": to_json(node.func), "with": {k: to_json(v) for k, v in node.keywords.items()}}
    if callable(node):
        file = getattr(sys.modules.get(node.__module__), "__experiment__", None)
        return f"{file or node.__module__}:{node.__qualname__}"
    if isinstance(node, tuple | list):
        return [to_json(v) for v in node]
    if isinstance(node, Mapping):
        return {k: to_json(v) for k, v in node.items()}
    return node


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
        unknown = [k for k in data if k not in hints]
        if unknown:
            raise ValueError(f"config: no field {unknown[0]!r} in {hint.__name__}; {_nearest(unknown[0], list(hints))}")
        return hint(**{k: _decode(hints[k], v, folder) for k, v in data.items()})
    if hint is Callable or origin is Callable or hint is typing.Callable:
        if isinstance(data, dict):
            keywords = {k: _plain(v, folder) for k, v in data["with"].items()}
            return partial(_function(data["function"], folder), **keywords)
        return _function(data, folder)
    if origin is tuple:
        return tuple(_decode(args[0], v, folder) for v in data)
    return data


def _plain(value: Any, folder: Path | None) -> Any:
    """A partial's keyword: lists are tuples, module:name strings of functions are functions."""
    if isinstance(value, list):
        return tuple(_plain(v, folder) for v in value)
    if isinstance(value, dict) and set(value) == {"function", "with"}:
        return _decode(Callable, value, folder)
    if isinstance(value, str) and (value.startswith("jaxrl_llm.") or ".py:" in value) and ":" in value:
        return _function(value, folder)
    return value


def _function(reference: str, folder: Path | None) -> Callable:
    module_name, _, name = reference.rpartition(":")
    if module_name.endswith(".py"):
        path = Path(module_name)  # files beside it may be imported, so the original comes before the run's copy of it
        module = load_module(path if path.is_file() or folder is None else folder / path.name)
    else:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ValueError(f"{reference}: {error}; expected module:function") from error
    if not hasattr(module, name):
        raise ValueError(f"{reference}: {module_name} has no {name!r}; {_nearest(name, dir(module))}")
    return getattr(module, name)


def load_module(path: Path) -> pytypes.ModuleType:
    """Run a Python file as a module; files beside it can be imported by name. Raises ValueError when it isn't there."""
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"experiment {path}: no such file")
    for module in list(sys.modules.values()):
        if getattr(module, "__experiment__", None) == str(path):
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"jaxrl_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    module.__experiment__ = str(path)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load(path: Path | str, assignments: tuple[str, ...] = ()) -> Config:
    """CONFIG of an experiment file with overrides, validated."""
    module = load_module(Path(path))
    if not isinstance(getattr(module, "CONFIG", None), Config):
        raise ValueError(f"experiment {path}: CONFIG is missing; expected CONFIG = Config(…)")
    config = module.CONFIG
    for assignment in assignments:
        config = override(config, assignment)
    return validate(config)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two JSON trees differ, as `path: old → new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = list(dict.fromkeys([*old, *new]))
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{path}.{n}" if path else n)]
    return [] if old == new else [f"{path}: {old} → {new}"]
