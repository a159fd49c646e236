"""From scored answers to a new train state: log-probs, advantages, and the optimiser steps on a batch."""

from __future__ import annotations

import math
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
from jaxtyping import Array, Float

from jaxrl_llm import config as configs
from jaxrl_llm.arrays import Batch, Routing, TrainState
from jaxrl_llm.config import Config
from jaxrl_llm.data import fitting
from jaxrl_llm.data.stream import Stream
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.learner import batching, critic
from jaxrl_llm.learner.optim import make_optimizer, reset_moments, schedule
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.learner.train_step import Teacher, init_state, make_logprobs, make_train_step
from jaxrl_llm.models import attention, lora
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm, call, wants
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler.groups import ScoredBatch
from jaxrl_llm.types import Reward, Rollouts, Task, expect

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
    base: Any = None  # with LoRA the frozen parameters, which no train state has
    ref_params: Any = None  # the reference policy's; None without one, or where it is the state's (kl_refresh)
    teacher: Teacher | None = None
    teacher_logprobs: Callable | None = None

    def whole(self, params: Any) -> Any:
        """The model's parameters, of which `params` are those that are trained: with LoRA its adapters."""
        return lora.joined(self.base, params)


def build(config: Config) -> Learner:
    """Everything that a config stands for, before any parameter exists. Raises ValueError as `config.validate` does."""
    configs.validate(config)
    a, r, model = config.algorithm, config.rollout, config.model
    tokenizer, task = configs.made(config)
    task, usable = fitting.fitting(task, tokenizer, r.max_prompt_tokens, r.long_prompts)
    order = r.difficulty, config.total_steps, a.prompts.prioritized, a.prompts.retire_above
    updates = config.steps * a.steps_per_batch
    tx = make_optimizer(config.optimizer, updates)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    attention.check(model.attention, mesh.devices.flat[0].platform)
    value = None
    if a.critic is not None:
        critic_tx = make_optimizer(a.critic.optimizer, config.total_steps * a.critic.updates)
        value = critic.make(a.critic, model, critic_tx, mesh, config.seed)
    stream, rate = Stream(task.train, config.seed, *order, usable, r.prompts), schedule(config.optimizer, updates)
    train_step = make_train_step(model, a, tx, r.temperature, config.learner.logprob_chunk)
    logprobs = make_logprobs(model, r.temperature, config.learner.logprob_chunk)
    assign, choose = jax.jit(partial(assign_advantages, a)), jax.jit(partial(choose_tokens, a))
    return Learner(config, task, stream, tokenizer, mesh, tx, train_step, logprobs, assign, choose, rate, value)


def with_teacher(learner: Learner) -> Learner:
    """The learner with its config's teacher, which reads the same token ids, on the mesh; the same one without."""
    if learner.config.teacher is None:
        return learner
    model, tokenizer, load = learner.config.teacher()
    known, own = tokenizer.hf.get_vocab(), learner.tokenizer.hf.get_vocab()
    expected = f"the run's {len(own)} tokens, of which {len(own.items() & known.items())} are the same"
    expect(known == own, "teacher()'s tokenizer", f"{len(known)} tokens", expected)
    logprobs = make_logprobs(model, learner.config.rollout.temperature, learner.config.learner.logprob_chunk)
    params = lora.frozen(model, load(learner.mesh))
    return replace(learner, teacher=Teacher(model, params), teacher_logprobs=logprobs)


@partial(jax.jit, static_argnums=(0, 2))
def reference_of(model: ModelConfig, params: Any, quantized: str = "") -> Any:
    """What a reference policy keeps of the parameters, see `lora.frozen`: a copy, as steps donate the policy's own."""
    return lora.frozen(model, jax.tree.map(jnp.copy, params), quantized)


def fresh_state(learner: Learner, base: Any = None) -> TrainState:
    """The state at step 0: random parameters (LoRA: always) or a base policy's; critic, memory, reference if used."""
    config, a = learner.config, learner.config.algorithm
    state = init_state(config.model, learner.tx, config.seed, learner.mesh, None if config.model.lora else base)
    params = state.params
    value = None if learner.critic is None else learner.critic.init(params)
    memory = None if a.memory is None else call(a.memory, {"n_prompts": len(learner.task.train)})
    kept = config.model, params, config.learner.reference_dtype
    reference = reference_of(*kept) if a.needs_reference and a.kl_refresh else None
    return TrainState(params, state.opt_state, state.step, value, memory, reference)


