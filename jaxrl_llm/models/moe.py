"""Mixture of experts: each token goes through the k of E SwiGLUs that its router scores highest (Qwen3-MoE).

Router and its softmax are in fp32. Tokens are sorted by expert, so that an expert's are one block of a ragged product.
What a router has said leaves the model as its logits [B,T,L,E]; the choice, the load-balancing loss, the router ratio
and the disagreement of two choices are functions of them. A choice is the ids of the experts, in no order.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.parallel import sharding


def id_dtype(experts: int) -> type:
    """In which ids are recorded; its largest number is no expert and stands for "none recorded"."""
    return np.uint8 if experts < 256 else np.uint16


def top_experts(logits: Float[Array, "*N E"], k: int) -> Integer[Array, "*N K"]:
    """A router's choice, compact; of equal logits the first expert's counts more."""
    return jax.lax.top_k(logits, k)[1].astype(id_dtype(logits.shape[-1]))


def gates(logits: Float[Array, "*N E"], experts: Integer[Array, "*N K"], norm_topk: bool) -> Float[Array, "*N K"]:
    """The experts' weights: their part of the softmax over all experts, or with `norm_topk` over these K alone."""
    chosen = jnp.take_along_axis(logits, experts.astype(jnp.int32), axis=-1)
    return jax.nn.softmax(chosen) if norm_topk else jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _experts(
    x: Float[Array, "R N D"],
    experts: Integer[Array, "R N K"],
    weights: Float[Array, "R N K"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "R N D"]:
    """Σ weight · expert(x) over those of each token's experts whose matrices these are: `first` and those after it."""
    k, n = experts.shape[-1], gate.shape[0]
    own = experts.reshape(-1).astype(jnp.int32) - first
    own = jnp.where((own >= 0) & (own < n), own, n)  # the others come last
    order, sizes = jnp.argsort(own), jnp.bincount(own, length=n + 1)[:n].astype(jnp.int32)
    # What a ragged product has behind its last group is not defined: it neither leaves nor sends a gradient back.
    only_own = lambda y: jnp.where((own[order] < n)[:, None], y, 0)
    y = only_own(x.reshape(-1, x.shape[-1])[order // k])
    y = jax.nn.silu(jax.lax.ragged_dot(y, gate, sizes)) * jax.lax.ragged_dot(y, up, sizes)
    y = only_own(jax.lax.ragged_dot(y, down, sizes))[jnp.argsort(order)]
    y = jnp.einsum("nkd,nk->nd", y.reshape(-1, k, x.shape[-1]).astype(jnp.float32), weights.reshape(-1, k))
    return y.astype(x.dtype).reshape(x.shape)


def _expert_parallel(x: Array, experts: Array, weights: Array, *matrices: Array) -> Array:
    """`_experts`, on a mesh by shard_map: a device takes its rows' tokens through its part of the experts.

    XLA does not partition a ragged product, and would sort the tokens of all devices as one list. Here each device
    sorts its own; the parts of a token's sum come together over the experts' mesh axis.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return _experts(x, experts, weights, *matrices)
    axis, rows, parts = sharding.RULES["expert"], sharding.spec(("batch",)), sharding.spec(("expert",))

    def local(x: Array, experts: Array, weights: Array, *matrices: Array) -> Array:
        first = jax.lax.axis_index(axis) * matrices[0].shape[0]
        x = jax.lax.pcast(x, axis, to="varying")  # the gather of its rows would not sum its gradient over the axis
        return jax.lax.psum(_experts(x, experts, weights, *matrices, first), axis)

    return jax.shard_map(local, in_specs=(rows,) * 3 + (parts,) * 3, out_specs=rows)(x, experts, weights, *matrices)


class MoE(nnx.Module):
    """In the place of a SwiGLU: x → Σ_k gate_k · SwiGLU_k(x). No token is dropped, however full an expert is."""

    def __init__(self, c: ModelConfig, param: Callable[[tuple[str, ...], tuple[int, ...], float], nnx.Param]):
        """param: makes a parameter of these logical axes and sizes, with this standard deviation."""
        e, d, f = c.experts, c.width, c.expert_width
        self.router = param(("embed", "router"), (d, e), d**-0.5)
        self.gate = param(("expert", "embed", "expert_width"), (e, d, f), d**-0.5)
        self.up = param(("expert", "embed", "expert_width"), (e, d, f), d**-0.5)
        self.down = param(("expert", "expert_width", "embed"), (e, f, d), (f * 2 * c.layers) ** -0.5)
        self.config = c

    def __call__(
        self, x: Float[Array, "R N D"], replay: Integer[Array, "R N K"] | None = None
    ) -> tuple[Float[Array, "R N D"], Float[Array, "R N E"]]:
        """The layer's output and its router's logits.

        replay: experts to be taken instead of the router's own; they have the live router's gates. Where it holds no
        expert's id the router chooses.
        """
        c = self.config
        logits = jnp.dot(x.astype(jnp.float32), self.router[...].astype(jnp.float32), precision="highest")
        experts = top_experts(logits, c.experts_per_token)
        if replay is not None:
            experts = jnp.where(replay < c.experts, replay, experts)
        matrices = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        return _expert_parallel(x, experts, gates(logits, experts, c.norm_topk), *matrices), logits


# --- what routers have said: B responses, T tokens, L layers, E experts, K of them for a token


def expert_loads(logits: Float[Array, "B T L E"], mask: Bool[Array, "B T"], k: int) -> Float[Array, "L E"]:
    """Tokens that the routers send to each expert; masked ones are left out."""
    hits = logits >= jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.sum(mask[..., None, None] & hits, axis=(0, 1), dtype=jnp.float32)


def load_balancing(
    logits: Float[Array, "B T L E"], mask: Bool[Array, "B T"], loads: Float[Array, "L E"], tokens: Int[Array, ""] | int
) -> Float[Array, ""]:
    """The load-balancing loss, mean over the layers of E · Σ_e f_e·P_e, from K (even loads) to E.

    f_e = loads/tokens: the part of the tokens that has expert e among its K, no gradient;  P_e: the mean probability
    of e.  loads (`expert_loads`) and tokens count the whole optimiser batch, of which these rows may be a part: the
    parts' losses add up to the whole's.  Switch, arXiv 2101.03961; in the scale of Qwen's router_aux_loss_coef.
    """
    p = jnp.where(mask[..., None, None], jax.nn.softmax(logits), 0.0)
    n = jnp.maximum(tokens, 1)
    mean_p, share = jnp.sum(p, axis=(0, 1)) / n, stop_gradient(loads) / n
    return logits.shape[-1] * jnp.mean(jnp.sum(share * mean_p, axis=-1))


def router_logp(logits: Float[Array, "B T L E"], experts: Integer[Array, "B T L K"]) -> Float[Array, "B T L K"]:
    """Log-probs of these experts, in nats."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), experts.astype(jnp.int32), axis=-1)


def log_router_ratio(
    logits: Float[Array, "B T L E"], old_experts: Integer[Array, "B T L K"], old_logp: Float[Array, "B T L K"]
) -> Float[Array, "B T"]:
    """How far the routers have moved: log γ_t = −mean_l mean_{e ∈ old top K} |log p(e) − log p_old(e)|.

    At most 0, in nats; no gradient.  old_logp: of old_experts, by `router_logp`.  RSPO, arXiv 2510.23027.
    """
    moved = jnp.abs(router_logp(stop_gradient(logits), old_experts) - old_logp)
    return -jnp.mean(moved, axis=(-2, -1))


def disagreement(a: Integer[Array, "B T L K"], b: Integer[Array, "B T L K"]) -> Float[Array, "B T"]:
    """The part of the layers in which a token's experts in a are not those in b, in whatever order."""
    return jnp.mean(jnp.any(jnp.sort(a) != jnp.sort(b), axis=-1).astype(jnp.float32), axis=-1)
