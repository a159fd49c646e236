"""DCPO: clips that widen for unlikely tokens, advantages that remember the prompt's earlier visits.

Paper:   DCPO, 2509.02333.
Claim:   the paper: 38.8 avg@32 on AIME 2024 against DAPO's 31.6; a tenth as many tokens clipped, and 71.8 % of the
         answers with signal in place of 43.8 %.
Command: jaxrl train experiments/dcpo.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    task=partial(BASE.task, n_train=512),  # its memory is of prompts that come again
    prime=replace(BASE.prime, task=BASE.task),
    algorithm=replace(ALGORITHMS["dcpo"], updates_per_batch=4),  # the row's 16 would leave 2 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
