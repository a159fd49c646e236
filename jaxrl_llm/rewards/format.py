"""Rewards for the form of an answer, whatever it says."""

import re

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
