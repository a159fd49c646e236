"""Mathematical answers: found where they are marked, right and wrong told apart, hostile ones survived."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest
from rewritings import CASES, FALSE_REJECTS

from jaxrl_llm.config import values
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.extraction import extract
from jaxrl_llm.rewards.workers import isolated
from jaxrl_llm.types import EOS, LENGTH, Prompt, Reward

pytest.importorskip("math_verify")
HERE = Path(__file__).parent
BENCHMARK = HERE.parent.parent / "experiments" / "benchmarks" / "rewards.py"
PUBLISHED = json.loads((HERE / "math_verify_cases.json").read_text())["cases"]
# (gold, response) of the published cases that end differently here, and why.
COMMA = "a comma between digits is no decimal point here"
CHANGED = {
    ("1000.99", "1000,99"): COMMA,
    ("1,22", "1.22"): COMMA,
    ("2.74", "Soucis : 2,74 $ a.."): COMMA,
    ("0,111", "0.111"): COMMA,
    ("$10$", "Answer \\( (9+1) \\)"): "a number is asked, a sum is not evaluated",
    ("$9$", "Answer $ \n 9 \n $"): "a formula may have line breaks",
    ("$9$", "Answer \\( \n 9 \n \\)"): "a formula may have line breaks",
    ("$x \\in [-2,7]$", "$-2 \\\\le x \\\\le 7$"): "an interval and its inequality are one set, both ways",
    ("$f(x)$", "$f(y)$"): "only under strict=False, which is not offered",
    ("$1 - \\frac{1}{\\mathrm{e}}$", "$1 + \\frac{1}{\\mathrm{e}}$"): "it takes e for text there: a false accept",
    (
        "$\\\\boxed{35 cm} ++++++ \\\\boxed{4}$",
        "${35 cm,4}$",
    ): "boxes are a list only with a comma, 'and' or 'or' between",
}


def verdict(case) -> bool:
    gold = case["gold"]
    marked = extract(gold) if "boxed" in gold else extract(gold, last=True) if len(gold) > 60 else None
    response = extract(case["response"], last=True) or case["response"]
    return answers.equal(marked or gold, response, rounding=case.get("precision", 6))


def test_published_cases_end_as_published_but_those_listed():
    differ = {(c["gold"], c["response"]) for c in PUBLISHED if verdict(c) != c["expected"]}
    by_box = {pair for pair in differ if "10,455" in pair[1]}  # the box says 255, the sentence after it 10,455
    assert len(PUBLISHED) == 275
    assert len(by_box) == 1
    assert differ - by_box == set(CHANGED)


def test_rewritings():
    assert len(CASES) == len(set(CASES)) >= 200
    assert [c for c in CASES if answers.equal(*c[:2]) != c[2] and c[:2] not in FALSE_REJECTS] == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} no wait. \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \mid x > 3 \right\}}", r"\left\{ x \mid x > 3 \right\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5.", "5"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\(\boxed{1}\), \(\boxed{2}\)", "1, 2"),
        (r"\boxed{1} and so on. Then \boxed{2}", "2"),
        (r"\boxed{3} **Final Answer** \boxed{3}", "3"),
        (r"\boxed{5", None),
        (r"\boxed{4} then \boxed{5", None),
        (r"\boxed{ }", None),
        ("<answer>5</answer>", "5"),
        (r"<answer>It is \boxed{5}.</answer>", "5"),
        ("<answer>5", None),
        ("<answer>4</answer> <answer>5 </answer>", "5"),
        (r"\boxed{40} = 40\%" + "\n#### 50", "50"),
        ("#### 50\nmore", "50"),
        ("#### 1,000", "1,000"),
        (r"#### 50 \boxed{40}", "40"),
        ("The answer is 5.", None),
        ("", None),
    ],
)
def test_extraction(text, answer):
    assert extract(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5.", "5"),
        ("Final Answer: The final answer is $x+1$. I hope it is correct.", "x+1"),
        ("Answer: Evelyn", "Evelyn"),
        ("He has 3 apples and 1,250.5 pears.", "1,250.5"),
        ("so $x=3$ and then $y = 4$", "y = 4"),
        ("It costs $18", "$18"),
        ("that is 28 percent", "28 percent"),
        ("between 1/2 and -3", "-3"),
        (r"2 + \boxed{9} gives 11", "9"),
        ("nothing", None),
    ],
)
def test_the_last_thing_said_counts_only_where_allowed(text, answer):
    assert extract(text, last=True) == answer
    assert extract(text) == ("9" if "boxed" in text else None)


def test_forms_can_be_chosen():
    assert extract(r"\boxed{1} #### 2", forms=("boxed",)) == "1"
    with pytest.raises(ValueError, match="forms is"):
        extract("", forms=("box",))


def reward(gold, text, finish=EOS, **settings):
    return answers.reward(Prompt(0, "", gold), text, finish, **settings)


def test_rewards():
    assert reward("4", r"\boxed{4}") == Reward(1.0, True, "4")
    assert reward("4", r"\boxed{5}") == Reward(0.0, False, "5")
    assert reward("4", "4") == Reward(0.0, False, None)
    assert reward(4, "#### 4").correct
    assert reward(0.5, r"\boxed{\frac12}").correct
    assert reward("40", "… = 40%\n#### 50").correct is False


def test_an_answer_cut_off_is_wrong_unless_told_otherwise():
    assert reward("4", r"\boxed{4}", LENGTH) == Reward(0.0, False, "4")
    assert reward("4", r"\boxed{4}", LENGTH, truncated=True).correct


def test_one_alternative_suffices():
    golds = "['9.6\\n', '\\\\frac{48}{5}', 'about ten']"
    assert answers.alternatives(golds) == ("9.6", r"\frac{48}{5}", "about ten")
    assert answers.alternatives("[1, 2]") == ("[1, 2]",)
    assert answers.alternatives(["a", 2]) == ("a", "2")
    assert [reward(golds, rf"\boxed{{{a}}}").correct for a in ("9.6", "48/5", "9.7")] == [True, True, False]


def test_settings():
    assert answers.equal("5", r"5\%")
    assert not answers.equal("5", r"5\%", percent=False)
    assert answers.equal("0.05", r"5\%", percent=False)
    assert answers.equal(r"\frac13", "0.333333")
    assert not answers.equal(r"\frac13", "0.3333")
    assert answers.equal(r"\frac13", "0.3333", rounding=4)
    assert not answers.equal("5", "2+3")
    assert answers.equal("5", "2+3", evaluated=False)
    assert not answers.equal("17", r"\int_0^{17} 1 dx", evaluated=False)


def test_golds_are_checked():
    for gold in ("4", "p - q", r"\pi", "['1', '2']", 0.5, r"1,2,\ldots,9", r"\text{Evelyn}", "(1, 2)"):
        answers.check_gold(gold)
    for gold in ("", "  ", None, "$", [], ["4", ""], "9" * 5000, "{" * 50):
        with pytest.raises(ValueError, match="answer is"):
            answers.check_gold(gold)


def test_golds_are_parsed_once():
    answers._parsed.cache_clear()
    for x in "abcde":
        assert not answers.equal("x^2+x", f"x^2+{x}^3")
    assert answers._parsed.cache_info().misses == 6


def test_math_verifys_timeouts_are_caught(monkeypatch):
    import math_verify
    from math_verify.errors import TimeoutException

    def fails(*_, **__):
        raise TimeoutException

    monkeypatch.setattr(math_verify, "verify", fails)
    answers._library.cache_clear()
    assert not answers.equal("x^2", "(x)^2")
    monkeypatch.undo()
    answers._library.cache_clear()
    assert answers.equal("x^2", "(x)^2")


def test_without_math_verify_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    answers._library.cache_clear()
    answers._parsed.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'jaxrl_llm\[data\]'"):
        answers.equal("x^2", "x^3")


def test_long_texts_are_searched_quickly():
    start = time.monotonic()
    for text in (
        r"\boxed{" * 100_000,
        r"\(" * 500_000,
        "{" * 1_000_000,
        "1,234 " * 100_000,
        "$" * 300_000,
        "answer is " * 50_000,
    ):
        extract(text, last=True)
    extract(r"\boxed{1} and " * 50_000, last=True)
    assert time.monotonic() - start < 5


def hostile(n, share):
    benchmark = values.load_module(BENCHMARK)
    assert len(set(benchmark.HOSTILE)) >= 37
    asked = benchmark.problems(n, share)
    out, _ = benchmark.score(asked, isolated(answers.reward, cpu_s=0.5, memory_mb=1024, workers=2))
    assert len(out) == n
    assert [(p, r) for (p, _, right), r in zip(asked, out, strict=True) if r.correct != bool(right)] == []
    assert all(r.value == 0 for (_, _, right), r in zip(asked, out, strict=True) if right is None)
    assert all(r.outcome == "scored" for (_, _, right), r in zip(asked, out, strict=True) if right is not None)
    return out


def test_hostile_answers_are_worth_nothing_and_harm_no_other():
    assert any(r.outcome == "timed_out" for r in hostile(100, 0.12))


@pytest.mark.parametrize(
    ("gold", "answer", "asked"),
    [
        ("x^2", "9^{9^9}", False),
        ("x^2", "5^{(5^{(5^{(5^5)})}-4)}", False),
        ("x^2", "(10^8)!", False),
        ("x^2", "((9!)!)!", False),
        ("x^2", "(x+1)^{10^6}", False),
        ("x^2", r"\binom{10^9}{2}", False),
        ("x^2", "e^{e^{e^{e^{x}}}}", False),
        ("x^2", "x!" * 60, False),
        ("9^{9^9}", "9^{9^9}+x", True),
        ("x!" * 60, "x!" * 61, True),
        ("2x^{2004}", "2004^{2004}x", True),
        ("x!", r"\frac{2004!}{1999!}", True),
        ("x", "10^{100}x", True),
        ("x", "2^{2^{10}}x", True),
        ("x", "e^{-x^{2^x}}", True),
        ("x", r"\binom{1000}{50}x", True),
        ("x", "+".join(["x"] * 40), True),
    ],
)
def test_what_math_verify_may_not_end_with_is_not_asked(monkeypatch, gold, answer, asked):
    verified = []
    monkeypatch.setattr(answers, "_verify", lambda *pair: verified.append(pair) or False)
    assert not answers.equal(gold, answer)
    assert bool(verified) == asked


@pytest.mark.slow
def test_ten_thousand_answers():
    hostile(10_000, 0.02)


def test_threads_get_the_same_verdicts():
    """A peer's timeouts work by signals, and every score off the main thread was silently 0."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(partial(answers.equal, r"\frac{\sqrt{8}}{2}"), [r"\sqrt 2"] * 8))


@pytest.mark.skipif("JAXRL_DATA" not in os.environ, reason="needs a folder of problems")
def test_golds_of_real_problems_verify():
    for file in Path(os.environ["JAXRL_DATA"]).glob("*.jsonl"):
        for line in file.read_bytes().splitlines()[:300]:
            answers.check_gold(json.loads(line)["answer"])
