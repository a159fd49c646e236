"""The sampler's pure core: prefill prompts, insert answers into rows, decode k tokens for every row.

N rows hold an answer each and R prefixes a prompt each (pictured in cache.py); a prompt is prefilled once, for all of
its answers. Its last token is no part of the prefix: it is the first input of each answer, so that the first token
is drawn like all others. In decoding step s every row writes column s mod T; `start` remembers when a row was filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxrl_llm.models import attention, lora, moe, transformer
from jaxrl_llm.models.attention import Attend
from jaxrl_llm.models.kernels import platform
from jaxrl_llm.models.logprobs import tempered_logits
from jaxrl_llm.models.quantize import Quantized, dequantized
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.parallel.sharding import constrain
from jaxrl_llm.sampler import cache, page_attention
from jaxrl_llm.sampler.cache import KEYS_TOKENS, KEYS_WIDTH, VALUES_TOKENS, VALUES_WIDTH, Cached, token_capacity
from jaxrl_llm.sampler.sampling import Draw, sample

KeysValues = tuple[cache.Layer, ...]


class Prefixes(NamedTuple):
    """R prompts of up to S tokens, each without its last."""

    kv: KeysValues  # [R,K,C,S], [R,K,S,C]
    lengths: Int[Array, " R"]


class Answers(NamedTuple):
    """How far the answers in N rows have come."""

    start: Int[Array, " N"]  # the step that drew, or would have drawn, the answer's first token
    limit: Int[Array, " N"]  # tokens an answer may have
    token: Int[Array, " N"]  # the next input
    live: Bool[Array, " N"]  # there is more to be drawn
    draw: Draw  # how each row's tokens are drawn, and its key; position is folded in for each token


class DecodeState(NamedTuple):
    """Everything that decoding reads and writes. R prefixes, N rows, T columns."""

    prefixes: Prefixes
    suffixes: KeysValues  # [N,K,C,T], [N,K,T,C]
    answers: Answers
    step: Int[Array, ""]  # decoding steps so far, the clock of all rows


class PagedState(NamedTuple):
    """The same with pages in place of prefixes and rings: see page_attention.py."""

    pools: tuple[page_attention.Pool, ...]  # of each layer
    answers: Answers
    step: Int[Array, ""]


class Rows(NamedTuple):
    """Q answers to be inserted; one whose row number is past the end is dropped (padding)."""

    row: Int[Array, " Q"]
    token: Int[Array, " Q"]  # the first input
    count: Int[Array, " Q"]  # tokens that the answer has already
    limit: Int[Array, " Q"]
    draw: Draw


class Drawn(NamedTuple):
    """What one call of `decode_k` has drawn. Row n's tokens are the first count[n] of its k."""

    tokens: Int[Array, "N k"]
    logp: Float[Array, "N k"]
    count: Int[Array, " N"]
    live: Bool[Array, " N"]  # there is more to be drawn
    experts: Integer[Array, "N k L K"] | None = None  # to which the routers sent each token's input, if recorded


def _blocks(config: ModelConfig, params: Any) -> tuple[transformer.Transformer, list[transformer.Block]]:
    """The model and its blocks one by one, for params whose layers are a list (see `weights.push`)."""
    model = nnx.eval_shape(lambda: transformer.Transformer(lora.without(config), nnx.Rngs(0)))
    graph = nnx.split(model.layers)[0]
    blocks = [nnx.merge(graph, dequantized(layer, config.dtype)) for layer in params["layers"]]
    del model.layers
    nnx.update(model, {k: v for k, v in params.items() if k != "layers"})  # which restores what it uses of them
    return model, blocks


