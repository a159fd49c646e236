"""REINFORCE++: PPO's clip without a critic; reward to go, standardised over the whole batch.

Paper:   REINFORCE++, 2501.03262.
Claim:   the paper: standardising over the whole batch is steadier than within each group, without PPO's critic.
Command: jaxrl train experiments/reinforce_pp.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["reinforce_pp"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
