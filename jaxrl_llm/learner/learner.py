"""From scored answers to a new train state: log-probs, advantages, and the optimiser steps on a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.data import curation
from jaxrl_llm.data.stream import Stream
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.learner import batching, critic
from jaxrl_llm.learner.optim import make_optimizer, reset_moments, schedule
from jaxrl_llm.learner.train_step import init_state, make_logprobs, make_train_step
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm, call, wants
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler.groups import ScoredBatch
from jaxrl_llm.types import Batch, Reward, Rollouts, Routing, Task, TrainState, expect

_with_weights = jax.jit(batching.with_weights, static_argnames=("norm", "max_len", "nll", "phase_weights"))
_explained_variance = jax.jit(critic.explained_variance)


@dataclass(frozen=True)
class Learner:
    """What a run's steps share: the config, what was built from it, and the compiled functions."""

    config: Config
    task: Task
    stream: Stream  # of its training prompts
    tokenizer: Tokenizer
    mesh: Mesh
    tx: optax.GradientTransformation
    train_step: Callable
    logprobs: Callable
    assign_advantages: Callable
    choose_tokens: Callable
    learning_rate: optax.Schedule
    critic: critic.ValueFunction | None = None
    ref_params: Any = None  # the reference policy's; None without one, or where it is the state's (kl_refresh)


def build(config: Config) -> Learner:
    """Everything that a config stands for, before any parameter exists. Raises ValueError as `config.validate` does."""
    configs.validate(config)
    a, r, model, micro_batches = config.algorithm, config.rollout, config.model, config.micro_batches
    tokenizer, task = configs.made(config)
    task, usable = curation.fitting(task, tokenizer, r.max_prompt_tokens, r.long_prompts)
    order = r.difficulty, config.total_steps, a.prompts.prioritized, a.prompts.retire_above
    updates = config.steps * a.steps_per_batch
    tx = make_optimizer(config.optimizer, updates)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    value = None
    if a.critic is not None:
        critic_tx = make_optimizer(a.critic.optimizer, config.total_steps * a.critic.updates)
        value = critic.make(a.critic, model, critic_tx, mesh, micro_batches, config.seed)
    stream, rate = Stream(task.train, config.seed, *order, usable, r.prompts), schedule(config.optimizer, updates)
    train_step = make_train_step(model, a, tx, r.temperature, micro_batches)
    logprobs = make_logprobs(model, r.temperature, micro_batches)
    assign, choose = jax.jit(partial(assign_advantages, a)), jax.jit(partial(choose_tokens, a))
    return Learner(config, task, stream, tokenizer, mesh, tx, train_step, logprobs, assign, choose, rate, value)


def fresh_state(learner: Learner, base: Any = None) -> TrainState:
    """The state at step 0: random parameters, or those of a base policy; critic, memory and reference where used."""
    config, a = learner.config, learner.config.algorithm
    state = init_state(config.model, learner.tx, config.seed, learner.mesh)
    params = state.params if base is None else base
    value = None if learner.critic is None else learner.critic.init(params)
    memory = None if a.memory is None else call(a.memory, {"n_prompts": len(learner.task.train)})
    reference = jax.tree.map(jnp.copy, params) if a.needs_reference and a.kl_refresh else None  # a step donates them
    return TrainState(params, state.opt_state, state.step, value, memory, reference)


