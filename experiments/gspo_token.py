"""GSPO-token: GSPO's ratio in value, each token's own in gradient, for advantages that vary in an answer.

Paper:   GSPO, 2507.18071.
Claim:   the paper: the same objective, clip and gradient as GSPO when all tokens of an answer share its advantage, as
         here.
Command: jaxrl train experiments/gspo_token.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["gspo_token"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
