"""GDPO: two rewards, for the answer and for showing the steps, each standardised by itself.

Paper:   GDPO, 2601.05242.
Claim:   the paper: GRPO of a sum gives unlike combinations of rewards the same advantage; apart, all of them improve.
Command: jaxrl train experiments/gdpo.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Prompt, Reward, Task


def judged(reward: Callable, prompt: Prompt, text: str, finish: str) -> Reward:
    """The verifier's word in two parts: a right answer, and a step for every operand but the first."""
    verdict = reward(prompt, text, finish)
    worked = text.count("=") >= len(prompt.meta["operands"]) - 1
    return replace(verdict, parts={"correct": verdict.value, "format": float(worked)})


def in_parts(task: Callable[[], Task]) -> Task:
    made = task()
    return replace(made, reward=partial(judged, made.reward))


CONFIG = replace(
    BASE,
    task=partial(in_parts, task=BASE.task),
    prime=replace(BASE.prime, task=BASE.task),
    algorithm=ALGORITHMS["gdpo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
