"""The in-process sampling loop: fill slots, decode, harvest, fill again. No threads; the same program on every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import sharding, types, weights
from jaxrl_llm.batching import bucket
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import core
from jaxrl_llm.sampler.sampling import Sampling

MIN_COLUMNS = 32


@dataclass(frozen=True)
class Engine:
    """A sampler: the weights that it holds and how it draws. Slots hold one prompt and all its answers."""

    model: ModelConfig
    tokenizer: Tokenizer
    sampling: Sampling
    weights: weights.SamplerWeights
    max_tokens: int  # per answer, the end-of-sequence token included
    stop: tuple[str, ...] = ()
    slots: int = 0  # prompts decoded at once; 0: all that are asked for
    tokens_per_call: int = 32  # decoding steps between two looks from the host
    mesh: Mesh | None = None


class Samples(NamedTuple):
    """Answers in the order of their prompts (row p·G + g), on the host. Padding is 0."""

    tokens: np.ndarray  # int32 [B,T]
    logp: np.ndarray  # float32 [B,T]
    lengths: np.ndarray  # int32 [B]
    finish: np.ndarray  # str [B]
    texts: tuple[str, ...]  # B, without the end-of-sequence token


def push_weights(engine: Engine, params: Any) -> Engine:
    """The same engine with the learner's parameters, one version on."""
    return replace(engine, weights=weights.push(engine.model, params, engine.mesh, engine.weights))


_prefill = jax.jit(core.prefill, static_argnums=0)
_init = jax.jit(core.init_state, static_argnums=(0, 1, 2, 3, 4))
_insert = jax.jit(core.insert, donate_argnums=0)
_grow = jax.jit(core.grow, static_argnums=1)  # larger buffers: nothing to donate
_decode = jax.jit(core.decode_k, static_argnums=(0, 1, 2), donate_argnums=4)


@partial(jax.jit, static_argnums=2)
def _keys(seed: jax.Array, draws: jax.Array, group: int) -> jax.Array:
    """A key per answer: fold_in(seed, draw, sample id). Position is folded in by the decoding loop."""
    fold = jax.random.fold_in
    answer = lambda draw: jax.vmap(lambda g: fold(fold(jax.random.key(seed), draw), g))(jnp.arange(group))
    return jax.vmap(answer)(draws)


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], group: int, *, seed: int, draws: Sequence[int]
) -> Samples:
    """`group` answers to each prompt (token ids). An answer depends on its prompt, seed, draw and number alone.

    Each prompt is prefilled once. When there are more prompts than slots, a slot is filled again as soon as its group
    is done. Raises ValueError for a prompt without tokens.
    """
    empty = [i for i, p in enumerate(prompts) if len(p) == 0]
    if empty:
        raise ValueError(f"prompts[{empty[0]}] has no tokens; expected at least 1")
    slots = sharding.rows(min(engine.slots or len(prompts), len(prompts)), engine.mesh)
    size = bucket(max(len(p) for p in prompts) - 1)
    columns = bucket(engine.max_tokens, MIN_COLUMNS)
    state = _init(engine.model, slots, group, size, min(columns, MIN_COLUMNS))
    waiting, owner = list(range(len(prompts))), np.full(slots, -1)
    harvest: dict[int, list[tuple[np.ndarray, np.ndarray, str]]] = {}
    keys = _keys(jnp.uint32(seed), jnp.asarray(np.asarray(draws, np.uint32)), group)
    step = 0

    while waiting or (owner >= 0).any():
        free = np.flatnonzero(owner < 0)[: len(waiting)]
        if len(free):
            chosen, waiting = waiting[: len(free)], waiting[len(free) :]
            owner[free] = chosen
            state = _fill(engine, state, [prompts[i] for i in chosen], keys, chosen, free, size, slots)
        have = state.tokens.shape[-1]
        if have < columns and step + engine.tokens_per_call > have:
            state = _grow(state, min(columns, bucket(int(step) + engine.tokens_per_call, MIN_COLUMNS)))
        static = (engine.model, engine.sampling, engine.tokenizer.eos_ids)
        state = _decode(*static, engine.weights.params, state, jnp.int32(engine.tokens_per_call))
        step, live, start, lengths = jax.device_get((state.step, state.live, state.start, state.lengths))
        done = ~live.any(axis=1) & (owner >= 0)
        if not (done.any() or engine.stop):
            continue
        rows = _Rows(*jax.device_get((state.tokens, state.logp)), start, lengths)
        stopped = _find_stops(engine, rows, owner)
        if stopped:
            live = live.copy()
            for r, g in stopped:
                live[r, g] = False
            state = replace(state, live=jnp.asarray(live))
            done = ~live.any(axis=1) & (owner >= 0)
        for r in np.flatnonzero(done):
            harvest[owner[r]] = [_finish(engine, rows, r, g, stopped.get((r, g))) for g in range(group)]
            owner[r] = -1
    return _collect(engine, [answer for p in range(len(prompts)) for answer in harvest[p]])


