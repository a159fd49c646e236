"""The stages put together: which log-probs are computed when, what rewards become, what a step measures."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored

from jaxrl_llm.learner import batching
from jaxrl_llm.learner import learner as learner_module
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.learner.train_step import init_state, make_logprobs
from jaxrl_llm.objective import advantages, filters, losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Algorithm, PromptChoice, Shaping, Term
from jaxrl_llm.rewards.length import soft_overlong
from jaxrl_llm.run import modes, trainer
from jaxrl_llm.types import Reward


def build(**changes):
    learner = trainer.build(replace(CONFIG, **changes))
    with jax.set_mesh(learner.mesh):
        state = init_state(CONFIG.model, learner.tx, 0, learner.mesh)
    return learner, state


def learn(learner, state, answers, rewards):
    """The batch that the update gets."""
    return learner_module.learn_batch(learner, state, scored(answers, rewards))[0]


def counting(learner):
    """The learner with a log-prob pass that notes whose parameters it was given."""
    calls = []

    def logprobs(params, batch):
        calls.append(params)
        return learner.logprobs(params, batch)

    return replace(learner, logprobs=logprobs), calls


def test_no_log_prob_pass_that_the_algorithm_does_not_need():
    learner, state = build()
    learner, calls = counting(learner)
    batch = learn(learner, state, rollouts_of([3, 4, 5, 6]), REWARDS)
    assert calls == []
    assert batch.old_logp is None
    assert batch.ref_logp is None


def test_no_reference_pass_when_beta_is_0():
    learner, state = build(algorithm=replace(PLAIN, kl="k3", kl_coef=0.0, updates_per_batch=2))
    learner, calls = counting(learner)
    batch = learn(learner, state, rollouts_of([3, 4, 5, 6]), REWARDS)
    assert len(calls) == 1  # the old policy's, for the second update
    assert batch.ref_logp is None


def test_old_log_probs_are_the_live_policy_s_and_reference_ones_the_reference_s():
    learner, state = build(algorithm=replace(PLAIN, kl="k3", kl_coef=0.1, updates_per_batch=2))
    other = jax.tree.map(lambda x: 1.5 * x, state.params)
    learner = replace(learner, ref_params=other)
    answers = rollouts_of([3, 4, 5, 6])
    batch = learn(learner, state, answers, REWARDS)
    for params, got in ((state.params, batch.old_logp), (other, batch.ref_logp)):
        want, _ = make_logprobs(CONFIG.model, CONFIG.rollout.temperature)(params, batch)
        np.testing.assert_allclose(np.where(batch.mask, got, 0), np.where(batch.mask, want, 0), atol=1e-6)
    cold, _ = make_logprobs(CONFIG.model, 1.0)(other, batch)
    assert np.abs(np.where(batch.mask, batch.ref_logp - cold, 0)).max() > 0.1, "the temperature is part of the policy"


def test_log_prob_pass_in_micro_batches_is_the_same():
    answers, found = rollouts_of([3, 4, 5, 6, 7, 2, 1, 8], prompts=4), []
    for n in (1, 4):
        learner, state = build(micro_batches=n)
        batch = learn(learner, state, answers, np.ones(8))
        found.append(np.where(batch.mask, learner.logprobs(state.params, batch)[0], 0))
    np.testing.assert_allclose(*found, atol=1e-6)


def test_the_second_update_is_off_policy_and_old_log_probs_follow_the_weights():
    learner, state = build(algorithm=replace(PLAIN, updates_per_batch=2))
    answers = rollouts_of([3, 4, 5, 6])
    first = learn(learner, state, answers, REWARDS)
    state, row = trainer.update(learner, state, first)
    assert int(state.step) == 2
    assert row["ratio/max"] > 1.01
    assert row["kl/old"] > 0
    second = learn(learner, state, answers, REWARDS)
    assert np.abs(np.where(first.mask, first.old_logp - second.old_logp, 0)).max() > 1e-3


def test_one_update_is_on_policy():
    learner, state = build()
    _, row = trainer.update(learner, state, learn(learner, state, rollouts_of([3, 4, 5, 6]), REWARDS))
    assert row["ratio/mean"] == row["ratio/max"] == 1
    assert row["clip/low"] == row["clip/high"] == row["kl/old"] == 0
    assert row["grad_norm"] > 0


def test_clipped_tokens_are_counted_on_their_side():
    learner, state = build(algorithm=replace(PLAIN, loss=partial(losses.ppo_clip, clip_low=0.1, clip_high=0.1)))
    answers = rollouts_of([5, 5, 5, 5])
    batch = learn(learner, state, answers, REWARDS)
    logp, _ = learner.logprobs(state.params, batch)
    shift = np.zeros(batch.mask.shape, np.float32)
    shift[0, 0] = -0.5  # A > 0, ratio e^.5: clipped above
    shift[1, :2] = 0.5  # A < 0, ratio e^-.5: clipped below
    shift[1, 2] = -0.5  # A < 0, ratio e^.5: not clipped
    shift[0, 1] = 0.5  # A > 0, ratio e^-.5: not clipped
    _, row = trainer.update(learner, state, replace(batch, old_logp=logp + shift))
    np.testing.assert_allclose([row["clip/high"], row["clip/low"]], [1 / 20, 2 / 20], rtol=1e-6)
    np.testing.assert_allclose(row["ratio/max"], np.exp(0.5), rtol=1e-4)


def test_kl_in_the_reward_lowers_the_reward_by_the_summed_k1():
    algorithm = Algorithm(advantages.raw, losses.reinforce, "token", kl="k1", kl_coef=0.1, kl_in="reward")
    learner, state = build(algorithm=algorithm)
    learner = replace(learner, ref_params=jax.tree.map(lambda x: 1.5 * x, state.params))
    batch = learn(learner, state, rollouts_of([3, 4, 5, 6]), REWARDS)
    k1 = np.where(batch.mask, batch.old_logp - batch.ref_logp, 0).sum(axis=1)
    np.testing.assert_allclose(np.asarray(batch.adv)[:, 0], REWARDS - 0.1 * k1, rtol=1e-5)


def test_rewards_are_signed_and_punished_for_tokens_not_characters():
    algorithm = replace(
        PLAIN, shaping=Shaping(signed_reward=True, terms={"overlong": Term(partial(soft_overlong, cache_len=4))})
    )
    config = replace(CONFIG, algorithm=algorithm)
    rewards = [Reward(v, v > 0) for v in (1, 0, 1, 0)]  # ints, which an integer array would have cut
    got = learner_module.shaped_rewards(config, rollouts_of([6, 7, 9, 10]), rewards, 0)
    rewards, got = got
    assert [r.parts["overlong"] for r in rewards] == [0, -0.25, -0.75, -1]
    np.testing.assert_allclose(got, [1, -1.25, 0.25, -2], rtol=1e-6)
    assert got.dtype == np.float32


def test_truncated_answers_leave_the_loss_but_count_in_their_group():
    learner, state = build(
        algorithm=replace(PLAIN, advantage=advantages.dr_grpo, prompts=PromptChoice(overlong_filter=True))
    )
    batch = learn(learner, state, rollouts_of([3, 10, 5, 6]), np.array([1, 0, 0, 0], np.float32))
    assert np.asarray(batch.mask).sum(axis=1).tolist() == [3, 0, 5, 6]
    assert np.asarray(batch.adv)[0, 0] == 0.5


def test_the_optimiser_is_reset_for_every_batch_when_asked():
    counts = []
    for reset in (False, True):
        learner, state = build(algorithm=replace(PLAIN, optimizer_reset=reset))
        batch = learn(learner, state, rollouts_of([3, 4, 5, 6]), REWARDS)
        for _ in range(3):
            state, _ = trainer.update(learner, state, batch)
        adam = state.opt_state[1][0]  # of the chain: clipping, then AdamW, whose first part this is
        counts.append(int(adam.count))
    assert counts == [3, 1]


def test_rollout_metrics_by_hand():
    answers = rollouts_of([2, 4, 10, 6])
    rewards = (
        Reward(1.0, True, "1", {"format": 1.0}),
        Reward(0.5, False, "2"),
        Reward(0.0, False, None, {"format": 0.5}),
    )
    rewards += (Reward(0.0, False, outcome="timed_out"),)
    seen = replace(scored(answers, [0] * 4), rewards=rewards, all_rewards=rewards, all_kept=np.array([True, False]))
    versions = np.array([[7] * 10, [7] * 10, [5] * 4 + [6] * 6, [8] * 10], np.int32)
    seen = replace(seen, rollouts=replace(answers, versions=versions), stale=3)
    row = trainer.rollout_metrics(seen, 8)
    want = {
        "reward/mean": 0.375, "accuracy": 0.25, "groups/all_correct": 0.0, "groups/all_wrong": 0.5,
        "length/mean": 5.5, "length/max": 10.0, "length/correct": 2.0, "length/wrong": 20 / 3, "truncated": 0.25,
        "reward/std": np.std([1, 0.5, 0, 0]), "groups/sampled": 2, "groups/stale": 3,
        "reward/wrong": 1, "reward/unparsed": 1, "reward/timed_out": 1, "reward/out_of_memory": 0, "reward/crashed": 0,
        "part/format": 0.75, "length/accepted": 3, "length/rejected": 8,
        "staleness/mean": (6 + 4 * 3 + 6 * 2) / 22, "staleness/max": 3,
    }  # fmt: skip
    assert row.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(row[name], value, rtol=1e-6, err_msg=name)
    nothing = trainer.rollout_metrics(scored(answers, [0] * 4), 0)
    assert np.isnan(nothing["length/correct"])


def ready(algorithm):
    """A learner whose verifier tosses a coin, its state and its sampler."""
    learner = trainer.build(replace(CONFIG, algorithm=algorithm))
    learner = replace(learner, task=replace(learner.task, reward=lambda p, text, f: Reward(len(text) % 2, False)))
    state = trainer.fresh_state(learner)
    if learner.config.algorithm.needs_reference:
        learner = replace(learner, ref_params=jax.tree.map(jnp.copy, state.params))
    return learner, state, trainer.make_engine(learner, state.params)


def test_a_step_of_the_whole_loop():
    learner, state, engine = ready(replace(ALGORITHMS["olmo3"], group_filter=None, kl="k3", kl_coef=0.1))
    with jax.set_mesh(learner.mesh):
        before = jax.device_get(state.params)
        state, engine, at, seen, row = trainer.one_step(learner, state, engine, modes.Position(), modes.Sync(learner))
    assert (at.step, at.draw) == (1, 4)
    assert at.solved == {int(p): (2, 0) for p in seen.rollouts.indices}
    assert engine.weights.version == 1
    assert row["gap/max"] < 1e-5
    assert row["gap/ess"] > 0.999
    assert row["skipped"] == 0
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, jax.device_get(state.params))
    assert all(jax.tree.leaves(moved))
    assert {"perf/rollout_s", "perf/reward_s", "perf/train_s", "perf/step_s", "entropy", "loss"} <= row.keys()


@pytest.mark.slow
def test_while_the_critic_is_pre_trained_the_policy_stands_still():
    a = ALGORITHMS["vapo"]
    a = replace(a, updates_per_batch=2, critic=replace(a.critic, updates=2, mini_batches=2, pretrain=1))
    learner, state, engine = ready(a)
    assert learner.config.total_steps == CONFIG.steps + 1
    at, seen = modes.Position(), []
    with jax.set_mesh(learner.mesh):
        for _ in range(2):
            seen.append(jax.device_get((state.params, state.critic.params)))
            state, engine, at, _, row = trainer.one_step(learner, state, engine, at, modes.Sync(learner))
            assert ("loss" in row) == (at.step == 2)
            assert row["critic/loss"] > 0
    changed = lambda a, b: any(np.any(x != y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert not changed(seen[0][0], seen[1][0])
    assert changed(seen[0][1], seen[1][1])
    assert changed(seen[1][0], jax.device_get(state.params))
    assert (int(state.step), int(state.critic.step)) == (2, 4)


def test_w_is_the_mini_batch_s():
    """Two mini-batches of unequal token counts: each divides by its own, as `token` says of an optimiser step."""
    answers = rollouts_of([1, 1, 9, 9])
    batch, _ = batching.make_batch(answers, CONFIG.model, Division(mini_batches=2))
    for mini, tokens in zip(batching.mini_batches(batch, batch.rows), (2, 18), strict=True):
        weights = batching.with_weights(mini, "token", None).weights
        np.testing.assert_allclose(np.asarray(weights)[np.asarray(mini.mask)], 1 / tokens, rtol=1e-6)


def test_dynamic_sampling_asks_until_groups_are_mixed():
    learner, state = build(
        algorithm=replace(PLAIN, group_filter=filters.mixed), rollout=replace(CONFIG.rollout, max_rounds=40)
    )
    coin = lambda p, text, f: Reward(0.5, len(text) % 2 == 0)
    learner = replace(learner, task=replace(learner.task, reward=coin))
    with jax.set_mesh(learner.mesh):
        engine, at = trainer.make_engine(learner, state.params), modes.Position(draw=3)
        seen, after = modes.sample_batch(learner, engine, at, trainer.metrics.Stopwatch())
    groups = np.array([r.correct for r in seen.rewards]).reshape(-1, 2)
    assert filters.mixed(correct=groups).all()
    assert len(groups) == 4
    asked = len(seen.all_rewards) // 2
    assert asked > 4
    assert (after.step, after.draw, after.pending) == (1, 3 + asked, ())
    assert seen.all_rollouts.draws.tolist() == list(range(3, after.draw))
    everything = np.array([r.correct for r in seen.all_rewards]).reshape(-1, 2)
    assert seen.all_kept.tolist() == filters.mixed(correct=everything).tolist()
    assert seen.rollouts.draws.tolist() == seen.all_rollouts.draws[seen.all_kept].tolist()
