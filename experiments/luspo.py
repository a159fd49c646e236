"""LUSPO: GSPO times the answer's length, so that it does not favour short answers.

Paper:   LUSPO, 2602.05261.
Claim:   the paper: GSPO's answers grow shorter in training, LUSPO's do not, and it scores higher on text and images.
Command: jaxrl train experiments/luspo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["luspo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
