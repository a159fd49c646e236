"""CISPO: the ratio is capped and detached, so that no token loses its gradient.

Paper:   MiniMax-M1, 2506.13585.
Claim:   the paper: DAPO's accuracy in half the steps; a head in float32 (as everything is here) makes sampler and
         learner agree.
Command: jaxrl train experiments/cispo.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS, Shaping, Term
from jaxrl_llm.rewards.length import soft_overlong

CONFIG = replace(
    BASE,
    algorithm=replace(
        ALGORITHMS["cispo"],
        # of 96 tokens, as the paper's 4096 of 20k
        shaping=Shaping(terms={"overlong": Term(partial(soft_overlong, cache_len=16))}),
        updates_per_batch=4,  # the row's 16 would leave 2 prompts an update
    ),
    optimizer=replace(BASE.optimizer, lr=1e-5, b1=0.9, b2=0.95, eps=1e-15),
)
