"""From scored answers to an update: what each choice of an Algorithm makes of a batch."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored

from jaxrl_llm.data import templates
from jaxrl_llm.learner import batching, learner, train_step
from jaxrl_llm.objective import advantages, corrections, filters, losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Algorithm, Critic, PromptChoice, Shaping, Term, Updates
from jaxrl_llm.rewards import format as formats
from jaxrl_llm.rewards import length
from jaxrl_llm.types import Optimizer, Reward

SHAPE = [3, 4, 5, 6]  # tokens of the four answers to two prompts


VALUE = Critic(optimizer=Optimizer(lr=1e-2))
A2C = Algorithm(
    advantages.raw, losses.reinforce, "token", token_advantage=partial(advantages.gae, lam=1.0), critic=VALUE
)


def build(algorithm, **changes):
    made = learner.build(replace(CONFIG, algorithm=algorithm, **changes))
    with jax.set_mesh(made.mesh):
        state = learner.fresh_state(made)
    return replace(made, ref_params=jax.tree.map(lambda x: 1.5 * x, state.params)), state


def params(state):
    return jax.tree.leaves(jax.device_get(state.params))


# --- the terms of the loss ------------------------------------------------------------------------------------------


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    made, _ = batching.make_batch(rollouts_of(SHAPE), CONFIG.model)
    noise = lambda: jnp.asarray(-2 + 0.3 * rng.normal(size=made.mask.shape), jnp.float32)
    made = batching.with_advantages(made, np.array([[1.0, -1.0], [0.5, -0.5]], np.float32))
    return replace(made, old_logp=noise(), ref_logp=noise(), sampler_logp=noise()), noise(), noise()


def loss_of(algorithm, batch, logp, entropy):
    batch = batching.with_weights(batch, "token", None, nll=algorithm.nll_coef != 0)
    return float(train_step.objective(algorithm, batch, logp, entropy))


def mean(x, mask):
    return float(np.sum(np.where(mask, x, 0)) / mask.sum())


def test_the_loss_is_the_sum_of_its_terms():
    batch, logp, entropy = arrays()
    mask = np.asarray(batch.mask)
    x = losses.ppo_clip(logp, batch.old_logp, batch.adv, batch.mask)
    k3 = losses.kl(logp, batch.ref_logp, batch.mask, "k3")
    with_kl = replace(PLAIN, kl="k3", kl_coef=0.1)
    np.testing.assert_allclose(loss_of(PLAIN, batch, logp, entropy), mean(x, mask), rtol=1e-5)
    np.testing.assert_allclose(loss_of(with_kl, batch, logp, entropy), mean(x + 0.1 * k3, mask), rtol=1e-5)
    bonus = replace(PLAIN, entropy_coef=0.3)
    np.testing.assert_allclose(loss_of(bonus, batch, logp, entropy), mean(x - 0.3 * entropy, mask), rtol=1e-5)


def test_a_correction_multiplies_after_the_clip_and_never_the_kl():
    batch, logp, entropy = arrays()
    mask = np.asarray(batch.mask)
    x = losses.ppo_clip(logp, batch.old_logp, batch.adv, batch.mask)
    k3 = losses.kl(logp, batch.ref_logp, batch.mask, "k3")
    for correction in (corrections.tis, partial(corrections.mis_token, low=0.9, high=1.2), corrections.tis_sequence):
        c = correction(batch.old_logp, batch.sampler_logp, batch.mask)
        assert np.ptp(np.asarray(c)[mask]) > 0.1
        a = replace(PLAIN, kl="k3", kl_coef=0.1, correction=correction)
        np.testing.assert_allclose(loss_of(a, batch, logp, entropy), mean(c * x + 0.1 * k3, mask), rtol=1e-5)


def test_zero_gap_changes_nothing_to_the_bit():
    batch, logp, entropy = arrays()
    batch = replace(batch, sampler_logp=batch.old_logp)
    for correction in (corrections.tis, corrections.mis_token, corrections.tis_sequence, corrections.veto):
        corrected = loss_of(replace(PLAIN, correction=correction), batch, logp, entropy)
        assert corrected == loss_of(PLAIN, batch, logp, entropy)


def test_nll_is_the_mean_over_the_tokens_of_correct_responses():
    batch, logp, entropy = arrays()
    right = np.array([True, False, False, True])
    batch = replace(batch, correct=jnp.asarray(right))
    nll = -mean(logp, np.asarray(batch.mask) & right[:, None])
    gained = loss_of(replace(PLAIN, nll_coef=0.2), batch, logp, entropy) - loss_of(PLAIN, batch, logp, entropy)
    np.testing.assert_allclose(gained, 0.2 * nll, rtol=1e-4)
    nothing = replace(batch, correct=jnp.zeros(4, bool))
    assert loss_of(replace(PLAIN, nll_coef=0.2), nothing, logp, entropy) == loss_of(PLAIN, batch, logp, entropy)


def test_dapo_without_its_four_tricks_is_grpo_without_kl():
    """Clip-higher, token weights, dynamic sampling and the overlong punishment off: one loss, one gradient."""
    plain = replace(
        ALGORITHMS["dapo"], loss=partial(losses.ppo_clip, clip_low=0.2, clip_high=0.2), norm="sequence",
        group_filter=None, shaping=Shaping(), updates_per_batch=1,
    )  # fmt: skip
    grpo = replace(ALGORITHMS["grpo"], kl_coef=0.0)
    states = []
    for a in (plain, grpo):
        made, state = build(a)
        batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
        states.append(params(learner.update(made, state, batch)[0]))
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


# --- old log-probs --------------------------------------------------------------------------------------------------


def test_in_bypass_mode_the_sampler_s_log_probs_are_the_old_ones():
    made, state = build(replace(PLAIN, bypass=True, updates_per_batch=2))
    made = replace(made, logprobs=None)  # no pass of the learner's own
    answers = rollouts_of(SHAPE)
    batch, state, _ = learner.learn_batch(made, state, scored(answers, REWARDS))
    np.testing.assert_array_equal(batch.old_logp, batch.sampler_logp)
    _, row = learner.update(made, state, batch)
    assert row["ratio/max"] < 0.9  # the made-up sampler is much surer
    assert row["gap/mean"] > 0.1  # the report still compares the learner with the sampler


# --- advantages -----------------------------------------------------------------------------------------------------


def test_every_token_of_a_response_gets_its_advantage_and_reweighting_scales_it():
    made, state = build(replace(PLAIN, token_advantage=advantages.reweight))
    batch, *_ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    adv = np.repeat(np.asarray(advantages.grpo(REWARDS.reshape(2, 2))).reshape(-1, 1), batch.mask.shape[1], axis=1)
    want = np.where(batch.mask, (0.3 * np.exp(batch.old_logp) + 0.7) * adv, 0)
    np.testing.assert_allclose(batch.adv, want, rtol=1e-5)


def test_reinforce_pp_gets_the_penalty_of_each_token_and_its_beta():
    made, state = build(replace(ALGORITHMS["reinforce_pp"], updates_per_batch=1, kl_coef=0.3))
    batch, *_ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    k1 = np.where(batch.mask, batch.old_logp - batch.ref_logp, 0)
    want = advantages.reinforce_pp(REWARDS, k1, np.asarray(batch.mask), beta=0.3)
    np.testing.assert_allclose(batch.adv, want, rtol=1e-4, atol=1e-5)


def test_reinforce_pp_baseline_gets_the_mask_by_group():
    made, state = build(replace(ALGORITHMS["reinforce_pp_baseline"], updates_per_batch=1))
    batch, *_ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    mask = np.asarray(batch.mask)
    want = advantages.reinforce_pp_baseline(REWARDS.reshape(2, 2), mask.reshape(2, 2, -1)).reshape(mask.shape)
    np.testing.assert_allclose(batch.adv, want, rtol=1e-5, atol=1e-6)


def test_the_memory_of_dcpo_is_of_places_and_moves_on():
    made, state = build(replace(ALGORITHMS["dcpo"], updates_per_batch=1), task=partial(CONFIG.task, n_train=8))
    assert state.memory["count"].shape == (8,)
    answers = replace(rollouts_of(SHAPE), indices=np.array([5, 2]))
    batch, state, _ = learner.learn_batch(made, state, scored(answers, REWARDS))
    assert np.asarray(state.memory["count"]).tolist() == [0, 0, 2, 0, 0, 2, 0, 0]
    first = np.asarray(batch.adv)[:, 0]
    batch, state, _ = learner.learn_batch(made, state, scored(answers, np.array([1, 1, 0, 1], np.float32)))
    assert np.asarray(state.memory["mean"])[[5, 2]].tolist() == [0.75, 0.5]
    np.testing.assert_allclose(first, np.asarray(advantages.grpo(REWARDS.reshape(2, 2))).reshape(-1), rtol=1e-5)
    assert np.asarray(batch.adv)[0, 0] > 0  # an all-correct group learns from the visit before


def test_groups_that_fail_the_filter_leave_the_loss_but_not_the_batch():
    a = replace(ALGORITHMS["scalerl"], bypass=False)
    made, state = build(a)
    seen = replace(scored(rollouts_of(SHAPE), np.array([1, 1, 0, 1], np.float32)), kept=np.array([False, True]))
    batch, *_ = learner.learn_batch(made, state, seen)
    assert np.asarray(batch.mask).sum(axis=1).tolist() == [0, 0, 5, 6]
    want = advantages.scalerl(np.array([[0.0, 1.0]], np.float32))[0]  # as if there were no other group
    np.testing.assert_allclose(np.asarray(batch.adv)[2:, 0], want, rtol=1e-6)


def test_truncated_answers_count_whole_in_their_group():
    """OPO's baseline weighs by length, and RLOO's reward has the KL of every token, also of what is not trained."""
    rewards = np.array([1, 0, 0, 1], np.float32)
    answers = rollouts_of([5, 10, 4, 6])
    made, state = build(replace(ALGORITHMS["opo"], prompts=PromptChoice(overlong_filter=True)))
    batch, *_ = learner.learn_batch(made, state, scored(answers, rewards))
    assert np.asarray(batch.mask).sum(axis=1).tolist() == [5, 0, 4, 6]
    np.testing.assert_allclose(np.asarray(batch.adv)[0, 0], 1 - 5 / 15, rtol=1e-6)
    advs = []
    for keep in (False, True):
        made, state = build(replace(ALGORITHMS["rloo"], prompts=PromptChoice(overlong_filter=keep)))
        advs.append(np.asarray(learner.learn_batch(made, state, scored(answers, rewards))[0].adv)[[0, 2, 3], 0])
    np.testing.assert_allclose(advs[0], advs[1], rtol=1e-5)


def test_a_batch_without_a_trained_token_moves_nothing():
    made, state = build(replace(PLAIN, group_filter=filters.varied, prompts=PromptChoice(resample=False)))
    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    state, row = learner.update(made, state, batch)
    assert row["skipped"] == 0
    before = params(state)
    nothing = replace(scored(rollouts_of(SHAPE), REWARDS), kept=np.zeros(2, bool))
    batch, state, _ = learner.learn_batch(made, state, nothing)
    state, row = learner.update(made, state, batch)
    assert row["skipped"] == 1
    for a, b in zip(before, params(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_critic_s_penalty_reaches_a_policy_that_does_not_ask_for_it():
    by_value = lambda adv, values, mask: adv - values
    a = replace(A2C, advantage=advantages.dr_grpo, token_advantage=by_value, kl="k1", kl_coef=0.5, kl_in="reward")
    made, state = build(a)
    batch, *_ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    k1 = np.where(batch.mask, batch.old_logp - batch.ref_logp, 0).sum(axis=1)
    want = np.asarray(advantages.dr_grpo((REWARDS - 0.5 * k1).reshape(2, 2))).reshape(-1)
    np.testing.assert_allclose(np.asarray(batch.adv)[:, 0], want, rtol=1e-4)


# --- chosen tokens --------------------------------------------------------------------------------------------------


def chosen(algorithm):
    made, state = build(algorithm)
    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of([8, 9, 7, 10], prompts=2), REWARDS))
    return batch, made.choose_tokens(batch, *made.logprobs(state.params, batch), jax.random.key(0))


def test_covariance_is_taken_over_the_optimiser_batch():
    select = partial(losses.select_cov, frac=0.1)
    a = Algorithm(advantages.grpo, losses.kl_cov, "token", updates=Updates(select=select), updates_per_batch=2)
    batch, after = chosen(a)
    assert np.asarray(after.selected).sum() == 3  # a tenth of 34 tokens
    want = losses.select_cov(batch.old_logp, batch.adv, batch.mask, frac=0.1)
    np.testing.assert_array_equal(after.selected, want)


def test_a_token_filter_edits_mask_and_weights():
    batch, after = chosen(replace(PLAIN, updates=Updates(token_filter=losses.top_entropy)))
    assert np.asarray(after.mask).sum() == 7  # a fifth of 34
    assert not np.any(np.asarray(after.adv)[~np.asarray(after.mask)])
    weights = np.asarray(batching.with_weights(after, "token", None).weights)
    np.testing.assert_allclose(weights[np.asarray(after.mask)], 1 / 7, rtol=1e-6)


def test_lopti_steps_on_unlikely_tokens_and_then_on_the_others():
    made, state = build(replace(PLAIN, updates=Updates(phases=partial(filters.lopti_phases, eta=0.011))))
    taken = []

    def spy(state, batch, **given):
        taken.append(batch)
        return made.train_step(state, batch, **given)

    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    after, row = learner.update(replace(made, train_step=spy), state, batch)
    first, second = (np.asarray(b.weights) > 0 for b in taken)
    mask, unlikely = np.asarray(batch.mask), np.exp(np.asarray(batch.old_logp)) < 0.011
    assert 0 < (mask & unlikely).sum() < mask.sum()
    np.testing.assert_array_equal(first, mask & unlikely)
    np.testing.assert_array_equal(second, mask & ~unlikely)
    np.testing.assert_array_equal(taken[0].old_logp, taken[1].old_logp)
    assert int(after.step) == 2
    assert row["ratio/max"] > 1
    assert np.asarray(taken[0].weights).max() == np.float32(1 / mask.sum())
    own = batching.with_weights(batch, "token", None, phase=jnp.asarray(first), phase_weights="phase").weights
    np.testing.assert_allclose(np.asarray(own)[first], 1 / first.sum(), rtol=1e-6)


def in_thirds(old_logp, mask):
    """Three phases: every third token of a response."""
    place = jnp.arange(mask.shape[1])[None] % 3
    return tuple(mask & (place == i) for i in range(3))


@pytest.mark.parametrize("phases", [filters.lopti_phases, in_thirds])
def test_all_mini_batches_take_a_phase_before_any_takes_the_next(phases):
    """L1 L2 H1 H2, in each epoch, whatever the number of phases."""
    a = replace(PLAIN, updates_per_batch=2, updates=Updates(epochs=2, phases=phases))
    made, state = build(a, rollout=replace(CONFIG.rollout, prompts=2))
    taken = []

    def spy(state, batch, **given):
        taken.append(batch)
        return made.train_step(state, batch, **given)

    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    batch = replace(batch, old_logp=jnp.where(jnp.arange(batch.mask.shape[1])[None] % 2 == 0, -0.1, -3.0) * batch.mask)
    after, _ = learner.update(replace(made, train_step=spy), state, batch)
    assert int(after.step) == a.steps_per_batch == len(taken)
    minis = batching.mini_batches(batch, batch.rows)
    count = len(phases(minis[0].old_logp, minis[0].mask))
    wanted = [(minis[i], phase) for _ in range(2) for phase in range(count) for i in range(2)]
    for got, (mini, phase) in zip(taken, wanted, strict=True):
        np.testing.assert_array_equal(got.rows.inputs.targets, mini.rows.inputs.targets)
        np.testing.assert_array_equal(got.old_logp, mini.old_logp)
        np.testing.assert_array_equal(got.weights > 0, phases(mini.old_logp, mini.mask)[phase])


# --- the reference policy -------------------------------------------------------------------------------------------


def test_the_policy_becomes_the_reference_every_so_many_steps():
    """After optimiser steps 4 and 6 of 2 a batch, the first multiples of 3 being passed; not after 2."""
    a = replace(PLAIN, kl="k3", kl_coef=0.1, kl_refresh=3, updates_per_batch=2)
    made, state = build(a, rollout=replace(CONFIG.rollout, prompts=2))
    made = replace(made, ref_params=None)
    base, references, policies = params(state), [], []
    for _ in range(3):
        batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
        want = made.logprobs(state.reference, batch)[0]
        np.testing.assert_array_equal(batch.ref_logp, want)
        state, _ = learner.update(made, state, batch)
        references.append(jax.tree.leaves(jax.device_get(state.reference)))
        policies.append(params(state))
    for have, want in zip(references, (base, policies[1], policies[2]), strict=True):
        for x, y in zip(have, want, strict=True):
            np.testing.assert_array_equal(x, y)
    assert any(np.any(x != y) for x, y in zip(policies[1], base, strict=True))


@pytest.mark.parametrize("fields", [{"kl_refresh": 0}, {"kl_coef": 0.0}])
def test_a_reference_is_part_of_the_state_only_when_it_is_replaced(fields):
    _, state = build(replace(PLAIN, **({"kl": "k3", "kl_coef": 0.1, "kl_refresh": 3} | fields)))
    assert state.reference is None


# --- rewards --------------------------------------------------------------------------------------------------------


def rewards_of(algorithm, answers, values, step=0):
    config = replace(CONFIG, algorithm=algorithm)
    return learner.shaped_rewards(config, answers, [Reward(v, v > 0) for v in values], step)[1].tolist()


def test_kimi_s_length_reward_waits_for_its_warm_up():
    a = replace(PLAIN, shaping=Shaping(terms={"length": Term(length.kimi_length, weight=0.5, warmup=3)}))
    answers = rollouts_of([2, 4, 3, 3])
    assert rewards_of(a, answers, (0, 1, 1, 0), step=2) == [0, 1, 1, 0]
    assert rewards_of(a, answers, (0, 1, 1, 0), step=3) == [0, 0.75, 1, 0]  # wrong is never rewarded for being short


def test_l1_asks_for_a_length_and_judges_by_it():
    named = partial(templates.with_length, low=3, high=3, text="{question}{n}~")
    a = replace(PLAIN, prompts=PromptChoice(named), shaping=Shaping(reward=partial(length.l1_exact, alpha=0.1)))
    made, _ = build(a)
    assert made.task.train[0].text.endswith(":3~")
    assert made.task.test[0].meta["n_gold"] == 3
    answers = replace(rollouts_of([2, 5, 3, 3]), prompts=made.task.train[:2])
    np.testing.assert_allclose(rewards_of(a, answers, (1, 1, 0, 1)), [0.9, 0.8, 0, 1], rtol=1e-6)
    rewards, values = learner.shaped_rewards(replace(CONFIG, algorithm=a), answers, [Reward(1.0, True)] * 4, 0)
    assert [r.parts for r in rewards] == [{"reward": v} for v in values.tolist()]


def test_nan_in_a_shaped_reward_names_the_prompt():
    a = replace(PLAIN, shaping=Shaping(terms={"bad": Term(lambda n_tokens: np.where(n_tokens == 5, np.nan, 0.0))}))
    with pytest.raises(ValueError, match="shaping.terms.bad of prompt 1 are .*nan.*; expected finite numbers"):
        rewards_of(a, rollouts_of(SHAPE), (0, 1, 1, 0))


def test_a_template_that_does_not_fit_is_known_at_once():
    named = partial(templates.with_length, low=3, high=3)
    with pytest.raises(ValueError, match=r"prompt 0 has \d+ tokens; expected 1 to rollout.max_prompt_tokens = 16"):
        learner.build(replace(CONFIG, algorithm=replace(PLAIN, prompts=PromptChoice(named))))


def test_terms_are_summed_and_kept_as_parts():
    """By hand: reward (or the verifier's value) + Σ weight·term; functions of a text, of a prompt, of a whole group."""
    terms = {
        "format": Term(lambda text: float(text.endswith("!")), weight=0.5),
        "overlong": Term(partial(length.soft_overlong, cache_len=4), weight=2.0),
        "kimi": Term(length.kimi_length, weight=0.25, warmup=1),
        "asked": Term(lambda prompt, finish, n_tokens: prompt.id * n_tokens * (finish == "length"), weight=0.0),
    }
    a = replace(PLAIN, shaping=Shaping(signed_reward=True, terms=terms))
    answers = replace(rollouts_of([7, 10, 8, 10]), texts=("a!", "b", "!c", "d!"))
    verdicts = [Reward(1.0, True, parts={"steps": 3.0}), Reward(0.0, False), Reward(0.0, False), Reward(1.0, True)]
    rewards, values = learner.shaped_rewards(replace(CONFIG, algorithm=a), answers, verdicts, 0)
    assert [r.value for r in rewards] == [1, 0, 0, 1]  # the verifier's word stays
    parts = [
        {"steps": 3.0, "format": 1.0, "overlong": -0.25, "kimi": 0.5, "asked": 0.0},
        {"format": 0.0, "overlong": -1.0, "kimi": -0.5, "asked": 0.0},
        {"format": 0.0, "overlong": -0.5, "kimi": 0.0, "asked": 0.0},
        {"format": 1.0, "overlong": -1.0, "kimi": -0.5, "asked": 10.0},
    ]
    assert [r.parts for r in rewards] == parts
    base = np.array([1, -1, -1, 1]) + np.array([0.5, 0, 0, 0.5]) + 2 * np.array([-0.25, -1, -0.5, -1])
    np.testing.assert_allclose(values, base)
    _, later = learner.shaped_rewards(replace(CONFIG, algorithm=a), answers, verdicts, 1)
    np.testing.assert_allclose(later, base + 0.25 * np.array([0.5, -0.5, 0, -0.5]))


def test_gdpo_gets_the_terms_it_names():
    shaping = Shaping(parts=("format", "correct"), terms={"format": Term(lambda text: len(text) / 38)})
    a = replace(ALGORITHMS["gdpo"], shaping=shaping)
    answers, verdicts = (
        rollouts_of(SHAPE),
        [Reward(0.3, True), Reward(0.1, False), Reward(0.0, False), Reward(1.0, True)],
    )
    verdicts[2] = replace(verdicts[2], outcome="timed_out")
    rewards, _ = learner.shaped_rewards(replace(CONFIG, algorithm=a), answers, verdicts, 0)
    parts = learner.reward_parts(a, replace(scored(answers, REWARDS), rewards=tuple(rewards)))
    assert parts.tolist() == [[[1, 1], [1, 0]], [[1, 0], [1, 1]]]
    a = replace(a, shaping=Shaping(parts=("correct", "proof")))
    lost = scored(answers, REWARDS)
    with pytest.raises(ValueError, match="expected a finite number for each of algorithm.shaping.parts"):
        learner.reward_parts(a, lost)
    crashed = tuple(replace(r, outcome="crashed") for r in lost.rewards)
    assert not learner.reward_parts(a, replace(lost, rewards=crashed))[..., 1].any()


def test_a_format_reward_is_added():
    a = replace(PLAIN, shaping=Shaping(terms={"format": Term(formats.think_answer)}))
    answers = replace(rollouts_of(SHAPE), texts=("a</think><answer>1</answer>", "a", "b</think>", "<answer>1</answer>"))
    assert rewards_of(a, answers, (0, 1, 0, 1)) == [1, 1, 0, 1]


# --- the critic -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a2c_is_ppo_at_one_epoch_to_the_bit():
    """One update on fresh data, no whitening, λ = 1: the same parameters, whatever the clip."""
    after = []
    for a in (A2C, replace(A2C, loss=losses.ppo_clip), replace(A2C, loss=partial(losses.ppo_clip, clip_low=0.0))):
        made, state = build(a)
        batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
        after.append(params(learner.update(made, state, batch)[0]))
    for other in after[1:]:
        for a, b in zip(after[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    fresh = params(build(A2C)[1])
    assert all(np.any(a != b) for a, b in zip(after[0], fresh, strict=True))


@pytest.mark.parametrize("kind", ["network", "head"])
def test_a_critic_learns_and_leaves_the_policy_alone(kind):
    made, state = build(replace(A2C, critic=replace(VALUE, kind=kind, updates=20)), micro_batches=2)
    before = params(state)
    assert set(state.critic.params) == ({"value", "trunk"} if kind == "network" else {"value"})
    explained = []
    for _ in range(3):
        batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
        state, row = learner.update_critic(made, state, batch)
        explained.append(row["critic/explained_variance"])
    assert explained[0] == 0  # w and b begin as 0
    assert explained[2] > explained[1] > explained[0]
    assert (int(state.critic.step), row["critic/skipped"]) == (60, 0)
    for a, b in zip(before, params(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_critic_learns_monte_carlo_returns_while_the_policy_uses_its_own_lambda():
    a = replace(A2C, token_advantage=partial(advantages.gae, lam=0.5), critic=replace(VALUE, lam=1.0, updates=5))
    made, state = build(a)
    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    state, _ = learner.update_critic(made, state, batch)  # now V is not 0
    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(batch.returns, np.where(mask, REWARDS[:, None], 0), atol=1e-6)
    own = np.zeros(mask.shape, np.float32)
    own[np.arange(4), np.array(SHAPE) - 1] = REWARDS
    want, _ = advantages.gae(own, batch.values, mask, lam=0.5)
    np.testing.assert_allclose(batch.adv, want, atol=1e-6)
    assert np.abs(np.asarray(batch.values)[mask]).min() > 0


def test_with_a_critic_the_kl_is_charged_token_by_token():
    a = replace(A2C, kl="k1", kl_coef=0.1, kl_in="reward", whiten=True)
    made, state = build(a)
    batch, *_ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    mask, k1 = np.asarray(batch.mask), np.where(batch.mask, batch.old_logp - batch.ref_logp, 0)
    own = -0.1 * k1
    own[np.arange(4), np.array(SHAPE) - 1] += REWARDS
    to_go = np.where(mask, np.cumsum(own[:, ::-1], axis=1)[:, ::-1], 0)
    np.testing.assert_allclose(batch.returns, to_go, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch.adv, advantages.whiten(to_go, mask), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_critic_shards_and_steps_are_the_policy_s_layout():
    mesh = replace(CONFIG.mesh, fsdp=4, tensor=1)
    made, state = build(A2C, mesh=mesh, rollout=replace(CONFIG.rollout, prompts=4))
    trunk = state.critic.params["trunk"]
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), trunk, state.params)
    assert all(jax.tree.leaves(same))
    assert trunk["embed"].sharding.shard_shape(trunk["embed"].shape) == (112, 4)
    with jax.set_mesh(made.mesh):
        seen = scored(rollouts_of([3, 4, 5, 6, 7, 2, 1, 8], prompts=4), np.ones(8) * (np.arange(8) % 2))
        batch, state, _ = learner.learn_batch(made, state, seen)
        after, row = learner.update_critic(made, state, batch)
    assert row["critic/skipped"] == 0
    assert after.critic.params["trunk"]["embed"].sharding.is_equivalent_to(trunk["embed"].sharding, 2)


def test_a_base_policy_s_optimiser_state_lies_like_its_parameters():
    made, state = build(PLAIN, mesh=replace(CONFIG.mesh, fsdp=4), rollout=replace(CONFIG.rollout, prompts=4))
    with jax.set_mesh(made.mesh):
        again = learner.fresh_state(made, state.params)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)


def test_mini_batches_of_the_critic_go_round():
    made, state = build(replace(A2C, critic=replace(VALUE, updates=3, mini_batches=2)))
    seen, step = [], made.critic.step

    def spy(value, policy, batch):
        seen.append(int(np.asarray(batch.mask).sum()))
        return step(value, policy, batch)

    made = replace(made, critic=replace(made.critic, step=spy))
    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    learner.update_critic(made, state, batch)
    assert seen == [7, 11, 7]


def test_explained_variance_by_hand():
    from jaxrl_llm.learner.critic import explained_variance

    returns, mask = np.array([[0.0, 2.0, 9.0]], np.float32), np.array([[True, True, False]])
    for values, want in (([0, 2, 5], 1.0), ([1, 1, 0], 0.0), ([0, 1, 0], 0.75), ([2, 0, 0], -3.0), ([3, 5, 0], 1.0)):
        got = explained_variance(np.array([values], np.float32), returns, mask)
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert explained_variance(returns, np.ones((1, 3), np.float32), mask) == 0


def test_zero_gradient_filter_by_hand():
    rewards = np.array([[1, 1, 1], [0.1 + 0.2, 0.3, 0.3], [1, 0, 1], [-1, 1, 1]], np.float32)
    assert filters.varied(rewards).tolist() == [False, False, True, True]
