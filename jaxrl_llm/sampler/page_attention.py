"""Keys and values in pages, and attention over them for blocks of queries: a token of each row, or pieces of prompts.

A pool has P pages of `size` tokens. A row's table names its pages in the order of its tokens; the rows of a group name
the same ones where they share their prompt:

    pool      page 0       page 1       page 2       page 3         tables
            | W h a t |  | i s . . |  | i s . a0|  | a1a2 . . |     row 0:  0 2 3    its prompt and a0 a1 a2
                                                                    row 1:  0 1 -    the prompt, so far
Query j of N blocks of B stands at position ends[n] − B + j of its row, and reads what its row has up to there. What is
not real is not written, and what it reads is finite.

| implementation | runs on | pool of a layer |
|---|---|---|
| `xla` | all | keys and values side by side, [P,size,2K,C]: heads k0 v0 k1 v1 … |
| `splash` | TPU: `ragged_paged_attention` | the same, C a multiple of 128 |
| `pallas`, `cudnn` | GPU: `paged_attention` of one token a row; else as xla | two of [K,P,size,C] |
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import Attend, resolve
from jaxrl_llm.models.kernels import MASKED, platform, product
from jaxrl_llm.models.quantize import Quantized
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.parallel.sharding import spec
from jaxrl_llm.sampler.cache import Cached, in_dtype

READ = 256  # tokens of each row that the blocked attention reads at once
LANES = 128  # of which the TPU kernel wants heads to be multiples


class Split(NamedTuple):
    """A pool of keys and one of values."""

    keys: Cached
    values: Cached


Pool = Cached | Split  # of one layer


class Blocks(NamedTuple):
    """N blocks of B queries."""

    table: Int[Array, "N W"]  # pages of each block's row, in order; P where there is none
    ends: Int[Array, " N"]  # the position behind the last query, at least B
    real: Bool[Array, "N B"]  # queries that are tokens of the row


def head_width(config: ModelConfig) -> int:
    """Of a head in the pool."""
    ragged = resolve(config.attention) == "splash"
    return -(-config.head_width // LANES) * LANES if ragged else config.head_width


def init(config: ModelConfig, kv_dtype: str, pages: int, size: int) -> tuple[Pool, ...]:
    """An empty pool for each layer."""
    heads, width = config.kv_heads, head_width(config)
    if resolve(config.attention) in ("pallas", "cudnn"):
        empty = lambda: in_dtype(jnp.zeros((heads, pages, size, width)), kv_dtype, -1)
        return tuple(Split(empty(), empty()) for _ in range(config.layers))
    return tuple(in_dtype(jnp.zeros((pages, size, 2 * heads, width)), kv_dtype, -1) for _ in range(config.layers))


def shape(pool: Pool) -> tuple[int, int]:
    """How many pages, of how many tokens."""
    x = jax.tree.leaves(pool)[0]
    return x.shape[1:3] if isinstance(pool, Split) else x.shape[:2]


def axes(pool: Pool) -> tuple[str | None, ...]:
    """Logical ones of a layer's pool: every device has pages of its own rows, of its own heads."""
    return ("kv_heads", "batch") if isinstance(pool, Split) else ("batch", None, "kv_heads")


def token_bytes(config: ModelConfig, kv_dtype: str) -> int:
    """Of a token's keys and values in all layers."""
    pools = jax.eval_shape(lambda: init(config, kv_dtype, 1, 1))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))


def copied(pool: Pool, source: Int[Array, " Q"], to: Int[Array, " Q"]) -> Pool:
    """A layer's pool after whole pages of it were copied; those to be copied past its end are dropped."""
    if isinstance(pool, Split):
        return jax.tree.map(lambda x: x.at[:, to].set(x[:, source], mode="drop"), pool)
    return jax.tree.map(lambda x: x.at[to].set(x[source], mode="drop"), pool)


def paged(config: ModelConfig, blocks: Blocks) -> Attend:
    """Attention of a decoder's layer whose cache is its pool, to which the blocks' keys and values are written."""
    name = resolve(config.attention)

    def local(q: Array, k: Array, v: Array, pool: Pool, *blocks: Array) -> tuple[Array, Pool]:
        blocks = Blocks(*blocks)
        wide = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, head_width(config) - x.shape[-1])])
        pool = _written(pool, wide(k), wide(v), blocks)
        kernel = _blocked
        if jax.tree.leaves(pool)[0].dtype != jnp.int8:  # of which the kernels know no scales
            kernel = _ragged if name == "splash" else _single if isinstance(pool, Split) and q.shape[1] == 1 else kernel
        return kernel(wide(q * q.shape[-1] ** -0.5), pool, blocks)[..., : q.shape[-1]].astype(q.dtype), pool

    def attend(q: Array, k: Array, v: Array, pool: Pool) -> tuple[Array, Pool]:
        if jax.sharding.get_abstract_mesh().empty:
            return local(q, k, v, pool, *blocks)
        rows, heads, kv_heads = (spec(("batch", None, *axes)) for axes in ((), ("heads",), ("kv_heads",)))
        pools = jax.tree.map(lambda _: spec(axes(pool)), pool)
        in_specs = (heads, kv_heads, kv_heads, pools, rows, spec(("batch",)), rows)
        on_device = jax.shard_map(local, in_specs=in_specs, out_specs=(heads, pools), check_vma=False)
        return on_device(q, k, v, pool, *blocks)

    return attend


