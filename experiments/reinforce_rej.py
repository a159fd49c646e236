"""Reinforce-Rej: the plain reward, but nothing from groups that are all right or all wrong.

Paper:   A minimalist approach to LLM reasoning, 2504.11343.
Claim:   the paper: dropping those groups is what makes GRPO work, not its standardising; this alone comes near, for
         less KL.
Command: jaxrl train experiments/reinforce_rej.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["reinforce_rej"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
