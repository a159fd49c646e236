"""The command line: train, sft, eval, sample, serve, … Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxrl_llm import __version__

if TYPE_CHECKING:  # importing it takes a second; what the command line itself gets wrong should not wait for it
    from jaxrl_llm.config import Config

_changes = tyro.conf.arg(name="set", metavar="path.to.field=value", help="override a field of CONFIG; may be repeated.")
Set = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], _changes]
_method = tyro.conf.arg(help="a method by name (see `jaxrl algorithms`) in place of CONFIG's; --set applies to it.")
Method = Annotated[str | None, _method]
Out = Annotated[str | None, tyro.conf.arg(help="the run's folder; runs/<name of the experiment> if left out.")]
File = tyro.conf.Positional[Path]


def train(experiment: File, set_: Set = (), algorithm: Method = None, resume: bool = False, out: Out = None) -> None:
    """Run an experiment: a base policy, then reinforcement learning.

    Args:
        experiment: a Python file with CONFIG = Config(…).
        resume: go on from the newest checkpoint in --out; exactly, but for rollout.mode=async.
    """
    config, folder = _load(experiment, set_, algorithm), _folder(out, experiment)
    use_devices(config, whole_mesh=True)
    from jaxrl_llm.reports import curves
    from jaxrl_llm.run import folder as folders
    from jaxrl_llm.run import stopping, trainer

    try:
        trainer.train(config, folder, resume=resume, source=experiment)
    except stopping.Stopped as stop:
        print(f"stopped; go on with: {folders.resume_command(experiment, folder, set_, algorithm)}")
        sys.exit(stop.exit_code)
    except SystemExit as error:  # of a task, a loss, a filter: the run is not done
        raise RuntimeError(f"the experiment called sys.exit({error.code}) in the middle of the run") from error
    except OSError as error:
        if error.errno != errno.ENOSPC or "not written" in str(error):
            raise
        raise OSError(f"{error.filename or folder}: not written, the disk is full") from error
    finally:  # also of a run that fails
        log = folder / "metrics.jsonl"
        try:
            if log.exists():
                curves.draw(folder, title=folder.name)
        except (OSError, ValueError) as error:  # a full disk must not hide what failed before
            print(f"{folder / 'curves.png'} was not drawn: {error}", file=sys.stderr)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    held_out = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    problems = min(config.evaluation.problems, len(config.task().test))
    print(f"held-out accuracy on {problems} problems: {held_out[0]:.1%} before, {held_out[-1]:.1%} after")
    print(f"curves: {folder / 'curves.png'}   metrics: {log}   samples: {folder / 'samples.jsonl'}")


def sft(experiment: File, set_: Set = (), algorithm: Method = None, out: Out = None) -> None:
    """Make an experiment's base policy alone, measure it, keep it.

    Args:
        experiment: a Python file with CONFIG = Config(…) and a `prime` stage.
    """
    config, folder = _load(experiment, set_, algorithm), _folder(out, experiment)
    if config.prime is None:
        raise ValueError("prime is None; expected a Prime(…) for jaxrl sft")
    use_devices(config, whole_mesh=True)
    from jaxrl_llm.run import stopping, trainer

    try:
        row = trainer.prime_only(config, folder, source=experiment)
    except stopping.Stopped as stop:
        print("stopped; the same command goes on from here")
        sys.exit(stop.exit_code)
    print(f"base policy in {folder / 'base'}: held-out accuracy {row['eval/accuracy']:.1%}")


def evaluate(run: File, problems: int = 512, samples: int = 1) -> None:
    """Measure a run's newest checkpoint: held-out avg@k, pass@k.

    Args:
        run: the run's folder.
        problems: held-out problems to answer.
        samples: answers per problem (k).
    """
    use_devices(_load(run))
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


def sample(run: File, problem: tyro.conf.Positional[str], n: int = 1, seed: int = 0) -> None:
    """Print answers of a run's newest checkpoint to your problem.

    Args:
        run: the run's folder.
        problem: the prompt, as the policy shall see it.
        n: answers to draw.
        seed: other seeds draw other answers.
    """
    use_devices(_load(run))
    import jax

    from jaxrl_llm.run import trainer
    from jaxrl_llm.sampler import groups
    from jaxrl_llm.types import Prompt

    learner, engine, _ = trainer.load_policy(run)
    limit = learner.config.rollout.max_prompt_tokens
    with jax.set_mesh(learner.mesh):
        answers = groups.sample_groups(engine, (Prompt(0, problem),), n, seed=seed, draws=[0], max_prompt_tokens=limit)
    for text, finish in zip(answers.texts, answers.finish, strict=True):
        print(text if finish == "eos" else f"{text}  [{finish}]")


def serve(
    source: File, set_: Set = (), host: str = "127.0.0.1", port: int = 9000,
    cert: str | None = None, key: str | None = None, metrics_port: int | None = None, unwatched: bool = False,
) -> None:  # fmt: skip
    """Serve a sampler to learners elsewhere and to JetStream's clients.

    A learner finds it by `--set 'rollout.servers=["host:port"]'`. The token that callers must bring is $JAXRL_TOKEN;
    without one it listens on loopback alone.

    Args:
        source: an experiment file, whose learner will send weights, or a run's folder, for its newest checkpoint.
        host: address to listen on.
        port: port to listen on.
        cert: PEM file of its certificate, for TLS.
        key: PEM file of the certificate's key.
        metrics_port: of /metrics (Prometheus), /healthz and /readyz; none if left out.
        unwatched: serve in this process, which is not started again when it dies.
    """
    config = _load(source, set_)
    from jaxrl_llm.serving import process as serving

    listen = {"host": host, "port": port, "cert": cert, "key": key, "metrics_port": metrics_port}
    if not unwatched:  # the devices are left to the process that is watched
        sys.exit(serving.watch(source, set_, **listen))
    use_devices(config)
    serving.work(source, set_, **listen)


def import_(
    source: tyro.conf.Positional[str],
    prompt: str = "The capital of France is",
    tokens: int = 16,
    out: Path | None = None,
) -> None:
    """Check a Hugging Face checkpoint; print an experiment from it.

    Args:
        source: a folder, or OWNER/NAME of the Hugging Face hub.
        prompt: what it shall continue.
        tokens: how far.
        out: a Python file for the experiment, which is printed if left out.
    """
    use_devices()
    from jaxrl_llm.run import tryout

    if out is not None and out.exists():
        raise ValueError(f"--out {out}: there already; expected a new file")
    print(*tryout.try_checkpoint(source, prompt, tokens), sep="\n")
    text = tryout.experiment(source, out)
    if out is None:
        print(f"\n{text}", end="")
    else:
        out.write_text(text)
        print(f"experiment {out}")


def export(run: File, out: File, step: int | None = None, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
    """Write a run's policy as a folder in Hugging Face format.

    Args:
        run: the run's folder.
        out: the folder to be made.
        step: of the checkpoint; the newest if left out.
        dtype: of the weights.
    """
    use_devices(_load(run))
    from jaxrl_llm.data import tokenizers
    from jaxrl_llm.models import hf, lora
    from jaxrl_llm.run import trainer

    learner, state, step = trainer.load_state(run, step)
    model = learner.config.model
    params = lora.merged(model, learner.whole(state.params), dtype)
    hf.export(params, lora.without(model), learner.tokenizer, out, dtype)
    if warning := tokenizers.misread(out, learner.tokenizer):
        print(warning, file=sys.stderr)
    print(f"{out}: {run} at step {step}, {model.n_params:,} parameters in {dtype}")


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
    use_devices(_load(run))
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


def show(experiment: File, set_: Set = (), algorithm: Method = None) -> None:
    """Print an experiment's whole config as JSON.

    Args:
        experiment: a Python file with CONFIG = Config(…), or a run's folder.
    """
    config = _load(experiment, set_, algorithm)
    from jaxrl_llm.config import to_json

    print(json.dumps(to_json(config), indent=1))


def algorithms(name: tyro.conf.Positional[str | None] = None) -> None:
    """Print the table of methods, or one: its fields and equations.

    Args:
        name: a method of the table; all of them if left out.
    """
    from jaxrl_llm.config import named
    from jaxrl_llm.reports import catalogue

    print(catalogue.table() if name is None else catalogue.describe(name, named(name)))


def _load(source: Path, set_: tuple[str, ...] = (), algorithm: str | None = None) -> Config:
    """The config of an experiment file or of a run's folder."""
    if not source.exists():
        raise ValueError(f"{source}: no such file; expected an experiment or a run's folder")
    from jaxrl_llm.config import load

    return load(source, set_, algorithm)


