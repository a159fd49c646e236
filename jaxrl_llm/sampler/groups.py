"""Groups of answers for prompts, their rewards, and the sampling that goes on until a batch is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.objective.algorithms import call
from jaxrl_llm.sampler import decode, turns
from jaxrl_llm.sampler.requests import Answer, Group, NextRequest, Request
from jaxrl_llm.types import CANCELLED, Prompt, Reward, Rollouts


def encode_prompts(tokenizer: Tokenizer, prompts: tuple[Prompt, ...], max_prompt_tokens: int) -> list[list[int]]:
    """Token ids of the prompts. Raises ValueError for an empty one or one longer than `max_prompt_tokens`."""
    ids = list(map(tokenizer.encode_prompt, prompts))
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not 0 < len(tokens) <= max_prompt_tokens:
            most = f"rollout.max_prompt_tokens = {max_prompt_tokens}"
            raise ValueError(f"prompt {prompt.id} has {len(tokens)} tokens; expected 1 to {most}")
    return ids


def make_request(engine: Any, ids: Sequence[int], group: int, *, seed: int, draw: int) -> Request:
    """A group for a prompt of these token ids, drawn as the engine draws unless told otherwise."""
    return Request(tuple(ids), group, engine.max_tokens, engine.sampling, engine.stop, seed, draw)


def to_rollouts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], requests: Sequence[Request], groups: Sequence[Group]
) -> Rollouts:
    """Answered requests as arrays."""
    answers = [a for group in groups for a in group]
    said = [np.zeros(len(a.tokens), bool) if a.said is None else a.said for a in answers]
    return Rollouts(
        prompts=tuple(prompts),
        prompt_tokens=_padded([np.array(r.prompt, np.int32) for r in requests]),
        prompt_lengths=np.array([len(r.prompt) for r in requests], np.int32),
        tokens=_padded([a.tokens for a in answers]),
        sampler_logp=_padded([a.logp for a in answers]),
        lengths=np.array([len(a.tokens) for a in answers], np.int32),
        finish=np.array([a.finish for a in answers]),
        texts=tuple(turns.text_of(tokenizer, a) for a in answers),
        draws=np.array([r.draw for r in requests], np.int64),
        versions=_padded([a.versions for a in answers]),
        experts=None if answers[0].experts is None else _padded([a.experts for a in answers]),
        said=_padded(said) if any(map(np.any, said)) else None,
    )


def _padded(rows: Sequence[np.ndarray], width: int = 0) -> np.ndarray:
    out = np.zeros((len(rows), width or max(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype)
    for old, new in zip(out, rows, strict=True):
        old[: len(new)] = new
    return out


def sample_groups(
    engine: Any, prompts: tuple[Prompt, ...], group: int, *, seed: int, draws: np.ndarray, max_prompt_tokens: int,
    step: turns.Step | None = None,
) -> Rollouts:  # fmt: skip
    """`group` answers to each prompt. step: of the task. ValueError for a prompt longer than `max_prompt_tokens`."""
    ids = encode_prompts(engine.tokenizer, prompts, max_prompt_tokens)
    asked = [make_request(engine, t, group, seed=seed, draw=int(d)) for t, d in zip(ids, draws, strict=True)]
    return to_rollouts(engine.tokenizer, prompts, asked, turns.generate(engine, step, prompts, asked))


def sampler_logprobs(engine: Any, answers: Rollouts, *, seed: int) -> np.ndarray:
    """Log-probs [B,T] of the answers from the programs that drew them, under the engine's weights."""
    group = answers.group_size
    ids = [tokens[:n].tolist() for tokens, n in zip(answers.prompt_tokens, answers.prompt_lengths, strict=True)]
    asked = [make_request(engine, t, group, seed=seed, draw=int(d)) for t, d in zip(ids, answers.draws, strict=True)]
    columns = answers.tokens, answers.sampler_logp, answers.versions
    rows = [Answer(*(x[i, :n] for x in columns), str(answers.finish[i])) for i, n in enumerate(answers.lengths)]
    groups = [tuple(rows[p * group : (p + 1) * group]) for p in range(len(asked))]
    return _padded(decode.forced_logprobs(engine, asked, groups), answers.tokens.shape[1])


@dataclass(frozen=True)
class PendingPrompt:
    """A prompt that was handed out, and what has been drawn for it."""

    draw: int
    index: int  # in Task.train
    begun: Group = ()  # answers that a token budget has interrupted


@dataclass(frozen=True)
class ScoredGroup:
    """One group with its rewards."""

    prompt: PendingPrompt
    rollouts: Rollouts
    rewards: tuple[Reward, ...]  # the verifier's
    shaped: np.ndarray  # float32 [G]: what is learnt from
    kept: bool  # passed the filter


@dataclass(frozen=True)
class ScoredBatch:
    """Groups for learning, and the rewards of all that were sampled on the way."""

    rollouts: Rollouts
    rewards: tuple[Reward, ...]  # the verifier's, B
    shaped: np.ndarray  # float32 [B]: what is learnt from
    kept: np.ndarray  # bool [P]: groups that passed the filter
    all_rollouts: Rollouts  # rejected groups included
    all_rewards: tuple[Reward, ...]
    all_kept: np.ndarray  # bool
    all_prompts: tuple[PendingPrompt, ...] = ()  # with their groups
    unfinished: tuple[PendingPrompt, ...] = ()  # prompts handed out whose answers are not among these
    stale: int = 0  # groups dropped because too old
    old_logp: np.ndarray | None = None  # float32 [B,T]: from the sampler's own kernels, in place of the learner's


