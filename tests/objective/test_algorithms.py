"""The table of methods: rows that differ, functions that ask only for what the trainer has."""

import json
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from jaxrl_llm import config
from jaxrl_llm.objective import advantages, corrections, filters, losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, ARRAYS, Algorithm, Critic, Shaping, Updates, call
from jaxrl_llm.rewards import length

GRPO = {"advantage": advantages.grpo, "loss": losses.ppo_clip, "norm": "token"}


WHOLE = {"loss": losses.gspo, "norm": "sequence"}
MASKED = partial(corrections.mis_token, high=2.0)
VALUED = {"advantage": advantages.raw, "token_advantage": advantages.gae, "critic": Critic()}


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

    known = ", ".join(ARRAYS[field])
    with pytest.raises(ValueError, match=f"algorithm.{field} asks for 'surprise'; the trainer has {known}$"):
        Algorithm(**{**GRPO, field: fn})


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


def row(a):
    """A method with its partials opened, which compare by identity, and without its citation."""
    opened = lambda v: (v.func, sorted(v.keywords.items())) if isinstance(v, partial) else v
    return {k: opened(v) for k, v in vars(a).items() if k != "paper"}


def test_no_two_rows_are_equal_and_each_is_cited():
    assert len(ALGORITHMS) == 37
    for (name, a), (other, b) in combinations(ALGORITHMS.items(), 2):
        assert row(a) != row(b), f"{name} and {other} are one method"
    assert all(a.paper for a in ALGORITHMS.values())


def test_every_row_is_a_config_and_survives_json():
    base = config.load("experiments/laptop_dapo.py")
    short = {"shaping": Shaping(signed_reward=True, length_reward=partial(length.soft_overlong, cache_len=16))}
    for name, a in ALGORITHMS.items():
        a = replace(a, **short) if name == "dapo" else a
        rollout = replace(base.rollout, prompts=48)
        whole = config.validate(replace(base, algorithm=a, rollout=rollout, micro_batches=1))
        again = config.from_json(json.loads(json.dumps(config.to_json(whole))))
        assert row(again.algorithm) == row(a), name


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


def test_rows_say_what_the_papers_say():
    a = ALGORITHMS
    assert (a["dapo"].loss.keywords, a["dapo"].norm) == ({"clip_low": 0.2, "clip_high": 0.28}, "token")
    assert (a["dapo"].group_filter, a["dapo"].kl) == (filters.mixed, None)
    assert (a["rloo"].advantage, a["rloo"].loss, a["rloo"].kl_in) == (advantages.rloo, losses.reinforce, "reward")
    assert (a["grpo"].norm, a["grpo"].kl, a["grpo"].kl_coef) == ("sequence", "k3", 0.04)
    assert (a["dr_grpo"].advantage, a["dr_grpo"].norm) == (advantages.dr_grpo, "constant")
    assert {n for n, x in a.items() if x.critic is not None} == {"ppo", "a2c", "orz", "vapo"}
    assert (a["orz"].critic.updates, a["orz"].steps_per_batch, a["orz"].token_advantage.keywords) == (12, 1, {"lam": 1})
    assert (a["vapo"].critic.pretrain, a["vapo"].critic.lam, a["vapo"].nll_coef) == (50, 1, 0.1)
    assert {n for n, x in a.items() if x.norm == "sequence"} >= {"grpo", "gspo", "gmpo", "sapo", "rspo", "opmd"}
    assert {n for n, x in a.items() if x.norm == "constant" and x.norm_length == 1} >= {"reinforce", "rloo", "topr"}
    assert (a["scalerl"].norm, a["scalerl"].bypass, a["scalerl"].prompts.retire_above) == ("prompt", True, 0.9)
    assert (a["olmo3"].correction.keywords, a["olmo3"].prompts.retire_above) == ({"cap": 2.0}, 0.875)
    assert (a["dcpo"].norm, a["opmd"].optimizer_reset, a["lopti"].steps_per_batch) == ("otm", True, 8)
    signed = {n for n, x in a.items() if x.shaping.signed_reward}
    assert signed == {"dapo", "topr", "reinforce_rej", "raft_pp"}
    without_kl = {"gspo", "cispo", "dapo", "dr_grpo", "lite_ppo", "orz", "olmo3", "scalerl", "vapo", "gpg", "opmd"}
    assert not any(a[n].needs_reference for n in without_kl)
