"""Attention in training: rows of packed sequences, or of a prompt and its answers. For decoding see sampler/cache.py.

Shapes here: R rows (prompts or slots), N query tokens per row, S prefix tokens, G responses per prompt, T response
tokens, H query heads, K key-value heads (H = K·h), C head width. Products and softmax are in fp32.
A decoder block calls `attend(q, k, v, cache) -> (out, cache)`; `packed` and `grouped` make one.

| implementation | runs on | |
|---|---|---|
| `xla` | all | dense while rows are short, then blocked: memory linear in tokens |
| `splash` | TPU | |
| `pallas` | GPU | float32 and bfloat16 |
| `cudnn` | GPU | bfloat16; not for packed rows: its public entry has no segment ids |

`auto` is splash on TPU, pallas on GPU (it takes every layout and dtype; cuDNN does not) and xla elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import kernels
from jaxrl_llm.models.kernels import MASKED, product
from jaxrl_llm.types import expect

Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]

DENSE = 2**16  # logits of an answer or a packed row and a head: more are quicker in a loop over blocks, also on a CPU
RUNS_ON = {"splash": "tpu", "pallas": "gpu", "cudnn": "gpu"}


def resolve(implementation: str) -> str:
    """The implementation that a name stands for on the machine of this program: see `kernels.platform`."""
    best = {"tpu": "splash", "gpu": "pallas"}.get(kernels.platform(), "xla")
    return best if implementation == "auto" else implementation


def check(implementation: str, platform: str) -> None:
    """ValueError if `model.attention` names one that does not run on this platform: cpu, gpu or tpu."""
    able = ["auto", "xla", *(name for name, where in RUNS_ON.items() if where == platform)]
    needs = RUNS_ON.get(implementation, platform)
    expect(needs == platform, "model.attention", implementation, f"{', '.join(able)} on {platform}")


def multiple(implementation: str) -> int:
    """Tokens of which a row's length, a prefix's and an answer's had better be multiples: others are padded to it."""
    return 1 if resolve(implementation) == "xla" else kernels.UNIT


def packed(segments: Int[Array, "R N"], implementation: str = "auto") -> Attend:
    """Rows of several sequences, one behind the other: a token reads those of its own segment at or before it.

    segments: ids from 1 on, ascending along a row, 0 for padding. What padding reads is finite, and nobody else reads
    padding. Raises ValueError for cuDNN.
    """
    name, segments = resolve(implementation), jnp.asarray(segments)
    expect(name != "cudnn", "model.attention", name, "another one for packed rows: cuDNN's entry has no segment ids")

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        return _packed(name, q, k, v, segments), None

    return attend


