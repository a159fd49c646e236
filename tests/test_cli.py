"""The command line: bad input is one line and exit code 2; a run leaves its files; what is interrupted goes on."""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from cases import slow
from jax.experimental.compilation_cache import compilation_cache

import jaxrl_llm
from jaxrl_llm import cli
from jaxrl_llm import config as configs
from jaxrl_llm.config import values
from jaxrl_llm.objective import advantages
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.run import folder, trainer
from jaxrl_llm.run.stopping import Stopped

ROOT = Path(__file__).parent.parent
EXPERIMENT = """
import itertools
import os
import time

import numpy as np

from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.config import Config, Evaluation, Prime, Rollout, Stage
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.types import Optimizer
from jaxrl_llm.types import Prompt, Reward, Task

rewards, traces, filters = itertools.count(), itertools.count(), itertools.count()
before_reward = before_trace = lambda number: None  # for tests to replace
fills_up = lambda number: True


def reward(prompt, text, finish):
    time.sleep(float(os.environ.get("SECONDS_PER_REWARD", 0)))
    before_reward(next(rewards))
    correct = sum(map(ord, text)) % 2 == 0
    return Reward(float(correct), correct)


def never(prompt, text, finish):
    return Reward(0.0, False)


def no_number(logp, mask):
    return logp * np.nan


def trace(prompt, behaviour, seed):
    before_trace(next(traces))
    return prompt.text[:2]


def task(graded=reward):
    problems = tuple(Prompt(i, f"{i:02}+1=", str(i + 1)) for i in range(8))
    return Task(problems[:6], problems[6:], graded, trace, ("clean",))


def group_filter(correct):  # a run asks it for one group at a time
    return np.full(len(correct), len(correct) > 1 or fills_up(next(filters)))


CONFIG = Config(
    task=task,
    model=ModelConfig(vocab_size=112, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=16),
    prime=Prime((Stage(2, {"clean": 1.0}),), 4, Optimizer(lr=1e-2)),
    algorithm=Algorithm(advantages.grpo, losses.ppo_clip, "token", group_filter=group_filter),
    optimizer=Optimizer(lr=1e-3),
    rollout=Rollout(prompts=2, group_size=2, max_prompt_tokens=8, max_response_tokens=4, max_rounds=2),
    evaluation=Evaluation(every=0, problems=2),
    steps=2,
)
"""
# rewards asked for: 2 by the first evaluation, then 4 a step
FIRST_OF_STEP = {1: 2, 2: 6, 3: 10, 4: 14}


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """Base policies, and compiled programs: here and in subprocesses the same few are run again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXRL_CACHE", str(tmp_path_factory.mktemp("bases")))
        options = {
            "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        before = {name: getattr(jax.config, name) for name in options}
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def jaxrl(*arguments):
    """Exit code, stdout and stderr of a command, in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["jaxrl", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def succeeds(*arguments):
    code, out, err = jaxrl(*arguments)
    assert (code, err) == (0, ""), out
    return out


def fails(*arguments):
    """The one line that the command leaves on stderr."""
    code, out, err = jaxrl(*arguments)
    assert code == 2, (out, err)
    assert err.startswith("jaxrl: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in out + err
    return err.removeprefix("jaxrl: ").strip()


def stops(number, *arguments):
    """stdout of a command that a signal ends in good order."""
    code, out, err = jaxrl(*arguments)
    assert (code, err) == (number, ""), out
    return out


def settings(*assignments):
    return [word for a in assignments for word in ("--set", a)]


@pytest.fixture
def experiment(tmp_path):
    file = tmp_path / "tiny.py"
    file.write_text(EXPERIMENT)
    return file


@pytest.fixture
def module(experiment):
    """The experiment as the commands of this process will find it: its hooks can be set."""
    return values.load_module(experiment)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run):
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows(run)]


def checkpoints(run):
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir())


# ---- a run that goes well


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.py").write_text(EXPERIMENT)
    output = succeeds("train", folder / "tiny.py", "--out", folder / "out", "--set", "seed=3")
    return folder / "out", output


