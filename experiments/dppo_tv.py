"""DPPO: a token stops learning when its probability has moved too far, not when its ratio has.

Paper:   Rethinking the trust region in LLM RL, 2602.04879.
Claim:   the paper: a ratio's clip stops unlikely tokens too early and likely ones too late; with bounds on the total
         variation instead a mixture of experts learns stably without routing replay, and ends higher than with GRPO.
Command: jaxrl train experiments/dppo_tv.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["dppo_tv"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
