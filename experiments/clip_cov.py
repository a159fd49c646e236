"""Clip-Cov: a few of the tokens whose log-prob and advantage move together are left out of the update.

Paper:   The entropy mechanism of RL, 2505.22617.
Claim:   the paper: a few tokens of high covariance make entropy collapse; without them it stays up, and accuracy ends
         higher.
Command: jaxrl train experiments/clip_cov.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Updates

CONFIG = replace(
    BASE,
    algorithm=replace(
        ALGORITHMS["clip_cov"],
        # of some 2,500 tokens, the paper's 2e-4 would be half a one
        updates=Updates(select=partial(losses.select_clip_cov, frac=2e-3, clip_low=1.0, clip_high=1.0)),
        updates_per_batch=4,  # the row's 8 would leave 4 prompts an update
    ),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