def test_train_leaves_its_files(run):
    out, output = run
    names = ("config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "tokenizer", "checkpoints", "tiny.py")
    assert [n for n in names if not (out / n).exists()] == []
    assert (out / "tokenizer" / "tokenizer.json").stat().st_size > 1000
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [row["step"] for row in rows(out)] == [0, 1, 2]
    assert len((out / "samples.jsonl").read_text().splitlines()) == 4  # both prompts of both steps
    assert checkpoints(out) == [2]
    assert json.loads((out / "config.json").read_text())["seed"] == 3
    assert "held-out accuracy on 2 problems" in output
    assert str(out / "curves.png") in output


def test_show_prints_json_that_makes_the_same_config(run):
    out, _ = run
    printed = succeeds("show", out.parent / "tiny.py", "--set", "seed=3")
    written = json.loads((out / "config.json").read_text())
    assert json.loads(printed) == {k: v for k, v in written.items() if k != "jaxrl_llm"}  # the version that wrote it
    assert configs.to_json(configs.from_json(json.loads(printed))) == json.loads(printed)
    assert succeeds("show", out / "config.json") == printed
    assert json.loads(succeeds("show", out / "config.json", "--set", "steps=9"))["steps"] == 9


def test_eval_measures_the_newest_checkpoint(run):
    out, _ = run
    printed = succeeds("eval", out, "--problems", "5", "--samples", "4")
    values = dict(line.split()[:2] for line in printed.splitlines()[1:])
    assert printed.splitlines()[0] == f"{out} at step 2, 2 problems × 4 samples"  # of two held-out ones
    assert {"accuracy", "pass@2", "pass@4", "maj@4", "constant", "length"} <= set(values)
    assert 0 <= float(values["accuracy"]) <= float(values["pass@2"]) <= float(values["pass@4"]) <= 1
    file = out / "evals" / "held-out-step2-n4.jsonl"
    assert len(file.read_text().splitlines()) == 1 + 2 * 4
    logged = [row["eval/accuracy"] for row in rows(out) if "eval/accuracy" in row][-1]
    once = succeeds("eval", out, "--out", out.parent / "elsewhere")  # as in the run: one sample
    assert abs(float(once.split()[once.split().index("accuracy") + 1]) - logged) < 5e-5
    written = file.read_bytes()
    assert succeeds("eval", out, "--problems", "5", "--samples", "4") == printed  # from the file
    file.unlink()
    assert succeeds("eval", out, "--problems", "5", "--samples", "4") == printed
    assert file.read_bytes() == written


def test_sample_answers_a_problem(run):
    out, _ = run
    answers = succeeds("sample", out, "01+1=", "--n", "3")
    assert answers == succeeds("sample", out, "01+1=", "--n", "3")
    assert answers != succeeds("sample", out, "01+1=", "--n", "3", "--seed", "1")
    assert fails("sample", out, "é") == fails("sample", out, "é")
    assert "no token for ['é']" in fails("sample", out, "é")
    assert "9 tokens; expected 1 to rollout.max_prompt_tokens = 8" in fails("sample", out, "012345678")


def test_sft_makes_the_base_policy_alone_and_train_goes_on_from_it(module, experiment, tmp_path):
    asked = []
    module.before_trace = asked.append
    printed = succeeds("sft", experiment, "--out", tmp_path / "out")
    assert f"base policy in {tmp_path / 'out' / 'base'}: held-out accuracy" in printed
    assert checkpoints(tmp_path / "out" / "base") == [2]
    assert len(asked) == 8
    assert "base policy from" in succeeds("sft", experiment, "--out", tmp_path / "other")  # the cache
    assert "at step 0" in succeeds("eval", tmp_path / "out", "--problems", "2")
    saved = tmp_path / "other" / "base" / "checkpoints"
    (saved / "2").rename(saved / "1")
    error = fails("eval", tmp_path / "other", "--problems", "2")
    assert "base policy after 1 of 2 batches'; expected a finished one (jaxrl sft)" in error
    succeeds("train", experiment, "--out", tmp_path / "out")
    assert len(asked) == 8
    assert checkpoints(tmp_path / "out") == [2]


def test_a_base_policy_of_another_config_is_not_taken(experiment, tmp_path):
    succeeds("sft", experiment, "--out", tmp_path / "out")
    error = fails("train", experiment, "--out", tmp_path / "out", *settings("prime.optimizer.lr=0.5", "steps=3"))
    assert "base holds another base policy (prime.optimizer.lr: 0.01 → 0.5); expected a new folder" in error


# ---- methods by name


def test_algorithms_prints_the_table_or_one_method_in_full():
    lines = succeeds("algorithms").splitlines()
    assert [line.split()[0] for line in lines] == ["name", *ALGORITHMS]
    printed = succeeds("algorithms", "dapo")
    assert "ppo_clip(clip_high=0.28)" in printed
    assert "x = −min(r·A, clip(r, 1−clip_low, 1+clip_high)·A)" in printed  # what the loss says of itself


def test_a_method_by_name_takes_the_place_of_the_experiments_own_before_set(experiment):
    changed = ("--set", "algorithm.loss.clip_high=0.5", "--algorithm", "olmo3", "--set", "steps=5")
    shown = json.loads(succeeds("show", experiment, *changed))
    assert shown["algorithm"]["loss"]["with"] == {"clip_low": 0.2, "clip_high": 0.5}
    assert shown["algorithm"]["advantage"] == "jaxrl_llm.objective.advantages:dr_grpo"
    assert (shown["algorithm"]["prompts"]["retire_above"], shown["steps"], shown["rollout"]["prompts"]) == (0.875, 5, 2)
    assert json.loads(succeeds("show", experiment))["algorithm"]["advantage"] == "jaxrl_llm.objective.advantages:grpo"


def test_an_unknown_method_is_one_line_with_the_nearest_name(experiment, tmp_path):
    expected = "algorithm 'rlo': no such method; did you mean 'rloo'?"
    assert fails("algorithms", "rlo") == expected
    assert fails("show", experiment, "--algorithm", "rlo") == expected
    for command in ("train", "sft"):
        assert fails(command, experiment, "--algorithm", "rlo", "--out", tmp_path / "out") == expected
    assert not (tmp_path / "out").exists()


def test_train_and_sft_get_the_method_and_the_printed_command_keeps_it(experiment, tmp_path, monkeypatch):
    seen = []

    def train(config, out, **kept):
        seen.append((config, kept["resume"]))
        raise Stopped(signal.SIGINT)

    def prime_only(config, out, **kept):
        seen.append((config, None))
        raise Stopped(signal.SIGHUP)

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(trainer, "prime_only", prime_only)
    asked = ("--algorithm", "rloo", "--set", "algorithm.kl_coef=0.5", "--out", tmp_path / "a folder")
    command = printed_command(stops(130, "train", experiment, *asked))
    stops(130, *command[1:])
    stops(129, "sft", experiment, *asked)
    assert [resume for _, resume in seen] == [False, True, None]
    for config, _ in seen:
        assert (config.algorithm.advantage, config.algorithm.kl_coef) == (advantages.rloo, 0.5)


# ---- bad input


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rollout.promts=4", "no field 'promts' in Rollout; did you mean 'prompts'?"),
        ("rollout.prompts=three", "rollout.prompts: 'three' is not valid; expected int"),
        ("algorithm.updates_per_batch=3", "algorithm.updates_per_batch is 3; expected at most rollout.prompts = 2"),
        ("algorithm.loss.clip_high=abc", "algorithm.loss.clip_high: 'abc' is not valid; expected float"),
        ("algorithm.loss.clip_high=-1", "clip_high is -1.0; expected a number >= 0"),
        ("rollout.group_size=1", "rollout.group_size is 1; expected at least 2 for algorithm.group_filter"),
        ("mesh.tensor=2", "'kv_heads'|kv_heads = 1"),
        ("mesh.tensor=16", "mesh: 1×1×16 needs 16 devices, 8 are visible"),
        ("model.vocab_size=90", "model.vocab_size is 90; expected at least 98"),
        ("prime.stages.0.mixture={}", "prime.stages.0.mixture is {}; expected behaviours"),
        ("rollout.max_prompt_tokens=2", "tokens; expected 1 to rollout.max_prompt_tokens = 2"),
    ],
)
def test_a_bad_config_is_one_line(experiment, tmp_path, assignment, message):
    error = fails("train", experiment, "--out", tmp_path / "out", *settings(assignment))
    assert any(m in error for m in message.split("|")), error
    assert not (tmp_path / "out" / "checkpoints").exists() or checkpoints(tmp_path / "out") == []


