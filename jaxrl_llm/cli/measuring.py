"""The commands that measure a policy: eval, compare, analyse, gap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.cli.shared import File, load, use_devices
from jaxrl_llm.types import expect, nearest

if TYPE_CHECKING:  # importing them takes a second
    from jaxrl_llm.config import Suite
    from jaxrl_llm.learner.learner import Learner
    from jaxrl_llm.run.evals import Asked, Sample


def evaluate(
    run: File, suite: tuple[str, ...] = (), problems: int | None = None, samples: int | None = None,
    temperature: float | None = None, top_p: float | None = None, max_tokens: int | None = None, template: str = "",
    rescore: bool = False, reward: str = "", out: Path | None = None,
) -> None:  # fmt: skip
    """Measure a policy: avg@k, pass@k, maj@k, with intervals.

    The samples are written into --out as they come; the same command goes on with them after a kill.

    Args:
        run: a run's folder, for its newest checkpoint, or a checkpoint in Hugging Face format.
        suite: benchmarks (math: all of mathematics), suites of the run's config, JSONL files; else held-out problems.
        problems: how many; 512 held-out ones, all of a benchmark if left out.
        samples: answers per problem (k); 1, or what the suite says.
        temperature: of the samples; as in training if left out. 0: greedy.
        top_p: of the samples; as in training if left out.
        max_tokens: of an answer; as in training if left out.
        template: around the questions, by name (r1, qwen_math, …); the run's own if left out.
        rescore: judge the samples of an earlier evaluation again, which draws none; RUN may be one file of them.
        reward: of --rescore, as module:function or file.py:function (prompt, text, finish) -> Reward.
        out: folder of the samples; evals in the run's folder if left out.
    """
    if rescore:
        return _rescore(run, suite, reward, out)
    expect(not reward, "--reward", reward, "'' without --rescore")
    given = {"problems": problems, "samples": samples, "temperature": temperature, "top_p": top_p}
    given = {n: v for n, v in (given | {"max_tokens": max_tokens}).items() if v is not None}
    policy = _policy(run, suite, max_tokens)
    from jaxrl_llm.reports import evaluation

    for name, chosen in _suites(policy, suite, given).items():
        asked, found = _sampled(policy, name, chosen, template, out or policy.folder / "evals")
        what = f"{run} at step {policy.step}, {f'{name}, ' if suite else ''}{len(asked.prompts)} problems"
        print(f"{what} × {asked.suite.samples} samples", *evaluation.numbers(found, asked.constant), sep="\n")


class Policy(NamedTuple):
    """What is measured: a run's newest checkpoint, or one in Hugging Face format."""

    name: str
    learner: Learner
    engine: Any
    step: int
    folder: Path  # for files


def _policy(source: Path, suites: tuple[str, ...], tokens: int | None) -> Policy:
    name = source.resolve().name
    if not any(source.glob("*.safetensors*")):
        use_devices(load(source))
        from jaxrl_llm.run import trainer

        return Policy(name, *trainer.load_policy(source), source)
    expect(suites, "--suite", suites, "at least one, for a checkpoint in Hugging Face format")
    use_devices()
    from jaxrl_llm.run import tryout

    return Policy(name, *tryout.policy(str(source), tokens or 1024, slots=64)[:2], 0, Path("runs") / name)


