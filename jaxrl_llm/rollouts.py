"""Groups of answers for prompts, their rewards, and dynamic sampling."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.decode import Engine
from jaxrl_llm.types import Prompt, Reward, Rollouts, Task

Solved = Mapping[int, tuple[int, int]]  # place of a prompt in Task.train → answers seen, correct ones


RARELY = 1e-3  # what is solved may be forgotten


def success_rate(solved: Solved, place: int) -> float:
    """Share of correct answers so far, 0 for a prompt that was never answered."""
    seen, correct = solved.get(place, (0, 0))
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
        """The next `n` prompts from `draw` on, their draw numbers and their places; the last draw + 1 is the next.

        `taken`: places that the batch has already, which prioritised sampling leaves out.
        """
        if self.prioritized:
            places, draws = self._prioritized(draw, n, solved, taken), np.arange(draw, draw + n)
        else:
            found = []
            for d in range(draw, draw + n + len(self.problems)):
                place = self._place(d)
                if not self._retired(solved, place):
                    found.append((d, place))
                if len(found) == n:
                    break
            else:
                self._too_few(len(found), n)
            draws, places = (np.array(x, np.int64) for x in zip(*found, strict=True))
        return tuple(self.problems[int(p)] for p in places), draws, places

    def _retired(self, solved: Solved, place: int) -> bool:
        return self.retire_above is not None and success_rate(solved, place) >= self.retire_above

    def _too_few(self, left: int, n: int) -> None:
        raise RuntimeError(
            f"{left} of {len(self.problems)} training prompts are left to draw from; expected rollout.prompts = {n}. "
            f"The others are solved (algorithm.retire_above = {self.retire_above}) or in the batch already"
        )

    def _prioritized(self, draw: int, n: int, solved: Solved, taken: Sequence[int]) -> np.ndarray:
        weights = np.ones(len(self.problems))
        for place in solved:
            weights[place] = 0.0 if self._retired(solved, place) else max(RARELY, 1 - success_rate(solved, place))
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


def mixed(correct: Bool[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """Groups with 0 < #correct < G: only they tell right from wrong. DAPO's dynamic sampling, 2503.14476."""
    return correct.any(axis=1) & ~correct.all(axis=1)


def varied(rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, " P"]:
    """Groups whose rewards differ by more than float noise: the others have no gradient. Olmo 3, 2512.13961."""
    return np.ptp(rewards, axis=1) > 1e-6 * np.maximum(1.0, np.abs(rewards).max(axis=1))


def encoded(tokenizer: Tokenizer, prompts: tuple[Prompt, ...], max_prompt_tokens: int) -> list[list[int]]:
    """Token ids of the prompts. Raises ValueError for an empty one or one longer than `max_prompt_tokens`."""
    ids = [tokenizer.encode(p.text) for p in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not 0 < len(tokens) <= max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(tokens)} tokens; expected 1 to rollout.max_prompt_tokens = "
                f"{max_prompt_tokens}"
            )
    return ids


def sample_groups(
    engine: Engine, prompts: tuple[Prompt, ...], group: int, *, seed: int, draws: np.ndarray, max_prompt_tokens: int
) -> Rollouts:
    """`group` answers to each prompt. Raises ValueError for a prompt longer than `max_prompt_tokens`."""
    ids = encoded(engine.tokenizer, prompts, max_prompt_tokens)
    samples = decode.generate(engine, ids, group, seed=seed, draws=draws)
    lengths = np.array([len(t) for t in ids], np.int32)
    padded = np.zeros((len(ids), lengths.max()), np.int32)
    for row, tokens in zip(padded, ids, strict=True):
        row[: len(tokens)] = tokens
    return Rollouts(
        prompts, padded, lengths, samples.tokens, samples.logp, samples.lengths, samples.finish, samples.texts, draws
    )


