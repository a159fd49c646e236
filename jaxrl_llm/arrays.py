"""What a step learns from and what it changes, on the mesh. The letters of the axes are those of types.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray


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
