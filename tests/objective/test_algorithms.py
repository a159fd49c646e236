"""The table of methods: rows as the papers have them, functions that ask only for what the trainer has."""

import dataclasses
import inspect
import json
from dataclasses import is_dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from jaxrl_llm import config
from jaxrl_llm.objective import advantages, corrections, filters, losses
from jaxrl_llm.objective.algorithms import (
    ALGORITHMS,
    ARRAYS,
    Algorithm,
    Critic,
    PromptChoice,
    Shaping,
    Term,
    Updates,
    call,
)
from jaxrl_llm.rewards import length
from jaxrl_llm.run import teachers

GRPO = {"advantage": advantages.grpo, "loss": losses.ppo_clip, "norm": "token"}


WHOLE = {"loss": losses.gspo, "norm": "sequence"}
MASKED = partial(corrections.mis_token, high=2.0)
VALUED = {"advantage": advantages.raw, "token_advantage": advantages.gae, "critic": Critic()}


GROUPS = {"shaping": Shaping, "prompts": PromptChoice, "updates": Updates}


def with_function(field, fn):
    """An Algorithm with `fn` at `field`, which may be a group's: "updates.select"."""
    group, _, name = field.rpartition(".")
    fn = {"mine": Term(fn)} if name == "terms" else fn
    return Algorithm(**{**GRPO, group or name: GROUPS[group](**{name: fn}) if group else fn})


def by_old_logp(old_logp, mask):
    return mask & (old_logp < -1)


def wants_surprise(logp, adv, mask, surprise):
    return logp * surprise


def with_an_option(logp, adv, mask, surprise=2.0):
    return logp * surprise


@pytest.mark.parametrize("field", ARRAYS)
def test_an_array_that_the_trainer_does_not_have_is_an_error_at_construction(field):
    def fn(surprise):
        return surprise

    known, named = ", ".join(ARRAYS[field]), field.replace(".terms", ".terms.mine.fn")
    with pytest.raises(ValueError, match=f"algorithm.{named} asks for 'surprise'; the trainer has {known}$"):
        with_function(field, fn)


def test_a_default_that_would_never_be_used_is_an_error_that_says_what_to_do():
    def mine(rewards, kl, mask, beta=0.5):
        return beta * mask

    want = (
        r"algorithm.token_advantage: mine has the default beta=0.5, but the trainer passes its own 'beta'; expected no "
        r"default, another name, or functools.partial\(mine, beta=0.5\)$"
    )
    whole = {**GRPO, "advantage": advantages.raw, "kl": "k1", "kl_coef": 0.1, "kl_in": "reward"}
    with pytest.raises(ValueError, match=want):
        Algorithm(**{**whole, "token_advantage": mine})
    bound = Algorithm(**{**whole, "token_advantage": partial(mine, beta=0.5)}).token_advantage
    assert call(bound, {"rewards": 1, "kl": 0, "mask": 1, "beta": 0.1}) == 0.5


@pytest.mark.parametrize("field", ARRAYS)
def test_no_name_that_the_trainer_passes_may_have_a_default_that_counts(field):
    name = ARRAYS[field][0]
    with_default = lambda value: eval(f"lambda {name}=value: {name}", {"value": value})
    for value in (1.5, 0.0, ()):
        with pytest.raises(ValueError, match=f"algorithm.{field}.*: .*the default {name}="):
            with_function(field, with_default(value))


def test_what_belongs_to_another_function_is_unknown_too():
    with pytest.raises(ValueError, match="algorithm.advantage asks for 'logp'"):
        Algorithm(**{**GRPO, "advantage": losses.reinforce})
    with pytest.raises(ValueError, match="algorithm.loss asks for 'surprise'"):
        Algorithm(**{**GRPO, "loss": wants_surprise})
    Algorithm(**{**GRPO, "loss": with_an_option})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "ppo_clip"}, "algorithm.loss is 'ppo_clip'; expected a function"),
        ({"loss": partial(losses.ppo_clip, clip_hi=0.3)}, "algorithm.loss: .*clip_hi"),
        ({"kl_coef": 0.1}, r"algorithm.kl_coef is 0\.1 but algorithm.kl is None; expected an estimator"),
        ({"kl": "k9", "kl_coef": 0.1}, r"algorithm.kl is 'k9'; expected one of k1, k2, k3, k1\+, k3\+, abs"),
    ],
)
def test_other_errors_at_construction(fields, message):
    with pytest.raises(ValueError, match=message):
        Algorithm(**{**GRPO, **fields})


