"""Every function of an algorithm called once, without a device, on arrays whose axes all have different sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.functions import unbound
from jaxrl_llm.objective.algorithms import Algorithm, call

SIZES = {"P": 2, "G": 3, "B": 6, "T": 5}
KINDS = {"float": jnp.floating, "bool": jnp.bool_, "number": np.generic}
NEEDS_VALUES = (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)


def dry_run(a: Algorithm, max_len: int) -> None:
    """Raises ValueError, with field and function, for one that raises or returns another dtype or shape than is due.

    max_len: the most tokens of a response.
    """
    plain = {"max_len": max_len, "text": "", "n_prompts": 7, "beta": 0.0}
    names = ("logp", "old_logp", "sampler_logp", "adv", "values", "kl", "entropy", "log_router_ratio")
    tokens = plain | dict.fromkeys(names, _array("B T")) | dict.fromkeys(("mask", "selected"), _array("B T", bool))
    tokens |= {"rewards": _array("B" if a.critic is None else "B T"), "key": jax.eval_shape(lambda: jax.random.key(0))}
    rows = plain | {"rewards": _array("B"), "correct": _array("B", bool), "n_gold": _array("B")}
    rows |= {"n_tokens": _array("B", np.int32)}
    memory = None if a.memory is None else _called(a.memory, "memory", rows)
    groups = plain | {"rewards": _array("P G"), "correct": _array("P G", bool), "state": memory}
    groups |= dict.fromkeys(("n_tokens", "lengths"), _array("P G", np.int32))
    groups |= {"mask": _array("P G T", bool), "prompt_ids": _array("P", np.int32), "kept": _array("P", bool)}
    for names, given, expected in (
        ("loss correction token_advantage", tokens, "float [B T]"),
        ("updates.select updates.token_filter", tokens, "bool [B T]"),
        ("updates.phases", tokens, "a tuple of bool [B T]"),
        ("advantage", groups, "float [P G] or [P G T]"),
        ("shaping.length_reward", groups, "number [P G]"),
        ("shaping.reward", rows, "number [B]"),
        ("shaping.format_reward", rows, "number []"),
        ("group_filter", groups, "bool [P]"),
    ):
        for name in names.split():
            _check(a, name, given, expected)


def _check(a: Algorithm, name: str, given: dict[str, Any], expected: str) -> None:
    fn = attrgetter(name)(a)
    if fn is None:
        return
    out = _called(fn, name, given)
    checked = (out,)
    if name == "updates.phases":
        checked = out if isinstance(out, tuple | list) else ()
    elif name == "advantage" and a.memory is not None:
        state = _shown(given["state"])
        expected += f" and the state as {state}"
        checked = out[:1] if isinstance(out, tuple) and len(out) == 2 and _shown(out[1]) == state else ()
    elif name == "token_advantage" and isinstance(out, tuple):
        checked = out[:1]  # the second are returns
    if not checked or not all(_is(x, expected) for x in checked):
        sizes = ", ".join(f"{axis} = {n}" for axis, n in SIZES.items())
        raise ValueError(f"algorithm.{name}: {_name(fn)} returns {_shown(out)}; expected {expected}, here {sizes}")


def one_answer_suffices(a: Algorithm) -> bool:
    """Whether an answer alone in its group can have an advantage: of a right and a wrong one, each drawn twice, any."""
    given = {"lengths": np.full((2, 1), 3), "mask": np.ones((2, 1, 3), bool), "prompt_ids": np.arange(2)}
    given |= {"kept": np.ones(2, bool), "state": a.memory and call(a.memory, {"n_prompts": 2})}
    for rewards in np.array([[[1.0], [0.0]], [[0.0], [1.0]]], np.float32):
        try:
            adv = call(a.advantage, given | {"rewards": rewards})
        except ValueError:
            return False
        if a.memory is not None:
            adv, given["state"] = adv
        if np.any(np.nan_to_num(adv)):
            return True
    return False


def _array(axes: str, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([SIZES[axis] for axis in axes.split()], dtype)


def _is(x: Any, expected: str) -> bool:
    """Whether x has the kind, and one of the shapes in brackets, that the text names."""
    shapes = [tuple(SIZES[axis] for axis in axes.split()) for axes in re.findall(r"\[([A-Z ]*)\]", expected)]
    kind = next(kind for name, kind in KINDS.items() if name in expected)
    return hasattr(x, "dtype") and x.shape in shapes and jnp.issubdtype(x.dtype, kind)


def _shown(out: Any) -> str:
    if hasattr(out, "dtype"):
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    return str(jax.tree.map(_shown, out)).replace("'", "")


def _name(fn: Callable) -> str:
    return getattr(unbound(fn)[0], "__name__", repr(fn))


def _called(fn: Callable, name: str, given: dict[str, Any]) -> Any:
    """The shapes of what fn returns. It is traced; one that runs outside of jit may need arrays' values: zeros."""
    arrays = {k: v for k, v in given.items() if not isinstance(v, int | float | str)}
    try:
        if name != "group_filter":
            try:
                return jax.eval_shape(lambda arrays: call(fn, given | arrays), arrays)
            except NEEDS_VALUES as error:
                if not name.startswith("shaping."):
                    why = "needs the values of arrays; expected jax.numpy and no `if` on an array, as it is compiled"
                    raise ValueError(why) from error
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), arrays)
        return jax.eval_shape(lambda: np.asarray(call(fn, given | zeros)))
    except Exception as error:  # whatever a function of an experiment may raise
        text = str(error).partition("\n")[0]
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        keyword, names_it, _ = text.partition(" is ")
        if names_it and keyword in inspect.signature(fn).parameters:
            raise ValueError(f"algorithm.{name}.{text} ({_name(fn)})") from error
        raise ValueError(f"algorithm.{name}: {_name(fn)}: {text}") from error
