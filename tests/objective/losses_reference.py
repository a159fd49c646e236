"""The policy losses once more, in float64 scalars: values and closed-form derivatives, written case by case.

Plain Python numbers; no jax, no clip or min over arrays, nothing from the package. A reference returns (x, h), both
[B,T]. For most losses h[i,t] is ∂x[i,t]/∂logp[i,t], the only derivative of x[i,t] that is not 0. The COUPLED ones
repeat one value x_i over a response, and there h[i,t] is ∂x_i/∂logp[i,t]; `pull_back` knows the difference.
"""

import math

import numpy as np

COUPLED = ("gspo", "luspo", "gmpo", "rspo", "opmd")
LIMIT = 80.0  # nats


def batch(seed=0, spread=0.6, rows=12, columns=7):
    """Ragged rows with holes, one row empty, one full, one of advantage 0; ratios on both sides of any clip."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, columns)).astype(np.float32)
    shift = spread * rng.normal(size=(rows, 1))
    logp = (old + shift + spread * rng.normal(size=(rows, columns))).astype(np.float32)
    adv = rng.normal(size=(rows, columns)).astype(np.float32)
    mask = np.arange(columns) < rng.integers(1, columns + 1, rows)[:, None]
    mask &= rng.random((rows, columns)) > 0.15
    mask[1], mask[2], mask[rows // 2], adv[3] = True, True, False, 0
    mask[1, columns // 2] = False
    return logp, old, adv, mask


def toy():
    """Two responses, of three tokens and of two; A = +1 and −1."""
    d = np.array([[0.1, -0.2, 0.6], [-0.5, 0.05, 0.3]], np.float32)
    mask = np.array([[True, True, True], [True, True, False]])
    old = np.full((2, 3), -1.0, np.float32)
    return old + d, old, np.array([[1.0] * 3, [-1.0] * 3], np.float32), mask


def log_router_ratios(mask, seed=0):
    """Log router ratios in nats, from 0 down to well below any floor."""
    return (-0.3 * np.random.default_rng(seed).exponential(size=mask.shape)).astype(np.float32)


def chosen(mask, seed=0):
    """About a third of all positions, masked ones among them."""
    return np.random.default_rng(seed).random(mask.shape) < 0.35


def sequence_weights(mask):
    """1/(tokens of the row · rows that have a token)."""
    w = np.zeros(mask.shape)
    rows = sum(1 for row in mask if row.any())
    for i, row in enumerate(mask):
        for t in range(len(row)):
            if row[t]:
                w[i, t] = 1 / (int(row.sum()) * rows)
    return w


def pull_back(name, h, u, mask):
    """d(Σ u·x)/d logp from a reference's h."""
    g = np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[i, t]:
                continue
            if name in COUPLED:
                g[i, t] = h[i, t] * sum(float(u[i, s]) for s in range(mask.shape[1]) if mask[i, s])
            else:
                g[i, t] = h[i, t] * float(u[i, t])
    return g


def by_token(rule, mask, *arrays):
    x, h = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                x[i, t], h[i, t] = rule(*(float(a[i, t]) for a in arrays))
    return x, h


def by_response(rule, mask, *arrays):
    """`rule` sees the lists of a response's unmasked numbers and returns (value or values, derivatives)."""
    x, h = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        if tokens:
            x[i, tokens], h[i, tokens] = rule(*([float(a[i, t]) for t in tokens] for a in arrays))
    return x, h


def held(l, old):
    """The log ratio and its derivative: beyond ±80 nats it is a constant."""
    d = l - old
    if d > LIMIT:
        return LIMIT, 0.0
    if d < -LIMIT:
        return -LIMIT, 0.0
    return d, 1.0


def surrogate(r, a, lowest, highest, dual=None):
    """(loss, whether the ratio still moves it) of PPO's clipped objective."""
    if a > 0 and r > highest:
        return -highest * a, 0.0
    if a < 0 and r < lowest:
        return -lowest * a, 0.0
    if a < 0 and dual is not None and r > dual:
        return -dual * a, 0.0
    return -r * a, 1.0


# ---- token level ----


def cispo(logp, old, adv, mask, ratio_max=5.0, ratio_min=0.0):
    def rule(l, o, a):
        r = math.exp(held(l, o)[0])
        weight = ratio_max if r > ratio_max else ratio_min if r < ratio_min else r
        return -weight * a * l, -weight * a

    return by_token(rule, mask, logp, old, adv)


def sapo(logp, old, adv, mask, tau_pos=1.0, tau_neg=1.05):
    def rule(l, o, a):
        d, slope = held(l, o)
        r, tau = math.exp(d), tau_pos if a > 0 else tau_neg
        e = math.exp(-tau * (r - 1))
        on, off = 1 / (1 + e), e / (1 + e)
        return -4 / tau * on * a, -4 * on * off * r * a * slope

    return by_token(rule, mask, logp, old, adv)


