"""Which groups and which tokens an update learns from."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import AnyArray, expect


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
