"""The stream of problems, dynamic sampling with a fake sampler, and verifiers that misbehave."""

import math
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest

from jaxrl_llm import rollouts as module
from jaxrl_llm.data import tokenizers
from jaxrl_llm.rollouts import Stream, mixed, sample_groups, sample_until_full, score
from jaxrl_llm.sampler.decode import Samples
from jaxrl_llm.types import EOS, LENGTH, Prompt, Reward, Rollouts, Task

# --- the stream ---------------------------------------------------------------------------------------------------


def problems(size):
    return tuple(Prompt(i, f"problem {i}") for i in range(size))


def epoch(size, seed, number):
    prompts, draws, _ = Stream(problems(size), seed).take(size * number, size)
    assert draws.tolist() == list(range(size * number, size * (number + 1)))
    return [p.id for p in prompts]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 1000, 1025])
@pytest.mark.parametrize("seed", [0, 12345])
def test_an_epoch_has_every_problem_once(size, seed):
    for number in (0, 1, 5):
        assert sorted(epoch(size, seed, number)) == list(range(size))


def test_orders_differ_by_epoch_and_seed():
    orders = [tuple(epoch(1000, seed, number)) for seed in (0, 1, 2) for number in (0, 1, 2)]
    assert len(set(orders)) == 9
    # two unrelated orders agree in one place on average
    assert max(sum(a == b for a, b in zip(x, y, strict=True)) for x in orders for y in orders if x != y) < 10
    assert not any(order == tuple(range(1000)) for order in orders)


def test_every_order_of_three_comes_up():
    seen = Counter(tuple(epoch(3, seed, number)) for seed in range(100) for number in range(4))
    assert len(seen) == 6
    assert min(seen.values()) > 20


def test_a_shuffle_mixes():
    """Neighbours come from everywhere, and so does the first tenth of an epoch."""
    order = np.array(epoch(1000, 7, 0))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.15
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15
    tenths = np.bincount(order[:100] // 100, minlength=10)
    assert tenths.min() >= 2
    assert tenths.max() <= 22
    first = Counter(epoch(10, seed, number)[0] for seed in range(50) for number in range(10))
    assert len(first) == 10
    assert max(first.values()) < 100


def test_position_is_all_there_is():
    stream = Stream(problems(50), 3)
    whole = [p.id for p in stream.take(0, 170)[0]]
    parts, draw = [], 0
    for n in (1, 49, 60, 3, 57):
        prompts, draws, _ = Stream(problems(50), 3).take(draw, n)
        parts += [p.id for p in prompts]
        assert draws.tolist() == list(range(draw, draw + n))
        draw += n
    assert parts == whole


def test_a_million_problems_cost_nothing():
    class Lazy:
        def __len__(self):
            return 10**6

        def __getitem__(self, i):
            assert 0 <= i < 10**6
            return Prompt(i, "")

    before = time.perf_counter()
    prompts, *_ = Stream(Lazy(), 0).take(7 * 10**6 + 123, 1000)
    assert time.perf_counter() - before < 5
    ids = np.array([p.id for p in prompts])
    assert len(set(ids)) == 1000
    assert ids.max() > 0.99 * 10**6
    assert abs(ids.mean() / 10**6 - 0.5) < 0.05


# --- dynamic sampling ---------------------------------------------------------------------------------------------


def test_mixed_groups_have_both():
    correct = np.array([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 1]], bool)
    assert mixed(correct).tolist() == [False, False, True, True]
    assert mixed(np.array([[True], [False]])).tolist() == [False, False]


PROMPTS, GROUP = 4, 2


