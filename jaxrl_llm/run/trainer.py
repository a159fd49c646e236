"""The loop. The only file that knows all the stages."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.learner.learner import Learner, build, fresh_state, learn_batch, update, update_critic
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.run import evals, metrics, sft
from jaxrl_llm.run.checkpoint import Checkpoints
from jaxrl_llm.run.modes import MODES, Position
from jaxrl_llm.sampler import client, groups, weights
from jaxrl_llm.sampler.client import RemoteEngine
from jaxrl_llm.sampler.decode import LocalEngine, push_weights
from jaxrl_llm.sampler.groups import PendingPrompt, ScoredBatch
from jaxrl_llm.sampler.requests import Answer
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import LENGTH, TrainState


def make_engine(learner: Learner, params: Any, version: int = 0, run: str = "") -> Any:
    """A sampler with these parameters, drawing as the config's rollouts do.

    version: updates behind the parameters. run: see `Client`.
    """
    r, config = learner.config.rollout, learner.config
    sampling, model = Sampling(r.temperature, r.top_k, r.top_p), sampler_model(config)
    kept = quantized(config)
    if r.servers:
        servers = client.Client(r.servers, token=os.environ.get("JAXRL_TOKEN"), ca=r.servers_ca, run=run)
        drawing = (sampling, r.max_response_tokens, r.stop)
        return RemoteEngine(servers, model, learner.tokenizer, *drawing, quantized=kept).pushed(params, version)
    return LocalEngine(
        model,
        learner.tokenizer,
        weights.push(model, params, learner.mesh, version=version, quantized=kept),
        sampling,
        r.max_response_tokens,
        r.stop,
        r.slots or r.prompts * r.group_size,
        r.max_prompt_tokens,
        r.tokens_per_call,
        kept,
        r.kv_dtype,
        r.zero_gap,
        learner.mesh,
    )


def quantized(config: Config) -> str:
    """How the sampler keeps its weights: int8, int4 or, if empty, in the dtype that it computes in."""
    return config.rollout.dtype if config.rollout.dtype in weights.QUANTIZED else ""


def sampler_model(config: Config) -> ModelConfig:
    """The model as the sampler computes it."""
    dtype = config.rollout.dtype
    return config.model if dtype in ("", *weights.QUANTIZED) else replace(config.model, dtype=dtype)


# --- one step -----------------------------------------------------------------------------------------------------


def rollout_metrics(scored: ScoredBatch, version: int) -> dict[str, float]:
    """Rewards, groups and lengths of all answers that were sampled, those of filtered groups included.

    version: of the weights that learn from them, for the staleness of what is learnt from.
    """
    rewards = np.array([r.value for r in scored.all_rewards])
    correct = np.array([r.correct for r in scored.all_rewards])
    lengths, group = scored.all_rollouts.lengths, scored.rollouts.group_size
    groups, accepted = correct.reshape(-1, group), np.repeat(scored.all_kept, group)
    mean = lambda x: float(np.mean(x)) if len(x) else float("nan")
    row = {
        "reward/mean": mean(rewards),
        "reward/std": float(rewards.std()),
        "accuracy": mean(correct),
        "groups/all_correct": mean(groups.all(axis=1)),
        "groups/all_wrong": mean(~groups.any(axis=1)),
        "groups/sampled": float(len(groups)),
        "length/mean": mean(lengths),
        "length/max": float(lengths.max()),
        "length/correct": mean(lengths[correct]),
        "length/wrong": mean(lengths[~correct]),
        "length/accepted": mean(lengths[accepted]),
        "length/rejected": mean(lengths[~accepted]),
        "truncated": mean(scored.all_rollouts.finish == LENGTH),
    }
    drawn = np.arange(scored.rollouts.tokens.shape[1]) < scored.rollouts.lengths[:, None]
    age = version - scored.rollouts.versions[drawn]
    return row | {"staleness/mean": mean(age), "staleness/max": float(age.max()), "groups/stale": float(scored.stale)}


def sample_rows(scored: ScoredBatch, n: int) -> list[dict[str, Any]]:
    """The first `n` groups' first answers, for samples.jsonl."""
    group = scored.rollouts.group_size
    rows = [(p, p * group) for p in range(min(n, len(scored.rollouts.prompts)))]
    return [
        {
            "prompt": scored.rollouts.prompts[p].text,
            "response": scored.rollouts.texts[i],
            "answer": scored.rollouts.prompts[p].answer,
            "parsed": scored.rewards[i].parsed,
            "reward": scored.rewards[i].value,
            "correct": scored.rewards[i].correct,
            "finish": str(scored.rollouts.finish[i]),
            "tokens": int(scored.rollouts.lengths[i]),
        }
        for p, i in rows
    ]


