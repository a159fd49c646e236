"""Answers of several turns: what an environment says to one that has ended is put behind it, and the policy goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.sampler.requests import Answer, Group, NextRequest, Request
from jaxrl_llm.sampler.scoring import begin, gathered, value_of
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt, expect

ASK_S = 0.2  # after so long a source that had no request is asked again: a group may have been rejected meanwhile
Said = str | Sequence[Mapping[str, str]] | None  # text, or messages for the tokenizer's chat template
Step = Callable[[Prompt, str, str], Said]


def sample(
    engine: Any,
    step: Step | None,
    prompt_of: Callable[[Request], Prompt],
    next_request: NextRequest,
    latest: Callable | None = None,
) -> Iterator[tuple[Request, Group]]:
    """`engine.sample` in an environment: a group is done when `step` has nothing more to say to any of its answers.

    A group's next turn begins when all of its answers have ended the one before; meanwhile other groups are drawn. The
    tokens that the environment has said are marked in `Answer.said`; their log-probs are 0. An answer ends as truncated
    when what is said, and a token of its own behind it, would go beyond the request's max_tokens.
    """
    if step is None:
        yield from engine.sample(next_request, latest)
        return
    turns: dict[Future[Group], Request] = {}  # what the environment has been asked
    going_on, over, firsts, drawn = deque(), deque(), {}, 0

    def hear(wait_for_one: bool) -> None:
        heard = [f for f in turns if f.done()]
        for future in heard or (wait(turns, ASK_S, FIRST_COMPLETED).done if wait_for_one else ()):
            request, group = turns.pop(future), future.result()
            if any(a.finish == CANCELLED for a in group):
                going_on.append(replace(request, begun=group))
                firsts[id(going_on[-1])] = firsts.pop(id(request), request)
            else:
                over.append((firsts.pop(id(request), request), group))

    def next_turn() -> Request | None:
        nonlocal drawn
        hear(wait_for_one=False)
        while (request := going_on.popleft() if going_on else next_request()) is None:
            if drawn or over or not turns:
                return None
            hear(wait_for_one=True)
        drawn += 1
        return request

    while True:
        for request, group in engine.sample(next_turn, latest):
            drawn -= 1
            group = tuple(map(_marked, group, request.begun or (None,) * len(group)))
            if any(a.finish == CANCELLED for a in group):  # from outside: no turn has ended
                over.append((firsts.pop(id(request), request), group))
            else:
                turns[_turn(step, engine.tokenizer, prompt_of(request), request, group)] = request
            hear(wait_for_one=False)
            while over:
                yield over.popleft()
        if not over and not turns:
            return
        while over:
            yield over.popleft()


def _marked(answer: Answer, begun: Answer | None) -> Answer:
    """The answer of a sampler, which knows nothing of what was said in what it has continued."""
    if begun is None or begun.said is None:
        return answer
    return replace(answer, said=np.pad(begun.said, (0, len(answer.tokens) - len(begun.said))))


def _turn(step: Step, tokenizer: Tokenizer, prompt: Prompt, request: Request, group: Group) -> Future[Group]:
    """The group after the environment's turn: cancelled is an answer to which it has said something."""
    texts = {i: text_of(tokenizer, a) for i, a in enumerate(group) if a.finish in (EOS, STOP)}
    heard = {i: begin(step, prompt, text, group[i].finish) for i, text in texts.items()}
    said = lambda i: value_of("step", prompt, texts[i], heard[i]) if i in heard else None
    after = lambda i, a: _continued(tokenizer, prompt, request.max_tokens, a, said(i))
    return gathered(list(heard.values()), lambda: tuple(after(i, a) for i, a in enumerate(group)))


def text_of(tokenizer: Tokenizer, answer: Answer) -> str:
    """An answer's text, without the end-of-sequence tokens that the policy has drawn: one a turn, at most."""
    ended = np.isin(answer.tokens, tokenizer.eos_ids)
    return tokenizer.decode(answer.tokens[~ended if answer.said is None else ~ended | answer.said])


def _continued(tokenizer: Tokenizer, prompt: Prompt, max_tokens: int, answer: Answer, said: Said) -> Answer:
    if said is None:
        return answer
    expected = "text, messages or None"
    expect(isinstance(said, str | tuple | list) and said, f"step of prompt {prompt.id}", said, expected)
    ids = tokenizer.encode(said) if isinstance(said, str) else tokenizer.encode_turn(said, answer.finish == EOS)
    if len(answer.tokens) + len(ids) >= max_tokens:
        return replace(answer, finish=LENGTH)
    more = lambda x, value: np.concatenate([x, np.full((len(ids), *x.shape[1:]), value, x.dtype)])
    before = np.zeros(len(answer.tokens), bool) if answer.said is None else answer.said
    return Answer(
        tokens=np.concatenate([answer.tokens, np.array(ids, np.int32)]),
        logp=more(answer.logp, 0.0),
        versions=more(answer.versions, answer.versions[-1]),
        finish=CANCELLED,
        experts=None if answer.experts is None else more(answer.experts, np.iinfo(answer.experts.dtype).max),  # none
        said=more(before, True),
    )


def generate(engine: Any, step: Step | None, prompts: Sequence[Prompt], requests: Sequence[Request]) -> list[Group]:
    """The groups of all requests, those of `prompts`, in their order."""
    queue, prompt_of = deque(requests), dict(zip((r.draw for r in requests), prompts, strict=True))
    drawn = sample(engine, step, lambda r: prompt_of[r.draw], lambda: queue.popleft() if queue else None)
    groups = {id(r): group for r, group in drawn}
    return [groups[id(request)] for request in requests]
