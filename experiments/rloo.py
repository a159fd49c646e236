"""RLOO: the other answers' mean is the baseline, the whole answer is one action.

Paper:   Back to basics, 2402.14740.
Claim:   the paper: for human preferences plain REINFORCE with this baseline beats PPO, and also DPO and RAFT.
Command: jaxrl train experiments/rloo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["rloo"])