def test_a_tensor_axis_that_does_not_divide_the_vocabulary(experiment, tmp_path):
    changed = settings("mesh.tensor=2", "model.kv_heads=2", "model.vocab_size=113", "prime=none")
    error = fails("train", experiment, "--out", tmp_path / "out", *changed)
    assert "mesh: tensor = 2 does not divide axis vocab = 113" in error


def test_one_answer_a_prompt_with_leave_one_out(experiment, tmp_path):
    changed = (
        "algorithm.advantage=jaxrl_llm.objective.advantages:rloo",
        "algorithm.group_filter=none",
        "rollout.group_size=1",
    )
    error = fails("train", experiment, "--out", tmp_path / "out", *settings(*changed))
    assert error == "rollout.group_size is 1; expected at least 2 for rloo: the advantage of one answer alone is 0"


def test_groups_that_never_pass_stop_the_run_with_their_pass_rates(experiment, tmp_path):
    changed = settings(f"task.graded={experiment}:never", "algorithm.group_filter=jaxrl_llm.objective.filters:mixed")
    error = fails("train", experiment, "--out", tmp_path / "out", *changed)
    assert "kept 0 of 4 groups in rollout.max_rounds = 2 rounds; expected 2" in error
    assert "100% of the groups all wrong, 0% all correct, mean 0.00" in error