class Sampler:
    """Answers whose correctness is given by round; everything else says which round, prompt and answer it is of."""

    def __init__(self, correct, value=None):
        self.correct = np.array(correct, bool)  # [rounds, PROMPTS, GROUP]
        self.value = value or (lambda right: float(right))
        self.draws = []

    def __call__(self, draw):
        round_number = len(self.draws)
        self.draws.append(draw)
        width = 3 + round_number
        ids = 100 * round_number + np.arange(PROMPTS)
        rows = 1000 * round_number + np.arange(PROMPTS * GROUP)
        made = Rollouts(
            prompts=tuple(Prompt(int(i), "") for i in ids),
            prompt_tokens=np.tile(ids[:, None], (1, width)).astype(np.int32),
            prompt_lengths=np.full(PROMPTS, width, np.int32),
            tokens=np.tile(rows[:, None], (1, 2 * width)).astype(np.int32),
            sampler_logp=-np.tile(rows[:, None], (1, 2 * width)).astype(np.float32),
            lengths=np.full(PROMPTS * GROUP, 2 * width, np.int32),
            finish=np.where(rows % 3 == 0, EOS, LENGTH),
            texts=tuple(map(str, rows)),
            draws=draw + np.arange(PROMPTS),
        )
        right = self.correct[round_number].reshape(-1)
        rewards = [Reward(self.value(r), bool(r), parsed=str(i)) for i, r in zip(rows, right, strict=True)]
        return made, rewards, np.array([r.value for r in rewards], np.float32)


ALL, NONE, SOME = [True, True], [False, False], [True, False]


