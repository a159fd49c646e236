"""Seconds of one GRPO step of a random 4.2 M-parameter policy: rollout, update, all of it, against the machine's rate.

The work: 4 layers of width 256 (4 heads, 2 key-value heads of 64, MLP 1024), 512 tokens, untied head; 8 prompts × 8
answers × 64 tokens of fixed length; one AdamW update; float32, no KL. A step is the trainer's own: prompts, rollout,
reward, advantages, update, weights back to the sampler.

Command: python experiments/benchmarks/rl_step.py [--prompt-len 32] [--steps 8]      (pins itself to one core)
"""

import os
import random
from dataclasses import dataclass, replace
from functools import partial

CORE = {int(os.environ.get("BENCH_CORE", "0"))}
os.sched_setaffinity(0, CORE)  # before jax counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402

from jaxrl_llm.config import Config, Rollout  # noqa: E402
from jaxrl_llm.data import tokenizers  # noqa: E402
from jaxrl_llm.learner.train_step import init_state  # noqa: E402
from jaxrl_llm.models.transformer import ModelConfig  # noqa: E402
from jaxrl_llm.objective.algorithms import ALGORITHMS  # noqa: E402
from jaxrl_llm.run import modes, trainer  # noqa: E402
from jaxrl_llm.types import Optimizer, Prompt, Reward, Task  # noqa: E402

MODEL = ModelConfig(
    vocab_size=512, layers=4, width=256, heads=4, kv_heads=2, head_width=64, mlp_width=1024, tied_head=False
)
PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64
LETTERS = "".join(chr(0x4E00 + i) for i in range(MODEL.vocab_size - 2))  # a token each, after <pad> and <eos>


def endless_tokenizer() -> tokenizers.Tokenizer:
    """512 tokens, none of which ends an answer: every answer has its full length."""
    return replace(tokenizers.characters(LETTERS), eos_ids=())


def coin(prompt: Prompt, text: str, finish: str) -> Reward:
    value = random.Random(f"{prompt.id}{text}").randint(0, 1)
    return Reward(value, bool(value))


def random_prompts(prompt_len: int) -> Task:
    rng = random.Random(0)
    problems = [Prompt(i, "".join(rng.choices(LETTERS, k=prompt_len))) for i in range(512)]
    return Task(problems, problems, coin)


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of a step, matrix products only: 2 per multiply-add, backward twice the forward."""

    rollout: float
    update: float


def work(prompt_len: int) -> StepFlops:
    c, answers, prefix = MODEL, PROMPTS * GROUP, prompt_len - 1
    block = c.width * c.head_width * 2 * (c.heads + c.kv_heads) + 3 * c.width * c.mlp_width
    pair = 2 * 2 * c.layers * c.heads * c.head_width  # one query against one key: logit and weighted value
    suffix = NEW_TOKENS * (NEW_TOKENS + 1) / 2  # pairs of an answer's tokens
    pairs = PROMPTS * prefix * (prefix + 1) / 2 + answers * (NEW_TOKENS * prefix + suffix)
    tokens = PROMPTS * prefix + answers * NEW_TOKENS
    forward = 2 * tokens * c.layers * block + pair * pairs + 2 * answers * NEW_TOKENS * c.width * c.vocab_size
    return StepFlops(forward, 3 * forward)


def matmul_rate() -> float:
    """FLOP/s of the best of a few products of 1024×1024 float32 matrices."""
    a = jnp.ones((1024, 1024), jnp.float32)
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def main(prompt_len: int = 32, steps: int = 8, micro_batches: int = 4) -> None:
    """Print the table.

    Args:
        prompt_len: tokens per prompt.
        steps: timed steps, after two that compile.
        micro_batches: pieces that an update is computed in.
    """
    config = Config(
        task=partial(random_prompts, prompt_len),
        algorithm=replace(ALGORITHMS["grpo"], kl=None, kl_coef=0.0),
        model=MODEL,
        tokenizer=endless_tokenizer,
        optimizer=Optimizer(lr=1e-6),
        rollout=Rollout(PROMPTS, GROUP, prompt_len, NEW_TOKENS, tokens_per_call=32),
        micro_batches=micro_batches,
        steps=steps,
    )
    learner = trainer.build(config)
    rate, taken = matmul_rate(), []
    with jax.set_mesh(learner.mesh):
        state = init_state(MODEL, learner.tx, 0, learner.mesh)
        engine, at = trainer.make_engine(learner, state.params), trainer.Position()
        mode = modes.Sync(learner)
        for _ in range(steps + 2):
            state, engine, at, batch, row = trainer.one_step(learner, state, engine, at, mode)
            taken.append(row)
    assert batch.rollouts.lengths.min() == NEW_TOKENS
    rate = max(rate, matmul_rate())
    needed = work(prompt_len)
    whole_step = needed.rollout + needed.update
    print(f"prompt {prompt_len}, one core, float32; matrix products run at {rate / 1e9:.0f} GFLOP/s on it")
    print(f"{'':8} {'median s':>9} {'least s':>9} {'GFLOP':>7} {'GFLOP/s':>8} {'of the rate':>11}")
    for name, flops in (("rollout", needed.rollout), ("train", needed.update), ("step", whole_step)):
        seconds = [row[f"perf/{name}_s"] for row in taken[2:]]
        speed = flops / np.median(seconds)
        label = "update" if name == "train" else name
        line = f"{label:8} {np.median(seconds):9.3f} {min(seconds):9.3f} {flops / 1e9:7.1f} {speed / 1e9:8.1f}"
        print(f"{line} {speed / rate:11.0%}")


if __name__ == "__main__":
    tyro.cli(main)
