"""Benchmarks by name, as tasks that are evaluated on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl_llm.config import Config, Suite
from jaxrl_llm.data import datasets
from jaxrl_llm.types import Prompt, Reward, Task, expect, nearest

SUITES = {"math": ("gsm8k", "math500", "aime24", "aime25", "amc", "minerva", "olympiadbench")}


def benchmark(name: Path | str) -> Task:
    """The problems of a recipe (`data.recipes`), or of a JSONL file, judged by `rewards.answers` in workers.

    They are both sides of the task. Raises ValueError for an unknown name, for a recipe that is not prepared, and, with
    file and line, for a gold that cannot be verified.
    """
    from jaxrl_llm.data import recipes
    from jaxrl_llm.rewards import answers

    if str(name).endswith(".jsonl"):
        prompts = datasets.read_jsonl(name, answers.check_gold)
    elif name in recipes.RECIPES:
        prompts = recipes.load(name)
    else:
        hint = nearest(str(name), [*SUITES, *recipes.RECIPES])
        raise ValueError(f"suite {str(name)!r}: no such benchmark, and no .jsonl file; {hint}")
    expect(prompts, f"suite {name}", "empty", "at least one problem")
    return Task(prompts, prompts, judge())


def judge() -> Callable[[Prompt, str, str], Reward]:
    """What judges the answers to benchmarks."""
    from jaxrl_llm.rewards import answers, workers

    return workers.isolated(answers.reward)


def chosen(names: Sequence[str], config: Config | None = None) -> dict[str, Suite]:
    """Suites by name: of the config's own, those that a collection in SUITES stands for, recipes, JSONL files.

    Of a collection the benchmarks that cannot be read are told on stderr and left out. ValueError when none is left.
    """
    found, skipped = {}, []
    for name in names:
        if config is not None and name in config.evaluation.suites:
            found[name] = config.evaluation.suites[name]
            continue
        for part in SUITES.get(name, (name,)):
            try:
                task = benchmark(part)
            except ValueError as error:
                if name not in SUITES:
                    raise
                skipped.append(f"{part}: {error}")
            else:
                stem = Path(part).stem
                expect(stem not in found, f"suite {part}", "a second suite of its name", f"another name than {stem!r}")
                found[stem] = Suite(lambda task=task: task, problems=len(task.test))
    for line in skipped:
        print(f"skipped {line}", file=sys.stderr)
    expect(found, "--suite", " ".join(names), f"at least one benchmark that can be read ({'; '.join(skipped)})")
    return found
