"""Which groups and which tokens an update learns from."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import AnyArray


def mixed(correct: Bool[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """Groups with 0 < #correct < G: only they tell right from wrong. DAPO's dynamic sampling, 2503.14476."""
    return correct.any(axis=1) & ~correct.all(axis=1)


def varied(rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """Groups whose rewards differ by more than float noise: the others have no gradient. Olmo 3, 2512.13961."""
    return np.ptp(rewards, axis=1) > 1e-6 * np.maximum(1.0, np.abs(rewards).max(axis=1))


def lopti_phases(
    old_logp: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"], *, eta: float = 0.5
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Unlikely tokens first, then the others, each with an optimiser step of its own.

        first = π_old < eta,   second = π_old >= eta,   π_old = e^old_logp

    The second step sees ratios that the first has moved; the other order collapses.
    eta in (0, 1), ValueError if not.  Low-Probability Token Isolation, arXiv 2505.12929.
    """
    if not 0 < eta < 1:
        raise ValueError(f"eta is {eta!r}; expected a number in (0, 1)")
    unlikely = jnp.asarray(old_logp, jnp.float32) < jnp.log(eta)
    return mask & unlikely, mask & ~unlikely
