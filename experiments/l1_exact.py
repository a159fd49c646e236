"""L1-Exact: the prompt names a length, and the reward falls with the distance from it.

Paper:   L1, 2503.04697.
Claim:   the paper: answers have the length that was asked for, and accuracy follows it smoothly, above S1's at every
         length.
Command: jaxrl train experiments/l1_exact.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.data import templates
from jaxrl_llm.objective.algorithms import ALGORITHMS, PromptChoice, Shaping
from jaxrl_llm.rewards import length

CONFIG = replace(
    BASE,
    algorithm=replace(
        ALGORITHMS["l1_exact"],
        # the worked answers have 20 to 62 tokens
        prompts=PromptChoice(partial(templates.with_length, low=20, high=60, text="{question}{n}~")),
        shaping=Shaping(
            reward=partial(length.l1_exact, alpha=0.03)
        ),  # the worst miss, 40 tokens, costs 1.2, as 3,900 at 3e-4 do
    ),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
