"""A policy proves itself: after import, and at every push to a server, sampler and learner score the same tokens.

A sampler with wrong weights still draws, fluently or not; only its log-probs against the learner's tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.learner.learner import Learner, learner_logprobs
from jaxrl_llm.run.evals import SEED_STREAM
from jaxrl_llm.sampler import groups
from jaxrl_llm.sampler.requests import Request

PREFIX, TOKENS = 64, 16  # of the probe: one shape for every prompt
# Nats: the mean |Δ log π| that rounding may cause, some times what `jaxrl gap` measures; weights out of place: 1 to 10
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.3, "int4": 1.0}


def prove(learner: Learner, engine: Any, params: Any) -> float:
    """The largest mean |log π_sampler − log π_learner| (nats) on a probe that each of the engine's samplers answers.

    Raises RuntimeError, naming the sampler, for one beyond the rounding of its dtype and for one that is not finite.
    """
    c, prompt = learner.config, learner.task.test[0]
    ids = tuple(learner.tokenizer.encode_prompt(prompt)[: min(PREFIX, c.rollout.max_prompt_tokens)])
    drawn = replace(engine.sampling, top_k=0, top_p=1.0)  # a filtered distribution's log-probs are not the policy's
    tokens = min(TOKENS, c.rollout.max_response_tokens)
    request = Request(ids, 1, tokens, drawn, (), SEED_STREAM + c.seed, engine.version)
    kinds = {c.model.dtype, c.rollout.dtype or c.model.dtype, c.rollout.kv_dtype or c.model.dtype}
    most, worst = max(ROUNDING[kind] for kind in kinds), 0.0
    for name, group in engine.probe(request).items():
        answers = groups.to_rollouts(learner.tokenizer, (prompt,), (request,), (group,))
        logp = learner_logprobs(learner, params, answers)[0, : len(group[0].tokens)]
        gap = float(np.abs(logp - group[0].logp).mean())
        if not gap <= most:
            what = f"its log-probs of {len(logp)} tokens are {gap:.3g} nats from the learner's on average"
            raise RuntimeError(f"sampler {name}: {what}; expected at most {most:g}: it does not have these weights")
        worst = max(worst, gap)
    return worst