def test_a_reference_policy_is_needed_only_when_its_kl_counts():
    assert not Algorithm(**GRPO).needs_reference
    assert not Algorithm(**GRPO, kl="k3").needs_reference
    assert Algorithm(**GRPO, kl="k3", kl_coef=0.1).needs_reference


def test_a_teacher_is_needed_only_when_it_is_listened_to():
    assert not Algorithm(**GRPO).needs_teacher
    assert Algorithm(**GRPO, distill_coef=0.5).needs_teacher
    assert Algorithm(**GRPO, token_advantage=advantages.distilled).needs_teacher
    bound = partial(advantages.distilled, teacher_logp=None)
    assert not Algorithm(**GRPO, token_advantage=bound).needs_teacher


def test_call_passes_only_what_the_signature_names():
    seen = {}

    def fn(b, *, a, c=3):
        seen.update(a=a, b=b, c=c)
        return a + b

    assert call(fn, {"a": 1, "b": 2, "d": 4}) == 3
    assert seen == {"a": 1, "b": 2, "c": 3}
    call(fn, {"a": 1, "b": 2, "c": 5})
    assert seen["c"] == 5
    with pytest.raises(TypeError, match="'a'"):
        call(fn, {"b": 2})


def test_call_leaves_what_a_partial_has_bound():
    limit = {"n_tokens": np.array([60]), "max_len": 96}
    assert call(partial(length.soft_overlong, cache_len=16), limit)[0] == 0
    assert call(partial(length.soft_overlong, cache_len=16, max_len=50), limit)[0] == -1


