"""Advantages and corrections in float64 scalar loops, written from their equations: no jax, nothing of the package."""

import math

import numpy as np


def mean(values):
    return math.fsum(values) / len(values)


def spread(values, ddof=1):
    """Standard deviation; 0 where there are too few values to have one."""
    if len(values) <= ddof:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def constant(values):
    """Equal up to float noise: such a group carries no signal."""
    return max(values) - min(values) <= 1e-6 * max(1.0, max(abs(v) for v in values))


def groups(rewards):
    return [[float(r) for r in group] for group in np.asarray(rewards)]


def centred(group):
    return [0.0] * len(group) if constant(group) else [r - mean(group) for r in group]


# ---- groups: [P,G] -> [P,G] ----


def lite_ppo(rewards, eps=1e-6):
    table = groups(rewards)
    std = spread([r for group in table for r in group])
    return np.array([[a and a / (std + eps) for a in centred(group)] for group in table])


def scalerl(rewards, eps=1e-6, kept=None):
    table = [centred(group) for group in groups(rewards)]
    keep = [True] * len(table) if kept is None else [bool(k) for k in kept]
    pooled = [a for group, k in zip(table, keep, strict=True) if k for a in group]
    std = spread(pooled) if pooled else 0.0
    return np.array([[a / (std + eps) if k and a else 0.0 for a in g] for g, k in zip(table, keep, strict=True)])


def reinforce_rej(rewards):
    return np.array([[0.0 if constant(group) else r for r in group] for group in groups(rewards)])


def raft(rewards):
    return np.array([[r if r > 0 else 0.0 for r in group] for group in groups(rewards)])


def opo(rewards, lengths):
    rows = []
    for group, tokens in zip(groups(rewards), groups(lengths), strict=True):
        baseline = math.fsum(n * r for n, r in zip(tokens, group, strict=True)) / math.fsum(tokens)
        rows.append([0.0 if constant(group) else r - baseline for r in group])
    return np.array(rows)


def maxrl(rewards, eps=1e-6):
    return np.array([[a and a / (mean(group) + eps) for a in centred(group)] for group in groups(rewards)])


def passk(rewards):
    rows = []
    for group in groups(rewards):
        order = sorted(group)
        alone = order[-1] > order[-2] and not constant(group)
        rows.append([r - order[-2] if alone and r == order[-1] else 0.0 for r in group])
    return np.array(rows)


def opmd(rewards, tau=None):
    rows = []
    for group in groups(rewards):
        if tau is None:
            rows.append(centred(group))
            continue
        top = max(group)
        soft = top + tau * math.log(mean([math.exp((r - top) / tau) for r in group]))
        rows.append([0.0 if constant(group) else r - soft for r in group])
    return np.array(rows)


def gpg(rewards):
    table = groups(rewards)
    responses = sum(len(group) for group in table)
    silent = sum(len(group) for group in table if constant(group))
    alpha = responses / (responses - silent) if silent < responses else 0.0
    return np.array([[alpha * a for a in centred(group)] for group in table])


def gdpo(parts, weights=None, eps=1e-6, ddof=1, kept=None):
    prompts, size, n = parts.shape
    weights = [1.0] * n if weights is None else weights
    total = np.zeros((prompts, size))
    for p in range(prompts):
        for k in range(n):
            group = [float(r) for r in parts[p, :, k]]
            std = spread(group, ddof) + eps
            total[p] += [weights[k] * (a and a / std) for a in centred(group)]
    rows = np.repeat((np.ones(prompts, bool) if kept is None else kept)[:, None], size, axis=1)
    return np.where(total == 0, 0.0, whiten(total, rows))


def dcpo_sas(rewards, seen, prompt_ids, eps=1e-6, ddof=1):
    """`seen`: prompt -> every reward it got so far, in order; this batch is added to it."""
    rows = []
    for group, prompt in zip(groups(rewards), prompt_ids, strict=True):
        history = seen.setdefault(int(prompt), [])
        history.extend(group)
        i = len(history) // len(group)
        total = [0.0] * len(group)
        if not constant(history):
            total = [(r - mean(history)) / (spread(history, ddof) + eps) for r in group]
        if constant(group):
            rows.append([a / i for a in total])
            continue
        new = [(r - mean(group)) / (spread(group, ddof) + eps) for r in group]
        row = []
        for a, b in zip(new, total, strict=True):
            s1, s2 = (i - 1) / i * a + b / i, a / i + (i - 1) / i * b
            row.append(s1 if abs(s1) < abs(s2) else s2)
        rows.append(row)
    return np.array(rows)


