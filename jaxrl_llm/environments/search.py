"""Full-text search in passages of this disk: BM25, without a model and without a server."""

import atexit
import json
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from jaxrl_llm.types import expect

READING = Lock()
atexit.register(lambda: _opened.cache_clear())  # an index that is closed later finds half of Python gone


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("search needs bm25s: pip install 'jaxrl_llm[data]'") from error
    return bm25s


def _words(texts: list[str]) -> list[list[str]]:
    return _bm25s().tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def build(passages: Path | str, index: Path | str) -> int:
    """Write the folder `index` of a JSONL file of {"text", and perhaps "title"}; returns how many there are.

    Raises ValueError with file and line for a row without a text.
    """
    texts = []
    for number, line in enumerate(Path(passages).read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
                texts.append("\n".join(filter(None, (row.get("title"), row["text"]))))
                texts[-1].encode()
            except (ValueError, LookupError, AttributeError, TypeError) as error:
                row = f"{passages}:{number} is {line[:80]!r} ({error!r})"
                raise ValueError(f'{row}; expected {{"text": …}}') from error
    words = _words(texts) if texts else []
    expect(any(words), str(passages), texts[:3], "at least one passage with a word")
    retriever = _bm25s().BM25()
    retriever.index(words, show_progress=False)
    retriever.save(str(index), corpus=texts, show_progress=False)
    return len(texts)


@lru_cache
def _opened(index: str) -> Any:
    expect((Path(index) / "params.index.json").is_file(), "index", index, "a folder that search.build has written")
    return _bm25s().BM25.load(index, mmap=True, load_corpus=True)


def query(index: Path | str, words: str, k: int = 3) -> list[str]:
    """The k passages of the highest score, best first; of equals the earlier one; none that shares no word.

    Stop words do not count. The passages stay on the disk until they are asked for.
    """
    retriever = _opened(str(Path(index).resolve()))
    known = [word for word in _words([words])[0] if word in retriever.vocab_dict]
    if not known:
        return []
    scores = retriever.get_scores(known)
    least = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
    found = np.flatnonzero(scores >= max(least, np.finfo(scores.dtype).tiny))
    with READING:  # the file of passages has one position for all threads
        return [retriever.corpus[int(i)]["text"] for i in found[np.argsort(-scores[found], kind="stable")][:k]]
