"""Corrections between learner and sampler: worked numbers, float64 scalar loops, signs, extremes, and the report."""

import math
from functools import partial

import advantages_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jaxrl_llm.objective import corrections
from jaxrl_llm.objective.corrections import (
    geometric_rejection,
    k3_rejection,
    mis_sequence,
    mis_token,
    mismatch_report,
    opsm,
    tis,
    tis_sequence,
    veto,
)

B, T = 5, 8
RESPONSE = ["tis_sequence", "mis_sequence", "geometric_rejection", "k3_rejection", "veto"]
NAMES = ["tis", "mis_token", *RESPONSE]
FUNCTIONS = [getattr(corrections, name) for name in NAMES]
# How far apart learner and sampler must be for a rule to keep some and drop some.
SPREAD = {"geometric_rejection": 3e-3, "k3_rejection": 0.15, "veto": 4.0}
KEYS = {f"gap/{key}" for key in ("mean", "max", "pearson", "k3", "ess", "zeroed", "capped")}
KEYS |= {"gap/rho_mean", "gap/rho_min", "gap/rho_max", "gap/ppl_sampler", "gap/ppl_learner"}
KEYS |= {f"gap/quarter_{q}" for q in (1, 2, 3, 4)}
few_examples = settings(deadline=None, max_examples=20)


