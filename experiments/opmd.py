"""Kimi k1.5's mirror descent: prompts by how seldom they are solved, a length reward that comes later.

Paper:   Kimi k1.5, 2501.12599.
Claim:   the paper: without value function, process rewards or tree search, 77.5 on AIME 2024 and 96.2 on MATH 500.
Command: jaxrl train experiments/opmd.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    task=partial(BASE.task, n_train=512),  # success rates are of prompts that come again
    prime=replace(BASE.prime, task=BASE.task),
    algorithm=ALGORITHMS["opmd"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