def one_step(
    learner: Learner, state: TrainState, engine: Any, at: Position, schedule: Any
) -> tuple[TrainState, Any, Position, ScoredBatch, dict[str, float]]:
    """Sample, score, learn, push: the state and the sampler one step on, and what the step measured.

    While the critic is pre-trained, the policy stays as it is.
    """
    watch = metrics.Stopwatch()
    critic = learner.config.algorithm.critic
    learned: dict[str, float] = {}
    with watch("step"):
        scored, after = schedule.next(engine, at, watch)
        answers, version = scored.rollouts, engine.version
        if learner.config.rollout.zero_gap:
            with watch("rescore"):
                scored = replace(scored, old_logp=groups.sampler_logprobs(engine, answers, seed=learner.config.seed))
        with watch("train"):
            batch, state = learn_batch(learner, state, scored)
            if critic is not None:
                state, learned = update_critic(learner, state, batch)
            if critic is None or at.step >= critic.pretrain:
                state, policy = update(learner, state, batch)
                learned |= policy
        with watch("push"):
            engine = push_weights(engine, state.params)
    seconds = watch.seconds()
    sampled = int(scored.all_rollouts.lengths.sum())
    trained = int(answers.lengths.sum() + answers.prompt_lengths.sum())
    row = rollout_metrics(scored, version) | learned
    row |= {f"perf/{stage}_s": s for stage, s in seconds.items()}
    row["perf/rollout_tokens_per_s"] = sampled / seconds["rollout"]
    row["perf/train_tokens_per_s"] = trained / seconds["train"]
    row["perf/push_bytes"] = float(engine.bytes)
    return state, engine, after, scored, row


# --- the run ------------------------------------------------------------------------------------------------------


# What --resume may change: it alters no number of the run. (So may `steps`, unless a schedule or a curriculum has it.)
FREE_ON_RESUME = ("checkpoint.", "logged_samples", "rollout.max_rounds", "rollout.tokens_per_call", "rollout.servers")
FREE_ON_RESUME += ("compile_cache",)


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
        critic = config.algorithm.critic
        schedules = {config.optimizer.schedule, critic.optimizer.schedule if critic else "constant"}
        steps_matter = schedules != {"constant"} or config.rollout.difficulty is not None
        free = FREE_ON_RESUME + (() if steps_matter else ("steps",))
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
        state = fresh_state(learner, base)
        if config.algorithm.needs_reference and state.reference is None:
            learner = replace(learner, ref_params=jax.tree.map(jnp.copy, state.params))
        checkpoints = Checkpoints(out / "checkpoints", config.checkpoint.keep)
        try:
            return _loop(learner, state, out, checkpoints, resume, stopping)
        finally:
            checkpoints.close()


def _host(config: Config, at: Position) -> dict[str, Any]:
    """The position and the config, as a checkpoint keeps them."""
    solved = {str(index): list(counts) for index, counts in at.solved.items()}
    answer = lambda a: [a.tokens.tolist(), a.logp.tolist(), a.versions.tolist(), a.finish]
    pending = [[p.draw, p.index, [answer(a) for a in p.begun]] for p in at.pending]
    return {
        "draw": at.draw,
        "solved": solved,
        "pending": pending,
        "seed": config.seed,
        "config": configs.to_json(config),
    }


def _position(step: int, host: dict[str, Any]) -> Position:
    """The inverse of `_host`."""
    solved = {int(index): tuple(counts) for index, counts in host["solved"].items()}
    kinds = (np.int32, np.float32, np.int32)
    answer = lambda a: Answer(*(np.array(x, k) for x, k in zip(a, kinds, strict=False)), a[3])
    pending = tuple(
        PendingPrompt(draw, index, tuple(answer(a) for a in begun)) for draw, index, begun in host["pending"]
    )
    return Position(step, host["draw"], solved, pending)