def shaped_rewards(
    config: Config, answers: Rollouts, rewards: list[Reward], step: int
) -> tuple[list[Reward], np.ndarray]:
    """The rewards that train, float32 [B]: the verifier's values, changed as `algorithm.shaping` says.

        R = reward (or the verifier's value) + Σ weight·term

    Before them the verifier's rewards, which have got as parts `reward`, if there is one, and each term, without its
    weight. step: of the run, the critic's pre-training included. Raises ValueError for a number that is not finite.
    """
    a, shaping = config.algorithm, config.algorithm.shaping
    values = np.array([r.value for r in rewards], np.float32)
    if shaping.signed_reward:
        values = 2 * values - 1
    have = {"rewards": values, "n_tokens": answers.n_tokens, "correct": np.array([r.correct for r in rewards])}
    if any(wants(fn, "n_gold") for fn in (shaping.reward, *(term.fn for term in shaping.terms.values()))):
        have["n_gold"] = np.repeat([p.meta["n_gold"] for p in answers.prompts], answers.group_size)
    max_len = {"max_len": config.rollout.max_response_tokens}
    if shaping.reward is not None:
        values = np.asarray(call(shaping.reward, have | max_len), np.float32)
        _expect_finite("algorithm.shaping.reward", values, answers)
    pretrain = 0 if a.critic is None else a.critic.pretrain
    parts = [{} if shaping.reward is None else {"reward": v} for v in values.tolist()]
    for name, term in shaping.terms.items():
        if term.of_answer:
            prompts = [p for p in answers.prompts for _ in range(answers.group_size)]
            of = have | {"text": answers.texts, "finish": answers.finish.tolist(), "prompt": prompts}
            measured = [call(term.fn, max_len | {k: v[i] for k, v in of.items()}) for i in range(len(rewards))]
        else:
            grouped = {k: v.reshape(-1, answers.group_size) for k, v in have.items()}
            measured = call(term.fn, grouped | max_len)
        measured = np.asarray(measured, np.float32).reshape(-1)
        _expect_finite(f"algorithm.shaping.terms.{name}", measured, answers)
        for part, number in zip(parts, measured.tolist(), strict=True):
            part[name] = number
        if step - pretrain >= term.warmup:
            values = values + term.weight * measured
    _expect_finite("shaped rewards", values, answers)
    return [replace(r, parts=r.parts | part) for r, part in zip(rewards, parts, strict=True)], values


