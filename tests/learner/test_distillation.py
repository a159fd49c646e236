"""What a teacher and the parts of a reward make of a batch: the loss, the advantages, the gradient."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored, slow

from jaxrl_llm.data import tokenizers
from jaxrl_llm.learner import batching, learner, train_step
from jaxrl_llm.models import transformer
from jaxrl_llm.models.logprobs import reverse_kl
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Shaping
from jaxrl_llm.types import Reward

SHAPE = [3, 4, 5, 6]  # tokens of the four answers to two prompts
TEACHER = replace(CONFIG.model, width=24, vocab_size=120)  # its vocabulary is padded to another size


def tutor(alphabet=tokenizers.ALPHABET):
    """A teacher of another width and random weights."""
    load = lambda mesh: jax.tree.map(lambda x: 2 * x, transformer.init(TEACHER, jax.random.key(5)))
    return TEACHER, tokenizers.characters(alphabet), load


def build(algorithm, **changes):
    config = replace(CONFIG, algorithm=algorithm, teacher=tutor if algorithm.needs_teacher else None, **changes)
    made = learner.build(config)
    with jax.set_mesh(made.mesh):
        return learner.with_teacher(made), learner.fresh_state(made)


def learnt(algorithm, **changes):
    made, state = build(algorithm, **changes)
    batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
    return made, state, batch


def exact_kl(made, params, batch):
    """From the two models' hidden states, in one block."""

    def one(rows, _):
        own, model, _ = train_step.response_hidden(CONFIG.model, params, rows)
        other, its_model, _ = train_step.response_hidden(TEACHER, made.teacher.params, rows)
        kl = reverse_kl(own, model.head_matrix(), other, its_model.head_matrix(), temperature=0.7)
        return train_step.by_answer(rows, kl)

    return train_step.over_micro_batches(one, batch, batch.rows)


