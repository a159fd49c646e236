"""The loop. The only file that knows all the stages."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import batching, evals, losses, metrics, report, rollouts, sft, sharding, weights
from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import call
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import Config
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.optim import make_optimizer, reset_moments, schedule
from jaxrl_llm.rollouts import Scored, Stream
from jaxrl_llm.sampler.decode import Engine, push_weights
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.train_step import init_state, make_logprobs, make_train_step
from jaxrl_llm.types import LENGTH, Batch, Reward, Rollouts, Task, TrainState

_with_weights = jax.jit(batching.with_weights, static_argnums=(1, 2))


@dataclass(frozen=True)
class Learner:
    """What a run's steps share: the config, what was built from it, and the compiled functions."""

    config: Config
    task: Task
    tokenizer: Tokenizer
    mesh: Mesh
    tx: optax.GradientTransformation
    train_step: Callable
    logprobs: Callable
    learning_rate: optax.Schedule
    ref_params: Any = None  # only when the algorithm has a reference policy


def build(config: Config) -> Learner:
    """Everything that a config stands for, before any parameter exists. Raises ValueError as `config.validate` does."""
    configs.validate(config)
    a, r = config.algorithm, config.rollout
    tokenizer = config.tokenizer()
    if tokenizer.size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}; expected at least {tokenizer.size} (tokenizer)"
        )
    updates = config.steps * a.updates_per_batch
    tx = make_optimizer(config.optimizer, updates)
    return Learner(
        config,
        config.task(),
        tokenizer,
        sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor),
        tx,
        make_train_step(config.model, a, tx, r.temperature, config.micro_batches),
        make_logprobs(config.model, r.temperature, config.micro_batches),
        schedule(config.optimizer, updates),
    )


def make_engine(learner: Learner, params: Any) -> Engine:
    """A sampler with these parameters, drawing as the config's rollouts do."""
    r = learner.config.rollout
    return Engine(
        learner.config.model,
        learner.tokenizer,
        Sampling(r.temperature, r.top_k, r.top_p),
        weights.push(learner.config.model, params, learner.mesh),
        r.max_response_tokens,
        r.stop,
        r.slots,
        r.tokens_per_call,
        learner.mesh,
    )


# --- one step -----------------------------------------------------------------------------------------------------


def sample_batch(learner: Learner, engine: Engine, draw: int, watch: metrics.Stopwatch) -> Scored:
    """Groups of scored answers for one batch, from the prompts after the first `draw` on."""
    r, seed = learner.config.rollout, learner.config.seed
    stream = Stream(learner.task.train, seed)

    def one_round(draw: int) -> tuple[Rollouts, list[Reward]]:
        prompts, draws = stream.take(draw, r.prompts)
        with watch("rollout"):
            answers = rollouts.sample_groups(
                engine, prompts, r.group_size, seed=seed, draws=draws, max_prompt_tokens=r.max_prompt_tokens
            )
        with watch("reward"):
            return answers, rollouts.score(learner.task, answers)

    keep = learner.config.algorithm.group_filter
    return rollouts.sample_until_full(one_round, draw, r.prompts, keep, r.max_rounds)


def shaped_rewards(config: Config, answers: Rollouts, rewards: tuple[Reward, ...]) -> np.ndarray:
    """What the policy is trained on, float32 [B]: the verifier's values, signed and with a length term if so chosen."""
    a = config.algorithm
    values = np.array([r.value for r in rewards], np.float32)
    if a.signed_reward:
        values = 2 * values - 1
    if a.length_reward is not None:
        lengths = {"n_tokens": answers.lengths, "max_len": config.rollout.max_response_tokens}
        values = values + np.asarray(call(a.length_reward, lengths), np.float32)
    return values


