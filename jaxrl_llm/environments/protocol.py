"""A task as a Python object, and what the environments of this room share."""

from collections.abc import Sequence
from typing import Literal, Protocol

from jaxrl_llm.types import EOS, STOP, Prompt, Reward, Task, expect


class Environment(Protocol):
    """What `as_task` takes. `step` may be absent, or None, where an answer is a single turn."""

    def prompts(self, split: Literal["train", "test"]) -> Sequence[Prompt]:
        """The problems of a split."""

    def step(self, prompt: Prompt, text: str, finish: str) -> str | None:
        """What the environment says next. text: all that the policy and the environment have said; None: it is over.

        It depends on its arguments alone, since an answer may be continued elsewhere.
        """

    def score(self, prompt: Prompt, text: str, finish: str) -> Reward:
        """The reward of a whole answer, in which the environment's turns stand too."""


def as_task(env: Environment) -> Task:
    """The task of an environment. Raises ValueError for a missing method or an empty split."""
    for name in ("prompts", "score"):
        expect(callable(getattr(env, name, None)), "env", env, f"an object with a method {name}")
    train, test = env.prompts("train"), env.prompts("test")
    for split, prompts in (("train", train), ("test", test)):
        expect(len(prompts), f"prompts({split!r})", prompts, "at least one problem")
    return Task(train, test, env.score, step=getattr(env, "step", None))


def request(text: str, finish: str, tag: str, reply: str, turns: int) -> str | None:
    """What stands in <tag>…</tag> at the end of a text; None: nothing does, or <reply> has come `turns` times."""
    text = text.rstrip()
    if finish not in (EOS, STOP) or not text.endswith(f"</{tag}>") or text.count(f"<{reply}>") >= turns:
        return None
    _, opened, asked = text.removesuffix(f"</{tag}>").rpartition(f"<{tag}>")
    return asked.strip() if opened else None
