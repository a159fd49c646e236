"""Attention of long rows, its memory linear in tokens: a blocked one for every machine, and the kernels of TPU and GPU.

All have one contract, `kernel(q, k, v, segments) -> out`: q [R,N,H,C] are the queries, divided by √C, of the last N of
a row's M tokens, k and v [R,M,K,C] the keys and values of all of them, segments [R,M] their ids, 0 for padding. A token
reads those of its own segment at or before its place. What padding reads is finite, and nobody else reads padding.
Logits, softmax and sums are in fp32. N and M − N are multiples of `unit`, which `attend` sees to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import dynamic_update_index_in_dim as put
from jaxtyping import Array, Float, Int

from jaxrl_llm.parallel.sharding import spec

MASKED = -1e30  # finite, so that a query whose keys are all masked gets the mean of the values rather than NaN
UNIT = 128  # tokens; the kernels' blocks are multiples of it
BLOCK = 128  # tokens; of the blocked one: of 128, 256 and 512 the quickest on a CPU

# Products come out in fp32: a bf16 logit of 30 is off by as much as .06, and so is the log of its weight.
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def platform() -> str:
    """cpu, gpu or tpu: of the mesh of `jax.set_mesh`, which may be of a machine elsewhere, or else of this machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend(
    implementation: str,
    q: Float[Array, "R N H C"],
    k: Float[Array, "R M K C"],
    v: Float[Array, "R M K C"],
    segments: Int[Array, "R M"],
) -> Float[Array, "R N H C"]:
    """softmax(q·kᵀ/√C)·v by the kernel of that name; every device computes its own rows and heads.

    On a CPU the kernels of TPU and GPU are interpreted, which is slow, for tests; cuDNN does not run there.
    """
    kernel = {"xla": _blocked, "splash": _splash, "pallas": _pallas, "cudnn": _cudnn}[implementation]
    unit, n = BLOCK if implementation == "xla" else UNIT, q.shape[1]
    front, back = (n - k.shape[1]) % unit, -n % unit
    pad = lambda x, front: jnp.pad(x, ((0, 0), (front, back), *((0, 0),) * (x.ndim - 2)))
    if not jax.sharding.get_abstract_mesh().empty:
        rows, heads, kv_heads = ((spec(("batch", None, *axes))) for axes in ((), ("heads",), ("kv_heads",)))
        in_specs = (heads, kv_heads, kv_heads, rows)
        kernel = jax.shard_map(kernel, in_specs=in_specs, out_specs=heads, check_vma=False)
    return kernel(pad(q * q.shape[-1] ** -0.5, 0), pad(k, front), pad(v, front), pad(segments, front))[:, :n]


