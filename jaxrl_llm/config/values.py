"""What a field may hold: a value of its type, or a function, by name and with keywords; and changes of it by path."""

import ast
import importlib
import inspect
import math
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.types import expect, nearest


def unbound(fn: Callable) -> tuple[Callable, dict[str, Any]]:
    """A function and the keywords that partials have bound; arguments bound by position get their names."""
    if not isinstance(fn, partial):
        return fn, {}
    return fn.func, {**inspect.signature(fn.func).bind_partial(*fn.args).arguments, **fn.keywords}


def hints(fn: Callable) -> dict[str, Any]:
    """Its parameters' types."""
    try:
        return typing.get_type_hints(fn)
    except Exception:  # an annotation that cannot be evaluated checks nothing
        return {}


def is_function(hint: Any) -> bool:
    """Whether a field of this type holds a function."""
    return hint is Callable or hint is typing.Callable or typing.get_origin(hint) is Callable


def reference(fn: Callable, path: str) -> str:
    """module:name. A module that lies beside an experiment is named by its file: only from there it can be imported."""
    module, name = sys.modules.get(getattr(fn, "__module__", None)), getattr(fn, "__qualname__", "")
    found = getattr(module, name, None)
    if fn not in (found, getattr(found, "fn", None)):  # the latter of a reward that a decorator has wrapped
        raise ValueError(f"{path} is {fn!r}; expected a function with a name of its own in a module")
    file = Path(getattr(module, "__file__", None) or "")
    beside = {Path(m).parent for m in sys.modules if m.endswith(".py")}
    return f"{file if file.parent in beside else module.__name__}:{name}"


def function(text: str, folder: Path | None) -> Callable:
    """The function that `reference` has named. `folder`: a run's folder, where a copy of the experiment file lies."""
    module_name, _, name = text.rpartition(":")
    if module_name.endswith(".py"):
        path = Path(module_name)  # files beside it may be imported, so the original comes before the run's copy of it
        module = load_module(path if path.is_file() or folder is None else folder / path.name)
    else:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ValueError(f"{text}: {error}; expected module:function") from error
    if not hasattr(module, name):
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise ValueError(f"{text}: {module_name} has no {name!r}; {nearest(name, defined)}")
    return getattr(module, name)


def load_module(path: Path) -> types.ModuleType:
    """Run a Python file as a module, once; files beside it can be imported by name.

    Raises ValueError when it isn't there, and with the line at which it fails.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"experiment {path}: no such file")
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("__file__") == str(path):
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = str(path)  # two experiments may have one stem
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = name
    try:
        exec(compile(path.read_bytes(), name, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 0
        raise ValueError(f"experiment {path}:{line}: {type(error).__name__}: {error}") from error
    return module


VALUE = ""  # among a field's changes: what takes its place, before its own fields change; no field has this name


def override(config: Any, *assignments: str) -> Any:
    """`config` with every `path.to.field=value`; of two for one field the last counts.

    Raises ValueError with the nearest name for an unknown path.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        *parents, name = path.split(".")
        expect(equals and name and all(parents), "--set", assignment, "path.to.field=value")
        inner = changes
        for parent in parents:
            inner = inner.setdefault(parent, {})
        try:
            inner[name] = {VALUE: ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))}
        except (ValueError, SyntaxError):  # no Python literal: the text stands for itself
            inner[name] = {VALUE: text}
    return _changed(config, changes, "")  # each node is built once: fields that need each other come in any order


def _changed(node: Any, changes: dict[str, Any], path: str) -> Any:
    """`node` with the changes of its fields: {name: {VALUE: its new value, its own fields' names: …}}."""
    owner = repr(node)
    if is_dataclass(node):
        owner, build = type(node).__name__, partial(replace, node)
        now, known = vars(node), typing.get_type_hints(type(node))
    elif callable(node):
        fn, keywords = unbound(node)
        owner, build = fn.__name__, partial(partial, fn, **keywords)
        now = {n: p.default for n, p in inspect.signature(fn).parameters.items() if p.default is not p.empty} | keywords
        known = {n: hints(fn).get(n, Callable if callable(v) else Any) for n, v in now.items()}
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
    """`value` as `hint` wants it, or ValueError. Ints pass for floats, lists for tuples, module:name for a function."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if isinstance(value, str) and ":" in value and any(map(is_function, (hint, *args))):
        return function(value, None)
    if origin in (typing.Union, types.UnionType):
        if isinstance(value, Mapping) and (whole := [a for a in args if is_dataclass(a)]):
            return coerce(whole[0], value, where)  # whose error says which of its fields
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
    elif is_function(hint):
        if callable(value):
            return value
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return {k: coerce(args[1], v, f"{where}.{k}") for k, v in value.items()}
    elif is_dataclass(hint) and isinstance(value, Mapping):
        if all(p.default is not p.empty for p in inspect.signature(hint).parameters.values()):
            return _changed(hint(), {k: {VALUE: v} for k, v in value.items()}, f"{where}.")
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        expect(math.isfinite(value), where, value, "a finite number")
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = re.sub(r"(typing|collections\.abc)\.", "", str(hint)) if origin else getattr(hint, "__name__", None)
    raise ValueError(f"{where}: {value!r} is not valid; expected {expected}")
