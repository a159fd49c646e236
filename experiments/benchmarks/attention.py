"""Memory and time of one layer's attention, forward and backward: MiB beside its inputs and outputs, and seconds.

`packed` is one row of 1k-token sequences, `grouped` one of a prompt and 8 answers, all of one length. 4 query heads, 2
key-value heads of 64, float32. MiB are the compiler's (memory_analysis); `dense` computes a row's logits all at once.

Command: python experiments/benchmarks/attention.py [--tokens 4096 8192 16384] [--runs 1]      (pins itself to one core)
"""

import os
import time
from collections.abc import Callable

CORE = {int(os.environ.get("BENCH_CORE", "0"))}
os.sched_setaffinity(0, CORE)  # before jax counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402

from jaxrl_llm.models import attention  # noqa: E402

HEADS, KV_HEADS, WIDTH = 4, 2, 64
SEQUENCE, GROUP = 1024, 8


def layer(layout: str, tokens: int) -> Callable:
    """Gradients of Σ out² with respect to q, k and v, of one row."""
    if layout == "packed":
        attend = attention.packed(np.arange(tokens)[None] // SEQUENCE + 1, "xla")
    else:
        attend = attention.grouped(np.array([tokens // GROUP]), tokens // GROUP, GROUP, "xla")
    return jax.grad(lambda *x: jnp.sum(attend(*x, None)[0] ** 2), argnums=(0, 1, 2))


def measured(layout: str, tokens: int, dense: bool, runs: int) -> tuple[float, float]:
    """MiB of temporaries, and the least of the runs' seconds (NaN for no run)."""
    length = tokens if layout == "packed" else tokens // GROUP * (GROUP + 1)
    shapes = [jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    attention.DENSE = 2**62 if dense else 0
    compiled = jax.jit(layer(layout, tokens)).lower(*shapes).compile()
    inputs, seconds = [jax.random.normal(jax.random.key(0), x.shape) for x in shapes], []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - start)
    return compiled.memory_analysis().temp_size_in_bytes / 2**20, min(seconds, default=float("nan"))


def main(tokens: tuple[int, ...] = (4096, 8192, 16384), runs: int = 0) -> None:
    """Print the table.

    Args:
        tokens: of the packed row, and of a group's answers together.
        runs: of each program; 0 only compiles it.
    """
    print(f"{'layout':8} {'tokens':>7} {'blocked, MiB':>13} {'dense, MiB':>11} {'blocked, s':>11} {'dense, s':>9}")
    for layout in ("packed", "grouped"):
        for n in tokens:
            (mib, seconds), (dense_mib, dense_seconds) = (measured(layout, n, dense, runs) for dense in (False, True))
            print(f"{layout:8} {n:7} {mib:13.1f} {dense_mib:11.1f} {seconds:11.3f} {dense_seconds:9.3f}")


if __name__ == "__main__":
    tyro.cli(main)
