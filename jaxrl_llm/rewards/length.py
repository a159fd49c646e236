"""Rewards that shape the length of a response. Lengths are in tokens, never in characters."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from jaxrl_llm.arrays import AnyArray
from jaxrl_llm.types import expect

Lengths, Correct, Rewards = Real[AnyArray, "B"], Bool[AnyArray, "B"], Float[Array, "B"]


def soft_overlong(
    n_tokens: Real[AnyArray, "..."] | int | float, max_len: float, cache_len: float
) -> Float[Array, "..."]:
    """A penalty that grows linearly over the last `cache_len` tokens before the limit; added to the reward.

        0 if n <= max_len − cache_len;   ((max_len − cache_len) − n) / cache_len if n <= max_len;   −1 beyond

    n_tokens: lengths in tokens, any shape;  max_len: the limit, tokens;  cache_len: width of the slope, tokens.
    Returns float32 in [−1, 0] of the shape of n_tokens.
    Raises ValueError unless 0 < cache_len <= max_len.  DAPO, arXiv 2503.14476 eq. 13.
    """
    expect(0 < cache_len <= max_len, "cache_len", cache_len, f"0 < cache_len <= max_len={max_len!r}")
    n = jnp.asarray(n_tokens, jnp.float32)
    return jnp.clip((max_len - cache_len - n) / cache_len, -1.0, 0.0)


def kimi_length(n_tokens: Real[AnyArray, "P G"], correct: Bool[AnyArray, "P G"]) -> Float[Array, "P G"]:
    """Among the answers to one prompt, the shorter are favoured, and a wrong one is never rewarded for being short.

        λ = ½ − (n − min n)/(max n − min n);   correct: λ;   wrong: min(0, λ);   0 if all have one length

    n_tokens, correct: [P,G];  min and max over the group.  Returns float32 in [−½, ½].  Kimi k1.5, arXiv 2501.12599.
    """
    n = jnp.asarray(n_tokens, jnp.float32)
    least, most = n.min(axis=1, keepdims=True), n.max(axis=1, keepdims=True)
    short = 0.5 - (n - least) / jnp.where(most == least, 1.0, most - least)
    return jnp.where(most == least, 0.0, jnp.where(jnp.asarray(correct), short, jnp.minimum(short, 0.0)))


def l1_exact(n_tokens: Lengths, n_gold: Lengths, correct: Correct, *, alpha: float = 3e-4) -> Rewards:
    """The whole reward of an answer whose prompt asks for n_gold tokens.

        R = 1[correct] − alpha·|n_gold − n|

    n_tokens, n_gold: tokens;  alpha >= 0: reward per token.  L1-Exact, arXiv 2503.04697 eq. 1.
    """
    expect(alpha >= 0, "alpha", alpha, "a number >= 0")
    return jnp.asarray(correct, jnp.float32) - alpha * jnp.abs(_tokens_left(n_tokens, n_gold))


def l1_max(n_tokens: Lengths, n_gold: Lengths, correct: Correct, *, alpha: float = 3e-4, delta: float = 0.5) -> Rewards:
    """The whole reward of an answer whose prompt asks for n_gold tokens at most.

        R = 1[correct]·clip(alpha·(n_gold − n) + delta, 0, 1)

    n_tokens, n_gold: tokens;  alpha >= 0: reward per token;  delta: reward of a correct answer of n_gold tokens.
    L1-Max, arXiv 2503.04697 eq. 2.
    """
    expect(alpha >= 0, "alpha", alpha, "a number >= 0")
    return jnp.asarray(correct, jnp.float32) * jnp.clip(alpha * _tokens_left(n_tokens, n_gold) + delta, 0.0, 1.0)


def _tokens_left(n_tokens: Lengths, n_gold: Lengths) -> Float[Array, "B"]:
    return jnp.asarray(n_gold, jnp.float32) - jnp.asarray(n_tokens, jnp.float32)
