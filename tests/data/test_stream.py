"""The order of training prompts: curriculum, prioritised sampling, retirement; test_rollouts has the plain shuffle."""

from dataclasses import replace

import numpy as np
import pytest
from cases import CONFIG, PLAIN, rollouts_of, scored

from jaxrl_llm.data.stream import Stream, success_rate
from jaxrl_llm.objective.algorithms import PromptChoice
from jaxrl_llm.run.modes import Position, moved_on
from jaxrl_llm.types import Prompt


def problems(size):
    return tuple(Prompt(1000 + i, "x" * (i * 7 % size + 1)) for i in range(size))  # ids are not indices


def test_a_curriculum_goes_once_from_easy_to_hard_over_the_run():
    stream = Stream(problems(20), 0, difficulty=lambda p: len(p.text), total=40)
    first, second = stream.take(0, 20), stream.take(20, 20)
    sizes = [len(p.text) for p in (*first[0], *second[0])]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, 20)
    assert [problems(20)[index].text for index in first[2]] == [p.text for p in first[0]]
    after = [len(p.text) for p in stream.take(40, 20)[0]]  # dynamic sampling may ask for more: shuffled again
    assert sorted(after) == list(range(1, 21))
    assert after != sorted(after)


def test_a_short_run_still_reaches_the_hardest():
    sizes = [len(p.text) for p in Stream(problems(20), 0, lambda p: len(p.text), total=5).take(0, 5)[0]]
    assert sizes == [1, 5, 9, 13, 17]


def test_prioritised_sampling_draws_in_proportion_to_failures():
    stream = Stream(problems(4), 0, prioritized=True)
    solved = {0: (8, 8), 1: (8, 4), 2: (8, 6)}  # index 3 was never seen
    counts = np.bincount([stream.take(d, 1, solved)[2][0] for d in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, np.array([0.001, 0.5, 0.25, 1]) / 1.75, atol=0.03)
    indices = stream.take(7, 3, solved)[2]
    assert len(set(indices)) == 3  # without replacement
    np.testing.assert_array_equal(indices, stream.take(7, 3, solved)[2])
    assert stream.take(7, 3, solved)[1].tolist() == [7, 8, 9]


def test_solved_prompts_are_retired_and_their_draws_passed_over():
    plain, stream = Stream(problems(10), 3), Stream(problems(10), 3, retire_above=0.875)
    order = plain.take(0, 20)[2].tolist()
    solved = {order[1]: (8, 7), order[4]: (8, 8), order[2]: (16, 13)}  # 0.875, 1, 0.8125
    prompts, draws, indices = stream.take(0, 8, solved)
    left = [d for d in range(20) if order[d] not in (order[1], order[4])][:8]
    assert draws.tolist() == left
    assert indices.tolist() == [order[d] for d in left]
    assert [p.text for p in prompts] == [problems(10)[p].text for p in indices]
    again = stream.take(int(draws[-1]) + 1, 2, solved)[1]
    assert again[0] > draws[-1]


def test_prompts_of_one_batch_do_not_repeat_over_its_rounds():
    stream, taken = Stream(problems(12), 0, prioritized=True), []
    for draw in (0, 4, 8):
        taken.extend(stream.take(draw, 4, {}, taken)[2])
    assert sorted(taken) == list(range(12))
    with pytest.raises(RuntimeError, match="0 of 12 training prompts are left"):
        stream.take(12, 1, {}, taken)


def test_what_is_always_solved_comes_again_now_and_then():
    solved = dict.fromkeys(range(4), (8, 8))
    assert sorted(Stream(problems(4), 0, prioritized=True).take(0, 4, solved)[2]) == [0, 1, 2, 3]


def test_an_error_when_too_few_prompts_are_left():
    stream, solved = Stream(problems(10), 0, retire_above=0.5), dict.fromkeys(range(8), (4, 4))
    assert sorted(stream.take(0, 2, solved)[2]) == [8, 9]
    with pytest.raises(RuntimeError, match="2 of 10 training prompts are left to draw from; expected rollout.prompts"):
        stream.take(0, 3, solved)


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
