"""DPPO, VESPO and the unbiased KL: by hand, against float64 scalar loops, and what their expectations are."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest
from losses_reference import batch, pull_back

from jaxrl_llm.objective.losses import KL_KINDS, dppo_kl, dppo_tv, kl, ppo_clip, reinforce, vespo

ln = math.log


def value_and_grad(loss, logp, *rest, u=None):
    """x[B,T] and d Σ u·x / d logp; u = 1 unless given."""
    x, pull = jax.vjp(lambda l: loss(l, *rest), jnp.asarray(logp, jnp.float32))
    (g,) = pull(jnp.ones_like(x) if u is None else jnp.asarray(u, x.dtype))
    return x, g


def one(loss, p, q, adv, **hyper):
    """x and its derivative for a token of probability p, once q."""
    arrays = [np.array([[v]], np.float32) for v in (ln(p), ln(q), adv)]
    x, g = value_and_grad(partial(loss, **hyper), *arrays, np.array([[True]]))
    return float(x[0, 0]), float(g[0, 0])


# ---- float64 scalar loops ----


@pytest.mark.parametrize(
    ("loss", "hyper"),
    [
        (dppo_tv, {}),
        (dppo_tv, {"clip_low": 0.02, "clip_high": 0.1}),
        (dppo_kl, {}),
        (dppo_kl, {"clip_low": 0.001, "clip_high": 0.02}),
        (vespo, {}),
        (vespo, {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 0.7, "lambda_neg": 4.0}),
    ],
)
def test_scalar_loops(loss, hyper):
    live = still = 0
    for seed, (rows, columns) in enumerate([(12, 7), (6, 5), (15, 4)]):
        logp, old, adv, mask = batch(seed, rows=rows, columns=columns)
        data = np.minimum(logp, -1e-3), old, adv, mask  # log-probs
        expected_x, h = getattr(reference, loss.__name__)(*data, **hyper)
        for u in (np.ones(mask.shape), np.random.default_rng(seed).normal(size=mask.shape)):
            x, g = value_and_grad(partial(loss, **hyper), *data, u=u)
            np.testing.assert_allclose(x, expected_x, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(g, pull_back(loss.__name__, h, u, mask), rtol=1e-5, atol=4e-6)
        moves = mask & (adv != 0)
        live, still = live + (h[moves] != 0).sum(), still + (h[moves] == 0).sum()
    assert live > 10
    assert still > 5 or loss is vespo, "the data never meets the bounds"


# ---- DPPO ----


@pytest.mark.parametrize(
    ("adv", "q", "p", "weight"),
    [
        (1.0, 0.5, 0.6, 1.2),
        (1.0, 0.5, 0.8, 0),  # .3 up
        (1.0, 0.9, 0.6, 2 / 3),  # .3 down: it should be more likely, so it learns
        (-1.0, 0.9, 0.75, 0.75 / 0.9),
        (-1.0, 0.9, 0.6, 0),  # .3 down
        (-1.0, 0.5, 0.8, 1.6),
        (3.0, 0.01, 0.1, 10),  # a ratio of 10, but .09 of probability
        (-1.0, 0.01, 1e-4, 0.01),
        (2.0, 0.001, 0.1, 20),  # the ratio's cap, of 100
    ],
)
def test_dppo_tv_by_hand(adv, q, p, weight):
    assert one(dppo_tv, p, q, adv) == pytest.approx((-weight * adv * ln(p), -weight * adv), rel=1e-5)


@pytest.mark.parametrize(
    ("adv", "q", "p", "weight"),
    [
        (1.0, 0.5, 0.6, 1.2),  # D = .0204
        (1.0, 0.5, 0.7, 0),  # .0872
        (1.0, 0.5, 0.3, 0.6),  # as far, but down
        (-1.0, 0.5, 0.4, 0.8),
        (-1.0, 0.5, 0.3, 0),
        (-1.0, 0.5, 0.7, 1.4),
        (1.0, 1e-3, 0.05, 20),  # .0462, a ratio of 50
        (1.0, 1e-3, 0.06, 0),  # .0566
        (-1.0, 0.999, 0.9, 0.9 / 0.999),  # .0997
    ],
)
def test_dppo_kl_by_hand(adv, q, p, weight):
    hyper = {"clip_low": 0.1} if q == 0.999 else {}
    assert one(dppo_kl, p, q, adv, **hyper) == pytest.approx((-weight * adv * ln(p), -weight * adv), rel=1e-5)


def test_dppo_s_bounds_are_not_swapped():
    for loss, near, far in [(dppo_tv, 0.15, 0.25), (dppo_kl, 0.05, 0.15)]:
        bounds = {"clip_low": far, "clip_high": near}
        assert one(loss, 0.7, 0.5, 1.0, **bounds)[1] == 0
        assert one(loss, 0.3, 0.5, -1.0, **bounds)[1] == pytest.approx(0.6, rel=1e-5)


def test_dppo_of_certain_tokens():
    """p = 1, where 1 − p is 0: no infinity, and what fell from there is far away."""
    for loss in (dppo_tv, dppo_kl):
        assert one(loss, 1.0, 1.0, 1.0) == (0, -1)
        assert one(loss, 1.0, 1e-4, 1.0) == (0, 0)
        assert one(loss, 1e-4, 1.0, -1.0) == (0, 0)
        assert one(loss, 1e-4, 1.0, 1.0)[1] == pytest.approx(-1e-4, rel=1e-5)


@pytest.mark.parametrize("loss", [dppo_tv, dppo_kl, vespo])
def test_on_policy_it_is_reinforce(loss):
    logp, _, adv, mask = batch()
    for a, b in zip(
        value_and_grad(loss, logp, logp, adv, mask), value_and_grad(reinforce, logp, logp, adv, mask), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_dppo_lets_unlikely_tokens_go_on_where_ppo_stops_and_the_reverse():
    assert one(ppo_clip, 0.02, 0.01, 1.0)[1] == 0
    assert one(dppo_tv, 0.02, 0.01, 1.0)[1] == pytest.approx(-2, rel=1e-5)
    assert one(ppo_clip, 0.76, 0.99, -1.0, clip_low=0.25)[1] != 0
    assert one(dppo_tv, 0.76, 0.99, -1.0)[1] == 0


# ---- VESPO ----


@pytest.mark.parametrize(
    ("adv", "w", "weight"),
    [
        (1.0, 1.0, 1.0),
        (1.0, 2.0, 4 * math.exp(-3)),
        (1.0, 0.5, 0.25 * math.exp(1.5)),
        (-1.0, 1.0, 1.0),
        (-1.0, 2.0, 8 * math.exp(-2)),
        (-1.0, 0.5, 0.125 * math.exp(1)),
        (-2.0, 0.25, 0.25**3 * math.exp(1.5)),
    ],
)
def test_vespo_by_hand(adv, w, weight):
    """The response's ratio decides, of two tokens and one that is masked; the weight has no gradient."""
    d = np.array([[ln(w) + 0.3, -0.3, 5.0]], np.float32)
    old, mask = np.full_like(d, -1.5), np.array([[True, True, False]])
    x, g = value_and_grad(vespo, old + d, old, np.full_like(d, adv), mask)
    np.testing.assert_allclose(g, [[-weight * adv, -weight * adv, 0]], rtol=2e-6)
    np.testing.assert_allclose(x, g * (old + d), rtol=2e-6)


