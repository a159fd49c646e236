"""Seconds of one GRPO step of a random 4.2 M-parameter policy: rollout, update, all of it, against the machine's rate.

The work: 4 layers of width 256 (4 heads, 2 key-value heads of 64, MLP 1024), 512 tokens, untied head; 8 prompts × 8
answers × 64 tokens of fixed length; one AdamW update; float32, no KL. A step is the trainer's own: prompts, rollout,
reward, advantages, update, weights back to the sampler.

Command: python experiments/benchmarks/rl_step.py [--prompt-len 32] [--steps 8]      (pins itself to one core)

With --ragged: the update alone, of 64 answers whose lengths are log-uniform from 16 to 256, packed against grouped.
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

from jaxrl_llm.config import Config, Learning, Rollout  # noqa: E402
from jaxrl_llm.data import tokenizers  # noqa: E402
from jaxrl_llm.learner.learner import learn_batch, update  # noqa: E402
from jaxrl_llm.learner.train_step import init_state  # noqa: E402
from jaxrl_llm.models.transformer import ModelConfig  # noqa: E402
from jaxrl_llm.objective.algorithms import ALGORITHMS  # noqa: E402
from jaxrl_llm.run import modes, trainer  # noqa: E402
from jaxrl_llm.sampler.groups import ScoredBatch  # noqa: E402
from jaxrl_llm.types import LENGTH, Optimizer, Prompt, Reward, Rollouts, Task  # noqa: E402

MODEL = ModelConfig(
    vocab_size=512, layers=4, width=256, heads=4, kv_heads=2, head_width=64, mlp_width=1024, tied_head=False
)
PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64
SHORTEST, LONGEST = 16, 256  # of ragged answers
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


def ragged_answers(prompt_len: int, seed: int) -> ScoredBatch:
    """Random answers of log-uniform lengths."""
    rng, n = np.random.default_rng(seed), PROMPTS * GROUP
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), n)).astype(np.int32)
    rollouts = Rollouts(
        prompts=tuple(random_prompts(prompt_len).train[:PROMPTS]),
        prompt_tokens=rng.integers(2, MODEL.vocab_size, (PROMPTS, prompt_len), np.int32),
        prompt_lengths=np.full(PROMPTS, prompt_len, np.int32),
        tokens=rng.integers(2, MODEL.vocab_size, (n, LONGEST), np.int32),
        sampler_logp=np.full((n, LONGEST), -np.log(MODEL.vocab_size), np.float32),
        lengths=lengths,
        finish=np.full(n, LENGTH),
        texts=("",) * n,
        draws=np.arange(PROMPTS),
    )
    rewards = tuple(Reward(float(v), bool(v)) for v in rng.integers(0, 2, n))
    values, kept = np.array([r.value for r in rewards], np.float32), np.ones(PROMPTS, bool)
    return ScoredBatch(rollouts, rewards, values, kept, rollouts, rewards, kept)


def ragged_update(config: Config, steps: int) -> None:
    """Print how long the update of ragged answers takes in each layout, the layouts in turn."""
    config = replace(config, rollout=replace(config.rollout, max_response_tokens=LONGEST))
    of_layout = lambda name: trainer.build(replace(config, learner=Learning(layout=name)))
    learners = {name: of_layout(name) for name in ("packed", "grouped")}
    seconds, efficiency = ({name: [] for name in learners} for _ in range(2))
    batches = [ragged_answers(config.rollout.max_prompt_tokens, seed) for seed in range(steps)]
    for measured in (False, True):  # the first time round each shape is compiled
        for scored in batches:
            for name, learner in learners.items():
                with jax.set_mesh(learner.mesh):
                    state = init_state(MODEL, learner.tx, 0, learner.mesh)
                    start = time.perf_counter()
                    batch, state, packed = learn_batch(learner, state, scored)
                    update(learner, state, batch)
                if measured:
                    seconds[name].append(time.perf_counter() - start)
                    efficiency[name].append(packed["packing/efficiency"])
    tokens = np.mean([b.rollouts.lengths.sum() for b in batches])
    print(f"prompt {config.rollout.max_prompt_tokens}, answers {SHORTEST} to {LONGEST}, {tokens:.0f} tokens a batch")
    print(f"{'update':8} {'median s':>9} {'least s':>9} {'efficiency':>10}")
    for name, taken in seconds.items():
        print(f"{name:8} {np.median(taken):9.3f} {min(taken):9.3f} {np.mean(efficiency[name]):10.0%}")
    ratios = np.array(seconds["packed"]) / np.array(seconds["grouped"])
    print(f"packed / grouped, median of {steps} pairs: {np.median(ratios):.2f}")


def main(prompt_len: int = 32, steps: int = 8, micro_batches: int = 4, ragged: bool = False) -> None:
    """Print the table.

    Args:
        prompt_len: tokens per prompt.
        steps: timed steps, after two that compile.
        micro_batches: pieces that an update is computed in.
        ragged: the update of answers of many lengths, packed against grouped.
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
    if ragged:
        return ragged_update(config, steps)
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
