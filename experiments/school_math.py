"""ASDiv and GSM8K, prepared from files of yours, judged by math-verify, from the base policy of word_problems.py.

Paper:   DAPO, 2503.14476; the problems are ASDiv (2106.15772) and GSM8K's (2110.14168).
Claim:   none: 1.4 M weights know no such words. It is what a run on real problems looks like.
Command: jaxrl train experiments/school_math.py
         after jaxrl data prepare asdiv and jaxrl data prepare gsm8k (--from FILE without a network); then
         jaxrl eval runs/school_math --suite asdiv gsm8k --samples 4
"""

from dataclasses import replace
from functools import partial

from word_problems import CONFIG as BASE

from jaxrl_llm.data import datasets, mixture
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.workers import isolated


def prepared(source: str):
    return partial(datasets.tfds_data, source=source, reward=isolated(answers.reward), check=answers.check_gold)


CONFIG = replace(
    BASE,
    task=partial(mixture.mixture, tasks={"asdiv": prepared("asdiv"), "gsm8k": prepared("gsm8k")}),
    algorithm=replace(ALGORITHMS["dr_grpo"], updates_per_batch=1),
    rollout=replace(BASE.rollout, max_prompt_tokens=192, max_response_tokens=64, long_prompts="drop"),
    evaluation=replace(BASE.evaluation, problems=256),
    steps=10,
)
