"""GDPO: two rewards, for the answer and for showing the steps, each standardised by itself.

Paper:   GDPO, 2601.05242.
Claim:   the paper: GRPO of a sum gives unlike combinations of rewards the same advantage; apart, all of them improve.
Command: jaxrl train experiments/gdpo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS, Shaping, Term
from jaxrl_llm.types import Prompt


def worked(prompt: Prompt, text: str) -> float:
    """1 for a step for every operand but the first. Whether the answer is right, a part too, the verifier says."""
    return float(text.count("=") >= len(prompt.meta["operands"]) - 1)


CONFIG = replace(
    BASE,
    algorithm=replace(ALGORITHMS["gdpo"], shaping=Shaping(terms={"format": Term(worked)}, parts=("correct", "format"))),
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
