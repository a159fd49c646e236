"""CISPO: the ratio is capped and detached, so that no token loses its gradient.

Paper:   MiniMax-M1, 2506.13585.
Claim:   the paper: DAPO's accuracy in half the steps; a head in float32 (as everything is here) makes sampler and
         learner agree.
Command: jaxrl train experiments/cispo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["cispo"], updates_per_batch=4),
    optimizer=replace(BASE.optimizer, lr=1e-5, b1=0.9, b2=0.95, eps=1e-15),
)
