"""The sampler's pure core: prefill a prompt, insert it into a slot, decode k tokens for every slot.

A slot holds one prompt and its G answers. The prompt's keys and values are computed once and read by all of them.
Time is global: every slot writes decoding step s into column s mod T of its caches, so a write is one contiguous slice
however long ago the slot was filled; `start` remembers when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxrl_llm.logprobs import tempered_logits
from jaxrl_llm.models import attention, transformer
from jaxrl_llm.models.attention import LayerCache
from jaxrl_llm.sampler.sampling import Sampling, sample
from jaxrl_llm.sharding import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Everything that decoding reads and writes. R slots, G answers each, T columns."""

    caches: tuple[LayerCache, ...]  # a layer each
    prefix_lengths: Int[Array, " R"]
    start: Int[Array, " R"]  # decoding step at which the slot was filled
    limit: Int[Array, " R"]  # tokens an answer may have
    token: Int[Array, "R G"]  # the next input
    live: Bool[Array, "R G"]
    keys: Key[Array, "R G"]  # one per answer; position is folded in for each token
    step: Int[Array, ""]
    lengths: Int[Array, "R G"]
    tokens: Int[Array, "R G T"]  # by column
    logp: Float[Array, "R G T"]  # by column


def _blocks(config: transformer.ModelConfig, params: Any) -> tuple[transformer.Transformer, list[transformer.Block]]:
    """The model and its blocks one by one, for params whose layers are a list (see `weights.push`)."""
    model = nnx.eval_shape(lambda: transformer.Transformer(config, nnx.Rngs(0)))
    graph = nnx.split(model.layers)[0]
    blocks = [nnx.merge(graph, layer) for layer in params["layers"]]
    del model.layers
    nnx.update(model, {k: v for k, v in params.items() if k != "layers"})
    return model, blocks


def prefill(config: transformer.ModelConfig, params: Any, prefix: Int[Array, "N S"]) -> tuple[tuple[Array, Array], ...]:
    """Keys and values [N,K,S,C] of each layer for prompts without their last token, right-padded."""
    model, blocks = _blocks(config, params)
    x = model.embedded(prefix)
    angles = transformer.rope(jnp.broadcast_to(jnp.arange(prefix.shape[1]), prefix.shape), config)
    caches = []
    for block in blocks:
        x, cache = block(x, angles, attention.prefill, None)
        caches.append(cache)
    return tuple(caches)


def init_state(config: transformer.ModelConfig, slots: int, group: int, prefix: int, columns: int) -> DecodeState:
    """Empty slots for prompts of up to `prefix` + 1 tokens, with room for `columns` decoding steps."""
    shape = (slots, group)
    zeros = lambda *s, dtype=jnp.int32: constrain(jnp.zeros((slots, *s), dtype), "batch")
    kv, width = config.kv_heads, config.head_width
    prefix_kv = lambda: constrain(jnp.zeros((slots, kv, prefix, width), config.dtype), "batch", "kv_heads")
    suffix_kv = lambda: constrain(jnp.zeros((*shape, kv, columns, width), config.dtype), "batch", None, "kv_heads")
    cache = lambda: LayerCache(prefix_kv(), prefix_kv(), suffix_kv(), suffix_kv())
    return DecodeState(
        caches=tuple(cache() for _ in range(config.layers)),
        prefix_lengths=zeros(),
        start=zeros(),
        limit=zeros(),
        token=zeros(group),
        live=zeros(group, dtype=bool),
        keys=constrain(jnp.broadcast_to(jax.random.key(0), shape), "batch"),
        step=jnp.int32(0),
        lengths=zeros(group),
        tokens=zeros(group, columns),
        logp=zeros(group, columns, dtype=jnp.float32),
    )


