"""The value function: the reward to be expected of a response before each of its tokens is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from optax import GradientTransformation

from jaxrl_llm.arrays import Batch, ModelInput, TrainState
from jaxrl_llm.learner import train_step
from jaxrl_llm.models import lora, transformer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import Critic
from jaxrl_llm.parallel import sharding


@dataclass(frozen=True)
class ValueFunction:
    """A critic's compiled functions."""

    init: Callable  # policy's trained parameters → TrainState
    values: Callable  # (critic's parameters, policy's parameters, batch) → V [B,T]
    step: Callable  # (critic's TrainState, policy's parameters, batch with returns and weights) → (TrainState, metrics)


def make(critic: Critic, config: ModelConfig, tx: GradientTransformation, mesh: Mesh, seed: int) -> ValueFunction:
    """The functions of a critic beside a policy of this model.

    V_t = w·h_t + b, where h_t is the hidden state that predicts token t: of a second decoder, at first a copy of the
    policy's (`network`), or of the policy, which gets no gradient from the critic (`head`). At first w is normal with
    `head_std` and b is 0. With LoRA the second decoder is the policy's base with adapters of its own.
    """
    config = replace(config, tied_head=True)  # the critic predicts no tokens, so it needs no output projection

    def initial(policy: Any) -> TrainState:
        w = critic.head_std * jax.random.normal(jax.random.key(seed), (config.width,), jnp.float32)
        params = {"value": {"w": w, "b": jnp.float32(0)}}
        if critic.kind == "network":
            params["trunk"] = {k: jax.tree.map(jnp.copy, v) for k, v in policy.items() if k != "head"}
        return train_step.first_state(tx, params)

    def init(policy: Any) -> TrainState:
        shapes = jax.eval_shape(initial, policy).params
        replicated = NamedSharding(mesh, PartitionSpec())
        params = {"value": {"w": replicated, "b": replicated}}
        if critic.kind == "network":
            axes = lora.trained(config, transformer.logical_axes(config))
            params["trunk"] = sharding.shardings(axes, shapes["trunk"], mesh)
        return jax.jit(initial, out_shardings=train_step.train_state_shardings(tx, shapes, params, mesh))(policy)

    def predict(params: Any, policy: Any, rows: ModelInput) -> Array:
        trunk = lora.joined(stop_gradient(policy), params.get("trunk", {}))
        hidden = train_step.response_hidden(config, {k: v for k, v in trunk.items() if k != "head"}, rows)[0]
        w, b = params["value"]["w"], params["value"]["b"]
        value = jnp.einsum("snd,d->sn", hidden.astype(jnp.float32), w, precision="highest") + b
        return train_step.by_answer(rows, value)

    @jax.jit
    def values(params: Any, policy: Any, batch: Batch) -> Array:
        out = train_step.over_micro_batches(lambda r, _: predict(params, policy, r), batch, batch.critic_rows)
        return jnp.where(batch.mask, out, 0.0)

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, policy: Any, batch: Batch) -> tuple[TrainState, train_step.Metrics]:
        def loss(params: Any, rows: ModelInput, b: Batch) -> tuple[Array, None]:
            x = losses.value_loss(predict(params, policy, rows), b.values, b.returns, b.mask, critic.clip)
            return jnp.sum(b.weights * x), None

        grads, value, _ = train_step.accumulate(loss, state.params, batch)
        state, metrics = train_step.apply_gradients(tx, state, grads, value, batch.weights)
        return state, {f"critic/{name}": x for name, x in metrics.items()}

    return ValueFunction(init, values, step)


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
    """1 − Var(returns − values) / Var(returns) over the trained tokens: 1 is perfect, 0 no better than a constant.

    values, returns, mask: [B,T].  0 where the returns do not vary.
    """
    mean = lambda x: jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
    var = lambda x: mean((x - mean(x)) ** 2)
    total = var(returns)
    return jnp.where(total == 0, 0.0, 1 - var(returns - values) / jnp.where(total == 0, 1.0, total))
