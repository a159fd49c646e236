"""Problems from files, JSONL or prepared datasets, with a verifier of your own; a prompt may be chat messages."""

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data import rows
from jaxrl_llm.types import EOS, STOP, Prompt, Reward, Task, expect

CACHED_FROM = 1000  # prompts, from which on what was found of them is kept on disk
VERSION_FILE = "current"  # in the folder of a prepared dataset: names the folder of its newest version


def cache_folder() -> Path:
    """Where the project keeps on disk what is costly to find out again: $JAXRL_CACHE, or ~/.cache/jaxrl_llm."""
    return Path(os.environ.get("JAXRL_CACHE") or Path.home() / ".cache" / "jaxrl_llm")


def read_jsonl(path: Path | str, check: Callable[[Any], None] | None = None) -> tuple[Prompt, ...]:
    """A Prompt a line; fields other than prompt and answer go to `meta`. ValueError names file, line and field."""
    expect(isinstance(path, (str, Path)), "dataset", path, "the path of a JSONL file")
    prompts, places = [], []
    for number, row in rows.read(Path(path)):
        where = rows.place(Path(path), number)
        if isinstance(row, rows.Bad):
            raise ValueError(f"{where}: {row.reason} ({row.detail})")
        for name in ("prompt", "answer"):
            if name not in row:
                raise ValueError(f"{where}: no field {name!r}; expected prompt and answer")
        asked, answer = row.pop("prompt"), row.pop("answer")
        text, messages = read_messages(asked)
        expect(is_text(text), f"{where}: prompt", asked, "text, or messages with role and content")
        prompts.append(Prompt(len(prompts), text, answer, row, messages=messages))
        places.append(where)
    _check_golds(prompts, lambda i: places[i], check)
    return tuple(prompts)


def is_text(value: Any) -> bool:
    """Whether it is text that is not empty and can be encoded: without half a character."""
    return isinstance(value, str) and value != "" and not re.search("[\ud800-\udfff]", value)


def read_messages(prompt: Any) -> tuple[Any, tuple[dict, ...]]:
    """The text of the last of chat messages, and the messages; of anything else that itself, and none."""
    listed = prompt if isinstance(prompt, list) else []
    sound = all(isinstance(m, dict) and {"role", "content"} <= m.keys() and is_text(m["content"]) for m in listed)
    return (prompt[-1]["content"], tuple(prompt)) if listed and sound else (prompt, ())


def jsonl(
    path: Path | str, reward: Callable, test: Path | str | None = None, held_out: float = 0.1,
    check: Callable | None = None,
) -> Task:  # fmt: skip
    """A task of the problems in `path` and of a reward.

    reward: (prompt, response) -> float, 1 for a right answer, or (prompt, text, finish) -> Reward; what has `fn` and
    `submit`, as a reward that other processes compute, may hold either. With the first, `correct` is value ≥ 1, and an
    answer that reached the token limit is worth 0 and is never correct. Without a file `test`, the share `held_out` of
    the problems, chosen by the hash of their prompts, is kept out of training: the same problem falls on the same side
    whatever else the file holds. check: raises ValueError for an answer that cannot be verified. Raises ValueError,
    naming file or argument, for a reward that cannot be called so, for a share that is none, when a side is empty, and
    with file and line for an answer that fails the check.
    """
    graded, train = _graded(f"dataset {path}", reward), read_jsonl(path, check)
    return _task(f"dataset {path}", train, None if test is None else read_jsonl(test, check), held_out, graded, test)


def _task(
    name: str, train: Sequence, test: Sequence | None, held_out: float, graded: Callable, tested: Any = None
) -> Task:
    why = ""
    if test is None:
        sound = isinstance(held_out, int | float) and 0 <= held_out <= 1
        expect(sound, f"{name}: held_out", held_out, "a number from 0 to 1")
        share = lambda text: int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
        out = np.array([share(p.text) < held_out for p in train], bool)
        test, train, why = subset(train, out), subset(train, ~out), f" (held_out={held_out})"
    for side, of, problems in (("train", name, train), ("test", f"dataset {tested}" if tested else name, test)):
        if not len(problems):
            raise ValueError(f"{of}: no {side} problems; expected at least 1{why}")
    return Task(train, test, graded)


