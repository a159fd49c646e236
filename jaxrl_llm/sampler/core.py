"""The sampler's pure core: prefill prompts, insert answers into rows, decode k tokens for every row.

N rows hold an answer each and R prefixes a prompt each; a prompt is prefilled once and read by all of its answers. Its
last token is no part of the prefix: it is the first input of each answer, so there is one way to draw a token.
Time is global: every row writes decoding step s into column s mod T of its cache, so a write is one contiguous slice
however long ago the row was filled; `start` remembers when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.logprobs import tempered_logits
from jaxrl_llm.models import attention, transformer
from jaxrl_llm.quantize import dequantized
from jaxrl_llm.sampler import cache
from jaxrl_llm.sampler.cache import WIDTH_OF_KEYS, WIDTH_OF_VALUES, LayerCache, Stored, View, kind, room
from jaxrl_llm.sampler.sampling import Draw, sample
from jaxrl_llm.sharding import constrain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Everything that decoding reads and writes. R prefixes of up to S tokens, N rows, T columns."""

    caches: tuple[LayerCache, ...]  # a layer each
    prefix_lengths: Int[Array, " R"]
    step: Int[Array, ""]
    start: Int[Array, " N"]  # decoding step at which the row had no token
    limit: Int[Array, " N"]  # tokens an answer may have
    token: Int[Array, " N"]  # the next input
    live: Bool[Array, " N"]
    draw: Draw  # how each row's tokens are drawn, and its key; position is folded in for each token


class Prefilled(NamedTuple):
    """Keys and values of M prompts, and of the U tokens that each of their G answers has already. A layer each."""

    prefix: tuple[tuple[Array, Array], ...]  # [M,K,C,S], [M,K,S,C]
    own: tuple[tuple[Array, Array], ...]  # [M·G,K,C,U], [M·G,K,U,C]


class Rows(NamedTuple):
    """Answers to be inserted, in arrays of Q; a row number past the end is dropped (padding)."""

    row: Int[Array, " Q"]
    token: Int[Array, " Q"]  # the first input
    count: Int[Array, " Q"]  # tokens the answer has already
    limit: Int[Array, " Q"]
    draw: Draw


class Drawn(NamedTuple):
    """What one call has drawn. Row n's tokens are the first count[n] of its k."""

    tokens: Int[Array, "N k"]
    logp: Float[Array, "N k"]
    count: Int[Array, " N"]
    live: Bool[Array, " N"]  # goes on


def _blocks(config: transformer.ModelConfig, params: Any) -> tuple[transformer.Transformer, list[transformer.Block]]:
    """The model and its blocks one by one, for params whose layers are a list (see `weights.push`)."""
    model = nnx.eval_shape(lambda: transformer.Transformer(config, nnx.Rngs(0)))
    graph = nnx.split(model.layers)[0]
    blocks = [nnx.merge(graph, dequantized(layer, config.dtype)) for layer in params["layers"]]
    del model.layers
    head_dtype = jnp.float32 if config.fp32_head else config.dtype
    nnx.update(model, dequantized({k: v for k, v in params.items() if k != "layers"}, head_dtype))
    return model, blocks


def prefill(
    config: transformer.ModelConfig,
    params: Any,
    prefix: Int[Array, "M S"],
    lengths: Int[Array, " M"],
    begun: Int[Array, "M G U"],
) -> Prefilled:
    """Keys and values of prompts without their last token, right-padded, and of what their answers have been fed.

    An answer of n tokens has been fed the prompt's last token and its own first n−1. U is 0 when nothing was begun.
    """
    model, blocks = _blocks(config, params)
    (m, size), (_, group, fed) = prefix.shape, begun.shape
    own = lengths[:, None] + jnp.tile(jnp.arange(fed), group)[None]
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(size), (m, size)), own], axis=1)
    angles = transformer.rope(positions, config)
    inner = attention.grouped(lengths, size, group) if fed else lambda q, k, v, _: (attention.causal(q, k, v), None)
    attend = lambda q, k, v, _: (inner(q, k, v, None)[0], (k, v))
    x = model.embedded(jnp.concatenate([prefix, begun.reshape(m, group * fed)], axis=1))
    prefixes, owns = [], []
    for block in blocks:
        x, (k, v) = block(x, angles, attend, None)
        answers = [y[:, size:].reshape(m * group, fed, *y.shape[2:]) for y in (k, v)]
        prefixes.append((k[:, :size].transpose(0, 2, 3, 1), v[:, :size].swapaxes(1, 2)))
        owns.append((answers[0].transpose(0, 2, 3, 1), answers[1].swapaxes(1, 2)))
    return Prefilled(tuple(prefixes), tuple(owns))