def _at_step(config: ModelConfig, params: Any) -> Callable[[Array], tuple[transformer.Transformer, list, Array]]:
    """The model, its blocks and its head's matrix, as a loop's step is to use them.

    Quantized matrices are restored within each step's products, because a step's time is that of reading the weights;
    on a CPU, where it is not, once for all steps.
    """

    def read(params: Any) -> tuple[transformer.Transformer, list, Array]:
        model, blocks = _blocks(config, params)
        return model, blocks, model.head_matrix()

    kept = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantized))
    if platform() == "cpu" or not any(isinstance(x, Quantized) for x in kept):
        whole = read(params)
        return lambda step: whole
    # The barrier ties them to the step, or the compiler would restore them once, before the loop.
    return lambda step: read(jax.lax.optimization_barrier((params, step))[0])


def prefill(
    config: ModelConfig, params: Any, prefix: Int[Array, "M S"], lengths: Int[Array, " M"], fed: Int[Array, "M G U"]
) -> tuple[KeysValues, KeysValues]:
    """Keys and values of M prompts, without their last tokens and right-padded, and of what M·G answers were fed.

    fed: to each begun answer, the prompt's last token and all its own but the last. U is 0 if none was begun.
    """
    model, blocks = _blocks(config, params)
    (m, size), (_, group, n) = prefix.shape, fed.shape
    behind_prompt = lengths[:, None] + jnp.tile(jnp.arange(n), group)[None]
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(size), (m, size)), behind_prompt], axis=1)
    angles = transformer.rope(positions, config)
    layout = attention.grouped(lengths, size, group, "xla")
    inner = layout if n else lambda q, k, v, _: (attention.causal(q, k, v), None)
    attend = lambda q, k, v, _: (inner(q, k, v, None)[0], (k, v))
    x = model.embedded(jnp.concatenate([prefix, fed.reshape(m, group * n)], axis=1))
    stored = lambda k, v: (k.transpose(0, 2, 3, 1), v.swapaxes(1, 2))
    prefixes, suffixes = [], []
    for block in blocks:
        x, kv, _ = block(x, angles, attend, None)
        prefixes.append(stored(*(y[:, :size] for y in kv)))
        suffixes.append(stored(*(y[:, size:].reshape(m * group, n, *y.shape[2:]) for y in kv)))
    return tuple(prefixes), tuple(suffixes)


def init(config: ModelConfig, kv_dtype: str, prefixes: int, size: int, rows: int, columns: int) -> DecodeState:
    """Prefixes of up to `size` tokens and rows of up to `columns`, all empty. kv_dtype: of keys and values."""

    def empty(n: int, tokens: int) -> KeysValues:
        zeros = lambda *shape: jnp.zeros((n, config.kv_heads, *shape))
        keys = lambda: _split(cache.in_dtype(zeros(config.head_width, tokens), kv_dtype, KEYS_WIDTH))
        values = lambda: _split(cache.in_dtype(zeros(tokens, config.head_width), kv_dtype, VALUES_WIDTH))
        return tuple((keys(), values()) for _ in range(config.layers))

    lengths = _split(jnp.zeros(prefixes, jnp.int32))
    return DecodeState(Prefixes(empty(prefixes, size), lengths), empty(rows, columns), _no_answers(rows), jnp.int32(0))


def _no_answers(rows: int) -> Answers:
    zeros = lambda dtype=jnp.int32: _split(jnp.zeros(rows, dtype))
    keys = _split(jnp.broadcast_to(jax.random.key(0), rows))
    return Answers(zeros(), zeros(), zeros(), zeros(bool), Draw(keys, zeros(jnp.float32), zeros(), zeros(jnp.float32)))


def _split(tree: Any) -> Any:
    """Arrays with their rows over the mesh's batch axes and their heads over its tensor axis."""
    return jax.tree.map(lambda x: constrain(x, "batch", *(("kv_heads",) if x.ndim > 1 else ())), tree)


def _each(change: Callable[..., Cached], kv: KeysValues, *new: tuple) -> KeysValues:
    """`change` of all keys and values, beside the new ones if any; it gets their axes of width and tokens too."""
    axes = (KEYS_WIDTH, KEYS_TOKENS), (VALUES_WIDTH, VALUES_TOKENS)
    layers = zip(kv, *new, strict=True)
    return tuple(tuple(change(*x, *axes[i]) for i, x in enumerate(zip(*layer, strict=True))) for layer in layers)


