"""The commands that measure a policy: eval, gap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxrl_llm.cli.shared import File, load, use_devices


def evaluate(run: File, problems: int = 512, samples: int = 1) -> None:
    """Measure a run's newest checkpoint: held-out avg@k, pass@k.

    Args:
        run: the run's folder.
        problems: held-out problems to answer.
        samples: answers per problem (k).
    """
    use_devices(load(run))
    import jax

    from jaxrl_llm import config as configs
    from jaxrl_llm.run import trainer

    learner, engine, step = trainer.load_policy(run)
    chosen = replace(learner.config.evaluation, problems=problems, samples=samples)
    learner = replace(learner, config=configs.validate(replace(learner.config, evaluation=chosen)))
    with jax.set_mesh(learner.mesh):
        row = trainer.evaluate_policy(learner, engine)
    print(f"{run} at step {step}, {min(problems, len(learner.task.test))} problems × {samples} samples")
    for name, value in row.items():
        print(f"  {name.removeprefix('eval/'):<12} {value:.4f}")


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
