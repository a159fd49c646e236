"""The methods in words, made from the code itself: what `jaxrl algorithms` prints, and docs/algorithms.md.

`python -m jaxrl_llm.catalogue` rewrites the page.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm import advantages, batching, corrections, losses
from jaxrl_llm.algorithms import ALGORITHMS, Algorithm, Critic
from jaxrl_llm.functions import unbound
from jaxrl_llm.rewards import length

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "algorithms.md"
COMMAND = "python -m jaxrl_llm.catalogue"
WIDTH = 120
# Where the columns of `table` begin; a longer cell moves the rest of its own row.
STOPS = {"name": 0, "advantage": 15, "loss": 32, "norm": 59, "extras": 72, "paper": 107}
INTRODUCTION = f"""\
# Methods

A method is a row of [algorithms.py](../jaxrl_llm/algorithms.py): a choice of pure functions and of how their values are
summed. All of them minimise

{{loss}}

over the tokens t of the responses i in an optimiser step's batch: x is the policy loss, w the token weights, c the
correction for a sampler that differs from the learner, β and κ the coefficients of KL penalty and entropy bonus. With
`nll_coef` the negative log-likelihood of correct responses is added.

`jaxrl algorithms` prints this table, `jaxrl train EXPERIMENT --algorithm NAME` runs a row in an experiment. A method of
your own is an `Algorithm` with your functions. This page is made from the code by `{COMMAND}`.
"""


# --- what a row says ----------------------------------------------------------------------------------------------


def _show(value: Any) -> str:
    """A field's value: a function by its name and the keywords that are not its defaults, a dataclass likewise."""
    if dataclasses.is_dataclass(value):
        kept = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        default = {f.name: f.default for f in dataclasses.fields(value)}
        return ", ".join(f"{k}={_show(v)}" for k, v in kept if v != default[k]) or "as by default"
    if callable(value):
        fn, keywords = unbound(value)
        default = {k: p.default for k, p in inspect.signature(fn).parameters.items()}
        changed = ", ".join(f"{k}={_show(v)}" for k, v in keywords.items() if v != default.get(k))
        return f"{fn.__name__}({changed})" if changed else fn.__name__
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e-0", "e-")
    return repr(value) if isinstance(value, str) else str(value)


def _facts(a: Algorithm) -> dict[str, str]:
    """Every field but the paper as text; the three of the KL are one fact, and so are the two of the norm."""
    facts = {f.name: _show(getattr(a, f.name)) for f in dataclasses.fields(a) if f.name not in ("paper", "kl", "norm")}
    beta, kind = facts.pop("kl_coef"), a.kl
    within = " in reward" if facts.pop("kl_in") == "'reward'" else ""
    limit = facts.pop("norm_length")
    norm = a.norm if limit == "None" else f"{a.norm}({limit})"
    first = {name: facts.pop(name) for name in ("advantage", "token_advantage", "loss")}
    return {**first, "norm": norm, "KL": f"{beta}·{kind}{within}" if a.needs_reference else "None", **facts}


_PLAIN_ROW = Algorithm(advantages.raw, losses.reinforce, "token")
DEFAULTS = _facts(_PLAIN_ROW)


def _phrase(field: str, text: str, quote: str = "") -> str:
    words = field.replace("_", " ")
    if text in ("None", "False"):
        return f"no {words}"
    return words if text == "True" else f"{words} {quote}{text}{quote}"


def differences(a: Algorithm, base: Algorithm) -> list[str]:
    """The fields in which two rows differ, the first's values as words: `loss gspo`, `no KL`."""
    other = _facts(base)
    return [_phrase(field, text, "`") for field, text in _facts(a).items() if text != other[field]]


def _extras(a: Algorithm) -> list[str]:
    """What the columns of `table` do not say, the most telling first."""
    changed = {k: v for k, v in list(_facts(a).items())[4:] if v != DEFAULTS[k]}
    order = sorted(changed, key=lambda k: ("critic", "KL", "correction", "group_filter", k).index(k))  # stable
    named = {k: unbound(getattr(a, k))[0].__name__ for k in order if callable(getattr(a, k, None))}
    return ["critic" if k == "critic" else named.get(k) or _phrase(k, changed[k]) for k in order]


