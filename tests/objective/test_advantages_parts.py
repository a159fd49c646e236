"""Advantages from a reward's parts, and none at all: by hand, against scalar loops, and what must not change them."""

import advantages_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objective.advantages import gdpo, grpo, zero

PARTS = np.array([[[1, 0.5, 3], [0, 0.5, 1], [0, 0.5, 2], [0, 0, 2]], [[1, 1, 5], [1, 0, 5], [0, 1, 5], [1, 1, 5]]])


def test_gdpo_by_hand():
    """[1,0,0,0] is ±1.5, −.5 in any unit; standardised by itself, a part of spread .01 counts like one of spread 1."""
    right, brief = np.array([[1.0, 0, 0, 0]]), np.array([[0, 0.01, 0, 0]])
    total = np.array([[1.0, 1.0, -1.0, -1.0]])  # of 1.5 − .5 and −.5 − .5
    got = gdpo(np.stack([right, brief], axis=2))
    np.testing.assert_allclose(got, total / np.sqrt(4 / 3), rtol=2e-4)
    weighted = gdpo(np.stack([right, brief], axis=2), weights=(1.0, 3.0))
    total = np.array([[0.0, 4.0, -2.0, -2.0]])
    np.testing.assert_allclose(weighted, total / np.sqrt(24 / 3), rtol=2e-4, atol=1e-3)


def test_gdpo_of_one_part_is_grpo_over_the_batch():
    rewards = np.random.default_rng(0).normal(size=(3, 5))
    expected = np.asarray(grpo(rewards))
    np.testing.assert_allclose(gdpo(rewards[:, :, None]), expected / np.std(expected, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("kept", [None, np.array([True, False, True, True])])
@pytest.mark.parametrize("hyper", [{}, {"weights": (2.0, -0.5, 0.0)}, {"weights": (1, 1, 1)}])
def test_gdpo_scalar_loops(hyper, kept):
    parts = np.random.default_rng(1).normal(size=(4, 5, 3)) * np.array([1.0, 30.0, 0.01]) + 2
    parts[0, :, 1], parts[2] = 0.3, 0.7  # a part without signal, and a group
    parts = parts.astype(np.float32)
    got = gdpo(parts, kept=kept, **hyper)
    np.testing.assert_allclose(got, reference.gdpo(parts, kept=kept, **hyper), rtol=3e-5, atol=3e-5)
    assert not np.any(got[2])
    assert kept is None or not np.any(got[1])


def test_gdpo_s_batch_has_unit_spread_and_a_dropped_group_no_say():
    kept, spoiled = np.array([True, False, True]), np.random.default_rng(2).normal(size=(3, 4, 2))
    got = np.asarray(gdpo(spoiled, kept=kept))
    assert np.std(got[kept], ddof=1) == pytest.approx(1, rel=1e-5)
    spoiled[1] = np.nan
    np.testing.assert_array_equal(gdpo(spoiled, kept=kept), got)
    np.testing.assert_allclose(got[kept], gdpo(spoiled[kept]), rtol=1e-5)


def test_gdpo_without_signal_and_of_any_order():
    assert not np.any(gdpo(np.full((2, 3, 2), 0.1)))
    order, members = [1, 0], [2, 0, 3, 1]
    np.testing.assert_allclose(
        gdpo(PARTS[order][:, members]), gdpo(PARTS)[np.ix_(order, members)], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        gdpo(PARTS[:, :, ::-1], weights=(3, 2, 1)), gdpo(PARTS, weights=(1, 2, 3)), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(jax.jit(gdpo)(PARTS), gdpo(PARTS), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"weights is \(1.0, 2.0\); expected 3 numbers"):
        gdpo(PARTS, weights=(1.0, 2.0))


def test_zero():
    got = zero(np.array([[1, np.nan], [2, 3]]))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.zeros((2, 2)))
