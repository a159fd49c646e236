"""Rewards to advantages: what each response, or each token, is worth.

Group functions take rewards [P,G] of any real dtype, one row a prompt, and return float32 [P,G]. Token functions take
and return [B,T], with `mask` True on the tokens that train; values where it is False do not matter, and outputs are 0
there. Nothing is differentiated. A hyper-parameter out of its range is a ValueError.
A group whose rewards are equal up to float noise carries no signal: where a baseline is subtracted it gets exactly 0.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from jaxrl_llm.arrays import AnyArray
from jaxrl_llm.objective.shared import Mask, Out, log_ratio, masked
from jaxrl_llm.types import expect

Rewards = Real[AnyArray, "P G"] | Bool[AnyArray, "P G"]
Group = Float[Array, "P G"]
Tokens = Real[AnyArray, "B T"]
Rows = Real[AnyArray, "B"]
Memory = dict[str, Float[AnyArray, "N"]]

# Rewards closer than this, relative to max(1, |R|), are the same reward: 0.1 + 0.2 and 0.3 must not be told apart.
NOISE = 1e-6


# --- within a group
def raw(rewards: Rewards) -> Group:
    """The reward itself, with no baseline: plain REINFORCE.

        A = R

    Williams 1992.
    """
    return jnp.asarray(rewards, jnp.float32)


def grpo(rewards: Rewards, *, eps: float = 1e-6, ddof: int = 1) -> Group:
    """The reward standardised within its group.

        A = (R − mean R) / (std R + eps)       exactly 0 in a constant group;  A = R in a group of one

    eps >= 0: in units of reward, outside the root;  ddof: 1 divides the variance by G−1, 0 by G.
    GRPO, arXiv 2402.03300.
    """
    expect(ddof in (0, 1), "ddof", ddof, "0 or 1")
    expect(eps >= 0, "eps", eps, "a number >= 0")
    group = rewards.shape[1]
    if group == 1:
        return raw(rewards)
    centred, constant = _centred(rewards)
    std = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / (group - ddof))
    return centred / jnp.where(constant, 1.0, std + eps)


def dr_grpo(rewards: Rewards) -> Group:
    """The reward less its group's mean, not divided by the spread (which would favour too easy and too hard prompts).

        A = R − mean R

    Dr. GRPO, arXiv 2503.20783.
    """
    return _centred(rewards)[0]


def rloo(rewards: Rewards) -> Group:
    """The reward less the mean reward of the other responses of its group.

        A_i = R_i − Σ_{j≠i} R_j / (G−1) = G/(G−1) · (R_i − mean R)

    ValueError if G is 1: there are no others.  RLOO, arXiv 2402.14740.
    """
    group = rewards.shape[1]
    if group == 1:
        raise ValueError("rewards has group size G=1: leave-one-out needs at least 2 responses per prompt")
    return _centred(rewards)[0] * (group / (group - 1))


def lite_ppo(rewards: Rewards, *, eps: float = 1e-6) -> Group:
    """Centred within the group, divided by the std of the whole batch: a group of nearly equal rewards is not blown up.

        A = (R − mean_group R) / (std_batch R + eps)         std over the whole batch, with P·G−1

    eps >= 0: in units of reward.  Lite PPO, arXiv 2508.08221.
    """
    expect(eps >= 0, "eps", eps, "a number >= 0")
    return _scaled(_centred(rewards)[0], jnp.asarray(rewards, jnp.float32), None, eps)


def scalerl(rewards: Rewards, *, eps: float = 1e-6, kept: Bool[AnyArray, "P"] | None = None) -> Group:
    """Centred within the group, divided by the std that the centred rewards have over the whole batch.

        a = R − mean_group R;   A = a / (std_batch a + eps)         std over the groups that are kept, with n−1

    eps >= 0: in units of reward;  kept: [P], False on groups that the filter has dropped; they get 0.
    ScaleRL, arXiv 2510.13786.
    """
    expect(eps >= 0, "eps", eps, "a number >= 0")
    centred = _centred(rewards)[0]
    return _scaled(centred, centred, kept, eps)


def reinforce_rej(rewards: Rewards) -> Group:
    """The reward itself, but nothing from groups whose answers are all right or all wrong.

        A = R in a group with different rewards, 0 in a constant one

    Rewards should be ±1: with 0 and 1 a wrong answer would have no gradient.  Reinforce-Rej, arXiv 2504.11343.
    """
    return jnp.where(_centred(rewards)[1], 0.0, raw(rewards))


def raft(rewards: Rewards) -> Group:
    """Only good answers are learnt from.

        A = max(R, 0)

    RAFT++ is this with the policy ratio and the clip.  arXiv 2304.06767; RAFT++ 2504.11343.
    """
    return jnp.maximum(raw(rewards), 0.0)


def opo(rewards: Rewards, lengths: Real[AnyArray, "P G"]) -> Group:
    """The reward less the length-weighted mean: the baseline of least variance if gradients grow with length.

        A = R − Σ_j n_j·R_j / Σ_j n_j

    lengths: n [P,G], tokens; a group of empty answers has baseline mean R.  OPO, arXiv 2505.23585.
    """
    centred, constant = _centred(rewards)
    n = jnp.asarray(lengths, jnp.float32)
    total = jnp.sum(n, axis=1, keepdims=True)
    shift = jnp.sum(n * centred, axis=1, keepdims=True) / jnp.where(total == 0, 1.0, total)
    return jnp.where(constant, 0.0, centred - shift)


def maxrl(rewards: Rewards, *, eps: float = 1e-6) -> Group:
    """The reward relative to its group's mean: a right answer to a hard prompt counts for more.

        A = (R − mean R) / (mean R + eps)

    Rewards should be >= 0;  eps >= 0: in units of reward.  MaxRL, arXiv 2602.02710.
    """
    expect(eps >= 0, "eps", eps, "a number >= 0")
    centred, constant = _centred(rewards)
    mean = jnp.mean(raw(rewards), axis=1, keepdims=True)
    return centred / jnp.where(constant, 1.0, mean + eps)


def passk(rewards: Rewards) -> Group:
    """Only the best answer of the group, for what it adds to the group's maximum.

        A = R_max − R_second for the best answer, 0 for the others

    ValueError if G is 1: there is no second.  GRPO with pass@k, arXiv 2503.19595.
    """
    if rewards.shape[1] == 1:
        raise ValueError("rewards has group size G=1: pass@k needs at least 2 responses per prompt")
    centred = _centred(rewards)[0]
    top = jax.lax.top_k(centred, 2)[0]  # [P,2]
    best = jnp.arange(rewards.shape[1])[None] == jnp.argmax(centred, axis=1)[:, None]
    return jnp.where(best, top[:, :1] - top[:, 1:], 0.0)


def opmd(rewards: Rewards, *, tau: float | None = None) -> Group:
    """The reward less the group's mean, or less its soft maximum.

        A = R − mean R;   with tau:  A = R − τ·log mean e^(R/τ)

    tau > 0: in units of reward, None for the mean.  Kimi k1.5, arXiv 2501.12599.
    """
    expect(tau is None or tau > 0, "tau", tau, "None or a number > 0")
    centred, constant = _centred(rewards)
    if tau is None:
        return centred
    log_mean = jax.nn.logsumexp(centred / tau, axis=1, keepdims=True) - jnp.log(1.0 * rewards.shape[1])
    return jnp.where(constant, 0.0, centred - tau * log_mean)


def gpg(rewards: Rewards) -> Group:
    """The reward less its group's mean, scaled up to make up for the responses in groups without signal.

        A = α·(R − mean R),   α = B / (B − #responses in constant groups);   0 if all are

    GPG, arXiv 2504.02546.
    """
    centred, constant = _centred(rewards)
    alive = jnp.sum(~constant)
    return centred * (rewards.shape[0] / jnp.maximum(alive, 1))


def gdpo(
    parts: Real[AnyArray, "P G N"], kept: Bool[AnyArray, "P"] | None = None, *, weights: Sequence[float] | None = None
) -> Group:
    """Each part of the reward standardised by itself, so that none drowns another whose spread is smaller.

        A = whiten(Σ_n w_n · grpo(R_n))         over the batch's responses;   exactly 0 where no part has signal

    parts: R [P,G,N], the reward's parts in the order of `shaping.parts`;  kept: [P], False on groups that the filter
    has dropped; they get 0;  weights: w [N], None for ones.  GDPO, arXiv 2601.05242.
    """
    n = parts.shape[2]
    weights = (1.0,) * n if weights is None else weights
    expect(len(weights) == n, "weights", weights, f"{n} numbers, one for each part of the reward")
    total = sum(w * grpo(parts[:, :, i]) for i, w in enumerate(weights))
    row = jnp.ones((total.shape[0], 1), bool) if kept is None else jnp.asarray(kept)[:, None]
    return jnp.where(total == 0, 0.0, whiten(total, jnp.broadcast_to(row, total.shape)))


def zero(rewards: Rewards) -> Group:
    """No advantage, for distillation alone: what a teacher says of the tokens is all that is learnt.

    A = 0
    """
    return jnp.zeros(rewards.shape, jnp.float32)


# --- with a memory for each prompt
def dcpo_sas_init(n_prompts: int) -> Memory:
    """The first state of `dcpo_sas`: of each prompt's rewards the count, the mean, and Σ (R − mean)² as `m2`."""
    expect(n_prompts >= 1, "n_prompts", n_prompts, "at least 1")
    return {name: jnp.zeros(n_prompts, jnp.float32) for name in ("count", "mean", "m2")}


def dcpo_sas(
    rewards: Rewards, state: Memory, prompt_ids: Int[AnyArray, "P"], *, eps: float = 1e-6, ddof: int = 1
) -> tuple[Group, Memory]:
    """Smooth advantage standardisation: the group's statistics give way to those of all of the prompt's visits.

        S1 = (i−1)/i·A_new + 1/i·A_tot,   S2 = 1/i·A_new + (i−1)/i·A_tot;   A = the smaller of them in magnitude

    A_new standardises with mean and std of the group, A_tot with those of all rewards of the prompt's i visits, this
    one included; std has eps added. So a constant group still learns from earlier visits: A = A_tot/i.
    state: of `dcpo_sas_init`, [N] each;  prompt_ids: [P], in [0, N). Rows are visits in order: a prompt that comes
    twice is visited twice. i counts visits of G responses. eps, ddof: as in `grpo`.
    Returns advantages and the new state.  DCPO, arXiv 2509.02333.
    """
    expect(ddof in (0, 1), "ddof", ddof, "0 or 1")
    expect(eps >= 0, "eps", eps, "a number >= 0")
    group = rewards.shape[1]
    spread = lambda m2, n: jnp.sqrt(m2 / jnp.maximum(n - ddof, 1)) + eps

    def visit(state: dict[str, Array], row: tuple[Array, Array, Array, Array]) -> tuple[dict[str, Array], Array]:
        r, centred, constant, at = row
        count, mean, m2 = (state[name][at] for name in ("count", "mean", "m2"))
        total = count + group
        delta = jnp.mean(r) - mean
        within = jnp.sum(centred**2)
        now = {"count": total, "mean": mean + delta * group / total}
        now["m2"] = m2 + within + delta**2 * count * group / total  # Chan: two sets' squared deviations about one mean
        i = total / group
        new = jnp.where(constant, 0.0, centred / jnp.where(constant, 1.0, spread(within, group)))
        flat = now["m2"] <= total * (NOISE * jnp.maximum(1.0, jnp.abs(now["mean"]))) ** 2
        tot = jnp.where(flat, 0.0, (r - now["mean"]) / jnp.where(flat, 1.0, spread(now["m2"], total)))
        s1, s2 = (i - 1) / i * new + tot / i, new / i + (i - 1) / i * tot
        return {k: state[k].at[at].set(now[k]) for k in state}, jnp.where(jnp.abs(s1) <= jnp.abs(s2), s1, s2)

    centred, constant = _centred(rewards)
    start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state)
    state, adv = jax.lax.scan(visit, start, (raw(rewards), centred, constant[:, 0], jnp.asarray(prompt_ids)))
    return adv, state


