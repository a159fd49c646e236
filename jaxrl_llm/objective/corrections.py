"""Sampler-learner mismatch: how much each token counts, as a program with other rounding has drawn it.

The sampler's kernels and precision differ from the learner's, so that even "on-policy" tokens come from another
distribution. A correction is a function (old_logp, sampler_logp, mask) -> c that multiplies the policy loss, after its
clip, and never the KL. All arrays are [B,T], log-probs in nats. In the equations

    k = old_logp − sampler_logp,   ρ = e^k,   s = exp(Σ_t k),   mean_t over a response's trained tokens

c is float32, 0 where mask is False, and carries no gradient. Dropping tokens or responses leaves the weights'
denominators as they are. Bounds are inclusive and on ρ = learner/sampler. k and its sums are clipped to ±80.
A bound out of its range is a ValueError.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxrl_llm.objective.shared import In, Mask, Out, mean
from jaxrl_llm.types import expect

LIMIT = 80.0  # nats: e^80 is still a float32


def tis(old_logp: In, sampler_logp: In, mask: Mask, *, cap: float = 2.0) -> Out:
    """Truncated importance sampling, token by token.

        c = min(ρ, cap)

    cap > 0.  Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    expect(cap > 0, "cap", cap, "a number > 0")
    return _on(mask, jnp.minimum(_rho(old_logp, sampler_logp, mask), cap))


def tis_sequence(old_logp: In, sampler_logp: In, mask: Mask, *, cap: float = 2.0) -> Out:
    """Truncated importance sampling with one weight per response, the product of its tokens' ratios.

        c = min(s, cap)

    cap > 0.
    """
    expect(cap > 0, "cap", cap, "a number > 0")
    return _on(mask, jnp.minimum(_product(old_logp, sampler_logp, mask), cap))


def mis_token(old_logp: In, sampler_logp: In, mask: Mask, *, low: float = 0.5, high: float = 5.0) -> Out:
    """Masked importance sampling: tokens on which the two disagree too much are dropped.

        c = ρ·1[low <= ρ <= high]

    0 <= low <= high.  IcePop (Ring-1T), arXiv 2510.18855.
    """
    _check_bounds(low, high)
    rho = _rho(old_logp, sampler_logp, mask)
    return _on(mask, jnp.where((low <= rho) & (rho <= high), rho, 0.0))


def mis_sequence(old_logp: In, sampler_logp: In, mask: Mask, *, low: float = 0.5, high: float = 2.0) -> Out:
    """Masked importance sampling with one weight per response.

        c = s·1[low <= s <= high]

    0 <= low <= high.
    """
    _check_bounds(low, high)
    s = _product(old_logp, sampler_logp, mask)
    return _on(mask, jnp.where((low <= s) & (s <= high), s, 0.0))


def geometric_rejection(old_logp: In, sampler_logp: In, mask: Mask, *, low: float = 0.999, high: float = 1.001) -> Out:
    """Responses are dropped when the geometric mean of their ratios leaves a band, however long they are.

        c = 1[low <= exp(mean_t k) <= high]

    0 <= low <= high.
    """
    _check_bounds(low, high)
    ratio = jnp.exp(mean(_log_rho(old_logp, sampler_logp, mask), mask))
    return _on(mask, ((low <= ratio) & (ratio <= high)).astype(jnp.float32))


def k3_rejection(old_logp: In, sampler_logp: In, mask: Mask, *, max_k3: float = 0.01) -> Out:
    """Responses are dropped when the sampler seems far from the learner.

        c = 1[mean_t (e^k − 1 − k) <= max_k3]

    The mean estimates KL(sampler ‖ learner), the tokens being the sampler's.  max_k3 >= 0: nats per token.
    """
    expect(max_k3 >= 0, "max_k3", max_k3, "a number >= 0")
    return _on(mask, (mean(_k3(_log_rho(old_logp, sampler_logp, mask)), mask) <= max_k3).astype(jnp.float32))


def veto(old_logp: In, sampler_logp: In, mask: Mask, *, low: float = 1e-4, high: float = 100.0) -> Out:
    """A response is dropped if learner and sampler disagree beyond belief on one of its tokens.

        c = 1[low <= ρ_t <= high for every t]

    0 <= low <= high.
    """
    _check_bounds(low, high)
    rho = _rho(old_logp, sampler_logp, mask)  # 1 under the mask, which need not lie within the bounds
    wild = jnp.any(mask & ((rho < low) | (rho > high)), axis=1, keepdims=True)
    return _on(mask, (~wild).astype(jnp.float32))


def opsm(logp: In, sampler_logp: In, adv: In, mask: Mask, delta: float) -> Out:
    """Bad responses are dropped once the policy has become much less likely to write them than the sampler was.

        c = 0 if mean_t A < 0 and mean_t (sampler_logp − logp) > delta, else 1

    logp: the live policy's;  delta: nats per token.  Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556.
    """
    unlikely = mean(-_log_rho(logp, sampler_logp, mask), mask) > delta
    bad = mean(jnp.where(mask, jnp.asarray(adv, jnp.float32), 0.0), mask) < 0
    return _on(mask, (~(unlikely & bad)).astype(jnp.float32))


