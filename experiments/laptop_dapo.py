"""DAPO on a laptop: reinforcement learning lifts a base policy that knows the way but does not always take it.

Paper:   DAPO, 2503.14476.
Claim:   held-out accuracy rises from about a third to above 90 % in 70 steps.
Command: jaxrl train experiments/laptop_dapo.py     (about three minutes on two cores)
"""

from dataclasses import replace
from functools import partial

from jaxrl_llm.config import Config, Prime, Rollout, Stage
from jaxrl_llm.data import tasks
from jaxrl_llm.models import presets
from jaxrl_llm.objective.algorithms import ALGORITHMS, Shaping, Term
from jaxrl_llm.rewards.length import soft_overlong
from jaxrl_llm.types import Optimizer

MIXTURE = {"clean": 0.12, "wrong_step": 0.5, "no_reasoning": 0.33, "recheck": 0.05}

CONFIG = Config(
    task=partial(tasks.chain, modulus=5, terms=(5, 14)),
    model=presets.NANO,
    prime=Prime(stages=(Stage(batches=400, mixture={"clean": 1.0}), Stage(batches=120, mixture=MIXTURE))),
    algorithm=replace(
        ALGORITHMS["dapo"],
        shaping=Shaping(signed_reward=True, terms={"overlong": Term(partial(soft_overlong, cache_len=16))}),  # of 96
        updates_per_batch=1,  # 16 in the row: one is enough here, and the quickest
    ),
    optimizer=Optimizer(lr=2e-5, warmup=5),
    rollout=Rollout(prompts=32, group_size=8, max_prompt_tokens=48, max_response_tokens=96, max_rounds=40),
    micro_batches=4,
    steps=70,
)
