"""Symmetric int8 and int4: x ≈ n·scale with n small whole numbers, and a scale for each slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Quantized(NamedTuple):
    """Whole numbers and what they are to be multiplied by. A pytree, so that it travels like an array."""

    x: Int[Array, "*n"]  # int8 or int4
    scale: Float[Array, "*n"]  # 1 along the axes that share it


def quantize(x: Float[Array, "*n"], axes: int | tuple[int, ...], dtype: str = "int8") -> Quantized:
    """x in int8 or int4; the numbers along `axes` share a scale, max |x| / 127 or max |x| / 7.

    The error is at most half of the scale.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), 1e-30) / jnp.iinfo(dtype).max
    return Quantized(jnp.round(x / scale).astype(dtype), scale)


def shared_axes(axes: tuple[str, ...]) -> tuple[int, ...]:
    """Of a matrix, whose axes have these names, those along which quantized numbers share a scale: those that a product
    sums over, or of the embedding its width.
    """
    stacked = int(axes[0] == "layers")
    first, last = axes[stacked], len(axes) - 1
    if first in ("embed", "expert"):
        return (stacked + (first == "expert"),)
    return (last,) if first == "vocab" else tuple(range(stacked, last))


def dequantized(tree: Any, dtype: Any) -> Any:
    """The tree with arrays in the place of Quantized ones, in `dtype`."""
    restore = lambda x: (x.x.astype(jnp.float32) * x.scale).astype(dtype) if isinstance(x, Quantized) else x
    return jax.tree.map(restore, tree, is_leaf=lambda x: isinstance(x, Quantized))