def _fill(engine: Engine, state: Any, prompts: Any, keys: Any, chosen: Any, free: Any, size: int, slots: int) -> Any:
    """Prefill `prompts` and insert them into the slots `free`; padded to a power of two to keep shapes few."""
    n = sharding.rows(min(slots, 1 << (len(prompts) - 1).bit_length()), engine.mesh)
    prefix = np.zeros((n, size), np.int32)
    lengths, last, where = np.zeros(n, np.int32), np.zeros(n, np.int32), np.full(n, slots, np.int32)
    rows = np.zeros(n, np.int32)
    for i, (tokens, slot, row) in enumerate(zip(prompts, free, chosen, strict=True)):
        prefix[i, : len(tokens) - 1] = tokens[:-1]
        lengths[i], last[i], where[i], rows[i] = len(tokens) - 1, tokens[-1], slot, row
    caches = _prefill(engine.model, engine.weights.params, prefix)
    return _insert(state, caches, lengths, last, keys[rows], np.full(n, engine.max_tokens, np.int32), where)


class _Rows(NamedTuple):
    """Host copy of what the slots have written, by column."""

    tokens: np.ndarray  # [R,G,T]
    logp: np.ndarray  # [R,G,T]
    start: np.ndarray  # [R]
    lengths: np.ndarray  # [R,G]

    def answer(self, r: int, g: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        columns = (self.start[r] + np.arange(n)) % self.tokens.shape[-1]
        return self.tokens[r, g, columns], self.logp[r, g, columns]


def _find_stops(engine: Engine, rows: _Rows, owner: np.ndarray) -> dict[tuple[int, int], int]:
    """Answers that hold a stop string → their length in tokens up to the one that completes it."""
    found = {}
    if not engine.stop:
        return found
    for r in np.flatnonzero(owner >= 0):
        for g in range(rows.lengths.shape[1]):
            tokens = rows.answer(r, g, rows.lengths[r, g])[0]
            if tokens[-1] in engine.tokenizer.eos_ids:
                tokens = tokens[:-1]  # its own text, "</s>" perhaps, stops nothing
            holds = lambda n, tokens=tokens: any(s in engine.tokenizer.decode(tokens[:n]) for s in engine.stop)
            if holds(len(tokens)):
                found[r, g] = next(n for n in range(1, len(tokens) + 1) if holds(n))
    return found


def _finish(engine: Engine, rows: _Rows, r: int, g: int, stop: int | None) -> tuple[np.ndarray, np.ndarray, str]:
    tokens, logp = rows.answer(r, g, rows.lengths[r, g] if stop is None else stop)
    if stop is not None:
        return tokens, logp, types.STOP
    return tokens, logp, types.EOS if tokens[-1] in engine.tokenizer.eos_ids else types.LENGTH


def _collect(engine: Engine, answers: list[tuple[np.ndarray, np.ndarray, str]]) -> Samples:
    lengths = np.array([len(a[0]) for a in answers], np.int32)
    tokens = np.zeros((len(answers), lengths.max()), np.int32)
    logp = np.zeros(tokens.shape, np.float32)
    for i, (t, l, _) in enumerate(answers):
        tokens[i, : len(t)], logp[i, : len(l)] = t, l
    finish = np.array([a[2] for a in answers])
    texts = tuple(
        engine.tokenizer.decode(t[: n - 1] if f == types.EOS else t[:n])
        for t, n, f in zip(tokens, lengths, finish, strict=True)
    )
    return Samples(tokens, logp, lengths, finish, texts)
