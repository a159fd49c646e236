"""When answers are drawn, and when they are learnt from: in turn, one batch ahead, or all the time.

Each mode is an object with `next(engine, at, watch)`, which gives the batch to learn from now and the host's position
after it, and `settled(at, wait)`, which gives the position that a checkpoint has to hold.

A run that is stopped or killed and resumed on the same machine is bit for bit the run that was not, with `sync` and
`ahead` (whose checkpoints hold the answers of the batch under way). Where a group filter resamples and rewards come
from the background, the clock decides when a rejected group is replaced, and so what is drawn beside what: the numbers
then agree up to rounding. With `async` the answers that were finished are kept, with the versions that drew them; those
under way are drawn again, by weights that the clock decides, as it does in any two runs.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.data.stream import SuccessCounts
from jaxrl_llm.learner.learner import Learner, shaped_rewards
from jaxrl_llm.run import metrics
from jaxrl_llm.sampler import groups, scoring, turns
from jaxrl_llm.sampler.groups import PendingPrompt, ScoredBatch, ScoredGroup
from jaxrl_llm.sampler.requests import Answer, Group, NextRequest, Request
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.types import CANCELLED, Prompt


@dataclass(frozen=True)
class Position:
    """Where the host is. Prompts, samples and their keys follow from it and the seed alone."""

    step: int = 0  # batches of rollouts behind us
    draw: int = 0  # prompts handed out
    solved: SuccessCounts = field(default_factory=dict)  # kept only if the order of prompts depends on it
    pending: tuple[PendingPrompt, ...] = ()  # prompts handed out whose answers have not been learnt from

    def to_json(self) -> dict[str, Any]:
        """The position without its step, as a checkpoint keeps it: arrays as base64 of their bytes."""
        packed = lambda x: base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
        routes = lambda x: None if x is None else [packed(x), x.dtype.name, *x.shape]
        kept = lambda a: (a.tokens, a.logp, a.versions)
        answer = lambda a: [*map(packed, kept(a)), a.finish, routes(a.experts), routes(a.said)]
        pending = [[p.draw, p.index, [answer(a) for a in p.begun]] for p in self.pending]
        solved = {str(index): list(counts) for index, counts in self.solved.items()}
        return {"draw": self.draw, "solved": solved, "pending": pending}

    @classmethod
    def from_json(cls, step: int, data: dict[str, Any]) -> Position:
        """The inverse of `to_json`."""
        array = lambda x, dtype: np.frombuffer(base64.b64decode(x), dtype)
        ints, floats = (lambda x, dtype=d: array(x, dtype) for d in (np.int32, np.float32))
        routes = lambda x: x and array(*x[:2]).reshape(x[2:])
        answer = lambda a: Answer(ints(a[0]), floats(a[1]), ints(a[2]), a[3], *map(routes, a[4:]))
        pending = [PendingPrompt(draw, index, tuple(map(answer, begun))) for draw, index, begun in data["pending"]]
        solved = {int(index): tuple(counts) for index, counts in data["solved"].items()}
        return cls(step, data["draw"], solved, tuple(pending))


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
        self._prompts: dict[int, Prompt] = {}  # by the draws of those that are asked

    def ask(self) -> PendingPrompt:
        draw, index = self.learner.stream.next(self.draw, self.at.step, self.at.solved, self.in_batch)
        if index in self.in_batch:  # the batch has every prompt there is: each comes again before any comes thrice
            self.in_batch.clear()
        self.draw = draw + 1
        self.in_batch.add(index)
        return PendingPrompt(draw, index)

    def request(self, engine: Any, asked: PendingPrompt) -> Request:
        r, prompt = self.learner.config.rollout, self.learner.task.train[asked.index]
        self._prompts[asked.draw] = prompt
        ids = groups.encode_prompts(self.learner.tokenizer, (prompt,), r.max_prompt_tokens)[0]
        request = groups.make_request(engine, ids, r.group_size, seed=self.learner.config.seed, draw=asked.draw)
        return replace(request, begun=asked.begun, budget=r.budget)

    def sample(
        self, engine: Any, next_request: NextRequest, latest: Callable | None
    ) -> Iterator[tuple[Request, Group]]:
        """Groups of answers, in the task's environment if it is one. latest: see `LocalEngine.sample`."""
        prompt_of = lambda request: self._prompts[request.draw]
        return turns.sample(engine, self.learner.task.step, prompt_of, next_request, latest)

    def judge(self, asked: PendingPrompt, request: Request, group: Group) -> Future[ScoredGroup]:
        """The future group with its rewards: a verifier that can `submit` works while others are drawn."""
        answers = groups.to_rollouts(self.learner.tokenizer, (self._prompts.pop(asked.draw),), (request,), (group,))
        answers, step = replace(answers, indices=np.array([asked.index])), self.at.step

        def judged() -> ScoredGroup:
            rewards, shaped = shaped_rewards(self.learner.config, answers, verdicts.result(), step)
            kept = groups.passes_filter(self.learner.config.algorithm.group_filter, rewards, shaped)
            # Asked for again, by a run that resumes, a sampler returns a finished group as it is.
            return ScoredGroup(replace(asked, begun=group), answers, tuple(rewards), shaped, kept)

        with self.watch("reward"):
            verdicts = scoring.begin_scoring(self.learner.task, answers)
            return scoring.gathered([verdicts], judged)


