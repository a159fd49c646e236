"""RSPO: GMPO whose ratios shrink where a mixture of experts now routes a token elsewhere.

Paper:   RSPO, 2510.23027.
Claim:   the paper: on a mixture of experts it stabilises GRPO, GSPO and GMPO, and scores higher.
Command: jaxrl train experiments/rspo.py

This model is dense: it has no routers, so all router ratios are 1 and the run is GMPO's. See moe_countdown.py.
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["rspo"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
