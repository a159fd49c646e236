"""Reasoning with search, after ReSearch (arXiv 2503.19470): thoughts, queries and results in tags, then an answer."""

import re
import string
from collections import Counter
from functools import partial
from pathlib import Path

from jaxrl_llm.data.datasets import read_jsonl
from jaxrl_llm.environments import search
from jaxrl_llm.environments.protocol import request
from jaxrl_llm.types import EOS, STOP, Prompt, Reward, Task

STOPS = ("</search>", "</answer>")  # the stop strings of its rollouts
_TAG = re.compile(r"</?(?:think|search|result|answer)>")
_IN = r"(?:(?!</?(?:think|search|result|answer)>).)*"
_SEARCH = rf"<search>{_IN}</search>\s*<result>{_IN}</result>\s*"
_FORMAT = re.compile(rf"\s*(?:<think>{_IN}</think>\s*(?:{_SEARCH})?)+<answer>(?P<answer>{_IN})</answer>\s*", re.DOTALL)


def step(
    prompt: Prompt, text: str, finish: str, *, index: Path | str, turns: int = 4, passages: int = 3,
) -> str | None:  # fmt: skip
    """The passages that a query at the end of `text` finds, in <result>; None: no query, or `turns` results before."""
    asked = request(text, finish, "search", "result", turns)
    if asked is None:
        return None
    found = [_TAG.sub(" ", passage).strip() for passage in search.query(index, asked, passages)]
    return "\n<result>\n" + ("\n\n".join(found) or "No passage found.") + "\n</result>\n"


def score(prompt: Prompt, text: str, finish: str, *, boxed: bool = True) -> Reward:
    """The F1 of the answer's words; where that is 0, 0.1 if the format holds, else 0.

    Answer: the last <answer>, and of it what is in \\boxed{} if that is there. `prompt.answer`: a text, or a list of
    which the best counts. boxed: the format demands \\boxed{}. correct: the words are those of an answer, all of them.
    An answer that did not end by itself is worth 0. ReSearch, arXiv 2503.19470 eq. 2.
    """
    if finish not in (EOS, STOP):
        return Reward(0.0, False)
    answers = re.findall(rf"<answer>({_IN})</answer>", text, re.DOTALL)
    box = re.search(r"\\boxed\{(.*)\}", answers[-1], re.DOTALL) if answers else None
    form = _FORMAT.fullmatch(text) is not None and (box is not None or not boxed)
    parsed = (box[1] if box else answers[-1]).strip() if answers else None
    golds = [prompt.answer] if isinstance(prompt.answer, str) else prompt.answer
    best = max(f1(parsed or "", gold) for gold in golds)
    right = parsed is not None and any(words(parsed) == words(gold) for gold in golds)
    parts = {"f1": best, "format": float(form), "searches": float(text.count("<result>"))}
    return Reward(best or 0.1 * form, right, parsed, parts)


def words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in text.split() if word not in ("a", "an", "the")]


def f1(found: str, gold: str) -> float:
    """2·P·R/(P + R) of the words that two texts share, each as often as it occurs in both."""
    a, b = Counter(words(found)), Counter(words(gold))
    shared = (a & b).total()
    return 2 * shared / (a.total() + b.total()) if shared else 0.0


def research(
    train: Path | str, test: Path | str, index: Path | str, turns: int = 4, passages: int = 3, boxed: bool = True,
) -> Task:  # fmt: skip
    """The task of two JSONL files of questions and an index that `search.build` has written."""
    search.query(index, "is it there?")
    follow = partial(step, index=str(index), turns=turns, passages=passages)
    return Task(read_jsonl(train), read_jsonl(test), partial(score, boxed=boxed), step=follow)
