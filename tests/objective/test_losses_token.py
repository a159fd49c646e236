"""Token-level losses and the choice of tokens: by hand, against float64 scalar loops, closed forms and identities."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest
from losses_reference import batch, candidates, chosen, covariances, how_many, largest, not_clipped, pull_back, toy

from jaxrl_llm.objective.losses import (
    cispo,
    clip_cov,
    dcpo,
    gpg,
    kl_cov,
    ppo_clip,
    reinforce,
    sapo,
    select_clip_cov,
    select_cov,
    top_entropy,
    topr,
    value_loss,
)
from jaxrl_llm.objective.token_weights import token_weights

ln = math.log


def value_and_grad(loss, logp, *rest, u=None):
    """x[B,T] and d Σ u·x / d logp; u = 1 unless given."""
    x, pull = jax.vjp(lambda l: loss(l, *rest), jnp.asarray(logp, jnp.float32))
    (g,) = pull(jnp.ones_like(x) if u is None else jnp.asarray(u, x.dtype))
    return x, g


def assert_same(loss, other, *data, rtol=0.0):
    for a, b in zip(value_and_grad(loss, *data), value_and_grad(other, *data), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol)


def one(loss, ratio, adv, old=-1.3, **hyper):
    """x and its derivative for a single token."""
    arrays = [np.array([[v]], np.float32) for v in (old + ln(ratio), old, adv)]
    x, g = value_and_grad(partial(loss, **hyper), *arrays, np.array([[True]]))
    return float(x[0, 0]), float(g[0, 0])


# ---- float64 scalar loops ----


@pytest.mark.parametrize(
    ("loss", "hyper"),
    [
        (cispo, {}),
        (cispo, {"ratio_max": 1.5, "ratio_min": 0.7}),
        (sapo, {}),
        (sapo, {"tau_pos": 0.4, "tau_neg": 2.0}),
        (dcpo, {}),
        (dcpo, {"eps_low": 0.05, "eps_high": 0.1, "ratio_cap": 1.2, "dual_clip": 1.5}),
        (topr, {}),
        (gpg, {}),
        (clip_cov, {}),
        (clip_cov, {"clip_low": 0.1, "clip_high": 0.5}),
        (kl_cov, {}),
        (kl_cov, {"coef": 2.0}),
        (value_loss, {}),
        (value_loss, {"clip": 0.5}),
        (value_loss, {"clip": None}),
    ],
)
def test_scalar_loops(loss, hyper):
    for seed, (rows, columns) in enumerate([(12, 7), (6, 5), (15, 4)]):
        data = batch(seed, rows=rows, columns=columns)
        mask = data[3]
        hyper = hyper | ({"selected": chosen(mask, seed)} if loss in (clip_cov, kl_cov) else {})
        expected_x, h = getattr(reference, loss.__name__)(*data, **hyper)
        for u in (np.ones(mask.shape), np.random.default_rng(seed).normal(size=mask.shape)):
            x, g = value_and_grad(partial(loss, **hyper), *data, u=u)
            np.testing.assert_allclose(x, expected_x, rtol=3e-6, atol=1e-6)
            np.testing.assert_allclose(g, pull_back(loss.__name__, h, u, mask), rtol=3e-6, atol=4e-6)


# ---- CISPO ----


@pytest.mark.parametrize(
    ("adv", "ratio", "weight"), [(1, 2.0, 1.5), (-1, 2.0, 1.5), (1, 0.2, 0.5), (-3, 0.2, 0.5), (1, 1.2, 1.2)]
)
def test_cispo_by_hand(adv, ratio, weight):
    """Past a cap the weight stops, the gradient never does; the caps are ratios, not distances from 1."""
    x, g = one(cispo, ratio, adv, ratio_max=1.5, ratio_min=0.5)
    assert (x, g) == pytest.approx((-weight * adv * (ln(ratio) - 1.3), -weight * adv), rel=1e-6)


def test_cispo_default_caps():
    assert one(cispo, 7.0, 1.0)[1] == pytest.approx(-5.0, rel=1e-6)
    assert one(cispo, 4.9, -1.0)[1] == pytest.approx(4.9, rel=1e-6)
    assert one(cispo, 1e-3, 1.0)[1] == pytest.approx(-1e-3, rel=1e-5)  # no floor


def test_cispo_worked_toy():
    logp, old, adv, mask = toy()
    _, g = value_and_grad(partial(cispo, ratio_max=1.5), logp, old, adv, mask, u=token_weights(mask, "token"))
    np.testing.assert_allclose(g, [[-0.221034, -0.163746, -0.3], [0.121306, 0.210254, 0]], atol=6e-7)


@pytest.mark.parametrize("loss", [partial(cispo, ratio_max=math.inf), cispo, topr, gpg])
def test_on_policy_gradient_is_reinforce(loss):
    logp, _, adv, mask = batch()
    _, g = value_and_grad(loss, logp, logp, adv, mask)
    _, expected = value_and_grad(reinforce, logp, logp, adv, mask)
    np.testing.assert_array_equal(g, expected)


def test_uncapped_cispo_has_the_gradient_of_the_plain_ratio():
    data = batch(1, spread=1.5)
    _, g = value_and_grad(partial(cispo, ratio_max=math.inf), *data)
    _, expected = value_and_grad(partial(kl_cov, selected=np.zeros_like(data[3])), *data)
    np.testing.assert_allclose(g, expected, rtol=1e-6)


# ---- SAPO ----


def test_sapo_by_hand():
    """r = 2: −4σ(1) and 4/1.05 σ(1.05); at r = 1: half of 4/τ."""
    assert one(sapo, 2.0, 1.0) == pytest.approx((-2.924234, -1.572896), rel=1e-6)
    assert one(sapo, 2.0, -1.0) == pytest.approx((2.822000, 1.536220), rel=1e-6)
    assert one(sapo, 1.0, 2.0) == pytest.approx((-4.0, -2.0), rel=1e-6)
    assert one(sapo, 1.0, -1.0) == pytest.approx((2 / 1.05, 1.0), rel=1e-6)
    assert one(sapo, 3.0, 0.0) == (0, 0)


@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 1.7, 4.0])
@pytest.mark.parametrize(("adv", "tau"), [(2.0, 0.6), (-2.0, 1.4)])
def test_sapos_weight_is_sech_squared(ratio, adv, tau):
    _, g = one(sapo, ratio, adv, tau_pos=0.6, tau_neg=1.4)
    weight = g / (-ratio * adv)
    assert weight == pytest.approx(1 / math.cosh(tau * (ratio - 1) / 2) ** 2, rel=1e-5)


def test_sapo_worked_toy():
    logp, old, adv, mask = toy()
    loss = (token_weights(mask, "sequence") * sapo(logp, old, adv, mask)).sum()
    np.testing.assert_allclose(loss, -0.2489699, atol=1.2e-7)


# ---- DCPO ----


@pytest.mark.parametrize(
    ("q", "low", "high"),
    [(0.01, 0.5, 5), (0.1, 0.5, 2), (0.5, 0.5, 1.306226), (0.9, 0.768742, 1.187184), (1.0, 0.8, 1.170820)],
)
def test_dcpo_bounds(q, low, high):
    """Read off from beyond both: the value there is the bound, and there is no gradient."""
    assert one(dcpo, 100.0, 1.0, old=ln(q)) == pytest.approx((-high, 0.0), abs=6e-7)
    assert one(dcpo, 0.01, -1.0, old=ln(q)) == pytest.approx((low, 0.0), abs=6e-7)
    for ratio, adv in [(high - 0.01, 1.0), (low + 0.01, -1.0)]:
        assert one(dcpo, ratio, adv, old=ln(q)) == pytest.approx((-ratio * adv, -ratio * adv), rel=1e-6)


@pytest.mark.parametrize(
    ("adv", "ratio", "q", "value", "slope"),
    [
        (1.0, 0.3, 0.1, -0.3, -0.3),
        (1.0, 2.5, 0.1, -2.0, 0.0),
        (-1.0, 0.3, 0.1, 0.5, 0.0),
        (-1.0, 2.5, 0.1, 2.5, 2.5),
        (-2.0, 9.9, 0.1, 19.8, 19.8),
        (-2.0, 12.0, 0.1, 20.0, 0.0),  # dual clip
        (1.0, 12.0, 0.001, -10.0, 0.0),  # ½ + ½√801 = 14.7 is capped
        (1.0, 9.9, 0.001, -9.9, -9.9),
    ],
)
def test_dcpo_quadrants(adv, ratio, q, value, slope):
    assert one(dcpo, ratio, adv, old=ln(q)) == pytest.approx((value, slope), rel=2e-6)


def test_dcpo_of_certain_tokens_is_ppo():
    """q = 1 everywhere: the bounds are .8 and ½ + ½√1.8."""
    d = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    data = d, np.zeros_like(d), batch(rows=4, columns=6)[2], np.ones(d.shape, bool)
    ppo = partial(ppo_clip, clip_low=0.2, clip_high=math.sqrt(1.8) / 2 - 0.5, dual_clip=1.9)
    assert_same(partial(dcpo, dual_clip=1.9), ppo, *data, rtol=2e-6)


def test_a_dual_clip_out_of_reach_is_none():
    data = batch(2, spread=2.0)
    assert_same(partial(ppo_clip, dual_clip=1e36), ppo_clip, *data)
    x, _ = value_and_grad(partial(dcpo, dual_clip=1e36), *data)
    np.testing.assert_allclose(x, reference.dcpo(*data, dual_clip=None)[0], rtol=1e-5, atol=1e-6)
    assert np.abs(x - dcpo(*data)).max() > 1


# ---- TOPR ----


def test_topr_by_hand():
    """Row 0: Σd = −.5; row 1: Σd = +.5, of which nothing is made. Only tokens with A < 0 are tapered."""
    d = np.array([[-0.8, 0.3, 9.0], [0.9, -0.4, -7.0]], np.float32)
    mask = np.array([[True, True, False], [True, True, False]])
    old = np.full_like(d, -1.5)
    adv = np.array([[-2.0, 1.0, -1.0], [-2.0, 1.0, -1.0]], np.float32)
    x, g = value_and_grad(topr, old + d, old, adv, mask)
    taper = 0.6065307
    np.testing.assert_allclose(g, [[2 * taper, -1, 0], [2, -1, 0]], rtol=1e-6)
    np.testing.assert_allclose(x, [[2 * taper * -2.3, 1.2, 0], [2 * -0.6, 1.9, 0]], rtol=1e-6)


# ---- Clip-Cov and KL-Cov ----


@pytest.mark.parametrize("adv", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
def test_clip_cov_quadrants(adv, ratio):
    for selected, expected in [(True, (0, 0)), (False, one(ppo_clip, ratio, adv, clip_high=0.28))]:
        assert one(clip_cov, ratio, adv, clip_high=0.28, selected=np.array([[selected]])) == expected


def test_clip_cov_of_nothing_selected_is_ppo():
    data = batch(3)
    assert_same(
        partial(clip_cov, selected=np.zeros_like(data[3]), clip_low=0.1), partial(ppo_clip, clip_low=0.1), *data
    )


@pytest.mark.parametrize(
    ("ratio", "adv", "selected", "value", "slope"),
    [
        (1.5, 2.0, True, -3.0 + 0.5 * ln(1.5), -3.0 + 0.5),
        (0.5, 2.0, True, -1.0 + 0.5 * ln(2), -1.0 - 0.5),
        (1.0, 2.0, True, -2.0, -2.0),  # |·| has no slope at 0
        (1.5, 2.0, False, -3.0, -3.0),
        (0.5, -2.0, False, 1.0, 1.0),
    ],
)
def test_kl_cov_by_hand(ratio, adv, selected, value, slope):
    assert one(kl_cov, ratio, adv, coef=0.5, selected=np.array([[selected]])) == pytest.approx((value, slope), rel=2e-6)


def test_kl_cov_without_a_coefficient_is_the_plain_ratio():
    logp, old, adv, mask = batch(3)
    x, g = value_and_grad(partial(kl_cov, selected=chosen(mask), coef=0.0), logp, old, adv, mask)
    expected = np.where(mask, -np.exp(np.float64(logp) - old) * adv, 0)
    np.testing.assert_allclose(x, expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(g, expected, rtol=2e-6, atol=1e-7)


# ---- value loss ----


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (1.5, 2.0, 0.32, 0.0),  # old 1, held at 1.2: that error is the larger
        (0.5, 2.0, 1.125, -1.5),
        (1.5, 0.0, 1.125, 1.5),
        (0.5, 0.0, 0.32, 0.0),
        (1.1, 2.0, 0.405, -0.9),
        (0.9, 2.0, 0.605, -1.1),
    ],
)
def test_value_loss_quadrants(value, target, loss, slope):
    arrays = [np.array([[v]], np.float32) for v in (value, 1.0, target)]
    x, g = value_and_grad(value_loss, *arrays, np.array([[True]]))
    np.testing.assert_allclose([x[0, 0], g[0, 0]], [loss, slope], rtol=1e-6, atol=1e-7)
    x, g = value_and_grad(partial(value_loss, clip=None), *arrays, np.array([[True]]))
    np.testing.assert_allclose([x[0, 0], g[0, 0]], [(value - target) ** 2 / 2, value - target], rtol=1e-6)


# ---- select_cov ----


def assert_reference_selection(got, logp, adv, mask, frac, low=None, high=None, eligible=None):
    cov = covariances(logp, adv, mask)
    among = candidates(cov, low, high, eligible)
    np.testing.assert_array_equal(got, largest(cov, among, how_many(frac, mask), mask.shape))


@pytest.mark.parametrize("frac", [2e-4, 0.1, 0.33, 1.0])
@pytest.mark.parametrize("bounds", [{}, {"low": 0.2}, {"high": 0.5}, {"low": -0.3, "high": 0.4}])
def test_select_cov_against_sorting(frac, bounds):
    for seed in range(3):
        logp, _, adv, mask = batch(seed)
        assert_reference_selection(select_cov(logp, adv, mask, frac=frac, **bounds), logp, adv, mask, frac, **bounds)
        eligible = chosen(mask, seed)
        got = select_cov(logp, adv, mask, frac=frac, eligible=eligible, **bounds)
        assert_reference_selection(got, logp, adv, mask, frac, eligible=eligible, **bounds)


def test_select_cov_default_is_one_token_in_five_thousand():
    rng = np.random.default_rng(0)
    logp, adv = rng.normal(size=(2, 100, 160)).astype(np.float32)
    mask = rng.random(logp.shape) < 0.9
    got = np.asarray(select_cov(logp, adv, mask))
    assert got.sum() == 3  # .0002 · 14 400
    assert_reference_selection(got, logp, adv, mask, 2e-4)


def test_the_means_are_over_the_whole_batch():
    """Each row's advantage is constant: with means over rows every covariance would be 0."""
    logp = np.array([[-1.0, -3.0], [-1.0, -3.0]], np.float32)
    adv = np.array([[1.0, 1.0], [-1.0, -1.0]], np.float32)
    got = select_cov(logp, adv, np.ones((2, 2), bool), frac=1.0, low=0.5)
    np.testing.assert_array_equal(got, [[True, False], [False, True]])


