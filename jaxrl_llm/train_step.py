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

from jaxrl_llm import losses, sharding
from jaxrl_llm.algorithms import Algorithm, call
from jaxrl_llm.batching import cut
from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.models import attention, transformer
from jaxrl_llm.types import Batch, TrainState

Metrics = dict[str, Array]


def init_state(config: transformer.ModelConfig, tx: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """Fresh parameters and optimiser state, made on the mesh shard by shard."""
    return jax.jit(partial(_fresh, config, tx), out_shardings=state_shardings(config, tx, mesh))(jax.random.key(seed))


def state_shardings(config: transformer.ModelConfig, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shardings of the train state. Optimiser moments lie like their parameters; counters are on every device."""
    shapes = jax.eval_shape(partial(_fresh, config, tx), jax.random.key(0))
    whole = NamedSharding(mesh, PartitionSpec())
    params = sharding.shardings(transformer.logical_axes(config), shapes.params, mesh)
    moments = optax.tree_utils.tree_map_params(
        tx, lambda _, like: like, shapes.opt_state, params, transform_non_params=lambda _: whole
    )
    return TrainState(params, moments, whole)


def _fresh(config: transformer.ModelConfig, tx: optax.GradientTransformation, key: jax.Array) -> TrainState:
    params = transformer.init(config, key)
    return TrainState(params, tx.init(params), jnp.int32(0))


def response_logprobs(
    config: transformer.ModelConfig, params: Any, batch: Batch, temperature: float
) -> tuple[Array, Array]:
    """Log-prob of every target and entropy, [B,T], aligned with the response. The one path for every log-prob.

    A row of the model is a prompt with all its answers: [prefix | answer 0 | … | answer G-1].
    """
    prompts, size = batch.prefix.shape
    rows, length = batch.inputs.shape
    group = rows // prompts
    tokens = jnp.concatenate([batch.prefix, batch.inputs.reshape(prompts, group * length)], axis=1)
    own = batch.prefix_lengths[:, None] + jnp.tile(jnp.arange(length), group)[None]
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(size), (prompts, size)), own], axis=1)
    model = nnx.merge(transformer.split(config), params)
    hidden, _ = model(tokens, positions, attention.grouped(batch.prefix_lengths, size, group))
    hidden = hidden[:, size:].reshape(rows, length, -1)
    return token_logprobs(hidden, model.head_matrix(), batch.targets, temperature=temperature)


def make_logprobs(config: transformer.ModelConfig, temperature: float, micro_batches: int) -> Callable:
    """Jitted (params, batch) → log-probs [B,T], for the old and the reference policy."""

    @jax.jit
    def logprobs(params: Any, batch: Batch) -> Array:
        one = lambda b: response_logprobs(config, params, b, temperature)[0]
        out = jax.lax.map(one, cut(batch, micro_batches))
        prompts = batch.prefix.shape[0]
        out = out.reshape(micro_batches, prompts // micro_batches, -1, out.shape[-1])
        return out.swapaxes(0, 1).reshape(batch.mask.shape)

    return logprobs


def objective(algorithm: Algorithm, batch: Batch, logp: Array, entropy: Array) -> tuple[Array, Metrics]:
    """Σ w·(c·x + β·kl − κ·entropy) over these rows, and sums and maxima for the step's metrics."""
    old = stop_gradient(logp) if batch.old_logp is None else batch.old_logp
    arrays = {"old_logp": old, "sampler_logp": batch.sampler_logp, "adv": batch.adv, "mask": batch.mask}
    policy_loss = lambda l: call(algorithm.loss, {**arrays, "logp": l})
    x = policy_loss(logp)
    if algorithm.correction is not None:
        x = x * stop_gradient(call(algorithm.correction, arrays))
    if algorithm.needs_reference and algorithm.kl_in == "loss":
        x = x + algorithm.kl_coef * losses.kl(logp, batch.ref_logp, batch.mask, algorithm.kl)
    if algorithm.entropy_coef:
        x = x - algorithm.entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    loss = jnp.sum(batch.weights * x)
    metrics = _measure(batch, stop_gradient(logp), old, stop_gradient(entropy), policy_loss)
    if batch.ref_logp is not None:
        metrics["sum:kl/ref"] = jnp.sum(losses.kl(stop_gradient(logp), batch.ref_logp, batch.mask, "k3"))
    return loss, metrics


def _measure(batch: Batch, logp: Array, old: Array, entropy: Array, policy_loss: Callable) -> Metrics:
    """Sums (`sum:`) and maxima (`max:`) over the trained tokens; the step divides sums by the number of tokens.

    A token counts as clipped when the loss has no gradient there though its advantage is not 0; so this holds for any
    loss, whatever it calls its bounds.
    """
    mask = batch.mask
    ratio = jnp.exp(jnp.where(mask, logp - old, 0.0))
    slope = jax.grad(lambda l: jnp.sum(policy_loss(l)))(logp)
    clipped = mask & (slope == 0) & (batch.adv != 0)
    gap = jnp.where(mask, jnp.abs(jnp.exp(old) - jnp.exp(batch.sampler_logp)), 0.0)
    total = lambda x: jnp.sum(jnp.where(mask, x, 0.0))
    return {
        "sum:entropy": total(entropy),
        "sum:ratio/mean": total(ratio),
        "max:ratio/max": jnp.max(ratio),
        "sum:clip/low": total(clipped & (ratio < 1)),
        "sum:clip/high": total(clipped & (ratio > 1)),
        "sum:kl/old": jnp.sum(losses.kl(logp, old, mask, "k3")),
        "sum:gap/mean": total(gap),
        "max:gap/max": jnp.max(gap),
    }


def make_gradients(
    config: transformer.ModelConfig, algorithm: Algorithm, temperature: float, micro_batches: int
) -> Callable:
    """(params, batch) → gradients, loss, metrics; summed over micro-batches, which the weights make exact."""

    def loss(params: Any, batch: Batch) -> tuple[Array, Metrics]:
        return objective(algorithm, batch, *response_logprobs(config, params, batch, temperature))

    def gradients(params: Any, batch: Batch) -> tuple[Any, Array, Metrics]:
        run = jax.value_and_grad(loss, has_aux=True)
        if micro_batches == 1:
            (value, metrics), grads = run(params, batch)
            return grads, value, metrics

        def add(carry: Any, micro: Batch) -> tuple[Any, None]:
            (value, metrics), grads = run(params, micro)
            grads, value = jax.tree.map(jnp.add, (carry[0], carry[1]), (grads, value))
            merge = lambda k: (jnp.maximum if k.startswith("max:") else jnp.add)(carry[2][k], metrics[k])
            return (grads, value, {k: merge(k) for k in metrics}), None

        micros = cut(batch, micro_batches)
        shapes = jax.eval_shape(run, params, jax.tree.map(lambda x: x[0], micros))[0][1]
        zero = jax.tree.map(jnp.zeros_like, params), jnp.float32(0), {k: jnp.float32(0) for k in shapes}
        return jax.lax.scan(add, zero, micros)[0]

    return gradients


def make_train_step(
    config: transformer.ModelConfig,
    algorithm: Algorithm,
    tx: optax.GradientTransformation,
    temperature: float = 1.0,
    micro_batches: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Jitted (state, batch with weights) → (state, metrics); the state is donated.

    A step whose loss or gradient is not finite leaves parameters and optimiser as they were and says `skipped` 1.
    """
    gradients = make_gradients(config, algorithm, temperature, micro_batches)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, loss, sums = gradients(state.params, batch)
        norm = optax.tree.norm(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = replace(state, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, state)
        tokens = jnp.maximum(jnp.sum(batch.mask), 1)
        metrics = {k[4:] if k[:4] == "sum:" else k: v / tokens if k[:4] == "sum:" else v for k, v in sums.items()}
        metrics.update(loss=loss, grad_norm=norm, skipped=1.0 - sound)
        return replace(new, step=state.step + 1), metrics

    return train_step
