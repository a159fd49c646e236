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
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray

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


class Routing(NamedTuple):
    """Which K experts each token goes through in every layer, [B,T,L,K]: ids in uint8 or uint16, in no order.

    Position t is the input from which token t is predicted. Behind an answer's end the sampler's hold no expert's id,
    the learner's anything.
    """

    sampler: jax.Array | None = None  # the choice of the sampler's routers
    old: jax.Array | None = None  # that of the learner's, before the batch's first update
    old_logp: jax.Array | None = None  # float32: log-probs of the latter in nats
    replay: jax.Array | None = None  # one of the two, to be taken instead of the live routers' choice


@dataclass(frozen=True)
class Layout:
    """How answers lie in a row of the model: see learner/packing.py."""

    length: int  # T, of every array [B,T]
    prefix: int = 0  # tokens that a grouped row has for its prompt
    group: int = 0  # answers in a grouped row; 0: rows are packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInput:
    """What the model reads of a micro-batch, and where in it the generated tokens are. Made by learner/packing.py.

    R rows of N tokens lie on D shards of the mesh. A shard has r = R/D rows, room for b answers and for n generated
    tokens. Arrays here have leading axes of their own for the mini-batch and the micro-batch, [U,M,…].
    """

    tokens: jax.Array  # int32 [R,N]
    positions: jax.Array  # int32 [R,N]
    segments: jax.Array  # int32: packed [R,N], 1, 2, … and 0 for padding; grouped [R], the prompt's tokens
    take: jax.Array  # int32 [D,n]: places of the generated tokens in the shard's r·N tokens
    untake: jax.Array  # int32 [D,r·N]: its inverse, n where no token is generated
    targets: jax.Array  # int32 [D,n]
    put: jax.Array  # int32 [D,b·T]: for each token of each answer its place in n; n behind the answer's end
    unput: jax.Array  # int32 [D,n]: its inverse
    answers: jax.Array  # int32 [D·b]: numbers of the answers in the mini-batch, its size where there is none
    layout: Layout = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A batch as the model reads it: U mini-batches of M micro-batches."""

    inputs: ModelInput
    where: jax.Array  # int32 [U,B/U]: place of an answer among the M·D·b of its mini-batch, M·D·b if it has none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What a step, or one mini-batch of it, learns from, on the mesh.

    Position t of an answer's arrays is its t-th generated token; how the model gets there from its rows is `rows`'
    concern. Answers at the end may only fill up the batch. Optional arrays are None when the algorithm does not need
    them.
    """

    rows: Rows | None
    mask: jax.Array  # bool [B,T]: generated tokens that train
    adv: jax.Array  # float32 [B,T]
    valid: jax.Array  # bool [B]: not only there to fill up the batch
    sampler_logp: jax.Array | None = None  # float32 [B,T]
    old_logp: jax.Array | None = None  # float32 [B,T]; None: this is the batch's only update, old is the live one
    ref_logp: jax.Array | None = None  # float32 [B,T]
    teacher_logp: jax.Array | None = None  # float32 [B,T]
    log_router_ratio: jax.Array | None = None  # float32 [B,T], nats; None: no routers, or none that could have moved
    routing: Routing | None = None  # of a mixture of experts
    selected: jax.Array | None = None  # bool [B,T]: tokens chosen for the loss, over the whole optimiser batch
    correct: jax.Array | None = None  # bool [B]
    values: jax.Array | None = None  # float32 [B,T]: the critic's, before its updates
    returns: jax.Array | None = None  # float32 [B,T]: what the critic learns
    weights: jax.Array | None = None  # float32 [B,T], Σ over the optimiser batch of weights·x is the loss
    nll_weights: jax.Array | None = None  # float32 [B,T], of −logp on correct responses
    critic_rows: Rows | None = None  # in the critic's mini-batches
    group_size: int = field(default=1, metadata={"static": True})  # G

    @property
    def replay(self) -> jax.Array | None:
        return None if self.routing is None else self.routing.replay


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that learning reads and writes; a plain pytree, of which a step donates the parts it changes."""

    params: Any
    opt_state: Any
    step: jax.Array  # int32 []: optimiser steps taken
    critic: TrainState | None = None  # the value function's
    memory: Any = None  # what the advantage remembers of each prompt
    reference: Any = None  # the reference policy's parameters, only where `algorithm.kl_refresh` replaces them


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
