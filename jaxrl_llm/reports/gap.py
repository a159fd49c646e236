"""The sampler-learner gap of a checkpoint: samplers of several precisions, on several meshes, against one learner.

Each sampler answers the same held-out problems from the same seeds, and the learner computes the log-probs of the
sampled tokens. Δp is the learner's probability of such a token minus the sampler's.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm import config as configs
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.learner.learner import Learner, learner_logprobs
from jaxrl_llm.models import transformer
from jaxrl_llm.objective import corrections
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import evals, folder, trainer
from jaxrl_llm.sampler import groups
from jaxrl_llm.types import Rollouts, expect

PRECISIONS = (("float32", ""), ("bfloat16", ""), ("int8", ""), ("int8", "int8"))  # (rollout.dtype, rollout.kv_dtype)
SHORT = 16  # tokens: answers up to this length are the first bucket, each further one is twice as wide
POSITIONS = 24  # the longest possible answer is split into at most so many ranges
CONTEXT = 20  # tokens shown before a token

_report = jax.jit(corrections.mismatch_report)


@dataclass(frozen=True)
class Stats:
    """The gap over some tokens."""

    answers: int
    tokens: int
    mean: float  # |Δp|
    max: float  # |Δp|
    mean_log: float  # |Δ log p|, nats
    k3: float  # nats; like `ess`, see corrections.mismatch_report
    ess: float
    above_1: float  # share of tokens with |Δp| > 0.01
    above_10: float  # share of tokens with |Δp| > 0.1


@dataclass(frozen=True)
class Span:
    """The gap over a range of lengths or of positions, both ends included."""

    first: int
    last: int
    stats: Stats


@dataclass(frozen=True)
class Token:
    """One drawn token on which the two disagree."""

    prompt: str
    context: str  # the last tokens before it, of the prompt too
    token: str
    position: int  # tokens of the answer before it
    sampler_p: float
    learner_p: float
    gap: float  # |Δp|


@dataclass(frozen=True)
class Gap:
    """One sampler's gap."""

    sampler: str  # its precision
    mesh: str  # data×fsdp×tensor
    whole: Stats
    by_length: tuple[Span, ...]  # of the answer a token is in, tokens; ranges without an answer are left out
    by_position: tuple[Span, ...]  # tokens of the answer before a token
    worst: tuple[Token, ...]  # largest |Δp| first


def load(run: Path, problems: int, samples: int, worst: int) -> tuple[Learner, Any, int]:
    """A run's learner, set to `problems` × `samples` answers, its newest checkpoint's parameters and step.

    Raises ValueError for problems or samples below 1, worst below 0, and a folder without a run or a checkpoint.
    """
    for name, value, least in (("problems", problems, 1), ("samples", samples, 1), ("worst", worst, 0)):
        expect(value >= least, name, value, f"at least {least}")
    learner, state, step = trainer.load_state(run)
    asked = replace(learner.config.evaluation, problems=problems, samples=samples)
    return replace(learner, config=replace(learner.config, evaluation=asked)), learner.whole(state.params), step


def samplers(learner: Learner) -> list[Learner]:
    """Copies of the learner, one for each sampler: every precision on every mesh, the run's mesh first.

    Precisions: PRECISIONS and the run's. Meshes: the run's, one device, and the widest tensor-parallel one that the
    visible devices and the model's sizes allow. All sample in this process and without top-k or top-p, whose
    renormalised probabilities would look like a gap.
    """
    config, model = learner.config, learner.config.model
    configured = config.rollout.dtype or model.dtype, config.rollout.kv_dtype
    divisor = math.gcd(model.vocab_size, model.heads, model.kv_heads, model.experts or model.mlp_width)
    tensor = max(t for t in range(1, len(jax.devices()) + 1) if divisor % t == 0)
    found = []
    for mesh in dict.fromkeys((config.mesh, configs.Mesh(), configs.Mesh(tensor=tensor))):
        for dtype, kv_dtype in dict.fromkeys((*PRECISIONS, configured)):
            r = replace(config.rollout, dtype=dtype, kv_dtype=kv_dtype, servers=(), top_k=0, top_p=1.0)
            variant = configs.validate(replace(config, rollout=r, mesh=mesh))
            devices = sharding.make_mesh(mesh.data, mesh.fsdp, mesh.tensor)
            found.append(replace(learner, config=variant, mesh=devices))
    return found


def measure_gap(learner: Learner, params: Any, sampler: Learner, *, worst: int) -> Gap:
    """The gap of one of `samplers` over the first held-out problems, as many as the learner evaluates.

    params: the learner's, on its mesh. worst: tokens to show. Raises ValueError if a log-prob is not finite.
    """
    r, answers = sampler.config.rollout, sample_answers(sampler, params)
    mask = answers.generated
    logp = np.where(mask, learner_logprobs(learner, params, answers), 0.0)
    for name, values in (("sampler", answers.sampler_logp), ("learner", logp)):
        expect(np.isfinite(values).all(), f"{name}'s log-probs", float(values.sum()), "finite numbers")
    whole, by_length, by_position = summary(logp, answers.sampler_logp, mask, r.max_response_tokens)
    name = f"{r.dtype} + {r.kv_dtype} kv" if r.kv_dtype else r.dtype
    shown = worst_tokens(learner.tokenizer, answers, logp, worst)
    return Gap(name, _mesh_name(sampler), whole, by_length, by_position, shown)


