"""What README shows is what runs."""

import json
import re
import shutil
import sys
from pathlib import Path

from jaxrl_llm import cli
from jaxrl_llm.objective.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def own_problem():
    section = README.split("## Your own problem")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], re.search(r"`(\{\"prompt\".*?\})`", section)[1]


def test_a_problem_of_your_own_in_15_lines(tmp_path, monkeypatch, capsys):
    code, line = own_problem()
    assert len(code.strip().splitlines()) <= 15
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "my.py").write_text(code)
    first = json.loads(line)
    chain = lambda *terms: {
        "prompt": "".join(f"{'abc'[i]}{t}" for i, t in enumerate(terms)) + ":",
        "answer": str(sum(terms) % 5),
    }
    assert first == chain(3, 4, 2), "the example is right"
    problems = [first, *(chain(i, j, k) for i in range(5) for j in range(5) for k in range(5))]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXRL_CACHE", str(tmp_path / "cache"))
    small = [
        "steps=2", "prime.stages.0.batches=2", "prime.stages.1.batches=1", "algorithm.group_filter=None",
        "rollout.prompts=4", "evaluation.problems=4", "rollout.max_response_tokens=16", "model.layers=1",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["jaxrl", "train", "my.py", *(w for s in small for w in ("--set", s))])
    cli.main()
    assert "held-out accuracy" in capsys.readouterr().out
    rows = [json.loads(row) for row in (tmp_path / "runs/my/samples.jsonl").read_text().splitlines()]
    assert {r["step"] for r in rows} == {1, 2}
    assert {r["prompt"] for r in rows} <= {p["prompt"] for p in problems}
    assert {r["reward"] for r in rows} <= {0.0, 0.1, 1.0}


def test_files_that_readme_links_exist():
    links = re.findall(r"\]\(([^)h][^)]*)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_the_methods_are_counted():
    assert f"names {len(ALGORITHMS)} methods" in README
