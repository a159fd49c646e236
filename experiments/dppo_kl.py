"""DPPO with the bound on a KL: of "this token or another", between the sampler's policy and the live one.

Paper:   Rethinking the trust region in LLM RL, 2602.04879.
Claim:   the paper: like its bound on the total variation, it keeps the mismatch of sampler and learner low, where
         methods without a trust region drift until they collapse.
Command: jaxrl train experiments/dppo_kl.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["dppo_kl"], updates_per_batch=4),  # the row's 8 would leave 4 prompts an update
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
