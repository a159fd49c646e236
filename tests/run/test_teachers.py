"""A run's policy as another run's teacher."""

import json
import shutil
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from cases import CONFIG

from jaxrl_llm import config
from jaxrl_llm.config import Evaluation
from jaxrl_llm.models import hf
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import teachers, trainer

pytestmark = pytest.mark.slow

TINY = replace(CONFIG, steps=1, evaluation=Evaluation(0, 4))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a run of another model."""
    folder = tmp_path_factory.mktemp("teacher")
    trainer.train(replace(TINY, model=replace(TINY.model, mlp_width=48), seed=3), folder)
    return folder


def distilling(folder, name="opd"):
    return replace(TINY, algorithm=ALGORITHMS[name], teacher=partial(teachers.run, folder=str(folder)), steps=2)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 1)])
def test_its_parameters_come_from_the_newest_checkpoint_onto_the_mesh(teacher, shape):
    mesh = sharding.make_mesh(*shape)
    model, tokenizer, load = teachers.run(str(teacher))
    assert (model.mlp_width, tokenizer.size) == (48, 98)
    expected = trainer.load_state(teacher)[1].params
    for got, want in zip(jax.tree.leaves(load(mesh)), jax.tree.leaves(expected), strict=True):
        assert got.sharding.mesh == mesh
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_run_learns_from_it_and_is_evaluated_without_it(teacher, tmp_path):
    there, out = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(teacher, there)
    written = distilling(there)
    trainer.train(written, out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(row["kl/teacher"] > 0 and row["skipped"] == 0 for row in rows[1:])
    read = config.load(out)
    assert config.to_json(read) == config.to_json(written)
    assert config.override(read, "teacher.folder=other").teacher.keywords == {"folder": "other"}
    shutil.rmtree(there)
    assert trainer.load_policy(out)[2] == 2


def test_a_checkpoint_in_hugging_face_s_format_is_the_same_teacher(teacher, tmp_path):
    learner, state, _ = trainer.load_state(teacher)
    hf.export(state.params, learner.config.model, learner.tokenizer, tmp_path / "out", "float32")
    model, tokenizer, load = teachers.checkpoint(str(tmp_path / "out"), dtype="float32")
    assert (model.mlp_width, model.dtype, tokenizer.hf.get_vocab()) == (48, "float32", learner.tokenizer.hf.get_vocab())
    jax.tree.map(np.testing.assert_array_equal, load(learner.mesh), state.params)
    short = teachers.checkpoint(str(tmp_path / "out"))[2](learner.mesh)
    assert (short["embed"].dtype, short["norm"]["scale"].dtype) == (np.dtype("bfloat16"), np.dtype("float32"))
    with pytest.raises(ValueError, match=r"teacher.source is ''; expected a folder, or OWNER/NAME"):
        trainer.train(replace(distilling(teacher), teacher=teachers.checkpoint), tmp_path / "none")


@pytest.mark.parametrize("name", ["opd", "opd_sampled"])
def test_what_is_no_run_is_an_error_before_anything_is_done(name, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(ValueError, match=f"teacher.folder is '{folder}'; expected the folder of a run with"):
            trainer.train(distilling(folder, name), tmp_path / "out" / folder.name)


def test_method_and_teacher_come_together(teacher):
    with pytest.raises(
        ValueError, match="teacher is None; expected a function, as jaxrl_llm.run.teachers:run, exactly"
    ):
        config.validate(replace(TINY, algorithm=ALGORITHMS["opd"]))
    with pytest.raises(
        ValueError, match="teacher is functools.partial.*; expected a function, .* exactly when distill_coef"
    ):
        config.validate(replace(TINY, teacher=partial(teachers.run, folder=str(teacher))))
    by_path = "teacher=jaxrl_llm.run.teachers:run", f"teacher.folder={teacher}"
    assert config.validate(config.override(distilling(teacher), *by_path)).teacher.keywords == {"folder": str(teacher)}
    alone = replace(distilling(teacher), rollout=replace(TINY.rollout, group_size=1))
    assert config.validate(alone) is alone  # one answer is enough: its advantage is the teacher's word
