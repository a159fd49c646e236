"""Attention in training: a row is a prompt and the answers of its group. For decoding see sampler/cache.py.

Shapes here: R rows (prompts or slots), N query tokens per row, S prefix tokens, G responses per prompt, T response
tokens, H query heads, K key-value heads (H = K·h), C head width. Products and softmax are in fp32.
A decoder block calls `attend(q, k, v, cache) -> (out, cache)`; `grouped` makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

MIN_BLOCK, MAX_BLOCKS = 256, 8  # queries in a block; blocks, each of which is compiled by itself
MASKED = -1e30  # finite, so that a query whose keys are all masked gets the mean of the values rather than NaN

# Products come out in fp32: a bf16 logit of 30 is off by as much as .06, and so is the log of its weight.
_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _prefix_and_suffix(
    q: Float[Array, "R G T K h C"],
    prefix_kv: tuple[Float[Array, "R K S C"], Float[Array, "R K S C"]],
    suffix_kv: tuple[Float[Array, "R G K U C"], Float[Array, "R G K U C"]],
    prefix_mask: Bool[Array, "R 1 1 1 1 S"],
    suffix_mask: Bool[Array, "#R #G 1 #T 1 U"],
) -> Float[Array, "R G T K h C"]:
    """One softmax over two sets of keys: the group's prefix, and the tokens of each response (its suffix).

    Products run over (r, k) for the prefix, which all responses of a row share, and over (r, g, k) for the suffixes.
    They are never brought to one layout: the two are merged by their maxima and sums, which are small.
    """
    q = q * q.shape[-1] ** -0.5
    swap = lambda x: x.swapaxes(1, 2)  # (r, k, g, …) and (r, g, k, …)
    prefix = jnp.where(prefix_mask, _product("rgtkhc,rksc->rkgths", q, prefix_kv[0]), MASKED)
    suffix = jnp.where(suffix_mask, _product("rgtkhc,rgkuc->rgkthu", q, suffix_kv[0]), MASKED)
    top = jnp.maximum(swap(prefix.max(-1, keepdims=True, initial=MASKED)), suffix.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    prefix, suffix = jnp.exp(prefix - swap(top)), jnp.exp(suffix - top)
    total = swap(prefix.sum(-1, keepdims=True)) + suffix.sum(-1, keepdims=True)
    if q.dtype != jnp.float32:  # what rounds the gradient of the weights must also be in softmax's mean of it
        prefix, suffix, total = prefix / swap(total), suffix / total, 1.0
    out = swap(_product("rkgths,rksc->rkgthc", prefix.astype(q.dtype), prefix_kv[1]))
    out = out + _product("rgkthu,rgkuc->rgkthc", suffix.astype(q.dtype), suffix_kv[1])
    return jnp.moveaxis((out / total).astype(q.dtype), 2, 3)


def causal(
    q: Float[Array, "R N H C"], k: Float[Array, "R N K C"], v: Float[Array, "R N K C"]
) -> Float[Array, "R N H C"]:
    """Causal attention, in blocks of queries: keys after a block's last query are left out of its product.

    Rows are right-padded, so the causal mask alone keeps padding from every real query.
    """
    rows, n, heads, width = q.shape
    q = q.reshape(rows, n, k.shape[2], heads // k.shape[2], width) * width**-0.5
    size, out = max(MIN_BLOCK, -(-n // MAX_BLOCKS)), []
    for start in range(0, max(n, 1), size):
        end = min(start + size, n)
        logits = _product("rnkhc,rmkc->rkhnm", q[:, start:end], k[:, :end])
        mask = jnp.tril(jnp.ones((end - start, end), bool), start)[None, None, None]
        weights = jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1).astype(v.dtype)
        out.append(_product("rkhnm,rmkc->rnkhc", weights, v[:, :end]).astype(q.dtype))
    return jnp.concatenate(out, axis=1).reshape(rows, n, heads, width)


def grouped(prefix_lengths: Int[Array, " R"], prefix_size: int, group_size: int) -> Attend:
    """Training layout: a row is [prefix | response 0 | … | response G-1]; a response reads the prefix and itself.

    The prefix is computed once for the group, so that a long prompt costs S + G·T tokens instead of G·(S+T).
    """

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        rows, n, heads, width = q.shape
        kv_heads, size = k.shape[2], prefix_size
        length = (n - size) // group_size
        answers = lambda x: x[:, size:].reshape(rows, group_size, length, kv_heads, -1, width)
        suffix_kv = tuple(answers(x)[..., 0, :].swapaxes(2, 3) for x in (k, v))
        prefix_kv = tuple(x[:, :size].swapaxes(1, 2) for x in (k, v))
        prefix_mask = (jnp.arange(size)[None] < prefix_lengths[:, None])[:, None, None, None, None]
        causal_mask = jnp.tril(jnp.ones((length, length), bool))[None, None, None, :, None]
        out = _prefix_and_suffix(answers(q), prefix_kv, suffix_kv, prefix_mask, causal_mask)
        out = out.reshape(rows, -1, heads, width)
        return jnp.concatenate([causal(q[:, :size], k[:, :size], v[:, :size]), out], axis=1), None

    return attend


def packed(segments: Int[Array, "R N"], implementation: str = "auto") -> Attend:
    """Rows of several segments; 0 is padding."""

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        rows, n, heads, width = q.shape
        q = q.reshape(rows, n, k.shape[2], heads // k.shape[2], width) * width**-0.5
        logits = _product("rnkhc,rmkc->rkhnm", q, k)
        mask = jnp.tril(jnp.ones((n, n), bool))[None] & (segments[:, :, None] == segments[:, None, :])
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, MASKED), axis=-1).astype(v.dtype)
        return _product("rkhnm,rmkc->rnkhc", weights, v).astype(q.dtype).reshape(rows, n, heads, width), None

    return attend
