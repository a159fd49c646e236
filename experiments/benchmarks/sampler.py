"""Rollout tokens per second of a random 4.2 M-parameter policy, against the arithmetic that they need.

The work is rl_step.py's: 8 prompts × 8 answers × 64 tokens in float32, at prompts of 32, 256 and 1024 tokens. Then
answers whose lengths are drawn log-uniformly from 8 to 256, 32 prompts × 8 in 64 rows, against batches padded to their
longest. Then the same answers through JetStream's Driver, and through gRPC from another process (`--remote`).

Command: python experiments/benchmarks/sampler.py [--remote]      (pins itself to one core)
"""

import os
from dataclasses import replace

CORE = {int(os.environ.get("BENCH_CORE", "0"))}
os.sched_setaffinity(0, CORE)  # before jax counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from rl_step import MODEL, endless_tokenizer, matmul_rate, random_prompts  # noqa: E402

from jaxrl_llm.config import Config, Rollout  # noqa: E402
from jaxrl_llm.models import transformer  # noqa: E402
from jaxrl_llm.objective.algorithms import ALGORITHMS  # noqa: E402
from jaxrl_llm.sampler import decode, weights  # noqa: E402
from jaxrl_llm.sampler.requests import Answer, Group, Request  # noqa: E402
from jaxrl_llm.types import LENGTH  # noqa: E402

PROMPTS, GROUP, NEW_TOKENS, SLOTS = 8, 8, 64, 64
PORT = 9741
CONFIG = Config(  # of the server
    task=partial(random_prompts, 32),
    algorithm=replace(ALGORITHMS["grpo"], kl=None, kl_coef=0.0),
    model=MODEL,
    tokenizer=endless_tokenizer,
    rollout=Rollout(PROMPTS, GROUP, 32, NEW_TOKENS, slots=SLOTS),
)


def requests(prompt: int, lengths: np.ndarray) -> list[Request]:
    """A request a row of `lengths` [P,G], each with a prompt of so many tokens."""
    rng = np.random.default_rng(0)
    tokens = lambda: tuple(rng.integers(2, MODEL.vocab_size, prompt).tolist())
    return [Request(tokens(), row.size, int(row.max()), draw=i) for i, row in enumerate(lengths)]


def flops(prompt: int, lengths: np.ndarray) -> float:
    """Matrix products that the answers need, 2 operations per multiply-add; a group's prompt is computed once."""
    c, prefix = MODEL, prompt - 1
    block = c.width * c.head_width * 2 * (c.heads + c.kv_heads) + 3 * c.width * c.mlp_width
    pair = 2 * 2 * c.layers * c.heads * c.head_width  # one query against one key: logit and weighted value
    n = lengths.astype(np.float64)
    pairs = len(n) * prefix * (prefix + 1) / 2 + (n * prefix + n * (n + 1) / 2).sum()
    return 2 * (len(n) * prefix + n.sum()) * c.layers * block + pair * pairs + 2 * n.sum() * c.width * c.vocab_size


