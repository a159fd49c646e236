"""Templates: functions Prompt → Prompt that put instructions around a question, of training and test problems alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.types import Prompt, Reward, Task, expect

R1 = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: {question}\n"
    "Assistant: <think>"
)
QWEN_MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)


def none(prompt: Prompt) -> Prompt:
    """The question alone."""
    return prompt


def chat(prompt: Prompt, system: str = "") -> Prompt:
    """The tokenizer's own chat template around the question, after a system message if one is given."""
    first = ({"role": "system", "content": system},) if system else ()
    return replace(prompt, messages=prompt.messages or (*first, {"role": "user", "content": prompt.text}))


def custom(prompt: Prompt, text: str) -> Prompt:
    """Your own template: `text` with the question in place of {question}.

    ValueError if that does not occur in it, and for a prompt of messages, which has the tokenizer's chat template.
    """
    expect("{question}" in text, "template text", text, "'{question}' in it")
    expect(not prompt.messages, f"template of prompt {prompt.id}", text, "none, or templates.chat, for messages")
    return replace(prompt, text=text.replace("{question}", prompt.text))


def r1(prompt: Prompt) -> Prompt:
    """DeepSeek-R1-Zero's, 2501.12948. Answers should end at '</answer>': set rollout.stop=('</answer>',)."""
    return custom(prompt, R1)


def qwen_math(prompt: Prompt) -> Prompt:
    """The chat template of Qwen2.5-Math, with its request for a boxed answer."""
    return custom(prompt, QWEN_MATH)


def with_length(
    prompt: Prompt, low: int = 100, high: int = 4000, text: str = "{question} Think for {n} tokens."
) -> Prompt:
    """A length target of n ~ U{low, …, high} tokens, named in the prompt and kept as meta["n_gold"].

    It depends on the prompt's id alone, so that a problem keeps its target. L1, 2503.04697. ValueError unless
    1 <= low <= high and {question} and {n} occur in the text.
    """
    expect(1 <= low <= high, "low", low, f"1 <= low <= high={high!r}")
    expect("{n}" in text, "template text", text, "'{n}' in it")
    n = int(np.random.default_rng([prompt.id, 0x11]).integers(low, high + 1))
    named = custom(prompt, text.replace("{n}", str(n)))
    return replace(named, meta={**named.meta, "n_gold": n})


@dataclass(frozen=True)
class _Mapped(Sequence):
    inner: Sequence[Prompt]
    fn: Callable[[Prompt], Prompt]

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def parts(self) -> Any:  # of a mixture
        return getattr(self.inner, "parts", None)

    def __getitem__(self, index: Any) -> Any:
        found = self.inner[index]
        return tuple(map(self._one, found)) if isinstance(index, slice) else self._one(found)

    def _one(self, prompt: Prompt) -> Prompt:
        return replace(self.fn(prompt), question=prompt.text)


def applied(task: Task, template: Callable[[Prompt], Prompt]) -> Task:
    """The task with every prompt passed through `template`, its text kept as the question."""
    if template is none:
        return task
    return replace(task, train=_Mapped(task.train, template), test=_Mapped(task.test, template))


def tagged(task: Callable[[], Task]) -> Task:
    """A task whose answers are written as `steps</think><answer>final</answer>` in place of `steps#final`."""
    inner = task()
    trace = None if inner.trace is None else partial(_tagged_trace, inner.trace)
    return replace(inner, trace=trace, reward=partial(_tagged_reward, inner.reward))


def _tagged_trace(trace: Callable, prompt: Prompt, behaviour: str, seed: int) -> str:
    steps, _, final = trace(prompt, behaviour, seed).rpartition("#")
    return f"{steps}</think><answer>{final}</answer>"


def _tagged_reward(reward: Callable, prompt: Prompt, text: str, finish: str) -> Reward:
    _, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return reward(prompt, f"#{answer}" if opened and closed else "", finish)
