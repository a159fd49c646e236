"""Templates: functions Prompt → Prompt that put instructions around a question, of training and test problems alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.types import Prompt, Reward, Task, expect

_CHATML = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
_BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_CONVERSATION = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>."
)
R1 = _CONVERSATION + "\nUser: {question}\nAssistant: <think>"
ORZ = (
    _CONVERSATION + " User: You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here "
    "</answer>. And your final answer will be extracted automatically by the \\boxed{} tag.\nThis is the problem:\n"
    "{question}\nAssistant: <think>"
)
QWEN_MATH = _CHATML.replace("{system}", _BOXED).replace("{user}", "{question}")
QWEN_CHAT = QWEN_MATH.replace(_BOXED, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
SIMPLE = "Question:\n{question}\nAnswer:\nLet's think step by step.\n"
BOXED = _CHATML.replace("{system}", "You are a helpful assistant.").replace("{user}", "{question}\n" + _BOXED)
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
L1 = "{question} Let's think step by step and output the final answer within \\boxed{}. Think for {n} tokens."
L1_MAX = L1.replace("Think for", "Think for maximum")
RESEARCH = (
    "A conversation between User and Assistant. The user asks a question, and the assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. During thinking, "
    "the assistant can invoke the wikipedia search tool to search for fact information about specific topics if "
    "needed. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags "
    "respectively, and the search query and result are enclosed within <search> </search> and <result> </result> tags "
    "respectively. For example, <think> This is the reasoning process. </think> <search> search query here </search> "
    "<result> search result here </result> <think> This is the reasoning process. </think> <answer> The final answer "
    "is \\[ \\boxed{answer here} \\] </answer>. In the last part of the answer, the final exact answer is enclosed "
    "within \\boxed{} with latex format. User: {question}. Assistant:"
)


def none(prompt: Prompt) -> Prompt:
    """The question alone."""
    return prompt


def chat(prompt: Prompt, system: str = "", text: str = "{question}") -> Prompt:
    """The tokenizer's own chat template around the question, after a system message if one is given.

    text: what the user says, with {question} in it; DAPO and L1 asked their models so.
    """
    if prompt.messages:
        return prompt
    first = ({"role": "system", "content": system},) if system else ()
    return replace(prompt, messages=(*first, {"role": "user", "content": custom(prompt, text).text}))


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


def orz(prompt: Prompt) -> Prompt:
    """Open-Reasoner-Zero's, 2503.24290: R1's, which also asks for a box. Stop at '</answer>'."""
    return custom(prompt, ORZ)


def qwen_math(prompt: Prompt) -> Prompt:
    """The chat template of Qwen2.5-Math, with its request for a boxed answer."""
    return custom(prompt, QWEN_MATH)


def qwen_chat(prompt: Prompt) -> Prompt:
    """The chat template of Qwen2.5, with its default system message."""
    return custom(prompt, QWEN_CHAT)


def simple(prompt: Prompt) -> Prompt:
    """SimpleRL-Zoo's for models that do not follow instructions yet, 2503.18892."""
    return custom(prompt, SIMPLE)


def boxed(prompt: Prompt) -> Prompt:
    """SimpleRL-Zoo's for Qwen models, 2503.18892: their chat template, the request for a box after the question."""
    return custom(prompt, BOXED)


def dapo(prompt: Prompt) -> Prompt:
    """DAPO-Math-17k's, 2503.14476, as plain text; `partial(chat, text=DAPO)` puts it into a chat, as DAPO has done."""
    return custom(prompt, DAPO)


def research(prompt: Prompt) -> Prompt:
    """ReSearch's for base models, 2503.19470, with its tags for search queries and results."""
    return custom(prompt, RESEARCH)


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


def l1(prompt: Prompt, low: int = 100, high: int = 4000, most: bool = False) -> Prompt:
    """L1's request to think for n tokens (L1-Exact), or for at most n (L1-Max, `most`); n as in `with_length`."""
    return with_length(prompt, low, high, L1_MAX if most else L1)


# By the name that a command line has for them, those whose answers end at a tag with it.
TEMPLATES: dict[str, Callable[[Prompt], Prompt]] = {
    fn.__name__: fn for fn in (none, chat, r1, orz, qwen_math, qwen_chat, simple, boxed, dapo, l1, research)
}
STOPS: dict[str, tuple[str, ...]] = dict.fromkeys(("r1", "orz", "research"), ("</answer>",))


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
