"""MaxRL: advantages relative to the group's mean, so that right answers to hard prompts count for more.

Paper:   Maximum likelihood reinforcement learning, 2602.02710.
Claim:   the paper: Pareto-dominates GRPO in pass@1 and pass@k, for up to 20 times better use of test-time samples.
Command: jaxrl train experiments/maxrl.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["maxrl"])
