"""The supervised stage: worked traces make a base policy.

It is the train step of reinforcement learning with every advantage 1: −Σ w·log π with `token` weights is the
cross-entropy of the trace, so the two stages share their forward pass, masks and sharding.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm import types
from jaxrl_llm.arrays import TrainState
from jaxrl_llm.config import Config, Prime, values
from jaxrl_llm.data import datasets, fitting
from jaxrl_llm.data.stream import Stream
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.learner.batching import make_batch, with_advantages, with_weights
from jaxrl_llm.learner.learner import division
from jaxrl_llm.learner.optim import make_optimizer, schedule
from jaxrl_llm.learner.train_step import init_state, make_train_step
from jaxrl_llm.models import lora
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.run import folder, metrics
from jaxrl_llm.run.checkpoint import Checkpoints, Damaged, newest_policy
from jaxrl_llm.run.stopping import Stopped
from jaxrl_llm.types import Rollouts, Task, expect

LOG_EVERY = 50  # batches
SAVE_EVERY = 200  # batches
SUPERVISED = Algorithm(advantages.raw, losses.reinforce, "token")


def behaviours(prime: Prime, seed: int, batch: int) -> np.ndarray:
    """Names of the behaviours of batch number `batch`, one a trace, drawn from its stage's mixture."""
    last = np.cumsum([s.batches for s in prime.stages])
    mixture = prime.stages[int(np.searchsorted(last, batch, side="right"))].mixture
    weights = np.array(list(mixture.values()), np.float64)
    return np.random.default_rng([seed, batch]).choice(list(mixture), prime.traces_per_batch, p=weights / weights.sum())


def traces(task: Task, tokenizer: Tokenizer, prime: Prime, seed: int, start: int = 0) -> Iterator[Rollouts]:
    """Batches of traces, as if a sampler had written them, from batch `start` on. Deterministic in (seed, batch)."""
    stream, n, stop = Stream(task.train, seed), prime.traces_per_batch, sum(s.batches for s in prime.stages)
    pad = lambda rows: np.array(list(zip_longest(*rows, fillvalue=0)), np.int32).T

    def made(batch: int) -> Rollouts:
        prompts, draws, _ = stream.take(batch * n, n)
        names = behaviours(prime, seed, batch)
        turns = [task.trace(p, str(b), int(d)) for p, b, d in zip(prompts, names, draws, strict=True)]
        turns = [(t,) if isinstance(t, str) else t for t in turns]
        for prompt, t in zip(prompts, turns, strict=True):
            expect(len(t) % 2, f"trace of prompt {prompt.id}", t, "an odd number of texts, the policy's the last")
        questions = list(map(tokenizer.encode_prompt, prompts))
        parts = [[*map(tokenizer.encode, t[:-1]), [*tokenizer.encode(t[-1]), tokenizer.eos_ids[0]]] for t in turns]
        answers = [sum(of, []) for of in parts]
        said = pad([[i % 2 for i, part in enumerate(of) for _ in part] for of in parts]).astype(bool)
        tokens, texts = pad(answers), tuple(map("".join, turns))
        lengths = [np.array([len(t) for t in rows], np.int32) for rows in (questions, answers)]
        finish, logp = np.full(n, types.EOS), np.zeros(tokens.shape, np.float32)
        given = prompts, pad(questions), lengths[0], tokens, logp, lengths[1], finish, texts, draws
        return Rollouts(*given, said=said if said.any() else None)

    return datasets.prefetched(made, start, stop) if task.trace is datasets.response else map(made, range(start, stop))


def made_of(config: Config) -> dict[str, Any]:
    """The part of the config that makes the base policy, as JSON."""
    prime = replace(config.prime, task=None)  # which of the two fields names the task makes no difference
    data = configs.to_json(replace(config, task=config.prime.task or config.task, prime=prime))
    made = {name: data[name] for name in ("model", "tokenizer", "prime", "task", "seed")}
    fn, bound = values.unbound(config.prime.task or config.task)
    if fn is datasets.responses:  # rows prepared anew make another base
        made["version"] = datasets.prepared(bound["source"], bound.get("version", "")).name
    return made | {"prompt": data["algorithm"]["prompts"]["template"]}


