"""pass@k against every subset, and evaluation as training draws it but from other seeds."""

from itertools import combinations

import numpy as np
import pytest

from jaxrl_llm.run import evals
from jaxrl_llm.run.evals import evaluate, pass_at_k
from jaxrl_llm.types import EOS, LENGTH, Prompt, Reward, Rollouts, Task


def by_subsets(correct, k):
    """Over all ways to take k of the answers, how often one of them is right."""
    rates = []
    for row in correct:
        subsets = list(combinations(row, k))
        rates.append(sum(any(s) for s in subsets) / len(subsets))
    return sum(rates) / len(rates)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_subsets(n):
    rng = np.random.default_rng(n)
    every_count = np.arange(n) < np.arange(n + 1)[:, None]  # 0 to n correct
    for correct in (every_count, rng.permuted(every_count, axis=1), rng.random((7, n)) < 0.3):
        for k in range(1, n + 1):
            np.testing.assert_allclose(pass_at_k(correct, k), by_subsets(correct, k), rtol=1e-12)


def test_pass_at_one_is_accuracy_and_all_is_any():
    correct = np.random.default_rng(0).random((40, 6)) < 0.2
    np.testing.assert_allclose(pass_at_k(correct, 1), correct.mean())
    np.testing.assert_allclose(pass_at_k(correct, 6), correct.any(axis=1).mean())
    assert pass_at_k(np.zeros((3, 4), bool), 4) == 0
    assert pass_at_k(np.ones((3, 4), bool), 2) == 1


def test_pass_at_k_with_many_answers():
    # 1 of 1000 right: C(999, 100)/C(1000, 100) = 9/10, where the binomials themselves overflow
    correct = np.arange(1000)[None] < 1
    np.testing.assert_allclose(pass_at_k(correct, 100), 0.1, rtol=1e-12)


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_must_fit(k):
    with pytest.raises(ValueError, match=f"k is {k}; expected 1 to 4"):
        pass_at_k(np.ones((3, 4), bool), k)


@pytest.mark.parametrize(("asked", "available"), [(3, 5), (9, 5)])
def test_evaluate(monkeypatch, asked, available):
    """The sampler is stood in for: problem i gets i right answers of 4, and answers of i + 1 tokens."""
    calls = []

    def sample_groups(engine, prompts, group, *, seed, draws, max_prompt_tokens, step):
        calls.append((group, seed, draws.tolist(), max_prompt_tokens))
        ids = np.repeat([p.id for p in prompts], group)
        right = np.tile(np.arange(group), len(prompts)) < ids
        blank = np.zeros((len(ids), 1), np.int32)
        finish = np.where(right, EOS, LENGTH)
        texts = tuple("right" if r else "wrong" for r in right)
        lengths = ids + 1
        return Rollouts(prompts, blank, lengths, blank, blank, lengths, finish, texts, draws)

    monkeypatch.setattr(evals.groups, "sample_groups", sample_groups)
    verify = lambda prompt, text, finish: Reward(-1.0, text == "right")
    task = Task((), tuple(Prompt(i, "") for i in range(available)), verify)
    metrics, answers, rewards = evaluate(object(), task, problems=asked, samples=4, seed=5, max_prompt_tokens=8)

    count = min(asked, available)
    assert calls == [(4, 2**31 + 5, list(range(count)), 8)]
    correct = np.arange(4) < np.arange(count)[:, None]
    expected = {
        "eval/accuracy": correct.mean(),
        "eval/pass@2": by_subsets(correct, 2),
        "eval/pass@4": by_subsets(correct, 4),
        "eval/length": np.arange(1, count + 1).mean(),
        "eval/truncated": 1 - correct.mean(),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, err_msg=name)
    assert [r.correct for r in rewards] == correct.reshape(-1).tolist()
    assert len(answers.prompts) == count
