"""PPO: a critic's advantages, four clipped passes over each batch, the KL penalty in the reward.

Paper:   Proximal policy optimization, 1707.06347.
Claim:   the paper: clipped passes over the same batch beat the other online policy gradients, Atari and simulated
         robots, at a good balance of samples, simplicity and time.
Command: jaxrl train experiments/ppo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer

ROW = ALGORITHMS["ppo"]
CONFIG = replace(
    BASE,
    algorithm=replace(ROW, critic=replace(ROW.critic, optimizer=Optimizer(lr=1e-3))),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
