"""Keys and values while decoding: a prompt's once, each answer's own beside them, and attention over the two.

N answers (rows) are decoded at once, and R prompts (prefixes) are held. Rows and prefixes are split over D shards; a
row and its prefix lie in the same shard. A prefix has L lanes, one for each row that reads it.
S and T are tokens of prefix and answer, K key-value heads, h query heads for each of them, C their width.
Keys are stored transposed, tokens last, which is how the products want them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import MASKED, Attend
from jaxrl_llm.sampler.quantize import Quantized, quantize

WIDTH_OF_KEYS, WIDTH_OF_VALUES = 2, 3  # axes


Stored = Array | Quantized  # keys [..., C, n] or values [..., n, C] of n tokens


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    prefix_k: Stored  # [R,K,C,S]
    prefix_v: Stored  # [R,K,S,C]
    own_k: Stored  # [N,K,C,T]
    own_v: Stored  # [N,K,T,C]


class View(NamedTuple):
    """What the rows may see in one step."""

    prefix_lengths: Int[Array, " R"]
    lanes: Int[Array, "D R/D L"]  # the row in each lane, numbered within its shard; any row where a lane is empty
    place: Int[Array, "D N/D"]  # each row's lane, r·L + l within its shard
    column: Int[Array, ""]  # where this step's keys and values are written
    visible: Bool[Array, "N T"]  # columns of a row's own tokens, this step's included


def stored(x: Array, dtype: str, axis: int) -> Stored:
    """x as the cache keeps it. axis: that of the width; in int8 each token and head has a scale."""
    return quantize(x, axis) if dtype == "int8" else x.astype(dtype)


def empty(shape: tuple[int, ...], dtype: str, axis: int) -> Stored:
    """Room for keys or values of this shape."""
    room = jnp.zeros(shape, dtype)
    return Quantized(room, jnp.zeros([1 if i == axis else n for i, n in enumerate(shape)])) if dtype == "int8" else room


def _attended(
    q: Float[Array, "B K q C"], k: Stored, v: Stored, seen: Bool[Array, "#B 1 #q n"]
) -> tuple[Float[Array, "B K q C"], Float[Array, "B K q 1"], Float[Array, "B K q 1"]]:
    """Weighted sum of values, sum of weights and the largest logit: softmax's parts, to be merged with others'."""
    (k, k_scale), (v, v_scale) = (x if isinstance(x, Quantized) else (x, None) for x in (k, v))
    logits = jnp.einsum("bkqc,bkcn->bkqn", q, k.astype(q.dtype)).astype(jnp.float32)
    if k_scale is not None:
        logits = logits * k_scale  # [B,K,1,n]
    logits = jnp.where(seen, logits, MASKED)
    top = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if v_scale is not None:
        weights = weights * v_scale.swapaxes(2, 3)
    out = jnp.einsum("bkqn,bknc->bkqc", weights.astype(q.dtype), v.astype(q.dtype))
    return out.astype(jnp.float32), total, top


def _over_prefix(q: Float[Array, "N K h C"], cache: LayerCache, view: View) -> tuple[Array, Array, Array]:
    """The rows' queries gathered into their prefixes' lanes, so that a prefix is read once for all of them."""
    shards, prefixes, lanes = view.lanes.shape
    kv, heads, width = q.shape[1:]
    q = jax.vmap(lambda x, i: x[i])(q.reshape(shards, -1, *q.shape[1:]), view.lanes)  # [D,R/D,L,K,h,C]
    q = q.reshape(-1, lanes, kv, heads, width).swapaxes(1, 2).reshape(-1, kv, lanes * heads, width)
    size = room(cache.prefix_v)
    seen = jnp.arange(size)[None] < view.prefix_lengths[:, None]
    parts = _attended(q, cache.prefix_k, cache.prefix_v, seen[:, None, None])

    def back(x: Array) -> Array:
        x = x.reshape(-1, kv, lanes, heads, x.shape[-1]).swapaxes(1, 2).reshape(shards, prefixes * lanes, kv, heads, -1)
        x = jax.vmap(lambda x, i: x[i])(x, view.place)
        return x.reshape(-1, kv, heads, x.shape[-1])

    return tuple(back(x) for x in parts)


def room(values: Stored) -> int:
    """Tokens that there is room for."""
    return jax.tree.leaves(values)[0].shape[2]


def kind(x: Stored) -> str:
    return jax.tree.leaves(x)[0].dtype.name


def decode(view: View) -> Attend:
    """One token for every row, its keys and values written to the row's own cache."""

    def write(old: Stored, new: Array, axis: int, tokens: int) -> Stored:
        put = lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, view.column, axis=tokens)
        return jax.tree.map(put, old, stored(new, kind(old), axis))

    def attend(q: Array, k: Array, v: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
        rows, _, heads, width = q.shape  # [N,1,H,C]
        kv = k.shape[2]
        q = q * width**-0.5
        cache = cache._replace(
            own_k=write(cache.own_k, k[:, 0, :, :, None], WIDTH_OF_KEYS, 3),
            own_v=write(cache.own_v, v[:, 0, :, None], WIDTH_OF_VALUES, 2),
        )
        q = q.reshape(rows, kv, heads // kv, width)
        out, total, top = _over_prefix(q, cache, view)
        own_out, own_total, own_top = _attended(q, cache.own_k, cache.own_v, view.visible[:, None, None])
        most = jnp.maximum(top, own_top)
        a, b = jnp.exp(top - most), jnp.exp(own_top - most)
        out = (out * a + own_out * b) / (total * a + own_total * b)
        return out.astype(q.dtype).reshape(rows, 1, heads, width), cache

    return attend
