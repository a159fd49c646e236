"""A run that starts from a checkpoint: imported, trained, resumed without it, exported; a policy that proves itself."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial

import checkpoints
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import cli
from jaxrl_llm import config as configs
from jaxrl_llm.data import tokenizers
from jaxrl_llm.models import hf, transformer
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.run import probe, trainer

pytestmark = pytest.mark.slow

MODEL = ModelConfig(112, 2, 32, 4, 2, 10, 48, qk_norm=True, tied_head=False, rope_theta=1e6, max_positions=300)
EXPERIMENT = """
from dataclasses import replace
from functools import partial
from jaxrl_llm.config import Checkpoint, Config, Evaluation, Rollout
from jaxrl_llm.data import tasks
from jaxrl_llm.models import hf
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.types import Optimizer, Reward, Task



def coin(prompt, text, finish):
    return Reward(float(len(text) % 2), len(text) % 2 == 0)


def task():
    whole = tasks.chain(modulus=3, terms=(2, 4))
    return Task(whole.train, whole.test, coin)


CONFIG = Config(
    **hf.start("SOURCE", dtype="float32", fp32_head=True),
    task=task,
    algorithm=replace(ALGORITHMS["grpo"], kl_coef=0.0),
    optimizer=Optimizer(lr=1e-3),
    rollout=Rollout(prompts=4, group_size=2, max_prompt_tokens=32, max_response_tokens=16),
    evaluation=Evaluation(every=0, problems=4),
    checkpoint=Checkpoint(every=1, keep=3),
    steps=2,
)
"""


def random_params(config, seed=0, scale=0.3):
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, and an experiment beside it."""
    path = tmp_path_factory.mktemp("weights")
    checkpoints.write(path / "model", MODEL, random_params(MODEL), shards=2)
    tokenizers.characters().save(path / "model")
    (path / "tiny.py").write_text(EXPERIMENT.replace("SOURCE", str(path / "model")))
    return path


def jaxrl(monkeypatch, capsys, *words, fails=False):
    monkeypatch.setattr(sys, "argv", ["jaxrl", *map(str, words)])
    if not fails:
        cli.main()
        return capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxrl: ")
    assert said.count("\n") == 1
    return said


def test_import_says_what_a_checkpoint_is(folder, monkeypatch, capsys, tmp_path):
    out = jaxrl(monkeypatch, capsys, "import", folder / "model", "--prompt", "a1+b2:", "--tokens", 5)
    assert f"qwen3, {MODEL.n_params:,} parameters" in out
    assert "2 layers of width 32, 4 heads on 2 of width 10, MLP 48, untied head of 112" in out
    assert "98 tokens, ends with 1 '<eos>', no chat template" in out
    assert "sampler and learner" in out
    assert "greedy     'a1+b2:' → '" in out
    assert f'hf.start("{folder / "model"}")' in out
    jaxrl(monkeypatch, capsys, "import", folder / "model", "--tokens", 2, "--out", tmp_path / "my.py")
    loaded = configs.load(tmp_path / "my.py")
    assert (loaded.rollout.max_prompt_tokens, loaded.rollout.max_response_tokens) == (150, 150)  # of the 300
    assert loaded.model == replace(MODEL, dtype="bfloat16", remat="full", fp32_head=False)
    said = jaxrl(monkeypatch, capsys, "import", folder / "model", "--out", tmp_path / "my.py", fails=True)
    assert "my.py: there already; expected a new file" in said