def sample_batch(
    learner: Learner, engine: Any, at: Position, watch: metrics.Stopwatch, latest: Callable | None = None
) -> tuple[ScoredBatch, Position]:
    """Groups of scored answers for one batch, from the prompts that come next. latest: see `LocalEngine.sample`."""
    r, resample = learner.config.rollout, learner.config.algorithm.prompts.resample
    dispatcher = PromptDispatcher(learner, at, watch)
    limits = {"prompts": r.prompts, "most": r.prompts * (r.max_rounds if resample else 1), "resample": resample}
    sample = lambda next_request: dispatcher.sample(engine, next_request, latest)
    request = lambda prompt: dispatcher.request(engine, prompt)

    def waiting(judging: Iterable[Future]) -> Iterable[Future]:
        with watch("reward"):
            return groups.first_done(judging)

    limits |= {"pending": at.pending, "waiting": waiting}
    with watch("rollout"):
        scored = groups.fill_batch(sample, dispatcher.ask, request, dispatcher.judge, **limits)
    watch.add("reward", 0.0)
    watch.add("rollout", -watch.seconds()["reward"])  # what the verifiers were waited for is no rollout
    return scored, moved_on(learner.config, at, scored, dispatcher.draw)


class Sync:
    """Draw a batch, learn from it, push the weights: every answer is of the policy that learns from it."""

    def __init__(self, learner: Learner):
        self.learner = learner

    def next(self, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
        return sample_batch(self.learner, engine, at, watch)

    def settled(self, at: Position, wait: bool = True) -> Position:
        return at

    def close(self) -> None:
        pass


CLOSING_S = 5.0  # how long a verifier that hangs in a thread is waited for


class Ahead:
    """Draw the next batch while learning from this one: answers are one update old."""

    def __init__(self, learner: Learner):
        self.learner = learner
        self._coming: Future | None = None  # of (batch, position after it, seconds that drawing it took)
        self._thread: threading.Thread | None = None
        self._closed = False

    def next(self, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
        with watch("rollout"):
            scored, after, seconds = (self._coming or self._begin(engine, at)).result()
        watch.add("sampling", seconds)
        self._coming = self._begin(engine, after) if after.step < self.learner.config.total_steps else None
        return scored, after

    def settled(self, at: Position, wait: bool = True) -> Position:
        """`at` with the batch under way, which is waited for, as pending prompts that have their answers.

        When it has failed, or is not there and shall not be waited for, its prompts will be answered anew.
        """
        if self._coming is None or not (wait or self._coming.done()):
            return at
        try:
            scored, after, _ = self._coming.result()
        except Exception:  # `next` raises it
            return at
        # A batch is full as soon as enough groups are kept: the others have to come before the last of them.
        order = sorted(zip(scored.all_kept, scored.all_prompts, strict=True), key=lambda pair: pair[0])
        return replace(at, draw=after.draw, pending=(*(prompt for _, prompt in order), *scored.unfinished))

    def _begin(self, engine: Any, at: Position) -> Future:
        coming: Future = Future()

        def latest() -> SamplerWeights:
            if self._closed:
                raise CancelledError
            return engine.weights

        def run() -> None:
            watch = metrics.Stopwatch()
            try:
                with jax.set_mesh(self.learner.mesh):  # a thread has a mesh of its own
                    scored, after = sample_batch(self.learner, engine, at, watch, latest)
                coming.set_result((scored, after, watch.seconds()["rollout"]))
            except BaseException as error:  # raised where the batch is asked for
                coming.set_exception(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return coming

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join(CLOSING_S)


class Async:
    """Draw all the time, with the newest weights at every call; answers that are too old are dropped.

    At most `max_staleness` + 1 batches are under way or wait. A group's staleness is the number of updates between the
    weights that drew its first token and those that are about to learn from it.
    """

    def __init__(self, learner: Learner):
        self.learner = learner
        self._lock = threading.Condition()
        self._ready: deque[ScoredGroup] = deque()  # of all groups, those that no filter kept included
        self._under_way: dict[int, PendingPrompt] = {}
        self._waiting: deque[PendingPrompt] = deque()  # handed out before, and to be answered or continued
        self._sampled_s = 0.0  # how long the sampler has worked since the last batch
        self._engine: Any = None
        self._dispatcher: PromptDispatcher | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def next(self, engine: Any, at: Position, watch: metrics.Stopwatch) -> tuple[ScoredBatch, Position]:
        r, a = self.learner.config.rollout, self.learner.config.algorithm
        with self._lock, watch("rollout"):
            self._engine = engine
            if self._dispatcher is None:
                self._dispatcher = PromptDispatcher(self.learner, at, metrics.Stopwatch())
                self._waiting.extend(at.pending)
                self._thread.start()
            self._dispatcher.at = at
            chosen, everything, stale = [], [], 0
            while len(chosen) < r.prompts:
                self._lock.wait_for(lambda: self._ready or self._error)
                if self._error is not None:
                    self._ready.extendleft(reversed(everything))  # for the checkpoint
                    raise self._error
                judged = self._ready.popleft()
                self._lock.notify_all()
                if engine.version - int(judged.rollouts.versions[:, 0].min()) > r.max_staleness:
                    stale += 1
                    continue
                everything.append(judged)
                if judged.kept or not a.prompts.resample:
                    chosen.append(judged)
                elif len(everything) >= r.prompts * r.max_rounds:
                    raise groups.too_few_groups(everything, r.prompts, r.max_rounds)
            outstanding = self._outstanding()
            draw, self._dispatcher.in_batch = self._dispatcher.draw, {o.index for o in outstanding}
            watch.add("sampling", self._sampled_s)
            self._sampled_s = 0.0
        scored = replace(groups.scored_batch(chosen, everything, outstanding), stale=stale)
        return scored, moved_on(self.learner.config, at, scored, draw)

    def _outstanding(self) -> list[PendingPrompt]:
        """Prompts handed out and not learnt from, with their answers as far as these are finished. Under the lock."""
        return [*(scored.prompt for scored in self._ready), *self._under_way.values(), *self._waiting]

    def settled(self, at: Position, wait: bool = True) -> Position:
        with self._lock:
            if self._dispatcher is None:
                return at
            return replace(at, draw=self._dispatcher.draw, pending=tuple(self._outstanding()))

    def _full(self) -> bool:
        r = self.learner.config.rollout
        return len(self._ready) + len(self._under_way) >= r.prompts * (r.max_staleness + 1)

    def _next_request(self) -> Request | None:
        with self._lock:
            if self._closed or self._full():
                return None
            prompt = self._waiting.popleft() if self._waiting else self._dispatcher.ask()
            self._under_way[prompt.draw] = prompt
            return self._dispatcher.request(self._engine, prompt)

    def _latest(self) -> SamplerWeights:
        if self._closed:  # a sampler in this process asks before every call: nothing under way is waited for
            raise CancelledError
        return self._engine.weights

    def _run(self) -> None:
        try:
            with jax.set_mesh(self.learner.mesh):
                while not self._closed:
                    started = time.perf_counter()
                    for request, group in self._dispatcher.sample(self._engine, self._next_request, self._latest):
                        self._take(request, group, time.perf_counter() - started)
                        if self._closed:
                            return
                        started = time.perf_counter()
                    with self._lock:
                        self._lock.wait_for(lambda: self._closed or not self._full())
        except BaseException as error:  # told to whoever waits for a batch
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _take(self, request: Request, group: Group, seconds: float) -> None:
        with self._lock:
            self._sampled_s += seconds
            prompt = replace(self._under_way[request.draw], begun=group)
            if any(a.finish == CANCELLED for a in group):
                self._waiting.append(prompt)
                del self._under_way[request.draw]
            else:  # its place is not free before it is judged
                self._under_way[request.draw] = prompt
            self._lock.notify_all()
        if request.draw in self._under_way:
            verdict = self._dispatcher.judge(prompt, request, group)
            verdict.add_done_callback(partial(self._judged, request.draw))

    def _judged(self, draw: int, verdict: Future[ScoredGroup]) -> None:
        with self._lock:
            if verdict.exception() is None:
                del self._under_way[draw]
                self._ready.append(verdict.result())
            else:
                self._error = self._error or verdict.exception()
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSING_S)


MODES: dict[str, Callable[[Learner], Any]] = {"sync": Sync, "ahead": Ahead, "async": Async}
