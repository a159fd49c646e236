"""SAPO: a smooth gate in place of the clip, steeper for bad answers.

Paper:   SAPO, 2511.20347.
Claim:   the paper: steadier training and higher pass@1 than GRPO and GSPO for the same budget.
Command: jaxrl train experiments/sapo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["sapo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
