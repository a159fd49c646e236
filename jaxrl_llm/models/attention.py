"""Attention in training: a prompt, and the answers of its group beside it. Decoding has its own in sampler/cache.py.

Shapes here: R rows (prompts or slots), N query tokens per row, S prefix tokens, G responses per prompt, T response
tokens, H query heads, K key-value heads (H = K·h), C head width. Softmax is taken in fp32.
An `attend(q, k, v, cache) -> (out, cache)` is what a decoder block calls; the functions below make one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

LEAST_BLOCK, MOST_BLOCKS = 256, 8  # queries in a block; blocks, each of which is compiled by itself
MASKED = -1e30  # finite, so that a row with nothing to see gives a mean of its values rather than NaN


def _over_both(
    q: Float[Array, "R G T K h C"],
    prefix: tuple[Float[Array, "R K S C"], Float[Array, "R K S C"]],
    own: tuple[Float[Array, "R G K U C"], Float[Array, "R G K U C"]],
    in_prefix: Bool[Array, "R 1 1 1 1 S"],
    in_own: Bool[Array, "#R #G 1 #T 1 U"],
) -> Float[Array, "R G T K h C"]:
    """One softmax over two sets of keys: the group's prefix, and each response's own tokens.

    Products run over (r, k) for the prefix, which all responses of a row share, and over (r, g, k) for the own keys.
    They are never brought to one layout: the two are merged by their maxima and sums, which are small.
    """
    q = q * q.shape[-1] ** -0.5
    swap = lambda x: x.swapaxes(1, 2)  # (r, k, g, …) and (r, g, k, …)
    seen = jnp.einsum("rgtkhc,rksc->rkgths", q, prefix[0]).astype(jnp.float32)
    past = jnp.einsum("rgtkhc,rgkuc->rgkthu", q, own[0]).astype(jnp.float32)
    seen, past = jnp.where(in_prefix, seen, MASKED), jnp.where(in_own, past, MASKED)
    top = jnp.maximum(swap(seen.max(-1, keepdims=True, initial=MASKED)), past.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    seen, past = jnp.exp(seen - swap(top)), jnp.exp(past - top)
    total = swap(seen.sum(-1, keepdims=True)) + past.sum(-1, keepdims=True)
    out = swap(jnp.einsum("rkgths,rksc->rkgthc", seen.astype(q.dtype), prefix[1]))
    out = out + jnp.einsum("rgkthu,rgkuc->rgkthc", past.astype(q.dtype), own[1])
    return jnp.moveaxis((out / total).astype(q.dtype), 2, 3)


def causal(
    q: Float[Array, "R N H C"], k: Float[Array, "R N K C"], v: Float[Array, "R N K C"]
) -> Float[Array, "R N H C"]:
    """Causal attention, in blocks of queries: what lies behind a block's last query is not computed.

    Rows are right-padded, so no real query sees a padded key.
    """
    rows, n, heads, width = q.shape
    q = q.reshape(rows, n, k.shape[2], heads // k.shape[2], width) * width**-0.5
    size, out = max(LEAST_BLOCK, -(-n // MOST_BLOCKS)), []
    for start in range(0, max(n, 1), size):
        end = min(start + size, n)
        logits = jnp.einsum("rnkhc,rmkc->rkhnm", q[:, start:end], k[:, :end]).astype(jnp.float32)
        mask = jnp.tril(jnp.ones((end - start, end), bool), start)[None, None, None]
        weights = jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1).astype(v.dtype)
        out.append(jnp.einsum("rkhnm,rmkc->rnkhc", weights, v[:, :end]))
    return jnp.concatenate(out, axis=1).reshape(rows, n, heads, width)


def grouped(prefix_lengths: Int[Array, " R"], prefix_size: int, group_size: int) -> Attend:
    """Training layout: a row is [prefix | response 0 | … | response G-1]; responses see the prefix and themselves.

    The prefix is computed once for the group, which is where long prompts get cheap: S + G·T tokens instead of G·(S+T).
    """

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        rows, n, heads, width = q.shape
        kv_heads, size = k.shape[2], prefix_size
        length = (n - size) // group_size
        answers = lambda x: x[:, size:].reshape(rows, group_size, length, kv_heads, -1, width)
        own = tuple(answers(x)[..., 0, :].swapaxes(2, 3) for x in (k, v))
        prefix = tuple(x[:, :size].swapaxes(1, 2) for x in (k, v))
        in_prefix = (jnp.arange(size)[None] < prefix_lengths[:, None])[:, None, None, None, None]
        in_past = jnp.tril(jnp.ones((length, length), bool))[None, None, None, :, None]
        out = _over_both(answers(q), prefix, own, in_prefix, in_past).reshape(rows, -1, heads, width)
        return jnp.concatenate([causal(q[:, :size], k[:, :size], v[:, :size]), out], axis=1), None

    return attend