def batch(seed=0, spread=0.6, rows=B, columns=T):
    """(old_logp, sampler_logp, mask): ragged rows with holes, one of them empty; nan and inf under the mask."""
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(size=(rows, columns)).astype(np.float32) - 0.5
    old = sampler + (spread * rng.normal(size=(rows, columns))).astype(np.float32)
    mask = np.arange(columns) < rng.integers(2, columns + 1, rows)[:, None]
    mask &= rng.random((rows, columns)) > 0.2
    mask[rows // 2] = False
    sampler[~mask], old[~mask] = -np.inf, np.nan
    return old, sampler, mask


def of(k, sampler=-2.0):
    """One response with these log ratios."""
    k = np.atleast_2d(np.asarray(k, np.float64))
    return sampler + k, np.full(k.shape, sampler), np.ones(k.shape, bool)


# ---- by hand ----


def test_worked_numbers():
    gap = of([0.05, 1.2, -0.7])
    close = partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    close(tis(*gap), [[1.051271, 2, 0.496585]])
    close(mis_token(*gap), [[1.051271, 3.320117, 0]])
    close(tis_sequence(*gap), [[1.733253] * 3])
    close(tis_sequence(*gap, cap=1.5), [[1.5] * 3])
    close(mis_sequence(*gap), [[1.733253] * 3])
    close(mis_sequence(*gap, high=1.7), [[0] * 3])
    close(mis_sequence(*gap, low=1.74), [[0] * 3])
    # the geometric mean is 1.201215
    close(geometric_rejection(*gap, low=1.2012, high=1.2013), [[1] * 3])
    close(geometric_rejection(*gap, low=1.2013, high=1.3), [[0] * 3])
    close(geometric_rejection(*gap, low=1.1, high=1.2012), [[0] * 3])
    close(geometric_rejection(*gap), [[0] * 3])
    # (.001271 + 1.120117 + .196585)/3 = .439324
    close(k3_rejection(*gap, max_k3=0.4394), [[1] * 3])
    close(k3_rejection(*gap, max_k3=0.4393), [[0] * 3])
    close(veto(*gap), [[1] * 3])


def test_product_is_not_the_geometric_mean():
    gap = of(np.full(1000, math.log(1.01)), sampler=0.0)
    np.testing.assert_allclose(tis_sequence(*gap, cap=1e6), np.full((1, 1000), 20959.16), rtol=1e-4)
    np.testing.assert_array_equal(geometric_rejection(*gap, low=1.0099, high=1.0101), np.ones((1, 1000)))
    np.testing.assert_array_equal(mis_sequence(*gap), np.zeros((1, 1000)))


def test_geometric_bounds_are_on_learner_over_sampler():
    up, down = of([0.3, 0.3]), of([-0.3, -0.3])  # ρ = 1.35 and .74
    bounds = {"low": 0.9, "high": 2.0}
    np.testing.assert_array_equal(geometric_rejection(*up, **bounds), [[1, 1]])
    np.testing.assert_array_equal(geometric_rejection(*down, **bounds), [[0, 0]])


def test_k3_is_the_divergence_from_the_sampler():
    """exp(k) − 1 − k is 4.389 at k = 2 and 1.135 at k = −2; of the other divergence it is the other way round."""
    np.testing.assert_array_equal(k3_rejection(*of([2.0, 2.0]), max_k3=2.0), [[0, 0]])
    np.testing.assert_array_equal(k3_rejection(*of([-2.0, -2.0]), max_k3=2.0), [[1, 1]])


def test_k3_is_the_mean_over_the_tokens_and_tiny_gaps_keep_their_sign():
    half = of([[0.2, 0.0], [0.2, 0.2]])  # .0214: .0107 on average, or .0214
    np.testing.assert_array_equal(k3_rejection(*half, max_k3=0.015), [[1, 1], [0, 0]])
    np.testing.assert_array_equal(k3_rejection(*of([0.0, 0.0]), max_k3=0.0), [[1, 1]])
    tiny = of([1e-3, -1e-3, 3e-4], sampler=0.0)  # k²/2, which e^k − 1 − k would lose to rounding
    assert float(mismatch_report(*tiny)["gap/k3"]) == pytest.approx((1e-6 + 0.045e-6) / 3, rel=1e-3)


def test_veto_by_one_token():
    calm = [0.0, 0.1, -0.1]
    old, sampler, mask = of([[*calm, math.log(101)], [*calm, math.log(99)], [*calm, math.log(0.9e-4)], [*calm, -9.2]])
    np.testing.assert_array_equal(veto(old, sampler, mask), np.repeat([[0.0], [1], [0], [1]], 4, axis=1))
    mask[0, 3] = False  # only tokens that train can veto
    np.testing.assert_array_equal(veto(old, sampler, mask)[0], [1, 1, 1, 0])
    np.testing.assert_array_equal(veto(old, sampler, mask, low=0.95)[1], [0] * 4)
    alone = of([math.log(1.7), 0.0])[:2]
    np.testing.assert_array_equal(veto(*alone, np.array([[True, False]]), low=1.5, high=2.0), [[1, 0]])
    np.testing.assert_array_equal(veto(old, sampler, mask, high=1.01)[0], [0] * 4)


def test_bounds_are_kept():
    same = of([0.0, 0.0])
    for function in (mis_token, mis_sequence, geometric_rejection, veto):
        np.testing.assert_array_equal(function(*same, low=1.0, high=1.0), [[1, 1]])
    np.testing.assert_array_equal(k3_rejection(*same, max_k3=0.0), [[1, 1]])


def test_opsm_by_hand():
    """Dropped: a negative advantage, and the learner below the sampler by more than δ on average."""
    logp, sampler, mask = of([[-0.4, 0.0], [-0.4, -0.2], [-0.4, -0.2], [0.4, 0.2], [-0.4, -0.2]])
    adv = np.array([[-1.0, -1.0], [-1, -1], [1, 1], [-1, -1], [-3, 2]])
    np.testing.assert_array_equal(opsm(logp, sampler, adv, mask, delta=0.25)[:, 0], [1, 0, 1, 1, 0])
    np.testing.assert_array_equal(opsm(logp, sampler, adv, mask, delta=0.1)[:, 0], [0, 0, 1, 1, 0])
    np.testing.assert_array_equal(opsm(logp, sampler, 0 * adv, mask, delta=0.1), np.ones((5, 2)))  # 0 is not negative
    mask[1] = [False, True]  # −.2 alone
    np.testing.assert_array_equal(opsm(logp, sampler, adv, mask, delta=0.25)[1], [0, 1])


# ---- against scalar loops ----


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_scalar_loops(name, seed):
    data = batch(seed, SPREAD.get(name, 0.6), rows=9)
    function, loop = getattr(corrections, name), getattr(reference, name)
    got, expected = function(*data), loop(*data)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=1e-7)
    assert got.dtype == jnp.float32
    assert not np.any(got[~data[2]])
    np.testing.assert_allclose(jax.jit(function)(*data), expected, rtol=3e-6, atol=1e-7)
    assert len(np.unique(expected[data[2]])) > 1  # the data try both sides of the rule


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("tis", {"cap": 0.8}),
        ("tis_sequence", {"cap": 0.8}),
        ("mis_token", {"low": 0.9, "high": 1.3}),
        ("mis_sequence", {"low": 0.4, "high": 4.0}),
        ("geometric_rejection", {"low": 0.9, "high": 1.3}),
        ("k3_rejection", {"max_k3": 0.2}),
        ("veto", {"low": 0.4, "high": 2.5}),
    ],
)
def test_scalar_loops_with_other_bounds(name, hyper):
    data = batch(5, rows=9)
    got, expected = getattr(corrections, name)(*data, **hyper), getattr(reference, name)(*data, **hyper)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=1e-7)
    assert len(np.unique(expected[data[2]])) > 1


