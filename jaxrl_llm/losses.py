"""Per-token policy losses and the KL penalty, to be minimised.

    loss = Σ_{i,t} w[i,t] · (c[i,t] · x[i,t] + β · kl[i,t])

A policy loss is a function (logp, old_logp, adv, mask, *, hyper) -> x. All arrays are [B,T]: `logp` the live
policy's log-probs of the sampled tokens, `old_logp` the same at the start of this optimisation phase (both in nats,
at the sampling temperature), `adv` the advantages, `mask` True on the tokens that train. x is float32, 0 where mask is
False, and differentiable in `logp` alone. Weights, corrections and sums are the caller's.
What lies under the mask does not matter, inf and nan included; nan on a token that trains stays nan.
"""

import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

AnyArray = Array | np.ndarray

# Nats. e^80 = 5.5e34 leaves float32 room for advantages of some thousands; e^89 would be inf.
LOG_RATIO_LIMIT = 80.0

KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+", "abs")


def reinforce(
    logp: Float[AnyArray, "B T"],
    old_logp: Float[AnyArray, "B T"],
    adv: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
) -> Float[Array, "B T"]:
    """The plain policy gradient.

        x = −A · logp

    logp, adv, mask: [B,T];  old_logp: not used, on-policy data is assumed.  Williams 1992.
    """
    return -_masked(stop_gradient(adv), mask) * _masked(logp, mask)


def ppo_clip(
    logp: Float[AnyArray, "B T"],
    old_logp: Float[AnyArray, "B T"],
    adv: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Float[Array, "B T"]:
    """PPO's pessimistic surrogate; its gradient is 0 where the ratio has already moved too far the right way.

        x = −min(r·A, clip(r, 1−clip_low, 1+clip_high)·A),   r = exp(logp − old_logp)
        with dual_clip, where A < 0:  x = min(x, −dual_clip·A)

    logp, old_logp, adv, mask: [B,T];  clip_low, clip_high: distances of the ratio from 1 ("clip-higher" is .28);
    dual_clip: largest ratio that still counts when A < 0, None for no such bound. At a bound the gradient is that of
    the unclipped branch.
    Raises ValueError unless 0 <= clip_low <= 1, clip_high >= 0 and dual_clip > 1.
    arXiv 1707.06347 eq. 7; unequal clips 2503.14476; dual clip 1912.09729.
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low={clip_low!r}: expected a number in [0, 1]")
    if clip_high < 0:
        raise ValueError(f"clip_high={clip_high!r}: expected a number >= 0")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip!r}: expected None or a number > 1")
    a = _masked(stop_gradient(adv), mask)
    ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    # Selected, not jnp.minimum of jnp.clip: those split the gradient in halves at ties and at the clip's bounds.
    objective = jnp.where(clipped * a < ratio * a, clipped * a, ratio * a)
    if dual_clip is not None:
        objective = jnp.where((a < 0) & (objective < dual_clip * a), dual_clip * a, objective)
    return -objective


def kl(
    logp: Float[AnyArray, "B T"],
    ref_logp: Float[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    kind: str = "k3",
) -> Float[Array, "B T"]:
    """Per-token estimates of KL(policy ‖ reference) from tokens that the policy drew, in nats.

        u = logp − ref_logp;   k1 = u;   k2 = u²/2;   k3 = e^(−u) − 1 + u;   abs = |u|

    "k1+" and "k3+" have the value of k1, k3 and the gradient of k2. As losses on sampled tokens k1's expected gradient
    is 0, that of k2 is the gradient of KL(policy ‖ reference), and that of k3 the gradient of KL(reference ‖ policy).
    logp, ref_logp, mask: [B,T];  kind: one of KL_KINDS. Gradient through logp only.
    Raises ValueError if kind is unknown.  Schulman 2020; k3 in arXiv 2402.03300 eq. 4.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KL_KINDS)}")
    u = _log_ratio(logp, ref_logp, mask)
    k2 = u**2 / 2
    if kind == "k2":
        value = k2
    elif kind == "abs":
        value = u * jnp.sign(u)  # jnp.abs has gradient 1 at 0, a push where policy and reference agree
    else:
        value = u if kind.startswith("k1") else jnp.expm1(-u) + u  # expm1: e^(−u) − 1 loses all digits near u = 0
    if kind.endswith("+"):
        value = stop_gradient(value) + (k2 - stop_gradient(k2))
    return value


def _masked(x: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"]) -> Float[Array, "B T"]:
    """x in float32 with 0 under the mask.

    Garbage is removed before the arithmetic: a `where` on the result alone still sends 0·inf = nan backwards. A
    masked token thus has log-ratio 0 and advantage 0, of which every loss makes 0.
    """
    return jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)


def _log_ratio(
    logp: Float[AnyArray, "B T"], old_logp: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"]
) -> Float[Array, "B T"]:
    """logp − sg[old_logp] in nats: 0 under the mask, held (without gradient) within ±LOG_RATIO_LIMIT."""
    d = _masked(logp, mask) - _masked(stop_gradient(old_logp), mask)
    return jnp.where(jnp.abs(d) > LOG_RATIO_LIMIT, jnp.sign(d) * LOG_RATIO_LIMIT, d)
