"""A checkpoint of someone else's, tried before anything is built on it, and an experiment that begins with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.config import Config, Mesh, Rollout
from jaxrl_llm.learner.learner import Learner, build
from jaxrl_llm.models import hf, hf_format
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import probe, trainer
from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import Prompt, Reward, Task, expect

EXPERIMENT = '''"""{name}: say here what you want to see.

Paper:   the method's is GRPO, 2402.03300.
Claim:   what should rise, from where, to where.
Command: jaxrl train {file}
"""

from functools import partial

from jaxrl_llm.config import Config, Rollout
from jaxrl_llm.data import datasets
from jaxrl_llm.models import hf
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer


def reward(prompt, response):
    return float(response.strip().endswith(str(prompt.answer)))


CONFIG = Config(
    **hf.start("{source}"),
    task=partial(datasets.jsonl, "problems.jsonl", reward),  # a line: {{"prompt": "1 + 1 =", "answer": 2}}
    algorithm=ALGORITHMS["grpo"],
    rollout=Rollout(prompts=8, group_size=8, max_prompt_tokens={prompt}, max_response_tokens={response}),
    optimizer=Optimizer(lr=1e-6),
)
'''


def experiment(source: str, file: Path | None = None) -> str:
    """The text of an experiment from this checkpoint, to be written as `file`."""
    file, context = file or Path("my.py"), hf.model(source).max_positions
    room = {"prompt": min(512, context // 2), "response": min(1024, context - context // 2)}
    return EXPERIMENT.format(name=file.stem, file=file, source=source, **room)


def policy(source: str, tokens: int, text: str = "?", slots: int = 0) -> tuple[Learner, Any, Any]:
    """A checkpoint's learner, which learns nothing, a sampler with its weights, and the weights.

    tokens: of an answer. slots: answers drawn at once, on each device; 0: two. Raises as `hf.check` does.
    """
    start, prompt = hf.start(source), Prompt(0, text)
    shape, tokenizer = start["model"], start["tokenizer"]()
    expect(tokenizer.size <= shape.vocab_size, f"{source}: tokenizer", f"{tokenizer.size} tokens",
           f"at most vocab_size = {shape.vocab_size}")  # fmt: skip
    ways = max(n for n in range(1, jax.device_count() + 1) if shape.width % n == 0)
    room = min(512, shape.max_positions - tokens)
    expect(room > 0, "tokens", tokens, f"less than the context of {shape.max_positions} tokens")
    size = Rollout(ways, 2, max_prompt_tokens=room, max_response_tokens=tokens, slots=slots * ways)
    task = partial(Task, (prompt,), (prompt,), Reward)
    config = Config(task, ALGORITHMS["grpo"], rollout=size, mesh=Mesh(fsdp=ways), **start)
    learner = build(config)
    with jax.set_mesh(learner.mesh):
        params = config.init(shape, learner.mesh, dtype=shape.dtype)
        return learner, trainer.make_engine(learner, params), params


def try_checkpoint(source: str, text: str, tokens: int) -> list[str]:
    """Lines about a checkpoint: shape, tokenizer, what `probe.prove` measures, the greedy continuation of `text`.

    Raises ValueError or OSError for one that cannot be used, as `hf.check` and `tokenizers.load` do.
    """
    learner, engine, params = policy(source, tokens, text)
    shape, tokenizer = learner.config.model, learner.tokenizer
    with jax.set_mesh(learner.mesh):
        gap = probe.prove(learner, engine, params)
        ids = tuple(tokenizer.encode_prompt(Prompt(0, text)))
        ((answer,),) = engine.probe(Request(ids, 1, tokens, Sampling(0.0))).values()
    names = ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in tokenizer.eos_ids)
    heads = f"{shape.heads} heads on {shape.kv_heads} of width {shape.head_width}"
    return [
        f"{source}: {hf_format.family(shape)}, {shape.n_params:,} parameters",
        f"shape      {shape.layers} layers of width {shape.width}, {heads}, MLP {shape.mlp_width}, "
        f"{'tied' if shape.tied_head else 'untied'} head of {shape.vocab_size}, context {shape.max_positions}",
        f"tokenizer  {tokenizer.size} tokens, ends with {names}, "
        f"{'a' if tokenizer.hf.chat_template else 'no'} chat template",
        f"probe      sampler and learner {gap:.2g} nats a token apart ({shape.dtype})",
        f"greedy     {text!r} → {tokenizer.decode(answer.tokens)!r}",
    ]