def test_vespo_s_ratio_is_held_between_its_ends():
    held = lambda total, **hyper: one(vespo, 1.0, math.exp(-total), 1.0, **hyper)[1]
    assert held(-30) == pytest.approx(-1e-16 * math.exp(3), rel=1e-4)  # 1e-8, squared
    assert held(30, lambda_pos=1e-9) == pytest.approx(-math.exp(40 - 1e-9 * math.expm1(20)), rel=1e-4)


def test_a_token_s_own_sign_chooses_vespo_s_weight():
    d, mask = np.array([[0.5, 0.2]], np.float32), np.ones((1, 2), bool)
    old, adv = np.full_like(d, -1.5), np.array([[1.0, -1.0]], np.float32)
    w = math.exp(0.7)
    _, g = value_and_grad(vespo, old + d, old, adv, mask)
    np.testing.assert_allclose(g, [[-(w**2) * math.exp(3 - 3 * w), w**3 * math.exp(2 - 2 * w)]], rtol=3e-6)


# ---- the unbiased KL ----


def test_unbiased_kl_by_hand():
    """u = −.5, r = e^.4: the ratio's gradient counts too."""
    logp, ref, old = (np.array([[v]], np.float32) for v in (-2.0, -1.5, -2.4))
    x, g = value_and_grad(lambda l, m: kl(l, ref, m, "k3", old_logp=old), logp, np.array([[True]]))
    np.testing.assert_allclose([x[0, 0], g[0, 0]], [0.221866, -0.745912], rtol=3e-6)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_unbiased_kl_is_the_estimate_times_the_ratio(kind):
    logp, old, ref, mask = batch(4)
    ref = -np.abs(ref)
    plain, slope = value_and_grad(lambda l, m: kl(l, ref, m, kind), logp, mask)
    x, g = value_and_grad(lambda l, m: kl(l, ref, m, kind, old_logp=old), logp, mask)
    ratio = np.exp(np.where(mask, np.float64(logp) - old, 0))
    np.testing.assert_allclose(x, ratio * plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(g, ratio * (plain + np.asarray(slope)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_its_expectation_is_the_kl_and_its_gradient_off_policy(kind):
    """Over a whole vocabulary, with the probabilities of another policy than the live one."""
    rng = np.random.default_rng(3)
    logits, old, ref = (jnp.asarray(rng.normal(size=6)) for _ in range(3))
    old, ref, mask = jax.nn.log_softmax(old), jax.nn.log_softmax(ref), np.ones((1, 6), bool)

    def expected(z):
        estimate = kl(jax.nn.log_softmax(z)[None], ref[None], mask, kind, old_logp=old[None])
        return (jnp.exp(old) * estimate[0]).sum()

    exact = lambda z: (jax.nn.softmax(z) * (jax.nn.log_softmax(z) - ref)).sum()
    np.testing.assert_allclose(expected(logits), exact(logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(exact)(logits), atol=1e-6)


def test_no_gradient_to_the_old_policy():
    logp, old, ref, mask = batch(4)
    assert not np.any(jax.grad(lambda o: kl(logp, -np.abs(ref), mask, "k3", old_logp=o).sum())(jnp.asarray(old)))


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        *((loss, name) for loss in (dppo_tv, dppo_kl) for name in ("clip_low", "clip_high")),
        *((vespo, name) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
    ],
)
def test_wrong_hyperparameters(loss, name):
    for value in (-0.1, *([0.0] if loss is vespo else [])):
        with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
            loss(*batch(), **{name: value})
