"""The gap of a checkpoint: what is measured agrees with the learner and the answers themselves; files and errors."""

import json
import math
import re
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from jaxrl_llm import cli
from jaxrl_llm import config as configs
from jaxrl_llm.arrays import TrainState
from jaxrl_llm.config import Config, Rollout
from jaxrl_llm.data import tasks, tokenizers
from jaxrl_llm.learner import batching
from jaxrl_llm.learner.learner import build
from jaxrl_llm.learner.train_step import make_logprobs
from jaxrl_llm.models import transformer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.reports import curves, gap, gap_report
from jaxrl_llm.reports.gap import Gap, Span, Stats
from jaxrl_llm.run.checkpoint import Checkpoints
from jaxrl_llm.types import EOS, LENGTH, Prompt, Rollouts

PROBLEMS, SAMPLES = 5, 3
CONFIG = Config(
    task=partial(tasks.chain, modulus=5, terms=(2, 3)),
    model=ModelConfig(vocab_size=112, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=16),
    algorithm=Algorithm(advantages.grpo, losses.ppo_clip, "token"),
    rollout=Rollout(prompts=2, group_size=2, max_prompt_tokens=16, max_response_tokens=20, slots=16),
    micro_batches=2,
)


def parameters(model):
    """Random ones, under which a policy has opinions, and ends some of its answers."""
    shapes = jax.eval_shape(partial(transformer.init, model), jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda path, x: (rng.normal(size=x.shape) * 0.25 + (path[-1].key == "scale")).astype(np.float32)
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    params["embed"][tokenizers.characters().eos_ids[0]] *= 2
    return params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(configs.to_json(CONFIG)))
    params = parameters(CONFIG.model)
    state = TrainState(params, build(CONFIG).tx.init(params), jnp.int32(0))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(7, jax.tree.map(jnp.asarray, state), {})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def command(run):
    """`jaxrl gap` has been here: what it loaded, and the numbers that it wrote."""
    loaded, load = [], gap.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jaxrl", "gap", str(run), "--problems", "5", "--samples", "3", "--worst", "4"])
        patch.setattr(gap, "load", lambda *given: loaded.append(load(*given)) or loaded[0])
        cli.main()
    return loaded[0], json.loads((run / "gap.json").read_text())


@pytest.fixture(scope="module")
def loaded(command):
    return command[0][:2]


@pytest.fixture(scope="module")
def measured(command):
    return command[1]


