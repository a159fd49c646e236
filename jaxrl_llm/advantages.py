"""Rewards to advantages: what each response is worth relative to the others of its group.

All functions take rewards [P,G] of any real dtype and return float32 [P,G]; none is differentiated.
A group whose rewards are equal up to float noise carries no signal: where a baseline is subtracted it gets exactly 0.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Real

AnyArray = Array | np.ndarray

# Rewards closer than this, relative to max(1, |R|), are the same reward: 0.1 + 0.2 and 0.3 must not be told apart.
NOISE = 1e-6


def raw(rewards: Real[AnyArray, "P G"]) -> Float[Array, "P G"]:
    """The reward itself, with no baseline: plain REINFORCE.

        A = R

    rewards: [P,G].  Williams 1992.
    """
    return jnp.asarray(rewards, jnp.float32)


def grpo(rewards: Real[AnyArray, "P G"], *, eps: float = 1e-6, ddof: int = 1) -> Float[Array, "P G"]:
    """The reward standardised within its group.

        A = (R − mean R) / (std R + eps)       exactly 0 in a constant group;  A = R in a group of one

    rewards: [P,G];  eps: in units of reward, outside the root;  ddof: 1 divides the variance by G−1, 0 by G.
    Raises ValueError if ddof is neither 0 nor 1, or eps is negative.  GRPO, arXiv 2402.03300.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r}: expected 0 or 1")
    if eps < 0:
        raise ValueError(f"eps={eps!r}: expected a number >= 0")
    group = rewards.shape[1]
    if group == 1:
        return raw(rewards)
    centred, constant = _centred(rewards)
    std = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / (group - ddof))
    return centred / jnp.where(constant, 1.0, std + eps)


def dr_grpo(rewards: Real[AnyArray, "P G"]) -> Float[Array, "P G"]:
    """The reward less its group's mean, not divided by the spread (which would favour too easy and too hard prompts).

        A = R − mean R

    rewards: [P,G].  Dr. GRPO, arXiv 2503.20783.
    """
    return _centred(rewards)[0]


def rloo(rewards: Real[AnyArray, "P G"]) -> Float[Array, "P G"]:
    """The reward less the mean reward of the other responses of its group.

        A_i = R_i − Σ_{j≠i} R_j / (G−1) = G/(G−1) · (R_i − mean R)

    rewards: [P,G].  Raises ValueError if G is 1: there are no others.  RLOO, arXiv 2402.14740.
    """
    group = rewards.shape[1]
    if group == 1:
        raise ValueError("rewards has group size G=1: leave-one-out needs at least 2 responses per prompt")
    return _centred(rewards)[0] * (group / (group - 1))


def _centred(rewards: Real[AnyArray, "P G"]) -> tuple[Float[Array, "P G"], Bool[Array, "P 1"]]:
    """R − mean R in float32, exactly 0 in constant groups; and which groups are constant."""
    r = jnp.asarray(rewards, jnp.float32)  # before any arithmetic: integer rewards would wrap or truncate
    spread = r.max(axis=1, keepdims=True) - r.min(axis=1, keepdims=True)
    scale = jnp.maximum(1.0, jnp.abs(r).max(axis=1, keepdims=True))
    constant = spread <= NOISE * scale
    return jnp.where(constant, jnp.zeros_like(r), r - r.mean(axis=1, keepdims=True)), constant