def row(value):
    """A method (or a part of one) as plain values; a function as its name and all its hyper-parameters."""
    if is_dataclass(value):
        return {f.name: row(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "paper"}
    if isinstance(value, dict):
        return {name: row(inner) for name, inner in value.items()}
    if callable(value):
        free = {
            n: p.default for n, p in inspect.signature(value).parameters.items() if p.default not in (p.empty, None)
        }
        return getattr(value, "func", value).__name__, free
    return value


def test_no_two_rows_are_equal_and_each_is_cited():
    assert len(ALGORITHMS) == 44
    for (name, a), (other, b) in combinations(ALGORITHMS.items(), 2):
        assert row(a) != row(b), f"{name} and {other} are one method"
    assert all(a.paper for a in ALGORITHMS.values())


def test_every_row_is_a_config_and_survives_json():
    base = config.load("experiments/laptop_dapo.py")
    short = {
        "shaping": Shaping(signed_reward=True, terms={"overlong": Term(partial(length.soft_overlong, cache_len=16))})
    }
    for name, a in ALGORITHMS.items():
        a = replace(a, **short) if name in ("dapo", "cispo") else a
        rollout = replace(base.rollout, prompts=48)
        teacher = partial(teachers.run, folder="runs/mine") if a.needs_teacher else None
        whole = config.validate(replace(base, algorithm=a, rollout=rollout, micro_batches=1, teacher=teacher))
        again = config.from_json(json.loads(json.dumps(config.to_json(whole))))
        assert row(again.algorithm) == row(a), name
        assert (again.teacher is None) == (teacher is None), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bypass": True, "correction": corrections.tis}, "algorithm.bypass is True and algorithm.correction is set"),
        ({**WHOLE, "correction": corrections.tis}, "algorithm.correction is tis; expected a correction of"),
        (
            {**WHOLE, "loss": partial(losses.gmpo, clip=0.3), "correction": partial(corrections.mis_token, high=2.0)},
            "mis_token",
        ),
        (
            {**WHOLE, "norm": "token"},
            "algorithm.norm is 'token'; expected 'sequence' or 'otm', as",
        ),
        (
            {**WHOLE, "updates": Updates(phases=filters.lopti_phases)},
            "algorithm.updates.phases is set; expected None, as algorithm",
        ),
        ({"kl": "k1", "kl_coef": -1.0}, "algorithm.kl_coef is -1.0; expected at least 0"),
        ({"norm_length": 0}, "algorithm.norm_length is 0; expected None or at least 1 token"),
        (
            {"nll_coef": 0.1, "updates": Updates(token_filter=losses.top_entropy)},
            "algorithm.nll_coef is set; expected 0",
        ),
        ({"token_advantage": advantages.reinforce_pp}, "algorithm.advantage is not advantages.raw"),
        (
            {"advantage": advantages.maxrl, "shaping": Shaping(signed_reward=True)},
            "algorithm.shaping.signed_reward is True; expected False",
        ),
        ({**VALUED, "critic": Critic(gamma=0.9)}, "algorithm.critic.gamma is 0.9; expected that of .* 1.0"),
        (
            {"advantage": advantages.raw, "token_advantage": advantages.gae},
            "algorithm.critic is None; expected it exactly when token_advantage",
        ),
        ({"critic": Critic()}, "algorithm.critic is set; expected it exactly when token_advantage names 'values'"),
        ({"advantage": advantages.dcpo_sas}, "algorithm.memory is None; expected it exactly when advantage names"),
        ({"loss": losses.clip_cov}, "algorithm.updates.select is None; expected it exactly when loss names 'selected'"),
        (
            {"loss": losses.vespo, "correction": corrections.tis},
            "algorithm.correction is tis; expected algorithm.bypass, which makes the sampler's log-probs part",
        ),
        (
            {"kl": "k2", "kl_coef": 0.1, "kl_unbiased": True},
            "algorithm.kl_unbiased is True and algorithm.kl is 'k2', kl_in 'loss'; expected 'k1' or 'k3' in the loss",
        ),
        ({"kl": "k3", "kl_coef": 0.1, "kl_in": "reward", "kl_unbiased": True}, "kl_in 'reward'; expected"),
        ({"distill_coef": -1.0}, "algorithm.distill_coef is -1.0; expected at least 0"),
        ({"advantage": advantages.gdpo}, "algorithm.shaping.parts is None; expected it exactly when advantage names"),
        (
            {"shaping": Shaping(parts=("a",))},
            "algorithm.shaping.parts is set; expected it exactly when advantage names",
        ),
    ],
)
def test_choices_that_do_not_go_together(fields, message):
    with pytest.raises(ValueError, match=message):
        Algorithm(**{**GRPO, **fields})


def test_corrections_of_whole_responses_go_with_losses_of_whole_responses():
    for correction in (corrections.tis_sequence, corrections.veto, partial(corrections.opsm, delta=0.1)):
        Algorithm(**{**GRPO, **WHOLE, "correction": correction})


def test_old_log_probs_are_taken_only_when_they_can_differ():
    assert not Algorithm(**GRPO).needs_old
    assert not Algorithm(**GRPO, bypass=True, updates_per_batch=4).needs_old
    for fields in (
        {"updates_per_batch": 2},
        {"updates": Updates(epochs=2)},
        {"updates": Updates(phases=filters.lopti_phases)},
        {"token_advantage": advantages.reweight},
        {"kl": "k1", "kl_coef": 0.1, "kl_in": "reward"},
        {"loss": losses.clip_cov, "updates": Updates(select=losses.select_clip_cov)},
        {"updates": Updates(token_filter=by_old_logp)},
    ):
        assert Algorithm(**{**GRPO, **fields}).needs_old, fields


# --- what the papers say ---------------------------------------------------------------------------------------------