@pytest.mark.parametrize("delta", [0.0, 0.2])
def test_opsm_scalar_loops(delta):
    logp, sampler, mask = batch(4, rows=9)
    adv = np.where(mask, np.random.default_rng(4).normal(size=mask.shape), np.nan).astype(np.float32)
    expected = reference.opsm(logp, sampler, adv, mask, delta)
    np.testing.assert_array_equal(opsm(logp, sampler, adv, mask, delta=delta), expected)
    np.testing.assert_array_equal(jax.jit(partial(opsm, delta=delta))(logp, sampler, adv, mask), expected)
    assert set(np.unique(expected[mask])) == {0, 1}


@pytest.mark.parametrize("dtype", [np.float16, np.float64, jnp.bfloat16])
def test_any_dtype_gives_what_float32_gives(dtype):
    old, sampler, mask = (x.astype(dtype) if x.dtype != bool else x for x in batch(1))
    for function in FUNCTIONS:
        got = function(old, sampler, mask)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, function(old.astype(np.float32), sampler.astype(np.float32), mask))


# ---- identities ----


def test_no_gap_no_correction():
    """Without a gap c·x must be x to the bit: a run with a correction then repeats the run without."""
    old, _, mask = batch(3)
    x = np.random.default_rng(0).normal(size=mask.shape).astype(np.float32) * mask
    for function in FUNCTIONS:
        c = function(old, old, mask)
        np.testing.assert_array_equal(c, mask.astype(np.float32))
        np.testing.assert_array_equal(c * x, x)
    np.testing.assert_array_equal(opsm(old, old, -np.ones_like(x), mask, delta=0.0), mask.astype(np.float32))


def test_no_gradient():
    old, sampler, mask = batch(4)
    for function in [*FUNCTIONS, partial(tis, cap=50.0), partial(mis_sequence, low=0.0, high=1e9)]:
        total = lambda old, sampler, function=function: function(old, sampler, mask).sum()
        for gradient in jax.grad(total, argnums=(0, 1))(old, sampler):
            np.testing.assert_array_equal(gradient, np.zeros(mask.shape))
    adv = -np.ones(mask.shape, np.float32)
    total = lambda logp, sampler, adv: opsm(logp, sampler, adv, mask, delta=0.1).sum()
    for gradient in jax.grad(total, argnums=(0, 1, 2))(old, sampler, adv):
        np.testing.assert_array_equal(gradient, np.zeros(mask.shape))


