"""How often a policy answers prompts right, for their curation: with its reasoning, and without room for any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.run import evals, trainer
from jaxrl_llm.sampler import groups, scoring
from jaxrl_llm.types import Prompt, expect


def measure(run: Path, samples: int = 8, direct: str = "", direct_tokens: int = 16) -> Callable:
    """A function from prompts to, for each, {"pass_rate", "direct_rate"}, or None for one that is too long.

    The policy is the newest checkpoint of `run`; its template asks and its task's verifier judges. direct: text after
    the prompt that asks for the final answer at once, counted as the answer's begin; without it there is no
    direct_rate. Answers are drawn from evaluation's seeds, by the prompt's place among those that were asked for.
    """
    expect(samples >= 1, "samples", samples, "at least 1")
    learner, state, _ = trainer.load_state(run)
    config, params, asked = learner.config, learner.whole(state.params), 0
    short = replace(config, rollout=replace(config.rollout, max_response_tokens=direct_tokens))
    with jax.set_mesh(learner.mesh):
        engines = [("", trainer.make_engine(learner, params))]
        if direct:
            engines.append((direct, trainer.make_engine(replace(learner, config=short), params)))

    def rates(prompts: Sequence[Prompt]) -> list[dict[str, float] | None]:
        nonlocal asked
        template, limit = config.algorithm.prompts.template, config.rollout.max_prompt_tokens
        shown = [replace(template(p), question=p.text) for p in prompts]
        expect(not (direct and any(p.messages for p in shown)), "direct", direct, "'' with a template of messages")
        length = lambda p: len(learner.tokenizer.encode_prompt(replace(p, text=p.text + direct)))
        fit = [i for i, p in enumerate(shown) if length(p) <= limit]
        found: list[dict[str, float] | None] = [{} if i in set(fit) else None for i in range(len(prompts))]
        draws = asked + np.arange(len(prompts))[fit]
        asked += len(prompts)
        for begun, engine in engines if fit else ():
            told = tuple(replace(shown[i], text=shown[i].text + begun) for i in fit)
            drawn = {"seed": evals.SEED_STREAM + config.seed, "draws": draws, "max_prompt_tokens": limit}
            with jax.set_mesh(learner.mesh):
                answers = groups.sample_groups(
                    engine, told, samples, **drawn, step=None if begun else learner.task.step
                )
            answers = replace(
                answers, prompts=tuple(shown[i] for i in fit), texts=tuple(begun + t for t in answers.texts)
            )
            right = np.array([r.correct for r in scoring.score(learner.task, answers)]).reshape(len(fit), samples)
            for i, rate in zip(fit, right.mean(axis=1).tolist(), strict=True):
                found[i]["direct_rate" if begun else "pass_rate"] = rate
        return found

    return rates
