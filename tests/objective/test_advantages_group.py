"""Advantages of a group: worked numbers, float64 scalar loops, exact zeros, invariances, DCPO's running statistics."""

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
    dcpo_sas,
    dcpo_sas_init,
    dr_grpo,
    gpg,
    grpo,
    lite_ppo,
    maxrl,
    opmd,
    opo,
    passk,
    raft,
    reinforce_rej,
    scalerl,
)

BINARY = np.array([[1, 0, 0, 0], [1, 1, 1, 0]], np.float32)


def lengths_like(rewards):
    """Response lengths in tokens, all different, one of them zero."""
    return np.arange(rewards.size).reshape(rewards.shape) * 3 % (rewards.size + 2)


def weighted(rewards):
    return opo(rewards, lengths_like(rewards))


sas = jax.jit(dcpo_sas, static_argnames=("eps", "ddof"))


def fresh_sas(rewards, **hyper):
    return sas(rewards, dcpo_sas_init(len(rewards)), np.arange(len(rewards)), **hyper)[0]


REFERENCES = {
    "lite_ppo": (lite_ppo, reference.lite_ppo),
    "lite_ppo wide": (partial(lite_ppo, eps=0.3), partial(reference.lite_ppo, eps=0.3)),
    "scalerl": (scalerl, reference.scalerl),
    "scalerl wide": (partial(scalerl, eps=0.3), partial(reference.scalerl, eps=0.3)),
    "reinforce_rej": (reinforce_rej, reference.reinforce_rej),
    "raft": (raft, reference.raft),
    "opo": (weighted, lambda r: reference.opo(r, lengths_like(r))),
    "maxrl": (maxrl, reference.maxrl),
    "maxrl wide": (partial(maxrl, eps=0.3), partial(reference.maxrl, eps=0.3)),
    "passk": (passk, reference.passk),
    "opmd": (opmd, reference.opmd),
    "opmd soft": (partial(opmd, tau=0.7), partial(reference.opmd, tau=0.7)),
    "opmd sharp": (partial(opmd, tau=0.01), partial(reference.opmd, tau=0.01)),
    "gpg": (gpg, reference.gpg),
    "sas": (fresh_sas, lambda r: reference.dcpo_sas(r, {}, range(len(r)))),
}
NAMES = [name for name in REFERENCES if not name.endswith(("wide", "sharp"))]  # each function once
ALL = [REFERENCES[name][0] for name in NAMES]
SILENT = [function for function in ALL if function is not raft]  # they give a group without signal exactly 0
SHIFT_INVARIANT = [lite_ppo, scalerl, opmd, partial(opmd, tau=0.7), gpg, weighted, passk]
# Quarters: every sum of a few is exact in float32, so properties hold to the last bits and no group is nearly constant.
QUARTERS = arrays(np.float32, (3, 5), elements=st.integers(-12, 12).map(lambda k: k / 4))
few_examples = settings(deadline=None, max_examples=20)
close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


# ---- by hand ----


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lite_ppo, [[1.403119, -0.467706, -0.467706, -0.467706], [0.467706, 0.467706, 0.467706, -1.403119]]),
        (scalerl, [[1.620182, -0.540061, -0.540061, -0.540061], [0.540061, 0.540061, 0.540061, -1.620182]]),
        (maxrl, [[2.999988, -0.999996, -0.999996, -0.999996], [0.333333, 0.333333, 0.333333, -0.999999]]),
        (passk, [[1, 0, 0, 0], [0, 0, 0, 0]]),
        (opmd, [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]),
        (gpg, [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]),
        (reinforce_rej, BINARY),
        (raft, BINARY),
    ],
)
def test_worked_numbers(function, expected):
    np.testing.assert_allclose(function(BINARY), expected, rtol=0, atol=6e-7)


