"""What each lever does to the memory of an update on one device: MiB by the compiler's account (memory_analysis).

The work: a GRPO step of a published shape (Qwen2.5-0.5B), 4 prompts of 512 tokens × 8 answers of 1,024. The programs
are compiled for abstract arrays: nothing is run and no weight is made. In the first table a row has the levers of those
before it, too. `held` is what the train step is given and gives back, parameters, moments and the batch; `temporary`
what it takes beside that, with the gradients. The second table is of the reference policy and its log-prob pass.

float32 throughout, but what is kept in bfloat16 as such: XLA computes bfloat16 on a CPU in float32 copies, so that the
same step in bfloat16 has 5 % more temporaries here, where an accelerator's activations are half as large.

With --run a third table: how far the log-probs of a primed run's base policy move when it is kept in few bits, on its
own answers, in a learner that computes in float32.

Command: python experiments/benchmarks/levers.py [--model qwen2.5-0.5b] [--run DIR]      (pins itself to one core)
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

CORE = {int(os.environ.get("BENCH_CORE", "0"))}
os.sched_setaffinity(0, CORE)  # before jax counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402

from jaxrl_llm import config as configs  # noqa: E402
from jaxrl_llm.arrays import Batch  # noqa: E402
from jaxrl_llm.learner import batching, learner, train_step  # noqa: E402
from jaxrl_llm.learner.optim import make_optimizer  # noqa: E402
from jaxrl_llm.learner.packing import Division  # noqa: E402
from jaxrl_llm.models import lora, transformer  # noqa: E402
from jaxrl_llm.models.presets import PRESETS  # noqa: E402
from jaxrl_llm.models.transformer import LoRA, ModelConfig  # noqa: E402
from jaxrl_llm.objective import losses  # noqa: E402
from jaxrl_llm.objective.algorithms import ALGORITHMS  # noqa: E402
from jaxrl_llm.run import evals, sft, trainer  # noqa: E402
from jaxrl_llm.sampler import groups  # noqa: E402
from jaxrl_llm.types import LENGTH, Optimizer, Prompt, Rollouts  # noqa: E402

MIB = 2**20
# Of the compiler's back end, which works when buffers are assigned: the figures are the same in a third of the time
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
GRPO = replace(ALGORITHMS["grpo"], kl="k3", kl_coef=0.01, updates_per_batch=1)


@dataclass(frozen=True)
class Work:
    """A model, what its update learns from, and where the levers are."""

    model: ModelConfig
    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int
    micro_batches: int = 1
    row_tokens: int = 0
    chunk: int = 2**30  # all tokens of a micro-batch at once
    optimizer: Optimizer = Optimizer()


def answers(work: Work) -> Rollouts:
    rows = work.prompts * work.group
    return Rollouts(
        prompts=tuple(Prompt(i, "") for i in range(work.prompts)),
        prompt_tokens=np.ones((work.prompts, work.prompt_tokens), np.int32),
        prompt_lengths=np.full(work.prompts, work.prompt_tokens, np.int32),
        tokens=np.ones((rows, work.answer_tokens), np.int32),
        sampler_logp=np.zeros((rows, work.answer_tokens), np.float32),
        lengths=np.full(rows, work.answer_tokens, np.int32),
        finish=np.full(rows, LENGTH),
        texts=("",) * rows,
        draws=np.arange(work.prompts),
    )


def batch_of(work: Work) -> Batch:
    cut = Division(1, work.micro_batches, 1, "auto", work.row_tokens)
    batch, _ = batching.make_batch(answers(work), work.model, cut)
    return batching.with_weights(replace(batch, ref_logp=batch.sampler_logp), "sequence", None)


def size(tree: object) -> float:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / MIB


def parameters(model: ModelConfig) -> object:
    return jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))


def update(work: Work) -> tuple[float, float]:
    """MiB that a train step holds, and of its temporaries."""
    tx, params = make_optimizer(work.optimizer, 100), parameters(work.model)
    base = parameters(lora.without(work.model)) if work.model.lora else None
    state = jax.eval_shape(lambda p: train_step.first_state(tx, p), lora.trained(work.model, params))
    step = train_step.make_train_step(work.model, GRPO, tx, 1.0, work.chunk)
    account = step.lower(state, batch_of(work), frozen=base).compile(compiler_options=QUICK).memory_analysis()
    return account.argument_size_in_bytes / MIB, account.temp_size_in_bytes / MIB


def reference(work: Work, kept: str | None) -> tuple[float, float]:
    """MiB of the reference policy's parameters, and of the temporaries of its log-prob pass. kept: None as the policy's
    own, "" as they are computed with, or int8.
    """
    model, params = replace(work.model, dtype="bfloat16"), parameters(work.model)
    if kept is not None:
        params = jax.eval_shape(lambda p: lora.frozen(model, p, kept), params)
    logprobs = jax.jit(train_step.make_logprobs(model, 1.0, work.chunk))
    account = logprobs.lower(params, batch_of(work)).compile(compiler_options=QUICK).memory_analysis()
    return size(params), account.temp_size_in_bytes / MIB


def moved(run: Path, problems: int = 256) -> None:
    """Print how far the log-probs of a run's base policy move when it is kept in few bits, and the KL that this is."""
    config = configs.load(run)
    made = learner.build(replace(config, model=lora.without(config.model)))  # a base has no adapters
    config, model = made.config, made.config.model
    with jax.set_mesh(made.mesh):
        params = sft.load(config, run / "base", made.mesh)
        prompts = tuple(made.task.test[:problems])
        asked = {"draws": np.arange(len(prompts)), "max_prompt_tokens": config.rollout.max_prompt_tokens}
        engine, seed = trainer.make_engine(made, params), evals.SEED_STREAM + config.seed
        drawn = groups.sample_groups(engine, prompts, 1, seed=seed, **asked)
    mask, exact = (
        np.arange(drawn.tokens.shape[1]) < drawn.lengths[:, None],
        learner.learner_logprobs(made, params, drawn),
    )
    print(f"{run}, {mask.sum():,} tokens: mean and most |Δ log-prob| in nats, KL(policy ‖ kept) in nats a token")
    short = replace(model, dtype="bfloat16", fp32_head=False)
    for name, kept in (("bfloat16", (short, params)), ("int8", (model, params, "int8"))):
        logp = learner.learner_logprobs(made, lora.frozen(*kept), drawn)
        off, kl = np.abs(logp - exact)[mask], losses.kl(exact, logp, mask, "k3")[mask]
        print(f"{name:30} {off.mean():11.6f} {off.max():11.4f} {kl.mean():11.7f}")


