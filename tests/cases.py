"""A tiny run, answers as if a sampler had written them, and a free port."""

import socket
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.config import Config, Rollout
from jaxrl_llm.data import tasks
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.sampler.groups import ScoredBatch
from jaxrl_llm.types import EOS, LENGTH, Optimizer, Prompt, Reward, Rollouts

PLAIN = Algorithm(advantages.grpo, losses.ppo_clip, "token")
CONFIG = Config(
    task=partial(tasks.chain, modulus=3, terms=(2, 4)),
    algorithm=PLAIN,
    model=ModelConfig(vocab_size=112, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=32),
    optimizer=Optimizer(lr=1e-2),
    rollout=Rollout(prompts=4, group_size=2, max_prompt_tokens=16, max_response_tokens=10, temperature=0.7),
    steps=4,
)
REWARDS = np.array([1.0, 0.0, 0.0, 1.0], np.float32)


def slow(*values):
    """A case of a parametrized test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def rollouts_of(lengths, finish=None, prompts=2, limit=10):
    """Answers of these lengths in tokens, with texts of another length in characters."""
    rng = np.random.default_rng(0)
    lengths = np.array(lengths, np.int32)
    finish = np.array([LENGTH if n == limit else EOS for n in lengths] if finish is None else finish)
    rows = len(lengths)
    return Rollouts(
        prompts=tuple(Prompt(i, "ab") for i in range(prompts)),
        prompt_tokens=rng.integers(2, 90, (prompts, 3)).astype(np.int32),
        prompt_lengths=np.full(prompts, 3, np.int32),
        tokens=rng.integers(2, 90, (rows, lengths.max())).astype(np.int32),
        sampler_logp=-np.ones((rows, lengths.max()), np.float32),
        lengths=lengths,
        finish=finish,
        texts=("xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",) * rows,
        draws=np.arange(prompts),
        versions=np.zeros((rows, lengths.max()), np.int32),
    )


def scored(answers, rewards):
    """As if nothing but these answers had been sampled."""
    rewards = np.asarray(rewards, np.float32)
    verdicts = tuple(Reward(float(v), bool(c)) for v, c in zip(rewards, rewards > 0, strict=True))
    kept = np.ones(len(answers.prompts), bool)
    return ScoredBatch(answers, verdicts, rewards, kept, answers, verdicts, kept)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
