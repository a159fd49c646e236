"""Rewards for a length: Kimi's within a group, L1's around a target; worked numbers, scalar loops, slopes and signs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jaxtyping import TypeCheckError

from jaxrl_llm.rewards.length import kimi_length, l1_exact, l1_max

P, G, B = 3, 5, 7
LENGTHS, CORRECT = arrays(np.int32, (P, G), elements=st.integers(0, 40)), arrays(np.bool_, (P, G))
few_examples = settings(deadline=None, max_examples=25)


def kimi_loop(n_tokens, correct):
    out = np.zeros(n_tokens.shape)
    for p, lengths in enumerate(n_tokens):
        shortest, longest = int(min(lengths)), int(max(lengths))
        for g, n in enumerate(lengths):
            if longest > shortest:
                slope = 0.5 - (int(n) - shortest) / (longest - shortest)
                out[p, g] = slope if correct[p, g] or slope < 0 else 0.0
    return out


def lengths(seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 3000, B), rng.integers(100, 4000, B), rng.random(B) < 0.6


def test_kimi_worked_numbers():
    n, correct = np.array([[100, 200, 300, 400]]), np.array([[False, True, False, True]])
    np.testing.assert_allclose(kimi_length(n, correct), [[0, 0.166667, -0.166667, -0.5]], atol=6e-7)
    # a short wrong answer is not rewarded for being short, a long wrong one is punished like a right one
    np.testing.assert_allclose(kimi_length(n, ~correct), [[0.5, 0, -0.166667, -0.5]], atol=6e-7)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint16, np.float32, np.float64])
def test_kimi_any_dtype(dtype):
    n, correct = np.array([[200, 100, 250], [7, 3, 5]]), np.array([[True, True, False], [False, True, True]])
    got = kimi_length(n.astype(dtype), correct)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, kimi_loop(n, correct), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_kimi_scalar_loops(seed):
    rng = np.random.default_rng(seed)
    n, correct = rng.integers(1, 20000, (P, G)), rng.random((P, G)) < 0.5
    n[1] = 77  # all of one length
    np.testing.assert_allclose(kimi_length(n, correct), kimi_loop(n, correct), atol=1e-6)
    np.testing.assert_allclose(jax.jit(kimi_length)(n, correct), kimi_loop(n, correct), atol=1e-6)


@pytest.mark.parametrize("right", [False, True])
def test_kimi_equal_lengths_are_exactly_zero(right):
    with jax.debug_nans(True), jax.debug_infs(True):
        for n in (np.full((2, 4), 300), np.zeros((2, 4), int), np.array([[9], [11]])):  # and groups of one
            np.testing.assert_array_equal(kimi_length(n, np.full(n.shape, right)), np.zeros(n.shape))


@few_examples
@given(n=LENGTHS, correct=CORRECT, groups=st.permutations(range(P)), members=st.permutations(range(G)))
def test_kimi_properties(n, correct, groups, members):
    got = np.asarray(kimi_length(n, correct))
    np.testing.assert_allclose(got, kimi_loop(n, correct), atol=1e-6)
    assert np.all(np.abs(got) <= 0.5)
    assert np.all(got[~correct] <= 0)
    shuffle = np.ix_(groups, members)
    np.testing.assert_array_equal(kimi_length(n[shuffle], correct[shuffle]), got[shuffle])
    np.testing.assert_allclose(kimi_length(3 * n + 10, correct), got, atol=1e-6)  # only the order and spacing count


def test_l1_by_hand():
    n, gold, correct = np.array([800, 1500, 800, 1000]), np.full(4, 1000), np.array([True, True, False, True])
    np.testing.assert_allclose(l1_exact(n, gold, correct), [0.94, 0.85, -0.06, 1.0], atol=1e-6)
    np.testing.assert_allclose(l1_max(n, gold, correct), [0.56, 0.35, 0.0, 0.5], atol=1e-6)
    n, gold, correct = np.array([0, 4000, 2667, 2666]), np.array([4000, 0, 1000, 1000]), np.full(4, True)
    np.testing.assert_allclose(l1_max(n, gold, correct), [1, 0, 0, 0.0002], atol=1e-6)  # held in [0, 1]
    np.testing.assert_allclose(l1_max(n, gold, correct, alpha=1e-4, delta=0.2), [0.6, 0, 0.0333, 0.0334], atol=1e-6)
    np.testing.assert_allclose(l1_exact(n, gold, correct, alpha=1e-3), [-3, -3, -0.667, -0.666], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [3e-4, 2e-3])
def test_l1_scalar_loops(seed, alpha):
    n, gold, correct = lengths(seed)
    exact = [float(c) - alpha * abs(int(g) - int(k)) for k, g, c in zip(n, gold, correct, strict=True)]
    most = [min(1.0, max(0.0, alpha * (int(g) - int(k)) + 0.5)) * c for k, g, c in zip(n, gold, correct, strict=True)]
    np.testing.assert_allclose(l1_exact(n, gold, correct, alpha=alpha), exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(l1_max(n, gold, correct, alpha=alpha), most, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(partial(l1_exact, alpha=alpha))(n, gold, correct), exact, rtol=1e-5, atol=1e-6)
    assert l1_exact(n, gold, correct).dtype == l1_max(n, gold, correct).dtype == jnp.float32


def test_l1_unsigned_lengths_do_not_wrap():
    n, gold, correct = np.array([5, 200], np.uint16), np.array([200, 5], np.uint16), np.array([True, True])
    np.testing.assert_allclose(l1_exact(n, gold, correct, alpha=1e-3), [0.805, 0.805], atol=1e-6)
    np.testing.assert_allclose(l1_max(n, gold, correct, alpha=1e-3), [0.695, 0.305], atol=1e-6)


@few_examples
@given(gap=st.integers(0, 2000), gold=st.integers(2000, 4000))
def test_l1_sides(gap, gold):
    below, above, right = np.array([gold - gap]), np.array([gold + gap]), np.array([True])
    target = np.array([gold])
    assert float(l1_exact(below, target, right)[0]) == float(l1_exact(above, target, right)[0]) <= 1
    assert float(l1_max(below, target, right)[0]) >= 0.5 >= float(l1_max(above, target, right)[0])
    assert float(l1_max(below, target, ~right)[0]) == 0


def test_wrong_arguments():
    n, gold, correct = lengths()
    for wrong in (l1_exact, l1_max):
        with pytest.raises(ValueError, match="alpha is -0.1"):
            wrong(n, gold, correct, alpha=-0.1)
        with pytest.raises(TypeCheckError):
            wrong(n, gold[:1], correct)
    with pytest.raises(TypeCheckError):
        kimi_length(n, correct)
