"""pass@k and majorities against every subset, intervals and paired tests against closed forms and scipy-free counts."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from jaxrl_llm.run import measures
from jaxrl_llm.run.measures import interval, majority_at_k, normalised, paired, pass_at_k


def by_subsets(correct, k):
    """Over all ways to take k of the answers, how often one of them is right; a problem."""
    return np.array([np.mean([any(s) for s in combinations(row, k)]) for row in correct])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_subsets(n):
    rng = np.random.default_rng(n)
    every_count = np.arange(n) < np.arange(n + 1)[:, None]  # 0 to n correct
    for correct in (every_count, rng.permuted(every_count, axis=1), rng.random((7, n)) < 0.3):
        for k in range(1, n + 1):
            np.testing.assert_allclose(pass_at_k(correct, k), by_subsets(correct, k), rtol=1e-12)


def test_pass_at_one_is_accuracy_and_all_is_any():
    correct = np.random.default_rng(0).random((40, 6)) < 0.2
    np.testing.assert_allclose(pass_at_k(correct, 1), correct.mean(axis=1))
    np.testing.assert_allclose(pass_at_k(correct, 6), correct.any(axis=1))


def test_pass_at_k_with_many_answers():
    # 1 of 1000 right: C(999, 100)/C(1000, 100) = 9/10, where the binomials themselves overflow
    np.testing.assert_allclose(pass_at_k(np.arange(1000)[None] < 1, 100), 0.1, rtol=1e-12)


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_must_fit(k):
    for call in (
        lambda: pass_at_k(np.ones((3, 4), bool), k),
        lambda: majority_at_k(np.zeros((3, 4), int), np.ones((3, 4), bool), k),
    ):
        with pytest.raises(ValueError, match=f"k is {k}; expected 1 to 4"):
            call()


def by_hand(votes, correct, k):
    """maj@k by loops: of each subset the commonest votes, and how often an answer with such a vote is right."""
    scores = []
    for subset in combinations(range(len(votes)), k):
        having = {v: [i for i in subset if votes[i] == v] for v in {votes[i] for i in subset} - {-1}}
        most = max(map(len, having.values()), default=0)
        first = [np.mean([correct[i] for i in group]) for group in having.values() if len(group) == most]
        scores.append(np.mean(first) if first else 0.0)
    return np.mean(scores)


def test_a_majority_is_that_of_every_subset():
    rng = np.random.default_rng(3)
    votes = rng.integers(-1, 3, (12, 6))
    correct = (votes == 1) & (rng.random((12, 6)) < 0.9)  # an answer that is cut short may say the right thing
    for k in range(1, 7):
        np.testing.assert_allclose(
            majority_at_k(votes, correct, k), [by_hand(v, c, k) for v, c in zip(votes, correct, strict=True)]
        )


def test_majorities_by_hand():
    votes = np.array([[0, 0, 1, 2], [0, 0, 1, 1], [-1, -1, -1, 0], [-1, -1, -1, -1]])
    np.testing.assert_allclose(majority_at_k(votes, votes == 0, 4), [1, 0.5, 1, 0])
    np.testing.assert_allclose(majority_at_k(votes, votes == 1, 4), [0, 0.5, 0, 0])


def test_a_majority_of_some_of_many_answers_is_near_the_mean_over_all_subsets():
    votes = np.array([[0] * 7 + [1] * 5 + [2] * 3])
    want = by_hand(votes[0], votes[0] == 0, 5)  # of 3,003 subsets
    assert abs(majority_at_k(votes, votes == 0, 5)[0] - want) < 0.08
    assert majority_at_k(votes, votes == 0, 5) == majority_at_k(votes, votes == 0, 5)


EQUAL = [
    ("1,000", "1000"), ("$\\dfrac{1}{2}$", "\\frac{1}{2} "), ("0.50", ".5"), ("-0", "0"), ("7.", "7.0"), ("+3", "3"),
    ("\\left( 3, 4\\right)", "(3,4)"), ("x \\, y", "xy"), ("100", "100.00"), ("1,234,567.5", "1234567.50"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal_texts(a, b):
    assert normalised(a) == normalised(b)


def test_unequal_texts():
    different = ["1", "10", "100", "1,0", "(1,0)", "-1", "0.1", "\\frac{1}{2}", "\\frac{2}{1}", "x", "X", ""]
    assert len(set(map(normalised, different))) == len(different)


@pytest.mark.slow
def test_an_interval_covers_the_mean_as_often_as_it_says():
    """400 samples of 60 problems of mean 0.3; also the width is that of the normal approximation."""
    rng, hits, widths = np.random.default_rng(0), 0, []
    for _ in range(400):
        values = (rng.random(60) < 0.3).astype(float)
        low, high = interval(values)
        hits += low <= 0.3 <= high
        widths.append(high - low)
    assert 0.91 < hits / 400 < 0.98
    np.testing.assert_allclose(np.mean(widths), 2 * 1.96 * np.sqrt(0.3 * 0.7 / 60), rtol=0.05)
    assert interval(np.ones(5)) == (1, 1)


def test_paired_against_all_signs():
    rng = np.random.default_rng(1)
    a, b = rng.random(10), rng.random(10) + 0.2
    d = b - a
    signs = np.array(list(product((-1, 1), repeat=10)))
    exact = (abs(signs @ d) >= abs(d.sum()) - 1e-9).mean()
    found = paired(a, b)
    assert abs(found.p - exact) < 0.015
    np.testing.assert_allclose((found.a, found.b, found.problems), (a.mean(), b.mean(), 10))
    assert (found.better, found.worse, found.mcnemar) == ((d > 0).sum(), (d < 0).sum(), None)
    assert found.low <= d.mean() <= found.high


def test_mcnemar_by_hand():
    a, b = np.array([1.0] * 2 + [0.0] * 9 + [1.0] * 5), np.array([0.0] * 2 + [1.0] * 9 + [1.0] * 5)
    found = paired(a, b, single=True)
    assert (found.better, found.worse) == (9, 2)
    np.testing.assert_allclose(found.mcnemar, 2 * (comb(11, 0) + comb(11, 1) + comb(11, 2)) / 2**11)
    assert abs(found.p - found.mcnemar) < 0.015  # of ±1 the two are one test
    same = paired(a, a, single=True)
    assert (same.mcnemar, same.p, same.low, same.high) == (1, 1, 0, 0)


def test_under_the_hypothesis_small_ps_are_rare():
    rng = np.random.default_rng(0)
    ps = [paired(rng.random(30), rng.random(30)).p for _ in range(60)]
    assert np.mean(np.array(ps) < 0.1) < 0.25
    assert measures.FLIPS == 10_000
