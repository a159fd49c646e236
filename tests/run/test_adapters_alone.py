"""Runs with LoRA: checkpoints hold adapters, the base comes from where the run began, and it has to be the same one."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial

import checkpoints
import jax
import numpy as np
import pytest

from jaxrl_llm import cli
from jaxrl_llm import config as configs
from jaxrl_llm.data import tokenizers
from jaxrl_llm.models import hf, lora, transformer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import base, sft, teachers, trainer
from jaxrl_llm.run.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

MODEL = ModelConfig(112, 2, 16, 2, 1, 10, 24, qkv_bias=True, remat="none")
EXPERIMENT = """
from dataclasses import replace
from functools import partial
from jaxrl_llm.config import Checkpoint, Config, Evaluation, Prime, Rollout, Stage
from jaxrl_llm.data import tasks
from jaxrl_llm.models import hf
from jaxrl_llm.models.shape import LoRA
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.types import Optimizer, Reward, Task



def coin(prompt, text, finish):
    return Reward(float(len(text) % 2), len(text) % 2 == 0)


def task():
    whole = tasks.chain(modulus=3, terms=(2, 4))
    return replace(whole, reward=coin)


START = hf.start("SOURCE", dtype="float32", fp32_head=True, remat="none", lora=LoRA(rank=4, alpha=8.0))
CONFIG = Config(
    **START,
    task=task,
    algorithm=Algorithm(advantages.grpo, losses.ppo_clip, "token", kl="k3", kl_coef=0.1),
    optimizer=Optimizer(lr=1e-2),
    rollout=Rollout(prompts=4, group_size=2, max_prompt_tokens=32, max_response_tokens=16),
    evaluation=Evaluation(every=0, problems=4),
    checkpoint=Checkpoint(every=1, keep=4),
    steps=2,
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of someone else's, and an experiment beside it."""
    path = tmp_path_factory.mktemp("lora")
    shapes, rng = jax.eval_shape(partial(transformer.init, MODEL), jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32), shapes)
    checkpoints.write(path / "model", MODEL, params)
    tokenizers.characters().save(path / "model")
    (path / "tiny.py").write_text(EXPERIMENT.replace("SOURCE", str(path / "model")))
    return path


@pytest.fixture(scope="module")
def runs(folder):
    """One of three steps, and one of two that is resumed for a third."""
    config = configs.load(folder / "tiny.py")
    trainer.train(replace(config, steps=3), folder / "whole")
    trainer.train(config, folder / "resumed")
    trainer.train(replace(config, steps=3), folder / "resumed", resume=True)
    return folder / "whole", folder / "resumed"


def jaxrl(monkeypatch, capsys, *words, fails=False):
    monkeypatch.setattr(sys, "argv", ["jaxrl", *map(str, words)])
    if not fails:
        cli.main()
        return capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    return capsys.readouterr().err


def raw_state(run, step):
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer().restore(run / "checkpoints" / str(step) / "state")


def test_a_resumed_run_is_the_whole_one_bit_for_bit(runs):
    states = [raw_state(run, 3) for run in runs]
    jax.tree.map(np.testing.assert_array_equal, *states)
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith(("perf/", "eval/"))} for row in of_run] for of_run in rows
    ]
    assert timeless[0] == timeless[1]
    assert [row["step"] for row in rows[0]] == [0, 1, 2, 3]
    assert 0 == rows[0][1]["kl/ref"] < rows[0][3]["kl/ref"]  # the reference is the base, to which B = 0 adds nothing


def test_a_checkpoint_holds_adapters_alone(runs):
    state = raw_state(runs[0], 3)
    attention, mlp = state["params"]["layers"]["attention"], state["params"]["layers"]["mlp"]
    assert set(state["params"]) == {"layers"}
    assert set(attention) | set(mlp) == {f"{n}_{x}" for n in ("q", "k", "v", "o", "gate", "up", "down") for x in "ab"}
    adapters = sum(x.size for x in jax.tree.leaves(state["params"]))
    assert adapters == 2 * 4 * ((16 + 20) + 2 * (16 + 10) + (20 + 16) + 3 * (16 + 24))
    moments = sum(x.size for x in jax.tree.leaves(state["opt_state"]) if x.ndim)
    assert moments == 2 * adapters