def test_import_of_what_is_broken_is_one_line(folder, monkeypatch, capsys, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    weights = next((tmp_path / "model").glob("*1-of*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-3])
    said = jaxrl(monkeypatch, capsys, "import", tmp_path / "model", fails=True)
    assert f"{weights}: " in said
    assert "expected a whole file of weights" in said
    shutil.rmtree(tmp_path / "model")
    small = replace(MODEL, vocab_size=97)
    checkpoints.write(tmp_path / "model", small, random_params(small))
    tokenizers.characters().save(tmp_path / "model")
    said = jaxrl(monkeypatch, capsys, "import", tmp_path / "model", fails=True)
    assert f"{tmp_path / 'model'}: tokenizer is '98 tokens'; expected at most vocab_size = 97" in said
    (tmp_path / "model" / "tokenizer.json").unlink()
    said = jaxrl(monkeypatch, capsys, "import", tmp_path / "model", fails=True)
    assert f"{tmp_path / 'model'}: " in said
    assert "expected the files of a tokenizer that has an EOS token" in said


@pytest.mark.slow
def test_a_run_starts_from_weights_goes_on_without_them_and_is_exported(folder, monkeypatch, capsys, tmp_path):
    run, source = tmp_path / "run", tmp_path / "model"
    shutil.copytree(folder / "model", source)
    (tmp_path / "tiny.py").write_text(EXPERIMENT.replace("SOURCE", str(source)))
    config = configs.load(tmp_path / "tiny.py")
    again = configs.from_json(json.loads(configs.dumps(config)))
    assert configs.to_json(again) == configs.to_json(config)
    assert configs.to_json(config)["init"] == {
        "function": "jaxrl_llm.models.hf:load", "with": {"source": str(source)}
    }  # fmt: skip
    starts = []

    def noted(learner, base=None):
        starts.append(None if base is None else jax.tree.map(np.asarray, base))
        return fresh_state(learner, base)

    fresh_state = trainer.fresh_state
    monkeypatch.setattr(trainer, "fresh_state", noted)
    jaxrl(monkeypatch, capsys, "train", tmp_path / "tiny.py", "--out", run)
    jax.tree.map(np.testing.assert_array_equal, starts.pop(), random_params(MODEL))

    shutil.rmtree(source)
    jaxrl(monkeypatch, capsys, "train", run, "--resume", "--out", run, "--set", "steps=3")
    assert starts == [None]  # all was in the checkpoint
    out = jaxrl(monkeypatch, capsys, "export", run, tmp_path / "new", "--dtype", "float32")
    assert f"{tmp_path / 'new'}: {run} at step 3, {MODEL.n_params:,} parameters in float32" in out
    jaxrl(monkeypatch, capsys, "export", run, tmp_path / "old", "--step", 1, "--dtype", "float32")
    _, state, _ = trainer.load_state(run)
    found = load_file(tmp_path / "new" / "model.safetensors")
    for name, value in checkpoints.tensors(MODEL, jax.tree.map(np.asarray, state.params)).items():
        np.testing.assert_array_equal(found[name], value)
    older = load_file(tmp_path / "old" / "model.safetensors")
    assert any((older[name] != value).any() for name, value in found.items())
    assert tokenizers.load(tmp_path / "new").encode("a1+b2:") == tokenizers.characters().encode("a1+b2:")
    said = jaxrl(monkeypatch, capsys, "export", run, tmp_path / "none", "--step", 9, fails=True)
    assert "no checkpoint of step 9 among [1, 2, 3]" in said
    said = jaxrl(monkeypatch, capsys, "export", run, tmp_path / "new", fails=True)
    assert "there already" in said


def test_a_config_that_does_not_fit_its_weights(folder, monkeypatch, capsys, tmp_path):
    load = partial(configs.load, folder / "tiny.py")
    base = configs.load("experiments/laptop_dapo.py")
    with pytest.raises(ValueError, match="init is 'load'; expected None with prime"):
        configs.validate(replace(load(), prime=base.prime))
    with pytest.raises(ValueError, match="init: load: missing a required argument: 'source'"):
        configs.validate(replace(load(), init=hf.load))
    with pytest.raises(ValueError, match="max_response_tokens is 16; expected at most model.max_positions = 40 less"):
        load(("model.max_positions=40",))
    said = jaxrl(monkeypatch, capsys, "train", folder / "tiny.py", "--out", tmp_path / "run", "--set",
                 "model.mlp_width=64", fails=True)  # fmt: skip
    assert f"model.mlp_width is 64; expected 48, as {folder / 'model' / 'config.json'} has it" in said
    said = jaxrl(monkeypatch, capsys, "train", folder / "tiny.py", "--out", tmp_path / "run2", "--set",
                 "model.vocab_size=90", fails=True)  # fmt: skip
    assert "model.vocab_size is 90; expected at least 98 (tokenizer)" in said


def test_a_sampler_with_other_weights_is_found_out(folder):
    learner = trainer.build(configs.load(folder / "tiny.py"))
    with jax.set_mesh(learner.mesh):
        params = learner.config.init(learner.config.model, learner.mesh)
        engine = trainer.make_engine(learner, params)
        assert probe.prove(learner, engine, params) < 1e-4
        wrong = jax.tree.map(lambda x: x, params)
        o = params["layers"]["attention"]["o"]
        wrong["layers"]["attention"]["o"] = o[:, ::-1]  # heads in another order
        with pytest.raises(
            RuntimeError, match=r"sampler in this process: its log-probs of \d+ tokens .* at most 0.001"
        ):
            probe.prove(learner, engine, wrong)
        nothing = jax.tree.map(lambda x: x * np.nan, params)
        with pytest.raises(RuntimeError, match="are nan nats"):
            probe.prove(learner, engine, nothing)


def test_one_wrong_server_among_others_is_named(folder):
    learner = trainer.build(configs.load(folder / "tiny.py"))
    with jax.set_mesh(learner.mesh):
        params = learner.config.init(learner.config.model, learner.mesh)
        engine = trainer.make_engine(learner, params)

        class Servers:
            sampling, version = engine.sampling, 7

            def probe(self, request):
                (right,) = engine.probe(request).values()
                wrong = tuple(replace(a, logp=a.logp + np.float32(0.01)) for a in right)
                return {"good:1": right, "bad:2": wrong}

        with pytest.raises(RuntimeError, match="sampler bad:2: .* 0.01 nats from the learner's on average"):
            probe.prove(learner, Servers(), params)