def init_state(
    config: transformer.ModelConfig, kv_dtype: str, rows: int, prefixes: int, size: int, columns: int
) -> DecodeState:
    """Empty rows with room for `columns` tokens, and prefixes of up to `size` tokens. kv_dtype: of the caches."""
    kv, width = config.kv_heads, config.head_width
    split = lambda x: jax.tree.map(lambda y: constrain(y, "batch", *(("kv_heads",) if y.ndim > 1 else ())), x)
    keys = lambda n, tokens: split(cache.empty((n, kv, width, tokens), kv_dtype, WIDTH_OF_KEYS))
    values = lambda n, tokens: split(cache.empty((n, kv, tokens, width), kv_dtype, WIDTH_OF_VALUES))
    make = lambda: LayerCache(keys(prefixes, size), values(prefixes, size), keys(rows, columns), values(rows, columns))
    zeros = lambda dtype=jnp.int32, n=rows: split(jnp.zeros(n, dtype))
    return DecodeState(
        caches=tuple(make() for _ in range(config.layers)),
        prefix_lengths=zeros(n=prefixes),
        step=jnp.int32(0),
        start=zeros(),
        limit=zeros(),
        token=zeros(),
        live=zeros(bool),
        draw=Draw(split(jnp.broadcast_to(jax.random.key(0), rows)), zeros(jnp.float32), zeros(), zeros(jnp.float32)),
    )


def insert_prefixes(
    state: DecodeState, filled: tuple[tuple[Array, Array], ...], lengths: Int[Array, " M"], into: Int[Array, " M"]
) -> DecodeState:
    """Put M prefilled prompts into prefixes `into`; a number past the end is dropped (padding)."""

    def put(old: Stored, new: Array, width: int) -> Stored:
        new = cache.stored(new, kind(old), width)
        grown = lambda a, b: jnp.pad(b, [(0, 0), *((0, n - m) for n, m in zip(a.shape[1:], b.shape[1:], strict=True))])
        return jax.tree.map(lambda a, b: a.at[into].set(grown(a, b), mode="drop"), old, new)

    caches = tuple(
        c._replace(prefix_k=put(c.prefix_k, k, WIDTH_OF_KEYS), prefix_v=put(c.prefix_v, v, WIDTH_OF_VALUES))
        for c, (k, v) in zip(state.caches, filled, strict=True)
    )
    return replace(state, caches=caches, prefix_lengths=state.prefix_lengths.at[into].set(lengths, mode="drop"))


def insert_rows(state: DecodeState, rows: Rows, own: tuple[tuple[Array, Array], ...] | None = None) -> DecodeState:
    """Begin or continue Q answers. own: keys and values of the tokens they have been fed, [Q,K,C,U] and [Q,K,U,C]."""
    put = lambda old, new: old.at[rows.row].set(new, mode="drop")
    start = state.step - rows.count
    caches = state.caches
    if own is not None:
        columns = room(caches[0].own_v)
        at = (jnp.arange(columns)[None] - start[:, None]) % columns  # which of its tokens an answer has in a column

        def rolled(old: Stored, new: Array, width: int) -> Stored:
            tokens = 5 - width  # keys have their tokens last, values their width
            index = jnp.expand_dims(jnp.minimum(at, new.shape[tokens] - 1), (1, width))
            new = jnp.take_along_axis(new, index, axis=tokens)
            return jax.tree.map(put, old, cache.stored(new, kind(old), width))

        caches = tuple(
            c._replace(own_k=rolled(c.own_k, k, WIDTH_OF_KEYS), own_v=rolled(c.own_v, v, WIDTH_OF_VALUES))
            for c, (k, v) in zip(caches, own, strict=True)
        )
    return replace(
        state,
        caches=caches,
        start=put(state.start, start),
        limit=put(state.limit, rows.limit),
        token=put(state.token, rows.token),
        live=put(state.live, rows.count < rows.limit),
        draw=jax.tree.map(put, state.draw, rows.draw),
    )