def _put(old: Cached, new: Array, rows: Int[Array, " Q"], width_axis: int) -> Cached:
    """New keys or values in the rows of old ones, as far as they go."""

    def put(a: Array, b: Array) -> Array:
        b = jnp.pad(b, [(0, 0), *((0, n - m) for n, m in zip(a.shape[1:], b.shape[1:], strict=True))])
        return a.at[rows].set(b, mode="drop")

    return jax.tree.map(put, old, cache.like(old, new, width_axis))


def insert_prefixes(prefixes: Prefixes, new: KeysValues, lengths: Int[Array, " M"], into: Int[Array, " M"]) -> Prefixes:
    """Put M prefilled prompts into the prefixes numbered `into`; a number past the end is dropped (padding)."""
    kv = _each(lambda x, y, width_axis, _: _put(x, y, into, width_axis), prefixes.kv, new)
    return Prefixes(kv, prefixes.lengths.at[into].set(lengths, mode="drop"))


def insert_rows(answers: Answers, step: Int[Array, ""], rows: Rows) -> Answers:
    """Begin or continue Q answers."""
    new = Answers(step - rows.count, rows.limit, rows.token, rows.count < rows.limit, rows.draw)
    return jax.tree.map(lambda old, new: old.at[rows.row].set(new, mode="drop"), answers, new)


def insert_suffixes(
    suffixes: KeysValues, step: Int[Array, ""], rows: Int[Array, " Q"], count: Int[Array, " Q"], filled: KeysValues
) -> KeysValues:
    """Put the keys and values [Q,K,C,U], [Q,K,U,C] of answers with `count` tokens into their rows."""
    columns = token_capacity(suffixes[0][1])
    token = (jnp.arange(columns)[None] - (step - count)[:, None]) % columns  # [Q,T]: the one that a column holds

    def put(old: Cached, new: Array, width_axis: int, token_axis: int) -> Cached:
        index = jnp.expand_dims(jnp.minimum(token, new.shape[token_axis] - 1), (1, width_axis))
        return _put(old, jnp.take_along_axis(new, index, axis=token_axis), rows, width_axis)

    return _each(put, suffixes, filled)


def repack_prefixes(prefixes: Prefixes, source: Int[Array, " R'"], size: int) -> Prefixes:
    """Prompts renumbered and with space for `size` tokens: new prefix r is old prefix source[r], any if negative."""

    def moved(x: Array, token_axis: int) -> Array:
        x = jax.lax.slice_in_dim(x[jnp.maximum(source, 0)], 0, min(size, x.shape[token_axis]), axis=token_axis)
        return _split(jnp.pad(x, [(0, size - n if i == token_axis else 0) for i, n in enumerate(x.shape)]))

    kv = _each(lambda x, _, token_axis: jax.tree.map(lambda y: moved(y, token_axis), x), prefixes.kv)
    return Prefixes(kv, _split(prefixes.lengths[jnp.maximum(source, 0)]))


