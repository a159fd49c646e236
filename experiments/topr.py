"""TOPR: good answers are learnt as they are, bad ones unlearnt only as far as the policy still writes them.

Paper:   Tapered off-policy REINFORCE, 2503.14286.
Claim:   the paper: off-policy learning stays stable without KL, negative examples raise accuracy, and 8B models reach
         the level of 70B.
Command: jaxrl train experiments/topr.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["topr"], updates_per_batch=4),  # the row's 16 would leave 2 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
