"""Runs that sample through OpenAI's API: weights go out as folders, versions move, and the policy learns under TIS."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest
from cases import CONFIG, free_port

pytest.importorskip("jetstream", reason="google-jetstream is not installed (extra `serve`)")
from test_engine import closing
from test_http import serving
from test_serving import jaxrl

from jaxrl_llm.config import Evaluation
from jaxrl_llm.data import tasks
from jaxrl_llm.models import hf, transformer
from jaxrl_llm.objective import corrections
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import trainer
from jaxrl_llm.sampler import openai, weights
from jaxrl_llm.sampler.client import named
from jaxrl_llm.serving.backend import DriverBackend
from jaxrl_llm.types import Reward, Task

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def digits(prompt, text, finish):
    """The part of an answer that is digits, which random weights write now and then."""
    value = sum(c.isdigit() for c in text) / 10
    return Reward(value, value > 0.5)


def digits_task():
    whole = tasks.chain(modulus=3, terms=(2, 4))
    return Task(whole.train, whole.test, digits)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_through_the_api_learns_under_tis(tmp_path):
    model, mesh, tokenizer = CONFIG.model, sharding.make_mesh(), CONFIG.tokenizer()
    fresh = weights.push(model, transformer.init(model, jax.random.key(9)), None)
    sizes = {"slots": 16, "max_prompt_tokens": 16, "max_tokens": 10, "tokens_per_call": 10}
    (root := tmp_path / "weights").mkdir()
    loaded = []
    with closing(DriverBackend(model, tokenizer, fresh, **sizes)) as made, serving(made) as api:

        def load(folder, version):
            loaded.append((folder.name, version))
            with jax.set_mesh(mesh):
                made.load(named(weights.push(model, hf.load(model, mesh, folder), mesh).params), version)

        api.root, api.load = root, load
        remote = {"servers": (f"openai+http://127.0.0.1:{api.port}",), "servers_folder": str(root)}
        remote |= {"servers_reload": openai.from_disk, "prompts": 8, "group_size": 4, "temperature": 1.0}
        algorithm = replace(CONFIG.algorithm, correction=partial(corrections.tis, cap=2.0))
        config = replace(CONFIG, task=digits_task, algorithm=algorithm, rollout=replace(CONFIG.rollout, **remote))
        config = replace(config, steps=12, evaluation=Evaluation(every=0, problems=8))
        trainer.train(config, tmp_path / "run")
    steps = rows(tmp_path / "run")[1:]
    assert loaded == [(f"version-{v:06}", v) for v in range(13)]
    assert sorted(p.name for p in root.iterdir()) == ["version-000011", "version-000012"]
    assert {s["staleness/max"] for s in steps} == {0.0}
    assert max(s["gap/max"] for s in steps) < 1e-4
    rewards = [s["reward/mean"] for s in steps]
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3, rewards


@pytest.mark.slow
def test_the_demo_learns_through_the_api_of_a_server_in_another_process(tmp_path):
    port, http, root = free_port(), free_port(), tmp_path / "weights"
    root.mkdir()
    demo, environment = EXPERIMENTS / "laptop_dapo.py", {"JAXRL_TOKEN": "a secret", "JAXRL_PUSH_TOKEN": "another"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "JAXRL_CACHE": str(tmp_path / "cache")}
    processes = [jaxrl(tmp_path, "serve", demo, "--port", port, "--http-port", http, "--weights", root, **environment)]
    try:
        assert any(line.startswith("listening") for line in processes[0].stdout)
        sets = {
            "rollout.servers": f'["openai+http://127.0.0.1:{http}"]',
            "rollout.servers_folder": root,
            "rollout.servers_reload": "jaxrl_llm.sampler.openai:from_disk",
            "algorithm.correction": "jaxrl_llm.objective.corrections:tis",
            "steps": 20,
            "evaluation.every": 0,
            "evaluation.problems": 256,
        }
        words = [w for name, value in sets.items() for w in ("--set", f"{name}={value}")]
        processes.append(learner := jaxrl(tmp_path, "train", demo, "--out", "run", *words, **environment))
        output, _ = learner.communicate(timeout=3000)
        assert learner.returncode == 0, output
        before, *_, after = (row["eval/accuracy"] for row in rows(tmp_path / "run") if "eval/accuracy" in row)
        assert before < 0.5
        assert after > before + 0.25
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)
