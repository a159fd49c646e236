"""eval of suites, --rescore, compare and analyse, on a run of seconds; benchmarks and their judge are stood in for."""

import json
import sys
import types

import pytest
from test_cli import EXPERIMENT, fails, jaxrl, succeeds

from jaxrl_llm.run import suites
from jaxrl_llm.types import Prompt, Reward

SUITES_OF_ITS_OWN = """
from dataclasses import replace
from jaxrl_llm.config import Suite

def longer(at_least=1):
    made = task()
    return replace(made, test=tuple(replace(p, meta={"level": i % 2}) for i, p in enumerate(made.train)))

PLAIN = CONFIG
CONFIG = replace(CONFIG, evaluation=Evaluation(every=0, problems=2, suites={
    "easy": Suite(longer, every=1, problems=5, samples=4),
    "greedy": Suite(longer, problems=3, temperature=0.0, top_p=0.9, max_tokens=3),
}))
"""


@pytest.fixture(scope="module", autouse=True)
def base_policies(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXRL_CACHE", str(tmp_path_factory.mktemp("bases")))
        yield


def judged(prompt, text, finish):
    return Reward(float(text[:1] == prompt.answer), text[:1] == prompt.answer, text[:1] or None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.py").write_text(EXPERIMENT + SUITES_OF_ITS_OWN)
    output = succeeds("train", folder / "tiny.py", "--out", folder / "out", "--set", "evaluation.suites.easy.samples=2")
    return folder / "out", output


@pytest.fixture
def benchmarks(monkeypatch):
    """Recipes of which two of the suite of mathematics are prepared."""
    prompts = tuple(Prompt(i, f"{i:02}*1=", str(i), {"source": "gsm8k"}) for i in range(4))
    asked = []

    def load(name, split=None, root=None):
        asked.append((name, split))
        if name not in ("gsm8k", "amc"):
            raise ValueError(f"{name} is not prepared; run: jaxrl data prepare {name}")
        return prompts

    recipes = types.SimpleNamespace(RECIPES=dict.fromkeys(suites.SUITES["math"]), load=load)
    answers = types.SimpleNamespace(reward=judged, check_gold=lambda answer: None)
    workers = types.SimpleNamespace(isolated=lambda fn: fn)
    for name, module in (("data.recipes", recipes), ("rewards.answers", answers), ("rewards.workers", workers)):
        room, _, last = name.rpartition(".")
        monkeypatch.setitem(sys.modules, f"jaxrl_llm.{name}", module)
        monkeypatch.setattr(sys.modules[f"jaxrl_llm.{room}"], last, module, raising=False)
    return asked


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_suites_in_the_loop_come_when_they_are_due_and_change_no_number_of_the_training(run):
    out, output = run
    (out.parent / "plain.py").write_text(EXPERIMENT)
    succeeds("train", out.parent / "plain.py", "--out", out.parent / "plain")
    with_suites, without = metrics(out), metrics(out.parent / "plain")
    of = lambda row, name: {k for k in row if k.startswith(f"eval/{name}/")}
    assert [bool(of(row, "easy")) for row in with_suites] == [True, True, True]
    assert [bool(of(row, "greedy")) for row in with_suites] == [True, False, True]
    assert {"eval/easy/accuracy", "eval/easy/pass@2", "eval/easy/length/wrong", "eval/easy/constant"} <= set(
        with_suites[1]
    )
    trained = [
        {k: v for k, v in row.items() if not k.startswith(("perf/", "eval/easy", "eval/greedy"))} for row in with_suites
    ]
    assert trained == [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in without]
    assert {row["eval/easy/constant"] for row in with_suites} == {1}  # to its reward the text is all
    assert "base policy: held-out accuracy" in output
    assert ", easy " in output


def test_a_suite_of_the_config_is_measured_as_in_the_loop(run):
    out, _ = run
    printed = succeeds("eval", out, "--suite", "easy", "greedy")
    last = metrics(out)[-1]
    assert f"{out} at step 2, easy, 5 problems × 2 samples" in printed
    assert f"{out} at step 2, greedy, 3 problems × 1 samples" in printed
    found = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("  accuracy")]
    assert found == [round(last["eval/easy/accuracy"], 4), round(last["eval/greedy/accuracy"], 4)]
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("  level")][:2] == [
        ["level", "0"],
        ["level", "1"],
    ]
    greedy = [json.loads(x) for x in (out / "evals" / "greedy-step2-n1-t0.0-p0.9-m3.jsonl").read_text().splitlines()]
    assert greedy[0]["settings"]["max_tokens"] == 3
    assert max(row["tokens"] for row in greedy[1:]) <= 3


def test_benchmarks(run, benchmarks):
    out, _ = run
    code, printed, err = jaxrl("eval", out, "--suite", "math", "--samples", "2", "--temperature", "0.5")
    assert code == 0, err
    assert [line.split(", ")[1] for line in printed.splitlines() if " at step " in line] == ["gsm8k", "amc"]
    assert "skipped math500: math500 is not prepared; run: jaxrl data prepare math500" in err
    assert len(err.splitlines()) == 5
    assert benchmarks == [(name, None) for name in suites.SUITES["math"]]
    benchmarks.clear()
    assert "math500 is not prepared; run: jaxrl data prepare math500" in fails("eval", out, "--suite", "math500")
    assert "did you mean 'amc'?" in fails("eval", out, "--suite", "amx")
    sys.modules["jaxrl_llm.data.recipes"].load = lambda *of: (_ for _ in ()).throw(ValueError("not prepared"))
    code, _, err = jaxrl("eval", out, "--suite", "math")
    assert code == 2
    assert "--suite is 'math'; expected at least one benchmark that can be read (gsm8k: not prepared;" in err


