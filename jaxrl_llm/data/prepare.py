"""From files of any origin to a prepared dataset: each row examined, ArrayRecord that tensorflow_datasets reads.

A prepared dataset is the folder ROOT/NAME. Its file `current` names the version, a folder 1.0.N beside it whose N is a
hash of the rows, so that rebuilt data is another version and a run can name the one that it learns from. In it:
the rows, report.json (counts for each reason, licence, source, files, hash) and findings.jsonl (each row left out).
Columns: prompt, answer and response are text; meta is a JSON object of all else, with `answer` and `messages` where
those are no plain text, `source` (the dataset's name) and `row` (file:line).
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jaxrl_llm.data import rows
from jaxrl_llm.data.datasets import VERSION_FILE, is_text, read_messages, reference
from jaxrl_llm.data.recipes import Recipe
from jaxrl_llm.data.rows import Bad
from jaxrl_llm.types import expect

COLUMNS = ("prompt", "answer", "response", "meta")
LISTED = 10_000  # findings of a reason that are written down; all are counted
SHARD = 1 << 20  # rows
KEPT, NO_FAULT = "kept", ("not of the dataset", "repeated")
# Columns of a row's own, by their names in `meta`, where a prepared row has others.
RENAMED = {name: f"origin_{name}" for name in ("row", "answer", "response", "messages")} | {"source": "origin"}
NOTHING = object()


@dataclass
class Findings:
    """What was found of the rows so far. `seen` holds about 150 bytes a row, which itself is not kept."""

    files: list[Path] = field(default_factory=list)
    counts: dict[str, Counter] = field(default_factory=dict)  # by split: reason → rows, KEPT among them
    listed: list[dict[str, str]] = field(default_factory=list)
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # hash of a text → file, row, hash of answer

    def before(self, key: Any, number: int, answer: Any = None) -> str:
        """Where the same key was seen before, "" if it was not: then it is from now on."""
        hashed = lambda x: int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=8).digest(), "big")
        now = len(self.files) - 1, number, hashed(answer)
        file, row, gold = self.seen.setdefault(hashed(key), now)
        other = "" if gold == now[2] else ", with another answer"
        return "" if (file, row) == now[:2] else rows.place(self.files[file], row) + other


def prepare(
    name: str, files: Mapping[str, list[Path]], recipe: Recipe, root: Path, *, bad: str = "error",
    check: Callable[[Any], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the dataset `name` from the files of each split, and return its report.

    bad: skip leaves out and counts the rows that are at fault, error raises ValueError when there is one. check: raises
    ValueError for an answer that cannot be verified. A prompt that was there before, in any split, is a fault, unless
    the recipe's rows repeat. Raises ValueError, naming file and line, for an empty file and when a split has no row
    left. The folder changes at once, when all is done; nothing is left of an attempt that fails.
    """
    expect(re.fullmatch(r"\w[\w.-]*", name), "name", name, "letters, digits, '.', '_' and '-'")
    expect(bad in ("error", "skip"), "bad", bad, "error or skip")
    for split in files:  # tensorflow_datasets has a grammar of splits, and `all` in it
        expect(re.fullmatch(r"[a-zA-Z]\w*", split) and split != "all", "split", split, "a word, and not all")
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"dataset {folder}: is being prepared; expected one preparation at a time") from error
        for left in folder.glob(".partial-*"):  # of one that was killed
            shutil.rmtree(left)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
        partial.chmod(folder.stat().st_mode & 0o777)  # mkdtemp's is for this user alone
        try:
            report = _written(partial, name, files, recipe, bad, check)
            final = folder / report["version"]
            if final.exists():
                for file in ("report.json", "findings.jsonl"):
                    os.replace(partial / file, final / file)
            else:
                partial.rename(final)
            (pointer := folder / ".current").write_text(report["version"] + "\n")
            os.replace(pointer, folder / VERSION_FILE)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if not (folder / VERSION_FILE).exists():
                (folder / ".lock").unlink()
                with contextlib.suppress(OSError):  # what else lies there is not ours
                    folder.rmdir()
    return report | {"folder": str(final)}


def _written(partial: Path, name: str, files: Mapping, recipe: Recipe, bad: str, check: Callable | None) -> dict:
    tfds, found, digest = rows.needed("tensorflow_datasets"), Findings(), hashlib.sha256()
    features = tfds.features.FeaturesDict({column: tfds.features.Text() for column in COLUMNS})
    version, inner = tfds.core.Version("1.0.0"), re.sub(r"\W", "_", name)
    identity = tfds.core.DatasetIdentity(name=inner, version=version, data_dir=str(partial), module_name=__name__)
    info = tfds.core.DatasetInfo(builder=identity, features=features, license=recipe.licence)
    writer = tfds.core.SequentialWriter(info, SHARD, file_format="array_record")  # keeps the order, writes no key
    for split, paths in files.items():
        examined = _examined(name, split, paths, recipe, check, found)
        while part := list(islice(examined, rows.BATCH)):
            writer.initialize_splits([split], fail_if_exists=False)  # not before: an empty split cannot be read
            writer.add_examples({split: part})
            digest.update(json.dumps([split, part]).encode())
        _accept(name, split, found, bad)
    writer.close_all()
    return _reported(partial, name, recipe, found, check, digest.hexdigest())


