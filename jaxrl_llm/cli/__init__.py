"""The command line: train, sft, eval, sample, serve, … Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import select
import sys

import tyro

from jaxrl_llm import __version__
from jaxrl_llm.cli import data, learning, measuring, policies, showing
from jaxrl_llm.cli.shared import use_devices

__all__ = ["COMMANDS", "main", "use_devices"]

COMMANDS = {  # with two examples each
    "train": (learning.train, "my.py", "experiments/laptop_dapo.py --algorithm gspo --set steps=200 --out runs/gspo"),
    "sft": (learning.sft, "experiments/laptop_dapo.py", "experiments/laptop_dapo.py --set prime.stages.0.batches=100"),
    "eval": (measuring.evaluate, "runs/laptop_dapo --problems 64 --samples 8", "runs/my --suite math --samples 4"),
    "compare": (
        measuring.compare,
        "runs/a runs/b",
        "runs/a/evals/gsm8k-step0-n1.jsonl runs/a/evals/gsm8k-step9-n1.jsonl",
    ),
    "analyse": (measuring.analyse, "runs/laptop_dapo", "models/qwen --suite math500 --templates none r1 --samples 4"),
    "sample": (policies.sample, "runs/laptop_dapo 'a3b4c2:'", "runs/laptop_dapo 'a3b4c2:' --n 4 --seed 1"),
    "gap": (measuring.gap, "runs/laptop_dapo", "runs/laptop_dapo --problems 16 --samples 1"),
    "import": (policies.import_, "Qwen/Qwen2.5-0.5B", "models/qwen --prompt '1 + 1 =' --tokens 4 --out my.py"),
    "export": (policies.export, "runs/laptop_dapo policy", "runs/laptop_dapo policy --step 60 --dtype float32"),
    "serve": (policies.serve, "runs/laptop_dapo", "experiments/laptop_dapo.py --port 9000 --metrics-port 9100"),
    "data prepare": (data.prepare, "gsm8k", "problems.jsonl --prompt question --bad skip --root datasets"),
    "curate": (data.curate, "raw.jsonl --out good.jsonl", "raw.jsonl --out good.jsonl --against math500 --hardest 0.5"),
    "show": (showing.show, "runs/laptop_dapo", "experiments/laptop_dapo.py --algorithm gspo"),
    "algorithms": (showing.algorithms, "", "dapo"),
}


def _command(words: list[str]) -> None:
    """Run what the command line says; the help of a command ends with its examples."""
    if " ".join(words[:2]) in COMMANDS:  # a command of two words
        words = [" ".join(words[:2]), *words[2:]]
    functions = {name: fn for name, (fn, *_) in COMMANDS.items()}
    if words == ["--version"]:
        print(f"jaxrl_llm {__version__}")
    elif not words:
        lines = [f"  {name:<12} {fn.__doc__.splitlines()[0]}" for name, fn in functions.items()]
        print("usage: jaxrl COMMAND …, jaxrl COMMAND --help", *lines, sep="\n")
    else:
        try:
            tyro.extras.subcommand_cli_from_dict(functions, prog="jaxrl", description=__doc__, args=words)
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
