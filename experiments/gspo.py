"""GSPO: one ratio and one clip for the whole answer.

Paper:   GSPO, 2507.18071.
Claim:   the paper: clips a hundred times more tokens than GRPO and still learns faster; stable on mixtures of experts
         without routing replay.
Command: jaxrl train experiments/gspo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["gspo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
