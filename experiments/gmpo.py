"""GMPO: the geometric mean of the tokens' ratios, each clipped in log space.

Paper:   GMPO, 2507.20673.
Claim:   the paper: ratios stay narrower and entropy higher than with GRPO; 4 points of pass@1 more on mathematics.
Command: jaxrl train experiments/gmpo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["gmpo"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
