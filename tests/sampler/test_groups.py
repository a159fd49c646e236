"""The stream of problems, dynamic sampling with a fake sampler, and verifiers that misbehave."""

import math
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.data import tokenizers
from jaxrl_llm.data.stream import Stream
from jaxrl_llm.objective.filters import mixed
from jaxrl_llm.sampler.groups import (
    PendingPrompt,
    ScoredGroup,
    fill_batch,
    first_done,
    passes_filter,
    sample_groups,
    to_rollouts,
)
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.scoring import score
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, Prompt, Reward, Task

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
ALL, NONE, SOME = "ALL", "NONE", "SOME"
RIGHT = {ALL: (True, True), NONE: (False, False), SOME: (True, False)}
TOKENIZER = tokenizers.characters("abcdef")


def answer(draw, g, finish=EOS, n=None):
    """Its tokens say whose it is."""
    n = 2 + (draw + g) % 3 if n is None else n
    tokens = np.full(n, 2 + (draw + g) % 6, np.int32)
    tokens[n - (finish == EOS) :] = TOKENIZER.eos_ids[0]
    return Answer(tokens, -tokens.astype(np.float32), np.full(n, draw, np.int32), finish)


def fill(
    outcomes, keep=mixed, *, most=40, resample=True, order=lambda ready: 0, value=float, cuts=(), pending=(), start=40,
    verdicts=None,
):  # fmt: skip
    """`fill_batch` where draw 40 + i has outcomes[i]. order: which of the requests under way is answered next.

    cuts: draws that their budget cuts, as often as they are listed. verdicts: which of the groups that are being judged
    gets its verdict next, after some answers and when all wait; None: at once. Returns the batch and a log of what
    happened.
    """
    log, left, cuts, judging = [], iter(range(start, 40 + len(outcomes))), list(cuts), []

    def waiting(futures):
        log.append(("wait", None))
        judged()
        return first_done(futures)

    def judged():
        if judging:
            verdict, scored = judging.pop(verdicts(judging))
            log.append(("verdict", scored.prompt.draw))
            verdict.set_result(scored)

    def ask():
        return PendingPrompt(next(left), 100)

    def request(asked):
        log.append(("ask", asked.draw))
        return Request((2, 3, asked.draw % 6), GROUP, draw=asked.draw, begun=asked.begun)

    def sample(next_request):
        under_way = []
        while True:
            while (r := next_request()) is not None:
                under_way.append(r)
            if not under_way:
                return
            r = under_way.pop(order(under_way))
            log.append(("answer", r.draw))
            cut = r.draw in cuts
            if cut:
                cuts.remove(r.draw)
            if verdicts and len(log) % 3 == 0:
                judged()
            yield r, tuple(answer(r.draw, g, CANCELLED if cut and g == 0 else EOS) for g in range(GROUP))

    def judge(asked, r, group):
        rewards = tuple(Reward(value(right), right) for right in RIGHT[outcomes[asked.draw - 40]])
        made = to_rollouts(TOKENIZER, (Prompt(asked.draw, ""),), (r,), (group,))
        shaped = np.array([x.value for x in rewards], np.float32)
        verdict, scored = Future(), ScoredGroup(asked, made, rewards, shaped, passes_filter(keep, rewards, shaped))
        if verdicts is None:
            verdict.set_result(scored)
        else:
            judging.append((verdict, scored))
        return verdict

    limits = {"prompts": PROMPTS, "most": most, "resample": resample}
    return fill_batch(sample, ask, request, judge, **limits, pending=pending, waiting=waiting), log


