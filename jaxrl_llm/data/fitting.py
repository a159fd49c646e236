"""From a task function to prompts that a run can ask: in their template, and none longer than the run has room for."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxrl_llm.data import datasets, templates
from jaxrl_llm.data.mixture import Mixed
from jaxrl_llm.data.tasks import Problems
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.types import Prompt, Task, expect

MANY, SAMPLE = 10_000, 256  # of more problems than that, made by program, a sample is looked at


def open_task(make: Callable[[], Task], template: Callable[[Prompt], Prompt], field: str = "task") -> Task:
    """The task of `make()`, every prompt in the template. ValueError, naming `field`, for what is no usable task."""
    task = make()
    expect(isinstance(task, Task), f"{field}()", type(task).__name__, "types.Task(train, test, reward)")
    expect(callable(task.reward), f"{field}().reward", task.reward, "a function (prompt, text, finish) -> Reward")
    for name, side in (("train", task.train), ("test", task.test)):
        sound = hasattr(side, "__getitem__") and len(side) and isinstance(side[0], Prompt)
        expect(sound, f"{field}().{name}", type(side).__name__, "a sequence of at least one types.Prompt")
    return templates.applied(task, template)


def fitting(task: Task, tokenizer: Tokenizer, limit: int, long_prompts: str) -> tuple[Task, Callable | None]:
    """The task without prompts of more than `limit` tokens, and what tells whether a training prompt may be used.

    Every prompt of both sides is encoded now (the finding is cached). One that is too long is an error with
    long_prompts="error"; with "drop" it is left out, and counted on stderr. Of more than MANY problems made by program
    only SAMPLE are encoded now; the function returned, else None, then says of each training prompt whose turn has come
    whether it fits, so that it can be passed over: no run ends in its middle. ValueError, naming the prompt, for one
    without tokens or with characters that the tokenizer does not know, and when none is left.
    """
    sides = {name: _fitting(name, getattr(task, name), tokenizer, limit, long_prompts) for name in ("train", "test")}
    return replace(task, **sides), partial(_fits, tokenizer, limit) if _sampled(task.train) else None


def _fits(tokenizer: Tokenizer, limit: int, prompt: Prompt) -> bool:
    n = len(tokenizer.encode_prompt(prompt))
    if n > limit:
        print(f"passed over prompt {prompt.id}: {n} tokens, rollout.max_prompt_tokens = {limit}", file=sys.stderr)
    return n <= limit


def _sampled(side: Sequence[Prompt]) -> bool:
    inner = getattr(side, "inner", side)  # within its template
    parts = inner.sides.values() if isinstance(inner, Mixed) else [inner]
    return any(isinstance(part, Problems) for part in parts) and len(side) > MANY


def _fitting(name: str, side: Sequence[Prompt], tokenizer: Tokenizer, limit: int, long_prompts: str) -> Sequence:
    sampled = _sampled(side)
    prompts = [side[int(i)] for i in np.linspace(0, len(side) - 1, SAMPLE)] if sampled else side
    too_long = _too_long(prompts, tokenizer, limit)
    count = f"{len(too_long)} of {len(prompts)} {name} prompts longer than {limit} tokens"
    if too_long and (long_prompts == "error" or len(too_long) == len(prompts)):
        index, tokens = next(iter(too_long.items()))
        raise ValueError(
            f"prompt {prompts[index].id} has {tokens} tokens; expected 1 to rollout.max_prompt_tokens = {limit} "
            f"({count}, the longest {max(too_long.values())}), or rollout.long_prompts=drop if some fit"
        )
    if too_long:
        print(f"dropped {count}" + f", in a sample of {len(side)}" * sampled, file=sys.stderr)
    if not too_long or sampled:
        return side
    return datasets.subset(side, ~np.isin(np.arange(len(side)), list(too_long)))


def _too_long(prompts: Sequence[Prompt], tokenizer: Tokenizer, limit: int) -> dict[int, int]:
    """Index → tokens of the prompts of more than `limit` tokens."""
    hf, file, found = tokenizer.hf, None, {}
    if len(prompts) > datasets.CACHED_FROM:
        definition = hf.backend_tokenizer.to_str() if hf.is_fast else sorted(hf.get_vocab().items())
        key = hashlib.blake2b(repr((limit, definition, hf.chat_template)).encode(), digest_size=16)
        for p in prompts:
            key.update(repr((p.text, p.question, p.messages)).encode())
        file = datasets.cache_folder() / "prompts" / f"{key.hexdigest()}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or only half written
            return dict(json.loads(file.read_text()))
    for index, p in enumerate(prompts):
        try:
            n = len(tokenizer.encode_prompt(p))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith("prompt ") else f"prompt {p.id}: {text}") from error
        expect(n, f"prompt {p.id}", "0 tokens", f"1 to rollout.max_prompt_tokens = {limit}")
        if n > limit:
            found[index] = n
    if file is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(list(found.items())))
    return found