def test_nothing_trained():
    old, sampler, _ = batch()
    for function in FUNCTIONS:
        assert not np.any(function(old, sampler, np.zeros((B, T), bool)))
    assert not np.any(opsm(old, sampler, old, np.zeros((B, T), bool), delta=0.1))


def test_response_rules_speak_for_the_whole_response():
    old, sampler, mask = batch(6, spread=0.3)
    for name in RESPONSE:
        c = np.asarray(getattr(corrections, name)(old, sampler, mask))
        for i in range(B):
            assert len(np.unique(c[i, mask[i]])) <= 1


# ---- extremes ----


@few_examples
@given(seed=st.integers(0, 99), size=st.sampled_from([1.0, 80.0, 89.0, 1e3, 3e4]), sign=st.sampled_from([-1, 0, 1]))
def test_finite_whatever_the_gap(seed, size, sign):
    rng = np.random.default_rng(seed)
    k = size * (rng.uniform(-1, 1, (B, T)) if sign == 0 else np.full((B, T), float(sign)))
    sampler = np.minimum(-k, 0) - 1
    old, mask = (sampler + k).astype(np.float32), batch(seed)[2]
    sampler = sampler.astype(np.float32)
    for name, function in zip(NAMES, FUNCTIONS, strict=True):
        got = function(old, sampler, mask)
        assert np.all(np.isfinite(got))
        np.testing.assert_allclose(got, getattr(reference, name)(old, sampler, mask), rtol=1e-4, atol=1e-6)
    wide = (partial(tis, cap=1e30), partial(tis_sequence, cap=1e30), partial(mis_sequence, low=0.0, high=1e37))
    for function in wide:
        assert np.all(np.isfinite(function(old, sampler, mask)))
    assert np.all(np.isfinite(opsm(old, sampler, -np.ones_like(old), mask, delta=0.1)))
    for c in (None, tis(old, sampler, mask), mis_token(old, sampler, mask)):
        report = mismatch_report(old, sampler, mask, c)
        assert {key: float(v) for key, v in report.items() if not np.isfinite(float(v))} == {}


@pytest.mark.parametrize("k", [-60.0, 60.0])
def test_sums_over_a_long_response(k):
    gap = of(np.full(4000, k), sampler=-70.0)
    for function in [*FUNCTIONS, partial(tis_sequence, cap=1e30)]:
        assert np.all(np.isfinite(function(*gap)))
    for value in mismatch_report(*of(np.full(8000, 1.5 * k), sampler=-130.0)).values():
        assert np.isfinite(float(value))
    held = float(mis_sequence(*gap, low=0.0, high=math.inf)[0, 0])
    assert held == pytest.approx(math.exp(math.copysign(80, k)), rel=1e-4)


# ---- what must not change the answer ----


@few_examples
@given(seed=st.integers(0, 99), fill=st.sampled_from([np.nan, np.inf, -np.inf, 5.0]), order=st.permutations(range(B)))
def test_padding_masked_tokens_and_the_order_of_rows(seed, fill, order):
    old, sampler, mask = batch(seed)
    order = np.array(order)
    wider = np.insert(np.append(old, np.full((B, 2), fill), axis=1), 3, fill, axis=1)
    wider_sampler = np.insert(np.append(sampler, np.full((B, 2), -fill), axis=1), 3, 0.0, axis=1)
    wider_mask = np.insert(np.append(mask, np.zeros((B, 2), bool), axis=1), 3, False, axis=1)
    for name, function in zip(NAMES, FUNCTIONS, strict=True):
        function = partial(function, max_k3=0.2) if name == "k3_rejection" else function
        plain = np.asarray(function(old, sampler, mask))
        wide = np.asarray(function(wider, wider_sampler, wider_mask))
        np.testing.assert_allclose(np.delete(wide, 3, axis=1)[:, :T], plain, rtol=1e-6)
        assert not np.any(wide[~wider_mask])
        np.testing.assert_allclose(function(old[order], sampler[order], mask[order]), plain[order], rtol=1e-6)
    plain, wide = mismatch_report(old, sampler, mask), mismatch_report(wider, wider_sampler, wider_mask)
    for key in KEYS:
        assert float(wide[key]) == pytest.approx(float(plain[key]), rel=1e-4, abs=1e-6), key


