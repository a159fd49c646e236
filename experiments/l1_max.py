"""L1-Max: the prompt names a most length, and right answers are worth more the further they stay below.

Paper:   L1, 2503.04697.
Claim:   the paper: answers keep to the budget named, shorter where a problem needs less, as accurate as L1-Exact's.
Command: jaxrl train experiments/l1_max.py
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
        ALGORITHMS["l1_max"],
        # the worked answers have 20 to 62 tokens
        prompts=PromptChoice(partial(templates.with_length, low=20, high=60, text="{question}{n}<")),
        shaping=Shaping(
            reward=partial(length.l1_max, alpha=0.03)
        ),  # half the reward for 17 tokens, as for 1,667 at 3e-4
    ),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
