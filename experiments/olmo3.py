"""Olmo 3: unscaled advantages, clip-higher, a correction for the sampler's log-probs, groups refilled until they vary.

Paper:   Olmo 3, 2512.13961.
Claim:   the paper: reinforcement learning with this recipe improves base models; random rewards, the control, must give
         nothing.
Command: jaxrl train experiments/olmo3.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    task=partial(BASE.task, n_train=512),  # prompts are retired when they come again
    prime=replace(BASE.prime, task=BASE.task),
    algorithm=ALGORITHMS["olmo3"],
)