# --- token by token
def token_rewards(rewards: Rows, kl: Tokens, mask: Mask, *, beta: float = 0.0) -> Out:
    """Rewards per token: the response's on its last token, and the KL penalty on every token.

        r_t = R·1[t = last] − beta·kl_t

    rewards: [B];  kl: [B,T], nats;  beta: reward per nat. An empty response has no reward.
    """
    at = jnp.where(mask, jnp.arange(mask.shape[1])[None], -1)
    last = mask & (at == at.max(axis=1, keepdims=True))
    r = jnp.where(last, jnp.asarray(rewards, jnp.float32)[:, None], 0.0)
    return r - beta * masked(kl, mask)


def reinforce_pp(rewards: Rows, kl: Tokens, mask: Mask, *, beta: float = 0.0) -> Out:
    """The sum of all rewards from a token on, KL penalty included, standardised over the batch's tokens; no groups.

        A_t = whiten(Σ_{t'≥t} r_t'),   r_t = R·1[t = last] − beta·kl_t

    rewards: [B];  kl: [B,T], nats;  beta: reward per nat.  REINFORCE++, arXiv 2501.03262.
    """
    r = token_rewards(rewards, kl, mask, beta=beta)
    return whiten(jnp.cumsum(r[:, ::-1], axis=1)[:, ::-1], mask)