def _mesh_name(learner: Learner) -> str:
    return "×".join(map(str, learner.mesh.devices.shape))


def sample_answers(sampler: Learner, params: Any) -> Rollouts:
    """Answers to the held-out problems that `jaxrl eval` takes, with its seeds."""
    config = sampler.config
    count, longest = min(config.evaluation.problems, len(sampler.task.test)), config.rollout.max_prompt_tokens
    prompts = tuple(sampler.task.test[i] for i in range(count))
    drawn = {"seed": evals.SEED_STREAM + config.seed, "draws": np.arange(count)}
    shardings = sharding.shardings(transformer.logical_axes(config.model), params, sampler.mesh)
    with jax.set_mesh(sampler.mesh):
        engine = trainer.make_engine(sampler, jax.device_put(params, shardings))
        return groups.sample_groups(
            engine, prompts, config.evaluation.samples, **drawn, max_prompt_tokens=longest, step=sampler.task.step
        )


def summary(
    logp: Float[np.ndarray, "B T"], sampler_logp: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], longest: int
) -> tuple[Stats, tuple[Span, ...], tuple[Span, ...]]:
    """The gap of all tokens, by the length of their answers, and by position.

    longest: tokens that an answer may have; positions are split into POSITIONS equal ranges of it, or fewer.
    """
    width = ((0, 0), (0, longest - mask.shape[1]))  # one shape for all samplers: one compilation
    logp, sampler_logp, mask = (np.pad(x, width) for x in (logp, sampler_logp, mask))
    lengths, position = mask.sum(axis=1)[:, None], np.arange(longest)
    stats_of = lambda where: _stats(logp, sampler_logp, mask & where)
    edges = [0, *(SHORT * 2**i for i in range(longest.bit_length()))]
    step = -(-longest // POSITIONS)
    by_length = [(low + 1, high, (low < lengths) & (lengths <= high)) for low, high in itertools.pairwise(edges)]
    ends = [(low, min(low + step, longest) - 1) for low in range(0, longest, step)]
    by_position = [(first, last, (first <= position) & (position <= last)) for first, last in ends]
    spans = lambda ranges: tuple(Span(a, b, stats) for a, b, where in ranges if (stats := stats_of(where)).tokens)
    return stats_of(True), spans(by_length), spans(by_position)


def _stats(logp: np.ndarray, sampler_logp: np.ndarray, mask: np.ndarray) -> Stats:
    report = {name.removeprefix("gap/"): float(x) for name, x in _report(logp, sampler_logp, mask).items()}
    gap, answers, tokens = _gaps(logp, sampler_logp), int(mask.any(axis=1).sum()), int(mask.sum())
    over = lambda x: float(x.sum(where=mask) / max(tokens, 1))  # the mean over the tokens
    mean, largest, k3, ess = (report[name] for name in ("mean", "max", "k3", "ess"))
    mean_log = over(np.abs(logp - sampler_logp))
    return Stats(answers, tokens, mean, largest, mean_log, k3, ess, over(gap > 0.01), over(gap > 0.1))


def _gaps(logp: np.ndarray, sampler_logp: np.ndarray) -> np.ndarray:
    """|Δp|"""
    return np.abs(np.exp(logp, dtype=np.float64) - np.exp(sampler_logp, dtype=np.float64))


def worst_tokens(tokenizer: Tokenizer, answers: Rollouts, logp: Float[np.ndarray, "B T"], n: int) -> tuple[Token, ...]:
    """The `n` tokens with the largest |Δp|, largest first, without repeating a token after the same text."""
    gaps = _gaps(logp, answers.sampler_logp)
    gaps[~answers.generated] = -1.0
    found: dict[tuple[int, bytes], Token] = {}
    for i in np.argsort(-gaps, axis=None, kind="stable")[: answers.n_tokens.sum()]:
        if len(found) == n:
            break
        row, t = divmod(int(i), gaps.shape[1])
        p, beginning = row // answers.group_size, answers.tokens[row, : t + 1]
        before = [*answers.prompt_tokens[p, : answers.prompt_lengths[p]], *beginning[:-1]]
        texts = answers.prompts[p].text, tokenizer.decode(before[-CONTEXT:]), tokenizer.decode(beginning[-1:])
        sampler_p, learner_p = (float(np.exp(x[row, t])) for x in (answers.sampler_logp, logp))
        token = Token(*texts, t, sampler_p, learner_p, float(gaps[row, t]))
        found.setdefault((p, beginning.tobytes()), token)
    return tuple(found.values())


def write(gaps: list[Gap], out: Path, learner: Learner, step: int) -> Path:
    """out/gap.json: what was measured, and with how many answers at which step. Returns its path."""
    config, path = learner.config, out / "gap.json"
    data = {
        "step": step,
        "problems": min(config.evaluation.problems, len(learner.task.test)),
        "samples": config.evaluation.samples,
        "temperature": config.rollout.temperature,
        "learner": {"dtype": config.model.dtype, "mesh": _mesh_name(learner)},
        "samplers": [asdict(gap) for gap in gaps],
    }
    folder.write_whole(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path