def repack_suffixes(suffixes: KeysValues, step: Int[Array, ""], source: Int[Array, " N'"], columns: int) -> KeysValues:
    """Suffixes in other rows and in a ring of `columns`, which no live answer's tokens may exceed."""
    old_columns = token_capacity(suffixes[0][1])
    age = (step - 1 - jnp.arange(columns)) % columns  # steps since a new column was written, the same for all rows

    def moved(x: Array, token_axis: int) -> Array:
        x = x[jnp.maximum(source, 0)]
        if columns % old_columns == 0:  # then new column c is old column c mod `old_columns`, whatever the step
            return _split(jnp.concatenate([x] * (columns // old_columns), axis=token_axis))
        return _split(jnp.take(x, (step - 1 - age) % old_columns, axis=token_axis))

    return _each(lambda x, _, token_axis: jax.tree.map(lambda y: moved(y, token_axis), x), suffixes)


def repack_answers(answers: Answers, source: Int[Array, " N'"]) -> Answers:
    """Answers in other rows: new row n is old row source[n], and empty if that is negative."""
    answers = jax.tree.map(lambda x: _split(x[jnp.maximum(source, 0)]), answers)
    return answers._replace(live=answers.live & (source >= 0))


def decode_k(
    config: ModelConfig,
    eos_ids: tuple[int, ...],
    filtered: bool,
    params: Any,
    state: DecodeState,
    lanes: Int[Array, "D R/D L"],
    lane_of_row: Int[Array, "D N/D"],
    forced: Int[Array, "N k"],
    record: bool = False,
) -> tuple[DecodeState, Drawn]:
    """Up to k more tokens for every live answer, in one loop that ends early when no answer is live.

    Log-probs come from the same fp32 logits that the token is drawn from. An answer ends with any of `eos_ids` (kept)
    or at its limit; rows whose answer has ended are computed too, without effect, until they are filled again.
    filtered: some row has a top-k or top-p filter. lanes, lane_of_row: see `View`. forced: tokens to be taken in place
    of drawing, negative where to draw. record: the routers' choices are returned too, of a mixture of experts.
    """
    prefixes, columns = state.prefixes, token_capacity(state.suffixes[0][1])
    lengths = jax.vmap(lambda n, p: n[p // lanes.shape[2]])(prefixes.lengths.reshape(lanes.shape[:2]), lane_of_row)

    def attends(step: Int[Array, ""], answers: Answers) -> list[Attend]:
        column, count = step % columns, step - answers.start
        age = (column - jnp.arange(columns)) % columns
        view = cache.View(prefixes.lengths, lanes, lane_of_row, column, age[None] <= count[:, None])
        attend = cache.decode(view)
        return [lambda q, k, v, suffix, prefix=prefix: attend(q, k, v, (prefix, suffix)) for prefix in prefixes.kv]

    start = state.suffixes, state.answers, state.step
    suffixes, answers, step, drawn = draw_k(
        config, eos_ids, filtered, params, start, lengths.reshape(-1), attends, forced, record
    )
    return DecodeState(prefixes, suffixes, answers, step), drawn


def draw_k(
    config: ModelConfig,
    eos_ids: tuple[int, ...],
    filtered: bool,
    params: Any,
    start: tuple[Any, Answers, Int[Array, ""]],
    lengths: Int[Array, " N"],
    attends: Callable[[Int[Array, ""], Answers], list[Attend]],
    forced: Int[Array, "N k"],
    record: bool,
) -> tuple[Any, Answers, Int[Array, ""], Drawn]:
    """The loop of `decode_k`, whatever keeps keys and values.

    start: what keeps them, of each layer; the answers; the clock.  lengths: of the prompts without their last tokens.
    attends: each layer's attention at a clock's reading.
    """
    (rows, steps), (caches, answers, clock), weights = forced.shape, start, _at_step(config, params)
    eos = jnp.asarray(eos_ids, jnp.int32)
    # Of all the steps at once: within the loop XLA would compute a cosine and a sine for each head and layer again.
    angles = transformer.rope((lengths + clock - answers.start)[None] + jnp.arange(steps)[:, None], config)

    def one(carry: tuple[Array, Any, Answers, Drawn]) -> tuple[Array, Any, Answers, Drawn]:
        i, kv, s, out = carry
        model, blocks, head = weights(i)
        count = clock + i - s.start  # tokens that a live answer has
        here = jax.tree.map(lambda a: a[i][:, None], angles)
        x, new, routed = model.embedded(s.token[:, None]), [], []
        for block, attend, layer in zip(blocks, attends(clock + i, s), kv, strict=True):
            x, layer, router = block(x, here, attend, layer)
            new.append(layer)
            routed.append(router)
        with jax.named_scope("sample"):
            logits = tempered_logits(model.norm(x)[:, 0], head, 1.0)
            token, logp = sample(logits, s.draw, count, forced[:, i], filtered)
        live = s.live & ~jnp.isin(token, eos) & (count + 1 < s.limit)
        column_of = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new[:, None], i, axis=1)
        chosen = None
        if record:
            chosen = column_of(out.experts, moe.top_experts(jnp.stack(routed, axis=2)[:, 0], config.experts_per_token))
        out = Drawn(column_of(out.tokens, token), column_of(out.logp, logp), out.count + s.live, live, chosen)
        return i + 1, tuple(new), s._replace(token=token, live=live), out

    zeros = lambda dtype, *more: constrain(jnp.zeros((rows, steps, *more), dtype), "batch")
    routes = config.layers, config.experts_per_token
    unrouted = zeros(moe.id_dtype(config.experts), *routes) if record else None
    nothing = Drawn(zeros(jnp.int32), zeros(jnp.float32), jnp.zeros_like(answers.limit), answers.live, unrouted)
    # One that ends early would ask all shards after every token whether they have answers left.
    alone = sharding.shards() == 1
    go = lambda c: (c[0] < steps) & (c[2].live.any() if alone else True)
    done, caches, answers, drawn = jax.lax.while_loop(go, one, (jnp.int32(0), caches, answers, nothing))
    return caches, answers, clock + done, drawn


# --- pages ----------------------------------------------------------------------------------------------------------


def init_pages(config: ModelConfig, kv_dtype: str, pages: int, size: int, rows: int) -> PagedState:
    """Empty pages, which the rows' tables share out, and empty rows."""
    zeros = page_attention.init(config, kv_dtype, pages, size)
    on_mesh = lambda pool: jax.tree.map(lambda x: constrain(x, *page_attention.axes(pool)), pool)
    return PagedState(tuple(map(on_mesh, zeros)), _no_answers(rows), jnp.int32(0))


def extend(
    config: ModelConfig, params: Any, pools: Any, tokens: Int[Array, "N B"], blocks: page_attention.Blocks
) -> tuple[page_attention.Pool, ...]:
    """The pools with the keys and values of more tokens of some rows, which read what their rows have before them."""
    model, layers = _blocks(config, params)
    positions = blocks.ends[:, None] - tokens.shape[1] + jnp.arange(tokens.shape[1])[None]
    angles, attend = transformer.rope(positions, config), page_attention.paged(config, blocks)
    x, out = model.embedded(tokens), []
    for layer, pool in zip(layers, pools, strict=True):
        x, pool, _ = layer(x, angles, attend, pool)
        out.append(pool)
    return tuple(out)


def copy_pages(pools: Any, source: Int[Array, " Q"], to: Int[Array, " Q"]) -> tuple[page_attention.Pool, ...]:
    """The pools with whole pages copied in every layer; those to be copied past the end are dropped (padding)."""
    return tuple(page_attention.copied(pool, source, to) for pool in pools)


def decode_pages(
    config: ModelConfig,
    eos_ids: tuple[int, ...],
    filtered: bool,
    params: Any,
    state: PagedState,
    table: Int[Array, "N W"],
    lengths: Int[Array, " N"],
    forced: Int[Array, "N k"],
    record: bool = False,
) -> tuple[PagedState, Drawn]:
    """`decode_k` over pages, which each row's table has for all that this call may write. lengths: as in `draw_k`."""

    def attends(step: Int[Array, ""], answers: Answers) -> list[Attend]:
        ends = jnp.where(answers.live, lengths + step - answers.start + 1, 1)
        blocks = page_attention.Blocks(table, ends, answers.live[:, None])
        return [page_attention.paged(config, blocks)] * config.layers

    start = state.pools, state.answers, state.step
    *after, drawn = draw_k(config, eos_ids, filtered, params, start, lengths, attends, forced, record)
    return PagedState(*after), drawn
