"""Evaluations for a person: the numbers of a suite with their intervals and baselines, and of two policies on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.run import evals, measures
from jaxrl_llm.run.evals import Sample
from jaxrl_llm.types import expect


def numbers(samples: Sequence[Sample], constant: Sequence[bool] = ()) -> list[str]:
    """A line a metric, with its 95 % interval over problems; then accuracies by source and level.

    constant: by problem, whether the best constant answer is right; its share stands beside each accuracy.
    """
    solved = (
        {s.problem: c for s, c in zip(samples[:: len(samples) // len(constant)], constant, strict=True)}
        if constant
        else {}
    )
    lines = [f"  {name:<14} {_mean(values)}" for name, values in evals.by_problem(samples).items()]
    lines.append(f"  {'constant':<14} {_constant(samples, solved)}")
    tokens = {n: v for n, v in evals.summary(samples).items() if n.startswith(("length", "truncated"))}
    lines += [f"  {name:<14} {'-' if np.isnan(value) else f'{value:.4f}'}" for name, value in tokens.items()]
    for name in ("source", "level"):
        groups = evals.grouped(samples, name)
        for value, of in groups.items() if len(groups) > 1 else ():
            values = evals.by_problem(of)
            majority = [f"{m} {values[m].mean():.4f}" for m in list(values)[-1:] if m.startswith("maj")]
            beside = [*majority, f"constant {_constant(of, solved)}", f"{len(values['accuracy'])} problems"]
            lines.append(f"  {f'{name} {value}':<14} {_mean(values['accuracy'])}  {', '.join(beside)}")
    return lines


def _mean(values: np.ndarray) -> str:
    low, high = measures.interval(values)
    return f"{values.mean():.4f}  [{low:.4f}, {high:.4f}]"


def _constant(samples: Sequence[Sample], solved: dict[int, bool]) -> str:
    return f"{np.mean([solved[s.problem] for s in samples]):.4f}" if solved else "-"


def compared(name: str, a: Sequence[Sample], b: Sequence[Sample]) -> str:
    """B's accuracy against A's, on the questions that both have answered. ValueError if there is none."""
    first, second = map(_by_question, (a, b))
    both = [question for question in first if question in second]
    expect(both, name, "no question that both have answered", "samples of the same suite")
    x, y = (np.array([of[question] for question in both]) for of in (first, second))
    t = measures.paired(x, y, single={s.number for s in (*a, *b)} == {0})
    exact = "" if t.mcnemar is None else f", McNemar's {t.mcnemar:.2g}"
    change = f"{t.a:.4f} → {t.b:.4f}, {t.b - t.a:+.4f} [{t.low:+.4f}, {t.high:+.4f}]"
    rest = f", {len(first) + len(second) - 2 * len(both)} of one alone" if len({*first} ^ {*second}) else ""
    return f"{name}: {change}, p {t.p:.2g}{exact}; {t.problems} problems{rest}, {t.better} better, {t.worse} worse"


def _by_question(samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """Accuracy by question, and by how often it has come before: the same in every template."""
    seen: Counter = Counter()
    right: dict[int, list[bool]] = {}
    names: dict[int, tuple[str, int]] = {}
    for s in samples:
        if s.problem not in names:
            question = s.question or s.prompt
            names[s.problem], seen[question] = (question, seen[question]), seen[question] + 1
        right.setdefault(s.problem, []).append(s.correct)
    return {names[problem]: float(np.mean(verdicts)) for problem, verdicts in right.items()}
