"""Several tasks as one: prompts by weight, each judged by its own task's verifier."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np

from jaxrl_llm.data.datasets import Subset
from jaxrl_llm.types import Prompt, Task, expect


@dataclass(frozen=True)
class Mixed(Sequence):
    """The prompts of several sides in a row; each prompt's meta["task"] is the name of its own."""

    sides: Mapping[str, Sequence[Prompt]]
    weights: Mapping[str, float]

    @cached_property
    def _firsts(self) -> list[int]:
        return [0, *accumulate(map(len, self.sides.values()))]

    @property
    def parts(self) -> tuple[tuple[float, int, int], ...]:
        """Weight, first index and size of each side, for `Stream`."""
        sizes = map(len, self.sides.values())
        return tuple(zip(map(float, self.weights.values()), self._firsts, sizes, strict=False))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        index = range(len(self))[index]
        side = bisect_right(self._firsts, index) - 1
        name = list(self.sides)[side]
        prompt = self.sides[name][index - self._firsts[side]]
        return replace(prompt, meta={**prompt.meta, "task": name})


@dataclass(frozen=True)
class Routed:
    """The reward, or the step, of a mixture: that of the prompt's own task, which may compute it in other processes."""

    of: Mapping[str, Callable]

    def __call__(self, prompt: Prompt, text: str, finish: str) -> Any:
        return self.of[prompt.meta["task"]](prompt, text, finish)

    def ready(self) -> None:
        """Raises ValueError for a function that other processes cannot import."""
        for fn in self.of.values():
            getattr(fn, "ready", lambda: None)()

    def submit(self, prompt: Prompt, text: str, finish: str) -> Future:
        """The same, as a future: of a function that has no `submit` it is computed now."""
        fn, out = self.of[prompt.meta["task"]], Future()
        if hasattr(fn, "submit"):
            return fn.submit(prompt, text, finish)
        try:
            out.set_result(fn(prompt, text, finish))
        except (Exception, SystemExit) as error:  # raised where the value is asked for
            out.set_exception(error)
        return out


def mixture(tasks: Mapping[str, Callable[[], Task]], weights: Mapping[str, float] | None = None) -> Task:
    """One task of several, whose training prompts come in the ratio of the weights, each task's in its own epochs.

    tasks: by name, each as `Config.task`. weights: of each name, positive numbers; None: in the ratio of their sizes.
    Test problems come in the ratio of their number, so that the first few stand for all. Traces, if each task has
    them for the same behaviours. A task's step speaks to its own prompts alone. Raises ValueError for a weight that is
    missing or not positive.
    """
    made = {name: make() for name, make in tasks.items()}
    expect(made, "mixture: tasks", tasks, "at least one task by name")
    weights = {name: len(task.train) for name, task in made.items()} if weights is None else weights
    sound = weights.keys() == made.keys() and all(0 < w < float("inf") for w in weights.values())
    expect(sound, "mixture: weights", dict(weights), f"a positive number for each of {', '.join(made)}")
    train = Mixed({n: t.train for n, t in made.items()}, {n: weights[n] for n in made})
    test = Mixed({n: t.test for n, t in made.items()}, dict.fromkeys(made, 1.0))
    order = np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for _, _, n in test.parts]), kind="stable")
    first, *others = made.values()
    traced = first.trace and all(t.trace and t.behaviours == first.behaviours for t in others)
    trace = partial(_trace, {n: t.trace for n, t in made.items()}) if traced else None
    reward = Routed({n: t.reward for n, t in made.items()})
    step = Routed({n: t.step or _silent for n, t in made.items()}) if any(t.step for t in made.values()) else None
    return Task(train, Subset(test, order), reward, trace, first.behaviours if traced else (), step)


def _silent(prompt: Prompt, text: str, finish: str) -> None:
    """The step of a task that is no environment."""


def _trace(traces: Mapping[str, Callable], prompt: Prompt, behaviour: str, seed: int) -> str | tuple[str, ...]:
    return traces[prompt.meta["task"]](prompt, behaviour, seed)