def test_by_hand():
    signed = np.array([[1, -1, -1], [-1, -1, -1], [1, 1, 1]])
    np.testing.assert_array_equal(reinforce_rej(signed), [[1, -1, -1], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(raft(signed), [[1, 0, 0], [0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(opo(np.array([[1.0, 0.0]]), np.array([[1, 3]])), [[0.75, -0.25]])
    np.testing.assert_allclose(passk(np.array([[0.2, 0.9, 0.5], [0.9, 0.9, 0.1]])), [[0, 0.4, 0], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(maxrl(np.array([[3.0, 1.0]]), eps=2.0), [[0.25, -0.25]])  # eps beside the mean
    # two of three groups have no signal, so the others count threefold
    np.testing.assert_array_equal(gpg(np.array([[1, 0], [1, 1], [0, 0]])), [[1.5, -1.5], [0, 0], [0, 0]])
    # mean exp(R/τ) = (1 + 3)/2 = 2
    soft = opmd(np.array([[0.0, 2 * np.log(3)]]), tau=2.0)
    np.testing.assert_allclose(soft, [[-2 * np.log(2), 2 * np.log(1.5)]], rtol=1e-6)


def test_the_spread_of_lite_ppo_is_of_raw_rewards_and_that_of_scalerl_of_centred_ones():
    """Groups whose means are far apart: the first divides by the distance of the means, the second does not see it."""
    apart = np.array([[0.0, 1.0], [100.0, 101.0]])
    assert np.abs(lite_ppo(apart)).max() < 0.01
    np.testing.assert_allclose(np.abs(scalerl(apart)), 0.5 / np.sqrt(4 * 0.25 / 3), rtol=1e-5)
    # eps stands outside the root: with a spread of 1 it halves, inside it would divide by √2
    np.testing.assert_allclose(lite_ppo(np.array([[-1.0, 0.0, 1.0]]), eps=1.0), [[-0.5, 0, 0.5]], atol=1e-7)
    np.testing.assert_allclose(scalerl(np.array([[-1.0, 0.0, 1.0]]), eps=1.0), [[-0.5, 0, 0.5]], atol=1e-7)


def test_one_prompt_lite_ppo_and_scalerl_are_grpo():
    rewards = np.random.default_rng(0).normal(size=(1, 6))
    close(lite_ppo(rewards), grpo(rewards), rtol=1e-6)
    close(scalerl(rewards), grpo(rewards), rtol=1e-6)
    close(fresh_sas(rewards), grpo(rewards), rtol=1e-6)
    close(gpg(rewards), dr_grpo(rewards), rtol=1e-6)


# ---- against scalar loops ----


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("p", "g"), [(3, 5), (1, 7), (6, 2)])
def test_scalar_loops(name, p, g):
    function, loop = REFERENCES[name]
    rewards = np.random.default_rng(p * g).normal(size=(p, g)) * np.arange(1, p + 1)[:, None] + 3
    rewards = rewards.astype(np.float32)
    if p > 2:
        rewards[1] = 0.7  # and a group without signal
    np.testing.assert_allclose(function(rewards), loop(rewards), rtol=2e-5, atol=3e-6)


def test_scalerl_without_the_groups_a_filter_dropped():
    rewards = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    rewards[2] = 1.0
    for kept in ([True, True, False, True], [False, True, True, False], [True] * 4):
        kept = np.array(kept)
        got = scalerl(rewards, kept=kept)
        np.testing.assert_allclose(got, reference.scalerl(rewards, kept=kept), rtol=2e-5, atol=2e-6)
        assert not np.any(got[~kept])
        close(got[kept], scalerl(rewards[kept]), rtol=1e-6)  # as if they had never been there
    assert np.abs(scalerl(rewards)[0, 0]) > np.abs(scalerl(rewards, kept=np.array([1, 1, 0, 1], bool))[0, 0])
    assert not np.any(scalerl(rewards, kept=np.zeros(4, bool)))
    assert not np.any(scalerl(rewards, kept=np.array([0, 0, 1, 0], bool), eps=0.0))


def test_scalerl_rewards_of_dropped_groups_do_not_leak():
    rewards = np.array([[1.0, 0.0, 0.5], [np.nan, np.inf, 1e30]])
    close(scalerl(rewards, kept=np.array([True, False])), [[1, -1, 0], [0, 0, 0]])


# ---- exact zeros ----


@pytest.mark.parametrize("function", SILENT)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e-7, -9e6])
def test_constant_groups_are_exactly_zero(function, value):
    assert not np.any(function(np.full((2, 7), value)))


@pytest.mark.parametrize("function", SILENT)
def test_float_noise_is_not_signal(function):
    next_to = np.nextafter(np.float32(0.3), np.float32(1))
    assert not np.any(function(np.array([[0.3, next_to, 0.3, next_to]], np.float32)))
    assert not np.any(function(np.array([[0.1 + 0.2, 0.3, 0.3]])))
    assert not np.any(function(np.array([[0.0, 1e-8, 0.0]])))
    thousand = np.float32(1000)
    assert not np.any(function(np.array([[thousand, np.nextafter(thousand, np.float32(2000)), thousand]])))
    noisy = np.array([[0.3, next_to, 0.3, 0.3], [1, 0, 0, 0]], np.float32)  # beside a group that has signal
    got = function(noisy)
    assert not np.any(got[0])
    assert np.any(got[1])


@pytest.mark.parametrize("function", [lite_ppo, scalerl, maxrl, fresh_sas])
@pytest.mark.parametrize("value", [0.0, 0.1, 5.0])
def test_nothing_is_divided_by_zero_without_eps(function, value):
    with jax.debug_nans(True), jax.debug_infs(True):
        assert not np.any(function(np.full((2, 3), value), eps=0.0))
        assert not np.any(function(np.full((1, 1), value), eps=0.0))


def test_groups_of_one():
    alone = np.array([[2.0], [-0.5], [0.0]])
    for function in (lite_ppo, scalerl, reinforce_rej, weighted, maxrl, opmd, partial(opmd, tau=0.5), gpg, fresh_sas):
        np.testing.assert_array_equal(function(alone), np.zeros((3, 1)))
    np.testing.assert_array_equal(raft(alone), [[2], [0], [0]])
    with pytest.raises(ValueError, match="G=1"):
        passk(alone)


def test_opo_with_empty_responses():
    rewards = np.array([[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]])
    got = opo(rewards, np.array([[0, 0, 0], [0, 4, 4]]))
    assert np.all(np.isfinite(got))
    np.testing.assert_array_equal(got[1], [0, -1, 1])  # an empty response has no say in the baseline


def test_opmd_from_the_mean_to_the_maximum():
    rewards = np.random.default_rng(2).normal(size=(3, 5))
    np.testing.assert_allclose(opmd(rewards, tau=1e3), opmd(rewards), atol=2e-3)
    np.testing.assert_allclose(opmd(rewards, tau=1e-4), rewards - rewards.max(axis=1, keepdims=True), atol=3e-4)
    far = np.array([[1e4, -1e4, 0.0], [-1e4, -1e4 + 1, -1e4]])  # exp(R/τ) is out of range, the answer is not
    np.testing.assert_allclose(opmd(far, tau=0.1), reference.opmd(far, tau=0.1), rtol=1e-5, atol=2e-3)


# ---- arrays of any kind ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64, jnp.bfloat16])
def test_any_dtype_gives_what_float32_gives(name, dtype):
    function, _ = REFERENCES[name]
    rewards = np.array([[1, 0, 0, 3], [2, 1, 1, 0], [1, 1, 1, 1]])
    got = function(rewards.astype(dtype))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, function(rewards.astype(np.float32)))


def test_booleans_are_zeros_and_ones():
    for function in ALL:
        np.testing.assert_array_equal(function(BINARY.astype(bool)), function(BINARY))


@pytest.mark.parametrize("name", NAMES)
def test_jit_and_nan(name):
    function, _ = REFERENCES[name]
    rewards = np.array([[1, 0, 0.5], [2, 1, 1], [1, 1, 1]], np.float32)
    np.testing.assert_allclose(jax.jit(function)(rewards), function(rewards), rtol=1e-6, atol=1e-6)
    rewards[0, 1] = np.nan
    assert np.any(np.isnan(function(rewards)[0]))


@pytest.mark.parametrize("name", ["lite_ppo", "scalerl", "maxrl", "passk", "gpg"])
def test_shapes_are_checked(name):
    with pytest.raises(TypeCheckError):
        REFERENCES[name][0](BINARY[0])
    with pytest.raises(TypeCheckError):
        opo(BINARY, np.ones((4, 2)))
    with pytest.raises(TypeCheckError):
        scalerl(BINARY, kept=np.ones(4, bool))


# ---- properties ----


@few_examples
@given(rewards=QUARTERS, order=st.permutations(range(3)), members=st.permutations(range(5)))
def test_order_of_groups_and_within_groups(rewards, order, members):
    shuffle = np.ix_(order, members)
    for function in (lite_ppo, scalerl, reinforce_rej, raft, passk, opmd, partial(opmd, tau=0.7), gpg, fresh_sas):
        close(function(rewards[shuffle]), function(rewards)[shuffle])
    tokens = lengths_like(rewards)
    close(opo(rewards[shuffle], tokens[shuffle]), opo(rewards, tokens)[shuffle])
    kept = np.array([True, False, True])
    close(scalerl(rewards[shuffle], kept=kept[list(order)]), scalerl(rewards, kept=kept)[shuffle])
    close(maxrl(rewards[shuffle] + 4), maxrl(rewards + 4)[shuffle])


@few_examples
@given(rewards=QUARTERS, shift=st.integers(-8, 8))
def test_adding_a_constant_changes_nothing(rewards, shift):
    for function in SHIFT_INVARIANT:
        close(function(rewards + np.float32(shift)), function(rewards))


@few_examples
@given(rewards=QUARTERS, scale=st.sampled_from([0.25, 2.0, 16.0]))
def test_scale(rewards, scale):
    for function in (partial(lite_ppo, eps=0.0), partial(scalerl, eps=0.0), partial(fresh_sas, eps=0.0)):
        close(function(rewards * scale), function(rewards))
    close(maxrl((rewards + 4) * scale, eps=0.0), maxrl(rewards + 4, eps=0.0))
    for function in (reinforce_rej, raft, weighted, passk, opmd, gpg):
        close(function(rewards * scale), scale * function(rewards))
    close(opmd(rewards * scale, tau=0.7 * scale), scale * opmd(rewards, tau=0.7))


@few_examples
@given(rewards=QUARTERS)
def test_what_holds_of_every_group(rewards):
    for function in (lite_ppo, scalerl, opmd, gpg, fresh_sas):
        np.testing.assert_allclose(function(rewards).sum(axis=1), 0, atol=3e-5)
    lengths = lengths_like(rewards)
    np.testing.assert_allclose((opo(rewards, lengths) * lengths).sum(axis=1), 0, atol=2e-3)
    best = passk(rewards)
    assert np.all(np.sum(best > 0, axis=1) <= 1)
    assert np.all((best >= 0) & ((best == 0) | (rewards == rewards.max(axis=1, keepdims=True))))
    assert np.all(opmd(rewards, tau=0.7).sum(axis=1) <= 1e-5)  # Jensen: log mean exp is at least the mean
    if np.ptp(rewards, axis=1).any():
        assert np.std(scalerl(rewards, eps=0.0), ddof=1) == pytest.approx(1, rel=1e-5)


# ---- DCPO: statistics that outlive a batch ----


def test_dcpo_visits_by_hand():
    """One prompt, groups [1, 0], [1, 1], [1, 0] with plain standard deviations (ddof 0) and no eps."""
    state, hand = dcpo_sas_init(3), partial(dcpo_sas, prompt_ids=np.array([1]), eps=0.0, ddof=0)
    first, state = hand(np.array([[1, 0]]), state)
    np.testing.assert_allclose(first, [[1, -1]], rtol=1e-6)
    # seen 1, 0, 1, 1: mean 3/4, std √3/4, so A_tot = 1/√3; no spread in this visit, so A_tot / 2
    second, state = hand(np.array([[1, 1]]), state)
    np.testing.assert_allclose(second, [[0.5 / 3**0.5] * 2], rtol=1e-6)
    # seen 4 of 6: mean 2/3, std √2/3, A_tot = 1/√2 or −√2, A_new = ±1, i = 3.
    # 1: (2 + .7071)/3 = .9024, (1 + 1.4142)/3 = .8047;   0: −(2 + 1.4142)/3 = −1.1381, −(1 + 2.8284)/3 = −1.2761
    third, state = hand(np.array([[1, 0]]), state)
    np.testing.assert_allclose(third, [[0.804738, -1.138071]], rtol=1e-6)
    np.testing.assert_allclose(state["count"], [0, 6, 0])
    np.testing.assert_allclose(state["mean"], [0, 4 / 6, 0], rtol=1e-6)
    np.testing.assert_allclose(state["m2"], [0, 4 / 3, 0], rtol=1e-6)


@pytest.mark.parametrize(("ddof", "eps"), [(1, 1e-6), (0, 0.2)])
@pytest.mark.parametrize("kind", ["binary", "normal"])
def test_dcpo_scalar_loops(kind, ddof, eps):
    rng = np.random.default_rng(3)
    state, seen = dcpo_sas_init(5), {}
    for _ in range(6):
        rewards = rng.integers(0, 2, (3, 4)) if kind == "binary" else rng.normal(2, 1, (3, 4))
        rewards = rewards.astype(np.float32)
        ids = rng.choice([0, 1, 3, 4], 3)  # with repeats, within a batch too; prompt 2 never comes
        got, state = sas(rewards, state, ids, eps=eps, ddof=ddof)
        np.testing.assert_allclose(got, reference.dcpo_sas(rewards, seen, ids, eps, ddof), rtol=1e-4, atol=1e-5)
        assert got.dtype == jnp.float32
    assert max(len(rewards) for rewards in seen.values()) > 3 * 4
    for prompt in range(5):
        rewards = seen.get(prompt, [])
        assert state["count"][prompt] == len(rewards)
        assert state["mean"][prompt] == pytest.approx(np.mean(rewards) if rewards else 0, abs=1e-5)
        assert state["m2"][prompt] == pytest.approx(np.var(rewards) * len(rewards) if rewards else 0, rel=1e-4)


def test_dcpo_a_prompt_twice_in_a_batch_is_two_visits():
    rewards = np.random.default_rng(4).normal(size=(3, 4))
    start = dcpo_sas(rewards[::-1], dcpo_sas_init(6), np.array([5, 2, 0]))[1]
    together, after = dcpo_sas(rewards, start, np.array([2, 5, 2]))
    state = start
    for row, prompt in enumerate([2, 5, 2]):
        alone, state = dcpo_sas(rewards[row : row + 1], state, np.array([prompt]))
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), after, state)
    for name in ("count", "mean", "m2"):  # the prompts that did not come
        np.testing.assert_array_equal(after[name][np.array([0, 1, 3, 4])], start[name][np.array([0, 1, 3, 4])])


def test_dcpo_same_rewards_for_ever_are_no_signal():
    """Statistics that run on in float32 gather noise; it must not be divided by itself."""
    for value in (0.1, 1 / 3, -123.456):
        state = dcpo_sas_init(1)
        for _ in range(7):
            got, state = sas(np.full((1, 3), value), state, np.array([0]))
            assert not np.any(got)


def test_dcpo_large_rewards_keep_their_spread():
    """Sums of squares would lose a spread of 1 around 10,000; running deviations do not."""
    rng = np.random.default_rng(5)
    state, seen = dcpo_sas_init(1), {}
    for _ in range(4):
        rewards = (1e4 + rng.integers(-2, 3, (1, 6))).astype(np.float32)
        got, state = sas(rewards, state, np.array([0]))
        np.testing.assert_allclose(got, reference.dcpo_sas(rewards, seen, [0]), rtol=0, atol=5e-3)


def test_dcpo_under_jit_and_pure():
    rewards, ids, start = np.random.default_rng(6).normal(size=(3, 4)), np.array([1, 0, 1]), dcpo_sas_init(2)
    before = jax.tree.map(np.array, start)
    expected, after = dcpo_sas(rewards, start, ids)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, start), before)
    got, jitted = jax.jit(dcpo_sas)(rewards, start, ids)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), jitted, after)


# ---- wrong arguments ----


def test_wrong_arguments():
    for function in (lite_ppo, scalerl, maxrl, fresh_sas):
        with pytest.raises(ValueError, match="eps is -0.1"):
            function(BINARY, eps=-0.1)
    with pytest.raises(ValueError, match="ddof is 2"):
        fresh_sas(BINARY, ddof=2)
    for tau in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"tau is {tau}"):
            opmd(BINARY, tau=tau)