def tfds_data(
    source: Path | str, reward: Callable, split: str = "train", test: str | None = None, held_out: float = 0.1,
    prompt: str = "prompt", answer: str = "answer", version: str = "", keep: Callable | None = None,
    check: Callable | None = None,
) -> Task:  # fmt: skip
    """A task of a prepared dataset (`jaxrl data prepare`), or of any that tensorflow_datasets wrote as ArrayRecord.

    Rows are read when they are asked for, in any order; none stay in memory. source: its name, or a folder. test: a
    split; if None, the split of that name where there is one, else the share `held_out` as `jsonl` chooses it. prompt,
    answer: columns; all others are in Prompt.meta, beside `source` and `row`. version: the one that a run wants, the
    newest if empty. keep: whether a prompt belongs to the task; each is looked at now. reward, check: as in `jsonl`; a
    dataset that was prepared with this check is not checked again. Raises ValueError as `jsonl` does, and for a
    dataset, version, split or column that is not there, with those that are.
    """
    folder, graded, sides = prepared(source, version), _graded(f"dataset {source}", reward), []
    test = "test" if test is None and "test" in Rows(str(folder)).splits and split != "test" else test
    for name in (split, test) if test else (split,):
        side = Rows(str(folder), name, prompt, answer)
        if keep is not None:
            side = subset(side, np.array([bool(keep(p)) for p in side], bool))
        if check is not None and side.report.get("checked") != reference(check):
            _check_golds(side, lambda i, s=side, n=name: f"{folder} {n}: {s[i].meta['row']}", check)
        sides.append(side)
    return _task(f"dataset {source}", *(sides if test else (*sides, None)), held_out, graded)


def responses(source: Path | str, split: str = "train", version: str = "") -> Task:
    """A prepared dataset's column `response` as traces to learn from: the task of a supervised stage, `Prime.task`.

    Its one behaviour is called response. It has no verifier: its test side is its training side, and is not asked.
    """
    side = Rows(str(prepared(source, version)), split)
    expect("response" in side[0].meta, f"dataset {source}: column response", "empty", "responses to learn from")
    return Task(side, side, _unjudged, response, ("response",))


def response(prompt: Prompt, behaviour: str, seed: int) -> str:
    """The response that a dataset has for the prompt: the trace of `responses`."""
    return prompt.meta["response"]


def _unjudged(prompt: Prompt, text: str, finish: str) -> Reward:
    raise ValueError(f"prompt {prompt.id}: a task of responses has no reward; expected it as prime.task alone")


def prefetched(make: Callable[[int], Any], start: int, stop: int) -> Iterator[Any]:
    """make(start), …, make(stop − 1), in order, made by a thread of grain ahead of their use.

    Each is a function of its number alone, so that a pass that begins in the middle is the pass that was stopped.
    """
    grain = rows.needed("grain")
    made = grain.MapDataset.range(start, stop).map(make)
    return iter(made.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))


@dataclass(frozen=True)
class Subset(Sequence):
    """Those of the prompts whose numbers are in `indices`, in that order."""

    whole: Sequence[Prompt]
    indices: np.ndarray  # int64

    @property
    def report(self) -> dict[str, Any]:
        return getattr(self.whole, "report", {})

    @property
    def parts(self) -> tuple:
        """The parts of a mixture, as far as they are chosen; `indices` are sorted then."""
        whole = getattr(self.whole, "parts", None) or ()
        ends = [np.searchsorted(self.indices, (first, first + size)).tolist() for _, first, size in whole]
        return tuple((w, low, high - low) for (w, *_), (low, high) in zip(whole, ends, strict=True) if high > low)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        found = self.indices[index]
        return tuple(self.whole[i] for i in found.tolist()) if isinstance(index, slice) else self.whole[int(found)]


def subset(prompts: Sequence[Prompt], chosen: np.ndarray) -> Sequence[Prompt]:
    """Those of the prompts for which `chosen`, Bool, says so: a tuple of a tuple, of others without reading one."""
    indices = np.flatnonzero(chosen)
    return tuple(prompts[i] for i in indices) if isinstance(prompts, tuple) else Subset(prompts, indices)


