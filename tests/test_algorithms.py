"""The table of methods: rows that differ, functions that ask only for what the trainer has."""

from functools import partial
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, losses, rollouts
from jaxrl_llm.algorithms import ALGORITHMS, Algorithm, call
from jaxrl_llm.rewards import length

GRPO = {"advantage": advantages.grpo, "loss": losses.ppo_clip, "norm": "token"}


def wants_surprise(logp, adv, mask, surprise):
    return logp * surprise


def with_an_option(logp, adv, mask, surprise=2.0):
    return logp * surprise


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("advantage", "rewards, lengths"),
        ("loss", "logp, old_logp, sampler_logp, adv, mask"),
        ("correction", "old_logp, sampler_logp, mask"),
        ("length_reward", "n_tokens, max_len"),
        ("group_filter", "correct"),
    ],
)
def test_an_array_that_the_trainer_does_not_have_is_an_error_at_construction(field, known):
    def fn(surprise):
        return surprise

    with pytest.raises(ValueError, match=f"algorithm.{field} asks for 'surprise'; the trainer has {known}$"):
        Algorithm(**{**GRPO, field: fn})
    Algorithm(**{**GRPO, field: partial(fn, surprise=1.0)})  # a number of one's own is no array


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


def test_every_row_runs_on_what_the_trainer_has():
    rng = np.random.default_rng(0)
    floats = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    arrays = {name: floats(6, 5) for name in ("logp", "old_logp", "sampler_logp", "adv")}
    arrays["mask"] = jnp.ones((6, 5), bool)
    for name, a in ALGORITHMS.items():
        assert call(a.advantage, {"rewards": floats(2, 3), "lengths": np.ones((2, 3))}).shape == (2, 3), name
        assert call(a.loss, arrays).shape == (6, 5), name
        if a.length_reward is not None:
            assert call(a.length_reward, {"n_tokens": np.arange(6), "max_len": 8192}).shape == (6,), name
        if a.group_filter is not None:
            correct = np.array([[True, False, True], [True, True, True], [False, False, False]])
            assert call(a.group_filter, {"correct": correct}).tolist() == [True, False, False], name


def row(a):
    """A method with its partials opened, which compare by identity, and without its citation."""
    opened = lambda v: (v.func, sorted(v.keywords.items())) if isinstance(v, partial) else v
    return {k: opened(v) for k, v in vars(a).items() if k != "paper"}


def test_no_two_rows_are_equal_and_each_is_cited():
    assert len(ALGORITHMS) >= 5
    for (name, a), (other, b) in combinations(ALGORITHMS.items(), 2):
        assert row(a) != row(b), f"{name} and {other} are one method"
    assert all(a.paper for a in ALGORITHMS.values())


def test_rows_say_what_the_papers_say():
    dapo, rloo, grpo = ALGORITHMS["dapo"], ALGORITHMS["rloo"], ALGORITHMS["grpo"]
    assert (dapo.loss.keywords, dapo.norm) == ({"clip_low": 0.2, "clip_high": 0.28}, "token")
    assert dapo.group_filter is rollouts.mixed
    assert dapo.kl is None
    assert (rloo.advantage, rloo.loss, rloo.kl_in) == (advantages.rloo, losses.reinforce, "reward")
    assert (grpo.norm, grpo.kl, grpo.kl_coef) == ("sequence", "k3", 0.04)
    assert ALGORITHMS["dr_grpo"].advantage is advantages.dr_grpo
    assert ALGORITHMS["dr_grpo"].norm == "constant"
