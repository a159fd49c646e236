"""A task as a Python object, and what the environments of this room share."""

from typing import Any

from jaxrl_llm.types import EOS, STOP, Task, expect


def as_task(env: Any) -> Task:
    """The task of any object with these methods; `step` may be absent, or None, where an answer is a single turn.

        prompts(split) -> Sequence[Prompt]           split: "train" or "test"
        step(prompt, text, finish) -> str | None     what the environment says next; None: the answer is over
        score(prompt, text, finish) -> Reward        of a whole answer, in which the environment's turns stand too

    text: all that the policy and the environment have said. `step` depends on its arguments alone, since an answer may
    be continued elsewhere. Raises ValueError for a missing method or an empty split.
    """
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