def check_groups(scored, draws):
    """Every array of the groups is of these draws."""
    r = scored.rollouts
    assert [p.id for p in r.prompts] == draws
    assert r.draws.tolist() == draws
    assert r.group_size == GROUP
    for i in range(len(draws) * GROUP):
        one = answer(draws[i // GROUP], i % GROUP)
        n = len(one.tokens)
        assert r.lengths[i] == n
        for name, of in (("tokens", one.tokens), ("sampler_logp", one.logp), ("versions", one.versions)):
            assert getattr(r, name)[i].tolist() == of.tolist() + [0] * (r.tokens.shape[1] - n)
        assert r.texts[i] == TOKENIZER.decode(one.tokens[:-1])
    assert r.prompt_tokens.tolist() == [[2, 3, d % 6] for d in draws]
    assert scored.shaped.shape == (len(draws) * GROUP,)


ORDERS = {"first": lambda ready: 0, "last": lambda ready: -1, "middle": lambda ready: len(ready) // 2}


@pytest.mark.parametrize("order", ORDERS)
def test_the_batch_is_that_of_the_first_draws_in_whatever_order_they_are_answered(order):
    outcomes = [SOME, ALL, NONE, SOME, ALL, NONE, SOME, NONE, SOME, SOME, SOME]
    scored, log = fill(outcomes, order=ORDERS[order])
    check_groups(scored, [40, 43, 46, 48])
    assert scored.kept.all()
    assert scored.all_rollouts.draws.tolist() == list(range(40, 49))
    assert scored.all_kept.tolist() == [o == SOME for o in outcomes[:9]]
    assert [r.correct for r in scored.all_rewards] == [x for o in outcomes[:9] for x in RIGHT[o]]
    assert scored.unfinished == ()
    assert [d for what, d in log if what == "ask"] == list(range(40, 49))


@pytest.mark.parametrize("verdicts", ORDERS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_batch_is_the_same_in_whatever_order_verdicts_come(order, verdicts):
    outcomes = [SOME, ALL, NONE, SOME, ALL, NONE, SOME, NONE, SOME, SOME, SOME]
    scored, log = fill(outcomes, order=ORDERS[order], verdicts=ORDERS[verdicts])
    check_groups(scored, [40, 43, 46, 48])
    assert scored.all_rollouts.draws.tolist() == list(range(40, 49))
    assert [d for what, d in log if what == "ask"] == list(range(40, 49))
    under_way = 0
    for what, _ in log:  # a verdict is waited for only when there is nothing to draw
        under_way += {"ask": 1, "answer": -1}.get(what, 0)
        assert what != "wait" or under_way == 0


def test_a_rejected_group_is_replaced_at_once_and_the_batch_stays_full():
    _, log = fill([SOME, ALL, SOME, SOME, SOME])
    assert log[:4] == [("ask", d) for d in range(40, 44)]
    assert log[4:7] == [("answer", 40), ("answer", 41), ("ask", 44)]
    under_way, kept = 0, 0
    for what, draw in log:
        under_way += 1 if what == "ask" else -1
        kept += what == "answer" and draw != 41
        assert under_way + kept <= PROMPTS


def test_without_a_filter_one_round_is_all():
    scored, log = fill([ALL, NONE, NONE, SOME, SOME], None)
    check_groups(scored, [40, 41, 42, 43])
    assert len(log) == 8
    scored, _ = fill([ALL, NONE, SOME, SOME, SOME], resample=False)
    check_groups(scored, [40, 41, 42, 43])
    assert scored.kept.tolist() == [False, False, True, True]


def test_the_filter_looks_at_correct_not_at_value():
    # as if a length penalty had made the values of every group differ, and of the mixed ones agree
    values = iter(np.linspace(0, 1, PROMPTS * GROUP))
    with pytest.raises(RuntimeError, match="kept 0 of 4 groups"):
        fill([ALL, NONE, ALL, NONE], most=4, value=lambda _: next(values))
    scored, _ = fill([SOME] * 4, most=4, value=lambda _: 0.5)
    assert {r.value for r in scored.rewards} == {0.5}


def test_too_many_prompts_in_vain_is_an_error_with_the_pass_rates():
    with pytest.raises(RuntimeError) as error:
        fill([SOME, ALL, NONE, NONE, ALL, NONE, NONE, SOME, SOME, SOME], most=8)
    for part in (
        "kept 2 of 8 groups",
        "max_rounds = 2",
        "expected 4",
        "50% of the groups all wrong",
        "25% all correct",
    ):
        assert part in str(error.value)
    assert "mean 0.38" in str(error.value)


def test_what_a_budget_cuts_is_put_aside_for_the_next_batch():
    scored, log = fill([SOME] * 6, cuts=[41])
    check_groups(scored, [40, 42, 43, 44])
    (cut,) = scored.unfinished
    assert (cut.draw, [a.finish for a in cut.begun]) == (41, [CANCELLED, EOS])
    again, log = fill([SOME] * 9, pending=scored.unfinished, start=45)
    assert [d for what, d in log if what == "ask"] == [41, 45, 46, 47]
    assert again.rollouts.draws.tolist() == [41, 45, 46, 47]


def test_when_a_whole_batch_is_cut_the_oldest_goes_on():
    scored, log = fill([SOME] * 9, cuts=[40, 41, 42, 43, 44, 45])
    assert [d for what, d in log if what == "ask"][:8] == [40, 41, 42, 43, 44, 45, 46, 40]
    assert len(scored.rollouts.prompts) == PROMPTS


# --- scores -------------------------------------------------------------------------------------------------------


def verify(prompt, text, finish):
    return Reward(float(len(text)), finish == EOS, parsed=f"{prompt.id}: {text}")


def some():
    made = fill([SOME] * 4, None)[0].rollouts
    return replace(made, prompts=tuple(Prompt(i, "") for i in range(PROMPTS)))


def test_score_hands_over_prompt_text_and_finish():
    made = replace(some(), finish=np.where(np.arange(8) % 3 == 0, EOS, LENGTH), texts=tuple("01234567"))
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
        (Reward(None, True), "finite"),
        (None, "expected a Reward"),
        (1.0, "expected a Reward"),
        (KeyError("target"), "KeyError: 'target'"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    ],
    ids=str,
)
def test_a_bad_reward_names_the_prompt(what, message):
    made = some()
    with pytest.raises(ValueError, match="prompt 2 ") as error:
        score(Task((), (), partial(bad, what)), made)
    assert message in str(error.value)


# --- sample_groups ------------------------------------------------------------------------------------------------


class FakeEngine:
    tokenizer, max_tokens, sampling, stop = TOKENIZER, 5, Sampling(0.5), ("x",)

    def sample(self, next_request, latest=None):
        while (r := next_request()) is not None:
            assert (r.max_tokens, r.sampling, r.stop, r.seed) == (5, Sampling(0.5), ("x",), 9)
            yield r, tuple(answer(r.draw, g) for g in range(r.group))


def test_prompts_are_padded_on_the_right():
    prompts = (Prompt(7, "abc"), Prompt(9, "f"))
    made = sample_groups(FakeEngine(), prompts, 3, seed=9, draws=np.array([4, 5]), max_prompt_tokens=3)
    assert made.prompt_tokens.tolist() == [[2, 3, 4], [7, 0, 0]]
    assert made.prompt_lengths.tolist() == [3, 1]
    assert made.group_size == 3
    assert made.prompts == prompts
    assert made.draws.tolist() == [4, 5]
    assert made.lengths.tolist() == [len(answer(d, g).tokens) for d in (4, 5) for g in range(3)]


@pytest.mark.parametrize(("text", "tokens"), [("abcd", 4), ("", 0)])
def test_prompts_of_a_wrong_length_are_named(text, tokens):
    with pytest.raises(ValueError, match=rf"prompt 9 has {tokens} tokens; expected 1 to rollout.max_prompt_tokens = 3"):
        sample_groups(
            FakeEngine(), (Prompt(7, "abc"), Prompt(9, text)), 3, seed=9, draws=np.arange(2), max_prompt_tokens=3
        )