def repack(
    state: DecodeState, rows: Int[Array, " N'"], prefixes: Int[Array, " R'"], size: int, columns: int
) -> DecodeState:
    """The same answers in other rows, prefixes and room: new row n is old row rows[n], and empty if that is negative.

    Legal while no live answer has more than `columns` tokens and no prefix more than `size`.
    """
    age = (state.step - 1 - jnp.arange(columns)) % columns  # of each new column; the same for all rows
    source = (state.step - 1 - age) % room(state.caches[0].own_v)
    split = lambda x: jax.tree.map(lambda y: constrain(y, "batch", *(("kv_heads",) if y.ndim > 1 else ())), x)

    def own(x: Array, tokens: int) -> Array:
        return split(jnp.take(x[jnp.maximum(rows, 0)], source, axis=tokens))

    def prefix(x: Array, tokens: int) -> Array:
        x = jax.lax.slice_in_dim(x[jnp.maximum(prefixes, 0)], 0, min(size, x.shape[tokens]), axis=tokens)
        return split(jnp.pad(x, [(0, size - n if i == tokens else 0) for i, n in enumerate(x.shape)]))

    caches = tuple(
        LayerCache(
            *(jax.tree.map(partial(prefix, tokens=axis), x) for x, axis in ((c.prefix_k, 3), (c.prefix_v, 2))),
            *(jax.tree.map(partial(own, tokens=axis), x) for x, axis in ((c.own_k, 3), (c.own_v, 2))),
        )
        for c in state.caches
    )
    pick = lambda x: split(x[jnp.maximum(rows, 0)])
    return replace(
        state,
        caches=caches,
        prefix_lengths=split(state.prefix_lengths[jnp.maximum(prefixes, 0)]),
        start=pick(state.start),
        limit=pick(state.limit),
        token=pick(state.token),
        live=pick(state.live) & (rows >= 0),
        draw=jax.tree.map(pick, state.draw),
    )


def decode_k(
    config: transformer.ModelConfig,
    eos_ids: tuple[int, ...],
    filtered: bool,
    params: Any,
    state: DecodeState,
    lanes: Int[Array, "D R/D L"],
    place: Int[Array, "D N/D"],
    forced: Int[Array, "N k"],
) -> tuple[DecodeState, Drawn]:
    """Up to k more tokens for every live answer, in one loop that ends early when none is left.

    Log-probs come from the same fp32 logits that the token is drawn from. An answer ends with an end-of-sequence token
    (kept) or at its limit; finished rows ride along without effect until they are filled again. `lanes` and `place`:
    see `View`. `filtered`: some row has a top-k or top-p filter. `forced`: tokens to be taken in place of drawing,
    negative where to draw.
    """
    model, blocks = _blocks(config, params)
    head = model.head_matrix()
    (rows, steps), columns = forced.shape, room(state.caches[0].own_v)
    eos = jnp.asarray(eos_ids, jnp.int32)

    def one(carry: tuple[Array, DecodeState, Drawn]) -> tuple[Array, DecodeState, Drawn]:
        i, s, out = carry
        count = s.step - s.start  # tokens that a live answer has
        column = s.step % columns
        age = (column - jnp.arange(columns)) % columns
        view = View(s.prefix_lengths, lanes, place, column, age[None] <= count[:, None])
        attend = cache.decode(view)
        row_prefix = jax.vmap(lambda n, p: n[p // lanes.shape[2]])(s.prefix_lengths.reshape(lanes.shape[:2]), place)
        angles = transformer.rope((row_prefix.reshape(-1) + count)[:, None], config)
        x, caches = model.embedded(s.token[:, None]), []
        for block, layer in zip(blocks, s.caches, strict=True):
            x, layer = block(x, angles, attend, layer)
            caches.append(layer)
        with jax.named_scope("sample"):
            logits = tempered_logits(model.norm(x)[:, 0], head, 1.0)
            token, logp = sample(logits, s.draw, count, forced[:, i], filtered)
        live = s.live & ~jnp.isin(token, eos) & (count + 1 < s.limit)
        column_of = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new[:, None], i, axis=1)
        out = Drawn(column_of(out.tokens, token), column_of(out.logp, logp), out.count + s.live, live)
        return i + 1, replace(s, caches=tuple(caches), token=token, live=live, step=s.step + 1), out

    nothing = Drawn(
        constrain(jnp.zeros((rows, steps), jnp.int32), "batch"),
        constrain(jnp.zeros((rows, steps), jnp.float32), "batch"),
        jnp.zeros_like(state.limit),
        state.live,
    )
    go = lambda c: (c[0] < steps) & c[1].live.any()
    _, state, drawn = jax.lax.while_loop(go, one, (jnp.int32(0), state, nothing))
    return state, drawn
