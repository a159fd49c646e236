"""Which training prompt comes when: fixed by the seed, the step of the run and how prompts were answered so far."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np

from jaxrl_llm.types import Prompt, expect

SuccessCounts = Mapping[int, tuple[int, int]]  # index in Task.train → answers so far, correct ones among them

LEAST_WEIGHT = 1e-3  # of a prompt that is always solved: it still comes now and then, in case the policy unlearns it
SMALL_POOL = 256  # prompts


def success_rate(counts: SuccessCounts, index: int) -> float:
    """Share of correct answers so far, 0 for a prompt that was never answered."""
    answers, correct = counts.get(index, (0, 0))
    return correct / answers if answers else 0.0


def turn(draw: int, weights: Sequence[float]) -> tuple[int, int]:
    """Which of several parts a draw falls to, and how many of the draws before it did.

    Of the first d draws part i, of those that no part before it takes, gets ⌊d·w_i / Σ_{j≥i} w_j + ½⌋: each part's
    count is within len(weights) of its share, whatever d.
    """
    left = math.fsum(weights)
    for part, weight in enumerate(weights[:-1]):
        before, after = (math.floor(d * weight / left + 0.5) for d in (draw, draw + 1))
        if after > before:
            return part, before
        draw, left = draw - before, left - weight
    return len(weights) - 1, draw


def share(count: int, host: int, hosts: int) -> range:
    """Places of a batch of `count` prompts that are host `host`'s of `hosts`: disjoint, all of them, in order.

    What is in the batch does not depend on it, so that another number of hosts goes on with the same prompts.
    """
    expect(0 <= host < hosts, "host", host, f"0 to hosts - 1 = {hosts - 1}")
    return range(count * host // hosts, count * (host + 1) // hosts)


@dataclass(frozen=True)
class Stream:
    """Training prompts in an order without state: (seed, draw, step, success counts, prompts of the batch) decide it.

    plain         a new shuffle each epoch, in which a prompt that is passed over loses its turn
    difficulty    step s of S draws at random from the s-th of S equal parts of the prompts, sorted from the easiest to
                  the hardest; once the batch has all of that part, from one around it twice, four times, … as wide
    prioritized   drawn with probability ∝ 1 − success rate, at least LEAST_WEIGHT (Kimi k1.5, 2501.12599)

    Problems may have `parts`, (weight, first index, size) each (see mixture.py): `turn` says which of them a draw falls
    to, and each has an order of its own, of its usable prompts. Where the batch has the prompt whose turn it is, or it
    is retired, another one of that part takes its place, so that the weights hold.

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
        indices = np.array([self._in_turn(d) for d in draws.tolist()])
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
        plain = not self.prioritized and self.difficulty is None
        if plain and len(self._parts) == 1:
            epoch = ((d, self._in_turn(d)) for d in range(draw, draw + 2 * len(self.problems)))  # a whole one
            yield from ((d, index) for d, index in epoch if weight(index))
            return
        part, _ = turn(draw, self._weights)
        if plain and weight(index := self._in_turn(draw)):
            yield draw, index
        others = sorted(set(range(len(self._parts))) - {part}, key=lambda p: -self._weights[p])
        for p in (part, *others):
            for pool in self._pools(p, step):
                yield from ((draw, int(index)) for index in self._sampled(draw, pool, weight))

    def _pools(self, part: int, step: int) -> Iterator[Sequence[int]]:
        """Indices of a part to draw from: all of it, or with a difficulty ever more of it, around the step's."""
        _, first, size = self._parts[part]
        if self.difficulty is None or self.prioritized:
            yield range(first, first + size)
            return
        width, pool = size / self.total_steps, ()
        centre = size * (min(step, self.total_steps - 1) + 0.5) / self.total_steps
        while len(pool) < size:
            low = min(size - 1, max(0, round(centre - width / 2)))
            pool = self._by_difficulty[part][low : max(low + 1, min(size, round(centre + width / 2)))]
            yield pool
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
    def _parts(self) -> tuple[tuple[float, int, int], ...]:
        return getattr(self.problems, "parts", None) or ((1.0, 0, len(self.problems)),)

    @cached_property
    def _weights(self) -> list[float]:
        return [weight for weight, _, _ in self._parts]

    @cached_property
    def _by_difficulty(self) -> list[np.ndarray]:
        level = np.array([self.difficulty(p) for p in self.problems])
        return [first + np.argsort(level[first : first + size], kind="stable") for _, first, size in self._parts]

    @cached_property
    def _usable_turns(self) -> list[list[int]]:
        return [[] for _ in self._parts]  # of each part, as far as it was asked for

    def _in_turn(self, draw: int) -> int:
        """Index of the prompt whose turn it is: of several parts, one that is usable while there is one."""
        part, number = turn(draw, self._weights)
        if self.usable is not None and len(self._parts) > 1:
            turns, size = self._usable_turns[part], self._parts[part][2]
            while len(turns) <= number:
                last = turns[-1] if turns else -1
                ahead = range(last + 1, last + 1 + 2 * size)  # a whole epoch lies in there
                usable = (n for n in ahead if self.usable(self.problems[self._shuffled(part, n)]))
                turns.append(next(usable, last + 1))
            number = turns[number]
        return self._shuffled(part, number)

    def _shuffled(self, part: int, number: int) -> int:
        """Index of a part's turn in its epoch's shuffle, by a Feistel permutation: no table, whatever the size."""
        _, first, size = self._parts[part]
        epoch, i = divmod(number, size)
        half = max(1, math.ceil((size - 1).bit_length() / 2))
        seeds = [self.seed, epoch, *[part] * (len(self._parts) > 1)]
        keys = np.random.default_rng(seeds).integers(1, 2**31, 6).tolist()
        while True:  # walk the cycle until it is back inside; the domain is below 4 · size
            left, right = i >> half, i & ((1 << half) - 1)
            for key in keys:
                left, right = right, left ^ (_mixed_bits(right ^ key) & ((1 << half) - 1))
            i = (left << half) | right
            if i < size:
                return first + i


def _mixed_bits(x: int) -> int:
    """32 bits, each depending on all of x. One product alone is linear, and would leave neighbours correlated."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
