"""Dr. GRPO: GRPO without its two biases, division by the answer's length and by the group's spread.

Paper:   Understanding R1-Zero-like training, 2503.20783.
Claim:   the paper: GRPO makes answers longer, wrong ones above all; without the bias fewer tokens do, for the same
         reasoning.
Command: jaxrl train experiments/dr_grpo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["dr_grpo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
    micro_batches=1,  # each of the 8 updates has only 4 of the 32 prompts
)