def test_of_equal_covariances_the_earlier_is_taken():
    """All exact: cov is +1 on positions 0, 3, 4, 7 in reading order, −1 elsewhere."""
    logp = np.array([[-1, -3, -3, -1], [-3, -1, -1, -3]], np.float32)
    adv = np.array([[1, 1, 1, 1], [-1, -1, -1, -1]], np.float32)
    mask = np.ones((2, 4), bool)
    for k, taken in [(1, [0]), (2, [0, 3]), (3, [0, 3, 4]), (5, [0, 3, 4, 7, 1])]:
        got = np.asarray(select_cov(logp, adv, mask, frac=k / 8)).ravel()
        assert set(np.flatnonzero(got)) == set(taken)


def test_select_covs_bounds_are_strict_and_may_leave_nothing():
    logp = np.array([[-1, -3, -3, -1]], np.float32)
    adv = np.array([[1, 1, -1, -1]], np.float32)  # cov 1, −1, 1, −1
    mask = np.ones((1, 4), bool)
    assert not np.any(select_cov(logp, adv, mask, frac=1.0, low=1.0))
    assert not np.any(select_cov(logp, adv, mask, frac=1.0, high=-1.0))
    between = select_cov(logp, adv, mask, frac=1.0, low=0.9, high=1.1)
    np.testing.assert_array_equal(between, [[True, False, True, False]])
    for select in (select_cov, partial(select_cov, key=jax.random.key(0))):
        assert not np.any(select(logp, adv, np.zeros_like(mask), frac=1.0))


