"""A run in one picture: curves.png from metrics.jsonl."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

# One colour, one meaning: blue is the training batch, orange held-out problems and extremes, green and red are
# correct and wrong.
INK, MUTED, RULE = "#1b2430", "#6b7686", "#e6e9ee"
BLUE, ORANGE, DARK_ORANGE, GREEN, RED = "#2f6bd8", "#e8820c", "#b96200", "#2a9d6a", "#d0475a"
WIDTH, HEIGHT, DPI = 1200, 700, 100  # pixels

Rows = list[dict[str, Any]]  # of metrics.jsonl
Curve = tuple[np.ndarray, np.ndarray]  # steps [N], values [N] with NaN where undefined


def _read(path: Path) -> Rows:
    """The lines of a log by step; of a run still writing, the half line at the end is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return sorted(rows, key=lambda row: row["step"])


def _curve(rows: Rows, name: str) -> Curve:
    """Steps and values of the rows that have the metric; null is NaN."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return tuple(np.array(found, np.float64).reshape(-1, 2).T)


def _finite(rows: Rows, name: str) -> Curve:
    steps, values = _curve(rows, name)
    return steps[np.isfinite(values)], values[np.isfinite(values)]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred Gaussian window of about a fortieth of the run; undefined values have no weight.

    It bridges a few undefined values, and stays undefined where four fifths of the window are.
    """
    sigma = len(values) / 80
    if sigma < 0.5:
        return values
    reach = int(np.ceil(3 * sigma))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    defined = np.isfinite(values)
    # mode="same" would return the kernel's length where that is the longer one.
    window = lambda x: np.convolve(x, kernel)[reach : reach + len(x)]
    weight = window(defined.astype(np.float64))
    total = window(np.where(defined, values, 0.0))
    return np.where(defined | (weight > 0.2 * kernel.sum()), total / np.maximum(weight, 1e-12), np.nan)


def panel(ax: Axes, title: str, unit: str) -> None:
    """An empty panel with whole numbers on its x axis, and its title on the left."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    ax.set_ylabel(unit, fontsize=9, color=MUTED)
    ax.grid(axis="y", color=RULE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#b8c0cc")
    ax.tick_params(labelsize=9, labelcolor=MUTED, color="#b8c0cc", length=0, which="both")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_label_coords(-0.15, 0.5)


def _plot(ax: Axes, rows: Rows, title: str, unit: str, curves: dict[str, tuple[str, str]]) -> np.ndarray:
    """A panel of metric → (label, colour), each smoothed over its faint values. Returns the finite values drawn.

    The y axis begins at 0 unless some value is negative.
    """
    panel(ax, title, unit)
    drawn = [np.zeros(0)]
    for name, (label, color) in curves.items():
        steps, values = _curve(rows, name)
        finite = np.isfinite(values)
        drawn.append(values[finite])
        if not finite.any():
            continue
        smooth = _smooth(values)
        if smooth is not values:
            faint = 0.22 if len(values) < 2000 else 0.12
            ax.plot(steps, values, color=color, alpha=faint, linewidth=0.8, zorder=1.9)  # below every smoothed curve
        few = finite.sum() <= 25  # a single value between undefined ones draws no line
        ax.plot(steps, smooth, color=color, linewidth=1.8, label=label, solid_capstyle="round",
            marker="o" if few else None, markersize=3.5)  # fmt: skip
    finite = np.concatenate(drawn)
    if len(finite) and finite.min() >= 0:
        ax.set_ylim(0, max(float(finite.max()) * 1.08, 1e-3))
    return finite


def legend(ax: Axes, columns: int = 3) -> None:
    """Names in their curves' colours, on the title's line."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower right", bbox_to_anchor=(1.02, 1.0), ncols=columns, borderaxespad=0.3, frameon=False,
            fontsize=9, labelcolor="linecolor", handlelength=0.9, handletextpad=0.4, columnspacing=0.9)  # fmt: skip


