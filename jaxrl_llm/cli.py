"""The command line: train, sft, eval, sample, serve, … Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from jaxrl_llm import config as configs

Set = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="path.to.field=value")]
File = tyro.conf.Positional[Path]


def train(
    experiment: File, set_: Set = (), algorithm: str | None = None, resume: bool = False, out: Path | None = None
) -> None:
    """Run an experiment file: prime a base policy, then reinforcement learning.

    Args:
        experiment: a Python file with CONFIG = Config(…).
        set_: override a field of CONFIG; may be given again.
        algorithm: a method by name (see `jaxrl algorithms`) in place of CONFIG's; --set applies to it.
        resume: go on from the newest checkpoint in --out, exactly.
        out: the run's folder; runs/<name of the experiment> if left out.
    """
    from jaxrl_llm.reports import curves
    from jaxrl_llm.run import folder, stopping, trainer

    config, out = configs.load(experiment, set_, algorithm), out or Path("runs") / experiment.stem
    _devices(config)
    try:
        trainer.train(config, out, resume=resume, source=experiment)
    except stopping.Stopped as stop:
        print(f"stopped; go on with: {folder.resume_command(experiment, out, set_, algorithm)}")
        sys.exit(stop.exit_code)
    except SystemExit as error:  # of a task, a loss, a filter: the run is not done
        raise RuntimeError(f"the experiment called sys.exit({error.code}) in the middle of the run") from error
    except OSError as error:
        if error.errno != errno.ENOSPC or "not written" in str(error):
            raise
        raise OSError(f"{error.filename or out}: not written, the disk is full") from error
    finally:  # also of a run that fails
        if (out / "metrics.jsonl").exists():
            try:
                curves.draw(out, title=out.name)
            except (OSError, ValueError) as error:  # a full disk must not hide what failed before
                print(f"{out / 'curves.png'} was not drawn: {error}", file=sys.stderr)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held_out = [r["eval/accuracy"] for r in rows if "eval/accuracy" in r]
    problems = min(config.evaluation.problems, len(config.task().test))
    print(f"held-out accuracy on {problems} problems: {held_out[0]:.1%} before, {held_out[-1]:.1%} after")
    print(f"curves: {out / 'curves.png'}   metrics: {out / 'metrics.jsonl'}   samples: {out / 'samples.jsonl'}")


def sft(experiment: File, set_: Set = (), algorithm: str | None = None, out: Path | None = None) -> None:
    """The supervised stage of an experiment alone: make its base policy, measure it, keep it.

    Args:
        experiment: a Python file with CONFIG = Config(…) and a `prime` stage.
        set_: override a field of CONFIG; may be given again.
        algorithm: a method by name (see `jaxrl algorithms`) in place of CONFIG's; --set applies to it.
        out: the run's folder; runs/<name of the experiment> if left out.
    """
    from jaxrl_llm.run import stopping, trainer

    config, out = configs.load(experiment, set_, algorithm), out or Path("runs") / experiment.stem
    if config.prime is None:
        raise ValueError("prime is None; expected a Prime(…) for jaxrl sft")
    _devices(config)
    try:
        row = trainer.prime_only(config, out, source=experiment)
    except stopping.Stopped as stop:
        print("stopped; the same command goes on from here")
        sys.exit(stop.exit_code)
    print(f"base policy in {out / 'base'}: held-out accuracy {row['eval/accuracy']:.1%}")


def evaluate(run: File, problems: int = 512, samples: int = 1) -> None:
    """Held-out accuracy of a run's newest checkpoint: avg@k, pass@k (unbiased), lengths.

    Args:
        run: the run's folder.
        problems: held-out problems to answer.
        samples: answers per problem (k).
    """
    import jax

    from jaxrl_llm.run import trainer

    learner, engine, step = trainer.load_policy(run)
    asked = replace(learner.config.evaluation, problems=problems, samples=samples)
    learner = replace(learner, config=configs.validate(replace(learner.config, evaluation=asked)))
    with jax.set_mesh(learner.mesh):
        row = trainer.evaluate_policy(learner, engine)
    print(f"{run} at step {step}, {min(problems, len(learner.task.test))} problems × {samples} samples")
    for name, value in row.items():
        print(f"  {name.removeprefix('eval/'):<12} {value:.4f}")


def sample(run: File, problem: tyro.conf.Positional[str], n: int = 1, seed: int = 0) -> None:
    """Answers of a run's newest checkpoint to a problem of yours.

    Args:
        run: the run's folder.
        problem: the prompt, as the policy shall see it.
        n: answers to draw.
        seed: other seeds draw other answers.
    """
    import jax

    from jaxrl_llm.run import trainer
    from jaxrl_llm.sampler import groups
    from jaxrl_llm.types import Prompt

    learner, engine, _ = trainer.load_policy(run)
    most = learner.config.rollout.max_prompt_tokens
    with jax.set_mesh(learner.mesh):
        answers = groups.sample_groups(engine, (Prompt(0, problem),), n, seed=seed, draws=[0], max_prompt_tokens=most)
    for text, finish in zip(answers.texts, answers.finish, strict=True):
        print(text if finish == "eos" else f"{text}  [{finish}]")


def serve(
    source: File,
    set_: Set = (),
    host: str = "127.0.0.1",
    port: int = 9000,
    cert: Path | None = None,
    key: Path | None = None,
    metrics_port: int | None = None,
    unwatched: bool = False,
) -> None:
    """A sampler for learners elsewhere (`--set 'rollout.servers=["host:port"]'`), and for JetStream's own clients.

    The token that callers must bring is $JAXRL_TOKEN; without one it listens on loopback alone.

    Args:
        source: an experiment file, whose learner will send weights, or a run's folder, for its newest checkpoint.
        set_: override a field of CONFIG; may be given again.
        host: address to listen on.
        port: port to listen on.
        cert: PEM file of its certificate, for TLS.
        key: PEM file of the certificate's key.
        metrics_port: of /metrics (Prometheus), /healthz and /readyz; none if left out.
        unwatched: serve in this process, which is not started again when it dies.
    """
    from jaxrl_llm.serving import process as serving

    listen = {"host": host, "port": port, "metrics_port": metrics_port}
    listen |= {"cert": cert and str(cert), "key": key and str(key)}
    if unwatched:
        serving.work(source, set_, **listen)
    else:
        sys.exit(serving.watch(source, set_, **listen))


def gap(run: File, problems: int = 64, samples: int = 4, worst: int = 10, out: Path | None = None) -> None:
    """How far samplers of several precisions and meshes are from the learner, at a run's newest checkpoint.

    Args:
        run: the run's folder.
        problems: held-out problems to answer.
        samples: answers per problem.
        worst: tokens to show, those with the largest difference of probability.
        out: where gap.json and gap.png go; the run's folder if left out.
    """
    from jaxrl_llm.reports import gap as gaps
    from jaxrl_llm.reports import gap_report
    from jaxrl_llm.run import metrics

    learner, params, step = gaps.load(run, problems, samples, worst)
    out = out or run
    out.mkdir(parents=True, exist_ok=True)
    variants, found = gaps.samplers(learner), []
    with metrics.Progress(len(variants), "sampling") as progress:
        for variant in variants:
            found.append(gaps.measure_gap(learner, params, variant, worst=worst))
            progress.advance()
    said = f"step {step}, {min(problems, len(learner.task.test))} problems × {samples} samples"
    print(f"{run} at {said}")
    gap_report.tables(found, worst)
    gap_report.picture(found, out / "gap.png", f"{run.resolve().name}: sampler-learner gap", said)
    print(f"numbers: {gaps.write(found, out, learner, step)}   picture: {out / 'gap.png'}")


def show(experiment: File, set_: Set = (), algorithm: str | None = None) -> None:
    """Print an experiment's whole config as JSON.

    Args:
        experiment: a Python file with CONFIG = Config(…), or a run's config.json.
        set_: override a field of CONFIG; may be given again.
        algorithm: a method by name (see `jaxrl algorithms`) in place of CONFIG's; --set applies to it.
    """
    print(json.dumps(configs.to_json(configs.load(experiment, set_, algorithm)), indent=1))


def algorithms(name: tyro.conf.Positional[str | None] = None) -> None:
    """Print the table of methods, or one of them in full: its fields, and what its functions compute.

    Args:
        name: a method of the table; all of them if left out.
    """
    from jaxrl_llm.reports import catalogue

    print(catalogue.table() if name is None else catalogue.describe(name, configs.named(name)))


def _devices(config: configs.Config) -> None:
    """Say what the run will use, and fail on a mesh that the machine cannot hold, before any work."""
    import jax

    from jaxrl_llm.parallel.sharding import make_mesh

    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    shape = "×".join(map(str, mesh.devices.shape))
    print(f"{jax.devices()[0].device_kind} × {mesh.size}, mesh {shape}, {config.model.n_params / 1e6:.2f} M parameters")


def main() -> None:
    """Entry point of `jaxrl`."""
    commands = {
        "train": train,
        "sft": sft,
        "eval": evaluate,
        "sample": sample,
        "gap": gap,
        "serve": serve,
        "show": show,
        "algorithms": algorithms,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="jaxrl", description=__doc__)
    except (ValueError, RuntimeError, OSError) as error:
        if "JAXRL_TRACEBACK" in os.environ:
            raise
        print(f"jaxrl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # the second Ctrl-C; the first one is waited for
        sys.exit(130)


if __name__ == "__main__":
    main()
