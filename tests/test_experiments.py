"""Experiment files: short, documented, one for every method, and each of them runs."""

import ast
import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm import config
from jaxrl_llm.config import Config, Evaluation, Stage
from jaxrl_llm.config.values import unbound
from jaxrl_llm.data import prepare, templates, word_problems
from jaxrl_llm.data.recipes import RECIPES
from jaxrl_llm.models import hf
from jaxrl_llm.models.quantize import dequantized
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import sft, trainer

ROOT = Path(__file__).parent.parent
FILES = {file.stem: file for file in sorted((ROOT / "experiments").glob("*.py"))}
FILE_OF = {name: name for name in ALGORITHMS} | {"dapo": "laptop_dapo"}
every_file = pytest.mark.parametrize("name", FILES)
BEGINS_WITH = {"imported_qwen": "small_qwen"}  # whose policy, exported, is what an experiment starts from
ROOM = {"search_tool": 48}  # tokens that an answer needs which only guesses; 32 are enough for the others
PREPARED = {"school_math": ("asdiv", "gsm8k")}  # the datasets that an experiment reads


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """A cache in which a few problems of our own stand for each of the datasets that experiments read."""
    cache = tmp_path_factory.mktemp("datasets")
    problems = word_problems.word_problems(lambda *_: None).train[:200]
    rows = "".join(json.dumps({"problem": p.text, "answer": p.answer}) + "\n" for p in problems)
    (cache / "train.jsonl").write_text(rows)
    for name in {n for names in PREPARED.values() for n in names}:
        prepare.prepare(name, {"train": [cache / "train.jsonl"]}, RECIPES[name], cache / "data", bad="skip")
    return cache


def documentation(name: str) -> dict[str, str]:
    """The docstring's fields: what follows `Paper:`, `Claim:` and `Command:`, on their lines and the indented ones."""
    text = ast.get_docstring(ast.parse(FILES[name].read_text()))
    return {k: " ".join(v.split()) for k, v in re.findall(r"^(\w+): +(\S.*(?:\n +\S.*)*)", text, re.MULTILINE)}


@every_file
def test_a_file_is_short_and_says_what_it_is_of(name):
    assert len(FILES[name].read_text().splitlines()) <= 40
    told = documentation(name)
    assert {"Paper", "Claim", "Command"} <= set(told)
    assert re.search(r"\d{4}\.\d{5}|\d{4}, Machine Learning", told["Paper"]), "an arXiv id, or a journal"
    assert told["Command"].split("  ")[0].startswith(f"jaxrl train experiments/{name}.py")


@every_file
def test_a_file_is_a_valid_config_that_can_be_written_down(name):
    written = config.to_json(config.load(FILES[name]))
    assert config.to_json(config.from_json(json.loads(json.dumps(written)))) == written


@pytest.mark.parametrize("name", [n for n in FILES if n not in BEGINS_WITH])
def test_prompts_and_worked_answers_fit(name, datasets, monkeypatch):
    monkeypatch.setenv("JAXRL_CACHE", str(datasets))
    loaded = config.load(FILES[name])
    task, encode = templates.applied(loaded.task(), loaded.algorithm.prompts.template), loaded.tokenizer().encode
    for i in range(100):
        prompt = task.train[i]
        assert len(encode(prompt.text)) <= loaded.rollout.max_prompt_tokens
        for behaviour in task.behaviours:
            trace = task.trace(prompt, behaviour, i)
            answer = encode("".join(trace))
            assert len(answer) < loaded.rollout.max_response_tokens, "no room for the end of sequence"


def test_every_method_has_a_file():
    assert set(FILE_OF.values()) <= set(FILES)


@pytest.mark.parametrize("row", ALGORITHMS)
def test_a_method_s_file_runs_that_method(row):
    asked, used = ALGORITHMS[row], config.load(FILES[FILE_OF[row]]).algorithm
    for field in ("advantage", "token_advantage", "loss"):
        want, have = getattr(asked, field), getattr(used, field)
        assert (have is None and want is None) or unbound(have) == unbound(want), field
    assert (used.norm, used.kl, used.paper) == (asked.norm, asked.kl, asked.paper)
    assert asked.paper in documentation(FILE_OF[row])["Paper"]
    if FILE_OF[row] == row:
        assert (used.steps_per_batch > 1) == (asked.steps_per_batch > 1)


