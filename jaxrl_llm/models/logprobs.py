"""Hidden states → log-prob of the target and entropy, a block of tokens at a time: [B,T,V] never exists.

The one path for old, reference, current and evaluation log-probs; the sampler takes its log-probs from `log_softmax`.
"""

from __future__ import annotations

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
    expect(chunk >= 1, "chunk", chunk, "at least 1 token")
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

    n, width = targets.size, hidden.shape[-1]
    blocks = -(-n // chunk)
    flat_h, flat_y = hidden.reshape(n, width), targets.reshape(n)
    if blocks <= 1:
        out = block(flat_h, flat_y)
    else:
        pad = -n % blocks
        flat_h = jnp.pad(flat_h, ((0, pad), (0, 0))).reshape(-1, blocks, width).swapaxes(0, 1)
        flat_y = jnp.pad(flat_y, (0, pad)).reshape(-1, blocks).swapaxes(0, 1)
        out = jax.lax.map(lambda xs: block(*xs), (flat_h, flat_y))
        out = (x.swapaxes(0, 1).reshape(-1)[:n] for x in out)
    return tuple(x.reshape(targets.shape) for x in out)