@dataclass(frozen=True)
class Rows(Sequence):
    """Prompts of one split of a folder that tensorflow_datasets wrote, each read when it is asked for.

    A prompt's id is its row, from 0. ValueError for a split or a column that is not there.
    """

    folder: str
    split: str = "train"
    prompt: str = "prompt"
    answer: str = "answer"

    @cached_property
    def splits(self) -> list[str]:
        return [s["name"] for s in json.loads((Path(self.folder) / "dataset_info.json").read_text())["splits"]]

    @cached_property
    def report(self) -> dict[str, Any]:
        """Of `jaxrl data prepare`; empty for a dataset of other origin."""
        file = Path(self.folder) / "report.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    @cached_property
    def _source(self) -> Any:
        builder, where = (
            rows.needed("tensorflow_datasets").builder_from_directory(self.folder),
            f"dataset {self.folder}",
        )
        expect(self.split in self.splits, f"{where}: split", self.split, f"one of {', '.join(self.splits)}")
        for name in (self.prompt, self.answer):
            known = sorted(builder.info.features)
            expect(name in known, f"{where}: column", name, f"one of {', '.join(known)}")
        return builder.as_data_source(split=self.split)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        index = range(len(self))[index]
        row = _decoded(self._source[index])
        text, answer = row.pop(self.prompt), row.pop(self.answer)
        if not self.report:
            return Prompt(index, text, answer, {"source": Path(self.folder).name, "row": f"row {index + 1}"} | row)
        meta = json.loads(row["meta"]) | ({"response": row["response"]} if row["response"] else {})
        messages, answer = tuple(meta.pop("messages", ())), meta.pop("answer", answer)
        return Prompt(index, text, answer, meta, messages=messages)


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _decoded(v) for k, v in value.items()}
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return [_decoded(v) for v in value] if isinstance(value, list) else getattr(value, "decode", lambda: value)()


def prepared(source: Path | str, version: str = "", root: Path | str | None = None) -> Path:
    """The folder of a dataset's version: of a folder, or of a name under `root` (None: the project's own).

    Raises ValueError when there is none.
    """
    for folder in (Path(source).expanduser(), Path(root or cache_folder() / "data") / str(source)):
        if (folder / "dataset_info.json").is_file():
            return folder
        if (folder / VERSION_FILE).is_file():
            known = sorted(p.name for p in folder.glob("1.0.*"))
            wanted = version or (folder / VERSION_FILE).read_text().strip()
            expect(wanted in known, f"dataset {source}: version", wanted, f"one of {', '.join(known)}")
            return folder / wanted
    raise ValueError(f"dataset {source}: not prepared; expected a folder, or what `jaxrl data prepare {source}` writes")


def reference(fn: Callable) -> str:
    """What names a function, with its keywords, and with the text of its module, so that a change is seen."""
    bare, settings = (fn.func, fn.keywords) if isinstance(fn, partial) else (fn, {})
    file = Path(getattr(sys.modules.get(bare.__module__), "__file__", None) or os.devnull)
    return f"{bare.__module__}:{bare.__qualname__} {settings} {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


def _check_golds(prompts: Sequence[Prompt], place: Callable[[int], str], check: Callable | None) -> None:
    """ValueError, with file and line of the first, for answers that fail. That many pass is kept on disk."""
    if check is None:
        return
    key = hashlib.sha256(repr((reference(check), [p.answer for p in prompts])).encode()).hexdigest()[:32]
    passed, failed = cache_folder() / "golds" / key, []
    for i, prompt in enumerate(() if passed.exists() else prompts):
        try:
            check(prompt.answer)
        except ValueError as error:
            failed.append(f"{place(i)}: answer {prompt.answer!r}: {error}")
    if failed:
        expected = "expected answers that can be verified"
        raise ValueError(f"{failed[0]} ({len(failed)} of {len(prompts)} answers); {expected}")
    if len(prompts) > CACHED_FROM:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def _graded(name: str, reward: Any) -> Callable[[Prompt, str, str], Reward]:
    """The task's reward: a function of (prompt, response) gets its verdict made of its number."""
    fn = reward.fn if hasattr(reward, "submit") else reward
    try:
        taken = inspect.signature(fn)
        try:
            taken.bind(None, "")
        except TypeError:
            taken.bind(None, "", "")
            return reward
    except TypeError as error:
        expected = "(prompt, response) or (prompt, text, finish)"
        raise ValueError(f"{name}: reward {reward!r}: {error}; expected {expected}") from error
    return partial(_reward, fn) if fn is reward else replace(reward, fn=partial(_reward, fn))


def _reward(reward: Callable[[Prompt, str], float], prompt: Prompt, text: str, finish: str) -> Reward:
    if finish not in (EOS, STOP):
        return Reward(0.0, False)
    value = float(reward(prompt, text))
    return Reward(value, value >= 1)
