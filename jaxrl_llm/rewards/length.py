"""Rewards that shape the length of a response. Lengths are in tokens, never in characters."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real


def soft_overlong(
    n_tokens: Real[Array | np.ndarray, "..."] | int | float, max_len: float, cache_len: float
) -> Float[Array, "..."]:
    """A penalty that grows linearly over the last `cache_len` tokens before the limit; added to the reward.

        0 if n <= max_len − cache_len;   ((max_len − cache_len) − n) / cache_len if n <= max_len;   −1 beyond

    n_tokens: lengths in tokens, any shape;  max_len: the limit, tokens;  cache_len: width of the slope, tokens.
    Returns float32 in [−1, 0] of the shape of n_tokens.
    Raises ValueError unless 0 < cache_len <= max_len.  DAPO, arXiv 2503.14476 eq. 13.
    """
    if not 0 < cache_len <= max_len:
        raise ValueError(f"cache_len={cache_len!r}: expected 0 < cache_len <= max_len={max_len!r}")
    n = jnp.asarray(n_tokens, jnp.float32)
    return jnp.clip((max_len - cache_len - n) / cache_len, -1.0, 0.0)
