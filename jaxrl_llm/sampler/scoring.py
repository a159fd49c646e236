"""The verifier's word on answers; of one that can `submit`, while others are still drawn."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxrl_llm.types import Prompt, Reward, Rollouts, Task

_FUTURES = str(Path(concurrent.futures.__file__).parent)


def begin(fn: Callable, *arguments: Any) -> Future:
    """The future value of fn(*arguments): by its own `submit` if it has one, else it is called now."""
    return fn.submit(*arguments) if hasattr(fn, "submit") else gathered([], lambda: fn(*arguments))


def gathered(futures: list[Future], value: Callable[[], Any]) -> Future:
    """The future of `value()`, which is called when all the others are done: now, or in the thread of the last."""
    out, left, lock = Future(), len(futures) + 1, threading.Lock()

    def done(_: Future | None) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            try:
                out.set_result(value())
            except BaseException as error:  # raised where the value is asked for
                out.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    done(None)
    return out


def begin_scoring(task: Task, rollouts: Rollouts) -> Future[list[Reward]]:
    """The future rewards of answers; its exception is the ValueError that `score` raises."""
    asked = []
    for i, (text, finish) in enumerate(zip(rollouts.texts, rollouts.finish, strict=True)):
        prompt = rollouts.prompts[i // rollouts.group_size]
        asked.append((prompt, text, begin(task.reward, prompt, text, str(finish))))
        if asked[-1][2].done():
            _checked(*asked[-1])  # a verifier that raises is not asked again
    return gathered([verdict for *_, verdict in asked], lambda: [_checked(*of) for of in asked])


def score(task: Task, rollouts: Rollouts) -> list[Reward]:
    """The verifier's word on each answer.

    Raises ValueError with the prompt, the response and the verifier's line when it raises (sys.exit is no way out
    either), and when it returns anything but a finite Reward.
    """
    return begin_scoring(task, rollouts).result()


def _checked(prompt: Prompt, text: str, verdict: Future) -> Reward:
    context = f"(prompt {prompt.text[-200:]!r}, response {text[-200:]!r})"
    try:
        reward = verdict.result()
        sound = isinstance(reward, Reward) and math.isfinite(reward.value)
    except (Exception, SystemExit) as error:
        others = lambda f: f.filename == __file__ or f.filename.startswith(_FUTURES)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not others(f)]
        at = [f" at {f.filename}:{f.lineno}" for f in frames if f.filename == frames[0].filename]  # in the verifier
        what = f"reward of prompt {prompt.id} raised {type(error).__name__}: {error}"
        raise ValueError(f"{what}{''.join(at[-1:])} {context}") from error
    if not sound:
        what = f"reward of prompt {prompt.id} is {reward!r}; expected a Reward with a finite value"
        raise ValueError(f"{what} {context}")
    return reward
