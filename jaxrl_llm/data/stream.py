"""Which training prompt comes when: fixed by the seed, the step of the run and how prompts were answered so far."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np

from jaxrl_llm.types import Prompt

SuccessCounts = Mapping[int, tuple[int, int]]  # index in Task.train → answers so far, correct ones among them

LEAST_WEIGHT = 1e-3  # of a prompt that is always solved: it still comes now and then, in case the policy unlearns it
SMALL_POOL = 256  # prompts


def success_rate(counts: SuccessCounts, index: int) -> float:
    """Share of correct answers so far, 0 for a prompt that was never answered."""
    answers, correct = counts.get(index, (0, 0))
    return correct / answers if answers else 0.0


@dataclass(frozen=True)
class Stream:
    """Training prompts in an order without state: (seed, draw, step, success counts, prompts of the batch) decide it.

    plain         a new shuffle each epoch, in which a prompt that is passed over loses its turn
    difficulty    step s of S draws at random from the s-th of S equal parts of the prompts, sorted from the easiest to
                  the hardest; once the batch has all of that part, from one around it twice, four times, … as wide
    prioritized   drawn with probability ∝ 1 − success rate, at least LEAST_WEIGHT (Kimi k1.5, 2501.12599)

    A batch has distinct prompts while there are any: they repeat only when each one left is in it. Those solved at a
    rate of at least `retire_above` never come (Olmo 3, 2512.13961), nor do those that are not `usable`.
    """

    problems: Sequence[Prompt]
    seed: int
    difficulty: Callable[[Prompt], float] | None = None
    total_steps: int = 1  # S
    prioritized: bool = False
    retire_above: float | None = None
    usable: Callable[[Prompt], bool] | None = None
    batch_size: int = 1  # rollout.prompts, for the error

    def take(self, draw: int, n: int) -> tuple[tuple[Prompt, ...], np.ndarray, np.ndarray]:
        """Prompts `draw` to `draw` + n − 1 of the plain order, whatever else is set; their draws and their indices."""
        draws = np.arange(draw, draw + n)
        indices = np.array([self._shuffled(d) for d in draws.tolist()])
        return tuple(self.problems[i] for i in indices.tolist()), draws, indices

    def next(
        self, draw: int, step: int = 0, counts: SuccessCounts = MappingProxyType({}), in_batch: Set[int] = frozenset()
    ) -> tuple[int, int]:
        """Draw number (`draw` or a later one) and index of the next prompt, for a batch that has those `in_batch`.

        RuntimeError, with the success rates, when no prompt is left at all.
        """
        for passed_over in (in_batch, frozenset()):
            for found, index in self._candidates(draw, step, partial(self._weight, counts, passed_over)):
                if self.usable is None or self.usable(self.problems[index]):
                    return found, index
        rates = np.array([success_rate(counts, index) for index in counts] or [0.0])
        retired = 0 if self.retire_above is None else (rates >= self.retire_above).sum()
        raise RuntimeError(
            f"0 of {len(self.problems)} training prompts are left to draw from; expected up to rollout.prompts = "
            f"{self.batch_size}. Pass rates: {retired} reach algorithm.prompts.retire_above = {self.retire_above}, "
            f"mean {rates.mean():.2f} of the {len(counts)} that were answered; none of the others is usable"
        )

    def _weight(self, counts: SuccessCounts, passed_over: Set[int], index: int) -> float:
        """The probability, up to a factor, with which a prompt is drawn. At most 1."""
        rate = success_rate(counts, index)
        if index in passed_over or (self.retire_above is not None and rate >= self.retire_above):
            return 0.0
        return max(LEAST_WEIGHT, 1 - rate) if self.prioritized else 1.0

    def _candidates(self, draw: int, step: int, weight: Callable[[int], float]) -> Iterator[tuple[int, int]]:
        """Draws and indices of the prompts that have a weight, in the order in which they are to be tried."""
        size = len(self.problems)
        if not self.prioritized and self.difficulty is None:
            epoch = ((d, self._shuffled(d)) for d in range(draw, draw + 2 * size))  # a whole one lies in there
            yield from ((d, index) for d, index in epoch if weight(index))
            return
        order = range(size) if self.prioritized else self._by_difficulty
        width = 2 * size if self.prioritized else size / self.total_steps
        centre, pool = size * (min(step, self.total_steps - 1) + 0.5) / self.total_steps, ()
        while len(pool) < size:
            first = min(size - 1, max(0, round(centre - width / 2)))
            pool = order[first : max(first + 1, min(size, round(centre + width / 2)))]
            yield from ((draw, int(index)) for index in self._sampled(draw, pool, weight))
            width *= 2

    def _sampled(self, draw: int, pool: Sequence[int], weight: Callable[[int], float]) -> Iterator[int]:
        """Prompts of the pool, drawn ∝ weight: of many by rejection, at a cost that stays the same; else each once."""
        rng = np.random.default_rng([self.seed, draw])
        for _ in range(10_000 if len(pool) > SMALL_POOL else 0):
            index = pool[rng.integers(len(pool))]
            if rng.random() < weight(int(index)):
                yield index
        weights = np.array([weight(int(index)) for index in pool])
        while weights.any():
            k = rng.choice(len(pool), p=weights / weights.sum())
            yield pool[k]
            weights[k] = 0.0

    @cached_property
    def _by_difficulty(self) -> np.ndarray:
        return np.argsort([self.difficulty(p) for p in self.problems], kind="stable")

    def _shuffled(self, draw: int) -> int:
        """Index of `draw` in its epoch's shuffle, by a Feistel permutation: no table, whatever the size."""
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
