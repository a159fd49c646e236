"""The final answer within a response: what it marks as such, or the last thing said if a task allows it."""

import re

from jaxrl_llm.types import expect

FORMS = ("boxed", "answer", "####")  # \boxed{…} or \fbox{…}, <answer>…</answer>, the rest of a line after ####
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w-])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NEXT = re.compile(
    r"(?:[\s$,;&]|\\[()\[\] ,;]|\\q?quad\b)*|(?:(?![.!?]\s|\n\n).){0,60}\b(?:and|or)\b(?:(?![.!?]\s|\n\n).){0,30}",
    re.DOTALL,
)
_PHRASE = re.compile(r"answer(?:\s+is\s*:?|\s*:)(?:\*\*)?\s*", re.IGNORECASE)
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\\$|[^$])+?)(?<!\\)\$", re.DOTALL)
_NUMBER = re.compile(
    r"-?\\[dt]?frac\{-?\d+\}\{\d+\}"
    r"|(?<![\w.,/])[-−]?[$€£]?(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)?(?:[.,]?\d+)?(?:/\d+)?(?:\s*(?:\\?%|percent|pct))?"
)
TAIL = 4000  # characters at the end of a text in which an unmarked answer is looked for


def extract(text: str, forms: tuple[str, ...] = FORMS, last: bool = False) -> str | None:
    r"""The answer that a response marks in one of `forms`; of several the one that begins last; None without any.

    Boxes side by side, with commas or a few words with "and" or "or" between them, are one list. A box or tag that is
    not closed marks nothing, nor does what stands before it in that form.
    last: without a mark, what follows the last "answer is" or "answer:", else the last formula or number, counts.
    """
    expect(set(forms) <= set(FORMS), "forms", forms, f"some of {FORMS}")
    marks = {"boxed": _boxed, "answer": _tagged, "####": _hashed}
    found = max((marks[form](text) for form in forms), default=(-1, ""))
    if found[0] < 0 and last:
        found = 0, _unmarked(text[-TAIL:])
    return found[1].strip() or None if found[0] >= 0 else None


def _boxed(text: str) -> tuple[int, str]:
    end, contents, first = len(text), [], -1
    while len(contents) < 20 and (start := max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))) >= 0:
        body, after = _body(text, start)
        if body is None or (contents and not _NEXT.fullmatch(text, after, end)):
            break
        contents, first, end = [body, *contents], start, start
    return first, ", ".join(dict.fromkeys(contents))


def _body(text: str, start: int) -> tuple[str | None, int]:
    """What the box at `start` holds, and where it ends; None if it is not closed."""
    if (begin := _BOX.match(text, start)) is None:
        return None, start
    if text[begin.end()] != "{":
        word = re.compile(r"[^\s$}]+").match(text, begin.end())
        return word[0].rstrip(".,"), word.end()
    depth = 0
    for brace in _BRACE.finditer(text, begin.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[begin.end() + 1 : brace.start()], brace.end()
    return None, start


def _tagged(text: str) -> tuple[int, str]:
    start = text.rfind("<answer>")
    end = text.find("</answer>", start)
    if start < 0 or end < 0:
        return -1, ""
    body = text[start + len("<answer>") : end]
    return start, _boxed(body)[1] or body


def _hashed(text: str) -> tuple[int, str]:
    start = text.rfind("####")
    return start, text[start:].lstrip("#").lstrip().partition("\n")[0] if start >= 0 else ""


def _unmarked(text: str) -> str:
    if phrases := list(_PHRASE.finditer(text)):
        rest = text[phrases[-1].end() :]
        begin = _MATH.match(rest)
        said = begin[0] if begin else re.split(r"\n|\.(?:\s|$)", rest, maxsplit=1)[0]
        if said and not re.search(r"[\d$]|\\[(\[]", said):
            return said
        text = said or text
    formulas, numbers = list(_MATH.finditer(text)), [m for m in _NUMBER.finditer(text) if re.search(r"\d", m[0])]
    if formulas and (not numbers or formulas[-1].end() > numbers[-1].start()):
        return next(filter(None, formulas[-1].groups()))
    return numbers[-1][0] if numbers else ""
