"""Which groups and which tokens an update learns from."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.arrays import AnyArray
from jaxrl_llm.objective.shared import In, Mask, Out, check_clips, log_ratio, masked
from jaxrl_llm.types import expect


def mixed(correct: Bool[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """The groups with 0 < #correct < G: some answers right and some wrong. DAPO's dynamic sampling, 2503.14476."""
    return correct.any(axis=1) & ~correct.all(axis=1)


def varied(rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """The groups whose rewards differ by more than float noise; the others give no gradient. Olmo 3, 2512.13961."""
    return np.ptp(rewards, axis=1) > 1e-6 * np.maximum(1.0, np.abs(rewards).max(axis=1))


def lopti_phases(
    old_logp: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"], *, eta: float = 0.5
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """The masks of two phases: the unlikely tokens, and then all others.

        first = π_old < eta,   second = π_old >= eta,   π_old = e^old_logp

    All updates on the first mask's tokens come before those on the second's, whose ratios they move. In the other order
    training collapses.  eta in (0, 1), ValueError if not.  Low-Probability Token Isolation, arXiv 2505.12929.
    """
    expect(0 < eta < 1, "eta", eta, "a number in (0, 1)")
    unlikely = jnp.asarray(old_logp, jnp.float32) < jnp.log(eta)
    return mask & unlikely, mask & ~unlikely


def select_cov(
    logp: In,
    adv: In,
    mask: Mask,
    *,
    frac: float = 2e-4,
    low: float | None = None,
    high: float | None = None,
    key: Array | None = None,
    eligible: Mask | None = None,
) -> Bool[Array, "B T"]:
    """k tokens by the covariance of log-prob and advantage, over the whole optimiser batch.

        cov = (A − mean A)·(logp − mean logp),   k = max(1, round(frac·Σ mask)),   means over all trained tokens

    Candidates have low < cov < high where given and are `eligible`. Between bounds, a `key` draws k of them; otherwise
    the k of largest cov are taken, earlier tokens first among equals. Fewer than k candidates are all taken.
    frac in (0, 1].  arXiv 2505.22617.
    """
    expect(0 < frac <= 1, "frac", frac, "a number in (0, 1]")
    n = jnp.maximum(jnp.sum(mask), 1)
    centred = lambda x: masked(x - jnp.sum(x) / n, mask)
    cov = centred(masked(adv, mask)) * centred(masked(logp, mask))
    candidate = mask if eligible is None else mask & eligible
    candidate = candidate if low is None else candidate & (cov > low)
    candidate = candidate if high is None else candidate & (cov < high)
    drawn = key is not None and (low is not None or high is not None)
    return _largest(jax.random.uniform(key, cov.shape) if drawn else cov, candidate, frac, mask)


def select_clip_cov(
    logp: In,
    old_logp: In,
    adv: In,
    mask: Mask,
    *,
    key: Array,
    frac: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Bool[Array, "B T"]:
    """Clip-Cov's choice: k tokens at random among those with low < cov < high that PPO's clip has not stopped already.

        select_cov(…, key, eligible = not stopped),   stopped = A > 0 and r > 1+clip_high, or A < 0 and r < 1−clip_low

    clip_low, clip_high: the loss's.  arXiv 2505.22617.
    """
    check_clips(clip_low, clip_high)
    ratio, a = jnp.exp(log_ratio(logp, old_logp, mask)), masked(adv, mask)
    stopped = ((a > 0) & (ratio > 1 + clip_high)) | ((a < 0) & (ratio < 1 - clip_low))
    return select_cov(logp, adv, mask, frac=frac, low=low, high=high, key=key, eligible=~stopped)


def top_entropy(entropy: In, mask: Mask, *, frac: float = 0.2) -> Bool[Array, "B T"]:
    """The tokens where the policy is least sure: those of highest entropy in the whole optimiser batch.

        the max(1, round(frac·Σ mask)) trained tokens of largest entropy

    As a `token_filter` it edits the mask, so that the dropped tokens leave the denominators too.
    entropy: [B,T], nats;  frac in (0, 1].  arXiv 2506.01939.
    """
    expect(0 < frac <= 1, "frac", frac, "a number in (0, 1]")
    return _largest(masked(entropy, mask), mask, frac, mask)


def _largest(score: Out, candidate: Mask, frac: float, mask: Mask) -> Bool[Array, "B T"]:
    """The max(1, round(frac·Σ mask)) candidates of largest score."""
    k = jnp.maximum(1, jnp.round(frac * jnp.sum(mask)).astype(jnp.int32))
    order = jnp.argsort(jnp.where(candidate, -score, jnp.inf).reshape(-1))  # stable: earlier tokens first among equals
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return candidate & (rank < k).reshape(candidate.shape)