def best(run: Callable[[], object], repeats: int) -> float:
    """Least seconds of a few runs, after one that compiles."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def scripts(lengths: np.ndarray) -> list[Group]:
    """Answers of these lengths, whose tokens the decoding loop is made to draw."""
    rng = np.random.default_rng(1)

    def answer(n: int) -> Answer:
        return Answer(rng.integers(2, 500, n).astype(np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), LENGTH)

    return [tuple(answer(int(n)) for n in row) for row in lengths]


def log_uniform(prompts: int) -> np.ndarray:
    return np.exp(np.random.default_rng(2).uniform(np.log(8), np.log(256), (prompts, GROUP))).round().astype(int)


def in_process(engine: decode.LocalEngine, repeats: int) -> None:
    print(f"{'prompt':>7} {'s':>7} {'prefill s':>9} {'tokens/s':>9} {'GFLOP':>7} {'of the rate':>11} {'µs/token':>9}")
    lengths, per_token, rate = np.full((PROMPTS, GROUP), NEW_TOKENS), {}, matmul_rate()
    for prompt in (32, 256, 1024):
        asked = requests(prompt, lengths)
        seconds = best(lambda asked=asked: decode.generate(engine, asked), repeats)
        one = [replace(r, max_tokens=1) for r in asked]
        prefill = best(lambda one=one: decode.generate(engine, one), repeats)
        rate = max(rate, matmul_rate())
        per_token[prompt] = (seconds - prefill) / (lengths.sum() - lengths.size)
        todo = flops(prompt, lengths)
        print(
            f"{prompt:7} {seconds:7.3f} {prefill:9.3f} {lengths.sum() / seconds:9.0f} {todo / 1e9:7.1f} "
            f"{todo / seconds / rate:11.0%} {1e6 * per_token[prompt]:9.1f}"
        )
    print(f"a decoded token at prompt 1024 costs {per_token[1024] / per_token[32]:.2f} × one at 32, prefill apart;")
    ratio = (flops(1024, lengths) - flops(1024, lengths[:, :1] * 0)) / (
        flops(32, lengths) - flops(32, lengths[:, :1] * 0)
    )
    print(f"arithmetic alone makes it {ratio:.2f} ×; matrix products run at {rate / 1e9:.0f} GFLOP/s\n")
    for prompts in (PROMPTS, 4 * PROMPTS):
        lengths = log_uniform(prompts)
        asked, given = requests(32, lengths), scripts(lengths)
        went = best(lambda asked=asked, given=given: decode.forced_logprobs(engine, asked, given), repeats)
        batches = [slice(i, i + PROMPTS) for i in range(0, prompts, PROMPTS)]
        longest = [np.full((PROMPTS, GROUP), lengths[b].max()) for b in batches]
        padded = [(requests(32, n), scripts(n)) for n in longest]
        waited = best(lambda padded=padded: [decode.forced_logprobs(engine, *p) for p in padded], repeats)
        print(
            f"lengths 8 to 256, {prompts} × {GROUP} in {SLOTS} rows: {went:.2f} s, {lengths.sum() / went:.0f} "
            f"tokens/s, {flops(32, lengths) / went / rate:.0%} of the rate; padded {waited:.2f} s, {waited / went:.2f}×"
        )


def overheads(params: object, engine: decode.LocalEngine, repeats: int) -> None:
    """What JetStream's Driver, and then gRPC, add to a token."""
    from jaxrl_llm.sampler import client
    from jaxrl_llm.serving import backend

    asked = requests(32, np.full((4 * PROMPTS, GROUP), NEW_TOKENS))
    tokens = sum(r.group * r.max_tokens for r in asked)
    alone = best(lambda: decode.generate(engine, asked), repeats)
    sizes = {"max_prompt_tokens": 32, "max_tokens": NEW_TOKENS}
    driver = backend.DriverBackend(
        MODEL, engine.tokenizer, engine.weights, slots=SLOTS, tokens_per_call=engine.tokens_per_call, **sizes
    )
    through = best(lambda: [f.result() for f in [driver.submit(r) for r in asked]], repeats)
    driver.close()
    command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", __file__, "--port", str(PORT), "--unwatched"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        calls = client.Client([f"127.0.0.1:{PORT}"])
        calls.push(client.named(weights.push(MODEL, params, None).params), 0)
        wired = best(lambda: calls.ordered(asked), repeats)
        calls.close()
    finally:
        server.terminate()
        server.wait()
    print(f"\n{tokens} tokens, {len(asked)} groups in {SLOTS} slots, {engine.tokens_per_call} tokens per call:")
    for name, seconds in (("in process", alone), ("Driver", through), ("Driver and gRPC", wired)):
        extra = 1e6 * (seconds - alone) / tokens
        print(f"{name:16} {seconds:6.3f} s {tokens / seconds:7.0f} tokens/s {extra:+6.1f} µs/token")


def main(remote: bool = False, repeats: int = 5) -> None:
    """Print the tables.

    Args:
        remote: also through JetStream's Driver and gRPC (wants google-jetstream).
        repeats: timed runs of each, the best of which counts.
    """
    params = transformer.init(MODEL, jax.random.key(0))
    pushed = weights.push(MODEL, params, None)
    engine = decode.LocalEngine(MODEL, endless_tokenizer(), pushed, max_tokens=256, slots=SLOTS)
    print(f"one core, float32, {PROMPTS} prompts × {GROUP} answers × {NEW_TOKENS} tokens")
    in_process(engine, repeats)
    if remote:
        overheads(params, engine, repeats)


if __name__ == "__main__":
    tyro.cli(main)
