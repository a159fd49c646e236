"""Advantage reweighting: unlikely tokens, whose gradients drown the others', count for less.

Paper:   Do not let low-probability tokens over-dominate, 2505.12929.
Claim:   the paper: with its two methods, this and Lopti, GRPO does up to 46.2 % better on Knights & Knaves puzzles.
Command: jaxrl train experiments/ar.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["ar"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
