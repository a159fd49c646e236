"""The order of training prompts: curriculum, prioritised sampling, retirement; test_rollouts has the plain shuffle."""

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import CONFIG, PLAIN, rollouts_of, scored

from jaxrl_llm.data.stream import Stream, success_rate
from jaxrl_llm.objective.algorithms import PromptChoice
from jaxrl_llm.run.modes import Position, PromptDispatcher, moved_on
from jaxrl_llm.sampler.groups import PendingPrompt
from jaxrl_llm.types import Prompt


def problems(size):
    return tuple(Prompt(1000 + i, "x" * (i * 7 % size + 1)) for i in range(size))  # ids are not indices


def batch(stream, n, draw=0, step=0, solved=None, pending=()):
    """Draws and indices of a batch, as the dispatcher asks for it, and the draw of the next."""
    learner = SimpleNamespace(stream=stream)
    dispatcher = PromptDispatcher(learner, Position(step, draw, solved or {}, pending), None)
    asked = [dispatcher.ask() for _ in range(n)]
    return [p.draw for p in asked], [p.index for p in asked], dispatcher.draw


def difficulty(p):
    return len(p.text)


def ranks(stream, indices):
    return [len(stream.problems[i].text) - 1 for i in indices]


def test_a_curriculum_goes_once_from_easy_to_hard_over_the_run():
    stream = Stream(problems(20), 0, difficulty, total_steps=5)
    for step in range(5):
        draws, indices, _ = batch(stream, 4, draw=4 * step, step=step)
        assert draws == list(range(4 * step, 4 * step + 4))
        assert sorted(ranks(stream, indices)) == list(range(4 * step, 4 * step + 4))


@pytest.mark.parametrize("asked", [4, 60])
def test_a_curriculum_follows_the_step_however_many_prompts_a_step_asks_for(asked):
    """Dynamic sampling asks for ten times as many: difficulty is still that of the step, nothing repeats."""
    stream, draw, means = Stream(problems(1000), 0, difficulty, total_steps=70), 0, []
    for step in range(70):
        draws, indices, draw = batch(stream, asked, draw, step)
        assert len(set(indices)) == asked
        means.append(np.mean(ranks(stream, indices)))
        assert abs(means[-1] - 1000 * (step + 0.5) / 70) < max(15, 1.5 * asked)
    assert np.corrcoef(means, range(70))[0, 1] > 0.99
    assert batch(stream, asked, draw - asked, 69)[1] == indices  # (seed, draw, step) decide


def test_a_long_run_over_few_problems_reaches_the_hardest_and_skips_none():
    stream = Stream(problems(20), 0, difficulty, total_steps=200)
    seen = [ranks(stream, batch(stream, 4, 4 * step, step)[1]) for step in range(200)]
    assert all(len(set(s)) == 4 and max(s) - min(s) <= 10 for s in seen)
    assert {r for s in seen for r in s} == set(range(20))
    assert 19 in seen[-1]
    assert ranks(stream, batch(stream, 1, 0, 1000)[1]) == [19]  # a step beyond the last is as the last


