"""A config from an experiment file or a run's folder, and its JSON both ways."""

import dataclasses
import json
import types as pytypes
import typing
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm import __version__
from jaxrl_llm.config import values
from jaxrl_llm.config.tree import Config
from jaxrl_llm.config.validation import validate
from jaxrl_llm.objective.algorithms import ALGORITHMS, Algorithm
from jaxrl_llm.types import nearest


def to_json(node: Any, path: str = "config", keyword: bool = False) -> Any:
    """Config → what `json.dumps` takes. A function becomes module:name (path.py:name in an experiment file).

    `keyword`: inside of a partial, where functions and dataclasses say what they are, as no field's type tells.
    Raises ValueError for what could not be read back: a lambda, an inner function, an array.
    """
    inner = lambda value, name: to_json(value, f"{path}.{name}", keyword)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {f.name: inner(getattr(node, f.name), f.name) for f in dataclasses.fields(node)}
        return {"instance": values.reference(type(node), path), "with": fields} if keyword else fields
    if isinstance(node, tuple | list):
        return [inner(v, i) for i, v in enumerate(node)]
    if isinstance(node, Mapping) and all(isinstance(k, str) for k in node):
        return {k: inner(v, k) for k, v in node.items()}
    if callable(node):
        fn, bound = values.unbound(node)
        reference, bound = values.reference(fn, path), {k: to_json(v, f"{path}.{k}", True) for k, v in bound.items()}
        return {"function": reference, "with": bound} if bound or keyword else reference
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise ValueError(f"{path} is {node!r}; expected numbers, text, tuples, mappings by name, functions or dataclasses")


VERSION = "jaxrl_llm"  # beside the config's own fields in a run's config.json: the version that wrote it


def dumps(config: Config) -> str:
    """The text of a run's config.json: the config, and the package's version."""
    return json.dumps({VERSION: __version__, **to_json(config)}, indent=1) + "\n"


def from_json(data: Any, folder: Path | None = None) -> Config:
    """The inverse of `to_json` and `dumps`. `folder`: the run's folder, where a copy of the experiment file lies."""
    try:
        return _decode(Config, _fields(data), folder)
    except ValueError as error:
        if isinstance(data, dict) and data.get(VERSION, __version__) != __version__:
            raise ValueError(f"{error} (written by jaxrl_llm {data[VERSION]}, this is {__version__})") from error
        raise


def _fields(data: Any) -> Any:
    return {k: v for k, v in data.items() if k != VERSION} if isinstance(data, dict) else data


def _decode(hint: Any, data: Any, folder: Path | None) -> Any:
    """hint: of the field; Any: a partial's keyword, as `to_json` wrote it. Lists are tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, pytypes.UnionType):
        return None if data is None else _decode(next(a for a in args if a is not type(None)), data, folder)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        if not isinstance(data, dict):
            raise ValueError(f"config: {data!r}; expected the fields of a {hint.__name__}")
        for name in set(data) - set(hints):
            raise ValueError(f"config: no field {name!r} in {hint.__name__}; {nearest(name, list(hints))}")
        try:
            return hint(**{k: _decode(hints[k], v, folder) for k, v in data.items()})
        except TypeError as error:  # a field without a default is missing
            raise ValueError(f"config: {error}") from error
    if isinstance(data, list):
        return tuple(_decode(args[0] if args else Any, v, folder) for v in data)
    if values.is_function(hint) and isinstance(data, str):
        return values.function(data, folder)
    if origin is Mapping and isinstance(data, dict) and dataclasses.is_dataclass(args[1]):
        return {k: _decode(args[1], v, folder) for k, v in data.items()}
    if not isinstance(data, dict) or origin is Mapping:
        return data
    kind = next((k for k in ("function", "instance") if k in data), None)
    keywords = {k: _decode(Any, v, folder) for k, v in (data["with"] if kind else data).items()}
    if kind is None:
        return keywords
    fn = values.function(data[kind], folder)
    return fn(**keywords) if kind == "instance" else partial(fn, **keywords) if keywords else fn


def named(algorithm: str) -> Algorithm:
    """A row of ALGORITHMS. Raises ValueError with the nearest name for an unknown one."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: no such method; {nearest(algorithm, list(ALGORITHMS))}")
    return ALGORITHMS[algorithm]


def load(path: Path | str, assignments: tuple[str, ...] = (), algorithm: str | None = None) -> Config:
    """CONFIG of an experiment file, or the config of a run (its folder or config.json), with overrides, validated.

    A path that the file's tasks, tokenizer or init take (a keyword annotated as Path) may be relative to the file.
    algorithm: the row of ALGORITHMS that takes the place of its own before the overrides.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"run {path.parent}: config.json is missing; expected the folder of a run")
    if path.suffix == ".json":
        try:
            config = from_json(json.loads(path.read_text()), path.parent)
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"config {path}: {error}; expected the config.json of a run") from error
    else:
        config = getattr(values.load_module(path), "CONFIG", None)
        if not isinstance(config, Config):
            raise ValueError(f"experiment {path}: CONFIG is {config!r}; expected CONFIG = Config(…)")
        config = _located(config, path.resolve().parent)
    if algorithm is not None:
        config = dataclasses.replace(config, algorithm=named(algorithm))
    return validate(values.override(config, *assignments))


def _located(config: Config, folder: Path) -> Config:
    """The config, in whose tasks, tokenizer and init paths of what lies in `folder` are absolute."""

    def located(make: Any) -> Any:
        fn, keywords = values.unbound(make)
        known = {n: h for n, h in values.hints(fn).items() if isinstance(keywords.get(n), str | Path)}
        paths = [n for n, h in known.items() if Path in (h, *typing.get_args(h))]
        found = {n: str(folder / keywords[n]) for n in paths if (folder / keywords[n]).exists()}
        return partial(fn, **keywords | found) if found else make

    if config.prime is not None and config.prime.task is not None:
        config = dataclasses.replace(config, prime=dataclasses.replace(config.prime, task=located(config.prime.task)))
    suites = {n: dataclasses.replace(s, task=located(s.task)) for n, s in config.evaluation.suites.items()}
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, suites=suites))
    init = config.init and located(config.init)
    return dataclasses.replace(config, task=located(config.task), tokenizer=located(config.tokenizer), init=init)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The fields in which two JSON trees differ, as `path: old → new`; the version that wrote them does not count."""
    old, new = _fields(old), _fields(new)
    if isinstance(old, dict) and isinstance(new, dict):
        names = list(dict.fromkeys([*old, *new]))
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{path}.{n}" if path else n)]
    return [] if old == new else [f"{path}: {old} → {new}"]
