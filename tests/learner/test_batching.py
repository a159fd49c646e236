"""From samples to arrays: the shift by one token, masks from lengths, whole prompts in every part."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner.batching import bucket, make_batch, split_batch, with_advantages, with_weights
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


@pytest.fixture(scope="module")
def batch():
    """On the host, where indexing is cheap."""
    return jax.tree.map(np.asarray, make_batch(make_rollouts(), shape=(6, 9)))


@pytest.fixture(scope="module")
def on_device(batch):
    return jax.tree.map(jnp.asarray, batch)


# --- the shift ----------------------------------------------------------------------------------------------------


def test_targets_are_the_response_with_its_end(batch):
    for i, n in enumerate(LENGTHS):
        completion = [2000 + 10 * i + t for t in range(n - (FINISH[i] == EOS))]
        end = [END] if FINISH[i] == EOS else []
        assert batch.targets[i][batch.mask[i]].tolist() == completion + end
        assert batch.mask[i].tolist() == [t < n for t in range(9)]


def test_inputs_begin_with_the_prompts_last_token(batch):
    for i, n in enumerate(LENGTHS):
        p = i // G
        last = 1000 + 10 * p + PROMPT_LENGTHS[p] - 1
        assert batch.inputs[i, :n].tolist() == [last, *batch.targets[i, : n - 1].tolist()]


def test_prefix_and_inputs_make_up_the_sequence_once(batch):
    for i, n in enumerate(LENGTHS):
        p = i // G
        prefix = batch.prefix[p, : batch.prefix_lengths[p]].tolist()
        sequence = [*prefix, *batch.inputs[i, :n].tolist(), batch.targets[i, n - 1].item()]
        prompt = [1000 + 10 * p + t for t in range(PROMPT_LENGTHS[p])]
        assert sequence == prompt + make_rollouts().tokens[i, :n].tolist()
    np.testing.assert_array_equal(batch.prefix_lengths, PROMPT_LENGTHS - 1)
    for row, n in zip(batch.prefix, batch.prefix_lengths, strict=True):
        assert not row[n:].any()


def test_sampler_log_probs_stay_with_their_tokens(batch):
    for i, n in enumerate(LENGTHS):
        np.testing.assert_allclose(batch.sampler_logp[i, :n], -(i + np.arange(n) / 10 + 0.1))
        assert not batch.sampler_logp[i, n:].any()
    assert not batch.adv.any()
    assert (batch.old_logp, batch.ref_logp, batch.weights) == (None, None, None)


def test_dtypes_and_shapes(batch):
    expected = {"prefix": (P, 6), "prefix_lengths": (P,)}
    for name in ("prefix", "prefix_lengths", "inputs", "targets"):
        assert getattr(batch, name).dtype == np.int32
    for name in ("inputs", "targets", "mask", "adv", "sampler_logp", "prefix", "prefix_lengths"):
        assert getattr(batch, name).shape == expected.get(name, (P * G, 9))
    assert (batch.mask.dtype, batch.adv.dtype, batch.sampler_logp.dtype) == (bool, np.float32, np.float32)


# --- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [END, 5])
def test_mask_comes_from_lengths_not_ids(garbage, batch):
    other = make_batch(make_rollouts(garbage), shape=(6, 9))
    np.testing.assert_array_equal(other.mask, batch.mask)
    np.testing.assert_array_equal(other.sampler_logp, batch.sampler_logp)
    np.testing.assert_array_equal(other.prefix, batch.prefix)
    np.testing.assert_array_equal(np.where(batch.mask, other.targets, 0), np.where(batch.mask, batch.targets, 0))


def test_end_token_inside_a_response_does_not_end_the_mask():
    rollouts = make_rollouts()
    rollouts.tokens[9, 2] = END
    assert np.asarray(make_batch(rollouts, shape=(6, 9)).mask)[9].sum() == LENGTHS[9]


def test_drop_truncated_takes_length_and_nothing_else(batch):
    dropped = make_batch(make_rollouts(), shape=(6, 9), drop_truncated=True)
    for i in range(P * G):
        expected = np.zeros(9, bool) if FINISH[i] == LENGTH else batch.mask[i]
        np.testing.assert_array_equal(dropped.mask[i], expected)
    np.testing.assert_array_equal(dropped.targets, batch.targets)


@pytest.mark.parametrize(("shape", "fits"), [((4, 6), True), ((3, 6), False), ((4, 5), False), ((100, 100), True)])
def test_shape_must_hold_the_longest(shape, fits, batch):
    if fits:
        made = make_batch(make_rollouts(), shape=shape)
        assert (made.prefix.shape[1], made.targets.shape[1]) == shape
        assert made.mask.sum() == batch.mask.sum()
    else:
        with pytest.raises(ValueError, match=rf"shape is \({shape[0]}, {shape[1]}\).*\(4, 6\)"):
            make_batch(make_rollouts(), shape=shape)


def test_prompts_of_one_token_need_no_prefix():
    rollouts = replace(make_rollouts(), prompt_lengths=np.ones(P, np.int32))
    made = make_batch(rollouts, shape=(0, 6))
    assert made.prefix.shape == (P, 0)
    np.testing.assert_array_equal(made.inputs[::G, 0], rollouts.prompt_tokens[:, 0])


def test_bucket():
    assert [bucket(n) for n in (0, 1, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 97)] == [
        16, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 128,
    ]  # fmt: skip
    assert bucket(33, 32) == 48
    sizes = [bucket(n) for n in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert all(n <= s for n, s in enumerate(sizes, 1))
    assert all(s < 1.5 * n for n, s in enumerate(sizes, 1) if n > 16)
    assert len(set(sizes)) == 18
    assert all(bucket(s) == s for s in set(sizes))


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
def test_weights_know_the_group_and_the_whole_batch(batch, norm):
    expected = token_weights(batch.mask, norm, group_size=G, max_len=10)
    np.testing.assert_array_equal(with_weights(batch, norm, 10).weights, expected)


# --- cut ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_are_whole_prompts_and_make_up_the_batch(on_device, parts):
    whole = with_weights(with_advantages(on_device, np.arange(P * G, dtype=np.float32).reshape(P, G)), "token", None)
    pieces = split_batch(whole, parts)
    names = ("inputs", "targets", "mask", "adv", "sampler_logp", "weights")
    seen = []
    for k in range(parts):
        part = jax.tree.map(lambda x, k=k: np.asarray(x[k]), pieces)
        assert part.prefix.shape == (P // parts, 6)
        for j in range(P // parts):
            p = next(q for q in range(P) if part.inputs[j * G, 0] == 1000 + 10 * q + PROMPT_LENGTHS[q] - 1)
            seen.append(p)
            np.testing.assert_array_equal(part.prefix[j], whole.prefix[p])
            np.testing.assert_array_equal(part.prefix_lengths[j], whole.prefix_lengths[p])
            for name in names:  # the group's members, together and in order
                rows = getattr(part, name)[j * G : (j + 1) * G]
                np.testing.assert_array_equal(rows, np.asarray(getattr(whole, name))[p * G : (p + 1) * G])
    assert sorted(seen) == list(range(P))
    assert pieces.old_logp is None


def test_every_device_has_a_share_of_every_part(on_device):
    # Prompts lie on devices in order, so a part takes every parts-th prompt.
    first = np.asarray(split_batch(on_device, 2).inputs)[:, ::G, 0]
    assert (first // 10 - 100).tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("parts", [3, 5, 8])
def test_parts_must_divide_the_prompts(on_device, parts):
    with pytest.raises(ValueError, match=f"parts={parts}: does not divide the {P} prompts"):
        split_batch(on_device, parts)
