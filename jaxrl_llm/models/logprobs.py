"""Hidden states → log-prob of the target and entropy, a block of tokens at a time: [B,T,V] never exists.

The one path for old, reference, current and evaluation log-probs; the sampler takes its log-probs from `log_softmax`.
"""

from __future__ import annotations

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
    expect(chunk >= 1, "chunk", chunk, "at least 1 token")
    hidden, head, targets = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or targets.shape[0] % sharding.rows(1, mesh):
        return _in_blocks(hidden, head.astype(jnp.float32), head, targets, temperature, chunk, ())

    def on_device(hidden: Array, summed: Array, head: Array, targets: Array) -> tuple[Array, Array]:
        # Its gradient is one sum over the devices, here, and not one in each block
        summed, head = (jax.lax.pcast(x, sharding.BATCH, to="varying") for x in (summed, head))
        return _in_blocks(hidden, summed, head, targets, temperature, chunk, ("tensor",))

    rows, columns = sharding.PartitionSpec(sharding.BATCH), sharding.PartitionSpec(None, "tensor")
    split = jax.shard_map(on_device, in_specs=(rows, columns, columns, rows), out_specs=(rows, rows))
    return split(hidden, head.astype(jnp.float32), head, targets)


def _in_blocks(
    hidden: Array, summed: Array, head: Array, targets: Array, temperature: float, chunk: int, over: tuple[str, ...]
) -> tuple[Array, Array]:
    """`token_logprobs` of what one device has. over: the mesh axes that the vocabulary is split over."""
    total = lambda x: jax.lax.psum(jnp.sum(x, axis=-1), over)
    first = jax.lax.axis_index(over) * head.shape[1] if over else 0

    @jax.checkpoint
    def block(h: Array, y: Array) -> tuple[Array, Array]:
        logits = tempered_logits(h, _with_gradient_to(summed, head), temperature)
        top = jax.lax.stop_gradient(logits).max(axis=-1)
        top = jax.lax.pmax(top, over) if over else top
        lse = jnp.log(total(jnp.exp(logits - top[:, None]))) + top
        hit = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == y[:, None]
        logp = total(jnp.where(hit, logits, 0.0)) - lse
        logps = logits - lse[:, None]  # not H = lse − Σ π·logits, which cancels: a hundred times the rounding error
        return logp, -total(jnp.exp(logps) * logps)

    n, width = targets.size, hidden.shape[-1]
    blocks, flat = -(-n // chunk), (hidden.reshape(n, width), targets.reshape(n))
    if blocks <= 1:
        out = block(*flat)
    else:
        cut = lambda x: jnp.pad(x, ((0, -n % blocks), *((0, 0),) * (x.ndim - 1))).reshape(blocks, -1, *x.shape[1:])
        out = (x.reshape(-1)[:n] for x in jax.lax.map(lambda xs: block(*xs), tuple(map(cut, flat))))
    return tuple(x.reshape(targets.shape) for x in out)