@pytest.mark.slow
def test_what_reads_a_run_reads_the_merged_policy(runs, folder, monkeypatch, capsys, tmp_path):
    run = runs[0]
    learner, state, step = trainer.load_state(run)
    whole = learner.whole(state.params)
    merged = lora.merged(learner.config.model, whole)
    assert step == 3
    out = jaxrl(monkeypatch, capsys, "export", run, tmp_path / "new", "--dtype", "float32")
    assert f"{MODEL.n_params:,} parameters" in out
    read = hf.load(MODEL, learner.mesh, tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, read, merged)
    source = hf.load(MODEL, learner.mesh, folder / "model")
    assert (np.asarray(read["layers"]["mlp"]["up"]) != np.asarray(source["layers"]["mlp"]["up"])).any()
    np.testing.assert_array_equal(read["embed"], source["embed"])

    assert "accuracy" in jaxrl(monkeypatch, capsys, "eval", run, "--problems", 4)
    model, _, load = teachers.run(str(run))
    assert model.lora is not None
    jax.tree.map(np.testing.assert_array_equal, load(learner.mesh), whole)


@pytest.mark.slow
def test_another_base_is_refused(runs, folder, monkeypatch, capsys, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "tiny.py").write_text(EXPERIMENT.replace("SOURCE", str(tmp_path / "model")))
    config, run = configs.load(tmp_path / "tiny.py"), tmp_path / "run"
    trainer.train(replace(config, steps=1), run)
    weights = tmp_path / "model" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    expected = f"{run}: base is 'another one \\(1 arrays differ\\)'; expected the weights on which the run's adapters"
    with pytest.raises(ValueError, match=expected):
        trainer.train(config, run, resume=True)
    with pytest.raises(ValueError, match=expected):
        trainer.load_policy(run)
    with pytest.raises(ValueError, match=expected):
        teachers.run(str(run))[2](trainer.build(config).mesh)
    shutil.rmtree(tmp_path / "model")
    said = jaxrl(monkeypatch, capsys, "eval", run, fails=True)
    assert str(tmp_path / "model") in said
    assert Checkpoints(run / "checkpoints", read_only=True).steps() == [1]


@pytest.mark.slow
def test_a_primed_base_is_trained_whole_and_found_again(folder, monkeypatch, tmp_path):
    """The supervised stage knows nothing of LoRA, so that runs with and without it share their base."""
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    loaded, mesh = configs.load(folder / "tiny.py"), sharding.make_mesh()
    prime = configs.Prime((configs.Stage(3, {"clean": 1.0}),), 8)
    primed = configs.validate(replace(loaded, init=None, prime=prime, tokenizer=tokenizers.characters))
    with jax.set_mesh(mesh):
        made = base.of_run(primed, tmp_path / "run", mesh, lambda: 0)
        same = sft.prime(replace(primed, model=MODEL), tmp_path / "again", mesh, lambda: 0)
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1
    shutil.rmtree(tmp_path / "cache")
    found = base.of_run(primed, tmp_path / "run", mesh)  # only reads
    for other in (same, found):
        jax.tree.map(np.testing.assert_array_equal, made, other)
    drawn = jax.jit(transformer.init, static_argnums=0)(MODEL, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, base.of_run(replace(loaded, init=None), tmp_path, mesh), drawn)
    assert (np.asarray(made["embed"]) != np.asarray(drawn["embed"])).any()
    with pytest.raises(ValueError, match="base is 'a base policy after 0 of 3 batches'; expected a finished one"):
        base.of_run(primed, tmp_path / "none", mesh)