def _blocked(q: Array, k: Array, v: Array, segments: Array) -> Array:
    """The plain one: blocks of queries against blocks of keys, nothing kept but the output and log Σ exp (2205.14135).

    A block's queries of the heads that share a key lie on one axis: B blocks, R rows, K key-value heads, h·n queries.
    """

    def blocks(x: Array) -> Array:
        x = x.reshape(x.shape[0], -1, BLOCK, k.shape[2], x.shape[2] // k.shape[2], x.shape[3])
        x = x.transpose(1, 0, 3, 4, 2, 5)
        return x.reshape(*x.shape[:3], -1, x.shape[-1])

    ids = segments.reshape(segments.shape[0], -1, BLOCK).swapaxes(0, 1)
    out = _attend_blocks(blocks(q), blocks(k), blocks(v), ids)
    out = out.reshape(*out.shape[:3], -1, BLOCK, out.shape[-1])
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(q.shape)


@jax.custom_vjp
def _attend_blocks(
    q: Float[Array, "B R K q C"], k: Float[Array, "b R K n C"], v: Float[Array, "b R K n C"], ids: Int[Array, "b R n"]
) -> Float[Array, "B R K q C"]:
    return _forward(q, k, v, ids)[0]


def _meetings(ids: Int[Array, "b R n"], n: int) -> tuple[Array, Array, Array]:
    """Pairs (block of n queries, block of keys at or before it), those with a segment in common first; their number."""
    before = len(ids) - n
    i, j = np.array([(i, j) for i in range(n) for j in range(before + i + 1)], np.int32).T
    low, high = jnp.where(ids > 0, ids, jnp.iinfo(ids.dtype).max).min(-1), ids.max(-1)
    meet = jnp.any((low[before + i] <= high[j]) & (low[j] <= high[before + i]), axis=1)
    order = jnp.argsort(~meet)
    return jnp.asarray(i)[order], jnp.asarray(j)[order], meet.sum()


def _logits(q: Array, k: Array, ids: Array, i: Array, j: Array) -> Float[Array, "R K q n"]:
    """Of block i of the queries and block j of the keys, MASKED where a query does not see a key."""
    logits, at, before = product("rkqc,rknc->rkqn", q[i], k[j]), jnp.arange(ids.shape[-1]), len(ids) - len(q)
    own, theirs = ids[before + i], ids[j]
    seen = (own[:, :, None] == theirs[:, None]) & (own > 0)[:, :, None]
    seen &= (at[:, None] + (before + i - j) * len(at) >= at[None])[None]
    per_head = logits.reshape(*logits.shape[:2], -1, *seen.shape[1:])
    return jnp.where(seen[:, None, None], per_head, MASKED).reshape(logits.shape)


def _forward(q: Array, k: Array, v: Array, ids: Array) -> tuple[Array, tuple]:
    i, j, count = _meetings(ids, len(q))

    def step(t: Array, carry: tuple) -> tuple:
        (out, total, top), a = carry, i[t]
        logits = _logits(q, k, ids, a, j[t])
        highest = jnp.maximum(top[a], logits.max(-1))
        weights, scale = jnp.exp(logits - highest[..., None]), jnp.exp(top[a] - highest)
        values = product("rkqn,rknc->rkqc", weights.astype(v.dtype), v[j[t]])
        out = put(out, out[a] * scale[..., None] + values, a, 0)
        return out, put(total, total[a] * scale + weights.sum(-1), a, 0), put(top, highest, a, 0)

    zeros = jnp.zeros(q.shape, jnp.float32)
    # Far above MASKED: the weight of a key that is not seen is 0, also before a query has met one that it sees.
    start = zeros, zeros[..., 0], jnp.full(q.shape[:-1], MASKED / 2)
    out, total, top = jax.lax.fori_loop(0, count, step, start)
    total = jnp.where(total == 0, 1.0, total)
    out = out / total[..., None]
    return out.astype(q.dtype), (q, k, v, ids, out, top + jnp.log(total))


def _backward(saved: tuple, slope: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, ids, out, log_total = saved
    i, j, count = _meetings(ids, len(q))
    mean = jnp.sum(slope.astype(jnp.float32) * out, axis=-1)

    def step(t: Array, carry: tuple) -> tuple:
        a, b = i[t], j[t]
        weights = jnp.exp(_logits(q, k, ids, a, b) - log_total[a][..., None])
        of_logits = weights * (product("rkqc,rknc->rkqn", slope[a], v[b]) - mean[a][..., None])
        of_logits, weights = of_logits.astype(q.dtype), weights.astype(q.dtype)
        parts = product("rkqn,rknc->rkqc", of_logits, k[b]), product("rkqn,rkqc->rknc", of_logits, q[a])
        parts += (product("rkqn,rkqc->rknc", weights, slope[a]),)
        return tuple(put(x, x[n] + part, n, 0) for x, part, n in zip(carry, parts, (a, b, b), strict=True))

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    dq, dk, dv = jax.lax.fori_loop(0, count, step, zeros)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend_blocks.defvjp(_forward, _backward)


def _splash(q: Array, k: Array, v: Array, segments: Array) -> Array:
    """jax's kernel for TPUs, which leaves out the blocks above the diagonal."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    n, m = q.shape[1], k.shape[1]
    rows, columns = (next(size for size in (512, 256, UNIT) if not tokens % size) for tokens in (n, m))
    blocks = splash.BlockSizes(
        **{f"block_q{of}": rows for of in ("", "_dkv", "_dq")},
        **{f"block_kv{of}": columns for of in ("", "_compute", "_dkv", "_dkv_compute", "_dq")},
    )
    mask = splash.MultiHeadMask([splash.CausalMask((n, m), offset=m - n)])  # one for all heads

    def one(q: Array, k: Array, v: Array, ids: Array) -> Array:
        kernel = splash.make_splash_mha(
            mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=platform() == "cpu"
        )
        return kernel(q, k, v, splash.SegmentIds(ids[m - n :], ids))

    return _saved_at_once(jax.vmap(one), *(x.swapaxes(1, 2) for x in (q, k, v)), segments).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _saved_at_once(f: Callable, *x: Array) -> Array:
    """f(*x), with what its backward pass needs ready before the result is used.

    Splash writes log Σ exp 128 times over. XLA would keep all of that until the backward pass and take the one there.
    """
    return f(*x)


_saved_at_once.defvjp(lambda f, *x: jax.lax.optimization_barrier(jax.vjp(f, *x)), lambda f, back, slope: back(slope))


def _like_keys(q: Array, k: Array) -> Array:
    """q with zeros before it, as long as k: for kernels that know no offset. What the zeros read is thrown away."""
    return jnp.pad(q, ((0, 0), (k.shape[1] - q.shape[1], 0), (0, 0), (0, 0)))


def _pallas(q: Array, k: Array, v: Array, segments: Array) -> Array:
    """jax's Triton kernel for GPUs: every block before the diagonal is computed, keys are repeated for their queries.

    It has been run interpreted on a CPU, not yet on a GPU.
    """
    from jax.experimental.pallas.ops.gpu.attention import mha

    n, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    return mha(_like_keys(q, k), k, v, segments, causal=True, interpret=platform() == "cpu")[:, -n:]


def _cudnn(q: Array, k: Array, v: Array, segments: Array) -> Array:
    """cuDNN's kernel by jax's public entry, which has no segment ids: for rows of one segment, in bf16.

    Padding is moved behind the segment, where the causal mask hides it. It has not been run: cuDNN needs a GPU.
    """
    n, order = q.shape[1], jnp.argsort(segments == 0, axis=1)
    take = lambda x, order: jnp.take_along_axis(x, order[:, :, None, None], axis=1)
    q, k, v = (take(x, order) for x in (_like_keys(q, k), k, v))
    out = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True, implementation="cudnn")
    return take(out, jnp.argsort(order, axis=1))[:, -n:]
