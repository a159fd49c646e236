"""Sampler-learner gaps for a person: tables on the terminal, and gap.png."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl_llm.reports import curves
from jaxrl_llm.reports.gap import Gap

COLORS = (curves.BLUE, curves.GREEN, curves.ORANGE, curves.RED, curves.INK)  # of precisions
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # of meshes
COLUMNS = 100  # of the tables where there is no terminal


def styles(gaps: Sequence[Gap]) -> list[dict[str, Any]]:
    """Colour and dashes of each sampler: one colour a precision, one kind of line a mesh."""
    precisions = list(dict.fromkeys(g.sampler for g in gaps))
    meshes = list(dict.fromkeys(g.mesh for g in gaps))
    return [{"color": COLORS[precisions.index(g.sampler)], "linestyle": DASHES[meshes.index(g.mesh)]} for g in gaps]


def picture(gaps: Sequence[Gap], path: Path, title: str, subtitle: str) -> None:
    """Draw the gaps (1200×700 pixels): mean and max of each sampler, and the mean by position in the answer."""
    figure = curves.canvas(title, subtitle)
    grid = figure.add_gridspec(1, 2, left=0.16, right=0.98, top=0.8, bottom=0.1, wspace=0.24)
    left, right = (figure.add_subplot(grid[i]) for i in range(2))
    _samplers(left, gaps)
    _positions(right, gaps)
    curves.save(figure, path)


def _samplers(ax: Axes, gaps: Sequence[Gap]) -> None:
    curves.panel(ax, "By sampler", "")
    for y, (gap, style) in enumerate(zip(gaps, styles(gaps), strict=True)):
        ends = gap.whole.mean, gap.whole.max
        ax.plot(ends, (y, y), **style, linewidth=1.8, zorder=3)
        for x, marker in zip(ends, "oD", strict=True):
            ax.plot(x, y, marker, color=style["color"], markersize=7, markeredgecolor="white", zorder=4, clip_on=False)
            ax.annotate(_number(x), (x, y), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=9,
                color=style["color"])  # fmt: skip
    curves.log_axis(ax, np.array([x for g in gaps for x in (g.whole.mean, g.whole.max)]), "x")
    ax.set_ylim(len(gaps) - 0.5, -0.5)
    ax.set_yticks(range(len(gaps)), [f"{g.sampler}\n{g.mesh}" for g in gaps])
    ax.tick_params(axis="y", labelcolor=curves.INK, pad=26)  # beside a value at the edge
    ax.yaxis.set_minor_locator(NullLocator())
    ax.grid(axis="x", color=curves.RULE, linewidth=0.8)
    ax.set_xlabel("|Δ probability|", fontsize=9, color=curves.MUTED)
    mark = lambda marker, label: Line2D([], [], color=curves.MUTED, marker=marker, linestyle="", label=label)
    marks = [mark("o", "mean"), mark("D", "max")]
    ax.legend(handles=marks, loc="lower right", bbox_to_anchor=(1.02, 1.0), ncols=2, frameon=False, fontsize=9,
        labelcolor=curves.MUTED, handletextpad=0.2, columnspacing=0.9)  # fmt: skip


def _positions(ax: Axes, gaps: Sequence[Gap]) -> None:
    """The legend names the precisions; the line's dashes are those of the sampler's row in the other panel."""
    curves.panel(ax, "By position", "mean |Δ probability|")
    first = {g.sampler: g for g in reversed(gaps)}
    for gap, style in zip(gaps, styles(gaps), strict=True):
        x, y = zip(*(((s.first + s.last) / 2, s.stats.mean) for s in gap.by_position), strict=True)
        label = gap.sampler if gap is first[gap.sampler] else ""
        ax.plot(x, y, **style, linewidth=1.8, marker="o", markersize=3.5, label=label, solid_capstyle="round")
    curves.log_axis(ax, np.array([s.stats.mean for g in gaps for s in g.by_position]), "y")
    ax.set_xlabel("tokens of the answer before it", fontsize=9, color=curves.MUTED)
    curves.legend(ax, columns=len(COLORS))


def tables(gaps: Sequence[Gap], worst: int) -> None:
    """Print the samplers' gaps; those of the first sampler's mesh by length, and their `worst` tokens."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = COLUMNS
    first = [g for g in gaps if g.mesh == gaps[0].mesh]
    console.print(_by_sampler(gaps), _by_length(first), *([_worst(first, worst)] if worst else []), sep="\n")


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table whose first `left` columns are text and whose others are numbers."""
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(columns):
        out.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return out


def _by_sampler(gaps: Sequence[Gap]) -> Table:
    table = _table("|Δ probability| by sampler", "sampler", "mesh", "tokens", "mean", "max", "> 0.01", "> 0.1",
        "|Δ log p|", "k3", "ESS", left=2)  # fmt: skip
    for gap in gaps:
        s = gap.whole
        shares = f"{s.above_1:.2%}", f"{s.above_10:.2%}"
        numbers = _number(s.mean), _number(s.max), *shares, _number(s.mean_log), _number(s.k3), f"{s.ess:.4f}"
        table.add_row(gap.sampler, gap.mesh, f"{s.tokens:,}", *numbers)
    return table


def _by_length(gaps: Sequence[Gap]) -> Table:
    """A dash stands where a sampler has no answer of such a length."""
    table = _table(f"mean/max by length of the answer, mesh {gaps[0].mesh}", "tokens", *(g.sampler for g in gaps))
    cells = [{(s.first, s.last): f"{_number(s.stats.mean)}/{_number(s.stats.max)}" for s in g.by_length} for g in gaps]
    for first, last in sorted(set().union(*cells)):
        table.add_row(f"{first}–{last}", *(c.get((first, last), "–") for c in cells))
    return table


def _worst(gaps: Sequence[Gap], n: int) -> Table:
    """Of a long prompt the beginning is shown, of a long context the end."""
    table = _table(f"worst tokens, mesh {gaps[0].mesh}", "sampler", "prompt", "context", "token", "at", "p sampler",
        "p learner", "|Δp|", left=4)  # fmt: skip
    every = ((g.sampler, token) for g in gaps for token in g.worst)
    for sampler, t in heapq.nlargest(n, every, key=lambda row: row[1].gap):
        prompt, context, token = (repr(text)[1:-1] for text in (t.prompt, t.context, t.token))
        prompt = prompt if len(prompt) <= 16 else f"{prompt[:15]}…"
        context = context if len(context) <= 20 else f"…{context[-19:]}"
        numbers = f"{t.sampler_p:.4f}", f"{t.learner_p:.4f}", _number(t.gap)
        table.add_row(sampler, prompt, context, token[:8], str(t.position), *numbers)
    return table


def _number(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"
