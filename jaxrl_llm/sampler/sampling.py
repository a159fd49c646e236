"""One token from logits, and the log-prob of the distribution that it was really drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The training default filters nothing, so that the sampler's log-prob is the policy's."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


class Draw(NamedTuple):
    """`Sampling` of N rows as arrays, and a key for each."""

    keys: Key[Array, " N"]
    temperature: Float[Array, " N"]
    top_k: Int[Array, " N"]
    top_p: Float[Array, " N"]


def keep(logits: Float[Array, "N V"], top_k: Int[Array, " N"], top_p: Float[Array, " N"]) -> Bool[Array, "N V"]:
    """Tokens that the top-k and top-p filters leave; the likeliest always stays, ties at the border all stay."""
    descending = jnp.sort(logits, axis=-1)[:, ::-1]
    last = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1]) - 1
    border = jnp.take_along_axis(descending, last[:, None], axis=-1)
    kept = logits >= border
    descending = jnp.where(descending >= border, descending, -jnp.inf)
    probs = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of the likelier tokens
    inside = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    border = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    return kept & (logits >= jnp.minimum(border, descending[:, :1]))


def sample(
    logits: Float[Array, "N V"], draw: Draw, position: Int[Array, " N"], forced: Int[Array, " N"], filtered: bool
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """Token and log-prob per row. `logits` are fp32; a row's draw depends on its key and position alone.

    Greedy decoding draws from a point mass, so its log-prob is 0. `filtered`: some row has top-k or top-p.
    `forced`: the token where it is not negative; its log-prob is −inf if a filter would not have let it through.
    """
    greedy = draw.temperature == 0
    logits = logits / jnp.where(greedy, 1.0, draw.temperature)[:, None]
    if filtered:
        logits = jnp.where(keep(logits, draw.top_k, draw.top_p), logits, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(draw.keys, position)
    # The Gumbel-max trick of jax.random.categorical, with the argmax as two reductions: XLA's own is ten times slower
    # on a CPU.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    noisy = logits + jnp.where(greedy[:, None], 0.0, noise)
    ids = jax.lax.broadcasted_iota(jnp.int32, noisy.shape, 1)
    token = jnp.min(jnp.where(noisy == noisy.max(axis=-1, keepdims=True), ids, noisy.shape[-1] - 1), axis=-1)
    token = jnp.where(forced >= 0, forced, token)
    logp = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    return token, jnp.where(greedy, 0.0, logp)
