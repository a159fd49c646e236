"""Which problems are worth training on: rules for each row, duplicates, leaked evaluation problems, pass rates.

Rows are read one after the other and written as they are kept. What is remembered of a kept row are its min-hashes and
its hashed shingles, about 4 KB, however long it is. Texts are compared as words and signs of arithmetic; two that
differ in a number, in such a sign or in their answer are two problems, however much else they share.
"""

import json
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data import rows
from jaxrl_llm.data.datasets import is_text, read_messages
from jaxrl_llm.data.prepare import NOTHING, column
from jaxrl_llm.data.recipes import Recipe
from jaxrl_llm.types import Prompt, expect

PLAIN = Recipe()
BANDS, BAND = 24, 4  # min-hashes: texts that share a band are compared; of those alike by .7 that is 99.8 %
SIGNS = re.compile(r"\w+|[+*/=<>^%]|(?<!\w)-|-(?![^\W\d_]{2})|(?<=[\d)])!|(?<=\b\w)!")
TOLD_BY_CHANCE = {"true", "false", "yes", "no"}
CHOICES = re.compile(
    r"(?<!\w)\(A\).{1,400}?(?<!\w)\(B\)|\sA\)\s.{1,400}?\sB\)\s|\n\s*A[.:]\s.{1,400}?\n\s*B[.:]\s", re.DOTALL
)
PROOF = re.compile(r"(?:^|[.;:,]\s+|\b(?:and|then|to)\s+)(?:dis)?(?:prove|show)\s+(?:\w+\s+)?that\b", re.IGNORECASE)
ASKS = re.compile(r"\?|\b(?:find|determine|compute|calculate|evaluate|how many|what)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Rules:
    """What is dropped. A share of 0, or for a band (0, 1), switches a rule off."""

    near: float = 0.7  # Jaccard similarity of words and pairs of words, from which on texts are duplicates
    leak: float = 0.5  # share of an evaluation problem's n-grams that a row may not reach
    ngram: int = 5  # words
    scripts: tuple[str, ...] = ("LATIN", "GREEK")  # as Unicode names them
    script_share: float = 0.8  # of a text's letters, at least
    guessable: bool = True  # drop multiple choice, true or false, proofs
    similar: float = 0.95  # cosine of embeddings, from which on texts are duplicates
    pass_rate: tuple[float, float] = (0.0, 1.0)  # band that is kept, both ends included
    direct_rate: float = 0.0  # share of right answers without reasoning, from which on a problem is guessable
    hardest: float = 1.0  # share that is kept of all that is left, of the lowest scores (Pre-PPO, 2503.22230)


def words(text: str) -> list[str]:
    """Words, numbers and signs of arithmetic, in small letters; a hyphen or an exclamation mark is no sign."""
    return SIGNS.findall(text.casefold())


def _grams(tokens: Sequence[str], n: int) -> set[int]:
    return {zlib.crc32(" ".join(tokens[i : i + n]).encode()) for i in range(len(tokens) - n + 1)}


@dataclass
class NearDuplicates:
    """Texts seen so far; those whose Jaccard similarity reaches `near`, by min-hashing, then exactly."""

    near: float
    names: list[str] = field(default_factory=list)
    shingles: list[np.ndarray] = field(default_factory=list)  # sorted uint32
    buckets: dict[int, list[int]] = field(default_factory=dict)

    def first(self, name: str, text: str, answer: Any = None, add: bool = True) -> str:
        """Name of the first text with this answer that this one repeats; "" without one: with `add` it is kept then."""
        tokens = words(text)
        own = np.array(sorted(_grams(tokens, 1) | _grams(tokens, 2)), np.uint32)
        hashed = rows.needed("rensa").RMinHash(num_perm=BANDS * BAND, seed=0)
        hashed.update([str(h) for h in own.tolist()])
        exact = str(answer), *sorted(t for t in tokens if not t.isalpha())
        digest = hashed.digest()
        keys = [hash((i, *digest[i : i + BAND], exact)) for i in range(0, BANDS * BAND, BAND)]
        for k in sorted({k for key in keys for k in self.buckets.get(key, ())}):
            both = len(np.intersect1d(own, self.shingles[k], assume_unique=True))
            if both >= self.near * (len(own) + len(self.shingles[k]) - both):
                return self.names[k]
        if add:
            for key in keys:
                self.buckets.setdefault(key, []).append(len(self.names))
            self.names.append(name)
            self.shingles.append(own)
        return ""


class Evaluations:
    """Evaluation problems that training must not see: as near-duplicates, or as a part of a longer text."""

    def __init__(self, problems: Iterable[tuple[str, str]], rules: Rules):
        self.near, self.rules = NearDuplicates(rules.near), rules
        self.sizes: list[tuple[str, int]] = []
        self.grams: dict[int, list[int]] = {}
        for name, text in problems:
            self.near.first(name, text)
            for gram in (grams := _grams(words(text), rules.ngram)):
                self.grams.setdefault(gram, []).append(len(self.sizes))
            self.sizes.append((name, len(grams)))

    def leak(self, text: str) -> str:
        """Name of an evaluation problem that the text holds, "" without one."""
        if self.rules.near and (name := self.near.first("", text, add=False)):
            return name
        own = _grams(words(text), self.rules.ngram) if self.rules.leak else ()
        found = Counter(k for gram in own for k in self.grams.get(gram, ()))
        return next((self.sizes[k][0] for k, n in found.items() if n >= self.rules.leak * self.sizes[k][1]), "")


@dataclass
class Embedded:
    """Unit vectors of the texts seen so far, in the space of the user's function: texts → [N, D]."""

    embed: Callable[[list[str]], Any]
    similar: float
    vectors: list[np.ndarray] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def first(self, names: list[str], texts: list[str]) -> list[str]:
        """For each text the name of an earlier one that it is similar to, "" without one; those are kept."""
        vectors = np.asarray(self.embed(texts), np.float32)
        expect(len(vectors) == len(texts), "embed(texts)", vectors.shape, f"({len(texts)}, D)")
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        found = [""] * len(texts)
        for block, start in zip(self.vectors, np.cumsum([0, *map(len, self.vectors)]), strict=False):
            alike = vectors @ block.T
            for i in np.flatnonzero(alike.max(axis=1) >= self.similar):
                found[i] = found[i] or self.names[start + int(alike[i].argmax())]
        new: list[int] = []
        for i in range(len(texts)):
            near = [j for j in new if vectors[i] @ vectors[j] >= self.similar] if not found[i] else []
            found[i] = found[i] or (names[near[0]] if near else "")
            new += [] if found[i] else [i]
        self.vectors.append(vectors[new])
        self.names += [names[i] for i in new]
        return found


def guessable(text: str, answer: Any) -> str:
    """How a right answer may come without a solution, as far as rules can tell; "" if they see none."""
    if isinstance(answer, bool) or str(answer).strip(" .").lower() in TOLD_BY_CHANCE:
        return "true or false"
    if CHOICES.search(text):
        return "multiple choice"
    return "proof" if PROOF.search(text) and not ASKS.search(text) else ""


def script_share(text: str, scripts: Sequence[str]) -> float:
    """The share of the text's letters that are of these scripts, 1 for a text without letters."""
    letters = Counter(c for c in text if c.isalpha())
    own = sum(n for c, n in letters.items() if unicodedata.name(c, "").partition(" ")[0] in scripts)
    return own / letters.total() if letters else 1.0


def _checked(rules: Rules) -> None:
    for name in ("near", "leak", "script_share", "similar", "direct_rate", "hardest"):
        expect(0 <= getattr(rules, name) <= 1, name, getattr(rules, name), "a share, from 0 to 1")
    expect(rules.ngram >= 1, "ngram", rules.ngram, "at least 1 word")
    expect(0 <= rules.pass_rate[0] <= rules.pass_rate[1] <= 1, "pass_rate", rules.pass_rate, "0 ≤ low ≤ high ≤ 1")


def curate(
    files: Sequence[Path], out: Path, rules: Rules, evaluations: Iterable[tuple[str, str]] = (), *,
    recipe: Recipe = PLAIN, embed: Callable | None = None, rates: Callable | None = None, score: str = "pass_rate",
) -> Counter:  # fmt: skip
    """Write the rows that are kept to `out`, the others' places and reasons beside it, and return counts by reason.

    evaluations: names and texts of problems that must not be trained on. embed: texts → [N, D]. rates: prompts → for
    each pass_rate and perhaps direct_rate, that are added to the row, or None for a prompt that is too long. score: the
    column that `hardest` goes by. Both files change when all is done. Raises ValueError as `rows.read` does, and when
    nothing is kept.
    """
    _checked(rules)
    out.parent.mkdir(parents=True, exist_ok=True)
    counts, near, known = Counter(), NearDuplicates(rules.near), Evaluations(evaluations, rules)
    meaning = embed and Embedded(embed, rules.similar)
    kept, dropped = (out.with_name(f".{out.name}.{kind}") for kind in ("kept", "dropped"))
    try:
        with kept.open("w") as keep, dropped.open("w") as drop:

            def refuse(place: str, bad: rows.Bad) -> None:
                counts[bad.reason] += 1
                drop.write(json.dumps({"row": place, "reason": bad.reason, "detail": bad.detail}) + "\n")

            alone = _alone(files, rules, recipe, near, known, refuse)
            while part := list(islice(alone, rows.BATCH)):
                for (place, row, _), more, bad in zip(part, *_together(part, rules, meaning, rates), strict=True):
                    if bad is not None:
                        refuse(place, bad)
                    else:
                        counts["kept"] += 1
                        keep.write(json.dumps(row | more, default=str) + "\n")
        if rules.hardest < 1:
            counts.update(_hardest(kept, dropped, rules.hardest, score))
        expect(counts["kept"], f"rows kept of {counts.total()}", 0, f"at least one; dropped: {dict(counts)}")
        os.replace(dropped, out.with_name(f"{out.stem}.dropped.jsonl"))
        os.replace(kept, out)
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror}: not written", str(out)) from error  # a full disk names no file
    finally:
        kept.unlink(missing_ok=True)
        dropped.unlink(missing_ok=True)
    return counts


