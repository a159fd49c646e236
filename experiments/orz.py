"""Open-Reasoner-Zero: PPO with γ = λ = 1 and nothing else; the critic takes more steps than the policy.

Paper:   Open-Reasoner-Zero, 2503.24290.
Claim:   the paper: vanilla PPO with γ = λ = 1, rule-based rewards and no KL makes accuracy and length grow together,
         and passes DeepSeek-R1-Zero-Qwen-32B in a tenth of its steps.
Command: jaxrl train experiments/orz.py
"""

from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.data import templates
from jaxrl_llm.objective.algorithms import ALGORITHMS, PromptChoice
from jaxrl_llm.types import Optimizer

ROW = ALGORITHMS["orz"]
CONFIG = replace(
    BASE,
    task=partial(templates.tagged, task=BASE.task),  # right only if the answer is closed by its tag
    algorithm=replace(
        ROW,
        prompts=PromptChoice(partial(templates.custom, text="{question}<think>")),  # R1's in short
        critic=replace(ROW.critic, updates=8, mini_batches=4, optimizer=Optimizer(lr=1e-3)),  # 12 in the row
    ),
    rollout=replace(BASE.rollout, stop=("</answer>",)),
)
