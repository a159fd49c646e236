"""The loop. The only file that knows all the stages."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.arrays import TrainState
from jaxrl_llm.config import Config
from jaxrl_llm.data import tokenizers
from jaxrl_llm.learner import learner as learners
from jaxrl_llm.learner.learner import Learner, build, fresh_state, learn_batch, update, update_critic, with_teacher
from jaxrl_llm.learner.optim import updates_applied
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.run import base as bases
from jaxrl_llm.run import evals, folder, metrics, probe, sft
from jaxrl_llm.run.checkpoint import Checkpoints, checksums
from jaxrl_llm.run.modes import MODES, Position
from jaxrl_llm.run.stopping import Stopped, stop_on_signals
from jaxrl_llm.sampler import client, groups, openai, weights, wire
from jaxrl_llm.sampler.client import RemoteEngine
from jaxrl_llm.sampler.decode import LocalEngine, push_weights
from jaxrl_llm.sampler.groups import ScoredBatch
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import LENGTH, expect

SURE = 100  # held-out answers, all wrong, after which a base policy is taken to know nothing


def make_engine(learner: Learner, params: Any, version: int = 0, run: str = "") -> Any:
    """A sampler with these parameters (of the whole model), drawing as the config's rollouts do.

    version: updates behind the parameters. run: see `Client`.
    """
    r, model, kept = learner.config.rollout, sampler_model(learner.config), quantized(learner.config)
    drawn = Sampling(r.temperature, r.top_k, r.top_p), r.max_response_tokens, r.stop
    if r.servers and r.servers_reload:
        how = {"ca": r.servers_ca, "seeded": r.servers_seeded, "in_flight": r.in_flight, "deadline_s": r.deadline_s}
        servers = openai.Servers(r.servers, r.servers_reload, Path(r.servers_folder), **how)
        return openai.OpenAIEngine(servers, model, learner.tokenizer, *drawn).pushed(params, version)
    if r.servers:
        bounds = {"deadline_s": r.deadline_s, "in_flight": r.in_flight, "vocab_size": model.vocab_size}
        servers = client.Client(r.servers, ca=r.servers_ca, run=run, **wire.secrets(), **bounds)
        return RemoteEngine(servers, model, learner.tokenizer, *drawn, quantized=kept).pushed(params, version)
    pushed = weights.push(model, params, learner.mesh, version=version, quantized=kept)
    sizes = r.slots or r.prompts * r.group_size, r.max_prompt_tokens, r.tokens_per_call
    settings = *drawn, *sizes, kept, r.kv_dtype, r.zero_gap, learner.mesh
    cached = {"cache": r.cache, "kv_tokens": r.kv_tokens, "prefill_tokens": r.prefill_tokens}
    return LocalEngine(model, learner.tokenizer, pushed, *settings, record_experts=model.experts > 0, **cached)


def quantized(config: Config) -> str:
    """How the sampler keeps its weights: int8, int4 or, if empty, in the dtype that it computes in."""
    return config.rollout.dtype if config.rollout.dtype in weights.QUANTIZED else ""


def sampler_model(config: Config) -> ModelConfig:
    """The model as the sampler computes it."""
    r, model = config.rollout, config.model
    model = model if r.dtype in ("", *weights.QUANTIZED) else replace(model, dtype=r.dtype)
    return replace(model, fp32_head=r.head_dtype == "float32") if r.head_dtype else model


def rollout_metrics(scored: ScoredBatch, version: int) -> dict[str, float]:
    """Rewards, groups and lengths of all answers that were sampled, those of filtered groups included.

    version: of the weights that learn from them, for the staleness of what is learnt from.
    """
    rewards = np.array([r.value for r in scored.all_rewards])
    correct = np.array([r.correct for r in scored.all_rewards])
    answers, lengths, group = scored.rollouts, scored.all_rollouts.n_tokens, scored.rollouts.group_size
    groups, accepted = correct.reshape(-1, group), np.repeat(scored.all_kept, group)
    age = version - answers.versions[answers.generated]
    mean = lambda x: np.mean(x) if len(x) else math.nan
    row = {
        "reward/mean": mean(rewards),
        "reward/std": rewards.std(),
        **verdict_metrics(scored.all_rewards),
        "accuracy": mean(correct),
        "groups/all_correct": mean(groups.all(axis=1)),
        "groups/all_wrong": mean(~groups.any(axis=1)),
        "groups/sampled": len(groups),
        "groups/stale": scored.stale,
        "length/mean": mean(lengths),
        "length/max": lengths.max(),
        "length/correct": mean(lengths[correct]),
        "length/wrong": mean(lengths[~correct]),
        "length/accepted": mean(lengths[accepted]),
        "length/rejected": mean(lengths[~accepted]),
        "truncated": mean(scored.all_rollouts.finish == LENGTH),
        "staleness/mean": mean(age),
        "staleness/max": age.max(),
    }
    return {name: float(value) for name, value in row.items()}


def verdict_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """How many answers are wrong, and how many got no verdict and why; the means of the rewards' parts, by name."""
    wrong = [r for r in rewards if r.outcome == "scored" and not r.correct]
    row = {
        "reward/wrong": sum(r.parsed is not None for r in wrong),
        "reward/unparsed": sum(r.parsed is None for r in wrong),
    }
    row |= {
        f"reward/{name}": sum(r.outcome == name for r in rewards) for name in ("timed_out", "out_of_memory", "crashed")
    }
    parts = sorted({name for r in rewards for name in r.parts})
    return row | {f"part/{name}": np.mean([r.parts[name] for r in rewards if name in r.parts]) for name in parts}


