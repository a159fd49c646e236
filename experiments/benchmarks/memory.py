"""Memory of the whole train step of DAPO at the shape of a published model, by the compiler's account: nothing runs.

A batch is one packed row of one sequence, a quarter of it prompt, in one micro-batch on one CPU device; AdamW. Arguments
are parameters, moments and the batch. Temporaries are everything else that lives during the step; `growing` is
temporaries without what does not depend on tokens: the gradient, 4 bytes a parameter.

Command: python experiments/benchmarks/memory.py [--tokens 4096 8192 16384] [--vocab 32000 151936] [--preset NAME]
"""

import os
import time
from dataclasses import replace
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jaxrl_llm.learner import train_step  # noqa: E402
from jaxrl_llm.learner.batching import make_batch, with_weights  # noqa: E402
from jaxrl_llm.learner.optim import make_optimizer  # noqa: E402
from jaxrl_llm.learner.packing import Division  # noqa: E402
from jaxrl_llm.models import transformer  # noqa: E402
from jaxrl_llm.models.presets import PRESETS  # noqa: E402
from jaxrl_llm.models.shape import ModelConfig  # noqa: E402
from jaxrl_llm.objective.algorithms import ALGORITHMS  # noqa: E402
from jaxrl_llm.parallel import sharding  # noqa: E402
from jaxrl_llm.types import LENGTH, Batch, Optimizer, Prompt, Rollouts, TrainState  # noqa: E402

DAPO = ALGORITHMS["dapo"]


def answers(prompts: int, group: int, prompt_tokens: int, answer_tokens: int) -> Rollouts:
    """Answers of full length, all zeros."""
    n, zeros = prompts * group, lambda *shape: np.zeros(shape, np.int32)
    return Rollouts(
        tuple(Prompt(i, "") for i in range(prompts)), zeros(prompts, prompt_tokens), zeros(prompts) + prompt_tokens,
        zeros(n, answer_tokens), np.zeros((n, answer_tokens), np.float32), zeros(n) + answer_tokens,
        np.full(n, LENGTH), ("",) * n, np.arange(prompts),
    )  # fmt: skip


def lowered(model: ModelConfig, rollouts: Rollouts, cut: Division, mesh: Mesh, chunk: int = 1024) -> jax.stages.Lowered:
    """The train step of DAPO on a mesh, which may be of a machine elsewhere: of shapes, not of arrays."""
    tx = make_optimizer(Optimizer(), 100)
    weighted = lambda b: with_weights(replace(b, old_logp=b.sampler_logp), DAPO.norm, None)
    batch = jax.eval_shape(weighted, make_batch(rollouts, model, cut)[0])
    by_answer, by_row = (sharding.batch_sharding(mesh, axis) for axis in (0, 2))
    placed: Batch = jax.tree.map(lambda _: by_answer, batch)
    inputs = jax.tree.map(lambda _: by_row, batch.rows.inputs)
    placed = replace(placed, rows=replace(placed.rows, inputs=inputs, where=sharding.replicated(mesh)))
    state: TrainState = jax.eval_shape(lambda: train_step.first_state(tx, transformer.init(model, jax.random.key(0))))
    on_mesh = partial(jax.tree.map, lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s))
    step = train_step.make_train_step(model, DAPO, tx, chunk=chunk)
    shardings = train_step.state_shardings(model, tx, mesh)
    with jax.set_mesh(mesh):
        return step.lower(on_mesh(state, shardings), on_mesh(batch, placed))


def main(
    tokens: tuple[int, ...] = (4096, 8192, 16384),
    vocab: tuple[int, ...] = (32_000, 151_936),
    preset: str = "qwen2.5-0.5b",
    dtype: str = "float32",
) -> None:
    """Print the table.

    Args:
        tokens: of the row.
        vocab: ids of the vocabulary.
        preset: whose shape the model has.
        dtype: of activations. A CPU computes bfloat16 in float32, and holds copies for it that no accelerator does.
    """
    print(f"{'vocabulary':>10} {'tokens':>7} {'arguments, MiB':>15} {'temporaries, MiB':>17} {'growing, MiB':>13} {'s':>6}")
    for ids in vocab:
        model = replace(PRESETS[preset], vocab_size=ids, dtype=dtype)
        for n in tokens:
            start, prompt = time.perf_counter(), n // 4
            cut = Division(layout="packed", row_tokens=n)
            step = lowered(model, answers(1, 1, prompt + 1, n - prompt), cut, sharding.make_mesh())
            memory = step.compile().memory_analysis()
            seconds = time.perf_counter() - start
            arguments, temporaries, gradient = (
                x / 2**20 for x in (memory.argument_size_in_bytes, memory.temp_size_in_bytes, 4 * model.n_params)
            )
            sizes = f"{arguments:15.1f} {temporaries:17.1f} {temporaries - gradient:13.1f}"
            print(f"{ids:10} {n:7} {sizes} {seconds:6.1f}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
