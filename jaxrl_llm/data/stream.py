"""Which training prompt comes when: fixed by the seed and by what was solved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from jaxrl_llm.types import Prompt

Solved = Mapping[int, tuple[int, int]]  # index of a prompt in Task.train → answers seen, correct ones


RARELY = 1e-3  # what is solved may be forgotten


def success_rate(solved: Solved, index: int) -> float:
    """Share of correct answers so far, 0 for a prompt that was never answered."""
    seen, correct = solved.get(index, (0, 0))
    return correct / seen if seen else 0.0


@dataclass(frozen=True)
class Stream:
    """Training prompts in an order fixed by the seed and by what was solved. `draw` is the only position.

    A new shuffle each epoch; or, with `difficulty`, one pass from the easiest problem to the hardest, spread over the
    first `total` draws; or, if `prioritized`, drawn with probability ∝ 1 − success rate, but never below RARELY, those
    of one batch without replacement (Kimi k1.5, 2501.12599). Prompts solved at a rate of at least `retire_above` are
    passed over (Olmo 3, 2512.13961).
    """

    problems: Sequence[Prompt]
    seed: int
    difficulty: Callable[[Prompt], float] | None = None
    total: int = 1
    prioritized: bool = False
    retire_above: float | None = None

    def take(
        self, draw: int, n: int, solved: Solved = MappingProxyType({}), taken: Sequence[int] = ()
    ) -> tuple[tuple[Prompt, ...], np.ndarray, np.ndarray]:
        """The next `n` prompts from `draw` on, their draw numbers and their indices; the last draw + 1 is the next.

        `taken`: indices that the batch has already, which prioritised sampling leaves out.
        """
        if self.prioritized:
            indices, draws = self._prioritized(draw, n, solved, taken), np.arange(draw, draw + n)
        else:
            found = []
            for d in range(draw, draw + n + len(self.problems)):
                index = self._place(d)
                if not self._retired(solved, index):
                    found.append((d, index))
                if len(found) == n:
                    break
            else:
                self._too_few(len(found), n)
            draws, indices = (np.array(x, np.int64) for x in zip(*found, strict=True))
        return tuple(self.problems[int(p)] for p in indices), draws, indices

    def _retired(self, solved: Solved, index: int) -> bool:
        return self.retire_above is not None and success_rate(solved, index) >= self.retire_above

    def _too_few(self, left: int, n: int) -> None:
        raise RuntimeError(
            f"{left} of {len(self.problems)} training prompts are left to draw from; expected rollout.prompts = {n}. "
            f"The others are solved (algorithm.prompts.retire_above = {self.retire_above}) or in the batch"
        )

    def _prioritized(self, draw: int, n: int, solved: Solved, taken: Sequence[int]) -> np.ndarray:
        weights = np.ones(len(self.problems))
        for index in solved:
            weights[index] = 0.0 if self._retired(solved, index) else max(RARELY, 1 - success_rate(solved, index))
        weights[list(taken)] = 0.0
        if (weights > 0).sum() < n:
            self._too_few(int((weights > 0).sum()), n)
        rng = np.random.default_rng([self.seed, draw])
        return rng.choice(len(weights), n, replace=False, p=weights / weights.sum())

    @cached_property
    def _by_difficulty(self) -> np.ndarray:
        return np.argsort([self.difficulty(p) for p in self.problems], kind="stable")

    def _place(self, draw: int) -> int:
        if self.difficulty is not None and draw < self.total:
            return int(self._by_difficulty[draw * len(self.problems) // self.total])
        return self._index(draw)

    def _index(self, draw: int) -> int:
        """Place of `draw` in its epoch's shuffle, by a Feistel permutation: no table, whatever the size."""
        size = len(self.problems)
        epoch, i = divmod(draw, size)
        half = max(1, math.ceil((size - 1).bit_length() / 2))
        keys = np.random.default_rng([self.seed, epoch]).integers(1, 2**31, 6).tolist()
        while True:  # walk the cycle until it is back inside; the domain is below 4 · size
            left, right = i >> half, i & ((1 << half) - 1)
            for key in keys:
                left, right = right, left ^ (_mixed_bits(right ^ key) & ((1 << half) - 1))
            i = (left << half) | right
            if i < size:
                return i


def _mixed_bits(x: int) -> int:
    """32 bits, each depending on all of x. One product alone is linear, and would leave neighbours correlated."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