# ---- the report ----


def test_report_by_hand():
    """Two responses of 4 and 2 tokens, probabilities in tenths."""
    p_old = np.array([[0.5, 0.4, 0.1, 0.8], [0.9, 0.2, 0.3, 0.3]])
    p_sampler = np.array([[0.5, 0.2, 0.2, 0.5], [0.3, 0.4, 0.9, 0.9]])
    mask = np.array([[True] * 4, [True, True, False, False]])
    rho = np.array([1, 2, 0.5, 1.6, 3, 0.5])
    dp = np.array([0, 0.2, 0.1, 0.3, 0.6, 0.2])
    expected = {
        "mean": dp.mean(),
        "max": 0.6,
        "k3": np.mean(rho - 1 - np.log(rho)),
        "rho_mean": 8.6 / 6,
        "rho_min": 0.5,
        "rho_max": 3.0,
        "ess": rho.sum() ** 2 / (6 * (rho**2).sum()),
        "zeroed": 0.0,
        "capped": 0.0,
        "ppl_sampler": (0.5 * 0.2 * 0.2 * 0.5 * 0.3 * 0.4) ** (-1 / 6),
        "ppl_learner": (0.5 * 0.4 * 0.1 * 0.8 * 0.9 * 0.2) ** (-1 / 6),
        "quarter_1": (0 + 0.6) / 2,
        "quarter_2": 0.2,
        "quarter_3": (0.1 + 0.2) / 2,  # the second of two tokens is half way
        "quarter_4": 0.3,
        "pearson": np.corrcoef([0.5, 0.4, 0.1, 0.8, 0.9, 0.2], [0.5, 0.2, 0.2, 0.5, 0.3, 0.4])[0, 1],
    }
    report = mismatch_report(np.log(p_old), np.log(p_sampler), mask)
    assert set(report) == KEYS
    for key, value in expected.items():
        assert float(report[f"gap/{key}"]) == pytest.approx(value, rel=1e-5, abs=1e-6), key
    # with a correction: 3 → 1.8 and 2 → 1.8 are capped, the two of .5 are zeroed
    c = np.array([[1, 1.8, 0, 1.6], [1.8, 0, 7, 7]])
    corrected = mismatch_report(np.log(p_old), np.log(p_sampler), mask, c)
    kept = np.array([1, 1.8, 0, 1.6, 1.8, 0])
    expected |= {"ess": kept.sum() ** 2 / (6 * (kept**2).sum()), "zeroed": 2 / 6, "capped": 2 / 6}
    for key, value in expected.items():
        assert float(corrected[f"gap/{key}"]) == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("seed", range(3))