def learn_batch(learner: Learner, params: Any, answers: Rollouts, rewards: np.ndarray) -> Batch:
    """The batch on the mesh, with advantages and those log-probs that the algorithm needs."""
    a = learner.config.algorithm
    shape = batching.bucket(int(answers.prompt_lengths.max()) - 1), batching.bucket(int(answers.lengths.max()))
    placed = sharding.batch_sharding(learner.mesh)
    batch = batching.make_batch(answers, shape=shape, drop_truncated=a.overlong_filter, sharding=placed)
    if a.updates_per_batch > 1 or (a.needs_reference and a.kl_in == "reward"):
        batch = replace(batch, old_logp=learner.logprobs(params, batch))
    if a.needs_reference:
        batch = replace(batch, ref_logp=learner.logprobs(learner.ref_params, batch))
        if a.kl_in == "reward":
            penalty = losses.kl(batch.old_logp, batch.ref_logp, batch.mask, a.kl).sum(axis=1)
            rewards = rewards - a.kl_coef * np.asarray(penalty)
    groups = (-1, answers.group_size)
    arrays = {"rewards": rewards.reshape(groups), "lengths": answers.lengths.reshape(groups)}
    return batching.with_advantages(batch, call(a.advantage, arrays))


def update(learner: Learner, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
    """The batch's optimiser steps, one a mini-batch of whole prompts; metrics are means, or maxima of maxima."""
    a = learner.config.algorithm
    max_len = a.norm_length or learner.config.rollout.max_response_tokens
    if a.optimizer_reset:
        state = replace(state, opt_state=reset_moments(state.opt_state))
    minis = [batch] if a.updates_per_batch == 1 else batching.cut(batch, a.updates_per_batch)
    taken = []
    for i in range(a.updates_per_batch):
        mini = minis[i] if isinstance(minis, list) else jax.tree.map(lambda x, i=i: x[i], minis)
        state, m = learner.train_step(state, _with_weights(mini, a.norm, max_len))
        taken.append(m)
    taken = jax.device_get(taken)
    reduce = lambda name: (np.max if name.startswith("max:") else np.mean)([m[name] for m in taken])
    return state, {name.removeprefix("max:"): float(reduce(name)) for name in taken[0]}


def measure_rollouts(seen: Scored) -> dict[str, float]:
    """Rewards, groups and lengths of all answers that were sampled, those of filtered groups included."""
    rewards = np.array([r.value for r in seen.all_rewards])
    correct = np.array([r.correct for r in seen.all_rewards])
    lengths = np.concatenate([r.lengths for r in seen.all_rollouts])
    truncated = np.concatenate([r.finish == LENGTH for r in seen.all_rollouts])
    groups = correct.reshape(-1, seen.rollouts.group_size)
    mean = lambda x: float(np.mean(x)) if len(x) else float("nan")
    return {
        "reward/mean": mean(rewards),
        "reward/std": float(rewards.std()),
        "accuracy": mean(correct),
        "groups/all_correct": mean(groups.all(axis=1)),
        "groups/all_wrong": mean(~groups.any(axis=1)),
        "length/mean": mean(lengths),
        "length/max": float(lengths.max()),
        "length/correct": mean(lengths[correct]),
        "length/wrong": mean(lengths[~correct]),
        "truncated": mean(truncated),
        "rounds": float(seen.rounds),
    }


def sample_rows(seen: Scored, n: int) -> list[dict[str, Any]]:
    """The first `n` groups' first answers, for samples.jsonl."""
    group = seen.rollouts.group_size
    rows = [(p, p * group) for p in range(min(n, len(seen.rollouts.prompts)))]
    return [
        {
            "prompt": seen.rollouts.prompts[p].text,
            "response": seen.rollouts.texts[i],
            "answer": seen.rollouts.prompts[p].answer,
            "parsed": seen.rewards[i].parsed,
            "reward": seen.rewards[i].value,
            "correct": seen.rewards[i].correct,
            "finish": str(seen.rollouts.finish[i]),
            "tokens": int(seen.rollouts.lengths[i]),
        }
        for p, i in rows
    ]


def one_step(
    learner: Learner, state: TrainState, engine: Engine, draw: int
) -> tuple[TrainState, Engine, Scored, dict[str, float]]:
    """Sample, score, learn, push: the state and the sampler one step on, and what the step measured."""
    watch = metrics.Stopwatch()
    with watch("step"):
        seen = sample_batch(learner, engine, draw, watch)
        answers = seen.rollouts
        with watch("train"):
            rewards = shaped_rewards(learner.config, answers, seen.rewards)
            batch = learn_batch(learner, state.params, answers, rewards)
            state, learned = update(learner, state, batch)
        with watch("push"):
            engine = push_weights(engine, state.params)
            jax.block_until_ready(engine.weights.params)
    seconds = watch.seconds()
    sampled = sum(int(r.lengths.sum()) for r in seen.all_rollouts)
    trained = int(answers.lengths.sum() + answers.prompt_lengths.sum())
    row = measure_rollouts(seen) | learned
    row |= {f"perf/{stage}_s": s for stage, s in seconds.items()}
    row["perf/rollout_tokens_per_s"] = sampled / seconds["rollout"]
    row["perf/train_tokens_per_s"] = trained / seconds["train"]
    return state, engine, seen, row


# --- the run ------------------------------------------------------------------------------------------------------


# What --resume may change: it alters no number of the run. (So may `steps`, unless the schedule depends on it.)
FREE_ON_RESUME = ("checkpoint.", "logged_samples", "rollout.max_rounds", "rollout.tokens_per_call")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask to stop after the step under way; a second Ctrl-C stops at once."""
    asked = False

    def handler(number: int, _: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def prepare_folder(config: Config, out: Path, resume: bool, source: Path | None) -> None:
    """The run's folder with config.json and a copy of the experiment; ValueError when it cannot be used."""
    kept = out / "config.json"
    data = configs.to_json(config)
    if resume:
        if not kept.is_file():
            raise ValueError(f"--resume: {kept} is missing; expected the folder of an earlier run")
        free = FREE_ON_RESUME + (("steps",) if config.optimizer.schedule == "constant" else ())
        changed = [d for d in configs.differences(json.loads(kept.read_text()), data) if not d.startswith(free)]
        if changed:
            raise ValueError(f"--resume: the config differs from the run's in {'; '.join(changed)}")
    elif any((out / "checkpoints").glob("[0-9]*")):
        raise ValueError(f"--out {out}: holds a run already; expected --resume or another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(data, indent=1) + "\n")
        if source is not None and source.suffix == ".py" and source.resolve() != (out / source.name).resolve():
            shutil.copyfile(source, out / source.name)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); expected a writable folder") from error


def train(config: Config, out: Path, *, resume: bool = False, source: Path | None = None) -> bool:
    """Run an experiment into `out`. True when it is done, False when a signal stopped it (then it can be resumed)."""
    prepare_folder(config, out, resume, source)
    learner = build(config)
    learner.tokenizer.save(out / "tokenizer")
    with jax.set_mesh(learner.mesh), stop_on_signals() as stopping:
        base = None
        if config.prime is not None:
            base = sft.prime(config, out / "base", learner.mesh, stopping, print)
            if base is None:
                return False
        state = init_state(config.model, learner.tx, config.seed, learner.mesh)
        if base is not None:
            state = replace(state, params=base, opt_state=jax.jit(learner.tx.init)(base))
        if config.algorithm.needs_reference:
            learner = replace(learner, ref_params=jax.tree.map(jnp.copy, state.params))
        checkpoints = Checkpoints(out / "checkpoints", config.checkpoint.keep)
        try:
            return _loop(learner, state, out, checkpoints, resume, stopping)
        finally:
            checkpoints.close()


def position(config: Config, draw: int) -> dict[str, Any]:
    """Where the host is, for a checkpoint. Prompts, samples and their keys follow from the seed and `draw` alone."""
    return {"draw": draw, "seed": config.seed, "config": configs.to_json(config)}


def _loop(
    learner: Learner, state: TrainState, out: Path, checkpoints: Checkpoints, resume: bool, stopping: Callable[[], bool]
) -> bool:
    config = learner.config
    found = checkpoints.restore(state, print) if resume else None
    step, draw = (found.step, found.host["draw"]) if found else (0, 0)
    state = found.state if found else state
    engine = make_engine(learner, state.params)
    with (
        metrics.RunLog(out, step if found else None) as log,
        metrics.Progress(config.steps - step, "training") as progress,
    ):
        if not found:
            row = evaluate(learner, engine)
            log.log(0, row)
            progress.line(f"base policy: held-out accuracy {row['eval/accuracy']:.1%}")
        try:
            while step < config.steps and not stopping():
                state, engine, seen, row = one_step(learner, state, engine, draw)
                step, draw = step + 1, seen.draw
                row["lr"] = float(learner.learning_rate(step * config.algorithm.updates_per_batch - 1))
                if step == config.steps or (config.evaluation.every and step % config.evaluation.every == 0):
                    row |= evaluate(learner, engine)
                row["perf/compilations"] = metrics.compilations()
                log.samples(step, sample_rows(seen, config.logged_samples))
                log.log(step, row)
                progress.line(metrics.step_line(step, config.steps, row))
                progress.advance()
                if step % config.checkpoint.every == 0:
                    checkpoints.save(step, state, position(config, draw))
        finally:  # also when a reward raises or the group filter gives up; an update that failed has used up its state
            if step and not any(x.is_deleted() for x in jax.tree.leaves(state)):
                checkpoints.save(step, state, position(config, draw))
            report.curves(out, title=out.name)
    return step == config.steps


def prime_only(config: Config, out: Path, *, source: Path | None = None) -> dict[str, float] | None:
    """The supervised stage alone, into out/base, and the base policy's evaluation; None when a signal stopped it."""
    prepare_folder(config, out, False, source)
    learner = build(config)
    learner.tokenizer.save(out / "tokenizer")
    with jax.set_mesh(learner.mesh), stop_on_signals() as stopping:
        base = sft.prime(config, out / "base", learner.mesh, stopping, print)
        return None if base is None else evaluate(learner, make_engine(learner, base))


def evaluate(learner: Learner, engine: Engine) -> dict[str, float]:
    """Held-out accuracy and lengths as the config's evaluation says."""
    e, watch = learner.config.evaluation, metrics.Stopwatch()
    with watch("eval"):
        row, _, _ = evals.evaluate(
            engine,
            learner.task,
            problems=e.problems,
            samples=e.samples,
            seed=learner.config.seed,
            max_prompt_tokens=learner.config.rollout.max_prompt_tokens,
        )
    return row | {"perf/eval_s": watch.seconds()["eval"]}


def load_policy(run: Path) -> tuple[Learner, Engine, int]:
    """A run's learner, a sampler with its newest checkpoint, and that checkpoint's step."""
    kept = run / "config.json"
    if not kept.is_file():
        raise ValueError(f"run {run}: config.json is missing; expected the folder of a run")
    learner = build(configs.load(kept))
    with jax.set_mesh(learner.mesh):
        checkpoints = Checkpoints(run / "checkpoints", read_only=True)
        like = init_state(learner.config.model, learner.tx, learner.config.seed, learner.mesh)
        found = checkpoints.restore(like, lambda text: print(text, file=sys.stderr))
        if found is None:
            raise ValueError(f"run {run}: no checkpoint; expected one under {run / 'checkpoints'}")
        return learner, make_engine(learner, found.state.params), found.step


def resume_command(source: Path | None, out: Path, assignments: tuple[str, ...]) -> str:
    """The shell command that goes on with a run."""
    words = [
        "jaxrl",
        "train",
        str(source),
        *(w for a in assignments for w in ("--set", a)),
        "--resume",
        "--out",
        str(out),
    ]
    return shlex.join(words)
