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
from jaxrl_llm.config.functions import unbound
from jaxrl_llm.types import expect, nearest


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
    owner = repr(node)
    if dataclasses.is_dataclass(node):
        owner, build = type(node).__name__, partial(replace, node)
        now, known = vars(node), typing.get_type_hints(type(node))
    elif callable(node):
        fn, keywords = unbound(node)
        owner, build = fn.__name__, partial(partial, fn, **keywords)
        now = {n: p.default for n, p in inspect.signature(fn).parameters.items() if p.default is not p.empty} | keywords
        known = {n: functions.hints(fn).get(n, Callable if callable(v) else Any) for n, v in now.items()}
    elif isinstance(node, tuple):
        now = {str(i): v for i, v in enumerate(node)}
        known, build = dict.fromkeys(now, Any), lambda **new: tuple((now | new).values())
    else:  # a mapping may get a new key; what has no fields at all ends in the error below
        now = dict(node) if isinstance(node, Mapping) else {}
        new_keys = (n for n, change in changes.items() if isinstance(node, Mapping) and set(change) == {VALUE})
        known, build = dict.fromkeys((*now, *new_keys), Any), lambda **new: now | new
    new = {}
    for name, change in changes.items():
        if name not in known:
            raise ValueError(f"{path}{name}: no field {name!r} in {owner}; {nearest(name, list(known))}")
        value = coerce(known[name], change[VALUE], path + name) if VALUE in change else now.get(name)
        inner = {n: c for n, c in change.items() if n != VALUE}
        new[name] = _changed(value, inner, f"{path}{name}.") if inner else value
    return build(**new)


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
    expected = re.sub(r"(typing|collections\.abc)\.", "", str(hint)) if origin else getattr(hint, "__name__", None)
    raise ValueError(f"{where}: {value!r} is not valid; expected {expected}")
