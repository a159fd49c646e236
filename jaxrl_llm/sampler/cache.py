"""Keys and values while decoding: a prompt's once, each answer's own beside them, and attention over the two.

    prefixes: a prompt, once      lanes: rows      suffixes: an answer's own tokens, in a ring of T = 8 columns
                                  that read it               column   0  1  2  3  4  5  6  7
    prefix 0  | W h a t ? . . |   [ 0 | 3 | - ] <------ row 0        a2 a3 a4 a5  .  . a0 a1
    prefix 1  | S u m   o f 2 |   [ 1 | - | - ] <---+-- row 3        d3 d4 d5 d6  . d0 d1 d2
                                                    +-- row 1         .  . b0 b1  .  .  .  .
                                                        row 2 (free)  .  .  .  .  .  .  .  .
                                                        the clock: step 11 writes column 11 mod 8 = 3 of every row

One clock serves all rows, so that a step writes one contiguous slice. Row 0 was filled at step 6 and row 1 at step 10;
what a row may see follows from when it was filled. Every prefix has L lanes, one for each row that reads it, "-" where
there is none: gathered into lanes, the queries of a group meet their prompt's keys in one product.
On a mesh, prefixes and rows are split alike over D shards of its batch axes; a row lies in the shard of its prefix.

Sizes: N rows, R prefixes of S tokens, T columns, K key-value heads, h query heads for each of them, C their width.
Keys are stored transposed, tokens last, which is how the products want them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import MASKED, Attend
from jaxrl_llm.models.quantize import Quantized, quantize

KEYS_WIDTH, KEYS_TOKENS = 2, 3  # axes of keys [·,K,C,tokens]
VALUES_WIDTH, VALUES_TOKENS = 3, 2  # axes of values [·,K,tokens,C]

Cached = Array | Quantized  # keys or values, in a float dtype or in int8 with scales
Layer = tuple[Cached, Cached]  # of one layer: keys [·,K,C,tokens], values [·,K,tokens,C]


class View(NamedTuple):
    """What the rows may see in one step."""

    prefix_lengths: Int[Array, " R"]
    lanes: Int[Array, "D R/D L"]  # the row in each lane, numbered within its shard; any row where a lane is empty
    lane_of_row: Int[Array, "D N/D"]  # prefix·L + lane, the prefix numbered within its shard
    column: Int[Array, ""]  # where this step's keys and values are written
    visible: Bool[Array, "N T"]  # columns with tokens of the row's answer, this step's included


def in_dtype(x: Array, dtype: str, width_axis: int) -> Cached:
    """Keys or values as a cache of this dtype keeps them; in int8 each token and head has a scale."""
    return quantize(x, width_axis) if dtype == "int8" else x.astype(dtype)


def like(old: Cached, new: Array, width_axis: int) -> Cached:
    """New keys or values as the cache keeps the old ones."""
    return in_dtype(new, jax.tree.leaves(old)[0].dtype.name, width_axis)


def token_capacity(values: Cached) -> int:
    """S of prefixes, T of suffixes."""
    return jax.tree.leaves(values)[0].shape[VALUES_TOKENS]


def _softmax_parts(
    q: Float[Array, "B K q C"], k: Cached, v: Cached, visible: Bool[Array, "#B 1 #q n"]
) -> tuple[Float[Array, "B K q C"], Float[Array, "B K q 1"], Float[Array, "B K q 1"]]:
    """Σ exp(logit − top)·value, Σ exp(logit − top) and top, the largest logit: to be merged with those of other keys.

    Products of short formats are summed and kept in fp32, or the logits of a long prompt would be rounded.
    """
    (k, k_scale), (v, v_scale) = (x if isinstance(x, Quantized) else (x, None) for x in (k, v))
    logits = jnp.einsum("bkqc,bkcn->bkqn", q, k.astype(q.dtype), preferred_element_type=jnp.float32)
    if k_scale is not None:
        logits = logits * k_scale  # [B,K,1,n]
    logits = jnp.where(visible, logits, MASKED)
    top = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    if v_scale is not None:
        weights = weights * v_scale.swapaxes(2, 3)
    weights = weights.astype(q.dtype)
    out = jnp.einsum("bkqn,bknc->bkqc", weights, v.astype(q.dtype), preferred_element_type=jnp.float32)
    return out, total, top


def _prefix_softmax_parts(q: Float[Array, "N K h C"], prefix: Layer, view: View) -> tuple[Array, Array, Array]:
    """`_softmax_parts` of every row over its prompt; a prefix is read once for all rows in its lanes."""
    shards, prefixes, lanes = view.lanes.shape
    kv, heads, width = q.shape[1:]
    q = jax.vmap(lambda x, i: x[i])(q.reshape(shards, -1, *q.shape[1:]), view.lanes)  # [D,R/D,L,K,h,C]
    q = q.reshape(-1, lanes, kv, heads, width).swapaxes(1, 2).reshape(-1, kv, lanes * heads, width)
    visible = jnp.arange(token_capacity(prefix[1]))[None] < view.prefix_lengths[:, None]
    parts = _softmax_parts(q, *prefix, visible[:, None, None])

    def to_rows(x: Array) -> Array:
        x = x.reshape(-1, kv, lanes, heads, x.shape[-1]).swapaxes(1, 2).reshape(shards, prefixes * lanes, kv, heads, -1)
        x = jax.vmap(lambda x, i: x[i])(x, view.lane_of_row)
        return x.reshape(-1, kv, heads, x.shape[-1])

    return tuple(to_rows(x) for x in parts)


def decode(view: View) -> Attend:
    """Attention for one token of every row; its cache is a prefix and a suffix, to which the row's token is written."""

    def write(old: Cached, new: Array, width_axis: int, token_axis: int) -> Cached:
        put = lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, view.column, axis=token_axis)
        return jax.tree.map(put, old, like(old, new, width_axis))

    def attend(q: Array, k: Array, v: Array, cache: tuple[Layer, Layer]) -> tuple[Array, Layer]:
        (rows, _, heads, width), kv = q.shape, k.shape[2]  # [N,1,H,C]
        prefix, (keys, values) = cache
        keys = write(keys, k[:, 0, :, :, None], KEYS_WIDTH, KEYS_TOKENS)
        values = write(values, v[:, 0, :, None], VALUES_WIDTH, VALUES_TOKENS)
        q = (q * width**-0.5).reshape(rows, kv, heads // kv, width)
        out, total, top = _prefix_softmax_parts(q, prefix, view)
        suffix_out, suffix_total, suffix_top = _softmax_parts(q, keys, values, view.visible[:, None, None])
        highest = jnp.maximum(top, suffix_top)
        a, b = jnp.exp(top - highest), jnp.exp(suffix_top - highest)
        out = (out * a + suffix_out * b) / (total * a + suffix_total * b)
        return out.astype(q.dtype).reshape(rows, 1, heads, width), (keys, values)

    return attend
