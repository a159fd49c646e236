"""A curriculum: GRPO on one pass through the problems, from few operands to many.

Paper:   Kimi k1.5, 2501.12599 (curriculum sampling); DeepSeekMath, 2402.03300 (GRPO).
Claim:   the paper: starting with easy problems and going on to hard ones beats drawing them uniformly.
Command: jaxrl train experiments/curriculum.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Prompt


def operands(prompt: Prompt) -> int:
    """How many numbers are to be added."""
    return len(prompt.meta["operands"])


CONFIG = replace(
    BASE,
    task=partial(BASE.task, n_train=4096),  # all of them are sorted before the first step
    prime=replace(BASE.prime, task=BASE.task),
    algorithm=ALGORITHMS["grpo"],
    rollout=replace(BASE.rollout, difficulty=operands),
)
