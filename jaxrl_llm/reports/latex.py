"""Equations of docstrings as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Set

TEX = {name: f"\\{name}" for name in ("min", "max", "exp", "log")}
ROMAN = {"mean", "std", "var", "clip", "round", "sg"}  # operators that TeX does not know
SIGNS = {
    "·": r" \cdot ", "−": "-", "<=": r"\le", ">=": r"\ge", "≥": r"\ge", "≠": r"\ne", "∈": r"\in", "←": r"\leftarrow",
    "  ": r"\quad ", "½": r"\tfrac{1}{2}", "²": "^2", "Σ": r"\sum", "…": r"\ldots", "#": r"\#", "1[": r"\mathbf{1}[",
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "κ": r"\kappa", "λ": r"\lambda", "π": r"\pi",
    "ρ": r"\rho", "σ": r"\sigma", "τ": r"\tau", "φ": r"\varphi",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+'s|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*'*")
_SUBSCRIPT = re.compile(r"_(?:\{([^}]*)\}|([A-Za-z0-9]+'*))")
_PLAIN = re.compile(r" ?([A-Za-z]+(?:'s)?)(?![\w'(\[])")
_SIGN = re.compile(r"  |<=|>=|(?<![\w.])1\[|.")


def latex(text: str, names: Set[str] = frozenset()) -> str:
    """One statement of a docstring's equation as LaTeX. `names`: of parameters and functions, set upright as a whole.

    Other words of two letters or more are prose, unless they stand where a variable would.
    """
    out, i = [], 0
    while i < len(text):
        if (sign := text[i]) in "√^":
            inner, i = _argument(text, i + 1, call=sign == "√")
            tex = latex(inner, names)
            out.append(rf"\sqrt{{{tex}}}" if sign == "√" else f"^{_grouped(tex)}")
        elif end := _prose(text, i, names):
            out.append(_text(text, i, end))
            i = end
        elif word := _WORD.match(text, i):
            i = word.end()
            operand = re.match(r" (?=[\w(])", text[i:]) and not _prose(text, i + 1, names)
            out.append(_identifier(word[0], names) + (r"\," if operand and word[0].split("_")[0] in ROMAN else ""))
        elif subscript := _SUBSCRIPT.match(text, i):
            i = subscript.end()
            out.append(f"_{{{latex(subscript[1], names)}}}" if subscript[1] else f"_{_grouped(_symbol(subscript[2]))}")
        else:
            sign = _SIGN.match(text, i)[0]
            i += len(sign)
            out.append(SIGNS.get(sign, sign))
    tex = ""
    for part in out:  # a command ends where no letter follows
        tex += f" {part}" if re.search(r"\\[A-Za-z]+$", tex) and part[:1].isalpha() else part
    return re.sub(r"(?<=\S) +(?! *\})", " ", tex).strip()


def _argument(text: str, i: int, call: bool) -> tuple[str, int]:
    """The word, call or parenthesis (without its signs) that begins at i, and where it ends."""
    word = _WORD.match(text, i)
    start = word.end() if word else i
    if text[start : start + 1] != "(" or (word and not call):
        end = start if word else i + 1
        return text[i:end], end
    depth, end = 1, start + 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[i:end] if word else text[i + 1 : end - 1], end


def _prose(text: str, i: int, names: Set[str]) -> int:
    """Where the words of prose that begin at i end; 0 if none begin. Parameters amid prose belong to it."""
    end = 0
    while found := _PLAIN.match(text, end or i):
        word, ordinary = found[1], lambda w: len(w) > 1 and w not in names | ROMAN | set(TEX)
        following = _PLAIN.match(text, found.end())
        article = word == "a" and (end or (following and ordinary(following[1])))
        if not (ordinary(word) or article or (end and word in names)) or (not end and found[0] != word):
            break
        end = found.end()
    return end


def _text(text: str, i: int, end: int) -> str:
    before, after, words = text[:i].rstrip()[-1:], text[end:].lstrip()[:1], text[i:end]
    if " " not in words and before in ("", *"(,=·[<+−") and after and after in ",=·])<":
        return _roman(words)
    left, right = " " * (text[:i].endswith(" ") and before != "="), " " * text[end:].startswith(" ")
    return rf"\text{{{left}{words}{right}}}"


def _identifier(word: str, names: Set[str]) -> str:
    name = word.rstrip("'")
    ticks = word[len(name) :]
    head, _, sub = name.partition("_")
    if name in names and len(name) > 1:
        return _roman(name) + ticks
    if sub:
        return f"{_identifier(head, names)}_{_grouped(_symbol(sub + ticks))}"
    if re.fullmatch(r"[A-Za-z]\d", name):
        return f"{name[0]}_{name[1]}{ticks}"
    return _symbol(name) + ticks


def _symbol(word: str) -> str:
    """A word that stands for a quantity or a function; a letter may have ticks."""
    return TEX.get(word) or (word if len(word.rstrip("'")) == 1 else _roman(word))


def _roman(name: str) -> str:
    return rf"\mathrm{{{name}}}".replace("_", r"\_")


def _grouped(tex: str) -> str:
    return tex if len(tex) == 1 else f"{{{tex}}}"


def fence(block: str, names: Set[str] = frozenset()) -> str:
    """An equation block as GitHub and GitLab draw it, a statement a line."""
    statements = [s.rstrip(",; ") for line in block.splitlines() for s in re.split(r" {3,}", line.strip())]
    tex = [latex(s, names) for s in statements]
    if len(tex) > 1:
        tex = [r"\begin{aligned}", *(f"& {t}" + r" \\" * (t is not tex[-1]) for t in tex), r"\end{aligned}"]
    return "\n".join(["```math", *tex, "```"])