def check_groups(scored, expected):
    """Every array of the kept groups is of the expected (round, place)."""
    r = scored.rollouts
    assert [(p.id // 100, p.id % 100) for p in r.prompts] == expected
    assert r.group_size == GROUP
    rows = [1000 * k + p * GROUP + g for k, p in expected for g in range(GROUP)]
    assert [int(t) for t in r.texts] == rows
    assert [int(x.parsed) for x in scored.rewards] == rows
    for i, row in enumerate(rows):
        n = 2 * (3 + row // 1000)
        assert r.lengths[i] == n
        assert r.tokens[i].tolist() == [row] * n + [0] * (r.tokens.shape[1] - n)
        assert r.sampler_logp[i].tolist() == [-row] * n + [0] * (r.tokens.shape[1] - n)
        assert r.finish[i] == (EOS if row % 3 == 0 else LENGTH)
    for j, (k, p) in enumerate(expected):
        n = 3 + k
        assert r.prompt_lengths[j] == n
        assert r.prompt_tokens[j].tolist() == [100 * k + p] * n + [0] * (r.prompt_tokens.shape[1] - n)
        assert r.draws[j] == 40 + 4 * k + p


def test_rounds_go_on_until_the_batch_is_full():
    sampler = Sampler([[SOME, ALL, NONE, NONE], [ALL, ALL, NONE, ALL], [SOME, NONE, SOME, SOME]])
    scored = sample_until_full(sampler, 40, PROMPTS, mixed, 5)
    check_groups(scored, [(0, 0), (2, 0), (2, 2), (2, 3)])
    assert sampler.draws == [40, 44, 48]
    assert (scored.rounds, scored.draw) == (3, 52)
    assert len(scored.all_rollouts) == 3
    assert len(scored.all_rewards) == 3 * PROMPTS * GROUP
    assert [r.correct for r in scored.all_rewards] == sampler.correct.reshape(-1).tolist()


def test_groups_beyond_the_last_are_dropped_but_counted():
    sampler = Sampler([[SOME, SOME, NONE, SOME], [ALL, SOME, SOME, SOME]])
    scored = sample_until_full(sampler, 40, PROMPTS, mixed, 5)
    check_groups(scored, [(0, 0), (0, 1), (0, 3), (1, 1)])
    assert (scored.rounds, scored.draw) == (2, 48)  # the surplus was handed out all the same
    assert len(scored.all_rewards) == 2 * PROMPTS * GROUP


def test_one_full_round():
    scored = sample_until_full(Sampler([[SOME] * 4]), 40, PROMPTS, mixed, 1)
    check_groups(scored, [(0, 0), (0, 1), (0, 2), (0, 3)])
    assert (scored.rounds, scored.draw) == (1, 44)


def test_without_a_filter_one_round_is_all():
    scored = sample_until_full(Sampler([[ALL, NONE, NONE, SOME]]), 40, PROMPTS, None, 1)
    check_groups(scored, [(0, 0), (0, 1), (0, 2), (0, 3)])
    assert (scored.rounds, scored.draw) == (1, 44)


def test_the_filter_looks_at_correct_not_at_value():
    # as if a length penalty had made the values of every group differ, and of the mixed ones agree
    values = iter(np.linspace(0, 1, PROMPTS * GROUP))
    sampler = Sampler([[ALL, NONE, ALL, NONE]], value=lambda _: next(values))
    with pytest.raises(RuntimeError, match="kept 0 of 4 groups"):
        sample_until_full(sampler, 0, PROMPTS, mixed, 1)
    scored = sample_until_full(Sampler([[SOME] * 4], value=lambda _: 0.5), 40, PROMPTS, mixed, 1)
    assert {r.value for r in scored.rewards} == {0.5}


def test_too_many_rounds_is_an_error_with_the_pass_rates():
    sampler = Sampler([[SOME, ALL, NONE, NONE], [ALL, NONE, NONE, SOME]])
    with pytest.raises(RuntimeError) as error:
        sample_until_full(sampler, 0, PROMPTS, mixed, 2)
    assert sampler.draws == [0, 4]
    for part in (
        "kept 2 of 8 groups",
        "max_rounds = 2",
        "expected 4",
        "50% of the groups all wrong",
        "25% all correct",
    ):
        assert part in str(error.value)
    assert "mean 0.38" in str(error.value)


# --- scores -------------------------------------------------------------------------------------------------------


def verify(prompt, text, finish):
    return Reward(float(len(text)), finish == EOS, parsed=f"{prompt.id}: {text}")


def test_score_hands_over_prompt_text_and_finish():
    made, *_ = Sampler([[SOME] * 4])(40)
    rewards = score(Task((), (), verify), made)
    assert [r.parsed for r in rewards] == [f"{i // GROUP}: {i}" for i in range(PROMPTS * GROUP)]
    assert [r.correct for r in rewards] == [i % 3 == 0 for i in range(PROMPTS * GROUP)]


def bad(what, prompt, text, finish):
    if prompt.id != 2:
        return Reward(0.0, False)
    if isinstance(what, Exception):
        raise what
    return what


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (Reward(math.nan, True), "finite"),
        (Reward(math.inf, True), "finite"),
        (Reward(None, True), "TypeError"),
        (None, "expected a Reward"),
        (1.0, "expected a Reward"),
        (KeyError("target"), "KeyError: 'target'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
    ids=str,
)
def test_a_bad_reward_names_the_prompt(what, message):
    made, *_ = Sampler([[SOME] * 4])(40)
    with pytest.raises(ValueError, match="prompt 2 ") as error:
        score(Task((), (), partial(bad, what)), made)
    assert message in str(error.value)


# --- sample_groups ------------------------------------------------------------------------------------------------


class FakeEngine:
    tokenizer = tokenizers.characters("abcdef")


def fake_generate(engine, ids, group, *, seed, draws):
    n = len(ids) * group
    return Samples(np.ones((n, 2), np.int32), np.zeros((n, 2), np.float32), np.full(n, 2), np.full(n, EOS), ("x",) * n)


def test_prompts_are_padded_on_the_right(monkeypatch):
    monkeypatch.setattr(module.decode, "generate", fake_generate)
    prompts = (Prompt(7, "abc"), Prompt(9, "f"))
    made = sample_groups(FakeEngine(), prompts, 3, seed=0, draws=np.array([4, 5]), max_prompt_tokens=3)
    assert made.prompt_tokens.tolist() == [[2, 3, 4], [7, 0, 0]]
    assert made.prompt_lengths.tolist() == [3, 1]
    assert made.group_size == 3
    assert made.prompts == prompts
    assert made.draws.tolist() == [4, 5]


@pytest.mark.parametrize(("text", "tokens"), [("abcd", 4), ("", 0)])
def test_prompts_of_a_wrong_length_are_named(monkeypatch, text, tokens):
    monkeypatch.setattr(module.decode, "generate", fake_generate)
    with pytest.raises(ValueError, match=rf"prompt 9 has {tokens} tokens; expected 1 to rollout.max_prompt_tokens = 3"):
        sample_groups(
            FakeEngine(), (Prompt(7, "abc"), Prompt(9, text)), 3, seed=0, draws=np.arange(2), max_prompt_tokens=3
        )
