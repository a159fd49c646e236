"""GRPO with a search tool: turns of the policy and of a search engine, whose words are read but not learnt.

Paper:   ReSearch, 2503.19470 (tags, reward, the mask on results).
Claim:   questions whose answers only a search can find: accuracy rises with the tool, and stays at chance without it.
Command: jaxrl train experiments/search_tool.py
         without the tool: jaxrl train experiments/search_tool.py --set task.tool=false --out runs/no_tool
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.config import Prime, Stage
from jaxrl_llm.environments import lookup, research
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer

HABITS = {"clean": 0.2, "misspell": 0.2, "no_reasoning": 0.6}

CONFIG = replace(
    BASE,
    task=lookup.task,
    prime=Prime((Stage(batches=300, mixture={"clean": 1.0}), Stage(batches=60, mixture=HABITS)), task=lookup.task),
    algorithm=replace(ALGORITHMS["grpo"], kl=None, kl_coef=0.0),
    optimizer=Optimizer(lr=2e-5, warmup=5),
    rollout=replace(BASE.rollout, max_prompt_tokens=32, max_response_tokens=192, stop=research.STOPS),
    steps=40,
)
