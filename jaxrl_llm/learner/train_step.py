"""Forward, loss, micro-batches, update: one jitted, sharded step without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.lax import stop_gradient
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.arrays import Batch, ModelInput, Routing, Rows, TrainState
from jaxrl_llm.learner.batching import in_order, micro_batches
from jaxrl_llm.models import attention, lora, moe, transformer
from jaxrl_llm.models.logprobs import reverse_kl, token_logprobs
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import Algorithm, call
from jaxrl_llm.objective.corrections import mismatch_report
from jaxrl_llm.parallel import sharding
from jaxrl_llm.parallel.sharding import constrain

Metrics = dict[str, Array]
Tx = optax.GradientTransformation  # an optimiser


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Teacher:
    """A frozen policy that the policy learns from, on the mesh."""

    config: ModelConfig = field(metadata={"static": True})
    params: Any


def init_state(config: ModelConfig, tx: Tx, seed: int, mesh: Mesh, params: Any = None) -> TrainState:
    """Parameters to train, random unless given, and the optimiser's first state; each device makes its own shards."""
    placed = state_shardings(config, tx, mesh)
    if params is not None:
        rest = jax.jit(lambda p: replace(first_state(tx, p), params=None), out_shardings=replace(placed, params=None))
        return replace(rest(params), params=params)
    init = lambda key: first_state(tx, lora.trained(config, transformer.init(config, key)))
    return jax.jit(init, out_shardings=placed)(jax.random.key(seed))


def first_state(tx: Tx, params: Any) -> TrainState:
    return TrainState(params, tx.init(params), jnp.int32(0))


def param_shapes(config: ModelConfig, mesh: Mesh) -> Any:
    """Shapes and shardings of the parameters that are trained."""
    shapes = lora.trained(config, jax.eval_shape(partial(transformer.init, config), jax.random.key(0)))
    placed = sharding.shardings(lora.trained(config, transformer.logical_axes(config)), shapes, mesh)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, placed)


def state_shardings(config: ModelConfig, tx: Tx, mesh: Mesh) -> TrainState:
    """Shardings of the policy's train state: see `train_state_shardings`."""
    shapes = param_shapes(config, mesh)
    return train_state_shardings(tx, shapes, jax.tree.map(lambda x: x.sharding, shapes), mesh)


def train_state_shardings(tx: Tx, shapes: Any, params: Any, mesh: Mesh) -> TrainState:
    """Shardings of a train state, given its parameters': moments have theirs, those that Adafactor has averaged over an
    axis have that of the others; all else is on every device.
    """
    replicated, moments = NamedSharding(mesh, PartitionSpec()), jax.eval_shape(tx.init, shapes)

    def like(moment: Any, of_param: NamedSharding, param: Any) -> NamedSharding:
        axes = (*of_param.spec, *(None,) * (param.ndim - len(of_param.spec)))
        for i in range(param.ndim):  # axes of one size may be taken for each other, whose splits divide it all the same
            if moment.shape == param.shape[:i] + param.shape[i + 1 :]:
                return NamedSharding(mesh, PartitionSpec(*axes[:i], *axes[i + 1 :]))
        return of_param if moment.shape == param.shape else replicated

    of_rest = {"transform_non_params": lambda _: replicated}
    moments = optax.tree_utils.tree_map_params(tx, like, moments, params, shapes, **of_rest)
    return TrainState(params, moments, replicated)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gathered(x: Array, there: Array, back: Array, fill: int) -> Array:
    """x [D,m,…] → [D,n,…], where entry i is x[:, there[:, i]], or `fill` if that is m. `back` does the inverse.

    The gradient is a gather, too: of a gather's own gradient, a scatter, XLA does not know that no two places collide.
    """
    index = there.reshape(*there.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=fill)


_gathered.defvjp(lambda x, there, back, fill: (_gathered(x, there, back, fill), (there, back)),
                 lambda _, places, slope: (_gathered(slope, places[1], places[0], 0), None, None))  # fmt: skip


def _moved(x: Array, there: Array, back: Array, fill: int = 0) -> Array:
    """`_gathered`, on each device of the mesh what it has: XLA by itself would send hidden states around."""
    local = lambda x, there, back: _gathered(x, there, back, fill)
    if jax.sharding.get_abstract_mesh().empty:
        return local(x, there, back)
    rows = PartitionSpec(sharding.BATCH)
    return jax.shard_map(local, in_specs=(rows, rows, rows), out_specs=rows)(x, there, back)


