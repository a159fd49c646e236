"""Forward, loss, micro-batches, update: one jitted, sharded step without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.lax import stop_gradient
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.learner.batching import merge_parts, split_batch
from jaxrl_llm.models import attention, moe, transformer
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import Algorithm, call
from jaxrl_llm.objective.corrections import mismatch_report
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import Batch, Routing, TrainState

Metrics = dict[str, Array]
Tx = optax.GradientTransformation  # an optimiser


def init_state(config: ModelConfig, tx: Tx, seed: int, mesh: Mesh) -> TrainState:
    """Random parameters and the optimiser's first state; each device of the mesh makes its own shards."""
    init = lambda key: first_state(tx, transformer.init(config, key))
    return jax.jit(init, out_shardings=state_shardings(config, tx, mesh))(jax.random.key(seed))


def first_state(tx: Tx, params: Any) -> TrainState:
    return TrainState(params, tx.init(params), jnp.int32(0))


def state_shardings(config: ModelConfig, tx: Tx, mesh: Mesh) -> TrainState:
    """Shardings of the policy's train state: see `train_state_shardings`."""
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    params = sharding.shardings(transformer.logical_axes(config), shapes, mesh)
    return train_state_shardings(tx, shapes, params, mesh)


def train_state_shardings(tx: Tx, shapes: Any, params: Any, mesh: Mesh) -> TrainState:
    """Shardings of a train state, given its parameters': Adam's moments have theirs, counters are on every device."""
    replicated, moments = NamedSharding(mesh, PartitionSpec()), jax.eval_shape(tx.init, shapes)
    replicate, like = lambda _: replicated, lambda _, param: param
    moments = optax.tree_utils.tree_map_params(tx, like, moments, params, transform_non_params=replicate)
    return TrainState(params, moments, replicated)


def response_hidden(config: ModelConfig, params: Any, batch: Batch) -> tuple[Array, nnx.Module, Array | None]:
    """Final hidden states [B,T,D], aligned with the response, the model, and its routers' logits [B,T,L,E] if any.

    A row of the model is a prompt with all its answers: [prefix | answer 0 | … | answer G-1].
    """
    (prompts, size), (rows, length) = batch.prefix.shape, batch.inputs.shape
    group = rows // prompts
    tokens = jnp.concatenate([batch.prefix, batch.inputs.reshape(prompts, group * length)], axis=1)
    answers = batch.prefix_lengths[:, None] + jnp.tile(jnp.arange(length), group)[None]
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(size), (prompts, size)), answers], axis=1)
    model = nnx.merge(transformer.split(config), params)
    replay = None if batch.routing is None else batch.routing.replay
    if replay is not None:  # no expert's id on the prefix: there the live router chooses
        replay, none = replay.reshape(prompts, group * length, *replay.shape[2:]), jnp.iinfo(replay.dtype).max
        replay = jnp.pad(replay, ((0, 0), (size, 0), (0, 0), (0, 0)), constant_values=none)
    hidden, router = model(tokens, positions, attention.grouped(batch.prefix_lengths, size, group), replay)
    aligned = lambda x: x[:, size:].reshape(rows, length, *x.shape[2:])
    return aligned(hidden), model, None if router is None else aligned(router)


def response_logprobs(config: ModelConfig, params: Any, batch: Batch, temperature: float) -> tuple[Array, ...]:
    """Log-prob of every target and entropy, [B,T], aligned with the response. The one path for every log-prob.

    Of a mixture of experts also the routers' logits, [B,T,L,E].
    """
    hidden, model, router = response_hidden(config, params, batch)
    out = token_logprobs(hidden, model.head_matrix(), batch.targets, temperature=temperature)
    return out if router is None else (*out, router)


