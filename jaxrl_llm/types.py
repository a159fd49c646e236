"""The nouns of the project and its vocabulary of axes.

Axes
----
P  prompts in a batch            G  responses per prompt (the group)
B  responses in a batch, P·G, row-major by prompt: row p·G + g is response g of prompt p
S  prompt tokens (padded)        T  response tokens (padded)
D  model width                   V  vocabulary
L  layers                        H, K  query heads, key-value heads
E  experts of a layer            K  of a router: experts of a token

Lengths are in tokens, log-probs and entropies in nats, times in seconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

# Why a response ended. TRUNCATED means LENGTH and nothing else.
EOS, STOP, LENGTH, CANCELLED = "eos", "stop", "length", "cancelled"


@dataclass(frozen=True)
class Prompt:
    """One problem. `text` is what the policy sees; `answer` and `meta` are for the verifier.

    `question` is the part of `text` that a template stands around: only outside of it a special token's name means
    that token. None: nothing does, all of `text` is the question. With `messages`, each with a role and its content,
    the policy sees those instead, in its tokenizer's chat template; `text` is what logs and verifiers see.
    """

    id: int
    text: str
    answer: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    question: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Reward:
    """What a verifier says of one response.

    `value` is what the policy is trained on; accuracy, group filters and length splits use `correct`.
    """

    value: float
    correct: bool
    parsed: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    outcome: Literal["scored", "timed_out", "out_of_memory", "crashed"] = "scored"  # of the verifier itself


@dataclass(frozen=True)
class Task:
    """Problems, a verifier and, for tasks a small model is primed on, traces of reasoning.

    `reward(prompt, response_text, finish) -> Reward` gets the response without its end-of-sequence token.
    `trace(prompt, behaviour, seed) -> str` writes a worked response in one of `behaviours`.
    """

    train: Sequence[Prompt]
    test: Sequence[Prompt]
    reward: Callable[[Prompt, str, str], Reward]
    trace: Callable[[Prompt, str, int], str] | None = None
    behaviours: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rollouts:
    """Groups of sampled responses, on the host (NumPy). A response's tokens include its end-of-sequence token."""

    prompts: tuple[Prompt, ...]  # P
    prompt_tokens: np.ndarray  # int32 [P,S], right-padded
    prompt_lengths: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [B,T], right-padded
    sampler_logp: np.ndarray  # float32 [B,T], of the distribution really drawn from
    lengths: np.ndarray  # int32 [B]
    finish: np.ndarray  # str [B]
    texts: tuple[str, ...]  # B
    draws: np.ndarray  # int64 [P]: how many prompts had been handed out before this one
    versions: np.ndarray | None = None  # int32 [B,T]: the sampler's weights that drew each token, right-padded
    indices: np.ndarray | None = None  # int64 [P]: the prompts' places in `Task.train`; None: not of the training side
    experts: np.ndarray | None = None  # [B,T,L,K]: where the sampler's routers sent each token, see `Routing`

    @property
    def group_size(self) -> int:
        return len(self.texts) // len(self.prompts)


@dataclass(frozen=True)
class Optimizer:
    """The settings of AdamW or Adafactor with warm-up, a schedule of the learning rate and clipping by the global norm.

    Adafactor has no use for b1, b2, eps and moments_dtype.
    """

    lr: float = 2e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # linear and cosine are 0 once the steps are over
    warmup: int = 0  # optimiser steps from 0 to lr
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    kind: Literal["adamw", "adafactor"] = "adamw"
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # in which AdamW keeps both: 8 or 4 bytes a parameter


def expect(ok: Any, name: str, value: object, expected: str) -> None:
    """ValueError that names an argument, its value and what was expected, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def nearest(name: str, known: Sequence[str]) -> str:
    """For an error message: the known name that is meant, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