def insert(
    state: DecodeState,
    prefix_caches: tuple[tuple[Array, Array], ...],
    prefix_lengths: Int[Array, " N"],
    last_token: Int[Array, " N"],
    keys: Key[Array, "N G"],
    limit: Int[Array, " N"],
    slots: Int[Array, " N"],
) -> DecodeState:
    """Put N prefilled prompts into `slots`; a slot number past the end is dropped (padding)."""
    put = lambda old, new: old.at[slots].set(new, mode="drop")
    caches = tuple(
        c._replace(prefix_k=put(c.prefix_k, k), prefix_v=put(c.prefix_v, v))
        for c, (k, v) in zip(state.caches, prefix_caches, strict=True)
    )
    shape = keys.shape
    return replace(
        state,
        caches=caches,
        prefix_lengths=put(state.prefix_lengths, prefix_lengths),
        start=put(state.start, jnp.broadcast_to(state.step, slots.shape)),
        limit=put(state.limit, limit),
        token=put(state.token, jnp.broadcast_to(last_token[:, None], shape)),
        live=put(state.live, jnp.ones(shape, bool)),
        keys=put(state.keys, keys),
        lengths=put(state.lengths, jnp.zeros(shape, jnp.int32)),
    )


def grow(state: DecodeState, columns: int) -> DecodeState:
    """The same state with room for more columns; legal until the columns first wrap around."""
    pad = lambda x, axis: jnp.pad(x, [(0, columns - n if i == axis else 0) for i, n in enumerate(x.shape)])
    caches = tuple(c._replace(suffix_k=pad(c.suffix_k, 3), suffix_v=pad(c.suffix_v, 3)) for c in state.caches)
    return replace(state, caches=caches, tokens=pad(state.tokens, 2), logp=pad(state.logp, 2))


def decode_k(
    config: transformer.ModelConfig,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    params: Any,
    state: DecodeState,
    steps: Int[Array, ""],
) -> DecodeState:
    """Up to `steps` more tokens for every live answer, in one loop that ends early when none is left.

    Log-probs come from the same fp32 logits that the token is drawn from. An answer ends with an end-of-sequence token
    (kept) or at its limit; finished answers ride along without effect until their slot is filled again.
    """
    model, blocks = _blocks(config, params)
    head = model.head_matrix()
    slots, group, columns = state.tokens.shape

    def one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        i, s = carry
        count = s.step - s.start  # tokens that a live answer of this slot has
        column = s.step % columns
        age = (column - jnp.arange(columns)) % columns
        visible = jnp.broadcast_to((age[None] <= count[:, None])[:, None], (slots, group, columns))
        attend = attention.decode(s.prefix_lengths, column, visible)
        positions = jnp.broadcast_to((s.prefix_lengths + count)[:, None], s.token.shape)
        angles = transformer.rope(positions, config)
        x, caches = model.embedded(s.token), []
        for block, cache in zip(blocks, s.caches, strict=True):
            x, cache = block(x, angles, attend, cache)
            caches.append(cache)
        with jax.named_scope("sample"):
            hidden = model.norm(x).reshape(slots * group, -1)
            logits = tempered_logits(hidden, head, sampling.temperature or 1.0)
            counts = jnp.broadcast_to(count[:, None], s.token.shape)
            keys = jax.vmap(jax.random.fold_in)(s.keys.reshape(-1), counts.reshape(-1))
            token, logp = (y.reshape(slots, group) for y in sample(logits, keys, sampling))
        lengths = jnp.where(s.live, counts + 1, s.lengths)
        ended = jnp.isin(token, jnp.asarray(eos_ids, jnp.int32)) | (lengths >= s.limit[:, None])

        def write(old: Array, new: Array) -> Array:
            # Live answers alone: columns go round, and a finished answer may not have been fetched yet.
            new = jnp.where(s.live, new, jax.lax.dynamic_index_in_dim(old, column, axis=2, keepdims=False))
            return jax.lax.dynamic_update_slice_in_dim(old, new[:, :, None], column, axis=2)

        return i + 1, replace(
            s,
            caches=tuple(caches),
            token=token,
            live=s.live & ~ended,
            step=s.step + 1,
            lengths=lengths,
            tokens=write(s.tokens, token),
            logp=write(s.logp, logp),
        )

    return jax.lax.while_loop(lambda c: (c[0] < steps) & c[1].live.any(), one, (jnp.int32(0), state))[1]
