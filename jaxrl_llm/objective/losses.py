"""Per-token policy losses, the KL penalty and the value loss, to be minimised.

    loss = Σ_{i,t} w[i,t] · (c[i,t] · x[i,t] + β · kl[i,t] − κ · entropy[i,t])

A policy loss is a function (logp, old_logp, adv, mask, *, hyper) -> x. All arrays are [B,T]: `logp` the live
policy's log-probs of the sampled tokens, `old_logp` the same before the batch's first update (both in nats,
at the sampling temperature), `adv` the advantages, `mask` True on the tokens that train. In the equations
d = logp − old_logp, r = e^d, n is a response's number of trained tokens, mean_t is over those, and sg stops gradients.

x is float32, 0 where mask is False, and differentiable in `logp` alone. The caller multiplies by c and w, and sums.
A response-level loss (gspo, luspo, gmpo, rspo, opmd) has A = mean_t adv and puts the response's value on each of its
tokens, so that `sequence` weights give the mean over responses.
Values where mask is False do not matter, not even inf or nan; nan on a token that trains stays nan. At a clip's bound
the gradient is that of the unclipped branch. A hyper-parameter out of its range is a ValueError.
"""

from math import log

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

from jaxrl_llm.objective.filters import select_clip_cov, select_cov, top_entropy  # noqa: F401  their place was here
from jaxrl_llm.objective.shared import LOG_RATIO_LIMIT, In, Mask, Out, check_clips, log_ratio, masked, mean
from jaxrl_llm.types import expect

RATIO_CAP = 20.0  # of dppo_tv and dppo_kl
LOG_WEIGHT_RANGE = log(1e-8), 20.0  # nats, of vespo's W
KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+", "abs")


# --- token by token
def reinforce(logp: In, old_logp: In, adv: In, mask: Mask) -> Out:
    """The plain policy gradient.

        x = −A · logp

    old_logp is not used: on-policy data is assumed.  Williams 1992.
    """
    return -masked(stop_gradient(adv), mask) * masked(logp, mask)


def gpg(logp: In, old_logp: In, adv: In, mask: Mask) -> Out:
    """GPG's loss is the plain policy gradient; what it changes is the advantage, `advantages.gpg`.

        x = −A · logp

    arXiv 2504.02546.
    """
    return reinforce(logp, old_logp, adv, mask)


def ppo_clip(
    logp: In,
    old_logp: In,
    adv: In,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Out:
    """PPO's pessimistic surrogate; its gradient is 0 where the ratio has already gone too far in A's direction.

        x = −min(r·A, clip(r, 1−clip_low, 1+clip_high)·A)
        with dual_clip, where A < 0:  x = min(x, −dual_clip·A)

    clip_low, clip_high: distances of the ratio from 1 ("clip-higher" is .28), 0 <= clip_low <= 1, clip_high >= 0;
    dual_clip > 1: largest ratio that still counts when A < 0, None for no such bound.
    arXiv 1707.06347 eq. 7; unequal clips 2503.14476; dual clip 1912.09729.
    """
    check_clips(clip_low, clip_high)
    _check_dual_clip(dual_clip)
    a = masked(stop_gradient(adv), mask)
    ratio = jnp.exp(log_ratio(logp, old_logp, mask))
    return _surrogate(ratio, a, 1 - clip_low, 1 + clip_high, dual_clip)


def dcpo(
    logp: In,
    old_logp: In,
    adv: In,
    mask: Mask,
    *,
    eps_low: float = 0.16,
    eps_high: float = 0.2,
    ratio_cap: float = 10.0,
    dual_clip: float | None = 10.0,
) -> Out:
    """PPO with a clip that widens where the old policy gave the token little probability q = e^old_logp.

        x = −min(r·A, clip(r, low, high)·A), and x = min(x, −dual_clip·A) where A < 0
        low = ½ + ½·√max(1 − 4·eps_low/q, 0)
        high = min(½ + ½·√(1 + 4·eps_high/q), ratio_cap)

    eps_low, eps_high >= 0: bounds of |r−1|·r·q;  ratio_cap >= 1;  dual_clip > 1 or None as in `ppo_clip`.
    DCPO, arXiv 2509.02333.
    """
    expect(eps_low >= 0, "eps_low", eps_low, "a number >= 0")
    expect(eps_high >= 0, "eps_high", eps_high, "a number >= 0")
    expect(ratio_cap >= 1, "ratio_cap", ratio_cap, "a number >= 1")
    _check_dual_clip(dual_clip)
    a = masked(stop_gradient(adv), mask)
    ratio = jnp.exp(log_ratio(logp, old_logp, mask))
    q = jnp.exp(jnp.maximum(masked(stop_gradient(old_logp), mask), -LOG_RATIO_LIMIT))
    low = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1 - 4 * eps_low / q, 0.0))
    high = jnp.minimum(0.5 + 0.5 * jnp.sqrt(1 + 4 * eps_high / q), ratio_cap)
    return _surrogate(ratio, a, low, high, dual_clip)


