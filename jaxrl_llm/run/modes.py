"""When answers are drawn, and when they are learnt from: in turn, one batch ahead, or all the time.

Each is an object with `next(engine, at)`: the batch to learn from now, and the host's position after it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.data.stream import SuccessCounts
from jaxrl_llm.learner.learner import Learner, shaped_rewards
from jaxrl_llm.run import metrics
from jaxrl_llm.sampler import groups
from jaxrl_llm.sampler.groups import PendingPrompt, ScoredBatch, ScoredGroup
from jaxrl_llm.sampler.requests import Group, Request
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.types import CANCELLED


@dataclass(frozen=True)
class Position:
    """Where the host is. Prompts, samples and their keys follow from it and the seed alone."""

    step: int = 0  # batches of rollouts behind us
    draw: int = 0  # prompts handed out
    solved: SuccessCounts = field(default_factory=dict)  # kept only if the order of prompts depends on it
    pending: tuple[PendingPrompt, ...] = ()  # prompts handed out whose answers have not been learnt from


def moved_on(config: Config, at: Position, batch: ScoredBatch, draw: int) -> Position:
    """The position after a batch; how its prompts were answered is counted if the order of prompts depends on it."""
    a, success_counts = config.algorithm, dict(at.solved)
    if a.prompts.prioritized or a.prompts.retire_above is not None:
        correct = np.array([r.correct for r in batch.all_rewards]).reshape(-1, batch.rollouts.group_size)
        for index, group in zip(batch.all_rollouts.indices.tolist(), correct, strict=True):
            answers, right = success_counts.get(index, (0, 0))
            success_counts[index] = answers + len(group), right + int(group.sum())
    return Position(at.step + 1, draw, success_counts, batch.unfinished)


@dataclass
class PromptDispatcher:
    """Hands out prompts from a position on, and judges the groups that come back."""

    learner: Learner
    at: Position
    watch: metrics.Stopwatch

    def __post_init__(self) -> None:
        self.draw = self.at.draw
        self.in_batch = {asked.index for asked in self.at.pending}

    def ask(self) -> PendingPrompt:
        draw, index = self.learner.stream.next(self.draw, self.at.step, self.at.solved, self.in_batch)
        if index in self.in_batch:  # the batch has every prompt there is: each comes again before any comes thrice
            self.in_batch.clear()
        self.draw = draw + 1
        self.in_batch.add(index)
        return PendingPrompt(draw, index)

    def request(self, engine: Any, asked: PendingPrompt) -> Request:
        r = self.learner.config.rollout
        prompt = self.learner.task.train[asked.index]
        ids = groups.encode_prompts(self.learner.tokenizer, (prompt,), r.max_prompt_tokens)[0]
        request = groups.make_request(engine, ids, r.group_size, seed=self.learner.config.seed, draw=asked.draw)
        return replace(request, begun=asked.begun, budget=r.budget)

    def judge(self, asked: PendingPrompt, request: Request, group: Group) -> ScoredGroup:
        config = self.learner.config
        prompt = self.learner.task.train[asked.index]
        answers = groups.to_rollouts(self.learner.tokenizer, (prompt,), (request,), (group,))
        answers = replace(answers, indices=np.array([asked.index]))
        with self.watch("reward"):
            rewards = groups.score(self.learner.task, answers)
            shaped = shaped_rewards(config, answers, rewards, self.at.step)
        kept = groups.passes_filter(config.algorithm.group_filter, rewards, shaped)
        return ScoredGroup(asked, answers, tuple(rewards), shaped, kept)


def sample_batch(learner: Learner, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
    """Groups of scored answers for one batch, from the prompts that come next."""
    r, asker = learner.config.rollout, PromptDispatcher(learner, at, watch)
    before = watch.seconds().get("reward", 0.0)
    with watch("rollout"):
        seen = groups.fill_batch(
            engine.sample,
            asker.ask,
            lambda asked: asker.request(engine, asked),
            asker.judge,
            prompts=r.prompts,
            most=r.prompts * (r.max_rounds if learner.config.algorithm.prompts.resample else 1),
            pending=at.pending,
            resample=learner.config.algorithm.prompts.resample,
        )
    watch.add("rollout", before - watch.seconds().get("reward", 0.0))  # what the verifier took is no rollout
    return seen, moved_on(learner.config, at, seen, asker.draw)


class Sync:
    """Draw a batch, learn from it, push the weights: every answer is of the policy that learns from it."""

    def __init__(self, learner: Learner):
        self.learner = learner

    def next(self, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
        return sample_batch(self.learner, engine, at, watch)

    def close(self) -> None:
        pass


class Ahead:
    """Draw the next batch while learning from this one: answers are one update old."""

    def __init__(self, learner: Learner):
        self.learner = learner
        self._pool = ThreadPoolExecutor(1)
        self._coming: Future | None = None

    def next(self, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
        with watch("rollout"):
            coming = self._coming or self._begin(engine, at)
            seen, after = coming.result()
        self._coming = self._begin(engine, after) if after.step < self.learner.config.total_steps else None
        return seen, after

    def _begin(self, engine: Any, at: Position) -> Future:
        def run() -> tuple[ScoredBatch, Position]:
            with jax.set_mesh(self.learner.mesh):  # a thread has a mesh of its own
                return sample_batch(self.learner, engine, at, metrics.Stopwatch())

        return self._pool.submit(run)

    def close(self) -> None:
        self._pool.shutdown()


class _Closed(Exception):
    """Nobody wants answers any more."""


class Async:
    """Draw all the time, with the newest weights at every call; answers that are too old are dropped.

    At most `max_staleness` + 1 batches are under way or wait. A group's staleness is the number of updates between the
    weights that drew its first token and those that are about to learn from it.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        r = learner.config.rollout
        self._room = r.prompts * (r.max_staleness + 1)
        self._lock = threading.Condition()
        self._ready: deque[ScoredGroup] = deque()  # of all groups, those that no filter kept included
        self._under_way: dict[int, PendingPrompt] = {}
        self._cut: deque[PendingPrompt] = deque()
        self._engine: Any = None
        self._asker: PromptDispatcher | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def next(self, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
        r, a = self.learner.config.rollout, self.learner.config.algorithm
        with self._lock, watch("rollout"):
            self._engine = engine
            if self._asker is None:
                self._asker = PromptDispatcher(self.learner, at, metrics.Stopwatch())
                self._cut.extend(at.pending)
                self._thread.start()
            self._asker.at = at
            chosen, seen, stale = [], [], 0
            while len(chosen) < r.prompts:
                while not self._ready and self._error is None:
                    self._lock.wait()
                if self._error is not None:
                    raise self._error
                judged = self._ready.popleft()
                self._lock.notify_all()
                if engine.version - int(judged.rollouts.versions[:, 0].min()) > r.max_staleness:
                    stale += 1
                    continue
                seen.append(judged)
                if judged.kept or not a.prompts.resample:
                    chosen.append(judged)
                elif len(seen) >= r.prompts * r.max_rounds:
                    raise groups.too_few_groups(seen, r.prompts, r.max_rounds)
            outstanding = [j.prompt for j in self._ready] + list(self._under_way.values()) + list(self._cut)
            draw, self._asker.in_batch = self._asker.draw, {o.index for o in outstanding}
        scored = replace(groups.scored_batch(chosen, seen, outstanding), stale=stale)
        return scored, moved_on(self.learner.config, at, scored, draw)

    def _next_request(self) -> Request | None:
        with self._lock:
            if self._closed or len(self._ready) + len(self._under_way) >= self._room:
                return None
            asked = self._cut.popleft() if self._cut else self._asker.ask()
            self._under_way[asked.draw] = asked
            return self._asker.request(self._engine, asked)

    def _latest(self) -> SamplerWeights:
        if self._closed:  # a sampler in this process asks before every call: nothing under way is waited for
            raise _Closed
        return self._engine.weights

    def _run(self) -> None:
        try:
            with jax.set_mesh(self.learner.mesh):
                while not self._closed:
                    for request, group in self._engine.sample(self._next_request, self._latest):
                        self._take(request, group)
                        if self._closed:
                            return
                    with self._lock:
                        while not self._closed and len(self._ready) + len(self._under_way) >= self._room:
                            self._lock.wait()
        except _Closed:
            return
        except BaseException as error:  # told to whoever waits for a batch
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _take(self, request: Request, group: Group) -> None:
        asked = self._under_way[request.draw]
        cut = any(a.finish == CANCELLED for a in group)
        judged = None if cut else self._asker.judge(asked, request, group)
        with self._lock:
            del self._under_way[request.draw]
            if cut:
                self._cut.append(replace(asked, begun=group))
            else:
                self._ready.append(judged)
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()


MODES: dict[str, Callable[[Learner], Any]] = {"sync": Sync, "ahead": Ahead, "async": Async}
