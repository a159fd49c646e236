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

    The flattened B·T tokens are split into blocks of `chunk` tokens, whose logits are recomputed in the backward pass.
    A block takes every n-th token, so that with B sharded each device works on its share of every block. Both outputs
    carry gradient; the head's is summed over the blocks in fp32. Raises ValueError for a temperature or chunk that is
    not positive.
    """
    expect(temperature > 0, "temperature", temperature, "a positive number")
    hidden, head, targets = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets)
    summed = head.astype(jnp.float32)

    @jax.checkpoint
    def block(h: Array, y: Array) -> tuple[Array, Array]:
        logits = tempered_logits(h, _with_gradient_to(summed, head), temperature)
        lse = jax.nn.logsumexp(logits, axis=-1)
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == y[:, None]
        logp = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1) - lse
        logps = logits - lse[:, None]  # not H = lse − Σ π·logits, which cancels: a hundred times the rounding error
        return logp, -jnp.sum(jnp.exp(logps) * logps, axis=-1)

    return _by_blocks(block, chunk, hidden, targets)


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
    hidden, head = jnp.asarray(hidden), jnp.asarray(head)
    teacher = jax.lax.stop_gradient((jnp.asarray(teacher_hidden), jnp.asarray(teacher_head)))
    summed, both = head.astype(jnp.float32), min(head.shape[1], teacher[1].shape[1])

    @jax.checkpoint
    def block(h: Array, h_teacher: Array) -> Array:
        logps = jax.nn.log_softmax(tempered_logits(h, _with_gradient_to(summed, head), temperature))[:, :both]
        apart = logps - jax.nn.log_softmax(tempered_logits(h_teacher, teacher[1], temperature))[:, :both]
        return jnp.sum(jnp.exp(logps) * apart, axis=-1)

    return _by_blocks(block, chunk, hidden, teacher[0])


def _by_blocks(block: Callable, chunk: int, *arrays: Array) -> Any:
    """block(*arrays [N,…]) → array or arrays [N], for arrays [B,T,…] in blocks of at most `chunk` of the B·T tokens."""
    expect(chunk >= 1, "chunk", chunk, "at least 1 token")
    shape, n = arrays[0].shape[:2], arrays[0].shape[0] * arrays[0].shape[1]
    blocks = -(-n // chunk)
    flat = [x.reshape(n, *x.shape[2:]) for x in arrays]
    if blocks <= 1:
        out = block(*flat)
    else:
        padded = [jnp.pad(x, ((0, -n % blocks), *[(0, 0)] * (x.ndim - 1))) for x in flat]
        split = [x.reshape(-1, blocks, *x.shape[1:]).swapaxes(0, 1) for x in padded]
        out = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1)[:n], jax.lax.map(lambda xs: block(*xs), split))
    return jax.tree.map(lambda x: x.reshape(shape), out)