def micro_batches(work: Work) -> Work:
    """Of one prompt's answers each, one after the other; their gradients are summed."""
    return replace(work, micro_batches=work.prompts)


def remat_dots(work: Work) -> Work:
    """The backward pass computes norms, activations and attention again, from what the projections gave."""
    return replace(work, model=replace(work.model, remat="dots"))


def remat_full(work: Work) -> Work:
    """The backward pass computes all of a block again from its input."""
    return replace(work, model=replace(work.model, remat="full"))


def row_tokens(work: Work) -> Work:
    """A group's answers in rows of two, each with the prompt before them: micro-batches get smaller than a group."""
    rows = work.prompts * -(-work.group // 2)
    return replace(work, row_tokens=work.prompt_tokens + 2 * work.answer_tokens, micro_batches=rows)


def logprob_chunk(work: Work) -> Work:
    """The logits of so many tokens at once, computed again in the backward pass."""
    return replace(work, chunk=256)


def bfloat16_moments(work: Work) -> Work:
    return replace(work, optimizer=Optimizer(moments_dtype="bfloat16"))


def adafactor(work: Work) -> Work:
    return replace(work, optimizer=Optimizer(kind="adafactor"))


def adapters(work: Work) -> Work:
    """AdamW again, of thin matrices beside the frozen ones, which are held in float32 here."""
    return replace(work, optimizer=Optimizer(), model=replace(work.model, lora=LoRA()))


LEVERS = {
    "none": lambda work: work,
    "micro_batches = prompts": micro_batches,
    'model.remat = "dots"': remat_dots,
    'model.remat = "full"': remat_full,
    "row_tokens: two answers a row": row_tokens,
    "logprob_chunk = 256": logprob_chunk,
    'moments_dtype = "bfloat16"': bfloat16_moments,
    'kind = "adafactor"': adafactor,
    "AdamW, model.lora, rank 16": adapters,
}


def main(
    model: str = "qwen2.5-0.5b", layers: int = 0, prompts: int = 4, group: int = 8, prompt_tokens: int = 512,
    answer_tokens: int = 1024, run: Path | None = None,
) -> None:  # fmt: skip
    """Print the tables.

    Args:
        model: one of models/presets.py.
        layers: in the place of its own; 0: all.
        prompts: in the batch.
        group: answers to each.
        prompt_tokens: of each prompt.
        answer_tokens: of each answer.
        run: the folder of a run whose base policy is to be kept in few bits.
    """
    shape = replace(PRESETS[model], dtype="float32", remat="none")
    shape = replace(shape, layers=layers or shape.layers)
    work = Work(shape, prompts, group, prompt_tokens, answer_tokens)
    print(f"{model}, {shape.n_params / 1e6:,.0f} M parameters, {prompts} × {group} × {answer_tokens} tokens; MiB")
    print(f"{'':30} {'held':>9} {'temporary':>11} {'together':>11}")
    for name, pulled in LEVERS.items():
        work = pulled(work)
        held, temporary = update(work)
        print(f"{name:30} {held:9,.1f} {temporary:11,.1f} {held + temporary:11,.1f}", flush=True)
    work = replace(work, model=lora.without(work.model))
    print(f"{'reference policy':30} {'held':>9} {'temporary':>11} {'together':>11}")
    for name, kept in (
        ("as the policy's", None),
        ("as it computes, bfloat16", ""),
        ('reference_dtype = "int8"', "int8"),
    ):
        held, temporary = reference(work, kept)
        print(f"{name:30} {held:9,.1f} {temporary:11,.1f} {held + temporary:11,.1f}", flush=True)
    if run is not None:
        moved(run)


if __name__ == "__main__":
    tyro.cli(main)
