"""GRPO for pass@k: only the best answer of a group counts, by what it adds to the group's maximum.

Paper:   Optimizing for inference-time objectives, 2503.19595.
Claim:   the paper: trained on code, pass@k rises well above the baseline's; the mean reward is what it is traded for.
Command: jaxrl train experiments/passk_grpo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["passk_grpo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