@pytest.mark.parametrize("micro_batches", [slow(1), 2])
@pytest.mark.slow
def test_the_exact_form_s_gradient_is_the_divergence_s(micro_batches):
    made, state, batch = learnt(ALGORITHMS["opd"], micro_batches=micro_batches)
    assert not np.any(batch.adv)
    batch = batching.with_weights(batch, "token", None)
    gradients = train_step.make_gradients(CONFIG.model, ALGORITHMS["opd"], 0.7)
    grads, loss, metrics = gradients(state.params, batch, made.teacher)
    mean = lambda params: jnp.sum(batch.weights * exact_kl(made, params, batch))
    value, expected = jax.value_and_grad(mean)(state.params)
    assert value > 0.1
    np.testing.assert_allclose([loss, metrics["kl/teacher"]], [value, value], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_teacher_stands_beside_the_reward_with_its_coefficient():
    both = replace(PLAIN, distill_coef=0.3)
    made, state, batch = learnt(both)
    batch = batching.with_weights(batch, "token", None)
    with_kl = lambda rows, _: train_step.response_logprobs(CONFIG.model, state.params, rows, 0.7, teacher=made.teacher)
    logp, entropy, kl, _ = train_step.over_micro_batches(with_kl, batch, batch.rows)
    plain = train_step.objective(PLAIN, batch, logp, entropy)
    together = train_step.objective(both, batch, logp, entropy, kl)
    np.testing.assert_allclose(together - plain, 0.3 * jnp.sum(batch.weights * kl), rtol=1e-4)
    spoiled = jnp.where(batch.mask, kl, jnp.nan)
    assert train_step.objective(both, batch, logp, entropy, spoiled) == together


def test_the_sampled_form_rewards_each_token_by_itself():
    made, state, batch = learnt(ALGORITHMS["opd_sampled"])
    with_teacher = train_step.make_logprobs(TEACHER, 0.7)(made.teacher.params, batch)[0]
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(batch.teacher_logp[mask], with_teacher[mask], rtol=1e-5)
    np.testing.assert_allclose(batch.adv, np.where(mask, with_teacher - batch.sampler_logp, 0), rtol=1e-5, atol=1e-6)
    beside = replace(ALGORITHMS["opd_sampled"], advantage=advantages.grpo)
    adv = np.repeat(np.asarray(advantages.grpo(REWARDS.reshape(2, 2))).reshape(-1, 1), mask.shape[1], axis=1)
    np.testing.assert_allclose(learnt(beside)[2].adv, np.where(mask, batch.adv + adv, 0), rtol=1e-4, atol=1e-5)


def test_steps_bring_the_policy_closer():
    made, state, batch = learnt(ALGORITHMS["opd"])
    seen = []
    for _ in range(5):
        state, row = learner.update(made, state, batch)
        seen.append(row["kl/teacher"])
        assert row["skipped"] == 0
    assert seen[-1] < 0.9 * seen[0]


def test_a_teacher_with_other_tokens_is_refused():
    made = learner.build(replace(CONFIG, algorithm=ALGORITHMS["opd"], teacher=partial(tutor, alphabet="abc")))
    with pytest.raises(
        ValueError, match="teacher\\(\\)'s tokenizer is '5 tokens'; expected the run's 98 tokens, of which 2 are"
    ):
        learner.with_teacher(made)


def test_a_teacher_is_kept_as_it_is_computed_with(monkeypatch):
    monkeypatch.setitem(globals(), "TEACHER", replace(TEACHER, dtype="bfloat16"))
    params = build(ALGORITHMS["opd"])[0].teacher.params
    assert params["layers"]["mlp"]["gate"].dtype == jnp.bfloat16
    assert params["embed"].dtype == params["norm"]["scale"].dtype == jnp.float32  # the head is in float32


def test_the_unbiased_kl_takes_the_old_policy_s_log_probs():
    a = replace(PLAIN, kl="k3", kl_coef=0.4, kl_unbiased=True)
    rng = np.random.default_rng(0)
    batch, _ = batching.make_batch(rollouts_of(SHAPE), CONFIG.model)
    noise = lambda: jnp.asarray(-2 + 0.3 * rng.normal(size=batch.mask.shape), jnp.float32)
    batch = batching.with_weights(replace(batch, old_logp=noise(), ref_logp=noise()), "token", None)
    logp, entropy = noise(), noise()
    k3 = losses.kl(logp, batch.ref_logp, batch.mask, "k3", old_logp=batch.old_logp)
    loss = lambda a: train_step.objective(a, batch, logp, entropy)
    np.testing.assert_allclose(loss(a) - loss(PLAIN), 0.4 * jnp.sum(batch.weights * k3), rtol=1e-4)
    assert abs(loss(a) - loss(replace(a, kl_unbiased=False))) > 1e-3


# --- the parts of a reward ------------------------------------------------------------------------------------------


def with_parts(rows):
    whole = scored(rollouts_of(SHAPE), REWARDS)
    return replace(whole, rewards=tuple(Reward(0.0, False, parts=row) for row in rows))


def test_gdpo_gets_the_parts_in_the_order_of_their_names():
    weighted = partial(advantages.gdpo, weights=(1.0, 0.1))
    a = replace(ALGORITHMS["gdpo"], advantage=weighted, updates_per_batch=1, shaping=Shaping(parts=("b", "a")))
    made, state = build(a)
    rows = [{"a": 0.0, "b": 1.0, "c": 9.0}, {"b": 0.0, "a": 3.0}, {"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 1.0}]
    batch, *_ = learner.learn_batch(made, state, with_parts(rows))
    want = weighted(np.array([[[1.0, 0], [0, 3]], [[1, 1], [1, 2]]]))
    np.testing.assert_allclose(np.asarray(batch.adv)[:, 0], np.asarray(want).reshape(-1), rtol=1e-5)


@pytest.mark.parametrize("row", [{"a": 1.0}, {"a": 1.0, "b": float("nan")}, {}])
def test_a_reward_that_lacks_a_part_is_an_error_with_its_prompt(row):
    made, state = build(replace(ALGORITHMS["gdpo"], updates_per_batch=1, shaping=Shaping(parts=("a", "b"))))
    whole = {"a": 1.0, "b": 0.0}
    with pytest.raises(ValueError, match="reward of prompt 1 has the parts .*algorithm.shaping.parts = \\('a', 'b'\\)"):
        learner.learn_batch(made, state, with_parts([whole, whole, whole, row]))
