"""GRPO on Countdown: reach a target with three numbers, each used once.

Paper:   DeepSeekMath, 2402.03300 (GRPO); the game as in "Cognitive behaviors", 2503.01307.
Claim:   held-out accuracy rises well above that of the base.
Command: jaxrl train experiments/countdown_grpo.py     (about a quarter of an hour on two cores)
"""

from dataclasses import replace
from functools import partial

from jaxrl_llm.config import Config, Prime, Rollout, Stage
from jaxrl_llm.data import tasks
from jaxrl_llm.models import presets
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer

KNOWING = {"clean": 0.6, "backtrack": 0.4}
MIXTURE = {"clean": 0.3, "backtrack": 0.2, "wrong_step": 0.25, "no_reasoning": 0.25}

CONFIG = Config(
    task=partial(tasks.countdown, numbers=(3, 3)),
    model=presets.MICRO,
    prime=Prime(stages=(Stage(batches=700, mixture=KNOWING), Stage(batches=100, mixture=MIXTURE))),
    algorithm=replace(ALGORITHMS["grpo"], kl_coef=0.001),  # .04 in the paper
    optimizer=Optimizer(lr=1e-4, warmup=5),
    rollout=Rollout(prompts=32, group_size=8, max_prompt_tokens=32, max_response_tokens=64),
    micro_batches=4,
    steps=150,
)