def sample_rows(scored: ScoredBatch, n: int) -> list[dict[str, Any]]:
    """The first `n` groups' first answers, for samples.jsonl."""
    r, rows = scored.rollouts, []
    for p, prompt in enumerate(r.prompts[:n]):
        i = p * r.group_size
        reward = scored.rewards[i]
        verdict = {"parsed": reward.parsed, "reward": reward.value, "correct": reward.correct}
        verdict |= ({"parts": reward.parts} if reward.parts else {}) | {"outcome": reward.outcome}
        ended = {"finish": str(r.finish[i]), "tokens": int(r.n_tokens[i])}
        rows.append({"prompt": prompt.text, "response": r.texts[i], "answer": prompt.answer, **verdict, **ended})
    return rows


def one_step(
    learner: Learner, state: TrainState, engine: Any, at: Position, mode: Any
) -> tuple[TrainState, Any, Position, ScoredBatch, dict[str, float]]:
    """Sample, score, learn, push: the state and the sampler one step on, and what the step measured.

    While the critic is pre-trained, the policy stays as it is.
    """
    watch, critic, learned = metrics.Stopwatch(), learner.config.algorithm.critic, {}
    counts = getattr(engine, "counts", {})
    counted = Counter(counts)
    with watch("step"):
        scored, after = mode.next(engine, at, watch)
        answers, version = scored.rollouts, engine.version
        if learner.config.rollout.zero_gap:
            with watch("rescore"):
                scored = replace(scored, old_logp=groups.sampler_logprobs(engine, answers, seed=learner.config.seed))
        with watch("train"):
            batch, state, packed = learn_batch(learner, state, scored)
            if critic is not None:
                state, learned = update_critic(learner, state, batch)
            if critic is None or at.step >= critic.pretrain:
                state, policy = update(learner, state, batch)
                learned |= policy
        with watch("push"):
            params = learner.whole(state.params)
            engine = push_weights(engine, params)
            if learner.config.rollout.servers:
                probe.prove(learner, engine, params)
    seconds = watch.seconds()
    sampled = int(scored.all_rollouts.n_tokens.sum())
    trained = int(answers.lengths.sum() + answers.prompt_lengths.sum())
    row = rollout_metrics(scored, version) | packed | learned | {f"perf/{stage}_s": s for stage, s in seconds.items()}
    sampling = seconds.get("sampling", seconds["rollout"])
    row |= {
        "lr": float(learner.learning_rate(max(0, updates_applied(state.opt_state) - 1))),
        "perf/rollout_tokens_per_s": sampled / sampling if sampling else math.nan,
        "perf/train_tokens_per_s": trained / seconds["train"],
        "perf/push_bytes": float(engine.bytes),
        **{f"perf/{name}": float(n - counted[name]) for name, n in counts.items()},
    }
    return state, engine, after, scored, row


