"""Advantages of tokens: by hand, float64 scalar loops, limits of GAE, holes in the mask, whitening, padding."""

from functools import partial

import advantages_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jaxtyping import TypeCheckError

from jaxrl_llm.objective.advantages import (
    distilled,
    dr_grpo,
    gae,
    length_adaptive_gae,
    length_adaptive_lambda,
    reinforce_pp,
    reinforce_pp_baseline,
    reweight,
    token_rewards,
    whiten,
)

P, G, B, T = 3, 4, 5, 7
QUARTERS = arrays(np.float32, (B, T), elements=st.integers(-12, 12).map(lambda k: k / 4))
MASKS = arrays(np.bool_, (B, T))
COMPILED_GAE = jax.jit(gae)
few_examples = settings(deadline=None, max_examples=20)
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=3e-6)


def batch(seed=0, rows=B, columns=T):
    """Rewards and values of tokens under a ragged mask with holes, one row empty; nan and inf under the mask."""
    rng = np.random.default_rng(seed)
    mask = np.arange(columns) < rng.integers(2, columns + 1, rows)[:, None]
    mask &= rng.random((rows, columns)) > 0.25
    mask[rows // 2] = False
    mask[0, :4] = [True, False, False, True]  # what a tool wrote, in the middle of a response
    rewards, values = (rng.normal(size=(rows, columns)).astype(np.float32) for _ in range(2))
    rewards[~mask], values[~mask] = np.nan, np.inf
    return rewards, values, mask


def padded(x, fill, columns=3):
    return np.concatenate([x, np.full((len(x), columns), fill, x.dtype)], axis=1)


def with_hole(x, fill, at=2):
    return np.insert(x, at, fill, axis=1)


# ---- rewards of tokens ----


def test_token_rewards_by_hand():
    mask = np.array([[True, True, False, False], [True, False, True, False], [False] * 4])
    kl = np.array([[0.1, 0.2, 9.0, np.nan], [0.4, np.inf, -0.6, 9.0], [np.nan] * 4], np.float32)
    got = token_rewards(np.array([2.0, -1.0, 5.0]), kl, mask, beta=0.5)
    np.testing.assert_allclose(got, [[-0.05, 1.9, 0, 0], [-0.2, 0, -0.7, 0], [0] * 4], rtol=1e-6)
    np.testing.assert_array_equal(token_rewards(np.array([2, -1, 5]), kl, mask), [[0, 2, 0, 0], [0, 0, -1, 0], [0] * 4])


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_token_rewards_scalar_loops(beta):
    kl, _, mask = batch()
    rewards = np.random.default_rng(9).normal(size=B).astype(np.float32)
    got = token_rewards(rewards, kl, mask, beta=beta)
    assert got.dtype == jnp.float32
    close(got, reference.token_rewards(rewards, kl, mask, beta))
    assert not np.any(token_rewards(rewards, kl, np.zeros((B, T), bool), beta=beta))


# ---- whitening ----


def test_whiten_by_hand():
    x = np.array([[1.0, 2.0, np.nan], [3.0, np.inf, -np.inf]])
    mask = np.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(whiten(x, mask), [[-1, 0, 0], [1, 0, 0]], atol=1e-7)  # n − 1: a spread of 1
    # eps is added to the variance, inside the root: outside, eps = 3 would quarter
    np.testing.assert_allclose(whiten(x, mask, eps=3.0), [[-0.5, 0, 0], [0.5, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_whiten_scalar_loops(seed, eps):
    x, _, mask = batch(seed)
    x = 3 * x + 100
    np.testing.assert_allclose(whiten(x, mask, eps=eps), reference.whiten(x, mask, eps), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(partial(whiten, eps=eps))(x, mask), whiten(x, mask, eps=eps), rtol=1e-5, atol=1e-5
    )


def test_whiten_gives_exact_zeros_where_there_is_nothing_to_tell_apart():
    mask = np.array([[True, True, False], [False, True, True]])
    next_to = np.nextafter(np.float32(0.3), np.float32(1))
    noise = np.array([[0.3, next_to, 7.0], [7.0, 0.3, next_to]], np.float32)
    with jax.debug_nans(True):
        for eps in (0.0, 1e-8):
            assert not np.any(whiten(noise, mask, eps=eps))
            assert not np.any(whiten(np.full((2, 3), 0.1), mask, eps=eps))
            assert not np.any(whiten(noise + 5, np.zeros((2, 3), bool), eps=eps))
            assert not np.any(whiten(noise + 5, np.array([[False, True, False], [False] * 3]), eps=eps))
    small = np.array([[0.0, 1e-4, 0.0], [0.0, 0.0, 2e-4]])
    assert np.abs(whiten(small, mask, eps=0.0)).max() > 1  # small, and signal all the same


def test_nan_is_not_hidden():
    """Whatever went wrong must be seen, not turned into advantages of 0; under the mask nothing can go wrong."""
    mask = np.array([[True, True, False], [True, True, True]])
    x = np.array([[1.0, np.nan, 0.0], [2.0, 3.0, 5.0]])
    assert np.any(np.isnan(whiten(x, mask)))
    assert np.any(np.isnan(reinforce_pp(np.array([np.nan, 1.0]), np.zeros((2, 3)), mask)))
    assert np.any(np.isnan(reinforce_pp(np.ones(2), x, mask, beta=0.1)))
    assert np.any(np.isnan(reinforce_pp_baseline(np.array([[np.nan, 1.0]]), mask[None])))
    for out in (*gae(x, np.zeros((2, 3)), mask), *gae(np.zeros((2, 3)), x, mask)):
        assert np.any(np.isnan(out[0]))
        assert np.all(np.isfinite(out[1]))


@few_examples
@given(x=QUARTERS, mask=MASKS)
def test_whitened_tokens_have_mean_0_and_variance_1(x, mask):
    got = np.asarray(whiten(x, mask))
    assert not np.any(got[~mask])
    if mask.any() and np.ptp(x[mask]) > 0:
        assert np.mean(got[mask]) == pytest.approx(0, abs=1e-5)
        assert np.var(got[mask], ddof=1) == pytest.approx(1, rel=1e-5)
        close(whiten(2 * x - 3, mask), got, rtol=1e-4, atol=1e-5)
    else:
        assert not np.any(got)


# ---- REINFORCE++ ----


def test_reinforce_pp_by_hand():
    """Returns 1, 1 and 0 on the three tokens: mean 2/3, variance (1/9 + 1/9 + 4/9)/2 = 1/3."""
    mask, nothing = np.array([[True, True, False], [True, False, False]]), np.zeros((2, 3))
    got = reinforce_pp(np.array([1.0, 0.0]), nothing, mask)
    np.testing.assert_allclose(got, [[0.577350, 0.577350, 0], [-1.154701, 0, 0]], atol=1e-6)
    # over responses, not tokens, it would be ±0.707107: long answers weigh more
    baselined = reinforce_pp_baseline(np.array([[1.0, 0.0]]), mask[None])
    np.testing.assert_allclose(baselined, got[None], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_reinforce_pp_scalar_loops(seed, beta):
    kl, _, mask = batch(seed)
    rewards = np.random.default_rng(seed).normal(size=B).astype(np.float32)
    got = reinforce_pp(rewards, kl, mask, beta=beta)
    close(got, reference.reinforce_pp(rewards, kl, mask, beta), atol=1e-5)
    assert not np.any(got[~mask])
    assert got.dtype == jnp.float32
    # which is GAE's limit without a critic and without decay
    reward_to_go, _ = gae(token_rewards(rewards, kl, mask, beta=beta), np.zeros((B, T)), mask, gamma=1.0, lam=1.0)
    close(got, whiten(reward_to_go, mask), atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_reinforce_pp_baseline_scalar_loops(seed):
    _, _, mask = batch(seed, rows=P * G)
    rewards = np.random.default_rng(seed).normal(size=(P, G)).astype(np.float32)
    rewards[1] = 0.3  # without signal, but its tokens count in the whitening
    mask = mask.reshape(P, G, T)
    got = reinforce_pp_baseline(rewards, mask)
    close(got, reference.reinforce_pp_baseline(rewards, mask), atol=1e-5)
    tokens = np.broadcast_to(np.asarray(dr_grpo(rewards)).reshape(-1, 1), (P * G, T))
    close(got.reshape(-1, T), whiten(tokens, mask.reshape(-1, T)))


def test_no_tokens_and_no_signal():
    empty = np.zeros((B, T), bool)
    garbage = np.full((B, T), np.nan)
    assert not np.any(reinforce_pp(np.ones(B), garbage, empty, beta=0.1))
    assert not np.any(reinforce_pp_baseline(np.ones((P, G)), np.zeros((P, G, T), bool)))
    for value in (0.0, 0.1, 1 / 3, -9e6):
        assert not np.any(reinforce_pp_baseline(np.full((P, G), value), np.ones((P, G, T), bool)))
        assert not np.any(reinforce_pp(np.full(B, value), np.zeros((B, T)), batch()[2]))
    assert not np.any(reinforce_pp_baseline(np.arange(P, dtype=float)[:, None], np.ones((P, 1, T), bool)))  # G = 1
    for out in (*gae(garbage, garbage, empty), *length_adaptive_gae(garbage, garbage, empty)):
        assert not np.any(out)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64, jnp.bfloat16])
def test_any_dtype_gives_what_float32_gives(dtype):
    rewards, kl, mask = np.array([[1, 0, 3, 0], [2, 1, 1, 0], [5, 5, 5, 5]]), np.ones((12, T)), batch(rows=12)[2]
    as_float = rewards.astype(np.float32)
    pairs = [
        (reinforce_pp_baseline(x, mask.reshape(P, G, T)), reinforce_pp(x.reshape(-1), kl, mask, beta=0.1))
        for x in (rewards.astype(dtype), as_float)
    ]
    for got, expected in zip(*pairs, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, expected)


# ---- GAE ----


def test_gae_by_hand():
    """Tokens 0, 2 and 3 of the response; δ = .5·2 − 1 = 0, −2 + .5·4 = 0, 3 − 4 = −1 at γ = .5."""
    values = np.array([[1.0, np.nan, 2.0, 4.0, np.inf]])
    rewards = np.array([[0.0, 7.0, 0.0, 3.0, np.nan]])
    mask = np.array([[True, False, True, True, False]])
    adv, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    np.testing.assert_allclose(adv, [[-1 / 16, 0, -1 / 4, -1, 0]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[15 / 16, 0, 7 / 4, 3, 0]], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0), (0.0, 0.5)])
def test_gae_scalar_loops(seed, gamma, lam):
    data = batch(seed)
    for got, expected in zip(gae(*data, gamma=gamma, lam=lam), reference.gae(*data, gamma, lam), strict=True):
        close(got, expected)
        assert got.dtype == jnp.float32
        assert not np.any(got[~data[2]])


def test_gae_defaults():
    data = batch()
    for got, expected in zip(gae(*data), reference.gae(*data, 1.0, 0.95), strict=True):
        close(got, expected)


def test_gae_limits():
    rewards, values, mask = batch(1)
    alone = np.where(mask, 0.0, np.nan)
    adv, returns = gae(rewards, alone, mask, gamma=1.0, lam=1.0)
    close(adv, reference.rewards_to_go(rewards, mask))  # no critic: the reward to go
    close(returns, adv)
    to_go = reference.rewards_to_go(rewards, mask, gamma=0.9)
    adv, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    close(returns, to_go)  # λ = 1: the value target is Monte-Carlo, whatever the critic says
    close(adv, np.where(mask, to_go - np.where(mask, values, 0), 0))
    adv, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    for i in range(B):  # λ = 0: one step of temporal difference, to the next token of the policy
        at = np.flatnonzero(mask[i])
        nexts = np.append(values[i, at[1:]], 0.0)
        if len(at):
            close(adv[i, at], rewards[i, at] + 0.9 * nexts[: len(at)] - values[i, at])


@few_examples
@given(rewards=QUARTERS, values=QUARTERS, mask=MASKS, fill=st.sampled_from([np.nan, np.inf, 5.0]))
def test_gae_with_holes_is_gae_of_what_the_policy_wrote(rewards, values, mask, fill):
    squeezed = np.stack([np.full((B, T), fill, np.float32)] * 2)
    prefix = np.arange(T) < mask.sum(axis=1)[:, None]
    for i in range(B):
        squeezed[:, i, prefix[i]] = np.stack([rewards, values])[:, i, mask[i]]
    lam = np.full(B, 0.8)
    holed = COMPILED_GAE(np.where(mask, rewards, fill), np.where(mask, values, fill), mask, lam=lam)
    for got, expected in zip(holed, COMPILED_GAE(*squeezed, prefix, lam=lam), strict=True):
        np.testing.assert_allclose(got[mask], expected[prefix], rtol=1e-5, atol=1e-5)


def test_gae_with_a_lambda_for_each_row_is_the_rows_done_apart():
    data, lams = batch(2), np.linspace(0.2, 1.0, B)
    adv, returns = gae(*data, gamma=0.95, lam=lams)
    close(adv, reference.gae(*data, 0.95, lams)[0])
    for i, lam in enumerate(lams):
        alone = gae(*(x[i : i + 1] for x in data), gamma=0.95, lam=float(lam))
        close(adv[i : i + 1], alone[0])
        close(returns[i : i + 1], alone[1])


def test_length_adaptive_lambda_by_hand():
    got = length_adaptive_lambda(np.array([0, 1, 20, 21, 40, 100, 2000]))
    np.testing.assert_allclose(got, [0, 0, 0, 1 - 1 / 1.05, 0.5, 0.8, 0.99], atol=1e-6)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(length_adaptive_lambda(np.array([1, 2, 5]), alpha=1.0), [0, 0.5, 0.8], atol=1e-6)
    np.testing.assert_allclose(length_adaptive_lambda(np.array([0, 1]), alpha=1e4), [0, 0.9999], atol=1e-6)
    with jax.debug_nans(True), jax.debug_infs(True):
        assert float(length_adaptive_lambda(np.array([0]))[0]) == 0


@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_length_adaptive_gae(alpha):
    data = batch(3)
    n = data[2].sum(axis=1)  # tokens that train: what a tool wrote does not lengthen a response
    expected = reference.gae(*data, 0.9, [max(0.0, 1 - 1 / (alpha * k)) if k else 0.0 for k in n])
    jitted = jax.jit(partial(length_adaptive_gae, gamma=0.9, alpha=alpha))
    for got, want, again in zip(
        length_adaptive_gae(*data, gamma=0.9, alpha=alpha), expected, jitted(*data), strict=True
    ):
        close(got, want)
        close(again, want)
    long = np.ones((2, 60)), np.zeros((2, 60)), np.arange(60) < np.array([[60], [30]])
    close(length_adaptive_gae(*long)[0], reference.gae(*long, 1.0, [1 - 1 / 3, 1 - 2 / 3])[0])


def test_jit():
    rewards, values, mask = batch(4)
    lams = np.linspace(0, 1, B)
    for jitted, plain in zip(
        jax.jit(gae)(rewards, values, mask, lam=lams), gae(rewards, values, mask, lam=lams), strict=True
    ):
        close(jitted, plain)
    scores = np.arange(B, dtype=np.float32)
    close(jax.jit(reinforce_pp)(scores, rewards, mask), reinforce_pp(scores, rewards, mask))


# ---- reweighting ----


def test_reweight():
    old = np.log(np.array([[1.0, 0.5, 0.1]]))
    got = reweight(np.array([[2.0, -2.0, 1.0]]), old)
    np.testing.assert_allclose(got, [[2, -1.7, 0.73]], rtol=1e-6)
    assert got.dtype == jnp.float32
    adv, old = np.random.default_rng(5).normal(size=(2, B, T)).astype(np.float32)
    for alpha in (0.0, 0.3, 1.0):
        close(reweight(adv, -np.abs(old), alpha=alpha), reference.reweight(adv, -np.abs(old), alpha))
    np.testing.assert_array_equal(reweight(adv, -np.abs(old), alpha=0.0), adv)
    close(reweight(np.ones((1, 2)), np.array([[-np.inf, -1e4]])), np.full((1, 2), 0.7))  # an unlikely token
    garbage = np.array([[np.nan, np.inf, 1e4, -np.inf]], np.float32)  # under the mask, where the advantage is 0
    np.testing.assert_array_equal(reweight(np.zeros((1, 4)), garbage), np.zeros((1, 4)))


# ---- distillation ----


def test_distilled():
    """The teacher's log-prob less the policy's, beside the advantage, on trained tokens."""
    adv, old = np.array([[0.5, 0.5, 0.5]]), np.array([[-1.0, -2.0, -1.0]])
    teacher, mask = np.array([[-1.25, -0.5, 7.0]]), np.array([[True, True, False]])
    np.testing.assert_allclose(distilled(adv, old, teacher, mask), [[0.25, 2.0, 0]], rtol=1e-6)
    np.testing.assert_allclose(distilled(0 * adv, old, teacher, mask, coef=2.0), [[-0.5, 3.0, 0]], rtol=1e-6)
    garbage = [np.where(mask, x, np.nan) for x in (adv, old, teacher)]
    np.testing.assert_array_equal(distilled(*garbage, mask), distilled(adv, old, teacher, mask))
    np.testing.assert_array_equal(distilled(adv, old, teacher, mask, coef=0.0), np.where(mask, adv, 0))
    assert np.isfinite(distilled(adv, old, np.full((1, 3), -1e30), mask)).all()
    with pytest.raises(ValueError, match="coef is -0.1"):
        distilled(adv, old, teacher, mask, coef=-0.1)


def test_distilled_s_expected_gradient_is_the_reverse_kl_s():
    rng = np.random.default_rng(3)
    logits, teacher = jnp.asarray(rng.normal(size=6)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=6)))
    p, logp, mask = jax.nn.softmax(logits), jax.nn.log_softmax(logits), np.ones((1, 6), bool)
    adv = distilled(np.zeros((1, 6)), logp[None], teacher[None], mask)[0]
    g = jax.grad(lambda z: -(p * adv * jax.nn.log_softmax(z)).sum())(logits)
    exact = jax.grad(lambda z: (jax.nn.softmax(z) * (jax.nn.log_softmax(z) - teacher)).sum())(logits)
    np.testing.assert_allclose(g, exact, atol=1e-6)


