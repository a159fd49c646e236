"""The methods in words, made from the code itself: what `jaxrl algorithms` prints, and docs/algorithms.md.

`python -m jaxrl_llm.reports.catalogue` rewrites the page.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.config.values import unbound
from jaxrl_llm.objective import advantages, corrections, filters, losses, token_weights
from jaxrl_llm.objective.algorithms import ALGORITHMS, Algorithm, Critic, PromptChoice, Shaping, Term, Updates
from jaxrl_llm.reports import latex
from jaxrl_llm.rewards import length

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
COMMAND = "python -m jaxrl_llm.reports.catalogue"
GROUPS = ("shaping", "prompts", "updates")  # fields of an Algorithm that hold fields
# Where the columns of `table` begin; a longer cell moves the rest of its own row.
STOPS = {"name": 0, "advantage": 15, "loss": 32, "norm": 59, "extras": 72, "paper": 107}
INTRODUCTION = f"""\
# Methods

A method is a row of [algorithms.py](../jaxrl_llm/objective/algorithms.py): a choice of pure functions and of how
their values are summed. All of them minimise

{{loss}}

over the tokens t of the responses i in an optimiser step's batch: x is the policy loss, w the token weights, c the
correction for a sampler that differs from the learner, β and κ the coefficients of KL penalty and entropy bonus. With
`nll_coef` the negative log-likelihood of correct responses is added.

`jaxrl algorithms` prints this table, `jaxrl train EXPERIMENT --algorithm NAME` runs a row in an experiment. A method of
your own is an `Algorithm` with your functions. This page is made from the code by `{COMMAND}`.
"""


def _show(value: Any) -> str:
    """A field's value: a function by its name and the keywords that are not its defaults, a dataclass likewise."""
    if isinstance(value, Term):
        weight = "" if value.weight == 1 else f"{_show(value.weight)}·"
        return f"{weight}{_show(value.fn)}" + f" after {value.warmup} steps" * bool(value.warmup)
    if dataclasses.is_dataclass(value) or callable(value):
        fn, keywords = (type(value), vars(value)) if dataclasses.is_dataclass(value) else unbound(value)
        default = {k: p.default for k, p in inspect.signature(fn).parameters.items()}
        changed = ", ".join(f"{k}={_show(v)}" for k, v in keywords.items() if v != default.get(k))
        if dataclasses.is_dataclass(value):
            return changed or "as by default"
        return f"{fn.__name__}({changed})" if changed else fn.__name__
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e-0", "e-")
    return repr(value) if isinstance(value, str) else str(value)


def _values(a: Algorithm) -> dict[str, Any]:
    """Every field's value by name; a group (`shaping`, `prompts`, `updates`) and `terms` give what is in them."""
    fields = lambda name, value: vars(value) if name in GROUPS else {name: value}
    values = {k: v for field in vars(a).items() for k, v in fields(*field).items()}
    return values | {f"term {name}": term for name, term in values.pop("terms").items()}


def _function(value: Any) -> Callable | None:
    """The function that a field's value is, without what a partial has bound."""
    fn = value.fn if isinstance(value, Term) else value
    return unbound(fn)[0] if callable(fn) else None


def _facts(a: Algorithm) -> dict[str, str]:
    """Every field but the paper as text; the three of the KL are one fact, and so are the two of the norm."""
    merged = ("paper", "kl", "kl_coef", "kl_in", "norm", "norm_length")
    facts = {name: _show(value) for name, value in _values(a).items() if name not in merged}
    norm = a.norm if a.norm_length is None else f"{a.norm}({a.norm_length})"
    kl = f"{_show(a.kl_coef)}·{a.kl}{' in reward' if a.kl_in == 'reward' else ''}" if a.needs_reference else "None"
    first = {name: facts.pop(name) for name in ("advantage", "token_advantage", "loss")}
    return {**first, "norm": norm, "KL": kl, **facts}


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
    return [_phrase(field, text, "`") for field, text in _facts(a).items() if text != other.get(field)]


def _extras(a: Algorithm) -> list[str]:
    """What the columns of `table` do not say, the most telling first."""
    changed = {k: v for k, v in list(_facts(a).items())[4:] if v != DEFAULTS.get(k)}
    order = sorted(changed, key=lambda k: ("critic", "KL", "correction", "group_filter", k).index(k))  # stable
    named = {k: fn.__name__ for k, v in _values(a).items() if (fn := _function(v))}
    return ["critic" if k == "critic" else named.get(k) or _phrase(k, changed[k]) for k in order]


def _fit(parts: list[str], width: int) -> str:
    """The parts that fit, and how many there are besides."""
    for n in range(len(parts), -1, -1):
        rest = [f"+{len(parts) - n}"] if n < len(parts) else []
        text = ", ".join(parts[:n] + rest)
        if len(text) <= width:
            break
    return text


def _row(cells: Iterable[str]) -> str:
    line = ""
    for stop, cell in zip(STOPS.values(), cells, strict=True):
        line = (line + "  " if stop else "").ljust(stop) + cell
    return line.rstrip()


def table() -> str:
    """A line a method, at most 120 columns: name, advantage, loss, norm, extras, paper."""
    lines = [_row(STOPS)]
    for name, a in ALGORITHMS.items():
        steps = [_show(fn) for fn in (a.advantage, a.token_advantage) if fn not in (None, advantages.raw)]
        loss = _show(a.loss)
        pushed = max(0, len(loss) + 2 - (STOPS["norm"] - STOPS["loss"]))  # columns that a long loss takes from the rest
        extras = _fit(_extras(a), STOPS["paper"] - STOPS["extras"] - 2 - pushed)
        paper = a.paper.partition(",")[0]
        lines.append(_row((name, " → ".join(steps) or "raw", loss, _facts(a)["norm"], extras, paper)))
    return "\n".join(lines)