def _fit(parts: list[str], width: int) -> str:
    """The parts that fit, and how many more there are."""
    for n in range(len(parts), -1, -1):
        text = ", ".join([*parts[:n], *([f"+{len(parts) - n}"] if n < len(parts) else [])])
        if len(text) <= width:
            break
    return text


def _row(cells: Iterable[str]) -> str:
    line = ""
    for stop, cell in zip(STOPS.values(), cells, strict=True):
        line = line.ljust(stop) if len(line) <= stop - 2 or not stop else f"{line}  "
        line += cell
    return line.rstrip()


def table() -> str:
    """A line a method, at most 120 columns: name, advantage, loss, norm, extras, paper."""
    lines = [_row(STOPS)]
    for name, a in ALGORITHMS.items():
        steps = [_show(fn) for fn in (a.advantage, a.token_advantage) if fn not in (None, advantages.raw)]
        extras = _fit(_extras(a), STOPS["paper"] - STOPS["extras"] - 2)
        lines.append(_row((name, " → ".join(steps) or "raw", _show(a.loss), _facts(a)["norm"], extras, _cited(a))))
    return "\n".join(lines)


def _cited(a: Algorithm) -> str:
    return a.paper.partition(",")[0]


def describe(name: str, a: Algorithm) -> str:
    """A row in full: its fields that differ from the defaults, and what its functions say of themselves."""
    shown = [(k, v) for k, v in _facts(a).items() if v != DEFAULTS[k] or k in ("advantage", "loss", "norm")]
    width = max(len(k) for k, _ in shown)
    lines = [f"{name}  {_source(a)}", "", *(f"  {k:<{width}}  {v}" for k, v in shown)]
    for fn in _functions(a):
        doc = inspect.cleandoc(fn.__doc__ or "").splitlines()
        lines += ["", f"{_place(fn)}({_parameters(fn)})", *(f"  {line}".rstrip() for line in doc)]
    return "\n".join(lines)


def _source(a: Algorithm) -> str:
    return f"https://arxiv.org/abs/{a.paper}" if re.fullmatch(r"\d{4}\.\d{5}", a.paper) else a.paper


def _functions(a: Algorithm) -> list[Callable]:
    default = {f.name: f.default for f in dataclasses.fields(a)}
    values = [unbound(v)[0] for k, v in vars(a).items() if callable(v) and v is not default[k]]
    values += [losses.kl] if a.needs_reference else []
    return values + ([losses.value_loss] if a.critic is not None else [])


def _place(fn: Callable) -> str:
    return f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"


def _parameters(fn: Callable) -> str:
    given = inspect.signature(fn).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={_show(p.default)}" for p in given)


# --- equations ----------------------------------------------------------------------------------------------------

