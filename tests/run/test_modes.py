"""When answers are drawn: in turn, one batch ahead, all the time; answers that go on in the next step."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import CONFIG, PLAIN, slow

from jaxrl_llm.objective import filters
from jaxrl_llm.run import metrics, trainer
from jaxrl_llm.run.modes import MODES, Position
from jaxrl_llm.sampler import groups, scoring
from jaxrl_llm.types import CANCELLED, Reward


def run(schedule, steps=4, at=None, **rollout):
    """The learner, and (batch, position after it, row) of each step; the verifier tosses a coin."""
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, mode=schedule, max_rounds=40, **rollout), steps=9)
    learner = trainer.build(replace(config, algorithm=replace(PLAIN, group_filter=filters.mixed)))
    coin = lambda p, text, f: Reward(float(len(text) % 2), len(text) % 2 == 0)
    learner = replace(learner, task=replace(learner.task, reward=coin))
    at, seen = at or Position(), []
    with jax.set_mesh(learner.mesh):
        state = trainer.fresh_state(learner)
        engine, feed = trainer.make_engine(learner, state.params, at.step), MODES[schedule](learner)
        try:
            for _ in range(steps):
                state, engine, at, batch, row = trainer.one_step(learner, state, engine, at, feed)
                seen.append((batch, at, row))
        finally:
            feed.close()
    return learner, seen


def versions(batch):
    drawn = np.arange(batch.rollouts.tokens.shape[1]) < batch.rollouts.lengths[:, None]
    return batch.rollouts.versions[drawn]


def draws(seen):
    return np.concatenate([batch.all_rollouts.draws for batch, _, _ in seen]).tolist()


def test_in_turn_every_answer_is_of_the_newest_weights():
    _, seen = run("sync")
    for k, (batch, at, row) in enumerate(seen):
        assert set(versions(batch)) == {k}
        assert row["staleness/max"] == 0
        assert at.draw == batch.all_rollouts.draws[-1] + 1
        assert at.pending == ()
    assert draws(seen) == list(range(seen[-1][1].draw))


def test_one_batch_ahead():
    """The first two batches are of the first weights, and each is what it would have been with those weights alone."""
    learner, seen = run("ahead")
    assert [set(versions(batch)) for batch, _, _ in seen] == [{0}, {0}, {1}, {2}]
    assert [row["staleness/max"] for *_, row in seen] == [0, 1, 1, 1]
    assert draws(seen) == list(range(seen[-1][1].draw))
    assert [at.step for _, at, _ in seen] == [1, 2, 3, 4]
    with jax.set_mesh(learner.mesh):
        first = trainer.make_engine(learner, trainer.fresh_state(learner).params)
        feed = MODES["sync"](learner)
        again, at = feed.next(first, Position(), metrics.Stopwatch())
        second, _ = feed.next(first, at, metrics.Stopwatch())
    for (batch, *_), alone in zip(seen, (again, second), strict=False):
        np.testing.assert_array_equal(batch.rollouts.tokens, alone.rollouts.tokens)


@pytest.mark.parametrize("most", [slow(0), 1, slow(3)])
def test_all_the_time_within_the_bound(most):
    _, seen = run("async", steps=6, max_staleness=most)
    used = []
    for k, (batch, at, row) in enumerate(seen):
        assert len(batch.rollouts.prompts) == 4
        assert row["staleness/max"] <= most
        assert versions(batch).max() <= k
        assert row["groups/stale"] == batch.stale
        used += batch.all_rollouts.draws.tolist()
        pending = {asked.draw for asked in at.pending}
        assert not pending & set(used)
        assert pending | set(used) <= set(range(at.draw))
        assert len(pending) <= 4 * (most + 1)
    assert len(set(used)) == len(used)
    dropped = sum(row["groups/stale"] for *_, row in seen)
    last = seen[-1][1]
    assert len(used) + dropped + len(last.pending) == last.draw  # nothing is lost without being counted
    if most == 0:
        assert dropped > 0


@pytest.mark.parametrize("schedule", ["ahead", "async"])
def test_what_goes_wrong_in_the_thread_is_told(schedule, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("in the verifier")

    monkeypatch.setattr(scoring, "begin_scoring", broken)
    with pytest.raises(ZeroDivisionError, match="in the verifier"):
        run(schedule)


@pytest.mark.slow
def test_answers_go_on_in_the_next_step_with_their_recorded_log_probs():
    _, seen = run("sync", steps=5, budget=4, max_response_tokens=10)
    before = {}
    continued = 0
    for batch, at, _ in seen:
        r = batch.rollouts
        assert set(r.finish) <= {"eos", "length"}
        for p, draw in enumerate(r.draws.tolist()):
            if draw not in before:
                continue
            for g, old in enumerate(before.pop(draw)):
                i, n = p * r.group_size + g, len(old.tokens)
                continued += old.finish == CANCELLED
                assert r.tokens[i, :n].tolist() == old.tokens.tolist()
                np.testing.assert_array_equal(r.sampler_logp[i, :n], old.logp)
                assert r.versions[i, :n].tolist() == old.versions.tolist()
                assert r.lengths[i] > n or old.finish != CANCELLED
        rejected = set(batch.all_rollouts.draws.tolist()) - set(r.draws.tolist())
        before = {draw: group for draw, group in before.items() if draw not in rejected}
        before |= {asked.draw: asked.begun for asked in at.pending if asked.begun}
    assert continued > 5


def test_a_checkpoint_keeps_what_is_pending():
    learner, seen = run("sync", steps=2, budget=4)
    at = seen[-1][1]
    assert any(a.finish == CANCELLED for asked in at.pending for a in asked.begun)
    kept = json.loads(json.dumps(at.to_json()))
    again = Position.from_json(at.step, kept)
    assert (again.step, again.draw) == (at.step, at.draw)
    for a, b in zip(at.pending, again.pending, strict=True):
        assert (a.draw, a.index) == (b.draw, b.index)
        for x, y in zip(a.begun, b.begun, strict=True):
            assert x.finish == y.finish
            for name in ("tokens", "logp", "versions"):
                np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
                assert getattr(x, name).dtype == getattr(y, name).dtype


def test_zero_gap_old_log_probs_are_the_recorded_ones():
    _, loose = run("sync", steps=2)
    assert all(0 < row["gap/max"] < 1e-5 for *_, row in loose)
    _, seen = run("sync", steps=2, zero_gap=True)
    for batch, _, row in seen:
        np.testing.assert_array_equal(batch.old_logp, batch.rollouts.sampler_logp)
        assert row["gap/max"] == 0
        assert "perf/rescore_s" in row


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_filter_that_keeps_nothing_gives_up(schedule, monkeypatch):
    monkeypatch.setattr(groups, "passes_filter", lambda *_: False)
    with pytest.raises(RuntimeError, match=r"kept 0 of 160 groups in rollout.max_rounds = 40 rounds; expected 4"):
        run(schedule)


def test_closing_waits_for_no_answer():
    """The producer stops at its next call of the decoding loop, not when an answer ends."""
    learner = trainer.build(replace(CONFIG, rollout=replace(CONFIG.rollout, mode="async", max_response_tokens=8)))
    with jax.set_mesh(learner.mesh):
        engine = trainer.make_engine(learner, trainer.fresh_state(learner).params)
        feed = MODES["async"](learner)
        feed.next(engine, Position(), metrics.Stopwatch())
        feed.close()
    assert not feed._thread.is_alive()


@pytest.mark.parametrize("budget", [slow(0), 4])
def test_one_batch_ahead_resumes_bit_for_bit(budget):
    """A checkpoint after two steps, read again: the steps from there are those of the run that went on."""
    config = replace(CONFIG, steps=5)
    config = replace(config, rollout=replace(config.rollout, mode="ahead", max_rounds=40, budget=budget))
    learner = trainer.build(replace(config, algorithm=replace(PLAIN, group_filter=filters.mixed)))
    coin = lambda p, text, f: Reward(float(len(text) % 2), len(text) % 2 == 0)
    learner = replace(learner, task=replace(learner.task, reward=coin))
    with jax.set_mesh(learner.mesh):
        state, at, kept, runs = trainer.fresh_state(learner), Position(), None, []
        for resumed in (False, True):
            if resumed:
                params, host = kept
                state, at = params, Position.from_json(2, json.loads(json.dumps(host)))
            engine, feed, run = trainer.make_engine(learner, state.params, at.step), MODES["ahead"](learner), []
            while at.step < 5:
                state, engine, at, batch, row = trainer.one_step(learner, state, engine, at, feed)
                if at.step == 2:
                    kept = jax.tree.map(np.array, state), feed.settled(at).to_json()
                run.append((batch, at, {k: v for k, v in row.items() if not k.startswith("perf/")}))
            feed.close()
            runs.append(run[-3:])
    for (a, at, one), (b, again, two) in zip(*runs, strict=True):
        assert one == two
        assert one["staleness/max"] >= 1
        assert a.all_rollouts.draws.tolist() == b.all_rollouts.draws.tolist()
        for name in ("tokens", "sampler_logp", "versions"):
            np.testing.assert_array_equal(getattr(a.rollouts, name), getattr(b.rollouts, name))
        assert (at.step, at.draw, at.solved) == (again.step, again.draw, again.solved)
        assert [(p.draw, len(p.begun)) for p in at.pending] == [(p.draw, len(p.begun)) for p in again.pending]


def test_all_the_time_a_checkpoint_keeps_the_answers_that_are_finished():
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, mode="async", max_staleness=3), steps=9)
    learner = trainer.build(config)
    with jax.set_mesh(learner.mesh):
        engine, feed = trainer.make_engine(learner, trainer.fresh_state(learner).params), MODES["async"](learner)
        _, at = feed.next(engine, Position(), metrics.Stopwatch())
        with feed._lock:
            while len(feed._ready) < 4:
                feed._lock.wait()
            ready = {judged.prompt.draw: judged.rollouts for judged in feed._ready}
            begun = {p.draw: p.begun for p in feed._outstanding()}
        feed.close()
        at = feed.settled(at)
        again = MODES["async"](learner)
        batch, _ = again.next(engine, Position.from_json(1, at.to_json()), metrics.Stopwatch())
        again.close()
    for draw, rollouts in ready.items():
        assert [a.tokens.tolist() for a in begun[draw]] == [
            rollouts.tokens[i, :n].tolist() for i, n in enumerate(rollouts.lengths)
        ]
    for p, draw in enumerate(batch.rollouts.draws.tolist()):
        np.testing.assert_array_equal(batch.rollouts.sampler_logp[2 * p, :1], ready[draw].sampler_logp[0, :1])


@pytest.mark.slow
def test_tokens_per_second_are_those_of_the_sampling_not_of_the_wait():
    _, seen = run("ahead", steps=3)
    for batch, _, row in seen:
        tokens = batch.all_rollouts.lengths.sum()
        np.testing.assert_allclose(row["perf/rollout_tokens_per_s"], tokens / row["perf/sampling_s"])
    _, seen = run("async", steps=3)
    assert all("perf/sampling_s" in row for *_, row in seen)


def test_a_verifier_that_hangs_is_not_waited_for(monkeypatch):
    import threading
    import time

    from jaxrl_llm.run import modes

    monkeypatch.setattr(modes, "CLOSING_S", 0.1)
    hang, started = threading.Event(), threading.Event()
    for name in ("ahead", "async"):
        learner = trainer.build(replace(CONFIG, rollout=replace(CONFIG.rollout, mode=name)))
        hangs = lambda p, text, f: (started.set(), hang.wait(60), Reward(0.0, False))[2]
        learner = replace(learner, task=replace(learner.task, reward=hangs))
        with jax.set_mesh(learner.mesh):
            engine = trainer.make_engine(learner, trainer.fresh_state(learner).params)
            feed = MODES[name](learner)
            threading.Thread(
                target=lambda f=feed, e=engine: f.next(e, Position(), metrics.Stopwatch()), daemon=True
            ).start()
            assert started.wait(60)
            begun = time.monotonic()
            feed.close()
            assert time.monotonic() - begun < 5
        started.clear()
    hang.set()


@pytest.mark.parametrize("schedule", ["sync", slow("async")])
def test_answers_that_make_room_for_each_other_are_the_learners_too(schedule):
    """Pages hold an eighth of what all answers at their longest need: the log-probs are those of the learner."""
    few = {"cache": "pages", "kv_tokens": 256, "group_size": 8, "max_response_tokens": 48, "tokens_per_call": 4}
    _, seen = run(schedule, steps=3, **few)
    assert sum(row["perf/yields"] for *_, row in seen) > 0
    if schedule == "sync":
        assert max(row["gap/max"] for *_, row in seen) < 1e-5
