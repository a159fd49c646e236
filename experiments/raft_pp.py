"""RAFT++: only right answers are learnt from, with PPO's ratio and clip.

Paper:   A minimalist approach to LLM reasoning, 2504.11343.
Claim:   the paper: learning from positive examples alone is competitive with GRPO and PPO.
Command: jaxrl train experiments/raft_pp.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["raft_pp"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
