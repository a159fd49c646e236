"""The named methods: a row is a choice of pure functions, not a class.

The trainer hands each function, by keyword, exactly the arrays that its signature names; what a partial has bound is
left alone. A new method is a function and a row, or an `Algorithm` that an experiment file builds for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.data import templates
from jaxrl_llm.objective import advantages, corrections, filters, losses
from jaxrl_llm.rewards import format as formats
from jaxrl_llm.rewards import length
from jaxrl_llm.types import Optimizer, expect

# The names that each kind of function may ask for; the trainer passes their values.
ARRAYS = {
    "advantage": ("rewards", "parts", "lengths", "mask", "prompt_ids", "state", "kept"),
    "token_advantage": ("rewards", "adv", "mask", "values", "kl", "beta", "old_logp", "sampler_logp", "teacher_logp"),
    "loss": ("logp", "old_logp", "sampler_logp", "adv", "mask", "log_router_ratio", "selected"),
    "correction": ("logp", "old_logp", "sampler_logp", "adv", "mask"),
    "updates.select": ("logp", "old_logp", "entropy", "adv", "mask", "key"),
    "updates.token_filter": ("logp", "old_logp", "entropy", "adv", "mask", "key"),
    "updates.phases": ("old_logp", "mask"),
    "shaping.reward": ("rewards", "n_tokens", "n_gold", "correct", "max_len"),
    "shaping.terms": ("rewards", "n_tokens", "n_gold", "correct", "max_len", "text", "finish", "prompt"),
    "group_filter": ("correct", "rewards"),
    "memory": ("n_prompts",),
}
OF_ANSWER = ("text", "finish", "prompt")
# Losses with one value per response; corrections with another factor for each token, which do not go with them.
RESPONSE_LOSSES = (losses.gspo, losses.luspo, losses.gmpo, losses.rspo, losses.opmd)
TOKEN_CORRECTIONS = (corrections.tis, corrections.mis_token)

# A field that is set exactly when a function names what it makes.
_TOGETHER = (("critic", "token_advantage", "values"), ("memory", "advantage", "state"))
_TOGETHER += (("updates.select", "loss", "selected"), ("shaping.parts", "advantage", "parts"))


def call(fn: Callable, available: dict[str, Any]) -> Any:
    """The value of fn, called with those of `available` that its signature names and no partial has bound."""
    return fn(**{name: available[name] for name in inspect.signature(fn).parameters if name in _free(fn, available)})


def wants(fn: Callable | None, name: str) -> bool:
    """Whether the trainer would pass `name` to fn."""
    return fn is not None and bool(_free(fn, (name,)))


def _free(fn: Callable, names: Any) -> list[str]:
    bound = fn.keywords if isinstance(fn, partial) else {}
    return [n for n in inspect.signature(fn).parameters if n in names and n not in bound]


def _check(field: str, fn: Any, names: tuple[str, ...]) -> None:
    expect(callable(fn), f"algorithm.{field}", fn, "a function")
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError as error:  # a partial with a keyword that the function does not have
        raise ValueError(f"algorithm.{field}: {error}") from error
    lacking = [n for n, p in parameters.items() if p.default is p.empty and n not in names]
    if lacking:
        raise ValueError(f"algorithm.{field} asks for {lacking[0]!r}; the trainer has {', '.join(names)}")
    for name in _free(fn, names):
        default, called = parameters[name].default, getattr(Algorithm._base(fn), "__name__", fn)
        # It would never be used, so it may only say "not given": None, or for beta "no penalty".
        if default not in (inspect.Parameter.empty, None, 0.0 if name == "beta" else None):
            unused = f"has the default {name}={default!r}, but the trainer passes its own {name!r}"
            expected = f"expected no default, another name, or functools.partial({called}, {name}={default!r})"
            raise ValueError(f"algorithm.{field}: {called} {unused}; {expected}")


@dataclass(frozen=True)
class Critic:
    """A value function beside the policy, and how it learns."""

    kind: Literal["network", "head"] = "network"  # a decoder begun as the base policy, or a head on the policy's states
    head_std: float = 0.0  # of the value head's random weights; 0: V begins as 0
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # λ of the returns it learns; the policy's own is in `token_advantage`
    clip: float | None = 0.2  # of the value loss
    updates: int = 1  # optimiser steps per batch of rollouts
    mini_batches: int = 1  # the batch is split into; step i learns from mini-batch i mod mini_batches
    pretrain: int = 0  # batches of rollouts that it learns from before the policy's first step
    optimizer: Optimizer = Optimizer(lr=2e-4)


@dataclass(frozen=True)
class Term:
    """A summand of the reward. With weight 0 it is only measured, or a part that an advantage gets.

    A function that names `text`, `finish` or `prompt` is called for each answer, else once for a group [1,G].
    """

    fn: Callable  # → a number, or [P,G]
    weight: float = 1.0
    warmup: int = 0  # steps in which it is not added

    @property
    def of_answer(self) -> bool:
        return any(wants(self.fn, name) for name in OF_ANSWER)


@dataclass(frozen=True)
class Shaping:
    """How the verifier's value becomes the reward that the policy learns from."""

    signed_reward: bool = False  # rewards of 0…1 become −1…+1
    reward: Callable | None = None  # → [B], used instead of the verifier's value
    terms: Mapping[str, Term] = field(default_factory=dict)  # added to it; each is a part of the reward by its name
    parts: tuple[str, ...] | None = None  # names in Reward.parts: what an advantage gets as `parts`, in this order


