"""How a policy answers: in the form asked for or not, with second thoughts, by template and temperature.

The analyses of Dr. GRPO (2503.20783: answer formats and pass@k by template, words of self-reflection and whether they
help) and of Cognitive Behaviors (2503.01307), whose four behaviours rules look for here, and a language model there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.reports import curves
from jaxrl_llm.run import evals
from jaxrl_llm.run.evals import Sample

_RULES = {  # of what a response says
    "reflection": r"re-?(check|think|assess|evaluat|examin|consider|analyz|calculat|verif)\w*|(double-?|let me )check|"
    r"(check|think|verify|try) again|go over the steps|made a mistake|\bwait\b",
    "verification": r"let('s| me| us) (check|verify|confirm|make sure|test)|double-?check\w*|to (verify|check|confirm)|"
    r"verif(y|ying|ication)\b|which (matches|is (too|not (equal|right|correct)))|does(n't| not) (equal|match)|"
    r"\bcheck(ing)?:|substitut\w+ .{0,40}back",
    "backtracking": r"\bwait\b|(that|this) (does ?n[o']t|didn't|won't) work|start over|"
    r"try (again|another|a different|something else)|(go|going|step) back|(another|a different) (approach|way|method)|"
    r"\binstead\b.{0,30}\b(try|use)|i made a mistake|that('s| is) (wrong|not right|incorrect)|\bactually,",
    "subgoals": r"\bstep \d|\bfirst(ly)?,? (we|i|let|find|step)|next,? (we|i|let|find)|(sub-?goal|sub-?problem)s?\b|"
    r"break (it|this|the problem) (down|into)|let('s| me| us) (first|start by)|in order to .{2,60}, (we|i) need",
    "backward": r"work(ing)? backwards?|start(ing)? (from|with) the (answer|end|target|goal|result)|in reverse|"
    r"(to|and) (get|reach|obtain|make) \S+, (we|i|you)('d| would)? need|what (would|do) (we|i) need to (get|reach)",
}
RULES = {name: re.compile(rule, re.IGNORECASE) for name, rule in _RULES.items()}
COLUMNS = ("accuracy", "pass@", "format", "truncated", *RULES, "length/correct", "length/wrong")


def measured(samples: Sequence[Sample]) -> dict[str, float]:
    """`evals.summary`; shares of the responses: with an answer that was parsed (format), in which each of RULES finds
    something; and the accuracy with words of self-reflection and without them, NaN where there is no such response.
    """
    correct = np.array([s.correct for s in samples])
    said = {name: np.array([bool(rule.search(s.text)) for s in samples]) for name, rule in RULES.items()}
    mean = lambda x: float(x.mean()) if len(x) else float("nan")
    row = evals.summary(samples) | {"format": mean(np.array([s.parsed is not None for s in samples]))}
    row |= {name: mean(found) for name, found in said.items()}
    by = {"with": said["reflection"], "without": ~said["reflection"]}
    return row | {f"accuracy/{name}": mean(correct[where]) for name, where in by.items()}


def table(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines of a table: what was measured below, settings side by side."""
    names = [n for n in dict.fromkeys(n for row in rows.values() for n in row) if n.startswith(COLUMNS)]
    width = max(12, *(len(setting) + 2 for setting in rows))
    lines = [f"{'':<16}" + "".join(f"{setting:>{width}}" for setting in rows)]
    for name in names:
        cells = [row.get(name, float("nan")) for row in rows.values()]
        number = "{:.1f}".format if name.startswith("length") else "{:.4f}".format
        shown = ["-" if np.isnan(x) else number(x) for x in cells]
        lines.append(f"{name:<16}" + "".join(f"{x:>{width}}" for x in shown))
    return lines


def picture(rows: Mapping[str, Mapping[str, float]], path: Path, title: str, subtitle: str) -> None:
    """Draw two panels (1200×700 pixels), a setting a row: how good the answers are, and what the responses do."""
    most = max((n for row in rows.values() for n in row if n.startswith("pass@")), key=lambda n: int(n[5:]), default="")
    figure = curves.canvas(title, subtitle)
    grid = figure.add_gridspec(1, 2, left=0.13, right=0.98, top=0.8, bottom=0.08, wspace=0.12)
    panels = ("Answers", ("format", "accuracy", *[most] * bool(most))), ("", tuple(RULES))
    for i, (name, metrics) in enumerate(panels):
        ax = figure.add_subplot(grid[i])
        curves.panel(ax, name, "")
        for metric, color in zip(
            metrics, (curves.BLUE, curves.ORANGE, curves.GREEN, curves.RED, curves.INK), strict=False
        ):
            x = [row.get(metric, np.nan) for row in rows.values()]
            ax.plot(x, range(len(rows)), "o", color=color, markersize=8, label=metric, clip_on=False)
        ax.set_xlim(0, 1)
        ax.xaxis.set_major_locator(curves.MaxNLocator(5))
        ax.xaxis.set_major_formatter("{x:.0%}")
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_yticks(range(len(rows)), list(rows) if i == 0 else [""] * len(rows))
        curves.legend(ax, columns=5)
    curves.save(figure, path)
