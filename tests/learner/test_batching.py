"""From samples to arrays: masks from lengths, weights over the batch, whole prompts in every part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONFIG

from jaxrl_llm.learner.batching import in_order, make_batch, micro_batches, mini_batches, with_advantages, with_weights
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.objective.token_weights import token_weights
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt, Rollouts

END = 1
P, G = 4, 3
PROMPT_LENGTHS = np.array([3, 1, 5, 2], np.int32)
LENGTHS = np.array([4, 1, 6, 2, 6, 3, 5, 5, 1, 6, 2, 4], np.int32)
FINISH = np.array([EOS, EOS, LENGTH, EOS, EOS, STOP, EOS, CANCELLED, LENGTH, LENGTH, EOS, STOP])


def make_rollouts(garbage=0):
    """Every token has an id of its own, apart from END; `garbage` pads."""
    prompts = np.full((P, 7), garbage, np.int32)
    tokens = np.full((P * G, 8), garbage, np.int32)
    logp = np.full((P * G, 8), 7.0 * garbage, np.float32)
    for p, n in enumerate(PROMPT_LENGTHS):
        prompts[p, :n] = 1000 + 10 * p + np.arange(n)
    for i, n in enumerate(LENGTHS):
        tokens[i, :n] = 2000 + 10 * i + np.arange(n)
        logp[i, :n] = -(i + np.arange(n) / 10 + 0.1)
        if FINISH[i] == EOS:
            tokens[i, n - 1] = END
    problems = tuple(Prompt(p, f"problem {p}") for p in range(P))
    texts = tuple(f"answer {i}" for i in range(P * G))
    return Rollouts(problems, prompts, PROMPT_LENGTHS, tokens, logp, LENGTHS, FINISH, texts, np.arange(P))


def made(rollouts=None, **changed):
    """On the host, where indexing is cheap."""
    return jax.tree.map(np.asarray, make_batch(rollouts or make_rollouts(), CONFIG.model, **changed)[0])


@pytest.fixture(scope="module")
def batch():
    return made()


@pytest.fixture(scope="module")
def on_device(batch):
    return jax.tree.map(jnp.asarray, batch)


def test_sampler_log_probs_stay_with_their_tokens(batch):
    for i, n in enumerate(LENGTHS):
        np.testing.assert_allclose(batch.sampler_logp[i, :n], -(i + np.arange(n) / 10 + 0.1))
        assert not batch.sampler_logp[i, n:].any()
    assert not batch.adv.any()
    assert (batch.old_logp, batch.ref_logp, batch.weights, batch.critic_rows) == (None, None, None, None)


def test_dtypes_and_shapes(batch):
    for name in ("mask", "adv", "sampler_logp"):
        assert getattr(batch, name).shape == (P * G, 16)
    assert (batch.mask.dtype, batch.adv.dtype, batch.sampler_logp.dtype) == (bool, np.float32, np.float32)
    assert batch.valid.tolist() == [True] * P * G


# --- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [END, 5])
def test_mask_comes_from_lengths_not_ids(garbage, batch):
    other = made(make_rollouts(garbage))
    np.testing.assert_array_equal(other.mask, batch.mask)
    np.testing.assert_array_equal(other.sampler_logp, batch.sampler_logp)
    for x, y in zip(jax.tree.leaves(other.rows), jax.tree.leaves(batch.rows), strict=True):
        np.testing.assert_array_equal(x, y)


def test_mask_is_true_on_the_tokens_of_an_answer(batch):
    for i, n in enumerate(LENGTHS):
        assert batch.mask[i].tolist() == [t < n for t in range(16)]


def test_end_token_inside_a_response_does_not_end_the_mask():
    rollouts = make_rollouts()
    rollouts.tokens[9, 2] = END
    assert made(rollouts).mask[9].sum() == LENGTHS[9]


def test_drop_truncated_takes_length_and_nothing_else(batch):
    dropped = made(drop_truncated=True)
    for i in range(P * G):
        expected = np.zeros(16, bool) if FINISH[i] == LENGTH else batch.mask[i]
        np.testing.assert_array_equal(dropped.mask[i], expected)
    assert dropped.valid.all()


def test_groups_that_are_not_kept_are_masked_out(batch):
    kept = np.array([True, False, True, True])
    expected = np.where(np.repeat(kept, G)[:, None], batch.mask, False)
    np.testing.assert_array_equal(made(kept=kept).mask, expected)


# --- advantages and weights ---------------------------------------------------------------------------------------


def test_an_advantage_per_response_is_spread_over_its_tokens(batch):
    adv = np.arange(1, P * G + 1, dtype=np.float32).reshape(P, G)
    got = np.asarray(with_advantages(batch, adv).adv)
    for i in range(P * G):
        np.testing.assert_array_equal(got[i], np.where(batch.mask[i], adv[i // G, i % G], 0))


def test_an_advantage_per_token(batch):
    adv = np.random.default_rng(0).normal(size=batch.mask.shape).astype(np.float32)
    np.testing.assert_array_equal(with_advantages(batch, adv).adv, np.where(batch.mask, adv, 0))


@pytest.mark.parametrize("norm", ["token", "sequence", "prompt", "constant", "otm"])
@pytest.mark.parametrize("shards", [1, 5])
def test_weights_know_the_group_and_the_whole_batch_and_nothing_that_fills_it_up(batch, norm, shards):
    expected = token_weights(batch.mask, norm, group_size=G, max_len=10)
    filled_up = made(cut=Division(shards=shards))
    assert len(filled_up.mask) == (12 if shards == 1 else 15)
    weights = with_weights(filled_up, norm, 10).weights
    np.testing.assert_array_equal(weights[: P * G], expected)
    assert not weights[P * G :].any()


# --- cut ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2])
def test_mini_batches_are_of_whole_prompts_and_come_back_in_order(parts, shards):
    whole = jax.tree.map(jnp.asarray, made(cut=Division(parts, 2, shards)))
    prompts = len(whole.mask) // G
    assert prompts == -(-P // (parts * shards)) * parts * shards
    numbers = jnp.arange(prompts * G, dtype=jnp.float32)
    whole = with_advantages(whole, jnp.where(numbers < P * G, numbers + 1, 0).reshape(-1, G))
    computed = []
    for u, mini in enumerate(mini_batches(whole, whole.rows)):
        assert mini.adv[:, 0].tolist() == [
            float(x) for p in range(u, prompts, parts) for x in whole.adv[p * G : p * G + G, 0]
        ]
        inputs, answers = micro_batches(mini)
        assert answers.mask.shape[:2] == inputs.answers.shape
        assert float(answers.adv.sum()) == float(mini.adv.sum())
        np.testing.assert_array_equal(in_order(answers.adv, mini.rows, G), mini.adv * mini.valid[:, None])
        computed.append(answers.adv)
    np.testing.assert_array_equal(in_order(jnp.concatenate(computed), whole.rows, G), whole.adv)


def test_the_critic_has_mini_batches_of_its_own():
    batch = made(cut=Division(2), critic_mini_batches=3)
    assert (batch.rows.where.shape, batch.critic_rows.where.shape) == ((2, 9), (3, 6))
