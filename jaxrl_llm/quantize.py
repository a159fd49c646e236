"""Symmetric int8: x ≈ x8·scale, with a scale for each slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8


class Quantized(NamedTuple):
    """int8 numbers and what they are to be multiplied by. A pytree, so that it travels like an array."""

    x: Int8[Array, "*n"]
    scale: Float[Array, "*n"]  # 1 along the axes that share it


def quantize(x: Float[Array, "*n"], axes: int | tuple[int, ...]) -> Quantized:
    """x in int8; the numbers along `axes` share a scale, max |x| / 127. The error is at most half of the scale."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), 1e-30) / 127
    return Quantized(jnp.round(x / scale).astype(jnp.int8), scale)


def dequantized(tree: Any, dtype: Any) -> Any:
    """The tree with arrays in the place of Quantized ones, in `dtype`."""
    restore = lambda x: (x.x.astype(jnp.float32) * x.scale).astype(dtype) if isinstance(x, Quantized) else x
    return jax.tree.map(restore, tree, is_leaf=lambda x: isinstance(x, Quantized))