def reinforce_pp_baseline(rewards: Rewards, mask: Bool[AnyArray, "P G T"]) -> Float[Array, "P G T"]:
    """Centred within the group, then standardised over the batch's tokens, so that long answers weigh heavier in it.

        A = whiten(R − mean_group R)

    mask: [P,G,T].  REINFORCE++-baseline, arXiv 2501.03262.
    """
    flat = mask.reshape(-1, mask.shape[-1])
    tokens = jnp.broadcast_to(_centred(rewards)[0].reshape(-1, 1), flat.shape)
    return whiten(tokens, flat).reshape(mask.shape)


def gae(
    rewards: Tokens, values: Tokens, mask: Mask, *, gamma: float = 1.0, lam: float | Rows = 0.95
) -> tuple[Out, Out]:
    """Generalised advantage estimation, and the returns that the critic learns.

        δ_t = r_t + γ·V_{t+1} − V_t;   A_t = δ_t + γλ·A_{t+1};   return_t = A_t + V_t

    Masked tokens are skipped: t+1 is the next trained token, and beyond the last one V = A = 0.
    rewards: r [B,T] per token;  values: V [B,T], before the token is drawn;  gamma in [0,1];  lam: λ in [0,1], a
    number or one per response [B].  Returns (A, returns).  arXiv 1506.02438.
    """
    expect(0 <= gamma <= 1, "gamma", gamma, "a number in [0, 1]")
    if isinstance(lam, int | float):
        expect(0 <= lam <= 1, "lam", lam, "a number in [0, 1]")
    m, r, v = jnp.asarray(mask), masked(rewards, mask), masked(values, mask)
    decay = jnp.broadcast_to(gamma * jnp.asarray(lam, jnp.float32), (m.shape[0],))

    def back(carry: tuple[Array, Array], now: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        next_value, next_adv = carry
        live, reward, value = now
        adv = reward + gamma * next_value - value + decay * next_adv
        return (jnp.where(live, value, next_value), jnp.where(live, adv, next_adv)), jnp.where(live, adv, 0.0)

    zero = jnp.zeros(m.shape[0], jnp.float32)
    adv = jax.lax.scan(back, (zero, zero), (m.T, r.T, v.T), reverse=True)[1].T
    return adv, adv + v


def length_adaptive_lambda(lengths: Rows, *, alpha: float = 0.05) -> Float[Array, "B"]:
    """A λ that lets the final reward reach the first token of a long response.

        λ(n) = max(0, 1 − 1/(alpha·n))

    lengths: n [B], tokens;  alpha > 0.  VAPO, arXiv 2504.05118.
    """
    expect(alpha > 0, "alpha", alpha, "a number > 0")
    n = jnp.asarray(lengths, jnp.float32)
    return jnp.where(n > 0, jnp.maximum(0.0, 1.0 - 1.0 / (alpha * jnp.maximum(n, 1.0))), 0.0)


def length_adaptive_gae(
    rewards: Tokens, values: Tokens, mask: Mask, *, gamma: float = 1.0, alpha: float = 0.05
) -> tuple[Out, Out]:
    """`gae` with the λ of `length_adaptive_lambda` for each response's number of trained tokens.

        A = gae(r, V, λ = max(0, 1 − 1/(alpha·n)))

    Arguments as in these two.  VAPO, arXiv 2504.05118.
    """
    return gae(rewards, values, mask, gamma=gamma, lam=length_adaptive_lambda(jnp.sum(mask, axis=1), alpha=alpha))


def whiten(x: Tokens, mask: Mask, *, eps: float = 1e-8) -> Out:
    """Mean 0 and variance 1 over the batch's trained tokens.

        (x − mean) / √(var + eps)         var with n−1; exactly 0 where all are equal

    eps >= 0: in squared units of x, inside the root.
    """
    expect(eps >= 0, "eps", eps, "a number >= 0")
    x, n = masked(x, mask), jnp.sum(mask)
    low, high = jnp.min(jnp.where(mask, x, jnp.inf)), jnp.max(jnp.where(mask, x, -jnp.inf))
    constant = high - low <= NOISE * jnp.maximum(1.0, jnp.abs(high))
    centred = jnp.where(mask, x - jnp.sum(x) / jnp.maximum(n, 1), 0.0)
    var = jnp.sum(centred**2) / jnp.maximum(n - 1, 1)
    return jnp.where(constant, 0.0, centred / jnp.sqrt(jnp.where(constant, 1.0, var + eps)))


def reweight(adv: Tokens, old_logp: Tokens, *, alpha: float = 0.3) -> Out:
    """Unlikely tokens, whose gradients drown the others', count for less.

        A_t ← (alpha·π_old + 1 − alpha)·A_t,   π_old = e^old_logp

    alpha in [0, 1]. Tokens of advantage 0 stay 0.  Advantage reweighting, arXiv 2505.12929.
    """
    expect(0 <= alpha <= 1, "alpha", alpha, "a number in [0, 1]")
    a = jnp.asarray(adv, jnp.float32)
    return jnp.where(a == 0, 0.0, (alpha * jnp.exp(jnp.asarray(old_logp, jnp.float32)) + 1 - alpha) * a)


def distilled(adv: Tokens, old_logp: Tokens, teacher_logp: Tokens, mask: Mask, *, coef: float = 1.0) -> Out:
    """The advantage, and on each token how much likelier a teacher finds it: a reward of its own, with γ = 0.

        A_t ← A_t + coef·(teacher_logp − old_logp)

    So the tokens' expected gradient is that of −coef·KL(policy ‖ teacher), sampled. Alone it goes with `zero`.
    coef >= 0: per nat.  MiniLLM, arXiv 2306.08543; its long-range part is left out.
    """
    expect(coef >= 0, "coef", coef, "a number >= 0")
    return masked(adv, mask) + coef * log_ratio(teacher_logp, old_logp, mask)


# --- what they share
def _centred(rewards: Rewards) -> tuple[Group, Bool[Array, "P 1"]]:
    """R − mean R in float32, exactly 0 in constant groups; and which groups are constant."""
    r = jnp.asarray(rewards, jnp.float32)  # before any arithmetic: integer rewards would wrap or truncate
    spread = r.max(axis=1, keepdims=True) - r.min(axis=1, keepdims=True)
    scale = jnp.maximum(1.0, jnp.abs(r[:, :1]))
    constant = spread <= NOISE * scale
    return jnp.where(constant, jnp.zeros_like(r), r - r.mean(axis=1, keepdims=True)), constant


def _scaled(x: Group, of: Group, kept: Bool[AnyArray, "P"] | None, eps: float) -> Group:
    """x / (std of + eps), the std over the kept rows with n−1; 0 in the other rows, and everywhere if it is 0."""
    row = jnp.ones((of.shape[0], 1), bool) if kept is None else jnp.asarray(kept)[:, None]
    keep = jnp.broadcast_to(row, of.shape)
    n = jnp.sum(keep)
    mean = jnp.sum(jnp.where(keep, of, 0.0)) / jnp.maximum(n, 1)
    std = jnp.sqrt(jnp.sum(jnp.where(keep, of - mean, 0.0) ** 2) / jnp.maximum(n - 1, 1))
    return jnp.where(keep & (x != 0), x / jnp.where(std + eps == 0, 1.0, std + eps), 0.0)
