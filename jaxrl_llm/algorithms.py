"""The named methods: a row is a choice of pure functions, not a class.

The trainer hands each function, by keyword, exactly the arrays that its signature names. A new method is a function
and a row, or an `Algorithm` that an experiment file builds for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxrl_llm import advantages, losses, rollouts
from jaxrl_llm.rewards import length

ADVANTAGE_ARRAYS = ("rewards", "lengths")
LOSS_ARRAYS = ("logp", "old_logp", "sampler_logp", "adv", "mask")
CORRECTION_ARRAYS = ("old_logp", "sampler_logp", "mask")
LENGTH_ARRAYS = ("n_tokens", "max_len")
FILTER_ARRAYS = ("correct",)


def call(fn: Callable, available: dict[str, Any]) -> Any:
    """fn with those of `available` that its signature names and no partial has bound already."""
    bound = fn.keywords if isinstance(fn, partial) else {}
    names = [n for n in inspect.signature(fn).parameters if n in available and n not in bound]
    return fn(**{name: available[name] for name in names})


def _check(field: str, fn: Callable | None, known: tuple[str, ...]) -> None:
    if fn is None:
        return
    if not callable(fn):
        raise ValueError(f"algorithm.{field} is {fn!r}; expected a function")
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError as error:  # a partial with a keyword that the function does not have
        raise ValueError(f"algorithm.{field}: {error}") from error
    free = [n for n, p in parameters.items() if p.default is p.empty and n not in known]
    if free:
        raise ValueError(f"algorithm.{field} asks for {free[0]!r}; the trainer has {', '.join(known)}")


@dataclass(frozen=True)
class Algorithm:
    """How rewards become an update: loss = Σ w·(c·x + β·kl − κ·entropy)."""

    advantage: Callable  # rewards [P,G] → advantages [P,G]
    loss: Callable  # → x [B,T]
    norm: Literal["token", "sequence", "prompt", "constant", "otm"]  # how w is made
    norm_length: int | None = None  # L_max of `constant`; None: the most tokens a response may have
    correction: Callable | None = None  # → c [B,T]
    kl: str | None = None  # the estimator; None: no reference policy
    kl_coef: float = 0.0  # β
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0  # κ
    signed_reward: bool = False  # rewards of 0…1 become −1…+1
    length_reward: Callable | None = None  # added to the reward: (n_tokens [B], max_len) → [B]
    overlong_filter: bool = False  # truncated responses leave the loss, and still count in their group
    group_filter: Callable | None = None  # correct [P,G] → Bool[P]; sampling goes on until P groups pass
    updates_per_batch: int = 1
    optimizer_reset: bool = False  # a fresh optimiser state for every batch of rollouts
    paper: str = ""

    def __post_init__(self) -> None:
        _check("advantage", self.advantage, ADVANTAGE_ARRAYS)
        _check("loss", self.loss, LOSS_ARRAYS)
        _check("correction", self.correction, CORRECTION_ARRAYS)
        _check("length_reward", self.length_reward, LENGTH_ARRAYS)
        _check("group_filter", self.group_filter, FILTER_ARRAYS)
        if self.kl is not None and self.kl not in losses.KL_KINDS:
            raise ValueError(f"algorithm.kl is {self.kl!r}; expected one of {', '.join(losses.KL_KINDS)}")
        if self.kl_coef and self.kl is None:
            raise ValueError(f"algorithm.kl_coef is {self.kl_coef} but algorithm.kl is None; expected an estimator")

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None and self.kl_coef != 0


ALGORITHMS: dict[str, Algorithm] = {
    "reinforce": Algorithm(
        advantages.raw, losses.reinforce, "constant", norm_length=1, paper="Williams 1992, Machine Learning 8"
    ),
    "rloo": Algorithm(
        advantages.rloo, losses.reinforce, "constant", norm_length=1, kl="k1", kl_coef=0.05, kl_in="reward",
        paper="2402.14740",
    ),
    "grpo": Algorithm(
        advantages.grpo, losses.ppo_clip, "sequence", kl="k3", kl_coef=0.04, paper="2402.03300"
    ),
    "dr_grpo": Algorithm(advantages.dr_grpo, losses.ppo_clip, "constant", paper="2503.20783"),
    "dapo": Algorithm(
        advantages.grpo,
        partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28),
        "token",
        signed_reward=True,
        length_reward=partial(length.soft_overlong, cache_len=4096),
        group_filter=rollouts.mixed,
        updates_per_batch=16,
        paper="2503.14476",
    ),
}  # fmt: skip