def test_a_jsonl_file_is_a_suite(run, benchmarks, tmp_path):
    out, _ = run
    file = tmp_path / "mine.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i:02}-1=", "answer": "1", "source": "ab"[i % 2]}) + "\n" for i in range(3))
    )
    printed = succeeds("eval", out, "--suite", file, "--problems", "2", "--template", "simple", "--max-tokens", "5")
    assert f"{out} at step 2, mine, 2 problems × 1 samples" in printed
    rows = [json.loads(x) for x in (out / "evals" / "mine-step2-n1-m5-simple.jsonl").read_text().splitlines()]
    assert rows[1]["prompt"] == "Question:\n00-1=\nAnswer:\nLet's think step by step.\n"
    assert rows[1]["question"] == "00-1="
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("  constant")] == ["1.0000"]
    assert "template is 'simpel'; expected did you mean 'simple'?" in fails("eval", out, "--template", "simpel")
    assert "evaluation.suites.mine.samples is 0; expected at least 1" in fails(
        "eval", out, "--suite", file, "--samples", "0"
    )
    assert "--reward is 'a:b'; expected '' without --rescore" in fails("eval", out, "--reward", "a:b")


def test_judged_again_and_compared(run, tmp_path):
    out, _ = run
    succeeds("eval", out, "--problems", "2", "--samples", "2")
    file = out / "evals" / "held-out-step2-n2.jsonl"
    before = file.read_bytes()
    assert "held-out-step2-n2.jsonl: 0 of 4 verdicts have changed" in succeeds("eval", file, "--rescore")
    assert file.read_bytes() == before
    (tmp_path / "rewards.py").write_text(
        "from jaxrl_llm.types import Reward\n\n\ndef all_right(*of):\n    return Reward(1.0, True)\n"
    )
    judge = ("--rescore", "--reward", f"{tmp_path / 'rewards.py'}:all_right", "--out", tmp_path / "again")
    printed = succeeds("eval", out, "--suite", "held-out", *judge)
    assert "  accuracy       1.0000  [1.0000, 1.0000]" in printed
    assert file.read_bytes() == before
    said = succeeds("compare", file, tmp_path / "again" / file.name)
    right = [json.loads(line)["correct"] for line in before.decode().splitlines()[1:]]
    assert said.startswith(f"held-out: {sum(right) / 4:.4f} → 1.0000, {1 - sum(right) / 4:+.4f} [")
    assert "2 problems, " in said
    assert "held-out: " in succeeds("compare", out, out)
    other_suite = tmp_path / "easy.jsonl"
    other_suite.write_bytes(before.replace(b'"held-out"', b'"easy"'))
    assert "is 'of no suite in common'; expected samples of the same suite" in fails("compare", file, other_suite)
    typo = fails("eval", out, "--rescore", "--suite", "typo")
    assert "--suite is 'typo'; expected of those answered: " in typo
    assert "held-out" in typo
    (tmp_path / "cut.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:2]))  # one answer of two
    assert "cut.jsonl is 'without samples'" in fails("eval", tmp_path / "cut.jsonl", "--rescore")
    assert "without samples" in fails("compare", file, tmp_path)
    assert "expected a file of samples, or a run that jaxrl eval has measured" in fails("eval", tmp_path, "--rescore")


def test_analysis(run):
    out, _ = run
    printed = succeeds(
        "analyse", out, "--templates", "none", "r1", "--temperatures", "1.0", "--problems", "2", "--samples", "2"
    )
    assert printed.splitlines()[0] == f"{out} at step 2, 2 problems × 2 samples"
    assert printed.splitlines()[1].split() == ["none", "1", "r1", "1"]
    data = json.loads((out / "analysis.json").read_text())["measured"]
    assert set(data) == {"none 1", "r1 1"}
    assert {
        "accuracy",
        "pass@2",
        "format",
        "reflection",
        "verification",
        "backtracking",
        "subgoals",
        "backward",
    } <= set(data["r1 1"])
    assert (out / "analysis.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (out / "analysis").iterdir()} == {
        "held-out-step2-n2-t1.0-none.jsonl",
        "held-out-step2-n2-t1.0-r1.jsonl",
    }


def test_a_checkpoint_in_hugging_face_format(run, benchmarks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, model = run[0], tmp_path / "model"
    succeeds("export", out, model, "--dtype", "float32")
    error = fails("eval", model)
    assert "--suite is (); expected at least one, for a checkpoint in Hugging Face format" in error
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "00+1=", "answer": "1"}\n')
    printed = succeeds("eval", model, "--suite", file, "--max-tokens", "4", "--samples", "2", "--template", "r1")
    assert f"{model} at step 0, mine, 1 problems × 2 samples" in printed
    rows = (tmp_path / "runs" / "model" / "evals" / "mine-step0-n2-m4-r1.jsonl").read_text().splitlines()
    assert json.loads(rows[1])["prompt"].endswith("User: 00+1=\nAssistant: <think>")
    assert len(rows) == 3
