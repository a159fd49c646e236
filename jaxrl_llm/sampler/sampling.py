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
    """Tokens that the top-k and top-p filters leave; the likeliest always stays, ties at the border all stay.

    Top-p is of what top-k leaves. Borders are found by bisection over the floats, in 32 passes over the logits and
    without sorting them, and none when no row has that filter.
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    k = jnp.where(top_k > 0, top_k, logits.shape[-1]).astype(jnp.float32)
    kept = shifted >= _border(shifted, jnp.ones_like(shifted), k, (top_k > 0).any())
    weights = jnp.where(kept, jnp.exp(shifted), 0.0)
    nucleus = shifted >= _border(shifted, weights, top_p * weights.sum(axis=-1), (top_p < 1).any())
    return kept & (nucleus | (top_p >= 1)[:, None])


def _border(
    x: Float[Array, "N V"], weights: Float[Array, "N V"], enough: Float[Array, " N"], asked: Bool[Array, ""]
) -> Float[Array, "N 1"]:
    """The largest number t ≤ 0 so that the weights of x ≥ t are enough; x ≤ 0, with 0 among them. −inf unless asked."""

    def halve(_: int, bits: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bits  # of −t, which rises with them: there is enough at `high`, and not below `low`
        middle = (low + high) // 2
        fits = jnp.where(x >= number(middle), weights, 0.0).sum(axis=-1) >= enough
        return jnp.where(fits, low, middle + 1), jnp.where(fits, middle, high)

    number = lambda bits: -jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
    every = lambda value: jnp.full(len(x), value, jnp.uint32)
    infinity = 0x7F800000
    return number(jax.lax.fori_loop(0, jnp.where(asked, 32, 0), halve, (every(0), every(infinity)))[1])


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
