"""Every benchmark runs, with as little work as it takes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "experiments" / "benchmarks"
LEAST = {
    "curation": ("2000",),
    "attention": ("--tokens", "2048"),
    "levers": ("--layers", "2", "--prompts", "2", "--group", "2", "--prompt-tokens", "16", "--answer-tokens", "32"),
    "objectives": ("--runs", "1"),
    "memory": ("--preset", "smollm2-135m", "--tokens", "256", "--vocab", "1024"),
    "pages": ("--groups", "1"),
    "rewards": ("--answers", "100", "--hostile", "0.03"),
    "rl_step": ("--prompt-len", "16", "--steps", "1"),
    "rl_step --ragged": ("--steps", "1"),
    "rollout_rewards": ("--batches", "1", "--cpu-ms", "1"),
    "tpu_sampler": ("--topology=v5e:2x2", "--preset=smollm2-135m", "--layers=2", "--rows=8", "--prefill-tokens=256"),
    "sampler": ("--remote", "--repeats", "1"),
    "tpu_compile": ("--topology=v5e:2x2", "--fsdp=4", "--preset=smollm2-135m", "--prompts=4", "--prompt-tokens=128"),
}
NEEDS = {"tpu_compile": "libtpu", "tpu_sampler": "libtpu"}


def test_every_benchmark_is_tried():
    assert {file.stem for file in FOLDER.glob("*.py")} == {name.split()[0] for name in LEAST}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_a_benchmark_prints_a_table_of_figures(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    file, *options = name.split()
    command = [sys.executable, FOLDER / f"{file}.py", *options, *LEAST[name]]
    environment = {**os.environ, "XLA_FLAGS": ""}  # one device, as a user has it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r"\d\.\d+", done.stdout)) >= 3, done.stdout
