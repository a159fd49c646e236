"""`jaxrl serve` and a learner in another process: the run is the one in process, also when the server is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from cases import free_port

pytest.importorskip("jetstream")

EXPERIMENT = """
import os, time
from functools import partial
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.config import Checkpoint, Config, Evaluation, Rollout
from jaxrl_llm.data import tasks
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.types import Optimizer
from jaxrl_llm.types import Reward, Task

SLOW = float(os.environ.get("SECONDS_PER_REWARD", 0))


def coin(prompt, text, finish):
    time.sleep(SLOW)
    return Reward(float(len(text) % 2), len(text) % 2 == 0)


def task():
    whole = tasks.chain(modulus=3, terms=(2, 4))
    return Task(whole.train, whole.test, coin)


CONFIG = Config(
    task=task,
    algorithm=ALGORITHMS["grpo"],
    model=ModelConfig(vocab_size=112, layers=1, width=32, heads=2, kv_heads=1, head_width=16, mlp_width=64),
    optimizer=Optimizer(lr=1e-3),
    rollout=Rollout(prompts=8, group_size=4, max_prompt_tokens=32, max_response_tokens=24, slots=8, tokens_per_call=8),
    evaluation=Evaluation(every=0, problems=16),
    checkpoint=Checkpoint(every=100),
    steps=6,
)
"""
ENVIRONMENT = {**os.environ, "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("serving")
    (path / "tiny.py").write_text(EXPERIMENT)
    return path


def jaxrl(folder, *words, **environment):
    command = [sys.executable, "-m", "jaxrl_llm.cli", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**ENVIRONMENT, **environment}, **pipes)


def rows(run):
    """What a run has learnt, without what depends on the clock and on rounding."""
    log = run / "metrics.jsonl"
    kept = (
        "step",
        "accuracy",
        "reward/mean",
        "length/mean",
        "length/max",
        "truncated",
        "eval/accuracy",
        "staleness/max",
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [{k: r[k] for k in kept if k in r} for r in lines]


@pytest.fixture(scope="module")
def in_process(folder):
    process = jaxrl(folder, "train", "tiny.py", "--out", "alone")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return rows(folder / "alone")


def served(folder, port):
    """A watched server that listens."""
    server = jaxrl(folder, "serve", "tiny.py", "--port", port, JAXRL_TOKEN="a secret")
    for line in server.stdout:
        if line.startswith("listening"):
            return server
    raise AssertionError("the server did not listen")


def worker_of(server):
    """The process that the supervisor watches."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with open(f"/proc/{server.pid}/task/{server.pid}/children") as file:
            children = file.read().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise AssertionError("no worker")


@pytest.mark.slow
def test_a_server_that_is_killed_twice_costs_no_step_and_no_sample(folder, in_process):
    port, out = free_port(), folder / "remote"
    server = served(folder, port)
    servers = f'rollout.servers=["127.0.0.1:{port}"]'
    environment = {"JAXRL_TOKEN": "a secret", "SECONDS_PER_REWARD": "0.05"}
    learner = jaxrl(folder, "train", "tiny.py", "--out", out, "--set", servers, **environment)
    try:
        for steps in (2, 4):
            deadline = time.monotonic() + 200
            while len(rows(out)) < steps:
                assert learner.poll() is None, learner.stdout.read()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.3)  # into the next step, which takes 1.6 s of verification alone
            os.kill(worker_of(server), signal.SIGKILL)
        output, _ = learner.communicate(timeout=300)
        assert learner.returncode == 0, output
        assert rows(out) == in_process
        assert len(in_process) == 7
    finally:
        learner.kill()
        server.terminate()
        assert server.wait(30) == 0


@pytest.mark.slow
def test_a_wrong_token_is_one_line(folder):
    port = free_port()
    server = served(folder, port)
    try:
        servers = f'rollout.servers=["127.0.0.1:{port}"]'
        learner = jaxrl(folder, "train", "tiny.py", "--out", "no", "--set", servers, JAXRL_TOKEN="another")
        output, _ = learner.communicate(timeout=100)
        assert learner.returncode == 2, output
        assert "UNAUTHENTICATED" in output or "token" in output
        assert "Traceback" not in output
    finally:
        server.terminate()
        server.wait(30)


WRONG = {"--host": "0.0.0.0", "--port": "99999", "--metrics-port": "-1", "--set": "rollout.slots=-1"}


@pytest.mark.parametrize("flag", WRONG)
def test_a_way_to_listen_or_a_config_that_is_wrong_is_one_line(folder, flag):
    process = jaxrl(folder, "serve", "tiny.py", f"{flag}={WRONG[flag]}")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    assert flag.strip("-").replace("-", "_").replace("set", "slots") in output
    assert len(output.splitlines()) == 1, output