def test_report_against_numpy(seed):
    old, sampler, mask = batch(seed, rows=9)
    report = {key: float(value) for key, value in mismatch_report(old, sampler, mask).items()}
    p, q, k = np.exp(old[mask]), np.exp(sampler[mask]), (old - sampler)[mask].astype(np.float64)
    assert report["gap/pearson"] == pytest.approx(np.corrcoef(p, q)[0, 1], rel=1e-4)
    assert report["gap/mean"] == pytest.approx(np.abs(p - q).mean(), rel=1e-5)
    assert report["gap/k3"] == pytest.approx(np.mean(np.exp(k) - 1 - k), rel=1e-4)
    assert report["gap/ess"] == pytest.approx(1 / np.mean((np.exp(k) / np.exp(k).mean()) ** 2), rel=1e-4)
    assert report["gap/ppl_learner"] == pytest.approx(np.exp(-old[mask].mean()), rel=1e-5)
    quarters = [[], [], [], []]
    for i in range(9):
        at = np.flatnonzero(mask[i])
        for place, t in enumerate(at):
            quarters[place * 4 // len(at)].append(abs(math.exp(old[i, t]) - math.exp(sampler[i, t])))
    for q, gaps in enumerate(quarters, start=1):
        assert report[f"gap/quarter_{q}"] == pytest.approx(np.mean(gaps), rel=1e-4)
    jitted = jax.jit(mismatch_report)(old, sampler, mask)
    assert {key: float(v) for key, v in jitted.items()} == pytest.approx(report, rel=1e-4, abs=1e-6)


def test_report_of_corrections():
    old, sampler, mask = batch(7)
    rho, n = np.exp((old - sampler)[mask]), mask.sum()
    share = lambda c, key: float(mismatch_report(old, sampler, mask, c)[f"gap/{key}"])
    assert share(tis(old, sampler, mask, cap=1.2), "capped") == pytest.approx(np.sum(rho > 1.2) / n)
    assert share(tis(old, sampler, mask, cap=1e9), "capped") == 0
    assert share(mis_token(old, sampler, mask, low=0.8, high=1.2), "zeroed") == pytest.approx(
        np.sum((rho < 0.8) | (rho > 1.2)) / n
    )
    assert share(mis_token(old, sampler, mask, low=0.8, high=1.2), "capped") == 0
    assert share(np.full(mask.shape, 0.3), "ess") == pytest.approx(1, rel=1e-6)
    one_token = np.zeros(mask.shape)
    one_token[tuple(np.argwhere(mask)[0])] = 2.0
    assert share(one_token, "ess") == pytest.approx(1 / n, rel=1e-5)
    assert share(np.zeros(mask.shape), "zeroed") == 1
    assert 0 <= share(np.zeros(mask.shape), "ess") <= 1 / n  # every response rejected: nothing is left to count


def test_report_of_nothing_and_of_too_little():
    old, sampler, mask = batch()
    empty = mismatch_report(old, sampler, np.zeros_like(mask))
    assert {key: float(value) for key, value in empty.items()} == dict.fromkeys(KEYS, 0.0)
    for gap in (of([0.3]), of([0.0, 0.0, 0.0]), of([0.1, 0.1])):  # one token; no spread to correlate
        for value in mismatch_report(*gap).values():
            assert np.isfinite(float(value))


def test_report_without_a_gap():
    old, _, mask = batch(8)
    report = {key: float(value) for key, value in mismatch_report(old, old, mask).items()}
    for key in ("mean", "max", "k3", "zeroed", "capped", "quarter_1", "quarter_4"):
        assert report[f"gap/{key}"] == 0
    for key in ("rho_mean", "rho_min", "rho_max", "ess"):
        assert report[f"gap/{key}"] == pytest.approx(1, abs=1e-6)
    assert report["gap/pearson"] == pytest.approx(1, abs=1e-5)
    assert report["gap/ppl_sampler"] == report["gap/ppl_learner"]


# ---- wrong arguments ----


def test_wrong_arguments():
    gap = of([0.1, 0.2])
    for function in (tis, tis_sequence):
        for cap in (0.0, -1.0):
            with pytest.raises(ValueError, match=f"cap is {cap}"):
                function(*gap, cap=cap)
    for function in (mis_token, mis_sequence, geometric_rejection, veto):
        with pytest.raises(ValueError, match="high is 1.0.*low=2.0"):
            function(*gap, low=2.0, high=1.0)
    with pytest.raises(ValueError, match="max_k3 is -0.1"):
        k3_rejection(*gap, max_k3=-0.1)
    with pytest.raises(TypeCheckError):
        tis(gap[0][0], gap[1], gap[2])
    with pytest.raises(TypeCheckError):
        tis(gap[0], gap[1], gap[2].astype(np.float32))
