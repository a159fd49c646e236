"""Changing a tree of dataclasses, partials, tuples and mappings by path: `path.to.field=value`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import types as pytypes
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_llm.config import functions
from jaxrl_llm.config.functions import nearest, unbound
from jaxrl_llm.types import expect


def _parse(text: str) -> Any:
    """A Python literal; any other text stands for itself."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


VALUE = ""  # among a field's changes: what takes its place, before its own fields change; no field has this name


def override(config: Any, *assignments: str) -> Any:
    """`config` with every `path.to.field=value`, each node built once, so that fields which need each other may come
    in any order; of two values for one field the last counts. Raises ValueError with the nearest name for an unknown
    path.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        *parents, name = path.split(".")
        expect(equals and name and all(parents), "--set", assignment, "path.to.field=value")
        inner = changes
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = {VALUE: _parse(text)}
    return _changed(config, changes, "")


def _changed(node: Any, changes: dict[str, Any], path: str) -> Any:
    """`node` with the changes of its fields: {name: {VALUE: its new value, its own fields' names: …}}."""
    if dataclasses.is_dataclass(node):
        known = typing.get_type_hints(type(node))
        new = {n: _field(getattr(node, n, None), known, n, c, path, type(node).__name__) for n, c in changes.items()}
        return replace(node, **new)
    if callable(node):
        fn, keywords = unbound(node)
        parameters = inspect.signature(fn).parameters
        now = {
            n: keywords.get(n, p.default) for n, p in parameters.items() if n in keywords or p.default is not p.empty
        }
        known = {n: functions.hints(fn).get(n, Callable if callable(v) else Any) for n, v in now.items()}
        new = {n: _field(now.get(n), known, n, c, path, fn.__name__) for n, c in changes.items()}
        return partial(fn, **{**keywords, **new})
    if isinstance(node, tuple | Mapping):
        items = dict(enumerate(node)) if isinstance(node, tuple) else dict(node)
        for name, change in changes.items():
            key = int(name) if isinstance(node, tuple) and name.isdigit() else name
            if key not in items and (isinstance(node, tuple) or set(change) != {VALUE}):
                raise ValueError(f"{path}{name}: {node!r} has no field {name!r}")
            items[key] = _field(items.get(key), {name: Any}, name, change, path, "")
        return tuple(items.values()) if isinstance(node, tuple) else items
    raise ValueError(f"{path}{next(iter(changes))}: {node!r} has no field {next(iter(changes))!r}")


def _field(now: Any, known: dict[str, Any], name: str, change: dict[str, Any], path: str, owner: str) -> Any:
    """The new value of one field; known: the types of its owner's fields, by name."""
    if name not in known:
        raise ValueError(f"{path}{name}: no field {name!r} in {owner}; {nearest(name, list(known))}")
    if VALUE in change:
        now = coerce(known[name], change[VALUE], path + name)
    inner = {n: c for n, c in change.items() if n != VALUE}
    return _changed(now, inner, f"{path}{name}.") if inner else now


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
        expect(math.isfinite(value), where, value, "a finite number")
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = (
        getattr(hint, "__name__", None) if origin is None else re.sub(r"(typing|collections\.abc)\.", "", str(hint))
    )
    raise ValueError(f"{where}: {value!r} is not valid; expected {expected}")