def shaped_rewards(config: Config, answers: Rollouts, rewards: list[Reward], step: int) -> np.ndarray:
    """The rewards that train, float32 [B]: the verifier's values, changed as `algorithm.shaping` says.

    step: of the run, the critic's pre-training included. Raises ValueError if one is not finite.
    """
    a, shaping, group = config.algorithm, config.algorithm.shaping, (-1, answers.group_size)
    values = np.array([r.value for r in rewards], np.float32)
    if shaping.signed_reward:
        values = 2 * values - 1
    have = {"rewards": values, "n_tokens": answers.lengths, "max_len": config.rollout.max_response_tokens}
    have["correct"] = np.array([r.correct for r in rewards])
    if shaping.reward is not None:
        if wants(shaping.reward, "n_gold"):
            have["n_gold"] = np.repeat([p.meta["n_gold"] for p in answers.prompts], answers.group_size)
        values = np.asarray(call(shaping.reward, have), np.float32)
    if shaping.format_reward is not None:
        values = values + np.array([call(shaping.format_reward, {"text": t}) for t in answers.texts], np.float32)
    pretrain = 0 if a.critic is None else a.critic.pretrain
    if shaping.length_reward is not None and step - pretrain >= shaping.length_warmup:
        grouped = {k: v.reshape(group) if isinstance(v, np.ndarray) else v for k, v in have.items()}
        by_length = np.asarray(call(shaping.length_reward, grouped), np.float32)
        values = values + shaping.length_coef * by_length.reshape(-1)
    wrong = np.flatnonzero(~np.isfinite(values)) if values.shape == answers.lengths.shape else [0]
    if len(wrong):
        prompt = answers.prompts[wrong[0] // answers.group_size]
        raise ValueError(f"shaped rewards of prompt {prompt.id} are {values}; expected finite numbers, one an answer")
    return values


def assign_advantages(
    algorithm: Algorithm, batch: Batch, rewards: Array, lengths: Array, kept: Array, prompt_ids: Array, memory: Any
) -> tuple[Batch, Any]:
    """The batch with its advantages (and the critic's returns), and the updated memory of the advantage. Jitted.

    rewards, lengths: [B], kept, prompt_ids: [P]. `lengths` and the penalty count every token of a response, also of one
    that is masked out: it stays part of its group.
    """
    a, rows = algorithm, batch.mask.shape[0]
    generated = jnp.arange(batch.mask.shape[1])[None] < lengths[:, None]
    groups = (kept.shape[0], rows // kept.shape[0])
    kl = jnp.zeros(batch.mask.shape, jnp.float32)
    if a.needs_reference and a.kl_in == "reward":
        kl = losses.kl(batch.old_logp, batch.ref_logp, generated, a.kl)
    per_token = wants(a.token_advantage, "kl") or (a.critic is not None and wants(a.token_advantage, "rewards"))
    penalized = rewards if per_token else rewards - a.kl_coef * kl.sum(axis=1)
    have = {"rewards": penalized.reshape(groups), "lengths": lengths.reshape(groups), "kept": kept}
    have |= {"mask": batch.mask.reshape(*groups, -1), "prompt_ids": prompt_ids, "state": memory}
    adv = call(a.advantage, have)
    if a.memory is not None:
        adv, memory = adv
    batch = batching.with_advantages(batch, adv.reshape(batch.mask.shape) if adv.ndim == 3 else adv)
    beta = a.kl_coef if a.kl_in == "reward" else 0.0
    if a.critic is not None:
        penalized = advantages.token_rewards(rewards, kl, batch.mask, beta=beta)
        returns = advantages.gae(penalized, batch.values, batch.mask, gamma=a.critic.gamma, lam=a.critic.lam)[1]
        batch = replace(batch, returns=returns)
    if a.token_advantage is not None:
        have = {"rewards": penalized, "kl": kl, "beta": beta}
        have |= {name: getattr(batch, name) for name in ("adv", "mask", "values", "old_logp", "sampler_logp")}
        adv = call(a.token_advantage, have)
        batch = batching.with_advantages(batch, adv[0] if isinstance(adv, tuple) else adv)
    if a.whiten:
        batch = replace(batch, adv=advantages.whiten(batch.adv, batch.mask))
    return batch, memory


def learn_batch(learner: Learner, state: TrainState, scored: ScoredBatch) -> tuple[Batch, TrainState]:
    """The batch on the mesh, with advantages and the log-probs that are needed, and the state with its new memory."""
    a, answers = learner.config.algorithm, scored.rollouts
    shape = batching.bucket(int(answers.prompt_lengths.max()) - 1), batching.bucket(int(answers.lengths.max()))
    split_rows = sharding.batch_sharding(learner.mesh)
    masked = {"drop_truncated": a.prompts.overlong_filter, "kept": scored.kept}
    batch = batching.make_batch(answers, shape=shape, sharding=split_rows, **masked)
    if a.nll_coef:
        batch = replace(batch, correct=jax.device_put(np.array([r.correct for r in scored.rewards]), split_rows))
    if a.needs_reference:
        reference = learner.ref_params if state.reference is None else state.reference
        batch = replace(batch, ref_logp=learner.logprobs(reference, batch)[0])
    batch, own_logp = _with_routing(learner, state, batch)
    if a.bypass:
        batch = replace(batch, old_logp=batch.sampler_logp)
    elif scored.old_logp is not None:
        padding = batch.mask.shape[1] - scored.old_logp.shape[1]
        batch = replace(batch, old_logp=jax.device_put(np.pad(scored.old_logp, ((0, 0), (0, padding))), split_rows))
    elif a.needs_old:
        batch = replace(batch, old_logp=learner.logprobs(state.params, batch)[0] if own_logp is None else own_logp)
    if learner.critic is not None:
        batch = replace(batch, values=learner.critic.values(state.critic.params, state.params, batch))
    indices = np.zeros(len(answers.prompts), np.int64) if answers.indices is None else answers.indices
    batch, memory = learner.assign_advantages(batch, scored.shaped, answers.lengths, scored.kept, indices, state.memory)
    return batch, replace(state, memory=memory)


def _with_routing(learner: Learner, state: TrainState, batch: Batch) -> tuple[Batch, Array | None]:
    """Of a mixture of experts: the batch with the choice of the learner's routers and the one that is replayed, and the
    learner's log-probs from the same pass. They are not taken, None, where nothing could differ or nobody asks.
    """
    a, recorded = learner.config.algorithm, batch.routing or Routing()
    asked = a.needs_old or a.updates.routing_replay == "R2" or wants(a.loss, "log_router_ratio")
    if a.updates.routing_replay == "R3":
        expect(recorded.sampler is not None, "algorithm.updates.routing_replay", "R3", "answers with their routing")
        recorded = recorded._replace(replay=recorded.sampler)
        batch = replace(batch, routing=recorded)
    if not learner.config.model.experts or a.steps_per_batch == 1 or not asked:
        return batch, None
    logp, _, experts, router_logp = learner.logprobs(state.params, batch, record=True)
    replay = experts if a.updates.routing_replay == "R2" else recorded.replay
    return replace(batch, routing=Routing(recorded.sampler, experts, router_logp, replay)), logp


def choose_tokens(algorithm: Algorithm, batch: Batch, logp: Array, entropy: Array, key: Array) -> Batch:
    """The mini-batch with the tokens that the live policy chooses: `selected` for the loss, and its mask. Jitted."""
    have = {"logp": logp, "entropy": entropy, "key": key}
    have |= {name: getattr(batch, name) for name in ("old_logp", "adv", "mask")}
    if algorithm.updates.select is not None:
        batch = replace(batch, selected=call(algorithm.updates.select, have))
    if algorithm.updates.token_filter is not None:
        mask = batch.mask & call(algorithm.updates.token_filter, have)
        batch = replace(batch, mask=mask, adv=jnp.where(mask, batch.adv, 0.0))
    return batch


def _mini_batches(batch: Batch, parts: int) -> list[Batch]:
    if parts == 1:
        return [batch]
    whole = batching.split_batch(batch, parts)
    return [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(parts)]


def update(learner: Learner, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """The policy's optimiser steps on the batch, each on a mini-batch of whole prompts, or on one phase's tokens of it.

    In an epoch all mini-batches take their step of the first phase, then all of them that of the second. The old
    log-probs stay those of the batch. Metrics are means over the steps; of maxima and minima the extremes.
    """
    a, config = learner.config.algorithm, learner.config
    max_len = a.norm_length or config.rollout.max_response_tokens
    of_mini = {"norm": a.norm, "max_len": max_len, "nll": a.nll_coef != 0, "phase_weights": a.updates.phase_weights}
    opt_state = reset_moments(state.opt_state) if a.optimizer_reset else state.opt_state
    policy = TrainState(state.params, opt_state, state.step)
    minis, taken, tokens = _mini_batches(batch, a.updates_per_batch), [], None
    for phase, mini in list(product(range(a.phase_count), minis)) * a.updates.epochs:
        if a.updates.select is not None or a.updates.token_filter is not None:
            key = jax.random.fold_in(jax.random.key(config.seed), policy.step)
            mini = learner.choose_tokens(mini, *learner.logprobs(policy.params, mini), key)
        if a.updates.phases is not None:
            tokens = call(a.updates.phases, {"old_logp": mini.old_logp, "mask": mini.mask})[phase]
        policy, m = learner.train_step(policy, _with_weights(mini, phase=tokens, **of_mini))
        taken.append(m)
    reference = state.reference
    if reference is not None and int(policy.step) % a.kl_refresh < len(taken):  # these steps passed a multiple of it
        reference = jax.tree.map(jnp.copy, policy.params)
    return replace(policy, critic=state.critic, memory=state.memory, reference=reference), _over_steps(taken)


def update_critic(learner: Learner, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """The critic's optimiser steps on the batch, its mini-batches in turn; metrics with the explained variance."""
    c, value = learner.config.algorithm.critic, state.critic
    minis, taken = [_with_weights(m, norm="token", max_len=None) for m in _mini_batches(batch, c.mini_batches)], []
    for i in range(c.updates):
        value, m = learner.critic.step(value, state.params, minis[i % len(minis)])
        taken.append(m)
    metrics = _over_steps(taken)
    metrics["critic/explained_variance"] = float(_explained_variance(batch.values, batch.returns, batch.mask))
    return replace(state, critic=value), metrics


def _over_steps(metrics: list[dict[str, Array]]) -> dict[str, float]:
    """Means over the optimiser steps; of maxima and minima the extremes."""
    metrics = jax.device_get(metrics)
    over = lambda name: np.max if name.endswith("max") else np.min if name.endswith("min") else np.mean
    return {name: float(over(name)([m[name] for m in metrics])) for name in metrics[0]}
