"""Hidden states → log-prob of the target and entropy, a block of tokens at a time: [B,T,V] never exists.

The one path for old, reference, current and evaluation log-probs; the sampler takes its log-probs from `log_softmax`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import expect


def tempered_logits(hidden: Float[Array, "N D"], head: Float[Array, "D V"], temperature: float) -> Float[Array, "N V"]:
    """Logits in fp32, divided by the temperature; the product is taken in the head's dtype."""
    precision = jax.lax.Precision.HIGHEST if head.dtype == jnp.float32 else None
    logits = jnp.dot(hidden.astype(head.dtype), head, precision=precision, preferred_element_type=jnp.float32)
    return logits / temperature


@jax.custom_vjp
def _with_gradient_to(summed: Float[Array, "D V"], head: Float[Array, "D V"]) -> Float[Array, "D V"]:
    """The head itself, whose gradient goes to `summed`: a scan adds up its blocks' gradients in that one's dtype."""
    return head


_with_gradient_to.defvjp(lambda summed, head: (head, None), lambda _, slope: (slope.astype(jnp.float32), None))


def token_logprobs(
    hidden: Float[Array | np.ndarray, "B T D"],
    head: Float[Array | np.ndarray, "D V"],
    targets: Int[Array | np.ndarray, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log π(target) and entropy H = −Σ π log π, in nats, of π = softmax(hidden·head / temperature).

    The flattened B·T tokens are taken in blocks of `chunk`, whose logits are recomputed in the backward pass. Both
    outputs carry gradient; the head's is summed over the blocks in fp32. On a mesh (`jax.set_mesh`) whose data and fsdp
    axes divide B, each device takes its own rows' blocks, with the head gathered once, its gradient reduced once, and
    the vocabulary split over `tensor`. Raises ValueError for a temperature or chunk that is not positive.
    """
    expect(temperature > 0, "temperature", temperature, "a positive number")

    def block(over: tuple[str, ...], summed: Array, head: Array, h: Array, y: Array) -> tuple[Array, Array]:
        logps = _log_softmax(tempered_logits(h, _with_gradient_to(summed, head), temperature), over)
        logp = _total(jnp.where(_columns(logps, over) == y[:, None], logps, 0.0), over)
        return logp, -_total(jnp.exp(logps) * logps, over)

    head = jnp.asarray(head)
    return _by_blocks(block, chunk, (jnp.asarray(hidden), jnp.asarray(targets)), (head.astype(jnp.float32), head))


def reverse_kl(
    hidden: Float[Array | np.ndarray, "B T D"],
    head: Float[Array | np.ndarray, "D V"],
    teacher_hidden: Float[Array | np.ndarray, "B T E"],
    teacher_head: Float[Array | np.ndarray, "E W"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Float[Array, "B T"]:
    """The divergence of the policy from a teacher over the whole vocabulary, exact and with gradient, in nats.

        KL(π ‖ π_T) = Σ_v π_v·(log π_v − log π_Tv),   both at this temperature

    Blocks as in `token_logprobs`; the teacher gets no gradient. Where one head has more columns than the other (padding
    that no token stands for) each is normalised over its own, and the sum is over those that both have. Raises
    ValueError as `token_logprobs` does.
    """
    expect(temperature > 0, "temperature", temperature, "a positive number")
    heads = jnp.asarray(head), jax.lax.stop_gradient(jnp.asarray(teacher_head))
    widths = [x.shape[1] for x in heads]
    own, other = (jnp.pad(x, ((0, 0), (0, max(widths) - x.shape[1]))) for x in heads)  # one split over the devices

    def block(over: tuple[str, ...], summed: Array, own: Array, other: Array, h: Array, h_teacher: Array) -> Array:
        logits = tempered_logits(h, _with_gradient_to(summed, own), temperature)
        column = _columns(logits, over)
        real = lambda x, width: x if width == max(widths) else jnp.where(column < width, x, -1e30)
        logps = _log_softmax(real(logits, widths[0]), over)
        its_logps = _log_softmax(real(tempered_logits(h_teacher, other, temperature), widths[1]), over)
        apart = jnp.where(column < min(widths), logps - its_logps, 0.0)
        return _total(jnp.exp(logps) * apart, over)

    rows = jnp.asarray(hidden), jax.lax.stop_gradient(jnp.asarray(teacher_hidden))
    return _by_blocks(block, chunk, rows, (own.astype(jnp.float32), own, other))


def _total(x: Float[Array, "N V"], over: tuple[str, ...]) -> Float[Array, " N"]:
    return jax.lax.psum(jnp.sum(x, axis=-1), over)


def _columns(logits: Float[Array, "N V"], over: tuple[str, ...]) -> Int[Array, "N V"]:
    first = jax.lax.axis_index(over) * logits.shape[1] if over else 0
    return first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)


def _log_softmax(logits: Float[Array, "N V"], over: tuple[str, ...]) -> Float[Array, "N V"]:
    """Of a vocabulary that is split over these mesh axes."""
    top = jax.lax.stop_gradient(logits).max(axis=-1)
    top = (jax.lax.pmax(top, over) if over else top)[:, None]
    return logits - (jnp.log(_total(jnp.exp(logits - top), over))[:, None] + top)


def _by_blocks(block: Callable, chunk: int, rows: tuple[Array, ...], heads: tuple[Array, ...]) -> Any:
    """block(axes, *heads, *rows [N,…]) → array or arrays [N], for rows [B,T,…] in blocks of at most `chunk` of the B·T
    tokens. axes: of the mesh, over which the block's heads are split.
    """
    expect(chunk >= 1, "chunk", chunk, "at least 1 token")

    def blocks(over: tuple[str, ...], heads: tuple[Array, ...], rows: tuple[Array, ...]) -> Any:
        shape, n = rows[0].shape[:2], rows[0].shape[0] * rows[0].shape[1]
        count, flat = -(-n // chunk), [x.reshape(n, *x.shape[2:]) for x in rows]
        one = jax.checkpoint(lambda xs: block(over, *heads, *xs))
        if count <= 1:
            out = one(flat)
        else:
            cut = lambda x: jnp.pad(x, ((0, -n % count), *((0, 0),) * (x.ndim - 1))).reshape(count, -1, *x.shape[1:])
            out = jax.tree.map(lambda x: x.reshape(-1)[:n], jax.lax.map(one, [cut(x) for x in flat]))
        return jax.tree.map(lambda x: x.reshape(shape), out)

    def on_device(heads: tuple[Array, ...], rows: tuple[Array, ...]) -> Any:
        # A head's gradient is summed over the devices here, once, and not in each block
        return blocks(("tensor",), tuple(jax.lax.pcast(x, sharding.BATCH, to="varying") for x in heads), rows)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or rows[0].shape[0] % sharding.rows(1, mesh) or heads[0].shape[1] % mesh.shape["tensor"]:
        return blocks((), heads, rows)
    by_row, by_column = sharding.PartitionSpec(sharding.BATCH), sharding.PartitionSpec(None, "tensor")
    return jax.shard_map(on_device, in_specs=(by_column, by_row), out_specs=by_row)(heads, rows)