def _loop(
    learner: Learner, state: TrainState, out: Path, checkpoints: Checkpoints, resume: bool, stopping: Callable[[], bool]
) -> bool:
    config, total = learner.config, learner.config.total_steps
    found = checkpoints.restore(state, print) if resume else None
    at = Position()
    if found:
        state, at = found.state, _position(found.step, found.host)
    run = f"{socket.gethostname()}:{out.resolve()}"  # the same when it resumes
    engine, schedule = make_engine(learner, state.params, at.step, run), MODES[config.rollout.mode](learner)
    try:
        with (
            metrics.RunLog(out, at.step if found else None) as log,
            metrics.Progress(total - at.step, "training") as progress,
        ):
            if not found:
                row = evaluate_policy(learner, engine)
                log.log(0, row)
                progress.line(f"base policy: held-out accuracy {row['eval/accuracy']:.1%}")
            try:
                while at.step < total and not stopping():
                    state, engine, at, scored, row = one_step(learner, state, engine, at, schedule)
                    row["lr"] = float(learner.learning_rate(max(0, int(state.step) - 1)))
                    if at.step == total or (config.evaluation.every and at.step % config.evaluation.every == 0):
                        row |= evaluate_policy(learner, engine)
                    row["perf/compilations"] = metrics.compilations()
                    log.samples(at.step, sample_rows(scored, config.logged_samples))
                    log.log(at.step, row)
                    progress.line(metrics.step_line(at.step, total, row))
                    progress.advance()
                    if at.step % config.checkpoint.every == 0:
                        checkpoints.save(at.step, state, _host(config, at))
            finally:  # also when a reward raises or the group filter gives up; a failed update has used up its state
                if at.step and not any(x.is_deleted() for x in jax.tree.leaves(state)):
                    checkpoints.save(at.step, state, _host(config, at))
    finally:
        engine.close()  # first, so that nobody waits for its answers
        schedule.close()
    return at.step == total


def prime_only(config: Config, out: Path, *, source: Path | None = None) -> dict[str, float] | None:
    """The supervised stage alone, into out/base, and the base policy's evaluation; None when a signal stopped it."""
    prepare_folder(config, out, False, source)
    learner = build(config)
    learner.tokenizer.save(out / "tokenizer")
    with jax.set_mesh(learner.mesh), stop_on_signals() as stopping:
        base = sft.prime(config, out / "base", learner.mesh, stopping, print)
        return None if base is None else evaluate_policy(learner, make_engine(learner, base))


def evaluate_policy(learner: Learner, engine: Any) -> dict[str, float]:
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


def load_state(run: Path) -> tuple[Learner, TrainState, int]:
    """A run's learner, which samples in this process, and its newest checkpoint with its step."""
    kept = run / "config.json"
    if not kept.is_file():
        raise ValueError(f"run {run}: config.json is missing; expected the folder of a run")
    config = configs.load(kept)
    learner = build(replace(config, rollout=replace(config.rollout, servers=())))
    with jax.set_mesh(learner.mesh):
        checkpoints = Checkpoints(run / "checkpoints", read_only=True)
        found = checkpoints.restore(fresh_state(learner), lambda text: print(text, file=sys.stderr))
    if found is None:
        raise ValueError(f"run {run}: no checkpoint; expected one under {run / 'checkpoints'}")
    return learner, found.state, found.step


def load_policy(run: Path) -> tuple[Learner, Any, int]:
    """A run's learner, a sampler with its newest checkpoint, and that checkpoint's step."""
    learner, state, step = load_state(run)
    with jax.set_mesh(learner.mesh):
        return learner, make_engine(learner, state.params), step


def resume_command(source: Path | None, out: Path, assignments: tuple[str, ...], algorithm: str | None = None) -> str:
    """The shell command that goes on with a run."""
    words = [
        "jaxrl",
        "train",
        str(source),
        *(() if algorithm is None else ("--algorithm", algorithm)),
        *(w for a in assignments for w in ("--set", a)),
        "--resume",
        "--out",
        str(out),
    ]
    return shlex.join(words)