def test_a_folder_that_cannot_be_written(experiment, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", tmp_path / "file"):
        assert f"--out {out}: cannot be written (" in fails("train", experiment, "--out", out)
        assert f"--out {out}: cannot be written (" in fails("sft", experiment, "--out", out)


def test_a_run_is_not_overwritten(run):
    out, _ = run
    before = (out / "metrics.jsonl").read_bytes()
    for command in ("train", "sft"):
        error = fails(command, out.parent / "tiny.py", "--out", out, "--set", "seed=3")
        assert error == f"--out {out}: holds a run already; expected --resume or another folder"
    assert (out / "metrics.jsonl").read_bytes() == before


def test_resume_with_another_config_says_which_fields_differ(run):
    out, _ = run
    changed = settings("seed=4", "optimizer.lr=0.5", "algorithm.loss.clip_high=0.3", "steps=3")
    error = fails("train", out.parent / "tiny.py", "--out", out, "--resume", *changed)
    assert "seed: 3 → 4" in error
    assert "optimizer.lr: 0.001 → 0.5" in error
    assert "algorithm.loss: " in error
    assert "steps" not in error  # a constant schedule may go on longer
    assert json.loads((out / "config.json").read_text())["seed"] == 3


def test_a_finished_run_can_be_made_longer(run, tmp_path):
    out, _ = run
    shutil.copytree(out, tmp_path / "out")
    succeeds("train", out.parent / "tiny.py", "--out", tmp_path / "out", "--resume", *settings("seed=3", "steps=3"))
    assert [row["step"] for row in rows(tmp_path / "out")] == [0, 1, 2, 3]
    assert timeless(tmp_path / "out")[:3] == timeless(out)


def test_what_is_no_run(experiment, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for run in (empty, tmp_path / "none"):
        missing = f"{run / 'config.json'} is missing; expected the folder of an earlier run"
        assert missing in fails("train", experiment, "--resume", "--out", run)
        for command in (["eval", run], ["sample", run, "01+1="], ["gap", run], ["serve", run]):
            missing = f"run {run}: config.json is missing" if run == empty else f"{run}: no such file"
            assert f"{missing}; expected" in fails(*command)
    (empty / "config.json").write_text("{")
    assert str(empty / "config.json") in fails("eval", empty)
    assert list(empty.iterdir()) == [empty / "config.json"]


def test_a_run_without_a_checkpoint(run, tmp_path):
    out, _ = run
    shutil.copyfile(out / "config.json", tmp_path / "config.json")
    assert "no checkpoint; expected one under" in fails("eval", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "broken.py: no such file"),
        ("CONFIG = (\n", "broken.py:1: SyntaxError"),
        ("import no_such_package\n", "broken.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        (
            "from jaxrl_llm.objective.losses import ppo_klip\n",
            "broken.py:1: ImportError: cannot import name 'ppo_klip'",
        ),
        ("\nx = undefined\n", "broken.py:2: NameError"),
        ("x = 1\n", "broken.py: CONFIG is None; expected CONFIG = Config(…)"),
    ],
)
def test_a_broken_experiment_is_one_line(tmp_path, text, message):
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    for command in (["show", file], ["train", file, "--out", tmp_path / "out"]):
        assert message in fails(*command)
    assert not (tmp_path / "out").exists()


def test_exit_code_and_stderr_of_a_process_of_its_own(experiment, tmp_path):
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", str(experiment), "--set", "steps=0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "jaxrl: steps is 0; expected at least 1\n")


def process(command, **environment):
    """Exit code, stdout and stderr of a shell command with `jaxrl` in a process of its own."""
    command = command.replace("jaxrl", f"{sys.executable} -m jaxrl_llm.cli")
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout, done.stderr


def test_a_reader_that_has_enough_and_a_closed_stdout_are_no_errors(experiment):
    # sixteen configs fill the pipe; the reader has gone after a line
    for command in ("jaxrl algorithms", f"jaxrl show {experiment}", "jaxrl train --help"):
        code, out, err = process(f"{command} | head -c 1; exit ${{PIPESTATUS[0]}}")
        assert (code in (0, 141), len(out), err) == (True, 1, "")
        assert process(f"{command} >&-") == (0, "", "")


def test_a_platform_that_is_not_there_is_one_line(experiment, tmp_path):
    command = f"jaxrl train {experiment} --out {tmp_path / 'out'}"
    error = "jaxrl: JAX_PLATFORMS is 'cuda'; expected a platform of this machine, or cpu\n"
    assert process(command, JAX_PLATFORMS="cuda") == (2, "", error)
    assert not (tmp_path / "out").exists()


def test_what_the_command_line_gets_wrong_does_not_wait_for_jax():
    code = "import sys; sys.argv[1:] = sys.argv[1].split(); from jaxrl_llm import cli\n"
    code += "try: cli.main()\nexcept SystemExit: print({'jax', 'flax'} & set(sys.modules))"
    for words, imported in (
        ("train nofile.py", "set()"),
        ("show nosuch", "set()"),
        ("train --nonsense", "set()"),
        ("train experiments/laptop_dapo.py --set steps=0", "{'jax'}"),
    ):
        command = [sys.executable, "-c", code, words]
        assert subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout == f"{imported}\n"


def test_the_commands_their_examples_and_the_version():
    lines = succeeds().splitlines()
    assert [line[2:14].strip() for line in lines[1:]] == list(cli.COMMANDS)
    assert max(map(len, lines)) <= 80
    for name in cli.COMMANDS:
        examples = succeeds(*name.split(), "--help").partition("examples:\n")[2].splitlines()
        assert len(examples) == 2
        assert all(e.startswith(f"  jaxrl {name}") for e in examples)
    assert succeeds("--version") == f"jaxrl_llm {jaxrl_llm.__version__}\n"