def first_done(futures: Iterable[Future]) -> set[Future]:
    """Those that are done, once one is."""
    return wait(futures, return_when=FIRST_COMPLETED).done


def fill_batch(
    sample: Callable[[NextRequest], Iterator[tuple[Request, Group]]],
    ask: Callable[[], PendingPrompt],
    request: Callable[[PendingPrompt], Request],
    judge: Callable[[PendingPrompt, Request, Group], Future[ScoredGroup]],
    *,
    prompts: int,
    most: int,
    pending: Sequence[PendingPrompt] = (),
    resample: bool = True,
    waiting: Callable[[Iterable[Future]], Iterable[Future]] = first_done,
) -> ScoredBatch:
    """Groups until `prompts` of them have passed the filter; one that has not is replaced as soon as that is known.

    A prompt is asked for only when a group was rejected: the batch is that of the first draws, in their order, in
    whatever order they were answered and judged. A verdict is waited for (by `waiting`) only when there is nothing to
    draw, and then whichever comes first. pending: unfinished groups of an earlier call, which come first. A group whose
    answers reach their token budget is put aside, and another one begun; once as many as a batch has are put aside,
    they go on, the oldest first. Without `resample` rejected groups stay in the batch, and `kept` tells which passed.
    Raises RuntimeError with the pass rates when `most` prompts were asked for and too few groups passed.
    """
    under_way: dict[int, PendingPrompt] = {}
    judging, judged = set[Future[ScoredGroup]](), list[ScoredGroup]()
    first, put_aside, full, asked = deque(pending), deque(), 0, 0

    def take(verdicts: Iterable[Future[ScoredGroup]]) -> None:
        nonlocal full
        for verdict in verdicts:
            judging.remove(verdict)
            judged.append(verdict.result())
            full += judged[-1].kept or not resample

    def next_prompt() -> PendingPrompt | None:
        nonlocal asked
        if full + len(under_way) + len(judging) >= prompts or (asked == most and not first and not put_aside):
            return None
        if first or len(put_aside) >= prompts or asked == most:
            return (first or put_aside).popleft()
        asked += 1
        return ask()

    def next_request() -> Request | None:
        take([verdict for verdict in judging if verdict.done()])
        while (prompt := next_prompt()) is None:
            if under_way or not judging:
                return None
            take(waiting(judging))
        under_way[prompt.draw] = prompt
        return request(prompt)

    for answered, group in sample(next_request):
        prompt = under_way.pop(answered.draw)
        if any(a.finish == CANCELLED for a in group):
            put_aside.append(replace(prompt, begun=group))
        else:
            judging.add(judge(prompt, answered, group))
    judged.sort(key=lambda j: j.prompt.draw)
    if full < prompts:
        raise too_few_groups(judged, prompts, most // prompts)
    return scored_batch([j for j in judged if j.kept or not resample], judged, (*first, *put_aside))


def too_few_groups(judged: Sequence[ScoredGroup], prompts: int, rounds: int) -> RuntimeError:
    """What to raise when `rounds` times as many prompts as a batch has were asked in vain."""
    rates, kept = np.array([[r.correct for r in j.rewards] for j in judged]).mean(axis=1), sum(j.kept for j in judged)
    return RuntimeError(
        f"algorithm.group_filter kept {kept} of {len(rates)} groups in rollout.max_rounds = {rounds} "
        f"rounds; expected {prompts}. Pass rates: {(rates == 0).mean():.0%} of the groups all wrong, "
        f"{(rates == 1).mean():.0%} all correct, mean {rates.mean():.2f}"
    )


def scored_batch(
    chosen: Sequence[ScoredGroup], judged: Sequence[ScoredGroup], unfinished: Sequence[PendingPrompt] = ()
) -> ScoredBatch:
    """The groups `chosen` among those `judged`, as arrays."""
    kept = lambda groups: np.array([j.kept for j in groups])
    rewards = lambda groups: tuple(r for j in groups for r in j.rewards)
    whole = concatenated([j.rollouts for j in chosen])
    all_rollouts = whole if len(chosen) == len(judged) else concatenated([j.rollouts for j in judged])
    shaped = np.concatenate([j.shaped for j in chosen])
    everything = all_rollouts, rewards(judged), kept(judged), tuple(j.prompt for j in judged)
    return ScoredBatch(whole, rewards(chosen), shaped, kept(chosen), *everything, tuple(unfinished))


def passes_filter(keep: Callable | None, rewards: Sequence[Reward], shaped: np.ndarray) -> bool:
    """Whether a group filter, which gets those of `correct` and `rewards` that it names, keeps this group."""
    if keep is None:
        return True
    judged = {"correct": np.array([[r.correct for r in rewards]]), "rewards": shaped[None]}
    return bool(call(keep, judged)[0])


def concatenated(parts: Sequence[Rollouts]) -> Rollouts:
    """One Rollouts of many."""

    def gather(name: str) -> Any:
        arrays = [getattr(r, name) for r in parts]
        if name == "said" and any(a is not None for a in arrays):
            arrays = [np.zeros(r.tokens.shape, bool) if a is None else a for r, a in zip(parts, arrays, strict=True)]
        if arrays[0] is None or isinstance(arrays[0], tuple):
            return arrays[0] and tuple(x for a in arrays for x in a)
        if arrays[0].ndim > 1:
            width = max(a.shape[1] for a in arrays)
            tail = ((0, 0),) * (arrays[0].ndim - 2)
            arrays = [np.pad(a, ((0, 0), (0, width - a.shape[1]), *tail)) for a in arrays]
        return np.concatenate(arrays)

    return Rollouts(**{f.name: gather(f.name) for f in fields(Rollouts)})
