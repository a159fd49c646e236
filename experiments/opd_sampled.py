"""On-policy distillation, sampled: how much likelier a trained teacher finds each token is the token's reward.

Paper:   MiniLLM, 2306.08543, without its long-range part: a token's reward is its own alone.
Claim:   the policy comes close to its teacher, as with the exact divergence; the teacher gives one number a token.
Command: jaxrl train experiments/opd_sampled.py     (first its teacher: jaxrl train experiments/laptop_dapo.py)
"""

from dataclasses import replace

from opd import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["opd_sampled"])
