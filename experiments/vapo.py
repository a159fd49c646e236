"""VAPO: a pre-trained critic, λ that follows the answer's length, clip-higher, and the right answers' likelihood.

Paper:   VAPO, 2504.05118.
Claim:   the paper: 60 on AIME 2024 within 5,000 steps; 11 without value pre-training, 33 without decoupled GAE, 45
         without the length-adaptive λ. Here: with --set algorithm.critic.head_std=0.125, a critic that begins at
         random, pre-training gains 6 to 16 points of accuracy in 20 steps over --set algorithm.critic.pretrain=0.
Command: jaxrl train experiments/vapo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer

ROW = ALGORITHMS["vapo"]
CONFIG = replace(
    BASE,
    algorithm=replace(
        ROW,
        updates_per_batch=2,  # the row's 16, of policy and critic, would leave 2 prompts an update
        # the row's 50 batches of pre-training are most of a run of 70 steps
        critic=replace(ROW.critic, pretrain=20, updates=8, mini_batches=4, optimizer=Optimizer(lr=1e-3)),
    ),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
