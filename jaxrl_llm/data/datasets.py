"""Problems from files: JSONL of {"prompt", "answer"}, with a verifier of your own; a prompt may be chat messages."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxrl_llm.types import EOS, STOP, Prompt, Reward, Task, expect


def read_jsonl(path: Path | str) -> tuple[Prompt, ...]:
    """A Prompt a line; fields other than prompt and answer go to `meta`. ValueError names file, line and field."""
    expect(isinstance(path, (str, Path)), "dataset", path, "the path of a JSONL file")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"dataset {path}: no such file")
    prompts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # splitlines would split at U+2028 inside a text
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON ({error}); expected an object a line") from error
        for name in ("prompt", "answer"):
            if not isinstance(row, dict) or name not in row:
                raise ValueError(f"{path}:{number}: no field {name!r}; expected prompt and answer")
        text, answer = row.pop("prompt"), row.pop("answer")
        messages = tuple(text) if isinstance(text, list) else ()
        of_text = lambda t: isinstance(t, str) and t and not re.search("[\ud800-\udfff]", t)
        sound = all(isinstance(m, dict) and {"role", "content"} <= m.keys() and of_text(m["content"]) for m in messages)
        text = messages[-1]["content"] if messages and sound else text
        expect(sound and of_text(text), f"{path}:{number}: prompt", text, "text, or messages with role and content")
        prompts.append(Prompt(len(prompts), text, answer, row, messages=messages))
    return tuple(prompts)


def jsonl(
    path: Path | str, reward: Callable[[Prompt, str], float], test: Path | str | None = None, held_out: float = 0.1
) -> Task:
    """A task of the problems in `path` and of `reward(prompt, response) -> float`, 1 for a right answer.

    `correct` is value ≥ 1; an answer that reached the token limit is worth 0 and is never correct. Without a file
    `test`, the share `held_out` of the problems, chosen by the hash of their prompts, is kept out of training: the same
    problem falls on the same side whatever else the file holds. Raises ValueError, naming file or argument, for a
    reward that cannot be called so, for a share that is none, and when a side is empty.
    """
    try:
        inspect.signature(reward).bind(None, "")
    except TypeError as error:
        raise ValueError(f"dataset {path}: reward {reward!r}: {error}; expected (prompt, response)") from error
    train, why = read_jsonl(path), ""
    if test is None:
        share = isinstance(held_out, int | float) and 0 <= held_out <= 1
        expect(share, f"dataset {path}: held_out", held_out, "a number from 0 to 1")
        tested = tuple(p for p in train if _share(p.text) < held_out)
        train, why = tuple(p for p in train if _share(p.text) >= held_out), f" (held_out={held_out})"
    else:
        tested = read_jsonl(test)
    for name, side, of in (("train", train, path), ("test", tested, test or path)):
        if not side:
            raise ValueError(f"dataset {of}: no {name} problems; expected at least 1{why}")
    return Task(train, tested, partial(_reward, reward))


def _share(text: str) -> float:
    """A number in [0, 1) that the text alone decides."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _reward(reward: Callable[[Prompt, str], float], prompt: Prompt, text: str, finish: str) -> Reward:
    if finish not in (EOS, STOP):
        return Reward(0.0, False)
    value = float(reward(prompt, text))
    return Reward(value, value >= 1)