def cache_key(config: Config) -> str:
    """Hash of everything that makes the base: model, tokenizer, recipe, task, seed and this package's sources."""
    digest = hashlib.sha256(json.dumps(made_of(config), sort_keys=True).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def prime(config: Config, out: Path, mesh: Mesh, stopping: Callable[[], int]) -> Any:
    """Parameters of the base policy, from the folder `out`, else from the cache, else trained into both.

    The folder holds metrics.jsonl, the checkpoint and base.json, which says what the base is made of. A stage that was
    interrupted goes on where it stopped. What is damaged is renamed `….damaged` and made anew; of two runs that need
    one base, the second waits for the first. Raises Stopped when `stopping()` gives a signal, ValueError when the
    folder holds another base policy or when the task has no traces to learn from.
    """
    config = replace(config, model=lora.without(config.model))  # all of a base is trained
    cached = datasets.cache_folder() / cache_key(config)
    with contextlib.ExitStack() as stack:
        if not out.exists():
            with contextlib.suppress(OSError):  # without a cache that can be written nothing is shared
                cached.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(folder.lock(cached.with_name(f"{cached.name}.lock"), stopping))
        while True:
            copied = not out.exists() and cached.exists()
            if copied:
                print(f"base policy from {cached}")
                folder.copy_whole(cached, out)
            try:
                params = _primed(config, out, mesh, stopping, finished=copied)
                break
            except Damaged as error:
                for damaged in (out, cached) if copied else (out,):
                    aside = damaged.with_name(f"{damaged.name}.damaged")
                    print(f"{error}: {damaged} is kept as {aside} and made anew")
                    shutil.rmtree(aside, ignore_errors=True)
                    damaged.rename(aside)
        if not cached.exists():
            with contextlib.suppress(OSError):  # a cache that cannot be written, or that another run has filled
                folder.copy_whole(out, cached)
        return params


def load(config: Config, folder: Path, mesh: Mesh) -> Any:
    """Parameters of the base policy that a folder holds. Raises ValueError unless it is finished."""
    total, found = sum(s.batches for s in config.prime.stages), newest_policy(folder, config.model, mesh)
    done = found.step if found else 0
    expect(done == total, str(folder), f"a base policy after {done} of {total} batches", "a finished one (jaxrl sft)")
    return found.state.params


def _primed(config: Config, out: Path, mesh: Mesh, stopping: Callable[[], int], finished: bool) -> Any:
    """Parameters from the folder `out`; what they lack they learn now. Raises Damaged, also unless `finished`."""
    total = sum(s.batches for s in config.prime.stages)
    _claim(out, made_of(config))
    tx, learning_rate = make_optimizer(config.prime.optimizer, total), schedule(config.prime.optimizer, total)
    state, done = init_state(config.model, tx, config.seed, mesh), 0
    with contextlib.closing(Checkpoints(out / "checkpoints", keep=1)) as checkpoints:
        if found := checkpoints.restore(state, print):
            state, done = found.state, found.step
        if done == total:
            return state.params
        if finished:
            raise Damaged(f"{out}: no finished base policy")
        steps = _steps(config, state, done, mesh, tx)
        with metrics.RunLog(out, done or None) as log, metrics.Progress(total - done, "priming") as progress:
            for done, state, m in steps:
                progress.advance()
                if done % LOG_EVERY == 0 or done == total:
                    row = {k: float(m[k]) for k in ("loss", "entropy", "grad_norm")}
                    log.log(done, row | {"lr": float(learning_rate(done - 1))})
                    progress.line(f"priming {done:>5}/{total}  loss {row['loss']:.4f}  entropy {row['entropy']:.3f}")
                if done % SAVE_EVERY == 0 or done == total or stopping():
                    checkpoints.save(done, state, {})
                if stopping():
                    raise Stopped(stopping())
    return state.params


def _claim(out: Path, recipe: dict[str, Any]) -> None:
    """Write `recipe` to base.json; Damaged when the file there is no JSON, ValueError when it holds another recipe."""
    file = out / "base.json"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        folder.write_whole(file, json.dumps(recipe, indent=1) + "\n")
        return
    try:
        recorded = json.loads(file.read_text())
    except ValueError as error:
        raise Damaged(f"{file}: {error}") from error
    if differs := configs.differences(recorded, recipe):
        raise ValueError(f"{out} holds another base policy ({'; '.join(differs)}); expected a new folder")


def _steps(
    config: Config, state: TrainState, start: int, mesh: Mesh, tx: optax.GradientTransformation
) -> Iterator[tuple[int, TrainState, dict[str, Any]]]:
    """For each batch after the first `start`: how many are learnt from, the state then, the step's metrics."""
    recipe = config.prime
    field = "task" if recipe.task is None else "prime.task"
    task = fitting.open_task(recipe.task or config.task, config.algorithm.prompts.template, field)
    if task.trace is None:
        raise ValueError("prime.task is without traces; expected a task with Task.trace, or prime=None")
    train_step = make_train_step(config.model, SUPERVISED, tx, chunk=config.learner.logprob_chunk)
    ones, cut = np.ones((recipe.traces_per_batch, 1), np.float32), replace(division(config, mesh), mini_batches=1)
    for done, batch in enumerate(traces(task, config.tokenizer(), recipe, config.seed, start), start + 1):
        tokens, most = batch.prompt_lengths + batch.lengths, config.model.max_positions
        row = batch.prompts[int(tokens.argmax())].id
        expect(
            tokens.max() <= most, f"prime: tokens of row {row}", tokens.max(), f"model.max_positions = {most} at most"
        )
        arrays, _ = make_batch(batch, config.model, cut, mesh=mesh)
        state, m = train_step(state, with_weights(with_advantages(arrays, ones), "token", None))
        yield done, state, m
