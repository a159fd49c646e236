"""Edges that the other tests of the maths pass by: what is detached, what is noise, what the bounds hold."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objective import advantages, corrections, losses

B, T = 3, 5
LOSSES = {
    "reinforce": losses.reinforce, "gpg": losses.gpg, "ppo_clip": losses.ppo_clip, "dcpo": losses.dcpo,
    "cispo": losses.cispo, "sapo": losses.sapo, "topr": losses.topr, "gspo": partial(losses.gspo, clip_high=1.0),
    "gspo_token": partial(losses.gspo_token, clip_high=1.0), "gmpo": losses.gmpo, "opmd": losses.opmd,
    "kl_cov": losses.kl_cov, "clip_cov": losses.clip_cov, "rspo": losses.rspo,
}  # fmt: skip


def batch(seed=0):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(B, T)).astype(np.float32)
    logp = old + 0.5 * rng.normal(size=(B, T)).astype(np.float32)
    adv = np.sign(rng.normal(size=(B, 1))) * rng.uniform(0.5, 1, (B, T))
    return jnp.asarray(logp), jnp.asarray(old), jnp.asarray(adv, jnp.float32), np.ones((B, T), bool)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_flows_through_logp_alone(name):
    logp, old, adv, mask = batch()
    more = {"selected": np.arange(B * T).reshape(B, T) % 3 == 0} if name.endswith("cov") else {}
    router = jnp.full((B, T), -0.1)

    def total(logp, old, adv, router):
        extra = {"log_router_ratio": router} if name == "rspo" else {}
        return LOSSES[name](logp, old, adv, mask, **more, **extra).sum()

    by_logp, *others = jax.grad(total, argnums=(0, 1, 2, 3))(logp, old, adv, router)
    assert np.any(by_logp)
    for gradient in others:
        assert not np.any(gradient)


def test_the_value_loss_moves_values_alone():
    values, old, returns, mask = batch()
    total = lambda v, o, r: losses.value_loss(v, o, r, mask).sum()
    by_values, *others = jax.grad(total, argnums=(0, 1, 2))(values, old, returns)
    assert np.any(by_values)
    for gradient in others:
        assert not np.any(gradient)


def test_a_report_has_no_gradient():
    old, sampler, c, mask = batch()
    total = lambda *a: sum(corrections.mismatch_report(a[0], a[1], mask, a[2]).values())
    for gradient in jax.grad(total, argnums=(0, 1, 2))(old, sampler, jnp.abs(c)):
        assert not np.any(gradient)


@pytest.mark.parametrize(("d", "a", "x"), [(500.0, -1.0, math.exp(80)), (-500.0, 1.0, -math.exp(-80))])
def test_log_ratios_are_held_at_eighty_nats(d, a, x):
    one = lambda v: np.full((1, 1), v, np.float32)
    got = losses.ppo_clip(one(d), one(0.0), one(a), np.ones((1, 1), bool))
    np.testing.assert_allclose(got[0, 0], x, rtol=1e-5)


@pytest.mark.parametrize("value", [0.3, 1000.0])
def test_noise_between_visits_is_no_signal(value):
    """The second visit's rewards differ from the first's by one float32 step."""
    first = np.full((1, 4), value, np.float32)
    second = np.nextafter(first, np.float32(2000))
    state, ids = advantages.dcpo_sas_init(2), np.array([1])
    for rewards in (first, second, first):
        adv, state = advantages.dcpo_sas(rewards, state, ids)
        assert not np.any(adv)


def test_eps_and_ddof_of_dcpo_by_hand():
    rewards, state, ids = np.array([[0.0, 1.0]], np.float32), advantages.dcpo_sas_init(1), np.array([0])
    for ddof, std in ((0, 0.5), (1, math.sqrt(0.5))):
        adv, after = advantages.dcpo_sas(rewards, state, ids, eps=0.1, ddof=ddof)
        np.testing.assert_allclose(adv, [[-0.5 / (std + 0.1), 0.5 / (std + 0.1)]], rtol=1e-6)
        # the second visit is all right: mean 3/4 of four rewards, m2 3/4; A = A_tot / 2
        adv, _ = advantages.dcpo_sas(np.ones((1, 2), np.float32), after, ids, eps=0.1, ddof=ddof)
        total = math.sqrt(0.75 / (4 - ddof))
        np.testing.assert_allclose(adv, np.full((1, 2), 0.25 / (total + 0.1) / 2), rtol=1e-6)
    # a third, mixed one, where the visits' weights differ: i = 3
    both = {k: np.asarray(v) for k, v in after.items()} | {"count": np.array([4.0]), "mean": np.array([0.75])}
    both["m2"] = np.array([0.75])
    adv, _ = advantages.dcpo_sas(np.array([[0.0, 2.0]], np.float32), both, ids, eps=0.1)
    mean = (4 * 0.75 + 2) / 6
    m2 = 0.75 + 2 + (1 - 0.75) ** 2 * 4 * 2 / 6
    for r, got in zip((0, 2), np.asarray(adv)[0], strict=True):
        new, tot = (r - 1) / (math.sqrt(2) + 0.1), (r - mean) / (math.sqrt(m2 / 5) + 0.1)
        s1, s2 = 2 / 3 * new + tot / 3, new / 3 + 2 / 3 * tot
        np.testing.assert_allclose(got, min(s1, s2, key=abs), rtol=1e-5)


def test_whitening_knows_noise_at_any_scale():
    for value in (0.3, 1000.0, -1000.0):
        x = np.full((2, 3), value, np.float32)
        x[0, 1] = np.nextafter(x[0, 1], np.float32(2000))
        assert not np.any(advantages.whiten(x, np.ones((2, 3), bool)))


def test_quarters_of_a_response_of_eight_tokens():
    gap = np.arange(8, dtype=np.float32) / 100
    old, sampler = np.log(np.full((1, 8), 0.5, np.float32)), np.log(0.5 - gap[None])
    report = corrections.mismatch_report(old, sampler, np.ones((1, 8), bool))
    got = [float(report[f"gap/quarter_{i}"]) for i in (1, 2, 3, 4)]
    np.testing.assert_allclose(got, [0.005, 0.025, 0.045, 0.065], atol=1e-6)


def test_the_reward_of_a_response_of_one_token():
    mask = np.array([[True, False, False], [False, True, False], [False, False, False], [True, False, True]])
    got = advantages.token_rewards(np.array([1.0, 2.0, 3.0, 4.0]), np.zeros((4, 3)), mask)
    np.testing.assert_array_equal(got, [[1, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 4]])
