"""Functions as configuration: their keywords, their names in a file, and the modules that hold them."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.types import nearest


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
    if getattr(module, name, None) is not fn:
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
    module = types.ModuleType(name)
    module.__file__ = name
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), name, "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 0
        raise ValueError(f"experiment {path}:{line}: {type(error).__name__}: {error}") from error
    return module
