"""Verifiers and environments that answer from elsewhere while batches are drawn: slow ones, and failing ones."""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import CONFIG, PLAIN

from jaxrl_llm.objective import filters
from jaxrl_llm.run import metrics, trainer
from jaxrl_llm.run.modes import MODES, Position
from jaxrl_llm.types import Reward

MODE_NAMES = ("sync", "ahead", "async")


class Background:
    """A function of an answer in the threads of a pool, after a while that depends on the answer."""

    def __init__(self, fn, seconds=0.02, fails_at=None):
        self.fn, self.seconds, self.fails_at = fn, seconds, fails_at
        self.pool, self.calls = ThreadPoolExecutor(3), []

    def __call__(self, prompt, text, finish):
        raise AssertionError("is asked by submit")

    def submit(self, prompt, text, finish) -> Future:
        self.calls.append((prompt.id, text))
        return self.pool.submit(self.run, len(self.calls), prompt, text, finish)

    def run(self, call, prompt, text, finish):
        time.sleep(self.seconds * (call * 7 % 5) / 2)
        if self.fails_at is not None and call >= self.fails_at:
            raise OSError("the judge is away")
        return self.fn(prompt, text, finish)


def coin(prompt, text, finish):
    right = (len(text) + prompt.id) % 2 == 0
    return Reward(float(right), right)