def make_logprobs(config: ModelConfig, temperature: float, micro_batches: int) -> Callable:
    """(params, batch) → log-probs and entropies [B,T], for all that is not differentiated; compiled once a shape.

    With `record`, of a mixture of experts: also its routers' choice and the log-probs of that, [B,T,L,K].
    """

    @partial(jax.jit, static_argnames="record")
    def logprobs(params: Any, batch: Batch, record: bool) -> tuple[Array, ...]:
        def one(part: Batch) -> tuple[Array, ...]:
            logp, entropy, *router = response_logprobs(config, params, part, temperature)
            if not record:
                return logp, entropy
            experts = moe.top_experts(router[0], config.experts_per_token)
            return logp, entropy, experts, moe.router_logp(router[0], experts)

        out = jax.lax.map(one, split_batch(batch, micro_batches))
        return jax.tree.map(lambda x: merge_parts(x, batch.prefix.shape[0]), out)

    # What the model reads, and no more: jit would compile anew when an array that it does not read is added.
    replayed = lambda r: None if r is None else Routing(replay=r.replay)
    inputs = lambda b: Batch(b.prefix, b.prefix_lengths, b.inputs, b.targets, None, None, routing=replayed(b.routing))
    return lambda params, batch, record=False: logprobs(params, inputs(batch), record)


def _arrays(batch: Batch, logp: Array) -> dict[str, Array | None]:
    """What a loss or a correction may ask for. A model without routers has router ratio 1."""
    old_logp = stop_gradient(logp) if batch.old_logp is None else batch.old_logp
    router = jnp.zeros_like(logp) if batch.log_router_ratio is None else batch.log_router_ratio
    same = {name: getattr(batch, name) for name in ("sampler_logp", "adv", "mask", "selected")}
    return {"logp": logp, "old_logp": old_logp, "log_router_ratio": router, **same}


def objective(algorithm: Algorithm, batch: Batch, logp: Array, entropy: Array) -> Array:
    """Σ w·(c·x + β·kl − κ·entropy) + μ·Σ w_nll·(−logp) over these rows."""
    arrays = _arrays(batch, logp)
    x = call(algorithm.loss, arrays)
    if algorithm.correction is not None:
        x = x * call(algorithm.correction, {**arrays, "logp": stop_gradient(logp)})
    if algorithm.needs_reference and algorithm.kl_in == "loss":
        x = x + algorithm.kl_coef * losses.kl(logp, batch.ref_logp, batch.mask, algorithm.kl)
    if algorithm.entropy_coef:
        x = x - algorithm.entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    loss = jnp.sum(batch.weights * x)
    if algorithm.nll_coef:
        loss = loss - algorithm.nll_coef * jnp.sum(batch.nll_weights * jnp.where(batch.mask, logp, 0.0))
    return loss


def token_metrics(algorithm: Algorithm, batch: Batch, logp: Array, entropy: Array) -> Metrics:
    """Means over the trained tokens of the optimiser batch, and the sampler-learner gap.

    A token counts as clipped when the loss has no gradient there though its advantage is not 0; this needs no
    knowledge of the loss's bounds.
    """
    mask, arrays = batch.mask, _arrays(batch, logp)
    old = arrays["old_logp"]
    mean = lambda x: jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
    ratio = jnp.exp(jnp.where(mask, logp - old, 0.0))
    slope = jax.grad(lambda l: jnp.sum(call(algorithm.loss, {**arrays, "logp": l})))(logp)
    clipped = mask & (slope == 0) & (batch.adv != 0)
    metrics = {
        "entropy": mean(entropy),
        "ratio/mean": mean(ratio),
        "ratio/max": jnp.max(jnp.where(mask, ratio, 0.0)),
        "clip/low": mean(clipped & (ratio < 1)),
        "clip/high": mean(clipped & (ratio > 1)),
        "kl/old": mean(losses.kl(logp, old, mask, "k3")),
    }
    c = None if algorithm.correction is None else call(algorithm.correction, arrays)
    metrics |= mismatch_report(logp if algorithm.bypass else old, batch.sampler_logp, mask, c)
    if batch.ref_logp is not None:
        metrics["kl/ref"] = mean(losses.kl(logp, batch.ref_logp, mask, "k3"))
    return metrics


def router_arrays(routing: Routing | None, logits: Array, k: int) -> Metrics:
    """Of a mixture of experts, [B,T]: the log router ratio, and the parts of the layers in which choices differ."""
    if routing is None:
        return {}
    arrays, learner = {}, moe.top_experts(logits, k)
    if routing.old is not None:
        arrays["router/log_ratio"] = moe.log_router_ratio(logits, routing.old, routing.old_logp)
        arrays["router/old_differs"] = moe.disagreement(learner, routing.old)
        learner = routing.old
    if routing.sampler is not None:
        arrays["router/sampler_differs"] = moe.disagreement(learner, routing.sampler)
    return arrays


