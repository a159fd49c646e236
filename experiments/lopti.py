"""Lopti: unlikely tokens have an update of their own, before the others'.

Paper:   Do not let low-probability tokens over-dominate, 2505.12929.
Claim:   the paper: with its two methods, this and advantage reweighting, GRPO does up to 46.2 % better on Knights &
         Knaves puzzles; the other order of the updates collapses.
Command: jaxrl train experiments/lopti.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["lopti"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