def _folder(out: str | None, experiment: Path) -> Path:
    if out == "":
        raise ValueError("--out is ''; expected a folder")
    return Path(out or f"runs/{experiment.stem}")


def use_devices(config: Config | None = None, whole_mesh: bool = False) -> None:
    """Say where compiled programs are kept, unless the environment has, and fail where jax finds no device.

    whole_mesh: also say what the run will use, and fail on a mesh that the machine cannot hold.
    """
    import jax

    from jaxrl_llm.data.curation import cache_folder
    from jaxrl_llm.parallel.sharding import make_mesh

    cache = "auto" if config is None else config.compile_cache
    if cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = cache_folder() / "xla" if cache == "auto" else Path(cache)
        jax.config.update("jax_compilation_cache_dir", str(folder / f"jax-{jax.__version__}"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    try:
        device = jax.devices()[0].device_kind
    except Exception as error:  # an AssertionError where jax lacks the platform's plugin
        platform = os.environ.get("JAX_PLATFORMS")
        raise ValueError(f"JAX_PLATFORMS is {platform!r}; expected a platform of this machine, or cpu") from error
    if whole_mesh:
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        shape = "×".join(map(str, mesh.devices.shape))
        print(f"{device} × {mesh.size}, mesh {shape}, {config.model.n_params / 1e6:.2f} M parameters")


COMMANDS = {  # with two examples each
    "train": (train, "my.py", "experiments/laptop_dapo.py --algorithm gspo --set steps=200 --out runs/gspo"),
    "sft": (sft, "experiments/laptop_dapo.py", "experiments/laptop_dapo.py --set prime.stages.0.batches=100"),
    "eval": (evaluate, "runs/laptop_dapo", "runs/laptop_dapo --problems 64 --samples 8"),
    "sample": (sample, "runs/laptop_dapo 'a3b4c2:'", "runs/laptop_dapo 'a3b4c2:' --n 4 --seed 1"),
    "gap": (gap, "runs/laptop_dapo", "runs/laptop_dapo --problems 16 --samples 1"),
    "import": (import_, "Qwen/Qwen2.5-0.5B", "models/qwen --prompt '1 + 1 =' --tokens 4 --out my.py"),
    "export": (export, "runs/laptop_dapo policy", "runs/laptop_dapo policy --step 60 --dtype float32"),
    "serve": (serve, "runs/laptop_dapo", "experiments/laptop_dapo.py --port 9000 --metrics-port 9100"),
    "show": (show, "runs/laptop_dapo", "experiments/laptop_dapo.py --algorithm gspo"),
    "algorithms": (algorithms, "", "dapo"),
}


def _command(words: list[str]) -> None:
    """Run what the command line says; the help of a command ends with its examples."""
    functions = {name: fn for name, (fn, *_) in COMMANDS.items()}
    if words == ["--version"]:
        print(f"jaxrl_llm {__version__}")
    elif not words:
        lines = [f"  {name:<11} {fn.__doc__.splitlines()[0]}" for name, fn in functions.items()]
        print("usage: jaxrl COMMAND …, jaxrl COMMAND --help", *lines, sep="\n")
    else:
        try:
            tyro.extras.subcommand_cli_from_dict(functions, prog="jaxrl", description=__doc__)
        except SystemExit as stop:
            if not stop.code and words[0] in COMMANDS:
                print("examples:", *(f"  jaxrl {words[0]} {example}" for example in COMMANDS[words[0]][1:]), sep="\n")
            raise


def main() -> None:
    """Entry point of `jaxrl`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, with >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            _command(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except (ValueError, RuntimeError, OSError) as error:
        poll = select.poll()
        poll.register(1, 0)  # that nobody reads stdout any more is always reported
        if isinstance(error, BrokenPipeError) and poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's own flush at the end would complain
            sys.exit(141)  # as a shell says of a program that SIGPIPE ended
        if "JAXRL_TRACEBACK" in os.environ:
            raise
        print(f"jaxrl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # the second Ctrl-C; the first one is waited for
        sys.exit(130)


if __name__ == "__main__":
    main()
