"""Arithmetic under a mask, and checks of bounds: what losses, filters and advantages share.

Values where the mask is False do not matter, not even inf or nan.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Real

from jaxrl_llm.arrays import AnyArray
from jaxrl_llm.types import expect

In = Float[AnyArray, "B T"]
Mask = Bool[AnyArray, "B T"]
Out = Float[Array, "B T"]

# Nats. e^80 = 5.5e34 leaves float32 room for advantages of some thousands; e^89 would be inf.
LOG_RATIO_LIMIT = 80.0


def masked(x: Real[AnyArray, "B T"], mask: Mask) -> Out:
    """x in float32 with 0 under the mask.

    This comes before the arithmetic: with a `where` on the result alone the gradient would still be 0·inf = nan. A
    masked token thus has log ratio 0 and advantage 0, for which every loss is 0.
    """
    return jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)


def log_ratio(logp: In, old_logp: In, mask: Mask) -> Out:
    """logp − sg[old_logp] in nats: 0 under the mask, clipped (without gradient) to ±LOG_RATIO_LIMIT."""
    d = masked(logp, mask) - masked(stop_gradient(old_logp), mask)
    return jnp.where(jnp.abs(d) > LOG_RATIO_LIMIT, jnp.sign(d) * LOG_RATIO_LIMIT, d)


def mean(x: In, mask: Mask) -> Float[Array, "B 1"]:
    """Mean over the trained tokens of each response, 0 where there are none."""
    n = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return jnp.sum(masked(x, mask), axis=1, keepdims=True) / n


def check_clips(clip_low: float, clip_high: float) -> None:
    expect(0 <= clip_low <= 1, "clip_low", clip_low, "a number in [0, 1]")
    expect(clip_high >= 0, "clip_high", clip_high, "a number >= 0")
