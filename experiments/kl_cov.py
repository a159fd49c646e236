"""KL-Cov: the tokens whose log-prob and advantage move together most are held back by a penalty.

Paper:   The entropy mechanism of RL, 2505.22617.
Claim:   the paper: restraining the few tokens of high covariance keeps entropy from collapsing, and accuracy ends
         higher.
Command: jaxrl train experiments/kl_cov.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["kl_cov"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