def _alone(files, rules, recipe, near, known, refuse) -> Iterator[tuple[str, dict, Prompt]]:
    """Place, columns and prompt of the rows that rules, evaluation problems and duplicates leave."""
    for path in files:
        for number, row in rows.read(path):
            place, prompt, bad = rows.place(path, number), None, row
            if not isinstance(row, rows.Bad):
                (text, messages), answer = read_messages(column(row, recipe.prompt)), column(row, recipe.answer)
                prompt = Prompt(number, text, answer, dict(row), messages=messages)
                unknown = answer is NOTHING and recipe.answer != PLAIN.answer  # a name that was given
                detail = f"there are {', '.join(row)}"
                bad = rows.Bad(f"no column {' or '.join(recipe.answer)}", detail) if unknown else None
                bad = bad or _fault(place, prompt, rules, near, known)
            if bad is None:
                yield place, row, prompt
            else:
                refuse(place, bad)


def _fault(place: str, p: Prompt, rules: Rules, near: NearDuplicates, known: Evaluations) -> rows.Bad | None:
    if not is_text(p.text):
        return rows.Bad("prompt is not text", f"there are {', '.join(p.meta)}")
    if rules.script_share and (share := script_share(p.text, rules.scripts)) < rules.script_share:
        return rows.Bad("language", f"{share:.0%} of its letters are {' or '.join(rules.scripts)}")
    if rules.guessable and (kind := guessable(p.text, p.answer)):
        return rows.Bad("guessable", kind)
    if name := known.leak(p.text):
        return rows.Bad("evaluation problem", name)
    name = near.first(place, p.text, p.answer) if rules.near else ""
    return rows.Bad("near-duplicate", name) if name else None


