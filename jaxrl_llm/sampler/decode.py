"""The in-process sampling loop: rows are filled, decoded, harvested, filled again, all in the caller's thread."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import weights
from jaxrl_llm.sampler.pages import make_slots
from jaxrl_llm.sampler.requests import Group, NextRequest, PartialAnswer, Request, check
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.slots import ActiveGroup, check_sizes


@dataclass(frozen=True)
class LocalEngine:
    """A sampler in this process: the weights that it holds, and how it draws unless a request says otherwise."""

    model: ModelConfig
    tokenizer: Tokenizer
    weights: weights.SamplerWeights
    sampling: Sampling = Sampling()
    max_tokens: int = 256  # per answer, the end-of-sequence token included
    stop: tuple[str, ...] = ()
    slots: int = 64  # answers decoded at once
    max_prompt_tokens: int = 0  # 0: any
    tokens_per_call: int = 32  # decoding steps between two looks from the host
    quantized: str = ""  # int8 or int4: how pushed weights are kept
    kv_dtype: str = ""  # float32, bfloat16 or int8; that of the activations if left out
    # One shape, and no row filled before all answers are done: `forced_logprobs` gives the same log-probs bit for bit.
    exact: bool = False
    mesh: Mesh | None = None
    record_experts: bool = False  # answers have the choices of a mixture of experts' routers, `Answer.experts`
    cache: str = "auto"  # of keys and values: ring, see cache.py; pages, see pages.py; auto, see `pages.make_slots`
    kv_tokens: int = 0  # that pages hold; 0: as many as the device has room for, at most those of all slots
    page_tokens: int = 0  # of a page; 0: by the longest answer
    prefill_tokens: int = 4096  # of prompts in one call, with pages
    counts: Counter = field(default_factory=Counter, compare=False)  # yields: answers that had to make room

    __post_init__ = check_sizes

    def sample(
        self,
        next_request: NextRequest,
        latest: Callable[[], weights.SamplerWeights] | None = None,
        script: Callable[[Request, int], tuple[int, ...]] = lambda request, number: (),
    ) -> Iterator[tuple[Request, Group]]:
        """Groups as they are done. A row that is done is filled at once, with what `next_request` gives.

        `latest`: the weights to use, asked before each call, so that they may change while answers are being drawn.
        `script`: the tokens that an answer of a request shall have instead of drawn ones, if any.
        """
        slots, latest = make_slots(self), latest or (lambda: self.weights)
        waiting: deque[PartialAnswer] = deque()
        longest_prompt, longest = self.max_prompt_tokens or None, self.max_tokens if self.exact else None
        while True:
            while slots.busy + len(waiting) < self.slots and (request := next_request()) is not None:
                vocab_size = self.model.vocab_size
                check(request, vocab_size=vocab_size, max_prompt_tokens=longest_prompt, max_tokens=longest)
                answers = [PartialAnswer(request, g, script(request, g)) for g in range(request.group)]
                group = ActiveGroup(request, answers)
                waiting += [answer for answer in answers if answer.open]
                if not group.is_open:
                    yield request, group.result()
            if not waiting and not slots.busy:
                return
            slots.fill(latest(), waiting)
            self.counts["yields"] += slots.yielded
            for group in slots.step(latest()):
                yield group.request, group.result()

    def pushed(self, params: Any) -> LocalEngine:
        """The same engine with the learner's parameters, one version on."""
        new = weights.push(self.model, params, self.mesh, version=self.version + 1, quantized=self.quantized)
        jax.block_until_ready(new.params)
        return replace(self, weights=new)

    def probe(self, request: Request) -> dict[str, Group]:
        """The answer to a request of each sampler, by its name."""
        return {"in this process": generate(self, [request])[0]}

    def close(self) -> None:
        """Nothing to be closed in this process."""

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def bytes(self) -> int:
        """Of the weights that it holds."""
        return self.weights.bytes


def push_weights(engine: Any, params: Any) -> Any:
    """An engine with the learner's parameters, one version on."""
    return engine.pushed(params)


def generate(engine: Any, requests: Sequence[Request], **options: Any) -> list[Group]:
    """The groups of all requests, in their order. options: of the engine's `sample`."""
    queue = deque(requests)
    # One request may be there twice: its groups are equal.
    groups = {id(r): group for r, group in engine.sample(lambda: queue.popleft() if queue else None, **options)}
    return [groups[id(request)] for request in requests]


def forced_logprobs(engine: LocalEngine, requests: Sequence[Request], groups: Sequence[Group]) -> list[np.ndarray]:
    """Log-probs of the tokens in `groups`, from the programs that draw: one array for each answer, in order.

    With `exact` and the weights that have drawn the tokens they are the recorded log-probs, bit for bit.
    """
    asked = [replace(r, begun=(), budget=0, stop=()) for r in requests]
    given = {id(r): group for r, group in zip(asked, groups, strict=True)}
    script = lambda request, number: tuple(given[id(request)][number].tokens.tolist())
    return [answer.logp for group in generate(engine, asked, script=script) for answer in group]
