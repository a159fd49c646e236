"""DAPO on word problems in English, judged by math-verify: a decoder of 1.4 M weights with byte pairs of its own.

Paper:   DAPO, 2503.14476; the verifier is math-verify's, in worker processes.
Claim:   of its own: accuracy on templates that training never shows rises.
Command: jaxrl train experiments/word_problems.py     (about a quarter of an hour on two cores)
         on problems of yours: experiments/school_math.py
"""

from dataclasses import replace
from functools import partial

from jaxrl_llm.config import Config, Prime, Rollout, Stage
from jaxrl_llm.data import tokenizers, word_problems
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective.algorithms import ALGORITHMS, Shaping
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.workers import isolated
from jaxrl_llm.types import Optimizer

TASK = partial(word_problems.word_problems, reward=isolated(answers.reward))
HABITS = {"clean": 0.15, "wrong_step": 0.45, "no_reasoning": 0.4}

CONFIG = Config(
    task=TASK,
    tokenizer=partial(tokenizers.byte_pairs, word_problems.texts, size=512),
    model=ModelConfig(vocab_size=512, layers=4, width=160, heads=5, kv_heads=5, head_width=32, mlp_width=448),
    prime=Prime(stages=(Stage(batches=700, mixture={"clean": 1.0}), Stage(batches=100, mixture=HABITS)), task=TASK),
    algorithm=replace(ALGORITHMS["dapo"], shaping=Shaping(signed_reward=True), updates_per_batch=1),
    optimizer=Optimizer(lr=2e-5, warmup=5),
    rollout=Rollout(prompts=32, group_size=8, max_prompt_tokens=64, max_response_tokens=48, max_rounds=40),
    micro_batches=4,
    steps=60,
)