def response_hidden(
    config: ModelConfig, params: Any, rows: ModelInput, replay: Array | None = None
) -> tuple[Array, nnx.Module, Array | None]:
    """Final hidden states [D,n,width] from which each generated token of a micro-batch is predicted; the model; of a
    mixture of experts its routers' logits [D,n,L,E]. replay: their choice for the answers' tokens, [D·b,T,L,K].
    """
    layout, model, shards = rows.layout, nnx.merge(transformer.split(config), params), len(rows.take)
    if layout.group:
        attend = attention.grouped(rows.segments, layout.prefix, layout.group, config.attention)
    else:
        attend = attention.packed(rows.segments, config.attention)
    if replay is not None:  # where no token is generated, no expert's id: there the live router chooses
        none, by_shard = jnp.iinfo(replay.dtype).max, replay.reshape(shards, -1, *replay.shape[2:])
        placed = _moved(_moved(by_shard, rows.unput, rows.put, none), rows.untake, rows.take, none)
        replay = placed.reshape(*rows.tokens.shape, *replay.shape[2:])
    hidden, router = model(rows.tokens, rows.positions, attend, replay)
    generated = lambda x: _moved(x.reshape(shards, -1, *x.shape[2:]), rows.take, rows.untake)
    return generated(hidden), model, None if router is None else generated(router)


def by_answer(rows: ModelInput, x: Array) -> Array:
    """What belongs to generated tokens, [D,n,…], as [D·b,T,…]; 0 behind an answer's end."""
    return constrain(_moved(x, rows.put, rows.unput).reshape(-1, rows.layout.length, *x.shape[2:]), "batch")


def response_logprobs(
    config: ModelConfig, params: Any, rows: ModelInput, temperature: float, chunk: int = 1024,
    teacher: Teacher | None = None, replay: Array | None = None,
) -> tuple[Array | None, ...]:  # fmt: skip
    """Log-prob of every generated token of a micro-batch and entropy, [D·b,T]; with a teacher, the exact KL(policy ‖
    teacher), else None; the routers' logits [D·b,T,L,E], None without experts. The one path for every log-prob.
    """
    hidden, model, router = response_hidden(config, params, rows, replay)
    head, blocks, kl = model.head_matrix(), {"temperature": temperature, "chunk": chunk}, None
    out = token_logprobs(hidden, head, rows.targets, **blocks)
    if teacher is not None:
        its_hidden, its_model, _ = response_hidden(teacher.config, stop_gradient(teacher.params), rows)
        kl = reverse_kl(hidden, head, its_hidden, its_model.head_matrix(), **blocks)
    return jax.tree.map(partial(by_answer, rows), (*out, kl, router))


def over_micro_batches(fn: Callable, batch: Batch, rows: Rows) -> Any:
    """fn(rows of a micro-batch, its answers) → arrays [D·b,T,…], one micro-batch after the other, as arrays [B,T,…]."""
    parts = micro_batches(replace(batch, rows=rows))
    return jax.tree.map(lambda x: in_order(x, rows, batch.group_size), jax.lax.map(lambda part: fn(*part), parts))


def make_logprobs(config: ModelConfig, temperature: float, chunk: int = 1024) -> Callable:
    """(params, batch) → log-probs and entropies [B,T], for all that is not differentiated; compiled once a shape.

    With `record`, of a mixture of experts: also its routers' choice and the log-probs of that, [B,T,L,K].
    """

    @partial(jax.jit, static_argnames="record")
    def logprobs(params: Any, batch: Batch, record: bool) -> tuple[Array, ...]:
        def one(rows: ModelInput, answers: Batch) -> tuple[Array, ...]:
            out = response_logprobs(config, params, rows, temperature, chunk, None, answers.replay)
            if not record:
                return out[:2]
            experts = moe.top_experts(out[3], config.experts_per_token)
            return *out[:2], experts, moe.router_logp(out[3], experts)

        return over_micro_batches(one, batch, batch.rows)

    # What the model reads, and no more: jit would compile anew when an array that it does not read is added.
    inputs = lambda b: Batch(b.rows, None, None, None, routing=Routing(replay=b.replay), group_size=b.group_size)
    return lambda params, batch, record=False: logprobs(params, inputs(batch), record)


def _arrays(batch: Batch, logp: Array) -> dict[str, Array | None]:
    """What a loss or a correction may ask for. A model without routers has router ratio 1."""
    old_logp = stop_gradient(logp) if batch.old_logp is None else batch.old_logp
    router = jnp.zeros_like(logp) if batch.log_router_ratio is None else batch.log_router_ratio
    same = {name: getattr(batch, name) for name in ("sampler_logp", "adv", "mask", "selected")}
    return {"logp": logp, "old_logp": old_logp, "log_router_ratio": router, **same}