def test_select_cov_with_a_key_draws_k_candidates():
    logp, _, adv, mask = batch(1)
    cov = covariances(logp, adv, mask)
    among = np.zeros(mask.shape, bool)
    for at in candidates(cov, low=0.05):
        among[at] = True
    k, frac = 4, 4 / int(mask.sum())
    assert among.sum() > 2 * k
    keys = jax.random.split(jax.random.key(7), 400)
    draws = np.asarray(jax.vmap(lambda key: select_cov(logp, adv, mask, frac=frac, low=0.05, key=key))(keys))
    np.testing.assert_array_equal(draws.sum(axis=(1, 2)), k)
    assert not np.any(draws & ~among)
    share = draws.mean(axis=0)[among]  # each with chance k/n, of deviation < .025 over the draws
    np.testing.assert_allclose(share, k / among.sum(), atol=0.1)
    np.testing.assert_array_equal(select_cov(logp, adv, mask, frac=frac, low=0.05, key=keys[3]), draws[3])
    everything = select_cov(logp, adv, mask, frac=1.0, low=0.05, key=keys[0])
    np.testing.assert_array_equal(everything, among)  # fewer candidates than k


def test_select_clip_cov():
    """Random tokens of covariance between the bounds that PPO's clip has not silenced."""
    logp, old, adv, mask = batch(2, rows=40, spread=0.15)
    frac = 4 / int(mask.sum())
    for bounds in [{}, {"low": 0.2, "high": 2.0, "clip_low": 0.1, "clip_high": 0.4}]:
        clips = {name: bounds[name] for name in bounds if name.startswith("clip")}
        cov = covariances(logp, adv, mask)
        inside = candidates(cov, bounds.get("low", 1.0), bounds.get("high", 5.0))
        among = [at for at in inside if not_clipped(logp, old, adv, **clips)[at]]
        assert 5 < len(among) < len(inside)
        every = np.zeros(mask.shape, bool)
        every[tuple(zip(*among, strict=True))] = True
        key = jax.random.key(1)
        got = select_clip_cov(logp, old, adv, mask, key=key, frac=1.0, **bounds)
        np.testing.assert_array_equal(got, every)
        few = np.asarray(select_clip_cov(logp, old, adv, mask, key=key, frac=frac, **bounds))
        assert few.sum() == 4
        assert not np.any(few & ~every)
        other = select_clip_cov(logp, old, adv, mask, key=jax.random.key(2), frac=frac, **bounds)
        assert np.any(few != other)
        assert np.asarray(select_clip_cov(logp, old, adv, mask, key=key, **bounds)).sum() == 1