def test_prioritised_sampling_draws_in_proportion_to_failures():
    stream = Stream(problems(4), 0, prioritized=True)
    solved = {0: (8, 8), 1: (8, 4), 2: (8, 6)}  # index 3 was never answered
    counts = np.bincount([stream.next(d, 0, solved)[1] for d in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, np.array([0.001, 0.5, 0.25, 1]) / 1.75, atol=0.03)
    left = np.bincount([stream.next(d, 0, solved, {3})[1] for d in range(4000)], minlength=4)
    np.testing.assert_allclose(left / 4000, np.array([0.001, 0.5, 0.25, 0]) / 0.75, atol=0.03)
    draws, indices, after = batch(stream, 3, 7, solved=solved)
    assert len(set(indices)) == 3  # without replacement
    assert (draws, after) == ([7, 8, 9], 10)
    assert batch(stream, 3, 7, solved=solved)[1] == indices


@pytest.mark.parametrize("always_solved", [297, 300])
def test_a_large_pool_is_drawn_from_in_the_same_proportions(always_solved):
    """By rejection; of 300 prompts that are hardly ever accepted, once it has been given up."""
    stream, solved = Stream(problems(300), 0, prioritized=True), dict.fromkeys(range(always_solved), (8, 8))
    indices = np.array([stream.next(d, 0, solved, {0})[1] for d in range(400)])
    assert 0 not in indices
    share = 0.299 / 3.299 if always_solved < 300 else 1
    assert abs((indices < 297).mean() - share) < 0.06
    assert len(set(indices)) > (25 if always_solved < 300 else 200)


def test_what_is_left_of_a_large_pool_is_found():
    stream = Stream(problems(300), 0, prioritized=True, usable=lambda p: p.id % 2 == 0)
    assert {stream.next(d, 0, {}, set(range(1, 297)))[1] for d in range(20)} == {0, 298}


def test_a_prioritised_ask_costs_no_more_with_a_million_problems():
    stream, rng = Stream(range(10**6), 0, prioritized=True), np.random.default_rng(0)
    solved = {int(i): (8, int(rng.integers(9))) for i in rng.permutation(10**6)[:50_000]}
    before = time.perf_counter()
    indices = [stream.next(d, 0, solved, {1, 2})[1] for d in range(100)]
    assert (time.perf_counter() - before) / 100 < 0.01
    assert len(set(indices)) == 100


def test_solved_prompts_are_retired_and_their_draws_passed_over():
    plain, stream = Stream(problems(10), 3), Stream(problems(10), 3, retire_above=0.875)
    order = plain.take(0, 20)[2].tolist()
    solved = {order[1]: (8, 7), order[4]: (8, 8), order[2]: (16, 13)}  # 0.875, 1, 0.8125
    draws, indices, after = batch(stream, 8, solved=solved)
    left = [d for d in range(20) if order[d] not in (order[1], order[4])][:8]
    assert (draws, indices, after) == (left, [order[d] for d in left], left[-1] + 1)


ORDERS = {"plain": {}, "difficulty": {"difficulty": difficulty, "total_steps": 9}, "prioritized": {"prioritized": True}}


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_has_distinct_prompts_while_there_are_any(order):
    stream, draw = Stream(problems(12), 0, **ORDERS[order]), 0
    for step in range(9):  # 5 does not divide 12: batches lie across the borders of epochs
        _, indices, draw = batch(stream, 5, draw, step)
        assert len(set(indices)) == 5
    pending = (PendingPrompt(0, 3), PendingPrompt(1, 7))
    assert not {3, 7} & set(batch(stream, 10, draw, pending=pending)[1])
    twice = batch(stream, 30, draw)[1]  # of 12
    assert sorted(twice[:12]) == sorted(twice[12:24]) == list(range(12))
    assert len(set(twice[24:])) == 6


@pytest.mark.parametrize("order", ORDERS)
def test_the_last_prompts_repeat_only_when_they_must_and_when_none_is_left_the_pass_rates_are_told(order):
    solved = {i: (8, 8 if i < 98 else 0) for i in range(100)}
    stream = Stream(problems(100), 0, **ORDERS[order], retire_above=0.875, batch_size=32)
    assert [sorted(pair) for pair in np.reshape(batch(stream, 8, solved=solved)[1], (4, 2)).tolist()] == [[98, 99]] * 4
    with pytest.raises(RuntimeError) as error:
        stream.next(0, 0, dict.fromkeys(range(100), (8, 7)))
    assert str(error.value) == (
        "0 of 100 training prompts are left to draw from; expected up to rollout.prompts = 32. Pass rates: 100 reach "
        "algorithm.prompts.retire_above = 0.875, mean 0.88 of the 100 that were answered; none of the others is usable"
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_prompt_that_cannot_be_used_is_passed_over(order):
    stream = Stream(problems(12), 0, **ORDERS[order], usable=lambda p: p.id % 3 > 0)
    assert sorted(batch(stream, 8)[1]) == [i for i in range(12) if (1000 + i) % 3]
    with pytest.raises(RuntimeError, match="none of the others is usable"):
        replace(stream, usable=lambda p: False).next(0)


def test_what_is_always_solved_comes_again_now_and_then():
    solved = dict.fromkeys(range(4), (8, 8))
    assert sorted(batch(Stream(problems(4), 0, prioritized=True), 4, solved=solved)[1]) == [0, 1, 2, 3]


def test_what_was_solved_is_remembered_only_when_the_order_depends_on_it():
    seen = scored(rollouts_of([3, 4, 5, 6]), [1, 0, 1, 1])
    seen = replace(seen, all_rollouts=replace(seen.rollouts, indices=np.array([5, 2])))
    at = Position(2, 4, {5: (2, 2)})
    moved = moved_on(replace(CONFIG, algorithm=replace(PLAIN, prompts=PromptChoice(prioritized=True))), at, seen, 9)
    assert moved == Position(3, 9, {5: (4, 3), 2: (2, 2)})
    assert at.solved == {5: (2, 2)}
    assert success_rate(moved.solved, 5) == 0.75
    assert success_rate(moved.solved, 1) == 0
    plain = moved_on(replace(CONFIG, algorithm=PLAIN), Position(), seen, 9)
    assert plain.solved == {}
