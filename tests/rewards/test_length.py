"""Length-shaped rewards: the paper's numbers, scalar loops, and the shape of the slope."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rewards.length import soft_overlong

dapo = partial(soft_overlong, max_len=20480, cache_len=4096)


def scalar(n, max_len, cache_len):
    if n <= max_len - cache_len:
        return 0.0
    return (max_len - cache_len - n) / cache_len if n <= max_len else -1.0


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.float32, np.float64])
def test_worked_numbers(dtype):
    n = np.array([0, 16384, 17408, 18432, 20480, 20481, 60000], dtype)
    got = dapo(n)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [0, 0, -0.25, -0.5, -1, -1, -1])


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 3, 4)])
def test_any_shape(shape):
    n = np.random.default_rng(0).integers(0, 30, shape)
    expected = np.vectorize(lambda n: scalar(n, 20, 8))(n)
    np.testing.assert_allclose(soft_overlong(np.asarray(n), 20, 8), expected, atol=1e-7)
    np.testing.assert_allclose(jax.jit(partial(soft_overlong, max_len=20, cache_len=8))(n), expected, atol=1e-7)


def test_python_numbers():
    assert float(soft_overlong(18, 20, 8)) == -0.75
    assert float(soft_overlong(17.5, 20, 8)) == -0.6875


def test_vmap():
    n = np.array([[3, 13], [17, 40]])
    np.testing.assert_array_equal(jax.vmap(partial(soft_overlong, max_len=20, cache_len=8))(n), soft_overlong(n, 20, 8))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(0, 5000), max_len=st.integers(1, 4000), share=st.floats(0.01, 1.0))
def test_properties(n, max_len, share):
    cache_len = max(1, int(share * max_len))
    here, longer = (float(soft_overlong(m, max_len, cache_len)) for m in (n, n + 1))
    assert here == pytest.approx(scalar(n, max_len, cache_len), abs=1e-6)
    assert -1 <= longer <= here <= 0
    assert here - longer <= 1 / cache_len + 1e-6  # no jump: one token costs at most one step of the slope


def test_lengths_are_tokens():
    """A response of 12 one-word tokens is short even where its text has more characters than the limit."""
    text = " ".join(["consequently"] * 12)
    assert len(text) > 20
    assert float(soft_overlong(len(text.split()), max_len=20, cache_len=8)) == 0.0
    with pytest.raises((TypeError, ValueError)):
        soft_overlong(text, max_len=20, cache_len=8)


@pytest.mark.parametrize("cache_len", [0, -1, 21])
def test_wrong_arguments(cache_len):
    with pytest.raises(ValueError, match=f"cache_len is {cache_len}; expected 0 < cache_len <= max_len=20"):
        soft_overlong(np.array([1]), max_len=20, cache_len=cache_len)
