"""Memory of the whole train step of DAPO at the shape of a published model, by the compiler's account: nothing runs.

A batch is one packed row of one sequence, a quarter of it prompt, in one micro-batch on one CPU; AdamW. Arguments are
parameters, moments and the batch. Temporaries of the step are all else: the gradient (4 bytes a parameter), copies of
the moments that XLA makes on a CPU, and what the forward and the backward pass need. The last column is of these passes
alone, compiled with the gradient as their result and hence without it: that is what grows with tokens.

Command: python experiments/benchmarks/memory.py [--tokens 4096 8192 16384] [--vocab 32000 151936] [--preset NAME]
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

from jaxrl_llm.arrays import Batch, TrainState
from jaxrl_llm.learner import train_step
from jaxrl_llm.learner.batching import make_batch, with_weights
from jaxrl_llm.learner.optim import make_optimizer
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.models import transformer
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import LENGTH, Optimizer, Prompt, Rollouts

DAPO, TX = ALGORITHMS["dapo"], make_optimizer(Optimizer(), 100)


def answers(prompts: int, group: int, prompt_tokens: int, answer_tokens: int) -> Rollouts:
    """Answers of full length, all zeros."""
    n, zeros = prompts * group, lambda *shape: np.zeros(shape, np.int32)
    return Rollouts(
        tuple(Prompt(i, "") for i in range(prompts)), zeros(prompts, prompt_tokens), zeros(prompts) + prompt_tokens,
        zeros(n, answer_tokens), np.zeros((n, answer_tokens), np.float32), zeros(n) + answer_tokens,
        np.full(n, LENGTH), ("",) * n, np.arange(prompts),
    )  # fmt: skip


def shapes(model: ModelConfig, rollouts: Rollouts, cut: Division, mesh: Mesh) -> tuple[TrainState, Batch]:
    """What a step is given, as shapes on a mesh, which may be of a machine elsewhere."""
    weighted = lambda b: with_weights(replace(b, old_logp=b.sampler_logp), DAPO.norm, None)
    batch = jax.eval_shape(weighted, make_batch(rollouts, model, cut)[0])
    by_answer, by_row = (sharding.batch_sharding(mesh, axis) for axis in (0, 2))
    rows = replace(jax.tree.map(lambda _: by_row, batch.rows), where=sharding.replicated(mesh))
    placed = replace(jax.tree.map(lambda _: by_answer, batch), rows=rows)
    state = jax.eval_shape(lambda: train_step.first_state(TX, transformer.init(model, jax.random.key(0))))
    on_mesh = partial(jax.tree.map, lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s))
    return on_mesh(state, train_step.state_shardings(model, TX, mesh)), on_mesh(batch, placed)


def lowered(model: ModelConfig, rollouts: Rollouts, cut: Division, mesh: Mesh, chunk: int = 1024) -> jax.stages.Lowered:
    """The train step."""
    given = shapes(model, rollouts, cut, mesh)
    with jax.set_mesh(mesh):
        return train_step.make_train_step(model, DAPO, TX, chunk=chunk).lower(*given)


def main(
    tokens: tuple[int, ...] = (4096, 8192, 16384),
    vocab: tuple[int, ...] = (32_000, 151_936),
    preset: str = "qwen2.5-0.5b",
    chunk: int = 256,
    dtype: str = "float32",
) -> None:
    """Print the table.

    Args:
        tokens: of the row.
        vocab: ids of the vocabulary.
        preset: whose shape the model has.
        chunk: tokens whose logits exist at a time, learner.logprob_chunk.
        dtype: of activations. A CPU computes bfloat16 in float32, and holds copies for it that no accelerator does.
    """
    jax.config.update("jax_platforms", "cpu")
    print(f"{'':18} {'MiB of the step:':>29} {'of the passes:':>14}")
    print(f"{'vocabulary':>10} {'tokens':>7} {'arguments':>14} {'temporaries':>14} {'temporaries':>14}")
    for ids in vocab:
        model = replace(PRESETS[preset], vocab_size=ids, dtype=dtype)
        for n in tokens:
            rollouts, cut = answers(1, 1, n // 4 + 1, n - n // 4), Division(layout="packed", row_tokens=n)
            mesh = sharding.make_mesh()
            step = lowered(model, rollouts, cut, mesh, chunk).compile().memory_analysis()
            state, batch = shapes(model, rollouts, cut, mesh)
            with jax.set_mesh(mesh):
                passes = jax.jit(train_step.make_gradients(model, DAPO, 1.0, chunk)).lower(state.params, batch)
            sizes = step.argument_size_in_bytes, step.temp_size_in_bytes
            sizes += (passes.compile().memory_analysis().temp_size_in_bytes,)
            print(f"{ids:10} {n:7}", *(f"{x / 2**20:14.1f}" for x in sizes), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