@dataclass(frozen=True)
class PromptChoice:
    """Which prompts are drawn, how they are worded, and which of their answers are trained on."""

    template: Callable = templates.none  # Prompt → Prompt: the question with its instructions, maybe a length target
    prioritized: bool = False  # prompts are drawn with probability ∝ 1 − their success rate so far
    retire_above: float | None = None  # a prompt with at least this success rate is not drawn again
    resample: bool = True  # sample until P groups pass `group_filter`; False: groups that fail it are masked out
    overlong_filter: bool = False  # truncated responses are masked out, but count in their group's mean and std


@dataclass(frozen=True)
class Updates:
    """The optimiser steps on a batch of rollouts, and the tokens of each."""

    epochs: int = 1  # passes over the mini-batches
    select: Callable | None = None  # → Bool[B,T] of the optimiser batch: the loss's `selected`
    token_filter: Callable | None = None  # → Bool[B,T] of the optimiser batch; tokens with False are masked out
    phases: Callable | None = None  # → a tuple of masks [B,T]: all mini-batches take a step on one, then on the next
    phase_weights: Literal["batch", "phase"] = "batch"  # w's denominators count all tokens, or those of the phase
    # Of a mixture of experts, whose gates stay the live router's: arXiv 2507.18071 (R2), 2510.11370 (R3).
    routing_replay: Literal["", "R2", "R3"] = ""  # all steps take the experts of the old pass (R2), the sampler (R3)


