"""Problems from files: JSONL of {"prompt", "answer"}, with a verifier of your own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.types import EOS, STOP, Prompt, Reward, Task


def read_jsonl(path: Path | str) -> tuple[Prompt, ...]:
    """A Prompt a line; fields other than prompt and answer go to `meta`. ValueError names file, line and field."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"dataset {path}: no such file")
    prompts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # splitlines would cut at U+2028 inside a text
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error}); expected an object a line") from error
        for name in ("prompt", "answer"):
            if not isinstance(row, dict) or name not in row:
                raise ValueError(f"{path}:{number}: no field {name!r}; expected prompt and answer")
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError(f"{path}:{number}: prompt is {row['prompt']!r}; expected text")
        meta = {k: v for k, v in row.items() if k not in ("prompt", "answer")}
        prompts.append(Prompt(len(prompts), row["prompt"], row["answer"], meta))
    return tuple(prompts)


def jsonl(
    path: Path | str, reward: Callable[[Prompt, str], float], test: Path | str | None = None, held_out: float = 0.1
) -> Task:
    """A task of the problems in `path` and of `reward(prompt, response) -> float`, 1 for a right answer.

    `correct` is value ≥ 1; an answer cut at the token limit is worth 0 and is never correct. Without a file `test`, the
    share `held_out` of the problems, chosen by the hash of their prompts, is kept out of training: the same problem
    falls on the same side whatever else the file holds. Raises ValueError when a side is empty.
    """
    problems = read_jsonl(path)
    if test is None:
        tested = tuple(p for p in problems if _share(p.text) < held_out)
        problems = tuple(p for p in problems if _share(p.text) >= held_out)
    else:
        tested = read_jsonl(test)
    for name, side in (("train", problems), ("test", tested)):
        if not side:
            raise ValueError(f"dataset {path}: no {name} problems; expected at least 1 (held_out={held_out})")
    return Task(problems, tested, partial(_reward, reward))


def _share(text: str) -> float:
    """A number in [0, 1) that the text alone decides."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _reward(reward: Callable[[Prompt, str], Any], prompt: Prompt, text: str, finish: str) -> Reward:
    if finish not in (EOS, STOP):
        return Reward(0.0, False)
    value = float(reward(prompt, text))
    return Reward(value, value >= 1)