def _examined(
    name: str, split: str, paths: list[Path], recipe: Recipe, check: Callable | None, found: Findings
) -> Iterator[dict[str, str]]:
    """The rows of a split that are kept, as they are written; `found` learns of all of them."""
    counts = found.counts.setdefault(split, Counter())
    for path in paths:
        found.files.append(path)
        number = 0
        for number, row in rows.read(path):
            source = {"source": name, "row": rows.place(Path(path.name), number)}
            result = row if isinstance(row, Bad) else examine(row, recipe, source, check)
            if not isinstance(result, Bad):
                own, asked = column(row, recipe.id), column(row, recipe.prompt)
                key = result["prompt"], asked if isinstance(asked, list) else ""  # of messages the last is the prompt
                if own not in (NOTHING, None) and (first := found.before((split, own), number)):
                    result = Bad("duplicate id", f"{own!r}, of {first}")
                elif first := found.before(key, number, result["answer"]):
                    result = Bad("repeated" if recipe.repeats else "duplicate prompt", f"that of {first}")
            counts[result.reason if isinstance(result, Bad) else KEPT] += 1
            if not isinstance(result, Bad):
                yield result
            elif result.reason not in NO_FAULT and counts[result.reason] <= LISTED:
                found.listed.append({"row": rows.place(path, number), "split": split, **asdict(result)})
        expect(number, f"dataset {path}", "0 rows", "at least one")


def examine(row: Mapping, recipe: Recipe, meta: Mapping, check: Callable | None = None) -> dict[str, str] | Bad:
    """The columns of a prepared row, or what is wrong with it. meta: of the row's place; the row's own is added."""
    if recipe.keep is not None and not recipe.keep(row):
        return Bad("not of the dataset")
    text, messages = read_messages(column(row, recipe.prompt))
    values = {"prompt": recipe.text(text), "answer": recipe.gold(column(row, recipe.answer))}
    values["response"] = column(row, recipe.response)
    for kind, value in values.items():
        names = getattr(recipe, kind)
        if value is NOTHING and (kind == "prompt" or (kind == "answer" and names)):
            return Bad(f"no column {' or '.join(names)}", f"there are {', '.join(map(str, row)) or 'none'}")
        parts = value if isinstance(value, list) and kind == "answer" else [] if value is NOTHING else [value]
        if value is None or value == [] or any(isinstance(v, str) and not v.strip() for v in parts):
            return Bad(f"empty {kind}")
        if not all(isinstance(v, str | int | float if kind == "answer" else str) for v in parts):
            return Bad(f"{kind} is not text", f"{value!r:.80}")
        if any(isinstance(v, str) and not is_text(v) for v in parts):
            return Bad("not UTF-8", f"half a character in the {kind}")
        if not all(math.isfinite(v) for v in parts if isinstance(v, float)):  # as JSON writes what pandas has not
            return Bad(f"empty {kind}", f"{value!r:.80}")
    answer = values["answer"]
    if check is not None and answer is not NOTHING:
        try:
            check(answer)
        except ValueError as error:
            return Bad("answer does not parse", f"{answer!r:.80}: {error}")
    used = {part for p in (*recipe.prompt, *recipe.answer, *recipe.response) for part in (p, p.split(".")[0])}
    others = {RENAMED.get(k, k): v for k, v in row.items() if k not in used}
    others |= {k: v for k, make in recipe.meta.items() if (v := make(row)) is not None} | meta
    others |= {"messages": messages} if messages else {}
    others |= {} if isinstance(answer, str) else {"answer": None if answer is NOTHING else answer}
    plain = {k: "" if v is NOTHING else v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return plain | {"meta": json.dumps(others, default=str)}


def column(row: Mapping, paths: tuple[str, ...]) -> Any:
    """What stands at the first of the paths that the row has: a column, a.b inside of one, a+b for two texts."""
    for path in paths:
        parts = [row[path]] if path in row else [_inside(row, part) for part in path.split("+")]
        if NOTHING not in parts and (len(parts) == 1 or None not in parts):
            return parts[0] if len(parts) == 1 else " ".join(map(str, parts))
    return NOTHING


def _inside(value: Any, path: str) -> Any:
    for name in path.split("."):
        listed = isinstance(value, list) and name.isdigit() and int(name) < len(value)
        if not listed and not (isinstance(value, Mapping) and name in value):
            return NOTHING
        value = value[int(name) if listed else name]
    return value


def _accept(name: str, split: str, found: Findings, bad: str) -> None:
    """Raises ValueError for faults with bad="error", and when no row is left."""
    counts, own = found.counts[split], [f for f in found.listed if f["split"] == split]
    told = ", ".join(f"{n} × {reason}" for reason, n in counts.items() if reason != KEPT)
    shown = "; ".join(f"{f['row']}: {f['reason']}" + f" ({f['detail']})" * bool(f["detail"]) for f in own[:3])
    expected = "rows without a fault, or --bad skip" if counts[KEPT] else "at least one that can be used"
    if not counts[KEPT] or (own and bad == "error"):
        left = f"dataset {name}: {counts[KEPT]} of {counts.total()} rows of {split} are left ({told})"
        raise ValueError(f"{left}: {shown or 'none is at fault'}; expected {expected}")


def _reported(partial: Path, name: str, recipe: Recipe, found: Findings, check: Callable | None, digest: str) -> dict:
    report = {"name": name, "version": f"1.0.{int(digest[:12], 16)}", "sha256": digest, "licence": recipe.licence}
    report |= {"source": recipe.source, "hub": recipe.hub, "files": [str(f) for f in found.files]}
    report |= {"rows": found.counts, "checked": "" if check is None else reference(check)}
    info = partial / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"version": report["version"]}, indent=1))
    (partial / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (partial / "findings.jsonl").write_text("".join(json.dumps(f) + "\n" for f in found.listed))
    return report