def train(config: Config, out: Path, *, resume: bool = False, source: Path | None = None) -> None:
    """Run an experiment into `out`. Raises Stopped when a signal ended it early; then it can be resumed."""
    with folder.opened(config, out, resume), stop_on_signals() as stopping:
        if not resume:  # else once it is known that there is something to resume
            folder.record(config, out, source)
        learner = replace(build(_with_own_tokenizer(config, out) if resume else config), config=config)
        suites = evals.ready(learner)
        managed = Checkpoints(out / "checkpoints", config.checkpoint.keep)
        with jax.set_mesh(learner.mesh), contextlib.closing(managed) as checkpoints:
            learner, a = with_teacher(learner), config.algorithm
            needed = config.model.lora or not checkpoints.steps() or (a.needs_reference and not a.kl_refresh)
            base = bases.of_run(config, out, learner.mesh, stopping) if needed else None  # all is in the checkpoint
            learner = replace(learner, base=base if config.model.lora else None)
            state, at = fresh_state(learner, base), Position()
            if a.needs_reference and state.reference is None:
                made = learners.reference_of(config.model, state.params, config.learner.reference_dtype)
                learner = replace(learner, ref_params=made)
            base = None  # or its parameters would lie beside those that a checkpoint restores
            if resume and (found := checkpoints.restore(state, print)):
                bases.check(learner.base, found.host, out)
                state, at = found.state, Position.from_json(found.step, found.host)
                expected = f"at least {at.step}, the steps that the run has behind it"
                expect(at.step <= config.total_steps, "--resume: steps", config.steps, expected)
                if differ := configs.differences(found.host.get("machine", {}), folder.machine()):
                    print(f"--resume: {'; '.join(differ)} (changes rounding, and so the samples to come)")
            if resume:
                folder.record(config, out, source)
            learner.tokenizer.save(out / "tokenizer")
            with metrics.RunLog(out, at.step or None) as log:
                at = _loop(learner, state, at, log, checkpoints, stopping, suites)
        if at.step < config.total_steps:
            raise Stopped(stopping())


def _loop(
    learner: Learner, state: TrainState, at: Position, log: metrics.RunLog, checkpoints: Checkpoints,
    stopping: Callable, suites: dict[str, evals.Asked],
) -> Position:  # fmt: skip
    """Steps until the last one, or until a signal; the position then, whose checkpoint is saved."""
    config, total, skipped = learner.config, learner.config.total_steps, 0
    # What tells this learner from others at a sampler's server, also when it resumes
    run = f"{socket.gethostname()}:{checkpoints.folder.parent}"
    params, mode = learner.whole(state.params), MODES[config.rollout.mode](learner)
    engine = make_engine(learner, params, at.step, run)
    if config.rollout.servers or config.init:
        probe.prove(learner, engine, params)

    base = checksums(learner.base, {})  # with LoRA the adapters are nothing without it

    def save(wait: bool) -> None:
        if at.step and at.step not in checkpoints.steps():
            host = mode.settled(at, wait).to_json()
            host |= {"seed": config.seed, "config": configs.to_json(config), "machine": folder.machine()}
            host |= {"base": base}
            checkpoints.save(at.step, state, host)

    try:
        with metrics.Progress(total - at.step, "training") as progress:
            if at.step == 0:
                progress.line(_check_base(learner, engine, log, suites))
            while at.step < total and not stopping():
                state, engine, at, scored, row = one_step(learner, state, engine, at, mode)
                skipped = skipped + 1 if 1 in (row.get("skipped"), row.get("critic/skipped")) else 0
                try:
                    if at.step == total or (config.evaluation.every and at.step % config.evaluation.every == 0):
                        row |= evaluate_policy(learner, engine)
                    row |= evals.scheduled(learner, engine, suites, at.step)
                finally:  # what the step has measured is kept also when its evaluation raises
                    log.samples(at.step, sample_rows(scored, config.logged_samples))
                    log.log(at.step, row | {"perf/compilations": metrics.compilations()})
                progress.line(metrics.step_line(at.step, total, row))
                progress.advance()
                if config.abort_after and skipped == config.abort_after:
                    raise Diverged(row, at.step, skipped, checkpoints.steps())
                if at.step % config.checkpoint.every == 0 and not skipped:
                    save(True)
        save(True)
        return at
    except BaseException as error:  # a reward that raises, a group filter that gives up, a second signal, a full disk
        whole = not any(x.is_deleted() for x in jax.tree.leaves(state))  # a step that fails has donated its state
        if whole and not isinstance(error, Diverged):
            try:
                save(False)
                checkpoints.wait()
            except OSError as second:
                raise OSError(f"{error}; and {second}") from error
        raise
    finally:
        engine.close()  # first, so that nobody waits for its answers
        mode.close()


class Diverged(RuntimeError):
    """Too many steps in a row changed nothing."""

    def __init__(self, row: dict[str, float], step: int, skipped: int, saved: list[int]):
        measured = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
        names = [n for n in measured if not np.isfinite(row.get(n, 0.0))]
        why = f"{' and '.join(names)} not finite" if names else "no token had weight"
        steps = f"steps {step - skipped + 1} to {step} changed nothing ({why}): abort_after = {skipped}."
        super().__init__(f"{steps} Last checkpoint: {f'step {saved[-1]}' if saved else 'none yet'}")


