"""GRPO: rewards standardised within the group in place of a critic, a KL penalty in the loss.

Paper:   DeepSeekMath, 2402.03300.
Claim:   the paper: GRPO lifts the mathematical reasoning of a 7B model, to 51.7 % on MATH, with less memory than PPO.
Command: jaxrl train experiments/grpo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["grpo"])
