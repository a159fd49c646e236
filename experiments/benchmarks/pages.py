"""Keys and values that pages hold for answers of very different lengths, against the tokens that live, and the ring.

Groups of eight answers to prompts of 256 tokens, lengths log-uniform between 64 and 4096, through 64 rows of a decoder
so small that only the counting matters. Tokens live from the call that may write them to the end of their answer, a
prompt's as long as any of its answers; they are counted before every call, and so are the pages that hold them and the
tokens for which the ring has room. Bound: 1.15 × the tokens that live. With --kv-tokens less than that, answers yield.
Last, what the compiler says that a call of the decoding loop takes beside its arguments.

Command: python experiments/benchmarks/pages.py [--groups 32] [--kv-tokens 0]
"""

import time

import jax
import numpy as np
import tyro

from jaxrl_llm.data import tokenizers
from jaxrl_llm.models import transformer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import decode, pages, slots, weights
from jaxrl_llm.sampler.requests import Request

MODEL = ModelConfig(vocab_size=16, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=16)
GROUP, PROMPT, SHORTEST, LONGEST, ROWS = 8, 256, 64, 4096, 64


def tokens_alive(held, steps: int) -> int:
    """Of the answers in rows and their prompts, the next call's included."""
    prompts = {a.request.draw: len(a.request.prompt) - 1 for a in held}
    return sum(prompts.values()) + sum(min(len(a.tokens) + steps, a.limit) for a in held)


def main(groups: int = 32, kv_tokens: int = 0) -> None:
    """
    Args:
        groups: of eight answers.
        kv_tokens: that the pages hold; 0: those of all rows at their longest.
    """
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), (groups, GROUP))).astype(int)
    prompts = rng.integers(2, 16, (groups, PROMPT)).tolist()
    asked = [Request(tuple(p), GROUP, LONGEST, draw=i) for i, p in enumerate(prompts)]
    script = lambda request, number: (2,) * lengths[request.draw, number]
    held = weights.push(MODEL, transformer.init(MODEL, jax.random.key(0)), None)
    sizes = {"slots": ROWS, "max_prompt_tokens": PROMPT, "max_tokens": LONGEST, "kv_tokens": kv_tokens}
    tokenizer = tokenizers.characters("abcdefghijklmn")
    for cache in ("ring", "pages"):
        counted = []
        made = slots.Slots if cache == "ring" else pages.PagedSlots
        step = made.step

        def counting(self, weights, step=step, counted=counted, cache=cache):
            alive = tokens_alive([a for a in self.rows if a], self.config.tokens_per_call)
            if cache == "ring":
                room = self.shape.rows * self.shape.columns + self.shape.prefixes * self.shape.size
            else:
                room = self.size * (sum(len(h.pages) for h in self.held.values()) + shared(self))
            counted.append((alive, room))
            return step(self, weights)

        made.step = counting
        engine = decode.LocalEngine(MODEL, tokenizer, held, cache=cache, **sizes)
        start = time.perf_counter()
        decode.generate(engine, asked, script=script)
        made.step = step
        alive, room = np.array(counted).T
        print(
            f"{cache:<6} {len(alive):5} calls, {time.perf_counter() - start:6.1f} s, {engine.counts['yields']} yields; "
            f"tokens alive {alive.mean():9,.0f} (most {alive.max():9,}), "
            f"held {room.mean():9,.0f} (most {room.max():9,}): {room.sum() / alive.sum():.3f} ×"
        )


def shared(self) -> int:
    """Pages of prompts that answers in rows share."""
    return sum(len(prompt.pages) for prompt in {id(h.prompt): h.prompt for h in self.held.values()}.values())


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