def mismatch_report(old_logp: In, sampler_logp: In, mask: Mask, c: In | None = None) -> dict[str, Float[Array, ""]]:
    """How far sampler and learner are apart, as scalars over the trained tokens; all 0 if there are none.

        gap/mean, gap/max     |e^old_logp − e^sampler_logp|
        gap/pearson           correlation of the two probabilities
        gap/k3                mean (e^k − 1 − k), estimates KL(sampler ‖ learner), nats
        gap/rho_mean, _min, _max
        gap/ess               1 / mean((c / mean c)²), the share of the tokens that counts; of ρ if c is None
        gap/zeroed            share of tokens with c = 0
        gap/capped            share of tokens with 0 < c < ρ
        gap/ppl_sampler, gap/ppl_learner      e^(−mean log-prob)
        gap/quarter_1 … _4    mean |Δ probability| in each quarter of its response

    c: the correction in use.
    """
    n = jnp.maximum(jnp.sum(mask), 1)
    total = lambda x, where=mask: jnp.sum(jnp.where(where, x, 0.0))
    mean = lambda x: total(x / n)  # divided first: thousands of e^80 would overflow
    some = jnp.any(mask)
    logs = [jnp.where(mask, jnp.asarray(stop_gradient(x), jnp.float32), 0.0) for x in (old_logp, sampler_logp)]
    p, q = (jnp.exp(jnp.clip(x, -LIMIT, LIMIT)) for x in logs)
    k = _log_rho(old_logp, sampler_logp, mask)
    rho, gap = jnp.exp(k), jnp.abs(p - q)
    dp, dq = (jnp.where(mask, x - mean(x), 0.0) for x in (p, q))
    norms = jnp.sqrt(mean(dp**2)) * jnp.sqrt(mean(dq**2))
    weight = rho if c is None else jnp.asarray(stop_gradient(c), jnp.float32)
    share = weight / jnp.where(mean(weight) == 0, 1.0, mean(weight))
    square = mean(share**2)
    lengths = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    quarter = (jnp.cumsum(mask, axis=1) - 1) * 4 // lengths  # of the response's trained tokens
    report = {
        "gap/mean": mean(gap),
        "gap/max": jnp.max(jnp.where(mask, gap, 0.0)),
        "gap/pearson": mean(dp * dq) / jnp.where(norms == 0, 1.0, norms),
        "gap/k3": mean(_k3(k)),
        "gap/rho_mean": mean(rho),
        "gap/rho_min": jnp.where(some, jnp.min(jnp.where(mask, rho, jnp.inf)), 0.0),
        "gap/rho_max": jnp.max(jnp.where(mask, rho, 0.0)),
        "gap/ess": jnp.where(square > 0, 1 / jnp.where(square > 0, square, 1.0), 0.0),
        "gap/zeroed": mean(weight == 0),
        "gap/capped": mean((weight > 0) & (weight < rho)),
        "gap/ppl_sampler": jnp.where(some, jnp.exp(jnp.clip(-mean(logs[1]), -LIMIT, LIMIT)), 0.0),
        "gap/ppl_learner": jnp.where(some, jnp.exp(jnp.clip(-mean(logs[0]), -LIMIT, LIMIT)), 0.0),
    }
    for i in range(4):
        here = mask & (quarter == i)
        report[f"gap/quarter_{i + 1}"] = total(gap, here) / jnp.maximum(jnp.sum(here), 1)
    return {name: jnp.asarray(x, jnp.float32) for name, x in report.items()}


# --- what they share
def _log_rho(old_logp: In, sampler_logp: In, mask: Mask) -> Out:
    """k, 0 under the mask, without gradient."""
    old, sampler = (jnp.asarray(stop_gradient(x), jnp.float32) for x in (old_logp, sampler_logp))
    return jnp.where(mask, jnp.clip(old - sampler, -LIMIT, LIMIT), 0.0)


def _rho(old_logp: In, sampler_logp: In, mask: Mask) -> Out:
    return jnp.exp(_log_rho(old_logp, sampler_logp, mask))


def _product(old_logp: In, sampler_logp: In, mask: Mask) -> Float[Array, "B 1"]:
    total = jnp.sum(_log_rho(old_logp, sampler_logp, mask), axis=1, keepdims=True)
    return jnp.exp(jnp.clip(total, -LIMIT, LIMIT))


def _k3(k: Out) -> Out:
    return jnp.expm1(k) - k


def _on(mask: Mask, c: Array) -> Out:
    return jnp.where(mask, c, 0.0)


def _check_bounds(low: float, high: float) -> None:
    expect(low >= 0, "low", low, "a number >= 0")
    expect(high >= low, "high", high, f"a number >= low={low!r}")