def _percent(y: float, _: int) -> str:
    return f"{100 * y:.3g}%"


def _held_out(ax: Axes, rows: Rows) -> np.ndarray:
    """Markers at the evaluations, the first and the last with their value. Returns the values drawn."""
    steps, values = _finite(rows, "eval/accuracy")
    if not len(values):
        return values
    size = float(np.clip(120 / len(values), 3, 6))
    ax.plot(steps, values, color=ORANGE, linewidth=1.2, marker="o", markersize=size, markeredgecolor="white",
            markeredgewidth=0.7, label="held-out", zorder=4)  # fmt: skip
    train_steps, train = _curve(rows, "accuracy")
    for i in sorted({0, len(values) - 1}):
        nearby = train[np.argsort(np.abs(train_steps - steps[i]))[:5]]
        # On the side of the point where the training curve is not, but never down on the axis.
        below = np.nanmean([values[i], *nearby]) > values[i] > 0.2 * ax.dataLim.y1
        ax.annotate(f"{values[i]:.1%}", (steps[i], values[i]), xytext=(0, -16 if below else 8), zorder=5,
            textcoords="offset points", ha="right" if i else "left", fontsize=10, fontweight="bold",
            color=DARK_ORANGE, path_effects=[withStroke(linewidth=3, foreground="white")])  # fmt: skip
    return values


def log_axis(ax: Axes, values: np.ndarray, name: Literal["x", "y"]) -> None:
    """A log axis for values ≥ 0. If some are 0, so is its lower end, below the smallest decade."""
    bounds, scale = (ax.set_xlim, ax.set_xscale) if name == "x" else (ax.set_ylim, ax.set_yscale)
    axis, positive = ax.xaxis if name == "x" else ax.yaxis, values[values > 0]
    if not len(positive):
        bounds(-0.05, 1)
        axis.set_ticks([0])
        return
    low, high = 10.0 ** np.floor(np.log10(positive.min())), 10.0 ** np.ceil(np.log10(positive.max() * 1.05))
    decades = np.arange(np.log10(low), np.log10(high) + 0.5)
    ticks = 10.0 ** decades[:: int(np.ceil(len(decades) / 6))]
    if len(positive) < len(values):
        scale("symlog", linthresh=low, linscale=0.6)
        bounds(-0.1 * low, high)
        ticks = [0.0, *ticks]
    else:
        scale("log")
        bounds(low, high)
    axis.set_ticks(ticks)
    axis.set_minor_locator(NullLocator())


def _accuracy(ax: Axes, rows: Rows) -> None:
    values = _plot(ax, rows, "Accuracy", "correct answers", {"accuracy": ("train", BLUE)})
    values = np.concatenate([values, _held_out(ax, rows)])
    if len(values):  # room above the curve for the annotations, but no ticks above 100%
        top = max(float(values.max()) * 1.18, 0.02)
        ax.set_ylim(0, top)
        ax.set_yticks([t for t in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, top) if t <= min(1.0, top)])
        ax.yaxis.set_major_formatter(_percent)


def _gap(ax: Axes, rows: Rows) -> None:
    curves = {"gap/mean": ("mean", BLUE), "gap/max": ("max", ORANGE)}
    values = _plot(ax, rows, "Sampler–learner gap", "|Δ probability|", curves)
    if len(values):
        log_axis(ax, values, "y")
        if not values.any():
            ax.text(0.5, 0.5, "0 at every step", transform=ax.transAxes, ha="center", color=MUTED, fontsize=10)


def _norm(ax: Axes, rows: Rows) -> None:
    values = _plot(ax, rows, "Gradient norm", "L2", {"grad_norm": ("", BLUE)})
    ax.yaxis.set_major_locator(MaxNLocator(2))
    if len(values) and values.min() > 0 and values.max() > 30 * np.median(values):  # one spike would flatten the rest
        ax.set_yscale("log")
        ax.set_ylim(0.8 * values.min(), 1.3 * values.max())
        ax.yaxis.set_major_locator(LogLocator(numticks=4))
        ax.yaxis.set_minor_locator(NullLocator())