@pytest.mark.parametrize("row", [n for n, a in ALGORITHMS.items() if a.prompts.template is templates.r1])
def test_answers_end_where_r1_s_template_ends_them(row):
    loaded = config.load(FILES[row])
    assert loaded.rollout.stop == ("</answer>",)
    prompt = templates.applied(loaded.task(), loaded.algorithm.prompts.template).train[0]
    assert prompt.text.endswith("<think>")


# --- every one of them, for three steps ---------------------------------------------------------------------------


def small(loaded: Config) -> Config:
    """The experiment on a base policy that guesses (so that groups are mixed), a few short answers a step.

    Problems are so short that all batches have one shape: what takes the time is compiling.
    """
    if loaded.prime is not None:
        guesses = replace(loaded.prime, stages=(Stage(80, {"no_reasoning": 1.0}),), traces_per_batch=32)
        loaded = replace(loaded, prime=guesses)
    for task in ("task", "task.task", "prime.task"):
        with contextlib.suppress(ValueError):
            loaded = config.override(loaded, f"{task}.terms=(3, 6)")
    a = loaded.algorithm
    if a.critic is not None:
        a = replace(a, critic=replace(a.critic, pretrain=min(1, a.critic.pretrain)))
    return replace(
        loaded,
        algorithm=a,
        model=replace(loaded.model, layers=1),
        optimizer=replace(loaded.optimizer, warmup=0),
        rollout=replace(loaded.rollout, prompts=8, group_size=4, max_response_tokens=32, tokens_per_call=8),
        evaluation=Evaluation(0, 8),
        micro_batches=1,
        steps=3,
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Base policies, each made once for all the experiments that begin with it; and compilation that is quick."""
    quick = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in quick}
    for name, value in quick.items():
        jax.config.update(name, value)
    yield tmp_path_factory.mktemp("bases")
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def teacher(bases, tmp_path_factory):
    """A run that others can be distilled from."""
    folder = tmp_path_factory.mktemp("teacher")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAXRL_CACHE", str(bases))
        trainer.train(small(config.load(FILES["laptop_dapo"])), folder)
    return folder


@pytest.fixture(scope="module")
def exported(bases, tmp_path_factory):
    """Checkpoints of others' format: (name of an experiment) → the folder of its base policy."""

    def of(name):
        run, folder = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("exported") / name
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("JAXRL_CACHE", str(bases))
            trainer.prime_only(small(config.load(FILES[name])), run)
        learner, state, _ = trainer.load_state(run)
        hf.export(state.params, learner.config.model, learner.tokenizer, folder, "float32")
        return folder

    return of


@pytest.mark.slow
@every_file
def test_three_steps_move_the_policy(name, bases, tmp_path, monkeypatch, request):
    monkeypatch.setenv("JAXRL_CACHE", str(request.getfixturevalue("datasets") if name in PREPARED else bases))
    loaded = config.load(FILES[name])
    if loaded.teacher is not None:
        loaded = config.override(loaded, f"teacher.folder={request.getfixturevalue('teacher')}")
    if name in BEGINS_WITH:
        source = request.getfixturevalue("exported")(BEGINS_WITH[name])
        loaded = config.override(loaded, f"init.source={source}", f"tokenizer.folder={source}")
    room = f"rollout.max_response_tokens={ROOM.get(name, 32)}"
    shrunk = config.validate(config.override(small(loaded), room))
    trainer.train(shrunk, tmp_path, source=FILES[name])

    rows = {r["step"]: r for r in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())}
    pretrained = shrunk.total_steps - shrunk.steps
    assert set(rows) == set(range(shrunk.total_steps + 1))
    for step in range(pretrained + 1, shrunk.total_steps + 1):
        assert np.isfinite(rows[step]["loss"])
        assert rows[step]["skipped"] == 0
    for step in range(1, shrunk.total_steps + 1):
        assert rows[step].get("critic/skipped", 0) == 0
        assert ("critic/loss" in rows[step]) == (shrunk.algorithm.critic is not None)

    learner, engine, done = trainer.load_policy(tmp_path)
    assert done == shrunk.total_steps
    with jax.set_mesh(learner.mesh):
        if shrunk.prime is None:
            base = shrunk.init(shrunk.model, learner.mesh)
        else:
            base = sft.prime(shrunk, tmp_path / "base", learner.mesh, lambda: 0)
        begun = trainer.make_engine(learner, base)
    distance = lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max())
    now, then = (dequantized(e.weights.params, np.float32) for e in (engine, begun))
    moved = jax.tree.map(distance, now, then)
    told = name not in PREPARED or min(rows[step]["groups/all_wrong"] for step in (1, 2, 3)) < 1
    assert 0 < max(jax.tree.leaves(moved)) < 0.1 or not told
