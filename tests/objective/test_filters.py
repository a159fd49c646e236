"""Filters of groups and the phases of tokens, by hand. The choices of tokens are tested in test_losses_token.py."""

from functools import partial

import numpy as np
import pytest

from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm, Updates
from jaxrl_llm.objective.filters import lopti_phases, mixed, varied

GRPO = advantages.grpo, losses.ppo_clip, "token"


def test_mixed_groups_have_right_and_wrong_answers():
    correct = np.array([[True, True, False], [True, True, True], [False, False, False], [False, True, False]])
    assert mixed(correct).tolist() == [True, False, False, True]


def test_varied_groups_differ_by_more_than_noise():
    thousand = np.float32(1000)
    rewards = np.array(
        [[0.3, 0.3], [0.3, 0.3000001], [0.3, 0.31], [-1, 1], [thousand, np.nextafter(thousand, np.float32(2000))]],
        np.float32,
    )
    assert varied(rewards).tolist() == [False, False, True, True, False]
    assert varied(np.array([[-1000.0, -1000.0005], [-1000.0, -1000.1]])).tolist() == [False, True]


def test_lopti_s_phases_part_the_trained_tokens():
    old, mask = np.log([[0.1, 0.5, 0.51, 0.2]]), np.array([[True, True, True, False]])
    first, second = lopti_phases(old, mask)
    np.testing.assert_array_equal(first, [[True, False, False, False]])
    np.testing.assert_array_equal(second, [[False, True, True, False]])
    np.testing.assert_array_equal(lopti_phases(old, mask, eta=0.05)[0], np.zeros((1, 4), bool))
    for eta in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"eta is {eta}"):
            lopti_phases(old, mask, eta=eta)


def in_thirds(old_logp, mask):
    return mask & (old_logp < -2), mask & (old_logp >= -2) & (old_logp < -1), mask & (old_logp >= -1)


def all_at_once(old_logp, mask):
    return (mask & (old_logp < 0),)


def no_tuple(old_logp, mask):
    return mask & (old_logp < 0)


def test_the_number_of_phases_is_the_function_s_own():
    of = lambda phases: Algorithm(*GRPO, updates_per_batch=4, updates=Updates(epochs=5, phases=phases))
    counted = {fn: of(fn).steps_per_batch for fn in (None, all_at_once, lopti_phases, in_thirds)}
    assert list(counted.values()) == [20, 20, 40, 60]
    assert of(partial(lopti_phases, eta=0.1)).steps_per_batch == 40
    assert Algorithm(*GRPO, updates=Updates(phases=all_at_once)).needs_old
    with pytest.raises(ValueError, match="algorithm.updates.phases is .*no_tuple.*; expected one that returns a tuple"):
        _ = of(no_tuple).steps_per_batch