def _suites(policy: Policy, names: tuple[str, ...], given: dict[str, Any]) -> Mapping[str, Suite]:
    """Those of the names, or else the run's held-out problems as one, with the settings that are given."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.run import suites

    c = policy.learner.config
    found = suites.chosen(names, c) if names else {"held-out": configs.Suite(c.task)}
    asked = replace(c.evaluation, suites={name: replace(suite, **given) for name, suite in found.items()})
    return configs.validate(replace(c, evaluation=asked)).evaluation.suites


def _sampled(policy: Policy, name: str, suite: Suite, template: str, out: Path) -> tuple[Asked, list[Sample]]:
    """The suite in a template (a name; "": the run's own), and its samples, which go into a file in `out`."""
    import jax

    from jaxrl_llm.data import templates
    from jaxrl_llm.run import evals

    known, learner, c = templates.TEMPLATES, policy.learner, policy.learner.config
    expect(not template or template in known, "--template", template, nearest(template, list(known)))
    around = known[template] if template else c.algorithm.prompts.template
    asked = evals.opened(name, suite, around, learner.tokenizer, c)
    drawn = {n: getattr(suite, n) for n in ("samples", "temperature", "top_p", "max_tokens")}
    settings = {"suite": name, "policy": policy.name, "step": policy.step, "template": template, "seed": c.seed}
    marks = [f"{n}{v}" for n, v in zip("ntpm", drawn.values(), strict=True) if v or v == 0.0 and n == "t"]
    stem = "-".join([name, f"step{policy.step}", *marks, *[template] * bool(template)])
    stop = templates.STOPS.get(template, ()) if template else None
    with jax.set_mesh(learner.mesh):
        asked = replace(asked, stop=stop, settings=settings | drawn)
        return asked, evals.sample(policy.engine, asked, c.seed, out / f"{stem}.jsonl")


def analyse(
    run: File, suite: tuple[str, ...] = (), templates: tuple[str, ...] = ("none", "r1", "qwen_math"),
    temperatures: tuple[float, ...] = (0.6, 1.0), problems: int = 64, samples: int = 8,
    max_tokens: int | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Show how a policy answers, by template and temperature.

    How many answers have the form that is read, pass@k, words of self-reflection and the accuracy with and without
    them, four cognitive behaviours by rules, lengths of right and wrong answers: a table, analysis.json, analysis.png.

    Args:
        run: a run's folder, for its newest checkpoint, or a checkpoint in Hugging Face format.
        suite: benchmarks, suites of the run's config or JSONL files; the run's held-out problems if left out.
        templates: around the questions, by name.
        temperatures: of the samples.
        problems: of each suite, the first ones.
        samples: answers per problem (k).
        max_tokens: of an answer; as in training if left out.
        out: folder of the files; the run's if left out.
    """
    given = {"problems": problems, "samples": samples} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    policy, rows = _policy(run, suite, max_tokens), {}
    from jaxrl_llm.reports import analysis
    from jaxrl_llm.run import folder

    out = out or policy.folder
    for name, chosen in _suites(policy, suite, given).items():
        for template in templates:
            for t in temperatures:
                found = _sampled(policy, name, replace(chosen, temperature=t), template, out / "analysis")[1]
                rows[f"{f'{name} ' if suite else ''}{template} {t:g}"] = analysis.measured(found)
    what = f"step {policy.step}, {problems} problems × {samples} samples"
    print(f"{run} at {what}", *analysis.table(rows), sep="\n")
    plain = {setting: {n: None if v != v else v for n, v in row.items()} for setting, row in rows.items()}
    folder.write_whole(out / "analysis.json", json.dumps({"setting": what, "measured": plain}, indent=1) + "\n")
    analysis.picture(rows, out / "analysis.png", f"{policy.name}: how it answers", what)
    print(f"numbers: {out / 'analysis.json'}   picture: {out / 'analysis.png'}")


def _rescore(source: Path, names: tuple[str, ...], reward: str, out: Path | None) -> None:
    from jaxrl_llm.config import values
    from jaxrl_llm.reports import evaluation
    from jaxrl_llm.run import evals, suites

    run = source if source.is_dir() else source.resolve().parent.parent
    found = [(file, *evals.read(file)) for file in _files(source)]
    known = sorted({settings["suite"] for _, settings, _ in found})
    expect(not names or {*names} <= {*known}, "--suite", " ".join(names), f"of those answered: {', '.join(known)}")
    for file, settings, samples in found:
        name = settings["suite"]
        if names and name not in names:
            continue
        expect(samples, str(file), "without samples", "at least one problem with all its answers")
        own = load(run) if (run / "config.json").is_file() and not reward else None
        made = own and ({"held-out": own.task} | {n: s.task for n, s in own.evaluation.suites.items()}).get(name)
        judge = values.function(reward, None) if reward else made().reward if made else suites.judge()
        again = evals.rescored(samples, judge)
        changed = sum(x.correct != y.correct for x, y in zip(samples, again, strict=True))
        evals.write((out or file.parent) / file.name, settings, again)
        solved = evals.constant([evals.prompt_of(s) for s in again if s.number == 0], judge)
        print(
            f"{file.name}: {changed} of {len(again)} verdicts have changed",
            *evaluation.numbers(again, solved),
            sep="\n",
        )


def compare(a: File, b: File) -> None:
    """Compare two policies on what both have answered.

    The difference of accuracies with its 95 % interval, and p of a paired test: permutation over problems, and
    McNemar's where each was answered once.

    Args:
        a: samples of jaxrl eval, or a run's folder, for the newest ones of each suite.
        b: the same of the other policy.
    """
    from jaxrl_llm.reports import evaluation
    from jaxrl_llm.run import evals

    first, second = ({s["suite"]: of for s, of in map(evals.read, _files(x))} for x in (a, b))
    both = [name for name in first if name in second]
    expect(both, f"{a} and {b}", "of no suite in common", "samples of the same suite")
    for name in both:
        print(evaluation.compared(name, first[name], second[name]))


def _files(source: Path) -> list[Path]:
    """Of samples: the one that is named, or a run's, the newest last."""
    found = [source] if source.suffix == ".jsonl" else list((source / "evals").glob("*.jsonl"))
    expect(found, str(source), "without samples", "a file of samples, or a run that jaxrl eval has measured")
    return sorted(found, key=lambda file: file.stat().st_mtime if file.exists() else 0)


def gap(run: File, problems: int = 64, samples: int = 4, worst: int = 10, out: Path | None = None) -> None:
    """Measure how far samplers are from a run's newest checkpoint.

    Samplers of several precisions and meshes are compared.

    Args:
        run: the run's folder.
        problems: held-out problems to answer.
        samples: answers per problem.
        worst: tokens to show, those with the largest difference of probability.
        out: where gap.json and gap.png go; the run's folder if left out.
    """
    use_devices(load(run))
    from jaxrl_llm.reports import gap as gaps
    from jaxrl_llm.reports import gap_report
    from jaxrl_llm.run import metrics

    learner, params, step = gaps.load(run, problems, samples, worst)
    (out := out or run).mkdir(parents=True, exist_ok=True)
    variants, found = gaps.samplers(learner), []
    with metrics.Progress(len(variants), "sampling") as progress:
        for variant in variants:
            found.append(gaps.measure_gap(learner, params, variant, worst=worst))
            progress.advance()
    setting = f"step {step}, {min(problems, len(learner.task.test))} problems × {samples} samples"
    print(f"{run} at {setting}")
    gap_report.tables(found, worst)
    gap_report.picture(found, out / "gap.png", f"{run.resolve().name}: sampler-learner gap", setting)
    print(f"numbers: {gaps.write(found, out, learner, step)}   picture: {out / 'gap.png'}")
