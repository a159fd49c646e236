"""REINFORCE++-baseline: centred within the group, standardised over the whole batch; a k2 loss for the KL.

Paper:   REINFORCE++, 2501.03262.
Claim:   the paper: it generalises where standardising within each group overfits: trained on AIME 2024 alone, GRPO gets
         0 on AIME 2025.
Command: jaxrl train experiments/reinforce_pp_baseline.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    # the row's 8 would leave 4 prompts an update
    algorithm=replace(ALGORITHMS["reinforce_pp_baseline"], updates_per_batch=4),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
