"""Rows of JSONL, JSON, Parquet and Arrow files, one after the other: only a JSON array is ever whole in memory."""

import codecs
import importlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data import hub
from jaxrl_llm.types import expect

COLUMNAR = (".parquet", ".arrow")
FORMATS = (".jsonl", ".json", *COLUMNAR)
BATCH = 1024  # rows that are Python objects at once
SPLITS = {"valid": "validation", "val": "validation", "dev": "validation"}  # by other names


@dataclass(frozen=True)
class Bad:
    """Why a row cannot be used: a reason, that many rows may share, and what is so about this one."""

    reason: str
    detail: str = ""


def needed(module: str) -> Any:
    """A module of the extra `data`. Raises RuntimeError, with the command that installs it, where it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"{module} is not there ({error}); expected pip install 'jaxrl_llm[data]'") from error


def place(path: Path, number: int) -> str:
    """Where a row stands, for messages: file:line, of a file that has no lines file:row n."""
    return f"{path}:{'row ' if path.suffix in COLUMNAR else ''}{number}"


def read(path: Path) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
    """Each row's number, from 1, as `place` takes it, and the row by column.

    What ends neither in .parquet nor in .arrow has an object a line; a .json file may also be one array of them.
    Raises ValueError for a file that is not there, or damaged as a whole.
    """
    if not path.is_file():
        raise ValueError(f"dataset {path}: no such file")
    if path.suffix in COLUMNAR:
        yield from enumerate(_columnar(path), 1)
        return
    with path.open("rb") as file:
        array = path.suffix == ".json" and file.read(100).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
        file.seek(0)
        whole = _parsed(file.read()) if array else None
        rows = whole if isinstance(whole, list) else [whole] if array else map(_line, file)  # only \n ends a line
        yield from ((number, _by_column(row)) for number, row in enumerate(rows, 1) if row is not None)


def _line(line: bytes) -> Any:
    return _parsed(line) if line.strip() else None


def _parsed(line: bytes) -> Any:
    try:
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
        return Bad("not an object", "null") if value is None else value
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", f"byte {error.start} of the line is 0x{error.object[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        return Bad("not JSON", f"{error}; expected an object a line")


def _by_column(row: Any) -> dict[str, Any] | Bad:
    if isinstance(row, list):  # columns without names
        return {str(i): value for i, value in enumerate(row)}
    return row if isinstance(row, dict | Bad) else Bad("not an object", f"{row!r:.60}; expected columns by name")


def _columnar(path: Path) -> Iterator[dict[str, Any] | Bad]:
    pa, done = needed("pyarrow"), 0
    try:
        for batch in _batches(path):
            for i in range(0, batch.num_rows, BATCH):
                part = batch.slice(i, BATCH)
                try:
                    yield from part.to_pylist()
                except UnicodeDecodeError:  # of the whole part: before any of its rows was given
                    for k in range(part.num_rows):
                        try:
                            yield part.slice(k, 1).to_pylist()[0]
                        except UnicodeDecodeError as error:
                            yield Bad("not UTF-8", str(error))
                done += part.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: cannot be read after row {done} ({error}); expected {path.suffix[1:]}") from error


def _batches(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from needed("pyarrow.parquet").ParquetFile(path).iter_batches(BATCH)
        return
    ipc = needed("pyarrow").ipc
    with needed("pyarrow").memory_map(str(path)) as source:
        try:
            yield from ipc.open_stream(source)
        except needed("pyarrow").ArrowInvalid:
            file = ipc.open_file(source)
            yield from (file.get_batch(i) for i in range(file.num_record_batches))


def files(source: Path | str, patterns: Sequence[str] = (), split: str = "") -> dict[str, list[Path]]:
    """The files of each split: of one file, of a folder or of OWNER/NAME of the Hugging Face hub.

    patterns: of the names within a repository; all of a known format if empty. split: of every file; else it is the
    word train, test or validation (valid, val, dev) in its name, train without one. Raises ValueError when there are
    none, OSError for a repository that cannot be downloaded.
    """
    root, found = Path(source).expanduser(), {}
    kinds = list(patterns) or [f"*{suffix}" for suffix in FORMATS]
    if not (single := root.is_file()):
        root = hub.local(source, kinds, "dataset")
    paths = [root] if single else sorted({p for kind in kinds for p in root.rglob(kind) if p.is_file()})
    expect(paths, "dataset", str(source), f"files that end in {', '.join(FORMATS)}")
    for path in paths:
        name = path.name if single else str(path.relative_to(root))
        word = re.search(r"(?<![a-z])(train|test|validation|valid|val|dev)(?![a-z])", name.lower())
        found.setdefault(split or (SPLITS.get(word[1], word[1]) if word else "train"), []).append(path)
    return found
