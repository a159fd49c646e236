"""The rules that find behaviours, and the numbers of an analysis by hand."""

import math
from dataclasses import replace

import pytest

from jaxrl_llm.reports import analysis, evaluation
from jaxrl_llm.run.evals import Sample

# Sentences of the kind that the papers quote, and which rules find something in each.
SAID = {
    "Let me check: 3 * 5 = 15, which is correct.": {"reflection", "verification"},
    "To verify, we substitute x = 2 back into the equation.": {"verification"},
    "25 + 3 = 28, which is not equal to 27.": {"verification"},
    "Let's double-check the sum.": {"reflection", "verification"},
    "Wait, that is wrong.": {"reflection", "backtracking"},
    "This doesn't work, so let us try another way.": {"backtracking"},
    "Let's go back and use a different approach.": {"backtracking"},
    "Instead, we could try factoring.": {"backtracking"},
    "Hmm, I should reconsider the second case.": {"reflection"},
    "We need to re-evaluate the sum and think again.": {"reflection"},
    "Step 1: find the radius. Step 2: find the area.": {"subgoals"},
    "First, we find the radius.": {"subgoals"},
    "Let's break the problem down into parts.": {"subgoals"},
    "In order to find the area, we need the radius.": {"subgoals"},
    "Working backwards from 24, 24 / 3 = 8.": {"backward"},
    "To reach 24, we need 8 * 3.": {"backward"},
    "Let's start from the end: the target is 24.": {"backward"},
    "The answer is 15.": set(),
    "The first number is 5; the waiter steps back home in 3 minutes, a rebate of 2.": set(),
    "3+4=7;7*2=14#14": set(),
    "The check for $20 bounced.": set(),
}


@pytest.mark.parametrize("text", SAID)
def test_what_a_response_says(text):
    assert {name for name, rule in analysis.RULES.items() if rule.search(text)} == SAID[text]


def samples(rows):
    out = []
    for i, (text, tokens, parsed, correct) in enumerate(rows):
        finish = "eos" if parsed else "length"
        out.append(
            Sample(i // 2, i % 2, f"q{i // 2}", None, "1", {}, text, finish, tokens, parsed, parsed, 0.0, correct)
        )
    return out


FOUR = [("wait, no", 4, "1", True), ("so", 2, "2", False), ("let me check: wait", 8, None, False), ("so", 6, "1", True)]


def test_measured_by_hand():
    row = analysis.measured(samples(FOUR))
    assert row["accuracy"] == 1 / 2
    assert row["pass@2"] == 1
    assert row["format"] == 3 / 4
    assert row["truncated"] == 1 / 4
    assert row["reflection"] == row["backtracking"] == 1 / 2
    assert row["verification"] == 1 / 4
    assert (row["accuracy/with"], row["accuracy/without"]) == (1 / 2, 1 / 2)
    assert (row["length/correct"], row["length/wrong"]) == (5, 5)
    silent = analysis.measured(samples([("so", 1, "1", True)] * 2))
    assert math.isnan(silent["accuracy/with"])
    assert silent["accuracy/without"] == 1


def test_table_and_picture(tmp_path):
    rows = {"none 1": analysis.measured(samples(FOUR)), "r1 1": analysis.measured(samples([("so", 1, "1", True)] * 2))}
    lines = analysis.table(rows)
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert lines[0].split() == ["none", "1", "r1", "1"]
    assert cells["accuracy"] == ["0.5000", "1.0000"]
    assert cells["accuracy/with"] == ["0.5000", "-"]
    assert cells["length/wrong"] == ["5.0", "-"]
    assert "value" not in cells
    assert len({len(line) for line in lines}) == 1
    analysis.picture(rows, tmp_path / "a.png", "title", "subtitle")
    first = (tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    analysis.picture(rows, tmp_path / "a.png", "title", "subtitle")
    assert (tmp_path / "a.png").read_bytes() == first


def test_numbers_have_intervals_baselines_and_groups():
    found = [replace(s, meta={"source": "ab"[s.problem]}) for s in samples(FOUR)]
    lines = evaluation.numbers(found, (True, False))
    by_name = {line.split()[0] if "source" not in line else line.split()[1]: line for line in lines}
    assert by_name["accuracy"].split()[1:] == ["0.5000", "[0.5000,", "0.5000]"]
    assert by_name["constant"].split()[1] == "0.5000"
    assert by_name["length/correct"].split()[1] == "5.0000"
    assert by_name["a"].endswith("constant 1.0000, 1 problems")
    assert by_name["b"].endswith("constant 0.0000, 1 problems")
    assert "  constant       -" in evaluation.numbers(found)


def test_a_comparison_pairs_questions_whatever_their_place_and_template():
    a = samples(FOUR)
    b = [
        replace(s, problem=1 - s.problem, question=s.prompt, prompt=f"<{s.prompt}>", correct=s.problem == 1) for s in a
    ]
    b = sorted(b, key=lambda s: s.problem)
    assert evaluation.compared("s", a, b).startswith("s: 0.5000 → 0.5000, +0.0000 [-0.5000, +0.5000], p 1; 2 problems")
    one = [s for s in a if s.number == 0], [s for s in b if s.number == 0]
    assert "McNemar's 1;" in evaluation.compared("s", *one)
    assert "2 problems, 1 of one alone" in evaluation.compared("s", [*a, replace(a[0], problem=2, prompt="q2")], b)
    with pytest.raises(ValueError, match="s is 'no question that both have answered'"):
        evaluation.compared("s", a, [replace(s, prompt="?") for s in a])
