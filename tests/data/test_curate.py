"""Curation: rules for a row, near-duplicates against a reference, leaks, pass rates, and that reasons are written."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.data import curate
from jaxrl_llm.data.curate import Rules
from jaxrl_llm.data.recipes import Recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "benchmarks"))


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def curated(tmp_path, texts, rules=Rules(), evaluations=(), **settings):  # noqa: B008
    """Kept prompts, and line → (reason, detail) of the others."""
    rows = [{"prompt": t, "answer": "1"} if isinstance(t, str) else t for t in texts]
    file, out = write(tmp_path / "raw.jsonl", rows), tmp_path / "good.jsonl"
    counts = curate.curate([file], out, rules, evaluations, **settings)
    dropped = [json.loads(line) for line in (tmp_path / "good.dropped.jsonl").open()]
    kept = [json.loads(line) for line in out.open()]
    assert counts["kept"] == len(kept)
    assert Counter(d["reason"] for d in dropped) == {k: n for k, n in counts.items() if k != "kept"}
    return [r["prompt"] for r in kept], {int(d["row"].rpartition(":")[2]): (d["reason"], d["detail"]) for d in dropped}


@pytest.mark.parametrize(
    ("text", "answer", "kind"),
    [
        ("Which is odd? (A) 2 (B) 3 (C) 4", "B", "multiple choice"),
        (r"Which? $\textbf{(A)}\ 2 \qquad \textbf{(B)}\ 3$", "3", "multiple choice"),
        ("Which is odd?\nA. 2\nB. 3", "B", "multiple choice"),
        ("Which is odd? A) 2 B) 3", "B", "multiple choice"),
        ("Jar A has 28 marbles. Jar B has 12 more than jar A. Jar C has twice jar B. How many?", "9", ""),
        ("dot(A); dot(B); what is the angle?", "9", ""),
        ("Is 7 a prime?", "True", "true or false"),
        ("Is 7 a prime?", True, "true or false"),
        ("Is 7 a prime?", "Yes.", "true or false"),
        ("Let n be odd. Prove that n^2 is odd.", "", "proof"),
        ("Show that 2 divides n(n+1).", None, "proof"),
        ("Find all primes and prove that there are no more.", "2", ""),
        ("She went to a show. That cost 5 dollars. How much is left?", "5", ""),
        ("What is 2 + 2?", "4", ""),
    ],
)
def test_what_can_be_guessed_by_rules(text, answer, kind):
    assert curate.guessable(text, answer) == kind


def test_the_share_of_a_script():
    assert curate.script_share("2 + 2 = ?", ("LATIN",)) == 1
    assert curate.script_share("Wie groß ist α?", ("LATIN",)) == pytest.approx(10 / 11)
    assert curate.script_share("Wie groß ist α?", ("LATIN", "GREEK")) == 1
    assert curate.script_share("求x的值", ("LATIN",)) == 0.25


def test_each_row_that_is_dropped_has_its_line_and_reason(tmp_path):
    texts = [
        "Tom has 3 apples and buys 4 more at the market. How many apples does he have?",
        "tom has 3 apples, and buys 4 more at the market! How many apples does he have",
        "Tom has 3 apples and buys 5 more at the market. How many apples does he have?",
        {"prompt": "Tom has 3 apples and buys 4 more at the market. How many does he have left?", "answer": "2"},
        "Prove that 2 is even.",
        "求所有正整数的和是多少",
        {"text": "a"},
        "{",
        "A train leaves at noon and drives 60 miles an hour for 3 hours. How far does it get?",
    ]
    exam = [("exam:1", "A train leaves at noon and drives 60 miles an hour for 3 hours. How far does it get in all?")]
    rows = [t if isinstance(t, dict) or t == "{" else {"prompt": t, "answer": "1"} for t in texts]
    file = write(tmp_path / "raw.jsonl", rows)
    counts = curate.curate([file], tmp_path / "good.jsonl", Rules(), exam)
    found = [json.loads(line) for line in (tmp_path / "good.dropped.jsonl").open()]
    assert [(d["row"].rpartition(":")[2], d["reason"], d["detail"]) for d in found if d["reason"] != "not JSON"] == [
        ("2", "near-duplicate", f"{file}:1"),
        ("5", "guessable", "proof"),
        ("6", "language", "0% of its letters are LATIN or GREEK"),
        ("7", "prompt is not text", "there are text"),
        ("9", "evaluation problem", "exam:1"),
    ]
    assert counts == Counter(d["reason"] for d in found) + Counter({"kept": 3})
    assert counts["not JSON"] == 1


def test_near_duplicates_are_those_of_an_exact_comparison(tmp_path):
    """A reference that compares every pair: nothing that it finds is missed but by chance, nothing else is dropped."""
    rng = np.random.default_rng(0)
    vocabulary = [f"{a}{b}" for a in ("ba", "ko", "li", "mu", "ne") for b in ("ran", "tel", "mis", "dor", "x")]
    texts = []
    for _ in range(40):
        tokens = rng.choice(vocabulary, 30).tolist()
        for changes in (0, 1, 3, 6, 12):
            copy = list(tokens)
            for k in rng.choice(30, changes, replace=False):
                copy[k] = str(rng.choice(vocabulary))
            texts.append(" ".join(copy))

    def jaccard(a, b):
        shingles = [{*t.split(), *zip(t.split(), t.split()[1:], strict=False)} for t in (a, b)]
        return len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])

    index, kept, missed = curate.NearDuplicates(0.7), [], 0
    for text in texts:
        near = [t for t in kept if jaccard(t, text) >= 0.7]
        found = index.first(text, text)
        assert not found or found in near
        missed += bool(near) and not found
        if not found:
            kept.append(text)
    assert 40 <= len(kept) < 160
    assert missed <= 1


def test_words_and_signs():
    assert curate.words("A 27-yard rope, x-y = -3 and 5! + n! ... Wow!") == (
        ["a", "27", "yard", "rope", "x", "-", "y", "=", "-", "3", "and", "5", "!", "+", "n", "!", "wow"]
    )


def test_a_text_that_differs_in_a_sign_a_number_or_its_answer_is_another_problem():
    index = curate.NearDuplicates(0.7)
    assert index.first("a", "find the value of x + 3 when x is 4") == ""
    assert index.first("b", "find the value of x - 3 when x is 4") == ""
    assert index.first("c", "find the value of x + 3 when x is 5") == ""
    assert index.first("d", "find the value of x + 3 when x is 4", "7") == ""
    assert index.first("e", "Find  the value of x+3, when x is 4.") == "a"


def test_leaks_within_longer_texts_are_found_and_common_phrases_are_none():
    story = "A farmer plants 12 rows of corn with 30 plants each and loses a third of them to frost in May."
    known = curate.Evaluations([("exam:0", story), ("exam:1", "What is 2 + 2?")], Rules())
    assert (
        known.leak(f"Think about this. {story} How many plants are left? Explain every step of your work.") == "exam:0"
    )
    assert known.leak("what is 2+2") == "exam:1"
    assert known.leak("What is 2 + 3?") == ""
    assert known.leak("A farmer plants 12 rows of corn, then he sells the farm and buys a boat for 30 dollars.") == ""
    off = curate.Evaluations([("exam:0", story)], Rules(leak=0.0, near=0.0))
    assert off.leak(story) == ""


def test_similar_meaning_by_a_model_of_the_users(tmp_path):
    """By the letters of the first word alone: also within one batch, and never by itself."""

    def embed(texts):
        return [np.bincount([ord(c) - 97 for c in t.split()[0]], minlength=26) for t in texts]

    texts = ["silent night is long", "other words here", "listen to this one", "another thing to say", "enlist now"]
    kept, dropped = curated(tmp_path, texts * 1, embed=embed)
    assert kept == [texts[0], texts[1], texts[3]]
    assert dropped == dict.fromkeys((3, 5), ("similar meaning", f"{tmp_path}/raw.jsonl:1"))
    far = curate.Embedded(embed, 0.99)
    assert far.first(["a", "b"], ["abc x", "xyz x"]) == ["", ""]
    assert far.first(["c", "d", "e"], ["zyx", "bca", "xyzz"]) == ["b", "a", ""]


def test_pass_rates_bands_and_the_hardest(tmp_path):
    texts = [f"problem {'abcdefghij'[i]}{i} of the {i}th kind, {i} words" for i in range(10)]
    rate = {t: i / 9 for i, t in enumerate(texts)}

    def rates(prompts):
        told = [{"pass_rate": rate[p.text], "direct_rate": 0.5 * (p.text == texts[4])} for p in prompts]
        return [None if p.text == texts[7] else t for p, t in zip(prompts, told, strict=True)]

    rules = Rules(pass_rate=(0.1, 0.9), direct_rate=0.5)
    kept, dropped = curated(tmp_path, texts, rules, rates=rates)
    assert kept == [texts[i] for i in (1, 2, 3, 5, 6, 8)]
    reasons = {1: "too hard", 5: "answered without reasoning", 8: "too long", 10: "too easy"}
    assert {line: reason for line, (reason, _) in dropped.items()} == reasons
    assert json.loads((tmp_path / "good.jsonl").open().readline())["pass_rate"] == pytest.approx(1 / 9)

    curate.curate([tmp_path / "raw.jsonl"], tmp_path / "h.jsonl", Rules(hardest=0.5), rates=rates)
    assert [json.loads(line)["prompt"] for line in (tmp_path / "h.jsonl").open()] == texts[:4]  # of 9
    dropped = [json.loads(line) for line in (tmp_path / "h.dropped.jsonl").open()]
    assert Counter(d["reason"] for d in dropped) == {"not among the hardest": 5, "too long": 1}


def test_the_hardest_by_a_score_of_the_users(tmp_path):
    rows = [{"prompt": f"{'abcdef'[i]} is {i}", "answer": "1", "score": s} for i, s in enumerate((3, 1, 2, 1, 9, 0))]
    file = write(tmp_path / "raw.jsonl", rows)
    curate.curate([file], tmp_path / "h.jsonl", Rules(hardest=0.5), score="score")
    assert [json.loads(line)["score"] for line in (tmp_path / "h.jsonl").open()] == [1, 1, 0]
    with pytest.raises(ValueError, match="column pass_rate is 'not in all rows a number'; expected a score"):
        curate.curate([file], tmp_path / "i.jsonl", Rules(hardest=0.5))
    assert not list(tmp_path.glob("*i.*"))


def test_nothing_kept_is_an_error_and_leaves_what_was_there(tmp_path):
    curated(tmp_path, ["What is 1 + 1?"])
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    proof = write(tmp_path / "p.jsonl", [{"prompt": "Prove that 1 > 0."}])
    with pytest.raises(ValueError, match="rows kept of 1 is 0; expected at least one; dropped: {'guessable': 1"):
        curate.curate([proof], tmp_path / "good.jsonl", Rules())
    (tmp_path / "p.jsonl").unlink()
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "value"), [("near", 7), ("leak", -0.1), ("hardest", float("nan")), ("ngram", 0), ("pass_rate", (0.9, 0.1))]
)
def test_a_rule_that_cannot_be_met_is_an_error(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} is .*; expected"):
        curate.curate([], tmp_path / "good.jsonl", Rules(**{name: value}))


def test_an_answer_column_that_is_named_has_to_be_there(tmp_path):
    raw = write(tmp_path / "raw.jsonl", [{"prompt": "What is 1 + 1?", "answer": "2"}])
    with pytest.raises(ValueError, match="rows kept of 1 is 0.*'no column gold': 1"):
        curate.curate([raw], tmp_path / "good.jsonl", Rules(), recipe=Recipe(answer=("gold",)))


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*args, **settings):
        raise OSError(28, "No space left on device")

    raw = write(tmp_path / "raw.jsonl", [{"prompt": "What is 1 + 1?", "answer": "2"}])
    monkeypatch.setattr(curate.json, "dumps", full)
    with pytest.raises(OSError, match="not written.*good.jsonl"):
        curate.curate([raw], tmp_path / "good.jsonl", Rules())
    assert [p.name for p in tmp_path.iterdir()] == ["raw.jsonl"]


def test_planted_duplicates_and_leaks_are_found_and_hardly_anything_else(tmp_path):
    import curation as benchmark

    found = benchmark.run(tmp_path, 3000)
    assert found["found of near-duplicate"] >= 0.99
    assert found["found of evaluation problem"] >= 0.99
    assert found["dropped by mistake"] < 0.005
