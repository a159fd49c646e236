"""What the verdicts on P problems × N answers say: pass@k, majorities, intervals over problems, paired tests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Int

SUBSETS = 200  # of a problem's answers, over which a majority is averaged where there are more
RESAMPLES = 2000  # of the problems, for an interval
FLIPS = 10_000  # of signs, for a paired test
_NOISE = re.compile(r"\\left|\\right|\\[,;:! ]|[\s$]|(?<=\d),(?=\d{3}(?!\d))")


def pass_at_k(correct: Bool[np.ndarray, "P N"], k: int) -> Float[np.ndarray, " P"]:
    """1 − C(n−c, k)/C(n, k): the unbiased chance that one of k answers is right (2107.03374), a problem.

    n answers a problem, c of them correct. Raises ValueError unless 1 ≤ k ≤ n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 to {n}, the answers per problem")
    wrong = n - correct.sum(axis=1)
    # C(w,k)/C(n,k) = Π_{i<k} (w−i)/(n−i), 0 as soon as w < k
    i = np.arange(k)
    return 1 - np.prod(np.maximum(wrong[:, None] - i, 0) / (n - i), axis=1)


def majority_at_k(votes: Int[np.ndarray, "P N"], correct: Bool[np.ndarray, "P N"], k: int) -> Float[np.ndarray, " P"]:
    """maj@k: the chance that the commonest of k answers is right (self-consistency, 2203.11171), a problem.

    votes: equal numbers for equal answers, −1 for one that has no vote. Of tied answers each is taken equally often.
    The mean over all subsets of k answers, or over SUBSETS random ones, the same in every call. ValueError as above.
    """
    n = votes.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 to {n}, the answers per problem")
    if math.comb(n, k) <= SUBSETS:
        subsets = list(combinations(range(n), k))
    else:
        rng = np.random.default_rng(0)
        subsets = [rng.permutation(n)[:k] for _ in range(SUBSETS)]
    classes = votes[:, :, None] == np.arange(max(votes.max(initial=0) + 1, 1))  # [P,N,C]
    right, out = classes & correct[:, :, None], np.zeros(len(votes))
    for subset in map(list, subsets):
        count = classes[:, subset].sum(axis=1)
        first = (count == count.max(axis=1, keepdims=True)) & (count > 0)
        share = right[:, subset].sum(axis=1) / np.maximum(count, 1)
        out += (share * first).sum(axis=1) / np.maximum(first.sum(axis=1), 1)
    return out / len(subsets)


def normalised(answer: str) -> str:
    """An answer's text without what does not change it: white space, $, \\left, 1,000's comma, .0, a last full stop."""
    text = re.sub(r"\\[dt]frac", r"\\frac", _NOISE.sub("", answer)).rstrip(".")
    if re.fullmatch(r"[+-]?\d+(\.\d*)?|[+-]?\.\d+", text):
        number = Decimal(text).normalize()
        return f"{number + 0:f}"  # 0 for −0
    return text


def interval(values: Float[np.ndarray, " P"], level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean, problems drawn with replacement (the same draws in every call)."""
    rng, n = np.random.default_rng(0), len(values)
    means = [values[rng.integers(0, n, n)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Paired:
    """B against A on the same problems."""

    problems: int
    a: float  # mean
    b: float
    low: float  # of b − a, the ends of its 95 % interval
    high: float
    better: int  # problems on which B is better
    worse: int
    p: float  # of the permutation test, two-sided
    mcnemar: float | None  # its exact p, for one answer a problem


def paired(a: Float[np.ndarray, " P"], b: Float[np.ndarray, " P"], single: bool = False) -> Paired:
    """Tests of mean(b) = mean(a), a problem's values being a pair; `single`: each is 0 or 1, of one answer.

    Permutation test: under the hypothesis the sign of bᵢ − aᵢ is random; p = (1 + #{|Σ ±dᵢ| ≥ |Σ dᵢ|}) / (1 + FLIPS).
    McNemar's, exact: of the problems that one alone has solved, as many as these or more of one kind, with chance ½.
    """
    d = b - a
    rng, total, far = np.random.default_rng(0), abs(d.sum()), 0
    for _ in range(10):
        signs = rng.integers(0, 2, (FLIPS // 10, len(d)), np.int8) * np.int8(2) - np.int8(1)
        far += int((np.abs(signs @ d) >= total - 1e-9).sum())
    better, worse = int((d > 0).sum()), int((d < 0).sum())
    few, many = min(better, worse), better + worse
    exact = min(1.0, 2 * sum(math.comb(many, i) for i in range(few + 1)) / 2**many) if single else None
    p = (1 + far) / (1 + FLIPS)
    return Paired(len(d), float(a.mean()), float(b.mean()), *interval(d), better, worse, p, exact)
