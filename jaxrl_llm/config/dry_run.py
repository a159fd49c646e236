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
NEEDS_VALUES = (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)


def dry_run(a: Algorithm, max_len: int) -> None:
    """Raises ValueError, with field and function, for one that raises or returns another dtype or shape than is due.

    max_len: the most tokens of a response.
    """
    tokens, mask, row, group = _array("B T"), _array("B T", bool), _array("B"), _array("P G")
    by_token = ("logp", "old_logp", "sampler_logp", "adv", "values", "kl", "entropy", "log_router_ratio")
    have = dict.fromkeys(by_token, tokens) | {"mask": mask, "selected": mask, "beta": 0.0}
    have["key"] = jax.eval_shape(lambda: jax.random.key(0))
    memory = None if a.memory is None else _called(a.memory, "memory", {"n_prompts": 7})
    of_rows = {"rewards": row, "correct": _array("B", bool), "n_tokens": _array("B", int), "n_gold": row}
    of_groups = {"rewards": group, "correct": _array("P G", bool), "n_tokens": _array("P G", int)}
    of_prompts = {"mask": _array("P G T", bool), "prompt_ids": _array("P", int), "kept": _array("P", bool)}
    of_prompts |= {"rewards": group, "lengths": _array("P G", int), "state": memory}
    for name, given, kind, axes in (
        ("loss", have, "float", ("B T",)),
        ("correction", have, "float", ("B T",)),
        ("updates.select", have, "bool", ("B T",)),
        ("updates.token_filter", have, "bool", ("B T",)),
        ("updates.phases", have, "bool", ("B T",)),
        ("token_advantage", have | {"rewards": row if a.critic is None else tokens}, "float", ("B T",)),
        ("advantage", of_prompts, "float", ("P G", "P G T")),
        ("shaping.length_reward", of_groups | {"max_len": max_len}, "number", ("P G",)),
        ("shaping.reward", of_rows | {"max_len": max_len}, "number", ("B",)),
        ("shaping.format_reward", {"text": ""}, "number", ("",)),
        ("group_filter", of_groups, "bool", ("P",)),
    ):
        fn = attrgetter(name)(a)
        if fn is None:
            continue
        out = _called(fn, name, given)
        expected, parts = f"{kind} {' or '.join(f'[{x}]' for x in axes)}", (out,)
        if name == "updates.phases":
            expected, parts = f"a tuple of {expected}", out if isinstance(out, tuple | list) else ()
        elif name == "advantage" and memory is not None:
            expected = f"{expected} and the state as {_shown(memory)}"
            parts = out[:1] if isinstance(out, tuple) and len(out) == 2 and _shown(out[1]) == _shown(memory) else ()
        elif name == "token_advantage" and isinstance(out, tuple):
            parts = out[:1]  # the second are returns
        if not parts or not all(_is(x, kind, axes) for x in parts):
            sizes = ", ".join(f"{axis} = {n}" for axis, n in SIZES.items())
            raise ValueError(f"algorithm.{name}: {_name(fn)} returns {_shown(out)}; expected {expected}, here {sizes}")


def one_answer_suffices(a: Algorithm) -> bool:
    """Whether an answer alone in its group can have an advantage: of a right and a wrong one, each drawn twice, any."""
    state = None if a.memory is None else call(a.memory, {"n_prompts": 2})
    for rewards in np.array([[[1.0], [0.0]], [[0.0], [1.0]]], np.float32):
        have = {"rewards": rewards, "lengths": np.full((2, 1), 3), "mask": np.ones((2, 1, 3), bool), "state": state}
        try:
            out = call(a.advantage, have | {"prompt_ids": np.arange(2), "kept": np.ones(2, bool)})
        except ValueError:
            return False
        adv, state = out if a.memory is not None else (out, None)
        if np.any(np.nan_to_num(adv)):
            return True
    return False


def _array(axes: str, dtype: type = float) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        [SIZES[a] for a in axes.split()], {float: jnp.float32, int: jnp.int32}.get(dtype, dtype)
    )


def _is(x: Any, kind: str, axes: tuple[str, ...]) -> bool:
    shapes = [tuple(SIZES[a] for a in names.split()) for names in axes]
    kinds = {"float": jnp.floating, "bool": jnp.bool_, "number": np.generic}
    return hasattr(x, "dtype") and x.shape in shapes and jnp.issubdtype(x.dtype, kinds[kind])


def _shown(out: Any) -> str:
    if hasattr(out, "dtype"):
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    return str(jax.tree.map(_shown, out)).replace("'", "")


def _name(fn: Callable) -> str:
    return getattr(unbound(fn)[0], "__name__", repr(fn))


def _called(fn: Callable, name: str, given: dict[str, Any]) -> Any:
    """The shapes of what fn returns. It is traced; one that runs outside of jit may need arrays' values: zeros."""
    arrays = {k: v for k, v in given.items() if k not in ("n_prompts", "max_len", "text", "beta")}
    try:
        if name != "group_filter":
            try:
                return jax.eval_shape(lambda arrays: call(fn, given | arrays), arrays)
            except NEEDS_VALUES as error:
                if not name.startswith("shaping."):
                    why = "needs the values of arrays; expected jax.numpy and no `if` on an array, as it is compiled"
                    raise ValueError(why) from error
        zeros = {k: np.zeros(x.shape, x.dtype) for k, x in arrays.items()}
        return jax.eval_shape(lambda: np.asarray(call(fn, given | zeros)))
    except Exception as error:  # whatever a function of an experiment may raise
        text = next(iter(str(error).splitlines()), "")
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        keyword = re.match(r"\w+(?= is )", text)  # an error that names a keyword gets the keyword's path
        if keyword and keyword[0] in inspect.signature(fn).parameters:
            raise ValueError(f"algorithm.{name}.{text} ({_name(fn)})") from error
        raise ValueError(f"algorithm.{name}: {_name(fn)}: {text}") from error