def refused(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["jaxrl", "gap", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    return err.removeprefix("jaxrl: ").strip()


# ---- a checkpoint


def test_float32_agrees_and_int8_does_less(measured):
    assert [measured[name] for name in ("step", "problems", "samples", "temperature")] == [7, PROBLEMS, SAMPLES, 1.0]
    found = {s["sampler"]: s["whole"] for s in measured["samplers"]}
    assert list(found) == ["float32", "bfloat16", "int8", "int8 + int8 kv"]
    assert {s["mesh"] for s in measured["samplers"]} == {"1×1×1"}  # one key-value head: no tensor parallelism
    assert 0 < found["float32"]["mean"] <= found["float32"]["max"] < 1e-5
    for name in ("bfloat16", "int8", "int8 + int8 kv"):
        assert found[name]["mean"] > 100 * found["float32"]["mean"], name
        assert found[name]["k3"] > found["float32"]["k3"], name
    assert found["int8 + int8 kv"]["mean"] != found["int8"]["mean"]


def test_ranges_of_lengths_and_of_positions_add_up(measured):
    for sampler in measured["samplers"]:
        whole = sampler["whole"]
        assert whole["answers"] == PROBLEMS * SAMPLES
        assert [(s["first"], s["last"]) for s in sampler["by_length"]] == [(1, 16), (17, 32)]
        assert sum(s["stats"]["answers"] for s in sampler["by_length"]) == whole["answers"]
        for spans in (sampler["by_length"], sampler["by_position"]):
            stats = [s["stats"] for s in spans]
            assert sum(s["tokens"] for s in stats) == whole["tokens"]
            for name in ("mean", "mean_log", "above_1"):
                total = sum(s[name] * s["tokens"] for s in stats)
                np.testing.assert_allclose(total, whole[name] * whole["tokens"], rtol=1e-4)
            assert max(s["max"] for s in stats) == whole["max"]


def test_tokens_are_the_answers_and_the_worst_of_them_are_shown_in_context(loaded, measured):
    learner, params = loaded
    sampler = gap.samplers(learner)[3]
    answers, found = gap.sample_answers(sampler, params), measured["samplers"][3]
    assert answers.lengths.sum() == found["whole"]["tokens"]
    assert (answers.finish == EOS).any()

    batch, _ = batching.make_batch(answers, CONFIG.model)
    whole = make_logprobs(CONFIG.model, 1.0)(params, batch)[0][: len(answers.texts)]
    logp = np.asarray(whole)[:, : answers.tokens.shape[1]]
    mask = np.arange(logp.shape[1]) < answers.lengths[:, None]
    in_parts = gap.learner_logprobs(learner, params, answers)  # 2 prompts at a time, of 5
    np.testing.assert_allclose(in_parts[mask], logp[mask], rtol=1e-5, atol=1e-6)

    p, q = np.exp(logp), np.exp(answers.sampler_logp)
    np.testing.assert_allclose(np.abs(p - q)[mask].mean(), found["whole"]["mean"], rtol=1e-3)
    order = sorted(zip(*np.nonzero(mask), strict=True), key=lambda i: -abs(p[i] - q[i]))
    expected = []
    for row, t in order[:4]:
        prompt, said = answers.prompts[row // SAMPLES].text, answers.tokens[row].tolist()
        context = learner.tokenizer.decode([*learner.tokenizer.encode(prompt), *said[:t]][-20:])
        expected.append((prompt, context, learner.tokenizer.decode(said[t : t + 1]), t))
    assert [(w["prompt"], w["context"], w["token"], w["position"]) for w in found["worst"]] == expected
    np.testing.assert_allclose([w["sampler_p"] for w in found["worst"]], [q[i] for i in order[:4]], rtol=1e-5)
    np.testing.assert_allclose([w["learner_p"] for w in found["worst"]], [p[i] for i in order[:4]], rtol=1e-4)
    assert [w["gap"] for w in found["worst"]] == sorted((w["gap"] for w in found["worst"]), reverse=True)
    np.testing.assert_allclose(found["worst"][0]["gap"], found["whole"]["max"], rtol=1e-4)


def test_a_tensor_parallel_sampler_when_the_sizes_divide():
    config = replace(CONFIG, model=replace(CONFIG.model, kv_heads=2), mesh=configs.Mesh(fsdp=2), micro_batches=1)
    learner = build(config)
    learner = replace(learner, config=replace(config, evaluation=configs.Evaluation(problems=3, samples=2)))
    variants = gap.samplers(learner)
    assert len(variants) == 12
    assert [v.mesh.devices.shape for v in variants[::4]] == [(1, 2, 1), (1, 1, 1), (1, 1, 2)]
    assert [v.config.rollout.dtype for v in variants[:4]] == ["float32", "bfloat16", "int8", "int8"]
    found = gap.measure_gap(learner, parameters(config.model), variants[8], worst=1)
    assert (found.sampler, found.mesh, found.whole.answers) == ("float32", "1×1×2", 6)
    assert 0 < found.whole.max < 1e-6


def test_a_sampler_of_the_runs_own_is_among_them_and_filters_are_not():
    rollout = replace(CONFIG.rollout, dtype="int4", kv_dtype="bfloat16", top_p=0.9, allow_filtered=True)
    variants = gap.samplers(build(replace(CONFIG, rollout=rollout)))
    assert [(v.config.rollout.dtype, v.config.rollout.kv_dtype) for v in variants] == [
        *gap.PRECISIONS,
        ("int4", "bfloat16"),
    ]
    assert {v.config.rollout.top_p for v in variants} == {1.0}


# ---- arrays


def test_summary_of_two_answers():
    p = np.full((2, 24), 0.5, np.float32)
    q = p.copy()
    q[0, 1], q[1, 0], q[1, 16] = 0.25, 0.495, 0.48
    mask = np.arange(24) < np.array([[16], [17]])
    whole, by_length, by_position = gap.summary(np.log(p), np.log(q), mask, 72)  # 3 positions a range
    total = 0.25 + 0.005 + 0.02
    assert (whole.answers, whole.tokens) == (2, 33)
    np.testing.assert_allclose([whole.mean, whole.max], [total / 33, 0.25], rtol=1e-5)
    np.testing.assert_allclose([whole.above_1, whole.above_10], [2 / 33, 1 / 33])
    logs = [math.log(2), math.log(0.5 / 0.495), math.log(0.5 / 0.48)]
    np.testing.assert_allclose(whole.mean_log, sum(logs) / 33, rtol=1e-4)
    np.testing.assert_allclose(whole.k3, sum(math.exp(k) - 1 - k for k in logs) / 33, rtol=1e-4)
    assert [(s.first, s.last, s.stats.tokens) for s in by_length] == [(1, 16, 16), (17, 32, 17)]
    np.testing.assert_allclose([s.stats.mean for s in by_length], [0.25 / 16, 0.025 / 17], rtol=1e-4)
    ranges = [(s.first, s.last, s.stats.tokens) for s in by_position]
    assert ranges == [(0, 2, 6), (3, 5, 6), (6, 8, 6), (9, 11, 6), (12, 14, 6), (15, 17, 3)]
    np.testing.assert_allclose([s.stats.mean for s in by_position], [0.255 / 6, 0, 0, 0, 0, 0.02 / 3], atol=1e-6)


def test_a_token_that_two_answers_begin_with_counts_once():
    tokenizer = tokenizers.characters()
    said = [tokenizer.encode("xy"), tokenizer.encode("xz"), tokenizer.encode("xy")]
    half = np.full((3, 2), np.log(0.5), np.float32)
    answers = Rollouts(
        prompts=(Prompt(0, "ab"),),
        prompt_tokens=np.array([tokenizer.encode("ab")]),
        prompt_lengths=np.array([2]),
        tokens=np.array(said),
        sampler_logp=half,
        lengths=np.array([2, 2, 1]),
        finish=np.array([LENGTH] * 3),
        texts=("xy", "xz", "x"),
        draws=np.array([0]),
    )
    logp = np.log(np.array([[0.9, 0.6], [0.9, 0.3], [0.9, 0.01]], np.float32))  # the last lies past its answer's end
    found = gap.worst_tokens(tokenizer, answers, logp, 10)
    assert [(w.context, w.token, w.position) for w in found] == [("ab", "x", 0), ("abx", "z", 1), ("abx", "y", 1)]
    np.testing.assert_allclose([w.gap for w in found], [0.4, 0.2, 0.1], rtol=1e-5)
    assert gap.worst_tokens(tokenizer, answers, logp, 1) == found[:1]
    assert gap.worst_tokens(tokenizer, answers, logp, 0) == ()


# ---- files, the terminal, errors


def stats(mean, largest):
    return Stats(1, 100, mean, largest, mean, mean, 1.0, 0.0, 0.0)


def row(sampler, mesh, mean, largest):
    spans = tuple(Span(i, i + 3, stats(mean * (i + 1), largest)) for i in range(0, 16, 4))
    return Gap(sampler, mesh, stats(mean, largest), (Span(1, 16, stats(mean, largest)),), spans, ())


@pytest.mark.parametrize("zero", ["none", "some", "all"])
def test_the_picture_has_every_sampler_in_both_panels_and_a_place_for_zero(tmp_path, zero):
    gaps = [row("float32", "1×1×1", 0.0, 0.0) if zero != "none" else row("float32", "1×1×1", 1e-8, 1e-6)]
    gaps += [row("bfloat16", "1×1×1", *((0.0, 0.0) if zero == "all" else (1e-4, 1e-2)))]
    gap_report.picture(gaps, tmp_path / "gap.png", "a run", "step 1")
    pixels = np.round(matplotlib.image.imread(tmp_path / "gap.png")[..., :3] * 255).astype(int)
    assert pixels.shape == (700, 1200, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["gap.png"]
    height = {}
    for color in (curves.BLUE, curves.GREEN):
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        left, right = (
            np.argwhere(np.abs(half - rgb).max(-1) <= 6) for half in (pixels[140:640, 180:640], pixels[140:640, 730:])
        )
        assert len(left) > 30, color
        height[color] = right.mean(axis=0)[0] if len(right) else None
    assert height[curves.GREEN] is not None
    if zero != "all":
        assert height[curves.BLUE] > height[curves.GREEN] + 100  # lower down


def test_tables_fit_100_columns_and_show_text_as_it_is(capsys):
    token = gap.Token("[bold]x\n:smile:", "y" * 60, "[/]", 3, 0.5, 0.25, 0.25)
    names = ["float32", "bfloat16", "int8", "int8 + int8 kv", "int4"]
    gaps = [replace(row(n, "1×1×1", 1e-8, 1e-6), worst=(token,)) for n in names]
    gaps += [row(n, "1×1×2", 1e-3, 0.0) for n in names]
    gap_report.tables(gaps, worst=2)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in re.sub(r"…y{19}", "", out)  # only the context is cut
    assert out.count(r"[bold]x\n:smile:") == 2
    assert out.count("[/]") == 2
    assert out.count("1.0e-08/1.0e-06") == 5  # by length: the first mesh alone
    assert "1.0e-03" in out


def test_bad_arguments_are_one_line(run, monkeypatch, capsys, tmp_path):
    assert refused(monkeypatch, capsys, run, "--problems", 0) == "problems is 0; expected at least 1"
    assert refused(monkeypatch, capsys, run, "--samples", 0) == "samples is 0; expected at least 1"
    assert refused(monkeypatch, capsys, run, "--worst", -1) == "worst is -1; expected at least 0"
    missing = "config.json is missing; expected the folder of a run"
    assert refused(monkeypatch, capsys, tmp_path) == f"run {tmp_path}: {missing}"
    assert list(tmp_path.iterdir()) == []


def test_log_probs_that_are_not_finite_are_an_error(loaded):
    learner, params = loaded
    broken = jax.tree.map(lambda x: x * np.nan, params)
    with pytest.raises(ValueError, match="log-probs is nan; expected finite numbers"):
        gap.measure_gap(learner, broken, gap.samplers(learner)[0], worst=0)
