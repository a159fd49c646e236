"""VESPO: an answer's weight fades smoothly as the policy moves away from the one that wrote it.

Paper:   VESPO, 2602.10693.
Claim:   the paper: with up to 64 updates on a batch its curves stay the same, where GRPO, GSPO and SAPO fall behind or
         collapse; the gain is largest on a mixture of experts.
Command: jaxrl train experiments/vespo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["vespo"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