# ---- the tokens of highest entropy ----


@pytest.mark.parametrize("frac", [1e-3, 0.2, 0.5, 1.0])
def test_top_entropy_against_sorting(frac):
    for seed in range(3):
        entropy, _, _, mask = batch(seed)
        entropy = -entropy
        got = np.asarray(top_entropy(entropy, mask, frac=frac))
        values = {at: float(entropy[at]) for at in np.ndindex(mask.shape) if mask[at]}
        np.testing.assert_array_equal(got, largest(values, list(values), how_many(frac, mask), mask.shape))


def test_top_entropy_by_hand():
    """A fifth of the whole batch, wherever it is; ties do not add tokens, and nothing is chosen of nothing."""
    entropy = np.array([[3.0, 2.9, 0.1, 0.2, 9.0], [0.5, 0.4, 0.3, 0.2, 0.1]], np.float32)
    mask = np.array([[True, True, True, True, False], [True] * 5])
    np.testing.assert_array_equal(top_entropy(entropy, mask), [[True, True] + [False] * 3, [False] * 5])
    assert np.asarray(top_entropy(np.ones_like(entropy), mask, frac=0.34)).sum() == 3
    assert not np.any(top_entropy(entropy, np.zeros_like(mask)))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_under_the_mask_chooses_nothing(garbage):
    logp, old, adv, mask = batch()
    spoiled = [np.where(mask, a, garbage) for a in (logp, old, adv)]
    key = jax.random.key(0)
    for select in [
        lambda l, o, a: select_cov(l, a, mask, frac=0.2),
        lambda l, o, a: select_cov(l, a, mask, frac=0.2, low=-0.5, high=0.5, key=key),
        lambda l, o, a: select_clip_cov(l, o, a, mask, key=key, frac=0.05, low=0.1),
        lambda l, o, a: top_entropy(l, mask),
    ]:
        expected = select(logp, old, adv)
        assert np.any(expected)
        np.testing.assert_array_equal(select(*spoiled), expected)
        np.testing.assert_array_equal(jax.jit(select)(*spoiled), expected)


