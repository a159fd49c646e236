"""The commands that learn: train, sft."""

from __future__ import annotations

import errno
import json
import sys

from jaxrl_llm.cli.shared import File, Method, Out, Set, load, run_folder, use_devices


def train(experiment: File, set_: Set = (), algorithm: Method = None, resume: bool = False, out: Out = None) -> None:
    """Run an experiment: a base policy, then reinforcement learning.

    Args:
        experiment: a Python file with CONFIG = Config(…).
        resume: go on from the newest checkpoint in --out; exactly, but for rollout.mode=async.
    """
    config, folder = load(experiment, set_, algorithm), run_folder(out, experiment)
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
    config, folder = load(experiment, set_, algorithm), run_folder(out, experiment)
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