def _check_base(learner: Learner, engine: Any, log: metrics.RunLog, suites: dict[str, evals.Asked]) -> str:
    """Log the policy that the run begins with; a line for the terminal.

    Raises RuntimeError when no answer is right and no group of such answers passes the group filter.
    """
    row, rewards = _evaluated(learner, engine)
    row |= evals.scheduled(learner, engine, suites, 0)
    log.log(0, row)
    line = f"base policy: held-out accuracy {row['eval/accuracy']:.1%}"
    line += "".join(f", {name} {row[f'eval/{name}/accuracy']:.1%}" for name in suites)
    if row["eval/accuracy"] > 0:
        return line
    a, size, n = learner.config.algorithm, learner.config.rollout.group_size, len(rewards)
    shaped = a.shaping.reward or a.shaping.terms
    parts = [rewards[i : i + size] for i in range(0, n - size + 1, size)]
    passes = lambda part: groups.passes_filter(a.group_filter, part, np.array([r.value for r in part], np.float32))
    if n >= SURE and a.prompts.resample and not shaped and not any(map(passes, parts)):
        raise RuntimeError(
            f"base policy: 0 of {n} held-out answers are correct, and algorithm.group_filter keeps no group of such: "
            "nothing to learn from; expected easier problems, a base policy (prime), or no group filter"
        )
    return f"{line} (0 of {n}): there may be nothing to learn from"


def prime_only(config: Config, out: Path, *, source: Path | None = None) -> dict[str, float]:
    """The supervised stage alone, into out/base, and the base policy's evaluation. Raises Stopped on a signal."""
    with folder.opened(config, out, False), stop_on_signals() as stopping:
        folder.record(config, out, source)
        learner = build(config)
        learner.tokenizer.save(out / "tokenizer")
        with jax.set_mesh(learner.mesh):
            base = sft.prime(config, out / "base", learner.mesh, stopping)
            return evaluate_policy(learner, make_engine(learner, base))


def _evaluated(learner: Learner, engine: Any) -> tuple[dict[str, float], list[evals.Sample]]:
    start = time.perf_counter()
    samples = evals.sample(engine, evals.held_out(learner), learner.config.seed)
    row = {f"eval/{name}": value for name, value in evals.summary(samples).items()}
    return row | {"perf/eval_s": time.perf_counter() - start}, samples


def evaluate_policy(learner: Learner, engine: Any) -> dict[str, float]:
    """Held-out accuracy and lengths as the config's evaluation says."""
    return _evaluated(learner, engine)[0]


def _with_own_tokenizer(config: Config, run: Path) -> Config:
    """The config of a run from imported weights, with the run's own copy of the tokenizer: the source may be gone."""
    if config.init is None or not (run / "tokenizer").is_dir():
        return config
    return replace(config, tokenizer=partial(tokenizers.load, str(run / "tokenizer")))


def load_state(run: Path, step: int | None = None) -> tuple[Learner, TrainState, int]:
    """A run's learner, which samples in this process, and its newest checkpoint, or that of `step`, with its step.

    Step 0, of a run with `prime`, is its base policy, and the newest one until a checkpoint is made.
    """
    expect(run.is_dir(), "run", str(run), "the folder of a run")
    config, warn = configs.load(run), lambda text: print(text, file=sys.stderr)
    for line in folder.edited(run):
        warn(line)
    learner = build(replace(_with_own_tokenizer(config, run), rollout=replace(config.rollout, servers=())))
    with jax.set_mesh(learner.mesh):
        checkpoints = Checkpoints(run / "checkpoints", read_only=True)
        found = None if step == 0 else checkpoints.restore(fresh_state(learner), warn, step)
        primed = found is None and step in (None, 0) and (run / "base").is_dir()  # by `jaxrl sft`, or before step 1
        if found is None and not primed:
            which = "checkpoint" if step is None else f"checkpoint of step {step} among {checkpoints.steps()}"
            raise ValueError(f"run {run}: no {which}; expected one under {run / 'checkpoints'}")
        base = bases.of_run(config, run, learner.mesh) if primed or config.model.lora else None
        learner = replace(learner, base=base if config.model.lora else None)
        if primed:
            return learner, fresh_state(learner, base), 0
        bases.check(learner.base, found.host, run)
    return learner, found.state, found.step


def load_policy(run: Path) -> tuple[Learner, Any, int]:
    """A run's learner, a sampler with its newest checkpoint, and that checkpoint's step."""
    learner, state, step = load_state(run)
    with jax.set_mesh(learner.mesh):
        return learner, make_engine(learner, learner.whole(state.params)), step