def score(task: Task, rollouts: Rollouts) -> list[Reward]:
    """The verifier's word on each answer. A verifier that raises or returns NaN is an error that names the prompt."""
    rewards = []
    for i, (text, finish) in enumerate(zip(rollouts.texts, rollouts.finish, strict=True)):
        prompt = rollouts.prompts[i // rollouts.group_size]
        try:
            reward = task.reward(prompt, text, str(finish))
            sound = isinstance(reward, Reward) and math.isfinite(reward.value)
        except Exception as error:
            raise ValueError(f"reward of prompt {prompt.id} raised {type(error).__name__}: {error}") from error
        if not sound:
            raise ValueError(f"reward of prompt {prompt.id} is {reward!r}; expected a Reward with a finite value")
        rewards.append(reward)
    return rewards


@dataclass(frozen=True)
class Scored:
    """Groups for learning, and what was seen of all that were sampled on the way."""

    rollouts: Rollouts
    rewards: tuple[Reward, ...]  # the verifier's, B
    shaped: np.ndarray  # float32 [B]: what is learnt from
    kept: np.ndarray  # bool [P]: groups that passed the filter
    draw: int  # the stream's position afterwards
    rounds: int
    all_rollouts: tuple[Rollouts, ...]
    all_rewards: tuple[Reward, ...]


Round = tuple[Rollouts, list[Reward], np.ndarray]  # answers, the verifier's rewards, shaped rewards [B]


def sample_until_full(
    sample: Callable[[int], Round], draw: int, prompts: int, keep: Callable | None, rounds: int, resample: bool = True
) -> Scored:
    """Rounds of `prompts` groups until `prompts` of them pass `keep`; without a filter, one round.

    `sample(draw)` answers and scores one round, `keep(correct=…, rewards=…)` judges its groups, by those of the two
    names that it has. Groups beyond the last one needed are dropped. Raises RuntimeError with the pass rates when
    `rounds` rounds are not enough. Without `resample` there is one round, of which `kept` tells what passed.
    """
    kept: list[tuple[int, int]] = []
    seen: list[Rollouts] = []
    rewards: list[Reward] = []
    shaped: list[np.ndarray] = []
    while len(kept) < prompts:
        if len(seen) == rounds:
            rates = _correct(rewards, seen[0].group_size).mean(axis=1)
            raise RuntimeError(
                f"algorithm.group_filter kept {len(kept)} of {len(rates)} groups in rollout.max_rounds = {rounds} "
                f"rounds; expected {prompts}. Pass rates: {(rates == 0).mean():.0%} of the groups all wrong, "
                f"{(rates == 1).mean():.0%} all correct, mean {rates.mean():.2f}"
            )
        rollouts, scored, values = sample(draw)
        group, draw = rollouts.group_size, int(rollouts.draws[-1]) + 1
        judged = {"correct": _correct(scored, group), "rewards": values.reshape(-1, group)}
        passed = np.ones(prompts, bool) if keep is None else _judge(keep, judged)
        kept += [(len(seen), p) for p in (np.flatnonzero(passed) if resample else range(prompts))]
        seen.append(rollouts)
        rewards += scored
        shaped.append(values)
    chosen = kept[:prompts]
    rows = [r * prompts * group + p * group + g for r, p in chosen for g in range(group)]
    return Scored(
        _select(seen, chosen),
        tuple(rewards[i] for i in rows),
        np.concatenate(shaped)[rows],
        np.ones(prompts, bool) if resample else passed,
        draw,
        len(seen),
        tuple(seen),
        tuple(rewards),
    )


def _judge(keep: Callable, judged: dict[str, np.ndarray]) -> np.ndarray:
    return keep(**{name: judged[name] for name in inspect.signature(keep).parameters if name in judged})


def _correct(rewards: Sequence[Reward], group: int) -> np.ndarray:
    return np.array([r.correct for r in rewards]).reshape(-1, group)


def _select(seen: list[Rollouts], chosen: list[tuple[int, int]]) -> Rollouts:
    """The chosen groups (round, place) as one Rollouts."""
    if len(seen) == 1 and len(chosen) == len(seen[0].prompts):
        return seen[0]
    group = seen[0].group_size

    def gather(name: str, per: int) -> np.ndarray:
        arrays = [getattr(r, name) for r in seen]
        width = max(a.shape[1] for a in arrays) if arrays[0].ndim == 2 else None
        pick = [arrays[r][p * per : (p + 1) * per] for r, p in chosen]
        if width is not None:
            pick = [np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in pick]
        return np.concatenate(pick)

    return replace(
        seen[0],
        prompts=tuple(seen[r].prompts[p] for r, p in chosen),
        texts=tuple(t for r, p in chosen for t in seen[r].texts[p * group : (p + 1) * group]),
        **{name: gather(name, 1) for name in ("prompt_tokens", "prompt_lengths", "draws")},
        places=None if seen[0].places is None else gather("places", 1),
        **{name: gather(name, group) for name in ("tokens", "sampler_logp", "lengths", "finish")},
    )
