"""The verifier's word on answers; of one that can `submit`, while others are still drawn."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import re
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
    reward, sound = value_of("reward", prompt, text, verdict), False
    with contextlib.suppress(TypeError):  # of a value that is no number
        sound = isinstance(reward, Reward) and math.isfinite(reward.value)
    if not sound:
        what = f"reward of prompt {prompt.id} is {reward!r}; expected a Reward with a finite value"
        raise ValueError(f"{what} {_context(prompt, text)}")
    return reward


def value_of(what: str, prompt: Prompt, text: str, future: Future) -> Any:
    """What the task's function `what`, its reward or step, has said of an answer.

    Raises ValueError with the prompt, the response and the function's line when it has raised.
    """
    try:
        return future.result()
    except (Exception, SystemExit) as error:
        raised = f"{what} of prompt {prompt.id} raised {type(error).__name__}: {error}{_line(error)}"
        raise ValueError(f"{raised} {_context(prompt, text)}") from error


def _context(prompt: Prompt, text: str) -> str:
    return f"(prompt {prompt.text[-200:]!r}, response {text[-200:]!r})"


def _line(error: BaseException) -> str:
    """The last line of the first file that is not ours: the function's own; of a worker it stands in the cause."""
    others = lambda file: file == __file__ or file.startswith(_FUTURES)
    lines = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if not others(f.filename)]
    lines = lines or re.findall(r'^  File "(.+)", line (\d+)', str(error.__cause__), re.MULTILINE)
    return "".join([f" at {file}:{line}" for file, line in lines if file == lines[0][0]][-1:])