@dataclass(frozen=True)
class Algorithm:
    """How rewards become an update: loss = Σ w·(c·x + β·kl − κ·entropy) + μ·nll."""

    advantage: Callable  # rewards [P,G] → advantages [P,G] or [P,G,T]
    loss: Callable  # → x [B,T]
    norm: Literal["token", "sequence", "prompt", "constant", "otm"]  # how w is made
    norm_length: int | None = None  # L_max of `constant`; None: the most tokens a response may have
    correction: Callable | None = None  # → c [B,T]
    bypass: bool = False  # the sampler's log-probs are the old ones: r = learner/sampler, and no correction
    kl: str | None = None  # the estimator; None: no reference policy
    kl_coef: float = 0.0  # β
    kl_in: Literal["loss", "reward"] = "loss"  # where the penalty goes
    kl_unbiased: bool = False  # the loss is kl times the live π/π_old: its gradient is then KL(policy ‖ reference)'s
    kl_refresh: int = 0  # optimiser steps after which the policy becomes the reference; 0: the base stays it
    entropy_coef: float = 0.0  # κ
    nll_coef: float = 0.0  # μ, of the mean −logp over the tokens of correct responses
    distill_coef: float = 0.0  # of the exact KL(policy ‖ teacher) of each token's distribution, added to kl in the loss
    token_advantage: Callable | None = None  # → advantages [B,T]; rewards are [B], with a critic per token [B,T]
    whiten: bool = False  # advantages to mean 0 and variance 1 over the batch's tokens
    critic: Critic | None = None
    memory: Callable | None = None  # n_prompts → the first `state` of an advantage that keeps one across steps
    shaping: Shaping = Shaping()  # of rewards, see Shaping
    group_filter: Callable | None = None  # → Bool[P], the groups that are learnt from
    prompts: PromptChoice = PromptChoice()
    updates_per_batch: int = 1  # mini-batches, split by whole prompts
    updates: Updates = Updates()
    optimizer_reset: bool = False  # a fresh optimiser state for every batch of rollouts
    paper: str = ""

    def __post_init__(self) -> None:
        for name, names in ARRAYS.items():
            if name != "shaping.terms" and (fn := attrgetter(name)(self)) is not None:
                _check(name, fn, names)
        for name, term in self.shaping.terms.items():
            _check(f"shaping.terms.{name}.fn", term.fn, ARRAYS["shaping.terms"])
        expect(self.kl in (None, *losses.KL_KINDS), "algorithm.kl", self.kl, f"one of {', '.join(losses.KL_KINDS)}")
        if self.kl_coef and self.kl is None:
            raise ValueError(f"algorithm.kl_coef is {self.kl_coef} but algorithm.kl is None; expected an estimator")
        if self.kl_unbiased and (self.kl not in ("k1", "k3") or self.kl_in == "reward"):
            have = f"algorithm.kl is {self.kl!r}, kl_in {self.kl_in!r}"
            raise ValueError(f"algorithm.kl_unbiased is True and {have}; expected 'k1' or 'k3' in the loss")
        if self.bypass and self.correction is not None:
            twice = "the ratio is already learner/sampler, and the mismatch would count twice"
            raise ValueError(f"algorithm.bypass is True and algorithm.correction is set; expected one of them: {twice}")
        for name in ("kl_coef", "kl_refresh", "nll_coef", "distill_coef"):
            expect(attrgetter(name)(self) >= 0, f"algorithm.{name}", attrgetter(name)(self), "at least 0")
        limit = self.norm_length
        expect(limit is None or limit >= 1, "algorithm.norm_length", limit, "None or at least 1 token")
        self._check_responses()
        self._check_advantages()
        if self.nll_coef and self.updates.token_filter is not None:
            expected = "expected 0 with algorithm.updates.token_filter, which would drop some of it"
            raise ValueError(f"algorithm.nll_coef is set; {expected}")
        for made, function, name in _TOGETHER:
            is_set = attrgetter(made)(self) is not None
            if wants(getattr(self, function), name) != is_set:
                have = "is set" if is_set else "is None"
                raise ValueError(f"algorithm.{made} {have}; expected it exactly when {function} names {name!r}")

    def _check_responses(self) -> None:
        """A loss with one value per response needs weights, corrections and steps that take a response as a whole."""
        loss, correction = self._base(self.loss), self._base(self.correction)
        if loss is losses.vespo and correction in TOKEN_CORRECTIONS:
            expected = "expected algorithm.bypass, which makes the sampler's log-probs part of vespo's weight"
            raise ValueError(f"algorithm.correction is {correction.__name__}; {expected}")
        if loss not in RESPONSE_LOSSES:
            return
        why = f", as algorithm.loss is {loss.__name__}"
        if correction in TOKEN_CORRECTIONS:
            expected = f"expected a correction of whole responses{why}"
            raise ValueError(f"algorithm.correction is {correction.__name__}; {expected}")
        expect(self.norm in ("sequence", "otm"), "algorithm.norm", self.norm, f"'sequence' or 'otm'{why}")
        if self.updates.phases is not None:
            raise ValueError(f"algorithm.updates.phases is set; expected None{why}")

    def _check_advantages(self) -> None:
        if self.token_advantage is not None and not wants(self.token_advantage, "adv"):
            if self.advantage is not advantages.raw:
                unseen = "algorithm.token_advantage would not see it, as it does not name 'adv'"
                raise ValueError(f"algorithm.advantage is not advantages.raw; {unseen}")
            gamma = inspect.signature(self.token_advantage).parameters.get("gamma")
            if self.critic is not None and gamma is not None:
                expected = f"that of algorithm.token_advantage, {gamma.default}"
                expect(gamma.default == self.critic.gamma, "algorithm.critic.gamma", self.critic.gamma, expected)
        signed = self._base(self.advantage) is advantages.maxrl and self.shaping.signed_reward
        expect(not signed, "algorithm.shaping.signed_reward", True, "False: maxrl divides by the mean reward")

    @staticmethod
    def _base(fn: Callable | None) -> Callable | None:
        return fn.func if isinstance(fn, partial) else fn

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None and self.kl_coef != 0

    @property
    def needs_teacher(self) -> bool:
        return self.distill_coef != 0 or wants(self.token_advantage, "teacher_logp")

    @property
    def phase_count(self) -> int:
        """How often an epoch goes through the mini-batches: once per mask of `updates.phases`, whatever B and T."""
        if self.updates.phases is None:
            return 1
        arrays = {"old_logp": jax.ShapeDtypeStruct((1, 1), jnp.float32), "mask": jax.ShapeDtypeStruct((1, 1), bool)}
        masks = jax.eval_shape(partial(call, self.updates.phases), arrays)
        expect(isinstance(masks, tuple), "algorithm.updates.phases", self.updates.phases, "one that returns a tuple")
        return len(masks)

    @property
    def steps_per_batch(self) -> int:
        """The policy's optimiser steps on a batch of rollouts: epochs × phases × mini-batches."""
        return self.updates.epochs * self.phase_count * self.updates_per_batch

    @property
    def needs_old(self) -> bool:
        """Whether the learner's own log-probs have to be taken before the batch's first update."""
        u, token_kl = self.updates, self.needs_reference and self.kl_in == "reward"
        asked = any(wants(fn, "old_logp") for fn in (self.token_advantage, u.select, u.token_filter, u.phases))
        return not self.bypass and (self.steps_per_batch > 1 or token_kl or asked)