def accumulate(loss: Callable, params: Any, batch: Batch, micro_batches: int) -> tuple[Any, Array, Any]:
    """Gradients and value of loss(params, batch) → (value, arrays [B,T]), summed over micro-batches, and the arrays.

    The sum is that of the whole batch, because the token weights were computed over the whole batch.
    """
    run = jax.value_and_grad(loss, has_aux=True)
    if micro_batches == 1:
        (value, aux), grads = run(params, batch)
        return grads, value, aux

    def add(carry: Any, micro: Batch) -> tuple[Any, Any]:
        (value, aux), grads = run(params, micro)
        return jax.tree.map(jnp.add, carry, (grads, value)), aux

    zero = jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
    (grads, value), aux = jax.lax.scan(add, zero, split_batch(batch, micro_batches))
    return grads, value, jax.tree.map(lambda x: merge_parts(x, batch.prefix.shape[0]), aux)


def make_gradients(config: ModelConfig, algorithm: Algorithm, temperature: float, micro_batches: int) -> Callable:
    """(params, batch) → gradients, loss, metrics."""
    k, aux_coef = config.experts_per_token, config.router_aux_coef if config.experts else 0.0

    def part_loads(params: Any, batch: Batch) -> Array:
        return moe.expert_loads(response_logprobs(config, params, batch, temperature)[2], batch.mask, k)

    def gradients(params: Any, batch: Batch) -> tuple[Any, Array, Metrics]:
        loads, tokens = None, jnp.sum(batch.mask)
        if aux_coef and micro_batches > 1:  # the loads are the whole batch's, which no part knows: one more pass
            loads = jax.lax.map(partial(part_loads, params), split_batch(batch, micro_batches)).sum(axis=0)

        def loss(params: Any, batch: Batch) -> tuple[Array, tuple[Array, Array, Metrics]]:
            logp, entropy, *router = response_logprobs(config, params, batch, temperature)
            routers = router_arrays(batch.routing, router[0], k) if router else {}
            batch = replace(batch, log_router_ratio=routers.get("router/log_ratio"))
            value = objective(algorithm, batch, logp, entropy)
            if aux_coef:
                counted = moe.expert_loads(router[0], batch.mask, k) if loads is None else loads
                value = value + aux_coef * moe.load_balancing(router[0], batch.mask, counted, tokens)
            return value, (logp, entropy, routers)

        grads, value, (logp, entropy, routers) = accumulate(loss, params, batch, micro_batches)
        batch = replace(batch, log_router_ratio=routers.get("router/log_ratio"))
        metrics = token_metrics(algorithm, batch, *map(stop_gradient, (logp, entropy)))
        mean = lambda x: jnp.sum(jnp.where(batch.mask, x, 0.0)) / jnp.maximum(tokens, 1)
        return grads, value, metrics | {name: mean(x) for name, x in routers.items()}

    return gradients


def apply_gradients(tx: Tx, state: TrainState, grads: Any, loss: Array, weights: Array) -> tuple[TrainState, Metrics]:
    """The state after one optimiser step. If the loss or the gradient is not finite, or no token has weight (momentum
    alone should not move the policy), only the step's number changes and the metric `skipped` is 1.
    """
    norm = optax.tree.norm(grads)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    new = replace(state, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    valid = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.any(weights != 0)
    new = jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, state)
    return replace(new, step=state.step + 1), {"loss": loss, "grad_norm": norm, "skipped": 1.0 - valid}


def make_train_step(
    config: ModelConfig, algorithm: Algorithm, tx: Tx, temperature: float = 1.0, micro_batches: int = 1
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Jitted (state, batch with weights) → (state, metrics); the state is donated."""
    gradients = make_gradients(config, algorithm, temperature, micro_batches)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, loss, metrics = gradients(state.params, batch)
        state, of_step = apply_gradients(tx, state, grads, loss, batch.weights)
        return state, metrics | of_step

    return train_step
