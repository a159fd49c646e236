"""Groups of answers for prompts, their rewards, and dynamic sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool

from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.decode import Engine
from jaxrl_llm.types import Prompt, Reward, Rollouts, Task


@dataclass(frozen=True)
class Stream:
    """Training prompts in an order fixed by the seed: a new shuffle each epoch. `draw` is the only position."""

    problems: Sequence[Prompt]
    seed: int

    def take(self, draw: int, n: int) -> tuple[tuple[Prompt, ...], np.ndarray]:
        """The `n` prompts after the first `draw`, and their draw numbers."""
        draws = np.arange(draw, draw + n)
        return tuple(self.problems[self._index(int(d))] for d in draws), draws

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


def sample_groups(
    engine: Engine, prompts: tuple[Prompt, ...], group: int, *, seed: int, draws: np.ndarray, max_prompt_tokens: int
) -> Rollouts:
    """`group` answers to each prompt. Raises ValueError for a prompt longer than `max_prompt_tokens`."""
    ids = [engine.tokenizer.encode(p.text) for p in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not 0 < len(tokens) <= max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(tokens)} tokens; expected 1 to rollout.max_prompt_tokens = "
                f"{max_prompt_tokens}"
            )
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
    """Groups kept for learning, and what was seen of all that were sampled on the way."""

    rollouts: Rollouts
    rewards: tuple[Reward, ...]  # of the kept groups, B
    draw: int  # the stream's position afterwards
    rounds: int
    all_rollouts: tuple[Rollouts, ...]
    all_rewards: tuple[Reward, ...]


def sample_until_full(
    sample: Callable[[int], tuple[Rollouts, list[Reward]]], draw: int, prompts: int, keep: Callable | None, rounds: int
) -> Scored:
    """Rounds of `prompts` groups until `prompts` of them pass `keep`; without a filter, one round.

    `sample(draw)` answers and scores one round. Groups beyond the last one needed are dropped. Raises RuntimeError with
    the pass rates when `rounds` rounds are not enough.
    """
    kept: list[tuple[Rollouts, int]] = []
    seen: list[Rollouts] = []
    rewards: list[Reward] = []
    while len(kept) < prompts:
        if len(seen) == rounds:
            rates = _correct(rewards, seen[0].group_size).mean(axis=1)
            raise RuntimeError(
                f"algorithm.group_filter kept {len(kept)} of {len(rates)} groups in rollout.max_rounds = {rounds} "
                f"rounds; expected {prompts}. Pass rates: {(rates == 0).mean():.0%} of the groups all wrong, "
                f"{(rates == 1).mean():.0%} all correct, mean {rates.mean():.2f}"
            )
        rollouts, scored = sample(draw + len(seen) * prompts)
        passed = np.ones(prompts, bool) if keep is None else keep(correct=_correct(scored, rollouts.group_size))
        kept += [(len(seen), p) for p in np.flatnonzero(passed)]
        seen.append(rollouts)
        rewards += scored
    group = seen[0].group_size
    chosen = kept[:prompts]
    rows = [r * prompts * group + p * group + g for r, p in chosen for g in range(group)]
    return Scored(
        _select(seen, chosen),
        tuple(rewards[i] for i in rows),
        draw + len(seen) * prompts,
        len(seen),
        tuple(seen),
        tuple(rewards),
    )


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
        **{name: gather(name, group) for name in ("tokens", "sampler_logp", "lengths", "finish")},
    )