def _written(pool: Pool, k: Float[Array, "N B K C"], v: Float[Array, "N B K C"], blocks: Blocks) -> Pool:
    """The pool with new keys and values where the blocks' queries stand."""
    pages, size = shape(pool)
    width = blocks.real.shape[1]
    position = blocks.ends[:, None] - width + jnp.arange(width)[None]
    page = jnp.take_along_axis(blocks.table, position // size, axis=1, mode="fill", fill_value=pages)
    page, place = jnp.where(blocks.real, page, pages), position % size

    def put(old: Cached, new: Array, *before: slice) -> Cached:
        new = in_dtype(new, jax.tree.leaves(old)[0].dtype.name, -1)
        return jax.tree.map(lambda a, b: a.at[(*before, page, place)].set(b, mode="drop"), old, new)

    if isinstance(pool, Split):
        return Split(*(put(old, jnp.moveaxis(new, 2, 0), slice(None)) for old, new in zip(pool, (k, v), strict=True)))
    return put(pool, jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[-1]))


def _read(pool: Pool, ids: Int[Array, "N p"]) -> list[Cached]:
    """Keys and values of pages, [N,p·size,K,C]."""
    rows = lambda x: x.reshape(len(ids), -1, *x.shape[3:])
    if isinstance(pool, Split):
        tokens = lambda x: rows(jnp.moveaxis(x.at[:, ids].get(mode="clip"), 0, 3))
        return [jax.tree.map(tokens, x) for x in pool]
    both = jax.tree.map(lambda x: rows(x.at[ids].get(mode="clip")), pool)
    return [jax.tree.map(lambda x, i=i: x[:, :, i::2], both) for i in (0, 1)]


def _blocked(q: Float[Array, "N B H C"], pool: Pool, blocks: Blocks) -> Float[Array, "N B H C"]:
    """A few pages of every row at a time, as far as the longest goes, with a running maximum and sum."""
    n, width, heads, c = q.shape
    size, heads_of = shape(pool)[1], jax.tree.leaves(pool)[0].shape
    kv_heads = heads_of[0] if isinstance(pool, Split) else heads_of[2] // 2
    pages = max(READ // size, 1)
    table = jnp.pad(blocks.table, ((0, 0), (0, -blocks.table.shape[1] % pages)))
    group = heads // kv_heads
    q = q.reshape(n, width, kv_heads, group, c).swapaxes(1, 2).reshape(n, kv_heads, width * group, c)
    position = blocks.ends[:, None] - width + jnp.arange(width)[None]
    position = jnp.repeat(position, group, axis=1)[:, None, :, None]

    def read(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, total, top = carry
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        (k, k_scale), (v, v_scale) = (x if isinstance(x, Quantized) else (x, None) for x in _read(pool, ids))
        over_tokens = lambda scale: scale.transpose(0, 2, 3, 1)  # [N,K,1,p·size]
        logits = product("nkqc,nmkc->nkqm", q, k.astype(q.dtype))
        logits = logits if k_scale is None else logits * over_tokens(k_scale)
        logits = jnp.where(i * pages * size + jnp.arange(pages * size)[None, None, None] <= position, logits, MASKED)
        highest = jnp.maximum(top, logits.max(axis=-1, keepdims=True))
        weights, kept = jnp.exp(logits - highest), jnp.exp(top - highest)
        total = total * kept + weights.sum(axis=-1, keepdims=True)
        weights = weights if v_scale is None else weights * over_tokens(v_scale)
        out = out * kept + product("nkqm,nmkc->nkqc", weights.astype(q.dtype), v.astype(q.dtype))
        return out, total, highest

    last = jnp.where(blocks.real.any(axis=1), blocks.ends, 1).max()
    zeros = lambda *tail: jnp.zeros((n, kv_heads, width * group, *tail), jnp.float32)
    out, total, _ = jax.lax.fori_loop(0, -(-last // (pages * size)), read, (zeros(c), zeros(1), zeros(1) + MASKED))
    return (out / total).reshape(n, kv_heads, width, group, c).swapaxes(1, 2).reshape(n, width, heads, c)


def _ragged(q: Float[Array, "N B H C"], pool: Array, blocks: Blocks) -> Float[Array, "N B H C"]:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged

    n, width = q.shape[:2]
    table = jnp.minimum(blocks.table, pool.shape[0] - 1)
    starts, rows = jnp.arange(n + 1, dtype=jnp.int32) * width, jnp.array([n], jnp.int32)
    # Said here, because the kernel would look its sizes up for the machine of this program, which may only compile.
    sizes = {"num_kv_pages_per_block": min(max(512 // pool.shape[1], 1), table.shape[1])}
    sizes["num_queries_per_block"] = min(32 if width == 1 else LANES // 2, n * width)
    flat = q.reshape(n * width, *q.shape[2:])
    return ragged.ragged_paged_attention(flat, pool, blocks.ends, table, starts, rows, **sizes).reshape(q.shape)


def _single(q: Float[Array, "N 1 H C"], pool: tuple[Array, Array], blocks: Blocks) -> Float[Array, "N 1 H C"]:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    table = jnp.minimum(blocks.table, pool[0].shape[1] - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % 16)))
    out = paged_attention(
        q[:, 0],
        *pool,
        table,
        blocks.ends,
        k_splits=min(16, table.shape[1]),
        pages_per_compute_block=1,
        interpret=platform() == "cpu",
    )
    return out[:, None]