def _clipped(ax: Axes, rows: Rows) -> None:
    curves = {"clip/low": ("ratio too low", BLUE), "clip/high": ("too high", ORANGE)}
    values = _plot(ax, rows, "Clipped", "of tokens", curves)
    ax.set_ylim(0, max(float(values.max(initial=0)) * 1.08, 0.01))
    ax.yaxis.set_major_locator(MaxNLocator(2))
    ax.yaxis.set_major_formatter(_percent)


def _subtitle(rows: Rows) -> str:
    facts = [f"{rows[-1]['step']:,} step{'s' * (rows[-1]['step'] != 1)}"] if rows else ["no steps yet"]
    seconds = np.nansum(_curve(rows, "perf/step_s")[1])
    if seconds:
        minutes = round(seconds / 60)
        short = f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min"
        facts.append(f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else short)
    held_out = _finite(rows, "eval/accuracy")[1]
    if len(held_out) > 1:
        facts.append(f"held-out accuracy {held_out[0]:.1%} → {held_out[-1]:.1%}")
    return "   ·   ".join(facts)


def canvas(title: str, subtitle: str) -> Figure:
    """A picture of 1200×700 pixels with nothing but its heading."""
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
    figure.text(0.06, 0.94, title, fontsize=17, fontweight="bold", color=INK)
    figure.text(0.06, 0.903, subtitle, fontsize=10.5, color=MUTED)
    return figure


def save(figure: Figure, path: Path) -> None:
    """The picture as a PNG, the same bytes for the same picture; a viewer never finds half of it."""
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
    os.replace(temporary, path)


def draw(out: Path, title: str = "") -> Path:
    """Draw out/curves.png (1200×700 pixels) from out/metrics.jsonl and return its path.

    Accuracy, reward, response length, entropy, the sampler–learner gap, gradient norm and clipping over the steps;
    a metric that is not in the log leaves its panel empty. `title` is the folder's name if not given.
    Raises FileNotFoundError when there is no log.
    """
    out = Path(out)
    rows = _read(out / "metrics.jsonl")
    figure = canvas(title or out.resolve().name, _subtitle(rows))
    grid = figure.add_gridspec(2, 3, left=0.06, right=0.98, top=0.835, bottom=0.075, wspace=0.27, hspace=0.36)
    split = grid[1, 2].subgridspec(2, 1, hspace=0.75)
    first, second, third, fourth, fifth = (figure.add_subplot(grid[i // 3, i % 3]) for i in range(5))
    norm, clip = (figure.add_subplot(split[i]) for i in range(2))
    _accuracy(first, rows)
    _plot(second, rows, "Reward", "mean per response", {"reward/mean": ("", BLUE)})
    lengths = {"correct": GREEN, "wrong": RED, "mean": BLUE}
    _plot(third, rows, "Length", "tokens per response", {f"length/{k}": (k, color) for k, color in lengths.items()})
    _plot(fourth, rows, "Entropy", "nats per token", {"entropy": ("", BLUE)})
    _gap(fifth, rows)
    _norm(norm, rows)
    _clipped(clip, rows)
    steps = [row["step"] for row in rows] or [0]
    margin = 0.02 * (steps[-1] - steps[0]) or 0.5
    for ax in figure.axes:
        ax.set_xlim(steps[0] - margin, steps[-1] + margin)
        legend(ax)
        if not ax.lines:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", color="#a3acb9",
                fontsize=10)  # fmt: skip
            ax.set_ylabel("")
            ax.yaxis.set_major_locator(NullLocator())
    norm.tick_params(labelbottom=False)
    for ax in (fourth, fifth, clip):
        ax.set_xlabel("step", fontsize=9, color=MUTED)
    save(figure, out / "curves.png")
    return out / "curves.png"