def dcpo_bounds(q, eps_low=0.16, eps_high=0.2, ratio_cap=10.0):
    inside = 1 - 4 * eps_low / q
    low = 0.5 if inside < 0 else 0.5 + math.sqrt(inside) / 2
    high = 0.5 + math.sqrt(1 + 4 * eps_high / q) / 2
    return low, high if high < ratio_cap else ratio_cap


def dcpo(logp, old, adv, mask, eps_low=0.16, eps_high=0.2, ratio_cap=10.0, dual_clip=10.0):
    def rule(l, o, a):
        d, slope = held(l, o)
        low, high = dcpo_bounds(math.exp(o), eps_low, eps_high, ratio_cap)
        x, live = surrogate(math.exp(d), a, low, high, dual_clip)
        return x, x * live * slope

    return by_token(rule, mask, logp, old, adv)


def topr(logp, old, adv, mask):
    def rule(ls, os, advs):
        total = sum(held(l, o)[0] for l, o in zip(ls, os, strict=True))
        taper = 1.0 if total > 0 else math.exp(total)
        weights = [1.0 if a >= 0 else taper for a in advs]
        slopes = [-c * a for c, a in zip(weights, advs, strict=True)]
        return [s * l for s, l in zip(slopes, ls, strict=True)], slopes

    return by_response(rule, mask, logp, old, adv)


def vespo(logp, old, adv, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    def rule(ls, os, advs):
        total = sum(held(l, o)[0] for l, o in zip(ls, os, strict=True))
        total = math.log(1e-8) if total < math.log(1e-8) else 20.0 if total > 20 else total
        w = math.exp(total)
        choices = [(k_pos, lambda_pos) if a >= 0 else (k_neg, lambda_neg) for a in advs]
        slopes = [-(w**k) * math.exp(lam * (1 - w)) * a for (k, lam), a in zip(choices, advs, strict=True)]
        return [s * l for s, l in zip(slopes, ls, strict=True)], slopes

    return by_response(rule, mask, logp, old, adv)


def probability(l):
    return math.exp(l) if l < 0 else 1.0


def stopped_where(too_far):
    """The policy gradient with a ratio of at most 20, but nothing where too_far(p, q, a, clip_low, clip_high)."""

    def loss(logp, old, adv, mask, **clips):
        def rule(l, o, a):
            if too_far(probability(l), probability(o), a, **clips):
                return 0.0, 0.0
            r = math.exp(held(l, o)[0])
            weight = r if r < 20 else 20.0
            return -weight * a * l, -weight * a

        return by_token(rule, mask, logp, old, adv)

    return loss


def binary_kl(p, q):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))


dppo_tv = stopped_where(
    lambda p, q, a, clip_low=0.2, clip_high=0.2: (a > 0 and p - q > clip_high) or (a < 0 and q - p > clip_low)
)
dppo_kl = stopped_where(
    lambda p, q, a, clip_low=0.05, clip_high=0.05: (
        (a > 0 and p > q and binary_kl(p, q) > clip_high) or (a < 0 and p < q and binary_kl(p, q) > clip_low)
    )
)


def gpg(logp, old, adv, mask):
    return by_token(lambda l, a: (-a * l, -a), mask, logp, adv)


def clip_cov(logp, old, adv, mask, selected, clip_low=0.2, clip_high=0.2):
    def rule(l, o, a, s):
        d, slope = held(l, o)
        x, live = surrogate(math.exp(d), a, 1 - clip_low, 1 + clip_high)
        return (0.0, 0.0) if s else (x, x * live * slope)

    return by_token(rule, mask, logp, old, adv, selected)


def kl_cov(logp, old, adv, mask, selected, coef=0.1):
    def rule(l, o, a, s):
        d, slope = held(l, o)
        x, sign = -math.exp(d) * a, (d > 0) - (d < 0)
        return (x + coef * abs(d), (x + coef * sign) * slope) if s else (x, x * slope)

    return by_token(rule, mask, logp, old, adv, selected)


def value_loss(values, old_values, returns, mask, clip=0.2):
    def rule(v, o, ret):
        near = v
        if clip is not None and v > o + clip:
            near = o + clip
        if clip is not None and v < o - clip:
            near = o - clip
        if (near - ret) ** 2 > (v - ret) ** 2:
            return (near - ret) ** 2 / 2, 0.0
        return (v - ret) ** 2 / 2, v - ret

    return by_token(rule, mask, values, old_values, returns)


# ---- response level ----