def cispo(logp: In, old_logp: In, adv: In, mask: Mask, *, ratio_max: float = 5.0, ratio_min: float = 0.0) -> Out:
    """The policy gradient weighted by a capped, detached ratio: no token ever loses its gradient.

        x = −sg[clip(r, ratio_min, ratio_max)] · A · logp

    ratio_min, ratio_max: absolute bounds of the ratio (not distances from 1), 0 <= ratio_min <= ratio_max.
    CISPO (MiniMax-M1), arXiv 2506.13585; a cap of 5 as in ScaleRL, 2510.13786.
    """
    expect(ratio_min >= 0, "ratio_min", ratio_min, "a number >= 0")
    expect(ratio_max >= ratio_min, "ratio_max", ratio_max, f"a number >= ratio_min={ratio_min!r}")
    ratio = jnp.exp(log_ratio(stop_gradient(logp), old_logp, mask))
    return jnp.clip(ratio, ratio_min, ratio_max) * reinforce(logp, old_logp, adv, mask)


def sapo(logp: In, old_logp: In, adv: In, mask: Mask, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Out:
    """A soft gate instead of a clip: the weight of r·A·∇logp falls smoothly from 1 at r = 1 as sech²(τ(r−1)/2).

        x = −(4/τ) · σ(τ(r−1)) · A,   τ = tau_pos if A > 0 else tau_neg

    tau_pos, tau_neg > 0: the gate's steepness.  SAPO, arXiv 2511.20347.
    """
    expect(tau_pos > 0, "tau_pos", tau_pos, "a number > 0")
    expect(tau_neg > 0, "tau_neg", tau_neg, "a number > 0")
    a = masked(stop_gradient(adv), mask)
    tau = jnp.where(a > 0, tau_pos, tau_neg)
    ratio = jnp.exp(log_ratio(logp, old_logp, mask))
    return -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * a


def topr(logp: In, old_logp: In, adv: In, mask: Mask) -> Out:
    """The policy gradient; that of a bad response fades as the policy becomes less likely to write it.

        x = −c · A · logp,   c = 1 if A >= 0 else sg[min(exp(Σ_t d), 1)]

    A carries the reward.  TOPR, arXiv 2503.14286.
    """
    total = jnp.sum(log_ratio(stop_gradient(logp), old_logp, mask), axis=1, keepdims=True)
    taper = jnp.exp(jnp.clip(total, -LOG_RATIO_LIMIT, 0.0))
    good = masked(adv, mask) >= 0
    return jnp.where(good, 1.0, taper) * reinforce(logp, old_logp, adv, mask)


def vespo(
    logp: In,
    old_logp: In,
    adv: In,
    mask: Mask,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Out:
    """The policy gradient with a weight that fades smoothly as the response's probability moves, either way.

        x = −φ · A · logp,   φ = sg[W^k · exp(λ(1−W))],   W = exp(Σ_t d)

    k, λ > 0: k_pos, lambda_pos where A >= 0, else k_neg, lambda_neg. φ is 1 at W = 1. Σ_t d is clipped to
    [log 1e-8, 20]. With the sampler's log-probs as old_logp its mismatch is part of W.  VESPO, arXiv 2602.10693 eq. 20.
    """
    for name, value in (("k_pos", k_pos), ("lambda_pos", lambda_pos), ("k_neg", k_neg), ("lambda_neg", lambda_neg)):
        expect(value > 0, name, value, "a number > 0")
    total = jnp.sum(log_ratio(stop_gradient(logp), old_logp, mask), axis=1, keepdims=True)
    log_w = jnp.clip(total, *LOG_WEIGHT_RANGE)
    phi = lambda k, lam: jnp.exp(k * log_w - lam * jnp.expm1(log_w))
    weight = jnp.where(masked(adv, mask) >= 0, phi(k_pos, lambda_pos), phi(k_neg, lambda_neg))
    return weight * reinforce(logp, old_logp, adv, mask)


def dppo_tv(logp: In, old_logp: In, adv: In, mask: Mask, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Out:
    """The policy gradient with a capped ratio, until the token's probability has moved too far in A's direction.

        x = −sg[min(r, 20)] · A · logp;   0 where A > 0 and p − q > clip_high, or A < 0 and p − q < −clip_low

    p = e^logp, q = e^old_logp: |p − q| is the total variation of "this token or another". A ratio's clip stops unlikely
    tokens too early and likely ones too late.  clip_low, clip_high >= 0: of probability.  DPPO, arXiv 2602.04879.
    """
    p, q = (jnp.exp(jnp.minimum(masked(stop_gradient(l), mask), 0.0)) for l in (logp, old_logp))
    return _until(p - q, logp, old_logp, adv, mask, clip_low, clip_high)


def dppo_kl(logp: In, old_logp: In, adv: In, mask: Mask, *, clip_low: float = 0.05, clip_high: float = 0.05) -> Out:
    """`dppo_tv` whose bounds are on the KL of "this token or another" instead.

        x = −sg[min(r, 20)] · A · logp;   0 where A > 0, p > q and D > clip_high, or A < 0, p < q and D > clip_low
        D = q·(old_logp − logp) + (1−q)·log((1−q+10^(−8))/(1−p+10^(−8)))

    p = e^logp, q = e^old_logp;  clip_low, clip_high >= 0: nats.  DPPO, arXiv 2602.04879.
    """
    live, old = (jnp.minimum(masked(stop_gradient(l), mask), 0.0) for l in (logp, old_logp))
    d, q, other = log_ratio(live, old, mask), jnp.exp(old), lambda l: jnp.log(1e-8 - jnp.expm1(l))
    divergence = -q * d + (1 - q) * (other(old) - other(live))
    return _until(jnp.sign(d) * divergence, logp, old_logp, adv, mask, clip_low, clip_high)


# --- response by response
def gspo(logp: In, old_logp: In, adv: In, mask: Mask, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Out:
    """PPO's surrogate on one ratio per response: the geometric mean of its tokens' ratios.

        x = −min(s·A, clip(s, 1−clip_low, 1+clip_high)·A),   s = exp(mean_t d)

    clip_low, clip_high: as in `ppo_clip`, but smaller, as a mean moves less.  GSPO, arXiv 2507.18071 eq. 5.
    """
    check_clips(clip_low, clip_high)
    s = jnp.exp(mean(log_ratio(logp, old_logp, mask), mask))
    return jnp.where(mask, _surrogate(s, mean(stop_gradient(adv), mask), 1 - clip_low, 1 + clip_high, None), 0.0)


def gspo_token(logp: In, old_logp: In, adv: In, mask: Mask, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Out:
    """GSPO for advantages that differ within a response; where they do not, value and gradient are GSPO's.

        x = −min(s·A, clip(s, 1−clip_low, 1+clip_high)·A),   s = sg[exp(mean_t d)] · exp(d − sg[d])

    clip_low, clip_high: as in `gspo`.  GSPO-token, arXiv 2507.18071 eq. 13.
    """
    check_clips(clip_low, clip_high)
    d = log_ratio(logp, old_logp, mask)
    s = stop_gradient(jnp.exp(mean(d, mask))) * jnp.exp(d - stop_gradient(d))
    return _surrogate(s, masked(stop_gradient(adv), mask), 1 - clip_low, 1 + clip_high, None)


def luspo(logp: In, old_logp: In, adv: In, mask: Mask, *, clip_low: float = 2e-3, clip_high: float = 2.5e-3) -> Out:
    """GSPO times the response's length: a token of a long response weighs as much as one of a short response.

        x = −n · min(s·A, clip(s, 1−clip_low, 1+clip_high)·A),   s = exp(mean_t d)

    clip_low, clip_high: as in `gspo`.  LUSPO, arXiv 2602.05261.
    """
    value = gspo(logp, old_logp, adv, mask, clip_low=clip_low, clip_high=clip_high)
    return jnp.sum(mask, axis=1, keepdims=True) * value


def gmpo(logp: In, old_logp: In, adv: In, mask: Mask, *, clip: float = 0.4) -> Out:
    """The geometric mean of token ratios, each clipped on one side: above if A > 0, below if A < 0.

        x = −A · exp(mean_t d'),   d' = min(d, clip) if A > 0 else max(d, −clip)

    Clipped tokens have no gradient and still count in the mean.  clip > 0: in nats.  GMPO, arXiv 2507.20673.
    """
    expect(clip > 0, "clip", clip, "a number > 0")
    d = log_ratio(logp, old_logp, mask)
    a = mean(stop_gradient(adv), mask)
    clipped = jnp.where((a > 0) & (d > clip), clip, jnp.where((a < 0) & (d < -clip), -clip, d))
    return jnp.where(mask, -a * jnp.exp(mean(clipped, mask)), 0.0)


def rspo(
    logp: In, old_logp: In, adv: In, mask: Mask, *, log_router_ratio: In, gamma_min: float = 0.8, clip: float = 0.4
) -> Out:
    """GMPO whose ratios shrink where a mixture of experts now routes the token elsewhere.

        x = gmpo with log ratio d + log γ,   γ = sg[max(e^log_router_ratio, gamma_min)]

    Since d + log γ = logp − (old_logp − log γ), the same shift of old_logp plugs γ into any other loss.
    log_router_ratio: [B,T], <= 0, nats; 0 where the routers agree;  gamma_min in (0, 1].  RSPO, arXiv 2510.23027 v2.
    """
    expect(0 < gamma_min <= 1, "gamma_min", gamma_min, "a number in (0, 1]")
    log_gamma = jnp.maximum(masked(log_router_ratio, mask), log(gamma_min))  # detached with old_logp
    return gmpo(logp, masked(old_logp, mask) - log_gamma, adv, mask, clip=clip)


def opmd(logp: In, old_logp: In, adv: In, mask: Mask, *, tau: float = 0.1) -> Out:
    """Kimi k1.5's policy mirror descent: the policy gradient and a penalty on the squared log ratio; no clip.

        x = −A · Σ_t logp + (τ/2) · (Σ_t d)²

    The log ratio is summed over the response and then squared.  tau >= 0: the penalty's weight.  arXiv 2501.12599.
    """
    expect(tau >= 0, "tau", tau, "a number >= 0")
    total = lambda x: jnp.sum(x, axis=1, keepdims=True)
    squared = total(log_ratio(logp, old_logp, mask)) ** 2
    return jnp.where(mask, -mean(stop_gradient(adv), mask) * total(masked(logp, mask)) + tau / 2 * squared, 0.0)


# --- chosen tokens
def clip_cov(
    logp: In, old_logp: In, adv: In, mask: Mask, *, selected: Mask, clip_low: float = 0.2, clip_high: float = 0.2
) -> Out:
    """PPO without a few of the tokens whose log-prob and advantage covary strongly: those lower the entropy most.

        x = 0 on selected tokens, ppo_clip elsewhere

    selected: of `select_clip_cov`.  Clip-Cov, arXiv 2505.22617.
    """
    return jnp.where(selected, 0.0, ppo_clip(logp, old_logp, adv, mask, clip_low=clip_low, clip_high=clip_high))


def kl_cov(logp: In, old_logp: In, adv: In, mask: Mask, *, selected: Mask, coef: float = 0.1) -> Out:
    """The unclipped surrogate, with a penalty on moving the tokens where log-prob and advantage covary most.

        x = −r·A + coef·|d| on selected tokens, −r·A elsewhere

    selected: of `select_cov`;  coef >= 0.  KL-Cov, arXiv 2505.22617.
    """
    expect(coef >= 0, "coef", coef, "a number >= 0")
    d = log_ratio(logp, old_logp, mask)
    return -jnp.exp(d) * masked(stop_gradient(adv), mask) + jnp.where(selected, coef * _abs(d), 0.0)


# --- KL and value
def kl(logp: In, ref_logp: In, mask: Mask, kind: str = "k3", *, old_logp: In | None = None) -> Out:
    """Per-token estimates of KL(policy ‖ reference) from tokens that the policy drew, in nats.

        u = logp − ref_logp;   k1 = u;   k2 = u²/2;   k3 = e^(−u) − 1 + u;   abs = |u|

    "k1+" and "k3+" have the value of k1, k3 and the gradient of k2. As losses on sampled tokens k1's expected gradient
    is 0, that of k2 is the gradient of KL(policy ‖ reference), and that of k3 the gradient of KL(reference ‖ policy).
    With old_logp, of the policy that drew the tokens, the estimate is multiplied by the live ratio r = e^(logp −
    old_logp): then k1 and k3 have both KL(policy ‖ reference) and its gradient as their expectation.
    kind: one of KL_KINDS.  Schulman 2020; k3 in arXiv 2402.03300 eq. 4; r·k3 in DeepSeek-V3.2, 2512.02556.
    """
    expect(kind in KL_KINDS, "kind", kind, f"one of {', '.join(KL_KINDS)}")
    u = log_ratio(logp, ref_logp, mask)
    k2 = u**2 / 2
    if kind == "k2":
        value = k2
    elif kind == "abs":
        value = _abs(u)
    else:
        value = u if kind.startswith("k1") else jnp.expm1(-u) + u  # expm1: e^(−u) − 1 loses all digits near u = 0
    if kind.endswith("+"):
        value = stop_gradient(value) + (k2 - stop_gradient(k2))
    return value if old_logp is None else jnp.exp(log_ratio(logp, old_logp, mask)) * value


def value_loss(values: In, old_values: In, returns: In, mask: Mask, clip: float | None = 0.2) -> Out:
    """PPO's error of the critic: the larger of the squared errors of V and of V clipped to near its old value.

        x = ½ · max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²)

    values, old_values, returns: [B,T], in units of reward; gradient through `values` only;  clip > 0, None for the
    plain squared error.  arXiv 1707.06347, as in its authors' implementation.
    """
    v, target = masked(values, mask), masked(stop_gradient(returns), mask)
    error = (v - target) ** 2
    if clip is not None:
        expect(clip > 0, "clip", clip, "None or a number > 0")
        old = masked(stop_gradient(old_values), mask)
        clipped = (jnp.clip(v, old - clip, old + clip) - target) ** 2
        error = jnp.where(clipped > error, clipped, error)
    return error / 2


# --- what they share
def _surrogate(ratio: Array, a: Array, low: Array | float, high: Array | float, dual_clip: float | None) -> Array:
    """−min(r·A, clip(r, low, high)·A), and the dual clip where A < 0."""
    clipped = jnp.clip(ratio, low, high)
    # Selected, not jnp.minimum of jnp.clip: those split the gradient in halves at ties and at the clip's bounds.
    objective = jnp.where(clipped * a < ratio * a, clipped * a, ratio * a)
    if dual_clip is not None:
        objective = jnp.where((a < 0) & (objective < dual_clip * a), dual_clip * a, objective)
    return -objective


def _until(moved: Array, logp: In, old_logp: In, adv: In, mask: Mask, clip_low: float, clip_high: float) -> Out:
    """−sg[min(r, RATIO_CAP)]·A·logp, and 0 where `moved` is past the bound on A's side."""
    expect(clip_low >= 0, "clip_low", clip_low, "a number >= 0")
    expect(clip_high >= 0, "clip_high", clip_high, "a number >= 0")
    a = masked(adv, mask)
    too_far = ((a > 0) & (moved > clip_high)) | ((a < 0) & (moved < -clip_low))  # not its opposite: nan stays nan
    ratio = jnp.exp(log_ratio(stop_gradient(logp), old_logp, mask))
    return jnp.where(too_far, 0.0, jnp.minimum(ratio, RATIO_CAP) * reinforce(logp, old_logp, adv, mask))


def _abs(d: Out) -> Out:
    """|d| with gradient 0 at 0: jnp.abs has 1 there, a push where the two policies agree."""
    return d * jnp.sign(d)


def _check_dual_clip(dual_clip: float | None) -> None:
    expect(dual_clip is None or dual_clip > 1, "dual_clip", dual_clip, "None or a number > 1")