def grouped(
    prefix_lengths: Int[Array, " R"], prefix_size: int, group_size: int, implementation: str = "auto"
) -> Attend:
    """Training layout: a row is [prefix | response 0 | … | response G-1]; a response reads the prefix and itself.

    The prefix is computed once for the group, so that a long prompt costs S + G·T tokens instead of G·(S+T).
    """
    name = resolve(implementation)

    def attend(q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        size, length = prefix_size, (q.shape[1] - prefix_size) // group_size
        real = jnp.arange(size)[None] < jnp.asarray(prefix_lengths)[:, None]
        prefix = _packed(name, *(x[:, :size] for x in (q, k, v)), real.astype(jnp.int32)) if size else q[:, :0]
        if name == "xla" and length * (size + length) <= DENSE:
            answers = _short_answers(q, k, v, real, group_size)
        else:
            answers = _long_answers(name, q, k, v, real, group_size)
        return jnp.concatenate([prefix, answers], axis=1), None

    return attend


def causal(
    q: Float[Array, "R N H C"], k: Float[Array, "R N K C"], v: Float[Array, "R N K C"]
) -> Float[Array, "R N H C"]:
    """Causal attention on any machine. Rows are right-padded: the mask alone keeps padding from every real query."""
    return _packed("xla", q, k, v, jnp.ones(q.shape[:2], jnp.int32))


def _packed(name: str, q: Array, k: Array, v: Array, segments: Int[Array, "R N"]) -> Float[Array, "R N H C"]:
    """Dense in short rows, where the blocked one would be no quicker."""
    short = name == "xla" and q.shape[1] ** 2 <= DENSE
    return _dense(q, k, v, segments) if short else kernels.attend(name, q, k, v, segments)


def _dense(q: Array, k: Array, v: Array, segments: Int[Array, "R N"]) -> Array:
    rows, n, heads, width = q.shape
    q = q.reshape(rows, n, k.shape[2], heads // k.shape[2], width) * width**-0.5
    mask = jnp.tril(jnp.ones((n, n), bool))[None] & (segments[:, :, None] == segments[:, None])
    logits = jnp.where(mask[:, None, None], product("rnkhc,rmkc->rkhnm", q, k), MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
    return product("rkhnm,rmkc->rnkhc", weights, v).astype(q.dtype).reshape(rows, n, heads, width)


def _long_answers(
    name: str, q: Array, k: Array, v: Array, real: Bool[Array, "R S"], group_size: int
) -> Float[Array, "R G*T H C"]:
    """Every answer a row by itself, over a copy of the prefix and its own tokens: linear in G·(S + T)."""
    rows, size = real.shape
    own = lambda x: x[:, size:].reshape(rows * group_size, -1, *x.shape[2:])
    copies = lambda x: jnp.repeat(x[:, :size], group_size, axis=0)
    sequences = lambda x: jnp.concatenate([copies(x), own(x)], axis=1)
    ids = jnp.pad(copies(real.astype(jnp.int32)), ((0, 0), (0, own(q).shape[1])), constant_values=1)
    return kernels.attend(name, own(q), sequences(k), sequences(v), ids).reshape(q[:, size:].shape)


def _short_answers(
    q: Array, k: Array, v: Array, real: Bool[Array, "R S"], group_size: int
) -> Float[Array, "R G*T H C"]:
    """All answers of a row at once: one softmax over the prefix, which they share, and over their own tokens.

    Products run over (r, k) for the prefix and over (r, g, k) for the answers' own tokens (their suffixes). They are
    never brought to one layout: the two are merged by their maxima and sums, which are small.
    """
    (rows, size), (heads, width), kv_heads = real.shape, q.shape[2:], k.shape[2]
    answers = lambda x: x[:, size:].reshape(rows, group_size, -1, kv_heads, x.shape[2] // kv_heads, width)
    prefix_kv = [x[:, :size].swapaxes(1, 2) for x in (k, v)]  # [R,K,S,C]
    suffix_kv = [answers(x)[..., 0, :].swapaxes(2, 3) for x in (k, v)]  # [R,G,K,T,C]
    q = answers(q) * width**-0.5
    length = q.shape[2]
    prefix_mask = real[:, None, None, None, None]
    suffix_mask = jnp.tril(jnp.ones((length, length), bool))[None, None, None, :, None]
    swap = lambda x: x.swapaxes(1, 2)  # (r, k, g, …) and (r, g, k, …)
    prefix = jnp.where(prefix_mask, product("rgtkhc,rksc->rkgths", q, prefix_kv[0]), MASKED)
    suffix = jnp.where(suffix_mask, product("rgtkhc,rgkuc->rgkthu", q, suffix_kv[0]), MASKED)
    top = jnp.maximum(swap(prefix.max(-1, keepdims=True, initial=MASKED)), suffix.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    prefix, suffix = jnp.exp(prefix - swap(top)), jnp.exp(suffix - top)
    total = swap(prefix.sum(-1, keepdims=True)) + suffix.sum(-1, keepdims=True)
    if q.dtype != jnp.float32:  # what rounds the gradient of the weights must also be in softmax's mean of it
        prefix, suffix, total = prefix / swap(total), suffix / total, 1.0
    out = swap(product("rkgths,rksc->rkgthc", prefix.astype(q.dtype), prefix_kv[1]))
    out = out + product("rgkthu,rgkuc->rgkthc", suffix.astype(q.dtype), suffix_kv[1])
    return jnp.moveaxis((out / total).astype(q.dtype), 2, 3).reshape(rows, -1, heads, width)
