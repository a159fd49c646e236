"""Advantages: the worked numbers, float64 scalar loops, exact zeros, and what must not change the answer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jaxtyping import TypeCheckError

from jaxrl_llm.objective.advantages import dr_grpo, grpo, raw, rloo

BINARY = np.array([[1, 0, 0, 0], [1, 1, 1, 0]], np.float32)
ALL = [raw, grpo, partial(grpo, ddof=0), dr_grpo, rloo]
BASELINED = ALL[1:]
# Quarters: every sum of a few is exact in float32, so properties hold to the last bits and no group is nearly constant.
QUARTERS = arrays(np.float32, (3, 5), elements=st.integers(-12, 12).map(lambda k: k / 4))
few_examples = settings(deadline=None, max_examples=25)


def loop_reference(name, rewards, eps=1e-6, ddof=1):
    """Each advantage on its own, in float64 scalars."""
    rows = []
    for group in np.asarray(rewards, np.float64):
        values = [float(r) for r in group]
        n = len(values)
        mean = sum(values) / n
        row = []
        for i, r in enumerate(values):
            if name == "raw":
                row.append(r)
            elif name == "dr_grpo":
                row.append(r - mean)
            elif name == "rloo":
                row.append(r - sum(v for j, v in enumerate(values) if j != i) / (n - 1))
            elif len(set(values)) == 1:
                row.append(0.0)
            else:
                variance = sum((v - mean) ** 2 for v in values) / (n - ddof)
                row.append((r - mean) / (variance**0.5 + eps))
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (raw, BINARY),
        (grpo, [[1.499997, -0.499999, -0.499999, -0.499999], [0.499999, 0.499999, 0.499999, -1.499997]]),
        (
            partial(grpo, ddof=0),
            [[1.732047, -0.577349, -0.577349, -0.577349], [0.577349, 0.577349, 0.577349, -1.732047]],
        ),
        (dr_grpo, [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]),
        (rloo, [[1, -1 / 3, -1 / 3, -1 / 3], [1 / 3, 1 / 3, 1 / 3, -1]]),
    ],
)
def test_worked_numbers(advantage, expected):
    np.testing.assert_allclose(advantage(BINARY), expected, rtol=0, atol=6e-7)


def test_eps_is_added_outside_the_root():
    # std is 1 here: outside the root eps = 1 halves the advantage, inside it divides by √2.
    np.testing.assert_allclose(grpo(np.array([[-1.0, 0.0, 1.0]]), eps=1.0), [[-0.5, 0, 0.5]], atol=1e-7)


@pytest.mark.parametrize("name", ["raw", "grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(("p", "g"), [(3, 5), (1, 7), (6, 2)])
def test_scalar_loops(name, p, g):
    rewards = np.random.default_rng(p * g).normal(size=(p, g)) * np.arange(1, p + 1)[:, None] + 3
    function = {"raw": raw, "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}[name]
    np.testing.assert_allclose(function(rewards), loop_reference(name, rewards), rtol=2e-5, atol=2e-6)
    if name == "grpo":
        expected = loop_reference(name, rewards, eps=0.3, ddof=0)
        np.testing.assert_allclose(grpo(rewards, eps=0.3, ddof=0), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("advantage", BASELINED)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, 1 / 3, 1e-7, 123.456, -9e6])
@pytest.mark.parametrize("g", [3, 7])
def test_constant_group_is_exactly_zero(advantage, value, g):
    assert not np.any(advantage(np.full((2, g), value)))


@pytest.mark.parametrize("advantage", BASELINED)
def test_float_noise_is_not_signal(advantage):
    """A test `std > 0` passes on noise, and dividing by it makes rewards that are equal a full-size gradient."""
    next_to = np.nextafter(np.float32(0.3), np.float32(1))
    assert next_to - np.float32(0.3) > 0
    noisy = np.array([[0.3, next_to, 0.3, next_to]], np.float32)
    assert not np.any(advantage(noisy))
    assert not np.any(advantage(np.array([[0.1 + 0.2, 0.3, 0.3]])))
    assert not np.any(advantage(np.array([[0.0, 1e-8, 0.0]])))  # what a sum that should cancel leaves behind
    thousand = np.float32(1000)
    assert not np.any(advantage(np.array([[thousand, np.nextafter(thousand, np.float32(2000)), thousand]])))


def test_no_division_by_zero_in_a_constant_group_without_eps():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert not np.any(grpo(np.ones((2, 3)), eps=0.0))


def test_small_differences_are_signal():
    np.testing.assert_allclose(grpo(np.array([[0.0, 1e-4, 2e-4]]), eps=0.0), [[-1, 0, 1]], atol=1e-6)
    assert np.all(np.sign(dr_grpo(np.array([[0.0, 3e-6]]))) == [[-1, 1]])


def test_one_constant_group_leaves_the_others_alone():
    for value in (0.1, 5.0, -5.0):
        noisy = np.array([[value, np.nextafter(np.float32(value), np.float32(9)), value, value]], np.float32)
        mixed = np.concatenate([BINARY, noisy])
        for advantage in BASELINED:
            np.testing.assert_array_equal(advantage(mixed)[:2], advantage(BINARY))
            assert not np.any(advantage(mixed)[2])


def test_group_of_one():
    alone = np.array([[2.0], [-0.5], [0.0]])
    np.testing.assert_array_equal(grpo(alone), alone)
    np.testing.assert_array_equal(grpo(alone, ddof=0), alone)
    np.testing.assert_array_equal(raw(alone), alone)
    with pytest.raises(ValueError, match="G=1.*at least 2"):
        rloo(alone)


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.float16, np.float64, jnp.bfloat16])
def test_any_dtype_gives_what_float32_gives(advantage, dtype):
    """Integer rewards were once summed and centred as integers: the mean was truncated, unsigned ones wrapped."""
    rewards = np.array([[1, 0, 0, 3], [2, 1, 1, 0]])
    got = advantage(rewards.astype(dtype))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, advantage(rewards.astype(np.float32)))


@pytest.mark.parametrize("advantage", ALL)
def test_jit_and_vmap(advantage):
    stacked = np.stack([BINARY, BINARY[::-1], BINARY * 3])
    expected = np.stack([advantage(r) for r in stacked])
    np.testing.assert_allclose(jax.jit(advantage)(BINARY), expected[0], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(advantage)(stacked), expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", BASELINED)
def test_nan_is_not_hidden(advantage):
    got = advantage(np.array([[np.nan, 0.0, 1.0], [1.0, 0.0, 1.0]]))
    assert np.all(np.isnan(got[0]))
    assert np.all(np.isfinite(got[1]))


@few_examples
@given(rewards=QUARTERS, shift=st.integers(-8, 8))
def test_adding_a_constant_changes_nothing(rewards, shift):
    for advantage in BASELINED:
        np.testing.assert_allclose(advantage(rewards + np.float32(shift)), advantage(rewards), rtol=1e-4, atol=1e-5)


@few_examples
@given(rewards=QUARTERS)
def test_sums_to_zero_in_each_group_and_grpo_has_unit_spread(rewards):
    for advantage in BASELINED:
        np.testing.assert_allclose(advantage(rewards).sum(axis=1), 0, atol=2e-5)
    spread = np.std(grpo(rewards, eps=0.0), axis=1, ddof=1)
    np.testing.assert_allclose(spread, np.where(np.ptp(rewards, axis=1) > 0, 1.0, 0.0), rtol=1e-5)


@few_examples
@given(rewards=QUARTERS, scale=st.sampled_from([0.25, 2.0, 16.0]))
def test_scale(rewards, scale):
    np.testing.assert_allclose(grpo(rewards * scale, eps=0.0), grpo(rewards, eps=0.0), rtol=1e-5, atol=1e-6)
    for advantage in (raw, dr_grpo, rloo):
        np.testing.assert_allclose(advantage(rewards * scale), scale * advantage(rewards), rtol=1e-5, atol=1e-5)


@few_examples
@given(rewards=QUARTERS, groups=st.permutations(range(3)), members=st.permutations(range(5)))
def test_order_of_groups_and_within_groups(rewards, groups, members):
    shuffle = np.ix_(groups, members)
    for advantage in ALL:
        np.testing.assert_allclose(advantage(rewards[shuffle]), advantage(rewards)[shuffle], rtol=1e-4, atol=1e-5)


@few_examples
@given(rewards=QUARTERS, other=QUARTERS)
def test_groups_do_not_mix(rewards, other):
    for advantage in ALL:
        mixed = advantage(np.concatenate([rewards[:1], other]))
        np.testing.assert_allclose(mixed[:1], advantage(rewards[:1]), rtol=1e-5, atol=1e-6)


@few_examples
@given(rewards=QUARTERS)
def test_rloo_is_dr_grpo_stretched(rewards):
    np.testing.assert_allclose(rloo(rewards), 5 / 4 * dr_grpo(rewards), rtol=1e-6)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="ddof is 2; expected 0 or 1"):
        grpo(BINARY, ddof=2)
    with pytest.raises(ValueError, match="eps is -0.1"):
        grpo(BINARY, eps=-0.1)
    with pytest.raises(TypeCheckError):
        grpo(BINARY[0])
