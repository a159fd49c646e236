"""A base policy in the shape of Qwen2.5-Math, of byte pairs: what experiments/imported_qwen.py starts from.

Paper:   Qwen2.5-Math, 2409.12122 (the shape); the method is DAPO, 2503.14476.
Claim:   none of its own: exported and imported again, the policy is the same one.
Command: jaxrl train experiments/small_qwen.py
         the base alone, and as a checkpoint: jaxrl sft experiments/small_qwen.py --out runs/small-qwen
         jaxrl export runs/small-qwen runs/small-qwen-hf
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.data import templates, tokenizers
from jaxrl_llm.models.transformer import ModelConfig

TEMPLATE = partial(templates.custom, text="Add modulo 5, one step after the other.\n{question}")


def texts() -> Iterator[str]:
    """Problems and worked answers of the training split."""
    task = templates.applied(BASE.task(), TEMPLATE)
    for i in range(2000):
        yield task.train[i].text
        yield task.trace(task.train[i], "clean", i)


CONFIG = replace(
    BASE,
    model=ModelConfig(
        vocab_size=288, layers=3, width=96, heads=4, kv_heads=2, head_width=24, mlp_width=256,
        rope_theta=1e4, qkv_bias=True, max_positions=256,
    ),
    tokenizer=partial(tokenizers.byte_pairs, texts, size=288),
    algorithm=replace(BASE.algorithm, prompts=replace(BASE.algorithm.prompts, template=TEMPLATE)),
    rollout=replace(BASE.rollout, max_prompt_tokens=64),
)  # fmt: skip
