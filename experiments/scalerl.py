"""ScaleRL: CISPO against the sampler's own log-probs, advantages scaled by the batch, solved prompts retired.

Paper:   The art of scaling RL compute, 2510.13786.
Claim:   the paper: a sigmoid fitted to the run's first part foretells where it ends, up to 100,000 GPU-hours.
Command: jaxrl train experiments/scalerl.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    task=partial(BASE.task, n_train=512),  # prompts are retired when they come again
    prime=replace(BASE.prime, task=BASE.task),
    algorithm=ALGORITHMS["scalerl"],
)