_GAE_1 = partial(advantages.gae, lam=1.0)
_GRPO = {"advantage": advantages.grpo, "loss": losses.ppo_clip, "norm": "sequence"}
# Of one paper, 2505.12929: advantage reweighting and Lopti.
_LOW_PROBABILITY = {
    "advantage": advantages.grpo, "loss": partial(losses.ppo_clip, clip_high=0.24, dual_clip=10.0), "norm": "token",
    "kl": "k3", "kl_coef": 0.001, "updates_per_batch": 2, "paper": "2505.12929",
}  # fmt: skip
_SOFT_OVERLONG = {"overlong": Term(partial(length.soft_overlong, cache_len=4096))}

# As the papers ran them. Optimiser, batch size and stop strings belong to the run: see the experiment of the same name.
ALGORITHMS: dict[str, Algorithm] = {
    # --- with a critic
    "ppo": Algorithm(
        advantages.raw, losses.ppo_clip, "token", token_advantage=advantages.gae, critic=Critic(lam=0.95, updates=4),
        whiten=True, kl="k1", kl_coef=0.05, kl_in="reward", updates=Updates(epochs=4), paper="1707.06347",
    ),
    "a2c": Algorithm(
        advantages.raw, losses.reinforce, "token", token_advantage=_GAE_1, critic=Critic(clip=None), paper="1602.01783"
    ),
    "orz": Algorithm(
        advantages.raw, losses.ppo_clip, "token", token_advantage=_GAE_1, critic=Critic(updates=12, mini_batches=12),
        whiten=True, prompts=PromptChoice(templates.r1), paper="2503.24290",
    ),
    "vapo": Algorithm(
        advantages.raw, partial(losses.ppo_clip, clip_high=0.28), "token",
        token_advantage=advantages.length_adaptive_gae, critic=Critic(pretrain=50, updates=16, mini_batches=16),
        nll_coef=0.1, updates_per_batch=16, paper="2504.05118",
    ),
    # --- plain policy gradients
    "reinforce": Algorithm(
        advantages.raw, losses.reinforce, "constant", norm_length=1, paper="Williams 1992, Machine Learning 8"
    ),
    "reinforce_pp": Algorithm(
        advantages.raw, losses.ppo_clip, "token", token_advantage=advantages.reinforce_pp, kl="k1", kl_coef=0.01,
        kl_in="reward", updates_per_batch=8, paper="2501.03262",
    ),
    "reinforce_pp_baseline": Algorithm(
        advantages.reinforce_pp_baseline, losses.ppo_clip, "token", kl="k2", kl_coef=0.001, updates_per_batch=8,
        paper="2501.03262",
    ),
    "rloo": Algorithm(
        advantages.rloo, losses.reinforce, "constant", norm_length=1, kl="k1", kl_coef=0.05, kl_in="reward",
        paper="2402.14740",
    ),
    "opo": Algorithm(advantages.opo, losses.reinforce, "token", paper="2505.23585"),
    "gpg": Algorithm(advantages.gpg, losses.gpg, "token", paper="2504.02546"),
    "maxrl": Algorithm(advantages.maxrl, losses.reinforce, "constant", norm_length=1, paper="2602.02710"),
    "topr": Algorithm(
        advantages.raw, losses.topr, "constant", norm_length=1, shaping=Shaping(signed_reward=True),
        updates_per_batch=16, paper="2503.14286",
    ),
    "opmd": Algorithm(
        advantages.opmd, losses.opmd, "sequence",
        shaping=Shaping(terms={"length": Term(length.kimi_length, weight=0.1, warmup=20)}),
        prompts=PromptChoice(prioritized=True), updates_per_batch=4, optimizer_reset=True, paper="2501.12599",
    ),
    # --- GRPO and what was changed in it
    "grpo": Algorithm(**_GRPO, kl="k3", kl_coef=0.04, paper="2402.03300"),
    "dr_grpo": Algorithm(advantages.dr_grpo, losses.ppo_clip, "constant", updates_per_batch=8, paper="2503.20783"),
    "dapo": Algorithm(
        advantages.grpo, partial(losses.ppo_clip, clip_low=0.2, clip_high=0.28), "token",
        shaping=Shaping(signed_reward=True, terms=_SOFT_OVERLONG),
        group_filter=filters.mixed, updates_per_batch=16, paper="2503.14476",
    ),
    "gspo": Algorithm(advantages.grpo, losses.gspo, "sequence", updates_per_batch=4, paper="2507.18071"),
    "gspo_token": Algorithm(advantages.grpo, losses.gspo_token, "sequence", updates_per_batch=4, paper="2507.18071"),
    "gmpo": Algorithm(advantages.grpo, losses.gmpo, "sequence", updates_per_batch=8, paper="2507.20673"),
    "cispo": Algorithm(
        advantages.grpo, losses.cispo, "token", shaping=Shaping(terms=_SOFT_OVERLONG),
        group_filter=filters.mixed, updates_per_batch=16, paper="2506.13585",
    ),
    "sapo": Algorithm(advantages.grpo, losses.sapo, "sequence", updates_per_batch=4, paper="2511.20347"),
    "dcpo": Algorithm(
        advantages.dcpo_sas, losses.dcpo, "otm", memory=advantages.dcpo_sas_init, updates_per_batch=16,
        paper="2509.02333",
    ),
    "rspo": Algorithm(advantages.grpo, losses.rspo, "sequence", updates_per_batch=8, paper="2510.23027"),
    "lite_ppo": Algorithm(advantages.lite_ppo, losses.ppo_clip, "token", updates_per_batch=4, paper="2508.08221"),
    "reinforce_rej": Algorithm(
        advantages.reinforce_rej, losses.ppo_clip, "token", kl="k3", kl_coef=0.001,
        shaping=Shaping(signed_reward=True), updates_per_batch=4, paper="2504.11343",
    ),
    "raft_pp": Algorithm(
        advantages.raft, losses.ppo_clip, "token", kl="k3", kl_coef=0.001,
        shaping=Shaping(signed_reward=True), updates_per_batch=4, paper="2504.11343",
    ),
    "passk_grpo": Algorithm(advantages.passk, losses.ppo_clip, "sequence", updates_per_batch=4, paper="2503.19595"),
    "dppo_tv": Algorithm(
        advantages.dr_grpo, losses.dppo_tv, "token", bypass=True, updates_per_batch=8, paper="2602.04879"
    ),
    "dppo_kl": Algorithm(
        advantages.dr_grpo, losses.dppo_kl, "token", bypass=True, updates_per_batch=8, paper="2602.04879"
    ),
    "luspo": Algorithm(advantages.grpo, losses.luspo, "sequence", updates_per_batch=4, paper="2602.05261"),
    "vespo": Algorithm(advantages.dr_grpo, losses.vespo, "token", bypass=True, updates_per_batch=8, paper="2602.10693"),
    "gdpo": Algorithm(
        advantages.gdpo, losses.ppo_clip, "sequence", shaping=Shaping(parts=("correct", "format")),
        updates_per_batch=4, paper="2601.05242",
    ),
    # --- GRPO on chosen tokens
    "ar": Algorithm(**_LOW_PROBABILITY, token_advantage=advantages.reweight),
    "lopti": Algorithm(**_LOW_PROBABILITY, updates=Updates(phases=filters.lopti_phases)),
    "clip_cov": Algorithm(  # with clips of 1, in the choice of tokens too, hardly any ratio is clipped
        advantages.grpo, partial(losses.clip_cov, clip_low=1.0, clip_high=1.0), "token", group_filter=filters.mixed,
        updates=Updates(select=partial(filters.select_clip_cov, clip_low=1.0, clip_high=1.0)), updates_per_batch=8,
        paper="2505.22617",
    ),
    "kl_cov": Algorithm(
        advantages.grpo, partial(losses.kl_cov, coef=1.0), "token", group_filter=filters.mixed,
        updates=Updates(select=partial(filters.select_cov, frac=2e-3)), updates_per_batch=8, paper="2505.22617",
    ),
    # --- a teacher beside the reward, or in its place
    "opd": Algorithm(advantages.zero, losses.reinforce, "token", distill_coef=1.0, paper="2306.13649"),
    "opd_sampled": Algorithm(
        advantages.zero, losses.ppo_clip, "token", token_advantage=advantages.distilled, bypass=True, paper="2306.08543"
    ),
    # --- whole recipes
    "olmo3": Algorithm(
        advantages.dr_grpo, partial(losses.ppo_clip, clip_low=0.2, clip_high=0.272), "token",
        correction=partial(corrections.tis, cap=2.0), group_filter=filters.varied,
        prompts=PromptChoice(retire_above=0.875), paper="2512.13961",
    ),
    "scalerl": Algorithm(
        advantages.scalerl, losses.cispo, "prompt", bypass=True, group_filter=filters.varied,
        prompts=PromptChoice(resample=False, retire_above=0.9), paper="2510.13786",
    ),
    "simplerl_zoo": Algorithm(
        advantages.grpo, losses.ppo_clip, "token", kl="k3", kl_coef=1e-4, entropy_coef=0.001, updates_per_batch=4,
        paper="2503.18892",
    ),
    "r1_zero": Algorithm(
        **_GRPO, kl="k3", kl_coef=0.001, kl_refresh=400, prompts=PromptChoice(templates.r1),
        shaping=Shaping(terms={"format": Term(formats.think_answer)}), updates_per_batch=16, paper="2501.12948",
    ),
    "l1_exact": Algorithm(
        **_GRPO, kl="k3", kl_coef=0.001, prompts=PromptChoice(templates.with_length),
        shaping=Shaping(reward=length.l1_exact), updates_per_batch=2, paper="2503.04697",
    ),
    "l1_max": Algorithm(
        **_GRPO, kl="k3", kl_coef=0.001,
        prompts=PromptChoice(partial(templates.with_length, text="{question} Think for maximum {n} tokens.")),
        shaping=Shaping(reward=length.l1_max), updates_per_batch=2, paper="2503.04697",
    ),
}  # fmt: skip
