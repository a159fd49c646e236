"""Changing a tree of dataclasses, partials, tuples and mappings by path: `path.to.field=value`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types as pytypes
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_llm.config import functions
from jaxrl_llm.config.functions import nearest, unbound


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
            raise ValueError(f"{full}: no field {name!r} in {type(node).__name__}; {nearest(name, list(hints))}")
        if rest:
            return replace(node, **{name: _set(getattr(node, name), rest, value, full)})
        return replace(node, **{name: coerce(hints[name], value, full)})
    if callable(node):
        fn, keywords = unbound(node)
        parameters = inspect.signature(fn).parameters
        known = [n for n, p in parameters.items() if p.default is not p.empty or n in keywords]
        if name not in known:
            raise ValueError(f"{full}: {fn.__name__} takes no {name!r}; {nearest(name, known)}")
        now = keywords.get(name, parameters[name].default)
        hint = functions.hints(fn).get(name, Callable if callable(now) else Any)
        return partial(fn, **{**keywords, name: _set(now, rest, value, full) if rest else coerce(hint, value, full)})
    if isinstance(node, tuple) and name.isdigit() and int(name) < len(node):
        i = int(name)
        return (*node[:i], _set(node[i], rest, value, full) if rest else value, *node[i + 1 :])
    if isinstance(node, Mapping) and not rest:
        return {**node, name: value}
    raise ValueError(f"{full}: {node!r} has no field {name!r}")


def coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` wants it, or ValueError. Ints pass for floats, lists for tuples, module:name for functions."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if isinstance(value, str) and ":" in value and any(map(functions.is_function, (hint, *args))):
        return functions.function(value, None)
    if origin in (typing.Union, pytypes.UnionType):
        for option in sorted(args, key=lambda a: a is not type(value)):
            try:
                return coerce(option, value, where)
            except ValueError:
                continue
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin in (tuple, list, Sequence):
        if isinstance(value, list | tuple):
            return tuple(coerce(args[0], v, f"{where}.{i}") for i, v in enumerate(value))
    elif functions.is_function(hint):
        if callable(value):
            return value
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {k: coerce(args[1], v, f"{where}.{k}") for k, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = (
        getattr(hint, "__name__", None) if origin is None else re.sub(r"(typing|collections\.abc)\.", "", str(hint))
    )
    raise ValueError(f"{where}: {value!r} is not valid; expected {expected}")
