"""Kill -9 between two checkpoints, then --resume: the run ends as if nothing had happened, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

EXPERIMENT = '''
"""A run of seconds with all that has a memory: two updates a batch, dynamic sampling, prompts drawn by what was solved,
DCPO's statistics, a critic that learns a step before the policy, a reference that is replaced; evaluations between."""

import os
import time
from dataclasses import replace

from jaxrl_llm.objective import advantages, filters, losses
from jaxrl_llm.objective.algorithms import Algorithm, Critic, PromptChoice
from jaxrl_llm.config import Checkpoint, Config, Evaluation, Prime, Rollout, Stage
from jaxrl_llm.data import tasks
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.types import Optimizer


def task():
    made = tasks.chain(modulus=3, terms=(2, 4), n_train=48)

    def reward(*of_answer):  # slow, so that the test finds the time to kill
        time.sleep(float(os.environ.get("SECONDS_PER_REWARD", 0)))
        return made.reward(*of_answer)

    return replace(made, reward=reward)


def with_values(adv, values, mask):
    return adv - 0.1 * values


CONFIG = Config(
    task=task,
    model=ModelConfig(vocab_size=112, layers=1, width=32, heads=2, kv_heads=1, head_width=16, mlp_width=64),
    prime=Prime((Stage(60, {"clean": 0.5, "no_reasoning": 0.5}),), 16, Optimizer(lr=1e-2, warmup=5)),
    algorithm=Algorithm(
        advantages.dcpo_sas, losses.ppo_clip, "token", kl="k3", kl_coef=0.01, kl_refresh=4, group_filter=filters.mixed,
        updates_per_batch=2, memory=advantages.dcpo_sas_init, token_advantage=with_values,
        prompts=PromptChoice(prioritized=True),
        critic=Critic(pretrain=1, optimizer=Optimizer(lr=1e-3)),
    ),
    optimizer=Optimizer(lr=1e-3, schedule="cosine"),
    rollout=Rollout(prompts=4, group_size=4, max_prompt_tokens=16, max_response_tokens=32, max_rounds=50),
    evaluation=Evaluation(every=2, problems=16),
    checkpoint=Checkpoint(every=4),  # when the reference is neither the base (replaced in step 3) nor the policy
    steps=6,
)
'''


def jaxrl(folder, *arguments, **variables):
    environment = {**os.environ, "JAXRL_CACHE": str(folder / "cache"), "XLA_FLAGS": "", **variables}
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", str(folder / "tiny.py"), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def state_of(run):
    import orbax.checkpoint as ocp

    newest = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
    return newest, ocp.StandardCheckpointer().restore(run / "checkpoints" / str(newest) / "state")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "tiny.py").write_text(EXPERIMENT)
    whole, killed = folder / "whole", folder / "killed"
    finish(jaxrl(folder, "--out", str(whole)))

    process = jaxrl(folder, "--out", str(killed), SECONDS_PER_REWARD="0.05")
    deadline, log = time.monotonic() + 240, killed / "metrics.jsonl"
    # until the checkpoint of step 4 is whole, and the line of step 5 behind it is there
    while not (killed / "checkpoints" / "4").exists() or len(log.read_text().splitlines()) < 6:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps_before = [r["step"] for r in rows_that_parse(killed / "metrics.jsonl")]
    output = finish(jaxrl(folder, "--out", str(killed), "--resume"))
    return whole, killed, steps_before, output


def rows_that_parse(path):
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def test_it_was_killed_between_two_checkpoints(runs):
    _, _, steps_before, output = runs
    assert steps_before[-1] >= 5
    assert steps_before[-1] < 7, "the run was over before it was killed"
    assert "step 5/7" in output
    assert "step 4/7" not in output, "the run began anew, or at an earlier step"


def test_same_parameters_and_optimiser_state(runs):
    whole, killed, _, _ = runs
    (step_a, a), (step_b, b) = state_of(whole), state_of(killed)
    assert step_a == step_b == 7
    leaves_a, leaves_b = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    assert len(leaves_a) == len(leaves_b) > 20
    assert np.asarray(a["memory"]["count"]).sum() == 4 * 4 * 7
    assert "trunk" in a["critic"]["params"]
    for (path, x), (_, y) in zip(leaves_a, leaves_b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


def test_same_metrics_and_samples_and_no_line_twice(runs):
    whole, killed, _, _ = runs
    timeless = lambda row: {k: v for k, v in row.items() if not k.startswith("perf/")}
    metrics = [[timeless(r) for r in rows(run / "metrics.jsonl")] for run in (whole, killed)]
    assert [r["step"] for r in metrics[0]] == list(range(8))
    assert metrics[0] == metrics[1]
    assert rows(whole / "samples.jsonl") == rows(killed / "samples.jsonl")
    assert len(rows(whole / "samples.jsonl")) == 7 * 4


def test_a_step_learns_something(runs):
    whole, _, _, _ = runs
    before, *learned = rows(whole / "metrics.jsonl")[1:]
    assert "loss" not in before  # the critic's own step
    assert before["critic/loss"] > 0
    assert all(r["grad_norm"] > 0 and r["critic/grad_norm"] > 0 for r in learned)
    assert len({r["loss"] for r in learned}) == 6
    assert learned[0]["kl/ref"] < learned[1]["kl/ref"]  # before the reference is replaced