def test_a_dataset_is_prepared(tmp_path):
    lines = [{"question": f"{i} + 1 =", "answer": f"so\\n#### {i + 1}"} for i in range(5)]
    for name, rows in (("train", lines[1:]), ("test", lines[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ("--from", tmp_path / "train.jsonl", tmp_path / "test.jsonl", "--root", tmp_path / "root", "--check", "")
    out = succeeds("data", "prepare", "gsm8k", *found).splitlines()
    assert out[:2] == ["test: 1 kept", "train: 4 kept"]
    assert out[2].startswith(f"{tmp_path}/root/gsm8k/1.0.")
    assert "licence: MIT" in out[2]
    where = ("--root", tmp_path / "root", "--licence", "own")
    assert succeeds("data", "prepare", tmp_path / "train.jsonl", *where).startswith("train: 4 kept\n")
    (tmp_path / "train.jsonl").write_text('{"text": "a", "gold": "b"}\n')
    error = fails("data", "prepare", tmp_path / "train.jsonl", *where)
    assert "train.jsonl:1: no column problem or question or prompt (there are text, gold)" in error
    mapped = ("--prompt", "text", "--answer", "gold", "--split", "test")
    assert succeeds("data", "prepare", tmp_path / "train.jsonl", *where, *mapped).startswith("test: 1 kept\n")
    error = fails("data", "prepare", tmp_path / "train.jsonl", "--from", tmp_path / "test.jsonl")
    assert "no recipe; expected one of gsm8k, math" in error
    assert fails("data", "prepare", tmp_path / "gone.jsonl").startswith(f"{tmp_path}/gone.jsonl: no such f")


def test_problems_are_chosen_by_what_a_policy_answers(run, tmp_path):
    out, _ = run
    lines = [{"prompt": f"{i:02}+1=", "answer": str(i + 1), "kind": "sum"} for i in range(6)]
    lines += [{"prompt": "a prompt of many characters", "answer": "1"}, lines[0], {"prompt": "07+1=", "answer": "8"}]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (tmp_path / "exam.jsonl").write_text('{"question": "07+1="}\n')
    where = (tmp_path / "raw.jsonl", "--out", tmp_path / "good.jsonl", "--against", tmp_path / "exam.jsonl")
    policy = ("--policy", out, "--samples", "3", "--direct", "#", "--direct-tokens", "2")
    found = succeeds("curate", *where, *policy).splitlines()
    counts = sorted(" ".join(line.split()) for line in found[:-1])
    assert counts == ["1 evaluation problem", "1 near-duplicate", "1 too long", "6 kept"]
    kept = [json.loads(line) for line in (tmp_path / "good.jsonl").open()]
    assert [{k: row[k] for k in ("prompt", "answer", "kind")} for row in kept] == lines[:6]
    assert all(row["pass_rate"] * 3 in range(4) and row["direct_rate"] * 3 in range(4) for row in kept)
    first = (tmp_path / "good.jsonl").read_text()
    succeeds("curate", *where, *policy, "--hardest", "0.5")
    assert len((tmp_path / "good.jsonl").read_text().splitlines()) == 3
    succeeds("curate", *where, *policy)
    assert (tmp_path / "good.jsonl").read_text() == first  # the same answers are drawn again
    error = fails("curate", *where, *policy, "--pass-rate", "0.01", "0.02")
    assert "rows kept of 9 is 0; expected at least one; dropped: {" in error
    assert "sources is (); expected at least one" in fails("curate", "--out", tmp_path / "x.jsonl")


def test_an_empty_folder_name_is_none_of_a_folder(experiment):
    for command in ("train", "sft"):
        assert fails(command, experiment, "--out", "") == "--out is ''; expected a folder"


def test_show_takes_a_runs_folder(run):
    out, _ = run
    assert json.loads(succeeds("show", out)) == json.loads(succeeds("show", out / "config.json"))
    assert json.loads(succeeds("show", out, "--set", "steps=9"))["steps"] == 9


@pytest.mark.parametrize("asked", [(), ("--set", "compile_cache="), ("--set", "compile_cache=elsewhere")])
@pytest.mark.parametrize("environment", [{}, {"JAX_COMPILATION_CACHE_DIR": "mine"}])
def test_compiled_programs_are_kept_where_the_config_says_unless_the_environment_says_it(
    experiment, tmp_path, monkeypatch, asked, environment
):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    cli.use_devices(configs.load(experiment, asked[1:]))
    kept = str(tmp_path / "xla") if not asked else asked[1].partition("=")[2]
    expected = {} if environment or not kept else {"jax_compilation_cache_dir": f"{kept}/jax-{jax.__version__}"}
    assert {k: v for k, v in found.items() if k.endswith("dir")} == expected


# ---- interrupted and failed runs

FOUR = settings("steps=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.py").write_text(EXPERIMENT)
    succeeds("train", folder / "tiny.py", "--out", folder / "out", *FOUR)
    return timeless(folder / "out")


def printed_command(output):
    line = output.strip().splitlines()[-1]
    assert line.startswith("stopped; go on with: jaxrl train ")
    return shlex.split(line.removeprefix("stopped; go on with: "))


def test_a_signal_lets_the_step_end_saves_and_prints_the_command_that_goes_on(module, experiment, tmp_path, whole):
    def terminate(number):
        if number == FIRST_OF_STEP[2] + 1:
            os.kill(os.getpid(), signal.SIGHUP)

    module.before_reward = terminate
    out = tmp_path / "a folder"
    command = printed_command(stops(129, "train", experiment, "--out", out, *FOUR))
    assert [row["step"] for row in rows(out)] == [0, 1, 2]
    assert checkpoints(out) == [2]
    assert (out / "curves.png").exists()
    succeeds(*command[1:])
    assert timeless(out) == whole


def test_a_signal_while_priming(module, experiment, tmp_path, whole):
    def terminate(number):
        if number == 2:  # of the first batch's 4
            os.kill(os.getpid(), signal.SIGTERM)

    module.before_trace = terminate
    command = printed_command(stops(143, "train", experiment, "--out", tmp_path / "out", *FOUR))
    assert checkpoints(tmp_path / "out" / "base") == [1]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    succeeds(*command[1:])
    assert timeless(tmp_path / "out") == whole


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once_and_keeps_the_steps_done(module, experiment, tmp_path, whole, second):
    def interrupt(number):
        if number == FIRST_OF_STEP[3]:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), second)
            time.sleep(5)  # never: the signal ends it
            pytest.fail("went on")

    module.before_reward = interrupt
    stops(128 + second, "train", experiment, "--out", tmp_path / "out", *FOUR)
    assert checkpoints(tmp_path / "out") == [2]
    succeeds("train", experiment, "--out", tmp_path / "out", "--resume", *FOUR)
    assert timeless(tmp_path / "out") == whole


@pytest.mark.parametrize("step", [1, 3])
def test_a_reward_that_raises_names_the_prompt_and_loses_no_step(module, experiment, tmp_path, whole, step):
    def refuse(number):
        if number == FIRST_OF_STEP[step] + 2:
            raise KeyError("the grader is down")

    module.before_reward = refuse
    out = tmp_path / "out"
    error = fails("train", experiment, "--out", out, *FOUR)
    assert error.startswith("reward of prompt ")
    assert "raised KeyError: 'the grader is down' at " in error
    assert f"{experiment}:" in error
    assert "(prompt '0" in error
    assert "', response " in error
    assert [row["step"] for row in rows(out)] == list(range(step))
    assert checkpoints(out) == ([step - 1] if step > 1 else [])
    succeeds("train", experiment, "--out", out, "--resume", *FOUR)  # the counter has passed the bad place
    assert timeless(out) == whole


def test_a_group_filter_that_gives_up_late_loses_no_step(module, experiment, tmp_path, whole):
    module.fills_up = lambda number: number not in range(4, 8)  # the third step's four groups
    error = fails("train", experiment, "--out", tmp_path / "out", *FOUR)
    assert "kept 0 of 4 groups in rollout.max_rounds = 2 rounds" in error
    assert checkpoints(tmp_path / "out") == [2]
    succeeds("train", experiment, "--out", tmp_path / "out", "--resume", *FOUR)
    assert timeless(tmp_path / "out") == whole


def test_ctrl_c_in_a_process_of_its_own(experiment, tmp_path):
    """In a terminal the signal comes from outside; the printed command is typed into a shell."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slow = {**os.environ, "PATH": binaries, "SECONDS_PER_REWARD": "0.1"}
    command = ["jaxrl", "train", "tiny.py", "--set", "steps=20", "--out", "out here"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    process = subprocess.Popen(command, env=slow, **pipes)
    deadline, log = time.monotonic() + 120, tmp_path / "out here" / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < 2:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "stopping after this step; once more to stop at once" in output
    done = len(rows(tmp_path / "out here")) - 1
    assert 1 <= done < 20
    assert checkpoints(tmp_path / "out here") == [done]
    line = output.strip().splitlines()[-1].removeprefix("stopped; go on with: ")
    again = subprocess.run(line, shell=True, env={**os.environ, "PATH": binaries}, timeout=120, **pipes)
    assert again.returncode == 0, again.stdout
    assert [row["step"] for row in rows(tmp_path / "out here")] == list(range(21))


# ---- what a run's folder, a checkpoint and a cache do when something is wrong


def changes(folder_):
    """Every file with its bytes, but for what is locked."""
    return {p: p.read_bytes() for p in folder_.rglob("*") if p.is_file() and p.name not in (".lock", "curves.png")}


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "copy")
    return tmp_path / "copy"


def resume(run, copy, *assignments):
    return ("train", run[0].parent / "tiny.py", "--out", copy, "--resume", *settings("seed=3", *assignments))


def test_sys_exit_in_a_reward_or_a_filter_is_an_error(module, experiment, tmp_path):
    module.before_reward = lambda number: sys.exit(0)
    assert "raised SystemExit: 0 at " in fails("train", experiment, "--out", tmp_path / "a")
    module.before_reward, module.fills_up = (lambda number: None), (lambda number: sys.exit(0))
    assert fails("train", experiment, "--out", tmp_path / "b").startswith("the experiment called sys.exit(0)")


def test_an_io_error_on_resume_changes_nothing(run, copy):
    data = max((copy / "checkpoints" / "2").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data.unlink()
    data.symlink_to(data.name)  # cannot be opened, even by root
    before = changes(copy / "tensorboard") | {p: p.read_bytes() for p in copy.glob("*.json*")}
    assert "nothing was changed" in fails(*resume(run, copy, "steps=3"))
    assert (changes(copy / "tensorboard") | {p: p.read_bytes() for p in copy.glob("*.json*")}) == before
    assert checkpoints(copy) == [2]


def test_resume_with_every_checkpoint_damaged_stops_and_changes_nothing(run, copy):
    (copy / "checkpoints" / "2" / "host" / "metadata").write_text("{")
    before = changes(copy)
    code, _, err = jaxrl(*resume(run, copy, "steps=3"))
    assert code == 2
    assert "no checkpoint is whole (2: JSONDecodeError" in err
    assert changes(copy) == before


def test_resume_with_fewer_steps_than_done(run, copy):
    before = changes(copy)
    assert "--resume: steps is 1; expected at least 2, the steps that" in fails(*resume(run, copy, "steps=1"))
    assert changes(copy) == before


def test_a_run_from_before_a_field_was_there_goes_on(run, copy):
    data = json.loads((copy / "config.json").read_text())
    del data["abort_after"], data["rollout"]["zero_gap"]
    (copy / "config.json").write_text(json.dumps(data))
    succeeds(*resume(run, copy, "steps=3"))
    assert json.loads((copy / "config.json").read_text())["abort_after"] == 10


@pytest.mark.slow
def test_what_alters_no_number_or_only_rounding_may_change_and_is_said(run, copy):
    free = ("evaluation.problems=1", "checkpoint.keep=1", "logged_samples=1", "abort_after=3", "steps=3")
    printed = succeeds(*resume(run, copy, *free, "rollout.slots=2", "micro_batches=2"))
    line = next(x for x in printed.splitlines() if "changes no number" in x)
    assert "evaluation.problems: 2 → 1" in line
    assert "abort_after: 10 → 3" in line
    line = next(x for x in printed.splitlines() if "changes rounding" in x)
    assert "rollout.slots: 0 → 2" in line
    assert "micro_batches: 1 → 2" in line
    assert "rollout.temperature: 1.0 → 0.5" in fails(*resume(run, copy, "steps=4", "rollout.temperature=0.5"))


def test_another_number_of_cpu_threads_is_said(run, copy, monkeypatch):
    here = folder.machine()
    monkeypatch.setattr(folder, "machine", lambda: here | {"CPU threads": 77})
    printed = succeeds(*resume(run, copy, "steps=3"))
    assert f"--resume: CPU threads: {here['CPU threads']} → 77 (changes rounding" in printed
    assert "77" not in succeeds(*resume(run, copy, "steps=4"))


def test_an_edited_experiment_is_said(experiment, tmp_path):
    out = tmp_path / "out"
    succeeds("train", experiment, "--out", out)
    experiment.write_text(EXPERIMENT + "\n# edited\n")
    assert f"{experiment} differs from the run's copy {out / 'tiny.py'}: the run goes on with" in succeeds(
        "train", experiment, "--out", out, "--resume", *settings("steps=3")
    )
    experiment.write_text(EXPERIMENT + "\n# edited again\n")
    assert (
        jaxrl("eval", out)[2] == f"{experiment} differs from the run's copy {out / 'tiny.py'}: {experiment} is used\n"
    )


def test_two_runs_in_one_folder(run, copy):
    with folder.lock(copy / ".lock"):
        error = fails(*resume(run, copy, "steps=3"))
    assert f"{copy} is in use by process {os.getpid()} on " in error
    assert " since 20" in error


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path):
    code = f"""import os, pathlib
from jaxrl_llm.run import folder
folder.lock(pathlib.Path({str(tmp_path / "l")!r})).__enter__()
os.kill(os.getpid(), 9)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert "process" in (tmp_path / "l").read_text()
    with folder.lock(tmp_path / "l"):
        assert str(os.getpid()) in (tmp_path / "l").read_text()


def test_steps_that_are_skipped_for_ever_end_the_run(experiment, tmp_path):
    changed = settings(f"algorithm.loss={experiment}:no_number", "steps=9", "abort_after=3", "checkpoint.every=1")
    error = fails("train", experiment, "--out", tmp_path / "out", *changed)
    assert error.startswith("steps 1 to 3 changed nothing (loss and grad_norm not finite): abort_after = 3.")
    assert error.endswith("Last checkpoint: none yet")
    assert checkpoints(tmp_path / "out") == []
    assert [r.get("skipped") for r in rows(tmp_path / "out")] == [None, 1, 1, 1]


def test_steps_that_are_skipped_now_and_then_do_not(module, experiment, tmp_path):
    module.fills_up = lambda number: number // 2 % 2 == 0  # both groups of every second step are masked out
    changed = settings("algorithm.prompts.resample=False", "steps=5", "abort_after=2")
    succeeds("train", experiment, "--out", tmp_path / "out", *changed)
    assert [r.get("skipped") for r in rows(tmp_path / "out")] == [None, 0, 1, 0, 1, 0]


@pytest.mark.slow
def test_the_logged_rate_is_that_of_the_last_step_that_was_applied(experiment, tmp_path):
    changed = settings("optimizer.lr=1e30", "optimizer.schedule=linear", "steps=4")
    succeeds("train", experiment, "--out", tmp_path / "out", *changed)
    applied, skipped = 0, 0
    for row in rows(tmp_path / "out")[1:]:
        applied, skipped = applied + (row["skipped"] == 0), skipped + row["skipped"]
        assert abs(row["lr"] / (1e30 * (1 - (applied - 1) / 4)) - 1) < 1e-5
    assert skipped > 0


def test_an_evaluation_that_raises_loses_no_row(module, experiment, tmp_path):
    def refuse(number):
        if number == FIRST_OF_STEP[3]:
            raise KeyError("down")

    module.before_reward = refuse
    assert "raised KeyError" in fails("train", experiment, "--out", tmp_path / "out")
    assert [row["step"] for row in rows(tmp_path / "out")] == [0, 1, 2]
    assert "loss" in rows(tmp_path / "out")[2]


def test_a_base_policy_that_knows_nothing_stops_a_run_whose_filter_cannot_pass(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SURE", 2)
    changed = (f"task.graded={experiment}:never", "algorithm.group_filter=jaxrl_llm.objective.filters:mixed")
    error = fails("train", experiment, "--out", tmp_path / "a", *settings(*changed))
    assert error.startswith(
        "base policy: 0 of 2 held-out answers are correct, and algorithm.group_filter keeps no group"
    )
    changed = (changed[0], "algorithm.group_filter=none")
    printed = succeeds("train", experiment, "--out", tmp_path / "b", *settings(*changed))
    assert "base policy: held-out accuracy 0.0% (0 of 2): there may be nothing to learn from" in printed


@pytest.mark.parametrize("damage", ["base.json", "data", "nothing finished"])
def test_a_damaged_entry_of_the_base_cache_is_made_anew(experiment, tmp_path, damage, monkeypatch):
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    succeeds("sft", experiment, "--out", tmp_path / "a")
    (entry,) = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    if damage == "base.json":
        (entry / "base.json").write_text("")
    elif damage == "data":
        for file in (p for p in (entry / "checkpoints").rglob("*") if p.is_file()):
            file.write_bytes(b"")
    else:
        shutil.rmtree(entry / "checkpoints")
    printed = succeeds("sft", experiment, "--out", tmp_path / "b")
    assert f"{entry} is kept as {entry}.damaged and made anew" in printed
    assert "priming     2/2" in printed
    again = succeeds("sft", experiment, "--out", tmp_path / "c")
    assert f"base policy from {entry}" in again
    assert "made anew" not in again


@pytest.mark.slow
def test_two_on_one_cold_cache_share_one_priming(experiment, tmp_path):
    environment = {**os.environ, "JAXRL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "jaxrl_llm.cli", "sft", str(experiment), "--out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    both = [subprocess.Popen([*command, str(tmp_path / name)], **pipes) for name in "ab"]
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert sum("priming     2/2" in text for text in outputs) == 1, outputs
    assert sum("base policy from" in text for text in outputs) == 1, outputs


# ---- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB, and a function that makes room on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk]).returncode:
        pytest.skip("only root can mount a disk")
    yield disk, lambda: subprocess.run(["mount", "-o", "remount,size=40m", disk], check=True)
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("free_kb", [slow(0), slow(8), slow(24), slow(60), slow(1200), 1500])
def test_a_full_disk_is_one_line_and_with_room_the_run_goes_on(experiment, tmp_path, whole, small_disk, free_kb):
    disk, make_room = small_disk
    (disk / "ballast").write_bytes(b"x" * 1024 * (3072 - free_kb))
    out, four = disk / "out", settings("steps=4", "checkpoint.every=1")
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", str(experiment), "--out", str(out), *four]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) <= 3, done.stderr
    assert done.stderr.splitlines()[-1].startswith("jaxrl: ")
    assert any(word in done.stderr for word in ("not written", "cannot be written")), done.stderr
    make_room()
    again = [*command, "--resume"] if (out / "config.json").exists() else command
    done = subprocess.run(again, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert timeless(out) == whole
