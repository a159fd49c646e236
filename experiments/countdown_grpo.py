"""GRPO on Countdown: reach a target with three or four numbers, each used once.

Paper:   DeepSeekMath, 2402.03300 (GRPO); Countdown as in "Cognitive behaviors", 2503.01307.
Claim:   held-out accuracy rises from a base that finds few expressions.
Command: jaxrl train experiments/countdown_grpo.py     (about half an hour on two cores)
"""

from dataclasses import replace
from functools import partial

from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.config import Config, Evaluation, Prime, Rollout, Stage
from jaxrl_llm.data import tasks
from jaxrl_llm.models import presets
from jaxrl_llm.optim import Optimizer

CONFIG = Config(
    task=partial(tasks.countdown, numbers=(3, 4)),
    model=presets.MICRO,
    prime=Prime(
        stages=(
            Stage(batches=1500, mixture={"clean": 0.5, "backtrack": 0.5}),
            Stage(batches=200, mixture={"clean": 0.3, "backtrack": 0.2, "wrong_step": 0.3, "no_reasoning": 0.2}),
        ),
    ),
    algorithm=replace(ALGORITHMS["grpo"], kl_coef=0.001),
    optimizer=Optimizer(lr=1e-4, warmup=10),
    rollout=Rollout(prompts=64, group_size=8, max_prompt_tokens=32, max_response_tokens=80),
    evaluation=Evaluation(every=20),
    micro_batches=8,
    steps=300,
)
