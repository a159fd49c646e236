"""Attention over a prompt shared by its group: training layout, prefill and single-token decoding.

Shapes here: R rows (prompts or slots), N query tokens per row, S prefix tokens, G responses per prompt, T response
tokens, H query heads, K key-value heads (H = K·h), C head width. Softmax is taken in fp32.
An `attend(q, k, v, cache) -> (out, cache)` is what a decoder block calls; the functions below make one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

MASKED = -1e30  # finite, so that a row with nothing to see gives zeros rather than NaN


class LayerCache(NamedTuple):
    """Keys and values of one layer: the group's prompt once, each response's own tokens beside it."""

    prefix_k: Array  # [R,K,S,C]
    prefix_v: Array  # [R,K,S,C]
    suffix_k: Array  # [R,G,K,T,C]
    suffix_v: Array  # [R,G,K,T,C]


def _softmax2(a: Array, b: Array, a_mask: Array, b_mask: Array) -> tuple[Array, Array]:
    """One softmax over two sets of keys held apart: softmax(concat(a, b)) split again, without the concat."""
    a = jnp.where(a_mask, a.astype(jnp.float32), MASKED)
    b = jnp.where(b_mask, b.astype(jnp.float32), MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(a.max(-1, keepdims=True), b.max(-1, keepdims=True)))
    a, b = jnp.exp(a - top), jnp.exp(b - top)
    inv = 1.0 / (a.sum(-1, keepdims=True) + b.sum(-1, keepdims=True))
    return a * inv, b * inv


def causal(
    q: Float[Array, "R N H C"], k: Float[Array, "R N K C"], v: Float[Array, "R N K C"]
) -> Float[Array, "R N H C"]:
    """Plain causal attention. Rows are right-padded, so no real query sees a padded key."""
    rows, n, heads, width = q.shape
    q = q.reshape(rows, n, k.shape[2], -1, width) * width**-0.5
    logits = jnp.einsum("rnkhc,rmkc->rkhnm", q, k).astype(jnp.float32)
    mask = jnp.tril(jnp.ones((n, n), bool))[None, None, None]
    weights = jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("rkhnm,rmkc->rnkhc", weights, v).reshape(rows, n, heads, width)


def grouped(prefix_lengths: Int[Array, " R"], prefix_size: int, group_size: int) -> Attend:
    """Training layout: a row is [prefix | response 0 | … | response G-1]; responses see the prefix and themselves.

    The prefix is computed once for the group, which is where long prompts get cheap: S + G·T tokens instead of G·(S+T).
    """

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        rows, n, heads, width = q.shape
        kv_heads, size = k.shape[2], prefix_size
        length = (n - size) // group_size
        split = (rows, group_size, length)
        own_k, own_v = (x[:, size:].reshape(*split, kv_heads, width) for x in (k, v))
        own_q = q[:, size:].reshape(*split, kv_heads, -1, width) * width**-0.5
        own = jnp.einsum("rgtkhc,rgukc->rkghtu", own_q, own_k)
        seen = jnp.einsum("rgtkhc,rskc->rkghts", own_q, k[:, :size])
        in_prefix = (jnp.arange(size)[None] < prefix_lengths[:, None])[:, None, None, None, None]
        in_past = jnp.tril(jnp.ones((length, length), bool))[None, None, None, None]
        w_seen, w_own = (w.astype(v.dtype) for w in _softmax2(seen, own, in_prefix, in_past))
        out = jnp.einsum("rkghts,rskc->rgtkhc", w_seen, v[:, :size])
        out = out + jnp.einsum("rkghtu,rgukc->rgtkhc", w_own, own_v)
        out = out.reshape(rows, -1, heads, width)
        return jnp.concatenate([causal(q[:, :size], k[:, :size], v[:, :size]), out], axis=1), None

    return attend


def prefill(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, tuple[Array, Array]]:
    """Causal attention that hands its keys and values over, laid out [R,K,S,C] for decoding."""
    return causal(q, k, v), (k.swapaxes(1, 2), v.swapaxes(1, 2))


def decode(prefix_lengths: Int[Array, " R"], column: Int[Array, ""], visible: Bool[Array, "R G T"]) -> Attend:
    """One new token for each of a slot's G responses, written to `column` of the suffix cache.

    `visible` marks the columns that hold a response's own tokens, the new one included.
    """

    def attend(q: Array, k: Array, v: Array, cache: LayerCache) -> tuple[Array, LayerCache]:
        rows, group, heads, width = q.shape
        kv_heads = k.shape[2]
        write = lambda c, x: jax.lax.dynamic_update_slice_in_dim(c, x[:, :, :, None].astype(c.dtype), column, axis=3)
        cache = cache._replace(suffix_k=write(cache.suffix_k, k), suffix_v=write(cache.suffix_v, v))
        q = q.reshape(rows, group, kv_heads, -1, width) * width**-0.5
        own = jnp.einsum("rgkhc,rgktc->rkght", q, cache.suffix_k)
        seen = jnp.einsum("rgkhc,rksc->rkghs", q, cache.prefix_k)
        in_prefix = (jnp.arange(seen.shape[-1])[None] < prefix_lengths[:, None])[:, None, None, None]
        w_seen, w_own = (w.astype(v.dtype) for w in _softmax2(seen, own, in_prefix, visible[:, None, :, None]))
        out = jnp.einsum("rkghs,rksc->rgkhc", w_seen, cache.prefix_v)
        out = out + jnp.einsum("rkght,rgktc->rgkhc", w_own, cache.suffix_v)
        return out.reshape(rows, group, heads, width), cache

    return attend