def _together(part: list[tuple[str, dict, Prompt]], rules: Rules, meaning: Embedded | None, rates: Callable | None):
    """For each row of a batch, what its sampling adds to it, and why it is dropped or None."""
    prompts, more, bad = [p for *_, p in part], [{} for _ in part], [None] * len(part)
    if meaning is not None:
        found = meaning.first([place for place, *_ in part], [p.text for p in prompts])
        bad = [rows.Bad("similar meaning", name) if name else None for name in found]
    left = [i for i, b in enumerate(bad) if b is None]
    for i, found in zip(left, rates([prompts[i] for i in left]) if rates and left else (), strict=False):
        (low, high), more[i] = rules.pass_rate, found or {}
        if found is None:
            bad[i] = rows.Bad("too long", "for the policy's prompts")
        elif not low <= found["pass_rate"] <= high:
            bad[i] = rows.Bad("too hard" if found["pass_rate"] < low else "too easy", f"{found['pass_rate']:.3f}")
        elif rules.direct_rate and found.get("direct_rate", 0.0) >= rules.direct_rate:
            bad[i] = rows.Bad("answered without reasoning", f"{found['direct_rate']:.3f}")
    return more, bad


def _hardest(kept: Path, dropped: Path, share: float, score: str) -> Counter:
    """Leave the share of the rows with the lowest scores, earlier rows first among equals, in their order."""
    with kept.open() as file:
        scores = [json.loads(line).get(score) for line in file]
    sound = all(isinstance(s, int | float) for s in scores)
    expect(sound, f"column {score}", "not in all rows a number", "a score of each row, or --policy")
    chosen = set(np.argsort(scores, kind="stable")[: max(1, round(share * len(scores)))].tolist())
    with kept.open() as file, dropped.open("a") as drop, kept.with_name(f"{kept.name}.new").open("w") as keep:
        for i, line in enumerate(file):
            told = {"row": f"{i + 1} of those kept", "reason": "not among the hardest", "detail": f"{scores[i]}"}
            (keep if i in chosen else drop).write(line if i in chosen else json.dumps(told) + "\n")
    os.replace(keep.name, kept)
    return Counter({"not among the hardest": len(scores) - len(chosen), "kept": len(chosen) - len(scores)})