# ---- what must not change the answer ----


@jax.jit
def all_of(scores, x, values, mask):
    """Every function of tokens on one batch; compiled, for each of the shapes below, once."""
    return (
        *gae(x, values, mask, gamma=0.9, lam=np.linspace(0, 1, B)),
        *length_adaptive_gae(x, values, mask, alpha=0.5),
        whiten(x, mask),
        token_rewards(scores, x, mask, beta=0.5),
        reinforce_pp(scores, x, mask, beta=0.5),
    )


@few_examples
@given(x=QUARTERS, values=QUARTERS, mask=MASKS, fill=st.sampled_from([np.nan, -np.inf, 3.0]))
def test_padding_and_masked_tokens_change_nothing(x, values, mask, fill):
    scores = x[:, 0]
    x, values = np.where(mask, x, fill), np.where(mask, values, fill)
    plain = all_of(scores, x, values, mask)
    for widen in (padded, with_hole):
        wide = all_of(scores, widen(x, fill), widen(values, fill), widen(mask, False))
        for got, expected in zip(wide, plain, strict=True):
            np.testing.assert_allclose(got, widen(np.asarray(expected), 0), rtol=1e-5, atol=1e-5)


@few_examples
@given(x=QUARTERS, values=QUARTERS, mask=MASKS, order=st.permutations(range(B)))
def test_order_of_rows(x, values, mask, order):
    order, lams = np.array(order), np.linspace(0, 1, B)
    shuffled = COMPILED_GAE(x[order], values[order], mask[order], lam=lams[order])
    for got, expected in zip(shuffled, COMPILED_GAE(x, values, mask, lam=lams), strict=True):
        close(got, np.asarray(expected)[order], rtol=1e-5, atol=1e-5)
    shuffled = reinforce_pp(x[order, 1], x[order], mask[order], beta=0.5)
    close(shuffled, np.asarray(reinforce_pp(x[:, 1], x, mask, beta=0.5))[order], rtol=1e-5, atol=1e-5)


# ---- wrong arguments ----


def test_wrong_arguments():
    data, lengths = batch(), np.array([3, 4])
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"gamma is {bad}"):
            gae(*data, gamma=bad)
        with pytest.raises(ValueError, match=f"lam is {bad}"):
            gae(*data, lam=bad)
        with pytest.raises(ValueError, match=f"gamma is {bad}"):
            length_adaptive_gae(*data, gamma=bad)
        with pytest.raises(ValueError, match=f"alpha is {bad}"):
            reweight(data[0], data[0], alpha=bad)
    for bad in (0.0, -0.5):
        with pytest.raises(ValueError, match=f"alpha is {bad}"):
            length_adaptive_lambda(lengths, alpha=bad)
        with pytest.raises(ValueError, match=f"alpha is {bad}"):
            length_adaptive_gae(*data, alpha=bad)
    with pytest.raises(ValueError, match="eps is -1.0"):
        whiten(data[0], data[2], eps=-1.0)
    with pytest.raises(TypeCheckError):
        gae(data[0], data[1], data[2], lam=np.ones(B + 1))
    with pytest.raises(TypeCheckError):
        token_rewards(np.ones(B + 1), data[0], data[2])
