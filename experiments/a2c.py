"""A2C: the plain policy gradient with a critic, one update a batch; PPO without clip or epochs.

Paper:   Asynchronous methods for deep RL, 1602.01783 (A3C; this is its synchronous form).
Claim:   the paper: parallel actors steady an actor-critic enough to pass the best Atari results of its day in half the
         time, on CPU cores alone.
Command: jaxrl train experiments/a2c.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer

ROW = ALGORITHMS["a2c"]
CONFIG = replace(
    BASE,
    algorithm=replace(ROW, critic=replace(ROW.critic, updates=4, optimizer=Optimizer(lr=1e-3))),
)