# A function is its name, or its name with its hyper-parameters; what a row does not mention is off.
PLAIN_CLIP = ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})
GSPO_CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}
AR_CLIP = ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.24, "dual_clip": 10.0})
STD = ("grpo", {"eps": 1e-6, "ddof": 1})
TERM = {"weight": 1.0, "warmup": 0}
OVERLONG = {"terms": {"overlong": TERM | {"fn": ("soft_overlong", {"cache_len": 4096})}}}
K1_REWARD = {"kl": "k1", "kl_in": "reward"}
CRITIC = {"kind": "network", "gamma": 1.0, "lam": 1.0, "clip": 0.2, "updates": 1, "mini_batches": 1, "pretrain": 0}
GAE = {"gamma": 1.0, "lam": 1.0}
PAPERS = {
    "ppo": {
        "advantage": "raw", "token_advantage": ("gae", {"gamma": 1.0, "lam": 0.95}), "whiten": True,
        "critic": CRITIC | {"lam": 0.95, "updates": 4}, "loss": PLAIN_CLIP, "norm": "token", "epochs": 4,
        **K1_REWARD, "kl_coef": 0.05,
    },
    "a2c": {
        "advantage": "raw", "token_advantage": ("gae", GAE), "critic": CRITIC | {"clip": None},
        "loss": "reinforce", "norm": "token",
    },
    "orz": {
        "advantage": "raw", "token_advantage": ("gae", GAE), "whiten": True, "template": "r1",
        "critic": CRITIC | {"updates": 12, "mini_batches": 12}, "loss": PLAIN_CLIP, "norm": "token",
    },
    "vapo": {
        "advantage": "raw", "token_advantage": ("length_adaptive_gae", {"gamma": 1.0, "alpha": 0.05}),
        "critic": CRITIC | {"pretrain": 50, "updates": 16, "mini_batches": 16}, "nll_coef": 0.1,
        "loss": ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}), "norm": "token", "updates_per_batch": 16,
    },
    "reinforce": {"advantage": "raw", "loss": "reinforce", "norm": "constant", "norm_length": 1},
    "reinforce_pp": {
        "advantage": "raw", "token_advantage": ("reinforce_pp", {"beta": 0.0}), "loss": PLAIN_CLIP, "norm": "token",
        **K1_REWARD, "kl_coef": 0.01, "updates_per_batch": 8,
    },
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline", "loss": PLAIN_CLIP, "norm": "token", "kl": "k2", "kl_coef": 0.001,
        "updates_per_batch": 8,
    },
    "rloo": {
        "advantage": "rloo", "loss": "reinforce", "norm": "constant", "norm_length": 1, **K1_REWARD, "kl_coef": 0.05,
    },
    "opo": {"advantage": "opo", "loss": "reinforce", "norm": "token"},
    "gpg": {"advantage": "gpg", "loss": "gpg", "norm": "token"},
    "maxrl": {"advantage": ("maxrl", {"eps": 1e-6}), "loss": "reinforce", "norm": "constant", "norm_length": 1},
    "topr": {
        "advantage": "raw", "loss": "topr", "norm": "constant", "norm_length": 1, "signed_reward": True,
        "updates_per_batch": 16,
    },
    "opmd": {
        "advantage": "opmd", "loss": ("opmd", {"tau": 0.1}), "norm": "sequence", "optimizer_reset": True,
        "terms": {"length": {"fn": ("kimi_length", {}), "weight": 0.1, "warmup": 20}}, "prioritized": True,
        "updates_per_batch": 4,
    },
    "grpo": {"advantage": STD, "loss": PLAIN_CLIP, "norm": "sequence", "kl": "k3", "kl_coef": 0.04},
    "dr_grpo": {"advantage": "dr_grpo", "loss": PLAIN_CLIP, "norm": "constant", "updates_per_batch": 8},
    "dapo": {
        "advantage": STD, "loss": ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28}), "norm": "token",
        "signed_reward": True, **OVERLONG, "group_filter": "mixed", "updates_per_batch": 16,
    },
    "gspo": {"advantage": STD, "loss": ("gspo", GSPO_CLIP), "norm": "sequence", "updates_per_batch": 4},
    "gspo_token": {"advantage": STD, "loss": ("gspo_token", GSPO_CLIP), "norm": "sequence", "updates_per_batch": 4},
    "gmpo": {"advantage": STD, "loss": ("gmpo", {"clip": 0.4}), "norm": "sequence", "updates_per_batch": 8},
    "cispo": {
        "advantage": STD, "loss": ("cispo", {"ratio_max": 5.0, "ratio_min": 0.0}), "norm": "token", **OVERLONG,
        "group_filter": "mixed", "updates_per_batch": 16,
    },
    "sapo": {
        "advantage": STD, "loss": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}), "norm": "sequence",
        "updates_per_batch": 4,
    },
    "dcpo": {
        "advantage": ("dcpo_sas", {"eps": 1e-6, "ddof": 1}), "memory": "dcpo_sas_init", "norm": "otm",
        "loss": ("dcpo", {"eps_low": 0.16, "eps_high": 0.2, "ratio_cap": 10.0, "dual_clip": 10.0}),
        "updates_per_batch": 16,
    },
    "rspo": {
        "advantage": STD, "loss": ("rspo", {"gamma_min": 0.8, "clip": 0.4}), "norm": "sequence", "updates_per_batch": 8,
    },
    "lite_ppo": {
        "advantage": ("lite_ppo", {"eps": 1e-6}), "loss": PLAIN_CLIP, "norm": "token", "updates_per_batch": 4,
    },
    "reinforce_rej": {
        "advantage": "reinforce_rej", "loss": PLAIN_CLIP, "norm": "token", "signed_reward": True, "kl": "k3",
        "kl_coef": 0.001, "updates_per_batch": 4,
    },
    "raft_pp": {
        "advantage": "raft", "loss": PLAIN_CLIP, "norm": "token", "signed_reward": True, "kl": "k3",
        "kl_coef": 0.001, "updates_per_batch": 4,
    },
    "passk_grpo": {"advantage": "passk", "loss": PLAIN_CLIP, "norm": "sequence", "updates_per_batch": 4},
    "dppo_tv": {
        "advantage": "dr_grpo", "loss": ("dppo_tv", {"clip_low": 0.2, "clip_high": 0.2}), "norm": "token",
        "bypass": True, "updates_per_batch": 8,
    },
    "dppo_kl": {
        "advantage": "dr_grpo", "loss": ("dppo_kl", {"clip_low": 0.05, "clip_high": 0.05}), "norm": "token",
        "bypass": True, "updates_per_batch": 8,
    },
    "luspo": {
        "advantage": STD, "loss": ("luspo", {"clip_low": 2e-3, "clip_high": 2.5e-3}), "norm": "sequence",
        "updates_per_batch": 4,
    },
    "vespo": {
        "advantage": "dr_grpo", "norm": "token", "bypass": True, "updates_per_batch": 8,
        "loss": ("vespo", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}),
    },
    "gdpo": {
        "advantage": "gdpo", "parts": ("correct", "format"), "loss": PLAIN_CLIP,
        "norm": "sequence", "updates_per_batch": 4,
    },
    "ar": {
        "advantage": STD, "token_advantage": ("reweight", {"alpha": 0.3}), "loss": AR_CLIP, "norm": "token",
        "kl": "k3", "kl_coef": 0.001, "updates_per_batch": 2,
    },
    "lopti": {
        "advantage": STD, "phases": ("lopti_phases", {"eta": 0.5}), "phase_weights": "batch", "loss": AR_CLIP,
        "norm": "token", "kl": "k3", "kl_coef": 0.001, "updates_per_batch": 2,
    },
    "clip_cov": {
        "advantage": STD, "loss": ("clip_cov", {"clip_low": 1.0, "clip_high": 1.0}), "norm": "token",
        "select": ("select_clip_cov", {"frac": 2e-4, "low": 1.0, "high": 5.0, "clip_low": 1.0, "clip_high": 1.0}),
        "group_filter": "mixed", "updates_per_batch": 8,
    },
    "kl_cov": {
        "advantage": STD, "loss": ("kl_cov", {"coef": 1.0}), "norm": "token",
        "select": ("select_cov", {"frac": 2e-3}), "group_filter": "mixed", "updates_per_batch": 8,
    },
    "opd": {"advantage": "zero", "loss": "reinforce", "norm": "token", "distill_coef": 1.0},
    "opd_sampled": {
        "advantage": "zero", "token_advantage": ("distilled", {"coef": 1.0}), "loss": PLAIN_CLIP, "norm": "token",
        "bypass": True,
    },
    "olmo3": {
        "advantage": "dr_grpo", "loss": ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.272}), "norm": "token",
        "correction": ("tis", {"cap": 2.0}), "group_filter": "varied", "retire_above": 0.875,
    },
    "scalerl": {
        "advantage": ("scalerl", {"eps": 1e-6}), "loss": ("cispo", {"ratio_max": 5.0, "ratio_min": 0.0}),
        "norm": "prompt", "bypass": True, "group_filter": "varied", "resample": False, "retire_above": 0.9,
    },
    "simplerl_zoo": {
        "advantage": STD, "loss": PLAIN_CLIP, "norm": "token", "kl": "k3", "kl_coef": 1e-4, "entropy_coef": 0.001,
        "updates_per_batch": 4,
    },
    "r1_zero": {
        "advantage": STD, "loss": PLAIN_CLIP, "norm": "sequence", "kl": "k3", "kl_coef": 0.001, "kl_refresh": 400,
        "template": "r1", "terms": {"format": TERM | {"fn": ("think_answer", {"opened": True})}},
        "updates_per_batch": 16,
    },
    "l1_exact": {
        "advantage": STD, "loss": PLAIN_CLIP, "norm": "sequence", "kl": "k3", "kl_coef": 0.001,
        "reward": ("l1_exact", {"alpha": 3e-4}), "updates_per_batch": 2,
        "template": ("with_length", {"low": 100, "high": 4000, "text": "{question} Think for {n} tokens."}),
    },
    "l1_max": {
        "advantage": STD, "loss": PLAIN_CLIP, "norm": "sequence", "kl": "k3", "kl_coef": 0.001,
        "reward": ("l1_max", {"alpha": 3e-4, "delta": 0.5}), "updates_per_batch": 2,
        "template": ("with_length", {"low": 100, "high": 4000, "text": "{question} Think for maximum {n} tokens."}),
    },
}  # fmt: skip
OFF = {
    "norm_length": None, "correction": None, "bypass": False, "kl": None, "kl_coef": 0.0, "kl_in": "loss",
    "kl_refresh": 0, "entropy_coef": 0.0, "nll_coef": 0.0, "token_advantage": None, "whiten": False, "critic": None,
    "memory": None, "group_filter": None, "updates_per_batch": 1, "optimizer_reset": False,
    "signed_reward": False, "reward": None, "terms": {},
    "template": "none", "prioritized": False, "retire_above": None, "resample": True,
    "overlong_filter": False, "epochs": 1, "select": None, "token_filter": None, "phases": None,
    "phase_weights": "batch", "routing_replay": "", "parts": None, "kl_unbiased": False, "distill_coef": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_says_what_its_paper_says(name):
    have = row(ALGORITHMS[name])
    for group in GROUPS:
        have |= have.pop(group)
    if have["critic"] is not None:  # its optimiser and first weights are the run's business
        have["critic"] = {k: v for k, v in have["critic"].items() if k in CRITIC}
    functions = {"advantage", "token_advantage", "loss", "correction", "memory", "group_filter", "reward", "template"}
    functions |= {"select", "token_filter", "phases"}
    opened = lambda k, v: (v, {}) if k in functions and isinstance(v, str) else v
    assert have == {k: opened(k, v) for k, v in (OFF | PAPERS[name]).items()}


def test_the_table_of_papers_has_every_row():
    assert list(PAPERS) == list(ALGORITHMS)
