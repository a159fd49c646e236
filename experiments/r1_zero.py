"""R1-Zero: GRPO on a base policy, rewarded for the answer and for the form <think>…</think><answer>…</answer>.

Paper:   DeepSeek-R1, 2501.12948.
Claim:   the paper: with no supervised reasoning at all, pass@1 on AIME 2024 rises from 15.6 to 71.0.
Command: jaxrl train experiments/r1_zero.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.data import templates
from jaxrl_llm.objective.algorithms import ALGORITHMS, PromptChoice

CONFIG = replace(
    BASE,
    task=partial(templates.tagged, task=BASE.task),  # answers of 85 tokens at most
    algorithm=replace(
        ALGORITHMS["r1_zero"],
        prompts=PromptChoice(partial(templates.custom, text="{question}<think>")),  # R1's in short
        updates_per_batch=4,  # the row's 16 would leave 2 prompts an update
        kl_refresh=100,  # every 25 of the 70 batches
    ),
    optimizer=replace(BASE.optimizer, lr=1e-5),
    rollout=replace(BASE.rollout, stop=("</answer>",)),
)