# ---- wrong arguments ----


CLIPS = {"clip_low": (-0.1, 1.2), "clip_high": (-0.1,)}
FRAC = {"frac": (0, 1.5, -0.2)}


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (sapo, {"tau_pos": (0, -1.0), "tau_neg": (0, -1.0)}),
        (dcpo, {"eps_low": (-0.1,), "eps_high": (-0.1,), "ratio_cap": (0.5, -1.0), "dual_clip": (0.5, 1.0)}),
        (clip_cov, CLIPS),
        (kl_cov, {"coef": (-0.1,)}),
        (value_loss, {"clip": (-0.1,)}),
        (cispo, {"ratio_min": (-0.1,)}),
        (select_clip_cov, CLIPS | FRAC),
        (select_cov, FRAC),
        (top_entropy, FRAC),
    ],
)
def test_wrong_hyperparameters(loss, wrong):
    logp, old, adv, mask = batch()
    arrays = {select_cov: (logp, adv, mask), top_entropy: (logp, mask)}.get(loss, (logp, old, adv, mask))
    extra = {"selected": chosen(mask)} if loss in (clip_cov, kl_cov) else {}
    extra |= {"key": jax.random.key(0)} if loss is select_clip_cov else {}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
            loss(*arrays, **extra, **{name: value})


def test_cispos_caps_may_not_cross():
    with pytest.raises(ValueError, match="ratio_m(ax|in) is .*; expected"):
        cispo(*batch(), ratio_max=0.5, ratio_min=1.0)
