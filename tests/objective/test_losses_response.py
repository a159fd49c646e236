"""Response-level losses: by hand, against float64 scalar loops, closed forms and the identities between them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import losses_reference as reference
import numpy as np
import pytest
from losses_reference import batch, log_router_ratios, pull_back, sequence_weights, toy

from jaxrl_llm.objective.losses import gmpo, gspo, gspo_token, luspo, opmd, ppo_clip, reinforce, rspo
from jaxrl_llm.objective.token_weights import token_weights

ln = math.log
WIDE = {"clip_low": 0.2, "clip_high": 0.28}


def value_and_grad(loss, logp, *rest, u=None):
    """x[B,T] and d Σ u·x / d logp; u = 1 unless given."""
    x, pull = jax.vjp(lambda l: loss(l, *rest), jnp.asarray(logp, jnp.float32))
    (g,) = pull(jnp.ones_like(x) if u is None else jnp.asarray(u, x.dtype))
    return x, g


def response(loss, d, adv, base=-1.3, **hyper):
    """One response of log ratios d: x of each token, and the gradient of the mean over its tokens."""
    d = np.array([d], np.float32)
    old, mask = np.full_like(d, base), np.ones(d.shape, bool)
    adv = np.broadcast_to(np.float32(adv), d.shape)
    x, g = value_and_grad(partial(loss, **hyper), old + d, old, adv, mask, u=sequence_weights(mask))
    return np.asarray(x)[0], np.asarray(g)[0]


def constant_over_responses(logp, old, adv, mask):
    return logp, old, np.repeat(adv[:, :1], adv.shape[1], axis=1), mask


# ---- float64 scalar loops ----

CASES = [
    (gspo, WIDE),
    (gspo, {"clip_low": 0.5, "clip_high": 0.05}),
    (gspo, {}),
    (gspo_token, WIDE),
    (gspo_token, {}),
    (luspo, WIDE),
    (luspo, {}),
    (gmpo, {}),
    (gmpo, {"clip": 0.1}),
    (rspo, {}),
    (rspo, {"gamma_min": 0.6, "clip": 0.15}),
    (opmd, {}),
    (opmd, {"tau": 0.7}),
]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("loss", "hyper"), CASES)
def test_scalar_loops(loss, hyper, constant):
    name, live, still = loss.__name__, 0, 0
    for seed, (rows, columns) in enumerate([(12, 7), (6, 5), (15, 4)]):
        data = batch(seed, rows=rows, columns=columns)
        data = constant_over_responses(*data) if constant else data
        mask = data[3]
        hyper = hyper | ({"log_router_ratio": log_router_ratios(mask, seed)} if loss is rspo else {})
        expected_x, h = getattr(reference, name)(*data, **hyper)
        rng = np.random.default_rng(seed)
        for u in (sequence_weights(mask), np.ones(mask.shape), rng.normal(size=mask.shape)):
            x, g = value_and_grad(partial(loss, **hyper), *data, u=u)
            np.testing.assert_allclose(x, expected_x, rtol=3e-6, atol=1e-6)
            np.testing.assert_allclose(g, pull_back(name, h, u, mask), rtol=3e-6, atol=3e-6)
        moves = mask & (expected_x != 0)
        live, still = live + (h[moves] != 0).sum(), still + (h[moves] == 0).sum()
    assert live > 10
    assert still > 10 or loss is opmd, "the data never meets the clip"


@pytest.mark.parametrize(("loss", "hyper"), CASES)
def test_all_masked_is_zero(loss, hyper):
    *arrays, mask = batch()
    hyper = hyper | ({"log_router_ratio": log_router_ratios(mask)} if loss is rspo else {})
    for got in value_and_grad(partial(loss, **hyper), *arrays, np.zeros_like(mask)):
        np.testing.assert_array_equal(got, np.zeros(mask.shape))


# ---- GSPO by hand ----


@pytest.mark.parametrize("loss", [gspo, gspo_token])
@pytest.mark.parametrize(
    ("adv", "ratio", "value", "slope"),
    [
        (1.0, 0.5, -0.5, -0.5),
        (1.0, 1.5, -1.28, 0.0),
        (-1.0, 0.5, 0.8, 0.0),
        (-1.0, 1.5, 1.5, 1.5),
        (2.0, 1.25, -2.5, -2.5),  # within .28, outside .2: the clips are not swapped
        (-2.0, 0.75, 1.6, 0.0),
    ],
)
def test_gspo_quadrants(loss, adv, ratio, value, slope):
    """The geometric mean of the tokens' ratios decides; a single token's ratio (here far off) does not."""
    x, g = response(loss, [ln(ratio) + 0.9, ln(ratio) - 0.4, ln(ratio) - 0.5], adv, **WIDE)
    np.testing.assert_allclose(x, [value] * 3, rtol=2e-6)
    np.testing.assert_allclose(g, [slope / 3] * 3, rtol=2e-6)


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_default_clips(loss):
    """3e-4 below and 4e-4 above, unlike each other."""
    for adv, d, clipped in [(1, 3.5e-4, False), (1, 4.5e-4, True), (-1, -2.5e-4, False), (-1, -3.5e-4, True)]:
        _, g = response(loss, [d], adv, base=0.0)
        np.testing.assert_allclose(g, [0 if clipped else -adv * math.exp(d)], rtol=1e-6)


def test_the_mean_is_inside_gspos_exponent():
    """exp(mean d) = 1 though the mean of the ratios is 1.54, and neither is the product's root of another length."""
    x, g = response(gspo, [1.0, -1.0], 3.0, clip_low=1, clip_high=9)
    np.testing.assert_allclose(x, [-3.0, -3.0], rtol=1e-6)
    np.testing.assert_allclose(g, [-1.5, -1.5], rtol=1e-6)