def gspo(logp, old, adv, mask, clip_low=3e-4, clip_high=4e-4):
    def rule(ls, os, advs):
        d, slopes = zip(*(held(l, o) for l, o in zip(ls, os, strict=True)), strict=True)
        n = len(ls)
        x, live = surrogate(math.exp(sum(d) / n), sum(advs) / n, 1 - clip_low, 1 + clip_high)
        return x, [x * live * slope / n for slope in slopes]

    return by_response(rule, mask, logp, old, adv)


def luspo(logp, old, adv, mask, clip_low=2e-3, clip_high=2.5e-3):
    x, h = gspo(logp, old, adv, mask, clip_low, clip_high)
    n = mask.sum(axis=1)[:, None]
    return n * x, n * h


def gspo_token(logp, old, adv, mask, clip_low=3e-4, clip_high=4e-4):
    """One ratio for the response, an advantage for each token; each token moves its own copy of the ratio alone."""

    def rule(ls, os, advs):
        d, slopes = zip(*(held(l, o) for l, o in zip(ls, os, strict=True)), strict=True)
        s = math.exp(sum(d) / len(ls))
        pairs = [surrogate(s, a, 1 - clip_low, 1 + clip_high) for a in advs]
        return [x for x, _ in pairs], [x * live * slope for (x, live), slope in zip(pairs, slopes, strict=True)]

    return by_response(rule, mask, logp, old, adv)


def geometric(d, slopes, a, clip):
    """GMPO of one response: −A·exp(mean of the one-sidedly clipped log ratios)."""
    bounded = []
    for x, slope in zip(d, slopes, strict=True):
        if a > 0 and x > clip:
            bounded.append((clip, 0.0))
        elif a < 0 and x < -clip:
            bounded.append((-clip, 0.0))
        else:
            bounded.append((x, slope))
    q = math.exp(sum(x for x, _ in bounded) / len(d))
    return -a * q, [-a * q * slope / len(d) for _, slope in bounded]


def gmpo(logp, old, adv, mask, clip=0.4):
    def rule(ls, os, advs):
        d, slopes = zip(*(held(l, o) for l, o in zip(ls, os, strict=True)), strict=True)
        return geometric(d, slopes, sum(advs) / len(advs), clip)

    return by_response(rule, mask, logp, old, adv)


def rspo(logp, old, adv, mask, log_router_ratio, gamma_min=0.8, clip=0.4):
    def rule(ls, os, advs, routers):
        d, slopes = zip(*(held(l, o) for l, o in zip(ls, os, strict=True)), strict=True)
        floor = math.log(gamma_min)
        moved = [x + (g if g > floor else floor) for x, g in zip(d, routers, strict=True)]
        return geometric(moved, slopes, sum(advs) / len(advs), clip)

    return by_response(rule, mask, logp, old, adv, log_router_ratio)


def opmd(logp, old, adv, mask, tau=0.1):
    def rule(ls, os, advs):
        d, slopes = zip(*(held(l, o) for l, o in zip(ls, os, strict=True)), strict=True)
        a, total = sum(advs) / len(advs), sum(d)
        return -a * sum(ls) + tau / 2 * total**2, [-a + tau * total * slope for slope in slopes]

    return by_response(rule, mask, logp, old, adv)


# ---- choosing tokens ----


def how_many(frac, mask):
    return max(1, round(frac * int(mask.sum())))


def covariances(logp, adv, mask):
    """{(row, position): (A − mean A)(logp − mean logp)} of the unmasked tokens; means over all of them."""
    tokens = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    if not tokens:
        return {}
    mean_a = sum(float(adv[at]) for at in tokens) / len(tokens)
    mean_l = sum(float(logp[at]) for at in tokens) / len(tokens)
    return {at: (float(adv[at]) - mean_a) * (float(logp[at]) - mean_l) for at in tokens}


def candidates(cov, low=None, high=None, eligible=None):
    return [
        at
        for at, c in cov.items()
        if (low is None or c > low) and (high is None or c < high) and (eligible is None or eligible[at])
    ]


def largest(cov, among, k, shape):
    """Bool [B,T]: the k of `among` with the largest covariance, of equal ones the earlier in reading order."""
    out = np.zeros(shape, bool)
    for at in sorted(among, key=lambda at: (-cov[at], at))[:k]:
        out[at] = True
    return out


def not_clipped(logp, old, adv, clip_low=0.2, clip_high=0.2):
    """Where PPO's clip has not already silenced the token."""
    out = np.ones(logp.shape, bool)
    for at in np.ndindex(logp.shape):
        r = math.exp(held(float(logp[at]), float(old[at]))[0])
        if (adv[at] > 0 and r > 1 + clip_high) or (adv[at] < 0 and r < 1 - clip_low):
            out[at] = False
    return out