# ---- tokens: [B,T] ----


def trained(mask, i):
    """Columns of the trained tokens of row i."""
    return [t for t in range(mask.shape[1]) if mask[i, t]]


def whiten(x, mask, eps=1e-8):
    out = np.zeros(mask.shape)
    places = [(i, t) for i in range(mask.shape[0]) for t in trained(mask, i)]
    values = [float(x[place]) for place in places]
    if len(values) > 1 and not constant(values):
        for place, value in zip(places, values, strict=True):
            out[place] = (value - mean(values)) / math.sqrt(spread(values) ** 2 + eps)
    return out


def token_rewards(rewards, kl, mask, beta=0.0):
    out = np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in trained(mask, i):
            out[i, t] = -beta * float(kl[i, t])
            if t == trained(mask, i)[-1]:
                out[i, t] += float(rewards[i])
    return out


def rewards_to_go(rewards, mask, gamma=1.0):
    out = np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in trained(mask, i):
            later = [s for s in trained(mask, i) if s >= t]
            out[i, t] = math.fsum(gamma**k * float(rewards[i, s]) for k, s in enumerate(later))
    return out


def reinforce_pp(rewards, kl, mask, beta=0.0):
    return whiten(rewards_to_go(token_rewards(rewards, kl, mask, beta), mask), mask)


def reinforce_pp_baseline(rewards, mask):
    prompts, group, length = mask.shape
    flat = np.array([centred(row) for row in groups(rewards)]).reshape(-1)
    spread_out = np.repeat(flat[:, None], length, axis=1)
    return whiten(spread_out, mask.reshape(-1, length)).reshape(prompts, group, length)


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """A_t as the sum over later temporal differences that it is short for, not as the recursion."""
    adv, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    lams = np.broadcast_to(np.asarray(lam, np.float64), mask.shape[:1])
    for i in range(mask.shape[0]):
        r = [float(rewards[i, t]) for t in trained(mask, i)]
        v = [float(values[i, t]) for t in trained(mask, i)] + [0.0]
        delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
        for k, t in enumerate(trained(mask, i)):
            decay = gamma * float(lams[i])
            adv[i, t] = math.fsum(decay ** (j - k) * delta[j] for j in range(k, len(delta)))
            returns[i, t] = adv[i, t] + v[k]
    return adv, returns


def reweight(adv, old_logp, alpha=0.3):
    out = np.zeros(adv.shape)
    for i in range(adv.shape[0]):
        for t in range(adv.shape[1]):
            out[i, t] = (alpha * math.exp(float(old_logp[i, t])) + 1 - alpha) * float(adv[i, t])
    return out


# ---- corrections: [B,T], a response's rule is told its log ratios and gives its tokens' c ----


def hold(x):
    return max(-80.0, min(80.0, x))


def per_response(rule):
    """rule(k of one response, hyper) -> c of its tokens   becomes   (old_logp, sampler_logp, mask, hyper) -> c."""

    def correction(old_logp, sampler_logp, mask, **hyper):
        c = np.zeros(mask.shape)
        for i in range(mask.shape[0]):
            k = [hold(float(old_logp[i, t]) - float(sampler_logp[i, t])) for t in trained(mask, i)]
            if k:
                c[i, trained(mask, i)] = rule(k, **hyper)
        return c

    return correction


def product(k):
    return math.exp(hold(math.fsum(k)))


tis = per_response(lambda k, cap=2.0: [min(math.exp(x), cap) for x in k])
tis_sequence = per_response(lambda k, cap=2.0: min(product(k), cap))
mis_token = per_response(lambda k, low=0.5, high=5.0: [math.exp(x) * (low <= math.exp(x) <= high) for x in k])
mis_sequence = per_response(lambda k, low=0.5, high=2.0: product(k) * (low <= product(k) <= high))
geometric_rejection = per_response(lambda k, low=0.999, high=1.001: float(low <= math.exp(mean(k)) <= high))
k3_rejection = per_response(lambda k, max_k3=0.01: float(mean([math.exp(x) - 1 - x for x in k]) <= max_k3))
veto = per_response(lambda k, low=1e-4, high=100.0: float(all(low <= math.exp(x) <= high for x in k)))


def opsm(logp, sampler_logp, adv, mask, delta):
    c = np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        t = trained(mask, i)
        if t:
            gap = mean([float(sampler_logp[i, s]) - float(logp[i, s]) for s in t])
            c[i, t] = 0.0 if mean([float(adv[i, s]) for s in t]) < 0 and gap > delta else 1.0
    return c
