"""One token from logits, and the log-prob of the distribution that it was really drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The training default filters nothing, so that the sampler's log-prob is the policy's."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all


def keep(logits: Float[Array, "N V"], sampling: Sampling) -> Bool[Array, "N V"]:
    """Tokens that the top-k and top-p filters leave; the likeliest always stays, ties at the border all stay."""
    kept = jnp.ones(logits.shape, bool)
    descending = jnp.sort(logits, axis=-1)[:, ::-1]
    if 0 < sampling.top_k < logits.shape[-1]:
        kept &= logits >= descending[:, sampling.top_k - 1, None]
        descending = jnp.where(descending >= descending[:, sampling.top_k - 1, None], descending, -jnp.inf)
    if sampling.top_p < 1:
        probs = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # mass of the likelier tokens
        border = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        kept &= logits >= jnp.minimum(border, descending[:, :1])
    return kept


def sample(
    logits: Float[Array, "N V"], keys: Key[Array, " N"], sampling: Sampling
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """Token and log-prob per row. `logits` are fp32 and tempered already; a key is used for its row alone.

    Greedy decoding draws from a point mass, so its log-prob is 0.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(logits.shape[0], jnp.float32)
    if sampling.top_k or sampling.top_p < 1:
        logits = jnp.where(keep(logits, sampling), logits, -jnp.inf)
    # The Gumbel-max trick of jax.random.categorical, with the argmax as two reductions: XLA's own is ten times slower
    # on a CPU.
    noisy = logits + jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    ids = jax.lax.broadcasted_iota(jnp.int32, noisy.shape, 1)
    token = jnp.min(jnp.where(noisy == noisy.max(axis=-1, keepdims=True), ids, noisy.shape[-1] - 1), axis=-1)
    logp = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    return token, logp