def describe(name: str, a: Algorithm) -> str:
    """A row in full: its fields that differ from the defaults, and what its functions say of themselves."""
    shown = [(k, v) for k, v in _facts(a).items() if v != DEFAULTS.get(k) or k in ("advantage", "loss", "norm")]
    width = max(len(k) for k, _ in shown)
    source = f"https://arxiv.org/abs/{a.paper}" if re.fullmatch(r"\d{4}\.\d{5}", a.paper) else a.paper
    lines = [f"{name}  {source}", "", *(f"  {k:<{width}}  {v}" for k, v in shown)]
    for fn in _functions(a):
        doc = inspect.cleandoc(fn.__doc__ or "").splitlines()
        lines += ["", f"{_qualified(fn)}({_parameters(fn)})", *(f"  {line}".rstrip() for line in doc)]
    return "\n".join(lines)


def _functions(a: Algorithm) -> list[Callable]:
    default = _values(_PLAIN_ROW) | dict.fromkeys(("advantage", "loss"))
    values = [_function(v) for k, v in _values(a).items() if _function(v) and v is not default.get(k)]
    return values + [losses.kl] * a.needs_reference + [losses.value_loss] * (a.critic is not None)


def _qualified(fn: Callable) -> str:
    return f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}"


def _parameters(fn: Callable) -> str:
    given = inspect.signature(fn).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={_show(p.default)}" for p in given)


def _public(module: ModuleType) -> list[Callable]:
    here = lambda fn: inspect.isfunction(fn) and fn.__module__ == module.__name__ and not fn.__name__.startswith("_")
    return [fn for fn in vars(module).values() if here(fn)]


OURS = {fn.__name__ for module in (losses, filters, advantages, corrections) for fn in _public(module)}


def _paragraphs(doc: str, block: bool | None = None) -> list[str]:
    """A docstring's paragraphs; those that are an indented block, or are not, if asked for."""
    every = re.split(r"\n\s*\n", inspect.cleandoc(doc))
    return [text for text in every if block in (None, text.startswith("    "))]


def _markdown(doc: str, names: Iterable[str] = ()) -> list[str]:
    """A docstring's paragraphs: equations in fences, lists of names and meanings as they stand, papers linked."""
    out = []
    for text in _paragraphs(doc):
        if not text.startswith("    "):
            out.append(_linked(text))
        elif re.match(r"    [a-z_/, ]+ {2,}\S", text):
            out.append(f"```text\n{textwrap.dedent(text)}\n```")
        else:
            out.append(latex.fence(text, OURS.union(names)))
    return out


def _linked(text: str) -> str:
    text = re.sub(r"(`[^`]*`)|<(?=[/a-z])", lambda m: m[1] or "&lt;", text)
    return re.sub(r"(?<![\w./])(\d{4}\.\d{5})(?!\d)", r"[\1](https://arxiv.org/abs/\1)", text)


def _used_by(uses: Callable[[Algorithm], bool]) -> list[str]:
    """A line with the methods for which `uses` is true; no line if there are none."""
    names = [f"`{name}`" for name, a in ALGORITHMS.items() if uses(a)]
    return [f"Methods: {', '.join(names)}."] if names else []


def _entry(fn: Callable) -> list[str]:
    parameters = inspect.signature(fn).parameters
    defaults = [f"`{n}={_show(p.default)}`" for n, p in parameters.items() if p.default is not p.empty]
    last = ([f"Defaults: {', '.join(defaults)}."] if defaults else []) + _used_by(lambda a: fn in _functions(a))
    return [f"### `{_qualified(fn)}`", *_markdown(fn.__doc__ or "", parameters), *(["  \n".join(last)] if last else [])]


def _weights() -> list[str]:
    """The section on `token_weights`, whose docstring has one line for each norm."""
    fn = token_weights.token_weights
    out = [_linked(text) for text in _paragraphs(fn.__doc__, block=False)]
    for line in _paragraphs(fn.__doc__, block=True)[0].splitlines():
        norm, equation = re.split(r" {2,}", line.strip(), maxsplit=1)
        users = _used_by(lambda a, norm=norm: a.norm == norm)
        out += [f"### `{norm}`", latex.fence(equation, OURS.union(inspect.signature(fn).parameters)), *users]
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
        default = "" if f.default is dataclasses.MISSING or f.name in GROUPS else f"`{_show(f.default)}`"
        lines.append(f"| `{f.name}` | {default} | {comment[1] if comment else ''} |")
    return "\n".join(lines)


def page() -> str:
    """The Markdown of docs/algorithms.md."""
    chosen = [losses.select_cov, losses.select_clip_cov, losses.top_entropy, filters.lopti_phases]
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
    loss = latex.fence(_paragraphs(losses.__doc__, block=True)[0], OURS)
    out = [INTRODUCTION.format(loss=loss).strip(), _methods()]
    for cls in (Algorithm, Shaping, Term, PromptChoice, Updates, Critic):
        out += [f"## Fields of `{cls.__name__}`", _linked(inspect.cleandoc(cls.__doc__)), _fields(cls)]
    out += ["## Token weights", *_weights()]
    for title, (module, functions) in sections.items():
        files = dict.fromkeys(inspect.getmodule(fn).__name__.replace(".", "/") for fn in functions)
        links = ", ".join(f"[{f}.py](../{f}.py)" for f in files)
        names = {name for fn in functions for name in inspect.signature(fn).parameters}
        out += [f"## {title}", f"In {links}.", *(_markdown(module.__doc__, names) if module else [])]
        out += [paragraph for fn in functions for paragraph in _entry(fn)]
    return "\n\n".join(out) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