TEX = {name: f"\\{name}" for name in ("min", "max", "exp", "log")}
ROMAN = {"mean", "std", "var", "clip", "round", "sg"}  # operators that TeX does not know
SYMBOLS = {
    "·": r" \cdot ", "−": "-", "<=": r"\le", ">=": r"\ge", "≥": r"\ge", "≠": r"\ne", "∈": r"\in", "←": r"\leftarrow",
    "½": r"\tfrac{1}{2}", "²": "^2", "Σ": r"\sum", "…": r"\ldots", "#": r"\#", "1[": r"\mathbf{1}[",
    "α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "κ": r"\kappa", "λ": r"\lambda", "π": r"\pi",
    "ρ": r"\rho", "σ": r"\sigma", "τ": r"\tau",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+'s|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*'*")
_SUBSCRIPT = re.compile(r"_(?:\{([^}]*)\}|([A-Za-z0-9]+'*))")
_PLAIN = re.compile(r" ?([A-Za-z]+(?:'s)?)(?![\w'(\[])")
_SYMBOL = re.compile(r"<=|>=|(?<![\w.])1\[|.")


def latex(text: str, names: Iterable[str] = ()) -> str:
    """One statement of a docstring's equation as LaTeX. `names`: its function's parameters, set upright as a whole.

    Other words of two letters or more are prose, unless they stand where a variable would.
    """
    names = {*names, *(f.__name__ for m in (losses, advantages, corrections) for f in _public(m))}
    out, i = [], 0
    while i < len(text):
        if text[i] == "√":
            inner, i = _argument(text, i + 1, call=True)
            out.append(rf"\sqrt{{{latex(inner, names)}}}")
        elif text[i] == "^":
            inner, i = _argument(text, i + 1, call=False)
            out.append(f"^{_grouped(latex(inner, names))}")
        elif end := _prose(text, i, names):
            out.append(_text(text, i, end))
            i = end
        elif word := _WORD.match(text, i):
            i = word.end()
            operand = re.match(r" (?=[\w(])", text[i:]) and not _prose(text, i + 1, names)
            out.append(_identifier(word[0], names) + (r"\," if operand and word[0].split("_")[0] in ROMAN else ""))
        elif subscript := _SUBSCRIPT.match(text, i):
            i = subscript.end()
            out.append(f"_{{{latex(subscript[1], names)}}}" if subscript[1] else f"_{_lower(subscript[2])}")
        elif text.startswith("  ", i):
            i += 2
            out.append(r"\quad ")
        else:
            symbol = _SYMBOL.match(text, i)[0]
            i += len(symbol)
            out.append(SYMBOLS.get(symbol, symbol))
    return _joined(out)


def _joined(parts: list[str]) -> str:
    tex = ""
    for part in parts:  # a command ends where no letter follows
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


def _prose(text: str, i: int, names: set[str]) -> int:
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


def _identifier(word: str, names: set[str]) -> str:
    name = word.rstrip("'")
    primes = word[len(name) :]
    head, _, sub = name.partition("_")
    if name in names and len(name) > 1:
        return _roman(name) + primes
    if sub:
        return f"{_identifier(head, names)}_{_lower(sub + primes)}"
    if re.fullmatch(r"[A-Za-z]\d", name):
        return f"{name[0]}_{name[1]}{primes}"
    return (TEX.get(name) or (name if len(name) == 1 else _roman(name))) + primes


def _roman(name: str) -> str:
    return rf"\mathrm{{{name}}}".replace("_", r"\_")


def _lower(subscript: str) -> str:
    letter = len(subscript.rstrip("'")) == 1
    return _grouped(subscript if letter else TEX.get(subscript) or _roman(subscript))


def _grouped(tex: str) -> str:
    return tex if len(tex) == 1 else f"{{{tex}}}"


def _fence(lines: Iterable[str], names: Iterable[str] = ()) -> str:
    """An equation block as GitHub and GitLab draw it, a statement a line."""
    statements = [s.rstrip(",; ") for line in lines for s in re.split(r" {3,}", line.strip())]
    tex = [latex(s, names) for s in statements]
    if len(tex) > 1:
        tex = [r"\begin{aligned}", *(f"& {t}" + r" \\" * (t is not tex[-1]) for t in tex), r"\end{aligned}"]
    return "\n".join(["```math", *tex, "```"])


# --- the page -----------------------------------------------------------------------------------------------------


def _public(module: ModuleType) -> list[Callable]:
    own = lambda fn: inspect.isfunction(fn) and fn.__module__ == module.__name__ and not fn.__name__.startswith("_")
    return [fn for fn in vars(module).values() if own(fn)]


def _parameters_of(functions: Iterable[Callable]) -> set[str]:
    return {name for fn in functions for name in inspect.signature(fn).parameters}


def _paragraphs(doc: str) -> Iterator[tuple[bool, list[str]]]:
    """The lines of each paragraph, and whether it is a block of equations."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = paragraph.splitlines()
        yield lines[0].startswith("    "), lines


def _markdown(doc: str, names: Iterable[str] = ()) -> list[str]:
    """A docstring's paragraphs: equations in fences, lists of names and meanings as they stand, papers linked."""
    out = []
    for block, lines in _paragraphs(doc):
        if block and re.match(r"    [a-z_/, ]+ {2,}\S", lines[0]):
            out.append("\n".join(["```text", *(line[4:] for line in lines), "```"]))
        else:
            out.append(_fence(lines, names) if block else _linked("\n".join(lines)))
    return out


def _linked(text: str) -> str:
    text = re.sub(r"(`[^`]*`)|<(?=[/a-z])", lambda m: m[1] or "&lt;", text)
    return re.sub(r"(?<![\w./])(\d{4}\.\d{5})(?!\d)", r"[\1](https://arxiv.org/abs/\1)", text)


def _users(fn: Callable) -> str:
    rows = [f"`{name}`" for name, a in ALGORITHMS.items() if fn in _functions(a)]
    return f"Methods: {', '.join(rows)}." if rows else ""


def _entry(fn: Callable) -> list[str]:
    parameters = inspect.signature(fn).parameters
    defaults = [f"`{n}={_show(p.default)}`" for n, p in parameters.items() if p.default is not p.empty]
    last = [f"Defaults: {', '.join(defaults)}." if defaults else "", _users(fn)]
    return [
        f"### `{_place(fn)}`",
        *_markdown(fn.__doc__ or "", parameters),
        *filter(None, ["  \n".join(filter(None, last))]),
    ]


def _weights() -> list[str]:
    """Of `token_weights`, whose docstring has a line a norm."""
    doc = list(_paragraphs(batching.token_weights.__doc__))
    names = inspect.signature(batching.token_weights).parameters
    out = [_linked("\n".join(lines)) for block, lines in doc if not block]
    for line in next(lines for block, lines in doc if block):
        norm, *statements = re.split(r" {2,}", line.strip())
        rows = [f"`{name}`" for name, a in ALGORITHMS.items() if a.norm == norm]
        out += [f"### `{norm}`", _fence(["   ".join(statements)], names)]
        out += [f"Methods: {', '.join(rows)}."] if rows else []
    return out


def _methods() -> str:
    base = ALGORITHMS["grpo"]
    lines = ["| method | paper | what differs from GRPO |", "|---|---|---|"]
    for name, a in ALGORITHMS.items():
        words = "; ".join(differences(a, base)) or f"the base: {', '.join(differences(a, _PLAIN_ROW))}"
        lines.append(f"| `{name}` | {_linked(a.paper)} | {words} |")
    return "\n".join(lines)


def _fields(cls: type) -> str:
    """A dataclass's fields with their defaults, and the comments that stand beside them in its source."""
    source = inspect.getsource(cls)
    lines = ["| field | default | |", "|---|---|---|"]
    for f in dataclasses.fields(cls):
        comment = re.search(rf"^    {f.name}: [^#\n]*# (.*)$", source, re.MULTILINE)
        default = "" if f.default is dataclasses.MISSING else f"`{_show(f.default)}`"
        lines.append(f"| `{f.name}` | {default} | {comment[1] if comment else ''} |")
    return "\n".join(lines)


def page() -> str:
    """The Markdown of docs/algorithms.md."""
    chosen = [losses.select_cov, losses.select_clip_cov, losses.top_entropy, batching.lopti_phases]
    apart = [losses.kl, losses.value_loss]
    sections = {
        "Policy losses": (losses, [fn for fn in _public(losses) if fn not in chosen + apart]),
        "Choice of tokens": (None, chosen),
        "KL penalty and value loss": (None, apart),
        "Advantages": (advantages, _public(advantages)),
        "Corrections": (corrections, _public(corrections)),
        "Length rewards": (length, _public(length)),
    }
    shown = [fn for _, functions in sections.values() for fn in functions]
    others = [fn for a in ALGORITHMS.values() for fn in _functions(a) if fn not in shown]
    sections["Groups, prompts and forms"] = (None, list(dict.fromkeys(others)))
    loss = next(lines for block, lines in _paragraphs(losses.__doc__) if block)
    out = [INTRODUCTION.format(loss=_fence(loss)).strip(), _methods()]
    for cls in (Algorithm, Critic):
        out += [f"## Fields of `{cls.__name__}`", _linked(inspect.cleandoc(cls.__doc__)), _fields(cls)]
    out += ["## Token weights", *_weights()]
    for title, (module, functions) in sections.items():
        files = dict.fromkeys(inspect.getmodule(fn).__name__.replace(".", "/") for fn in functions)
        links = ", ".join(f"[{f}.py](../{f}.py)" for f in files)
        out += [
            f"## {title}",
            f"In {links}.",
            *(_markdown(module.__doc__, _parameters_of(functions)) if module else []),
        ]
        out += [paragraph for fn in functions for paragraph in _entry(fn)]
    return "\n\n".join(out) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