def objective(algorithm: Algorithm, batch: Batch, logp: Array, entropy: Array, teacher_kl: Any = None) -> Array:
    """Σ w·(c·x + β·kl + δ·teacher_kl − κ·entropy) + μ·Σ w_nll·(−logp) over these rows."""
    arrays = _arrays(batch, logp)
    x = call(algorithm.loss, arrays)
    if algorithm.correction is not None:
        x = x * call(algorithm.correction, {**arrays, "logp": stop_gradient(logp)})
    if algorithm.needs_reference and algorithm.kl_in == "loss":
        old_logp = arrays["old_logp"] if algorithm.kl_unbiased else None
        x = x + algorithm.kl_coef * losses.kl(logp, batch.ref_logp, batch.mask, algorithm.kl, old_logp=old_logp)
    if teacher_kl is not None:
        x = x + algorithm.distill_coef * jnp.where(batch.mask, teacher_kl, 0.0)
    if algorithm.entropy_coef:
        x = x - algorithm.entropy_coef * jnp.where(batch.mask, entropy, 0.0)
    loss = jnp.sum(batch.weights * x)
    if algorithm.nll_coef:
        loss = loss - algorithm.nll_coef * jnp.sum(batch.nll_weights * jnp.where(batch.mask, logp, 0.0))
    return loss


def token_metrics(
    algorithm: Algorithm, batch: Batch, logp: Array, entropy: Array, teacher_kl: Array | None, routers: Metrics
) -> Metrics:
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
    if batch.teacher_logp is not None:
        teacher_kl = losses.kl(logp, batch.teacher_logp, mask, "k3")
    if teacher_kl is not None:
        metrics["kl/teacher"] = mean(teacher_kl)
    return metrics | {name: mean(x) for name, x in routers.items()}


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


def accumulate(loss: Callable, params: Any, batch: Batch) -> tuple[Any, Array, Any]:
    """Gradients and value of loss(params, rows, answers) → (value, arrays [D·b,T]), summed over the batch's
    micro-batches, and the arrays as [B,T].

    `rows` is what the model reads, `answers` the Batch of the answers in them. The sum is that of the whole batch,
    because the token weights were computed over the whole batch.
    """
    run, parts = jax.value_and_grad(loss, has_aux=True), micro_batches(batch)

    def add(carry: Any, micro: tuple[ModelInput, Batch]) -> tuple[Any, Any]:
        (value, aux), grads = run(params, *micro)
        return jax.tree.map(jnp.add, carry, (grads, value)), aux

    if parts[0].tokens.shape[0] == 1:
        (value, aux), grads = run(params, *jax.tree.map(lambda x: x[0], parts))
        aux = jax.tree.map(lambda x: x[None], aux)
    else:
        (grads, value), aux = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), jnp.float32(0)), parts)
    return grads, value, jax.tree.map(lambda x: in_order(x, batch.rows, batch.group_size), aux)


def make_gradients(config: ModelConfig, algorithm: Algorithm, temperature: float, chunk: int = 1024) -> Callable:
    """(params, batch, teacher=None, frozen: those of the model that params lack) → gradients, loss, metrics."""
    k, aux_coef = config.experts_per_token, config.router_aux_coef if config.experts else 0.0

    def gradients(params: Any, batch: Batch, teacher: Any = None, frozen: Any = None) -> tuple[Any, Array, Metrics]:
        loads, tokens = None, jnp.sum(batch.mask)

        def forward(params: Any, rows: ModelInput, answers: Batch) -> tuple[Array | None, ...]:
            whole = lora.joined(frozen, params)
            return response_logprobs(config, whole, rows, temperature, chunk, teacher, answers.replay)

        def loss(params: Any, rows: ModelInput, answers: Batch) -> tuple[Array, tuple[Any, ...]]:
            logp, entropy, teacher_kl, router = forward(params, rows, answers)
            routers = {} if router is None else router_arrays(answers.routing, router, k)
            answers = replace(answers, log_router_ratio=routers.get("router/log_ratio"))
            value = objective(algorithm, answers, logp, entropy, teacher_kl)
            if aux_coef:
                counted = moe.expert_loads(router, answers.mask, k) if loads is None else loads
                value = value + aux_coef * moe.load_balancing(router, answers.mask, counted, tokens)
            return value, (logp, entropy, teacher_kl, routers)

        if aux_coef and batch.rows.inputs.tokens[..., 0, 0].size > 1:  # the whole batch's, which no part knows
            of_part = lambda part: moe.expert_loads(forward(params, *part)[3], part[1].mask, k)
            loads = jax.lax.map(of_part, micro_batches(batch)).sum(axis=0)
        grads, value, (*per_token, routers) = accumulate(loss, params, batch)
        batch = replace(batch, log_router_ratio=routers.get("router/log_ratio"))
        return grads, value, token_metrics(algorithm, batch, *stop_gradient(per_token), routers)

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
    config: ModelConfig, algorithm: Algorithm, tx: Tx, temperature: float = 1.0, chunk: int = 1024
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Jitted (state, batch with weights, teacher=None, frozen=None) → (state, metrics); the state is donated."""
    gradients = make_gradients(config, algorithm, temperature, chunk)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch, **given: Any) -> tuple[TrainState, Metrics]:
        grads, loss, metrics = gradients(state.params, batch, **given)
        state, of_step = apply_gradients(tx, state, grads, loss, batch.weights)
        return state, metrics | of_step

    return train_step