def made(mode, keep=None, step=None, reward=None, **rollout):
    """A feed, its engine, and the learner."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, mode=mode, max_rounds=40, **rollout), steps=99)
    learner = trainer.build(replace(config, algorithm=replace(PLAIN, group_filter=keep)))
    learner = replace(learner, task=replace(learner.task, reward=reward or Background(coin), step=step))
    with jax.set_mesh(learner.mesh):
        engine = trainer.make_engine(learner, trainer.fresh_state(learner).params)
    return MODES[mode](learner), engine, learner


def within(seconds, call):
    """What `call` returns or raises; an error if that takes longer."""
    out = Future()

    def run():
        try:
            out.set_result(call())
        except BaseException as error:
            out.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return out.result(seconds)


def following(feed, engine, at):
    return within(120, lambda: feed.next(engine, at, metrics.Stopwatch()))


@pytest.mark.parametrize("mode", MODE_NAMES)
@pytest.mark.parametrize("what", ["step", "reward"])
def test_what_raises_elsewhere_is_told_and_nobody_waits_for_ever(mode, what):
    failing = Background(lambda *_: {}["a page"])
    feed, engine, _ = made(mode, **{what: failing}, stop=("#", "1"))
    with pytest.raises(ValueError, match=rf"{what} of prompt \d+ raised KeyError: 'a page' at {__file__}:\d+ "):
        following(feed, engine, Position())
    within(30, feed.close)


class Cancels:
    def submit(self, *_):
        future = Future()
        future.cancel()
        return future


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_a_step_that_is_cancelled_is_an_error_too(mode):
    feed, engine, _ = made(mode, step=Cancels())
    with pytest.raises(ValueError, match=r"step of prompt \d+ raised CancelledError"):
        following(feed, engine, Position())
    within(30, feed.close)


def test_async_with_a_filter_and_a_slow_verifier_loses_nothing_and_keeps_its_bound():
    feed, engine, learner = made("async", filters.mixed, max_staleness=1)
    most, seen, feed_next = [], [], feed._next_request

    def counted():
        request = feed_next()
        with feed._lock:
            most.append(len(feed._ready) + len(feed._under_way))
        return request

    feed._next_request, at = counted, Position()
    for _ in range(4):
        scored, at = following(feed, engine, at)
        assert scored.kept.all()
        assert len(scored.rollouts.prompts) == 4
        seen += scored.all_rollouts.draws.tolist()
    within(30, feed.close)
    at = feed.settled(at)
    pending = [asked.draw for asked in at.pending]
    assert max(most) == 8
    assert len({*seen, *pending}) == len(seen) + len(pending)
    assert {*seen, *pending} == set(range(at.draw))


@pytest.mark.parametrize("judged_before", [True, False])
def test_a_resumed_async_run_draws_no_finished_group_again(judged_before):
    """Neither those that wait to be learnt from nor those whose verdict is still to come."""
    hang = threading.Event()
    slow = Background(lambda *of: (judged_before or hang.wait(60)) and coin(*of))
    feed, engine, learner = made("async", reward=slow if judged_before else Background(coin), max_staleness=3)
    _, at = following(feed, engine, Position())
    if not judged_before:
        object.__setattr__(feed.learner.task, "reward", slow)
    with feed._lock:
        assert feed._lock.wait_for(lambda: sum(bool(p.begun) for p in feed._outstanding()) >= 6, 60)
    within(30, feed.close)
    kept = feed.settled(at)
    hang.set()
    begun = {p.draw: p.begun for p in kept.pending if p.begun}
    again, engine_2, _ = made("async", max_staleness=3)
    scored, after = following(again, engine_2, Position.from_json(1, json.loads(json.dumps(kept.to_json()))))
    within(30, again.close)
    for p, draw in enumerate(scored.rollouts.draws.tolist()):
        if draw in begun:
            for g, answer in enumerate(begun[draw]):
                n = len(answer.tokens)
                assert scored.rollouts.lengths[2 * p + g] == n
                np.testing.assert_array_equal(scored.rollouts.sampler_logp[2 * p + g, :n], answer.logp)
    assert set(begun) & set(scored.rollouts.draws.tolist())
    left = {*scored.rollouts.draws.tolist(), *(p.draw for p in again.settled(after).pending)}
    assert {p.draw for p in kept.pending} <= left


def test_a_verifier_that_fails_costs_async_no_answer():
    """The groups chosen for the batch, and the one without a verdict, are in the checkpoint with their answers."""
    feed, engine, _ = made("async", reward=Background(coin, fails_at=13), max_staleness=3)
    at, learnt = Position(), []

    def all_batches():
        nonlocal at
        while True:
            scored, at = following(feed, engine, at)
            learnt.extend(scored.all_rollouts.draws.tolist())

    with pytest.raises(ValueError, match="raised OSError: the judge is away"):
        all_batches()
    within(30, feed.close)
    kept = feed.settled(at, wait=False)
    draws = [asked.draw for asked in kept.pending]
    assert sorted([*draws, *learnt]) == list(range(kept.draw))
    assert sum(bool(asked.begun) for asked in kept.pending) >= 1
    assert len(learnt) < 7


def test_ahead_settles_with_groups_that_are_being_judged():
    """The checkpoint waits for the verdicts; a batch that is not there, and shall not be waited for, is drawn anew."""
    feed, engine, _ = made("ahead", filters.mixed, reward=Background(coin, 0.1))
    _, at = following(feed, engine, Position())
    assert feed.settled(at, wait=False) == at
    kept = within(60, lambda: feed.settled(at))
    coming, after = following(feed, engine, at)
    within(30, feed.close)
    assert {p.draw for p in kept.pending} >= set(coming.all_rollouts.draws.tolist())
    assert kept.draw == after.draw
    again, engine, _ = made("ahead", filters.mixed, reward=Background(coin, 0.1))
    scored, _ = following(again, engine, Position.from_json(1, json.loads(json.dumps(kept.to_json()))))
    within(30, again.close)
    assert scored.rollouts.draws.tolist() == coming.rollouts.draws.tolist()
    np.testing.assert_array_equal(scored.rollouts.sampler_logp, coming.rollouts.sampler_logp)


@pytest.mark.parametrize("mode", ["ahead", "async"])
def test_an_environment_in_the_background(mode):
    step = Background(lambda prompt, text, finish: "#" if text.count("#") < 2 else None, 0.01)
    feed, engine, _ = made(mode, step=step, stop=tuple("abcdefghijklmnopqrstuvwxyz"))
    at, seen = Position(), []
    for _ in range(2):
        scored, at = following(feed, engine, at)
        r = scored.all_rollouts
        seen += r.draws.tolist()
        assert (r.sampler_logp[r.generated] < 0).all()
        assert r.said.any()
        assert set(r.tokens[r.said].tolist()) == set(engine.tokenizer.encode("#"))
    within(30, feed.close)
    assert len(set(seen)) == len(seen) == 8