def _expect_finite(what: str, values: np.ndarray, answers: Rollouts) -> None:
    wrong = np.flatnonzero(~np.isfinite(values)) if values.shape == answers.lengths.shape else [0]
    if len(wrong):
        prompt = answers.prompts[wrong[0] // answers.group_size]
        raise ValueError(f"{what} of prompt {prompt.id} are {values}; expected finite numbers, one an answer")


def reward_parts(algorithm: Algorithm, scored: ScoredBatch) -> np.ndarray:
    """The parts of the rewards that `shaping.parts` names, float32 [P,G,N]. ValueError for a reward that lacks one.

    `correct` is 0 or 1 unless the verifier says otherwise. The parts of one that did not come to its end are 0.
    """
    names, group = algorithm.shaping.parts or (), scored.rollouts.group_size
    known = lambda r: {"correct": float(r.correct)} | r.parts
    part = lambda r, name: known(r).get(name, math.nan if r.outcome == "scored" else 0.0)
    parts = np.array([[part(r, name) for name in names] for r in scored.rewards], np.float32)
    for i in np.flatnonzero(~np.isfinite(parts).all(axis=1))[:1]:
        have = f"reward of prompt {scored.rollouts.prompts[i // group].id} has the parts {scored.rewards[i].parts}"
        raise ValueError(f"{have}; expected a finite number for each of algorithm.shaping.parts = {names}")
    return parts.reshape(len(parts) // group, group, len(names))


def assign_advantages(
    algorithm: Algorithm, batch: Batch, rewards: Array, generated: Array, of_groups: dict[str, Array], memory: Any
) -> tuple[Batch, Any]:
    """The batch with its advantages (and the critic's returns), and the updated memory of the advantage. Jitted.

    rewards, generated [B,T]: of the answers, without those that fill up the batch; of_groups: kept, prompt_ids [P],
    parts [P,G,N]. Lengths and the penalty count every token that the policy has drawn, also of a response that is
    masked out: it stays part of its group.
    """
    a, (rows, length), real = algorithm, batch.mask.shape, len(rewards)
    filled_up = lambda x: jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
    lengths, groups = generated.sum(axis=1), (-1, batch.group_size)
    generated = filled_up(jnp.pad(generated, ((0, 0), (0, length - generated.shape[1]))))
    kl = jnp.zeros(batch.mask.shape, jnp.float32)
    if a.needs_reference and a.kl_in == "reward":
        kl = losses.kl(batch.old_logp, batch.ref_logp, generated, a.kl)
    per_token = wants(a.token_advantage, "kl") or (a.critic is not None and wants(a.token_advantage, "rewards"))
    penalized = rewards if per_token else rewards - a.kl_coef * kl[:real].sum(axis=1)
    have = of_groups | {"rewards": penalized.reshape(groups), "lengths": lengths.reshape(groups)}
    have |= {"mask": batch.mask[:real].reshape(*groups, length), "state": memory}
    adv = call(a.advantage, have)
    if a.memory is not None:
        adv, memory = adv
    adv = filled_up(adv.reshape(real, length) if adv.ndim == 3 else adv.reshape(real, 1))
    batch = batching.with_advantages(batch, jnp.broadcast_to(adv, batch.mask.shape))
    beta = a.kl_coef if a.kl_in == "reward" else 0.0
    rewards, penalized = filled_up(rewards), filled_up(penalized)
    if a.critic is not None:
        penalized = advantages.token_rewards(rewards, kl, batch.mask, beta=beta)
        returns = advantages.gae(penalized, batch.values, batch.mask, gamma=a.critic.gamma, lam=a.critic.lam)[1]
        batch = replace(batch, returns=returns)
    if a.token_advantage is not None:
        have = {"rewards": penalized, "kl": kl, "beta": beta}
        names = "adv", "mask", "values", "old_logp", "sampler_logp", "teacher_logp"
        have |= {name: getattr(batch, name) for name in names}
        adv = call(a.token_advantage, have)
        batch = batching.with_advantages(batch, adv[0] if isinstance(adv, tuple) else adv)
    if a.whiten:
        batch = replace(batch, adv=advantages.whiten(batch.adv, batch.mask))
    return batch, memory


def learn_batch(learner: Learner, state: TrainState, scored: ScoredBatch) -> tuple[Batch, TrainState, dict[str, float]]:
    """The batch on the mesh, with advantages and the log-probs that are needed; the state with its new memory; metrics
    of the packing.
    """
    config, a, answers, mesh = learner.config, learner.config.algorithm, scored.rollouts, learner.mesh
    cut = division(config, mesh)
    masked = {"drop_truncated": a.prompts.overlong_filter, "kept": scored.kept, "mesh": mesh}
    parts = 0 if a.critic is None else a.critic.mini_batches
    batch, packed = batching.make_batch(answers, config.model, cut, parts, **masked)
    filled_up = lambda x: np.pad(x, [(0, n - m) for n, m in zip(batch.mask.shape, x.shape, strict=False)])
    if a.nll_coef:
        correct = filled_up(np.array([r.correct for r in scored.rewards]))
        batch = replace(batch, correct=batching.placed(correct, mesh))
    if a.needs_reference:
        reference = learner.ref_params if state.reference is None else state.reference
        batch = replace(batch, ref_logp=learner.logprobs(learner.whole(reference), batch)[0])
    if wants(a.token_advantage, "teacher_logp"):
        batch = replace(batch, teacher_logp=learner.teacher_logprobs(learner.teacher.params, batch)[0])
    policy = learner.whole(state.params)
    batch, own_logp = _with_routing(learner, policy, batch)
    if a.bypass:
        batch = replace(batch, old_logp=batch.sampler_logp)
    elif scored.old_logp is not None:
        batch = replace(batch, old_logp=batching.placed(filled_up(scored.old_logp), mesh))
    elif a.needs_old:
        batch = replace(batch, old_logp=learner.logprobs(policy, batch)[0] if own_logp is None else own_logp)
    if learner.critic is not None:
        batch = replace(batch, values=learner.critic.values(state.critic.params, policy, batch))
    indices = np.zeros(len(answers.prompts), np.int64) if answers.indices is None else answers.indices
    of_groups = {"kept": scored.kept, "prompt_ids": indices, "parts": reward_parts(a, scored)}
    generated = answers.generated[:, : batch.mask.shape[1]]
    batch, memory = learner.assign_advantages(batch, scored.shaped, generated, of_groups, state.memory)
    return batch, replace(state, memory=memory), packed


def division(config: Config, mesh: Mesh) -> Division:
    """How the config's batches are cut and packed."""
    kernel = config.model.attention
    rows = config.learner.layout, config.learner.row_tokens, attention.multiple(kernel)
    return Division(config.algorithm.updates_per_batch, config.micro_batches, sharding.rows(1, mesh), *rows)


def learner_logprobs(learner: Learner, params: Any, answers: Rollouts) -> Float[np.ndarray, "B T"]:
    """The learner's log-probs of answers' tokens, about as many answers at a time as a batch has. params: the whole."""
    r, cut = learner.config.rollout, division(learner.config, learner.mesh)
    parts = cut.micro_batches * -(-len(answers.texts) // (r.prompts * r.group_size))
    cut = replace(cut, mini_batches=1, micro_batches=parts)
    batch, _ = batching.make_batch(answers, learner.config.model, cut, mesh=learner.mesh)
    with jax.set_mesh(learner.mesh):
        logp = jax.device_get(learner.logprobs(params, batch)[0])
    return logp[: len(answers.texts), : answers.tokens.shape[1]]


def _with_routing(learner: Learner, policy: Any, batch: Batch) -> tuple[Batch, Array | None]:
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
    logp, _, experts, router_logp = learner.logprobs(policy, batch, record=True)
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
    step = partial(learner.train_step, teacher=learner.teacher if a.distill_coef else None, frozen=learner.base)
    minis, taken, tokens = batching.mini_batches(batch, batch.rows), [], None
    for phase, mini in list(product(range(a.phase_count), minis)) * a.updates.epochs:
        if a.updates.select is not None or a.updates.token_filter is not None:
            key = jax.random.fold_in(jax.random.key(config.seed), policy.step)
            mini = learner.choose_tokens(mini, *learner.logprobs(learner.whole(policy.params), mini), key)
        if a.updates.phases is not None:
            tokens = call(a.updates.phases, {"old_logp": mini.old_logp, "mask": mini.mask})[phase]
        policy, m = step(policy, _with_weights(mini, phase=tokens, **of_mini))
        taken.append(m)
    reference = state.reference
    if reference is not None and int(policy.step) % a.kl_refresh < len(taken):  # these steps passed a multiple of it
        reference = reference_of(config.model, policy.params, config.learner.reference_dtype)
    return replace(policy, critic=state.critic, memory=state.memory, reference=reference), _over_steps(taken)


def update_critic(learner: Learner, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """The critic's optimiser steps on the batch, its mini-batches in turn; metrics with the explained variance."""
    c, value = learner.config.algorithm.critic, state.critic
    minis, taken = batching.mini_batches(replace(batch, routing=None), batch.critic_rows), []
    minis = [_with_weights(m, norm="token", max_len=None) for m in minis]
    for i in range(c.updates):
        value, m = learner.critic.step(value, learner.whole(state.params), minis[i % len(minis)])
        taken.append(m)
    metrics = _over_steps(taken)
    metrics["critic/explained_variance"] = float(_explained_variance(batch.values, batch.returns, batch.mask))
    return replace(state, critic=value), metrics


def _over_steps(metrics: list[dict[str, Array]]) -> dict[str, float]:
    """Means over the optimiser steps; of maxima and minima the extremes."""
    metrics = jax.device_get(metrics)
    over = lambda name: np.max if name.endswith("max") else np.min if name.endswith("min") else np.mean
    return {name: float(over(name)([m[name] for m in metrics])) for name in metrics[0]}
