"""Held-out accuracy, pass@k and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxrl_llm.sampler import groups, scoring
from jaxrl_llm.types import LENGTH, Reward, Rollouts, Task

SEED_STREAM = 2**31  # evaluation seeds lie above the training ones, which config keeps below


def pass_at_k(correct: Bool[np.ndarray, "P N"], k: int) -> float:
    """Mean over problems of 1 − C(n−c, k)/C(n, k): the unbiased chance that one of k answers is right (2107.03374).

    n answers a problem, c of them correct. Raises ValueError unless 1 ≤ k ≤ n.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 to {n}, the answers per problem")
    wrong = n - correct.sum(axis=1)
    # C(w,k)/C(n,k) = Π_{i<k} (w−i)/(n−i), 0 as soon as w < k
    i = np.arange(k)
    return float(np.mean(1 - np.prod(np.maximum(wrong[:, None] - i, 0) / (n - i), axis=1)))


def evaluate(
    engine: Any, task: Task, *, problems: int, samples: int, seed: int, max_prompt_tokens: int
) -> tuple[dict[str, float], Rollouts, list[Reward]]:
    """Answers to the first `problems` held-out problems, `samples` each, drawn as in training but from other seeds.

    Returns eval/accuracy (avg@samples), eval/pass@k for k = 2, 4, … up to `samples`, eval/length (tokens) and
    eval/truncated, then the answers and their rewards.
    """
    count = min(problems, len(task.test))
    prompts, drawn = tuple(task.test[i] for i in range(count)), {"seed": SEED_STREAM + seed, "draws": np.arange(count)}
    answers = groups.sample_groups(
        engine, prompts, samples, **drawn, max_prompt_tokens=max_prompt_tokens, step=task.step
    )
    rewards = scoring.score(task, answers)
    correct = np.array([r.correct for r in rewards]).reshape(count, samples)
    metrics = {"eval/accuracy": float(correct.mean())}
    metrics |= {f"eval/pass@{2**i}": pass_at_k(correct, 2**i) for i in range(1, samples.bit_length())}
    truncated = float((answers.finish == LENGTH).mean())
    metrics |= {"eval/length": float(answers.lengths.mean()), "eval/truncated": truncated}
    return metrics, answers, rewards
