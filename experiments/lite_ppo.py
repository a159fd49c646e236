"""Lite PPO: centred within the group, scaled by the batch, every token with the same weight; a plain clip.

Paper:   Tricks or traps, 2508.08221.
Claim:   the paper: these two changes to a PPO without critic beat GRPO and DAPO with all their parts.
Command: jaxrl train experiments/lite_ppo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["lite_ppo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