def test_gspo_token_has_an_advantage_for_each_token():
    """s = e^.1 for both; token 0 is clipped at 1.05, token 1 (A < 0) is not, and neither moves the other."""
    x, g = response(gspo_token, [0.3, -0.1], [2.0, -1.0], clip_low=0.05, clip_high=0.05)
    np.testing.assert_allclose(x, [-2.1, 1.105171], rtol=1e-6)
    np.testing.assert_allclose(g, [0.0, 1.105171 / 2], rtol=1e-6)


@pytest.mark.parametrize("hyper", [WIDE, {}, {"clip_low": 1, "clip_high": 9}])
def test_gspo_is_gspo_token_where_the_advantage_is_constant(hyper):
    for seed in range(3):
        data = constant_over_responses(*batch(seed))
        weights = sequence_weights(data[3])
        pairs = zip(
            value_and_grad(partial(gspo, **hyper), *data, u=weights),
            value_and_grad(partial(gspo_token, **hyper), *data, u=weights),
            strict=True,
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_gspo_is_not_gspo_token_where_the_advantage_varies():
    data = batch(0)
    weights = sequence_weights(data[3])
    hyper = {"clip_low": 1, "clip_high": 9}
    x, g = value_and_grad(partial(gspo, **hyper), *data, u=weights)
    x_token, g_token = value_and_grad(partial(gspo_token, **hyper), *data, u=weights)
    assert np.abs(x - x_token).max() > 0.1
    assert np.abs(g - g_token).max() > 0.01
    np.testing.assert_allclose((weights * x).sum(), (weights * x_token).sum(), rtol=1e-5)


def test_gspo_and_gspo_token_agree_at_the_limit_of_the_log_ratio():
    """A token beyond ±80 nats is a constant in both."""
    logp = np.array([[-1.0, -500.0, -2.0]], np.float32)
    old = np.array([[-1.1, -1.0, -1.8]], np.float32)
    adv, mask = np.full((1, 3), 1.0, np.float32), np.ones((1, 3), bool)
    weights = sequence_weights(mask)
    x, g = value_and_grad(gspo, logp, old, adv, mask, u=weights)
    x_token, g_token = value_and_grad(gspo_token, logp, old, adv, mask, u=weights)
    np.testing.assert_allclose(x_token, x, rtol=1e-6)
    np.testing.assert_allclose(g_token, g, rtol=1e-6)
    assert g[0, 1] == 0


def test_gspo_of_single_tokens_is_ppo():
    logp, old, adv, _ = batch(columns=1)
    mask = np.ones(logp.shape, bool)
    pairs = zip(
        value_and_grad(partial(gspo, **WIDE), logp, old, adv, mask),
        value_and_grad(partial(ppo_clip, **WIDE), logp, old, adv, mask),
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-6)


# ---- LUSPO ----


@pytest.mark.parametrize(
    ("adv", "ratio", "value", "slope"),
    [(1.0, 0.5, -0.5, -0.5), (1.0, 1.5, -1.28, 0.0), (-1.0, 0.5, 0.8, 0.0), (-1.0, 1.5, 1.5, 1.5)],
)
def test_luspo_is_gspo_times_the_length(adv, ratio, value, slope):
    """Three tokens: three times GSPO's value, and each token's gradient is undivided."""
    x, g = response(luspo, [ln(ratio) + 0.9, ln(ratio) - 0.4, ln(ratio) - 0.5], adv, **WIDE)
    np.testing.assert_allclose(x, [3 * value] * 3, rtol=2e-6)
    np.testing.assert_allclose(g, [slope] * 3, rtol=2e-6)


def test_luspo_default_clips():
    """2e-3 below and 2.5e-3 above, unlike each other."""
    for adv, d, clipped in [(1, 2.2e-3, False), (1, 2.8e-3, True), (-1, -1.8e-3, False), (-1, -2.2e-3, True)]:
        _, g = response(luspo, [d], adv, base=0.0)
        np.testing.assert_allclose(g, [0 if clipped else -adv * math.exp(d)], rtol=1e-6)


def test_on_policy_luspo_weighs_all_tokens_alike():
    """With `sequence` weights every token of every response has the gradient −A / responses, whatever the lengths."""
    logp, _, adv, mask = constant_over_responses(*batch(3))
    _, g = value_and_grad(
        lambda l, a, m: luspo(l, jax.lax.stop_gradient(l), a, m), logp, adv, mask, u=sequence_weights(mask)
    )
    np.testing.assert_allclose(g, np.where(mask, -adv / mask.any(axis=1).sum(), 0), rtol=1e-5)


# ---- GMPO by hand ----


@pytest.mark.parametrize(
    ("adv", "d", "value", "slope"),
    [
        (1.0, ln(2), -1.491825, 0.0),  # e^.4
        (1.0, -ln(2), -0.5, -0.5),
        (-1.0, -ln(2), 0.670320, 0.0),  # e^−.4
        (-1.0, ln(2), 2.0, 2.0),
        (3.0, 0.3, -4.049576, -4.049576),
        (0.0, 0.7, 0.0, 0.0),
        (0.0, -0.7, 0.0, 0.0),
    ],
)
def test_gmpo_quadrants(adv, d, value, slope):
    x, g = response(gmpo, [d], adv)
    np.testing.assert_allclose([x[0], g[0]], [value, slope], rtol=1e-6, atol=1e-7)


def test_a_clipped_token_still_counts_in_gmpos_mean():
    """d' = [.4, .1]: q = e^.25, where leaving the clipped token out would make it e^.1."""
    x, g = response(gmpo, [0.6, 0.1], 1.0)
    np.testing.assert_allclose(x, [-1.284025, -1.284025], rtol=1e-6)
    np.testing.assert_allclose(g, [0.0, -0.642013], rtol=1e-6)


def test_gmpo_worked_toy():
    logp, old, adv, mask = toy()
    weights = np.asarray(token_weights(mask, "sequence"))
    x, g = value_and_grad(gmpo, logp, old, adv, mask, u=weights)
    q = np.array([1.105171, 0.839457])
    np.testing.assert_allclose(x, [[-q[0]] * 3, [q[1], q[1], 0]], rtol=1e-6)
    np.testing.assert_allclose((weights * x).sum(), -0.1328569, atol=6e-8)
    slopes = [[-q[0] / 6, -q[0] / 6, 0], [0, q[1] / 4, 0]]  # d' = [.1, −.2, .4] and [−.4, .05]
    np.testing.assert_allclose(g, slopes, rtol=2e-6, atol=1e-7)


def test_unclipped_gmpo_is_unclipped_gspo():
    data = constant_over_responses(*batch(2))
    pairs = zip(
        value_and_grad(partial(gmpo, clip=1e9), *data),
        value_and_grad(partial(gspo, clip_low=1, clip_high=1e9), *data),
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


# ---- RSPO ----


@pytest.mark.parametrize(
    ("adv", "d", "gamma", "value", "slope"),
    [
        (1.0, 0.45, 0.9, -1.411481, -1.411481),  # .45 − .105 is within .4: GMPO would have clipped
        (1.0, 0.45, 1.0, -1.491825, 0.0),
        (1.0, 0.7, 0.5, -1.491825, 0.0),  # the floor .8: .7 − .223 is outside
        (1.0, -0.3, 0.5, -0.592655, -0.592655),  # .8·e^−.3, not .5·e^−.3
        (-1.0, -0.3, 0.5, 0.670320, 0.0),  # −.3 − .223 is clipped at −.4: GMPO would not have
        (-1.0, 0.5, 0.1, 1.318977, 1.318977),
    ],
)
def test_rspo_quadrants(adv, d, gamma, value, slope):
    x, g = response(rspo, [d], adv, log_router_ratio=np.array([[ln(gamma)]], np.float32))
    np.testing.assert_allclose([x[0], g[0]], [value, slope], rtol=1e-6, atol=1e-7)


def test_rspo_of_an_unmoved_router_is_gmpo():
    for seed in range(3):
        data = batch(seed)
        zeros = np.zeros(data[3].shape, np.float32)
        pairs = zip(
            value_and_grad(partial(rspo, log_router_ratio=zeros, clip=0.3), *data),
            value_and_grad(partial(gmpo, clip=0.3), *data),
            strict=True,
        )
        for a, b in pairs:
            np.testing.assert_array_equal(a, b)


def test_no_gradient_to_the_router():
    data = batch()
    routers = jnp.asarray(log_router_ratios(data[3]))
    assert not np.any(jax.grad(lambda r: rspo(*data, log_router_ratio=r).sum())(routers))


# ---- OPMD ----


def test_opmd_by_hand():
    """logp = [−1, −2], d = [.5, −.2]: −2·(−3) + .05·(.3)²; the square of the sum, not the sum of squares."""
    logp, old = np.array([[-1.0, -2.0]], np.float32), np.array([[-1.5, -1.8]], np.float32)
    adv, mask = np.full((1, 2), 2.0, np.float32), np.ones((1, 2), bool)
    x, g = value_and_grad(opmd, logp, old, adv, mask, u=sequence_weights(mask))
    np.testing.assert_allclose(x, [[6.0045, 6.0045]], rtol=1e-6)
    np.testing.assert_allclose(g, [[-1.97, -1.97]], rtol=1e-6)


def test_opmd_gradient_through_a_policy():
    """The mean over responses of −A ∇logπ(y) + τ (Σ d) ∇logπ(y), with π a table of logits and ∇ by its own formula."""
    rng = np.random.default_rng(5)
    rows, columns, vocabulary, tau = 5, 4, 3, 0.6
    theta = rng.normal(size=(columns, vocabulary))
    tokens = rng.integers(0, vocabulary, (rows, columns))
    positions = np.broadcast_to(np.arange(columns), tokens.shape)
    _, old, adv, mask = constant_over_responses(*batch(7, rows=rows, columns=columns))

    def loss(table):
        logp = jax.nn.log_softmax(table)[positions, tokens]
        return (token_weights(mask, "sequence") * opmd(logp, old, adv, mask, tau=tau)).sum()

    g = jax.grad(loss)(jnp.asarray(theta, jnp.float32))
    p = np.exp(theta) / np.exp(theta).sum(axis=1, keepdims=True)
    expected, live = np.zeros_like(theta), mask.any(axis=1).sum()
    for i in range(rows):
        score, total = np.zeros_like(theta), 0.0  # ∇ logπ(y_i) and Σ_t d
        for t in range(columns):
            if mask[i, t]:
                score[t] += np.eye(vocabulary)[tokens[i, t]] - p[t]
                total += math.log(p[t, tokens[i, t]]) - float(old[i, t])
        expected += (-float(adv[i, 0]) + tau * total) * score / live
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-6)


def test_opmd_on_policy_is_reinforce_of_the_whole_response():
    logp, _, adv, mask = constant_over_responses(*batch(3))
    _, g = value_and_grad(lambda l, a, m: opmd(l, jax.lax.stop_gradient(l), a, m), logp, adv, mask)
    n = mask.sum(axis=1, keepdims=True)
    _, token = value_and_grad(lambda l, a, m: reinforce(l, l, a, m), logp, adv, mask)
    np.testing.assert_allclose(g, n * np.asarray(token), rtol=1e-6)


# ---- advantages that vary over a response ----


@pytest.mark.parametrize("loss", [gspo, gmpo, opmd])
def test_the_advantage_is_the_mean_over_trained_tokens(loss):
    """A masked token's advantage does not count, in the sum or in the number of tokens."""
    logp, old, _, _ = toy()
    adv = np.array([[1.0, 3.0, 100.0], [-5.0, 1.0, -2.0]], np.float32)
    mask = np.array([[True, True, False], [True, True, True]])
    mean = np.array([[2.0] * 3, [-2.0] * 3], np.float32)
    for a, b in zip(
        value_and_grad(loss, logp, old, adv, mask), value_and_grad(loss, logp, old, mean, mask), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


# ---- wrong arguments ----


@pytest.mark.parametrize(
    ("loss", "name", "value"),
    [
        (gspo, "clip_low", -0.1),
        (gspo, "clip_low", 1.2),
        (gspo, "clip_high", -0.1),
        (gspo_token, "clip_low", -0.1),
        (gspo_token, "clip_low", 1.2),
        (gspo_token, "clip_high", -0.1),
        (luspo, "clip_low", 1.2),
        (luspo, "clip_high", -0.1),
        (gmpo, "clip", -0.1),
        (rspo, "clip", -0.1),
        (rspo, "gamma_min", 0.0),
        (rspo, "gamma_min", -0.5),
        (rspo, "gamma_min", 1.5),
        (opmd, "tau", -0.1),
    ],
)
def test_wrong_hyperparameters(loss, name, value):
    data = batch()
    extra = {"log_router_ratio": log_router_ratios(data[3])} if loss is rspo else {}
    with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
        loss(*data, **extra, **{name: value})
