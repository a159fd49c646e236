"""Rewards for the form of an answer, whatever it says: terms of `algorithm.shaping.terms`."""

import re
import unicodedata
from functools import lru_cache

from jaxrl_llm.types import EOS, STOP, expect

_TAGS = re.compile(r"(?P<open>\s*<think>)?(?P<thought>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)


def think_answer(text: str, opened: bool = True) -> float:
    """1 for `<think>…</think>` and then `<answer>…</answer>`, with nothing but white space around them, else 0.

    Each tag occurs once. opened: the prompt ends in `<think>`, so that the response need not have it.
    DeepSeek-R1-Zero, arXiv 2501.12948.
    """
    found = _TAGS.fullmatch(text)
    once = all(text.count(tag) == 1 for tag in ("</think>", "<answer>", "</answer>"))
    begun = text.count("<think>") == (found is not None and found["open"] is not None)
    return float(found is not None and once and begun and (opened or found["open"] is not None))


def missing_eos(finish: str) -> float:
    """−1 for an answer that did not end by itself, at an end-of-sequence token or a stop string, else 0."""
    return 0.0 if finish in (EOS, STOP) else -1.0


def repetition(text: str, n: int = 20) -> float:
    """How much of an answer repeats itself.

        −(1 − different n-grams / n-grams), of words

    n: words in an n-gram, at least 1.  Returns a number in (−1, 0]; 0 for a text of fewer than n words.
    After the n-gram penalty of arXiv 2502.03373, here one number for an answer instead of one a token.
    """
    expect(n >= 1, "n", n, "at least 1")
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def language_consistency(text: str, script: str = "LATIN") -> float:
    """The share of an answer's words that are written in the script of its language; 1 if it has no words.

    A word is a run of letters (each Chinese or Japanese character is one by itself), and in the script if all of them
    are. script: as Unicode names it, LATIN, CYRILLIC, CJK, … DeepSeek-R1's reward for one language in the chain of
    thought, arXiv 2501.12948.
    """
    words = [w for run in re.findall(r"[^\W\d_]+", text) for w in (run if _script(run[0]) in _BY_CHARACTER else (run,))]
    return sum(all(_script(c) == script for c in word) for word in words) / len(words) if words else 1.0


_BY_CHARACTER = ("CJK", "HIRAGANA", "KATAKANA")


@lru_cache(65_536)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
