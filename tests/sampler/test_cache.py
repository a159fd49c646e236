"""Decoding's attention, token by token, against plain causal attention on [prompt + answer]; its int8 form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.quantize import Quantized, dequantized, quantize
from jaxrl_llm.sampler import cache
from jaxrl_llm.sampler.cache import KEYS_WIDTH, VALUES_WIDTH, View

R, L, S, N, T, TOKENS, H, K, C = 3, 3, 6, 5, 6, 5, 4, 2, 8
PREFIX = np.array([3, 0, 6])  # 0: a prompt of one token
READS = np.array([2, 0, 2, 1, 2])  # the prefix of each row
STARTS = np.array([5, 0, 2, 1, 3])  # the step at which each row was filled
LANES = np.array([[[1, 0, 0], [3, 0, 0], [0, 2, 4]]])  # empty lanes say row 0
PLACE = np.array([[6, 0, 7, 3, 8]])


def plain(q, k, v):
    """The last token's attention in float64: q [H,C], k and v [n,K,C]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for h in range(H):
        logits = k[:, h // (H // K)] @ q[h] / np.sqrt(C)
        weights = np.exp(logits - logits.max())
        out[h] = weights / weights.sum() @ v[:, h // (H // K)]
    return out


def random(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 1.5


def run(dtype):
    """(row, token, output, what plain attention says) as rows filled at different steps are decoded.

    Columns are garbage at first and go round twice; padding of the prefixes is garbage too.
    """
    prefix_k, prefix_v = (random(R, S, K, C, seed=i) for i in (1, 2))
    own = [random(N, TOKENS, h, C, seed=6 + i) for i, h in enumerate((H, K, K))]
    padded = [np.where((np.arange(S) < PREFIX[:, None])[..., None, None], x, 1e4) for x in (prefix_k, prefix_v)]
    empty = np.full((N, K, C, T), 1e4, np.float32)
    stored = lambda k, v: (
        cache.in_dtype(jnp.asarray(k, jnp.float32), dtype, KEYS_WIDTH),
        cache.in_dtype(jnp.asarray(v, jnp.float32), dtype, VALUES_WIDTH),
    )
    prefix = stored(padded[0].transpose(0, 2, 3, 1), padded[1].transpose(0, 2, 1, 3))
    suffix = stored(empty, empty.swapaxes(2, 3))
    step_once = jax.jit(lambda view, q, k, v, suffix: cache.decode(view)(q, k, v, (prefix, suffix)))
    for step in range(10):
        visible = np.zeros((N, T), bool)
        q, k, v = (random(N, h, C, seed=50 + step) * 1e3 for h in (H, K, K))  # of rows that are not in use
        for n, start in enumerate(STARTS):
            i = step - start
            visible[n, step % T] = True
            if 0 <= i < TOKENS:
                q[n], k[n], v[n] = (x[n, i] for x in own)
                visible[n, np.arange(start, step) % T] = True
        view = View(PREFIX, LANES, PLACE, np.int32(step % T), visible)
        out, suffix = step_once(view, q[:, None], k[:, None], v[:, None], suffix)
        for n, start in enumerate(STARTS):
            i, p = step - start, READS[n]
            if 0 <= i < TOKENS:
                keys, values = (
                    np.concatenate([a[p, : PREFIX[p]], b[n, : i + 1]])
                    for a, b in ((prefix_k, own[1]), (prefix_v, own[2]))
                )
                yield n, i, np.asarray(out)[n, 0], plain(own[0][n, i], keys, values)


def test_rows_see_their_prompt_and_themselves():
    seen = set()
    for n, i, got, want in run("float32"):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6, err_msg=f"row {n}, token {i}")
        seen.add((n, i))
    assert len(seen) == N * TOKENS


@pytest.mark.parametrize(("dtype", "least", "most"), [("bfloat16", 1e-4, 0.03), ("int8", 1e-4, 0.08)])
def test_short_formats_come_near(dtype, least, most):
    errors = [np.abs(got - want).max() for _, _, got, want in run(dtype)]
    assert least < max(errors) < most


def test_int8_is_off_by_half_a_scale_at_most():
    x = jnp.asarray(random(4, 3, 7, seed=3) * np.array([1e-3, 1, 1e3, 0], np.float32)[:, None, None])
    for axes in (1, (0, 2), -1):
        q = quantize(x, axes)
        assert q.x.dtype == jnp.int8
        assert np.asarray(jnp.max(jnp.abs(x), axis=axes, keepdims=True) / 127 - q.scale).max() < 1e-6 * 40
        assert (np.abs(dequantized(q, jnp.float32) - x) <= 0.5001 * q.scale).all()
    assert np.abs(np.asarray(quantize(x, 1).x)).max(axis=1).min(axis=-1).tolist()[:3] == [127] * 3


def test_dequantized_leaves_other_arrays_alone():
    tree = {"a": quantize(jnp.ones((2, 3)), 0), "b": jnp.arange(3)}
    got = dequantized(tree, jnp.bfloat16)
    assert got["a"].dtype == jnp.bfloat16
    assert got["b"] is tree["b"]
    assert isinstance(tree["a"], Quantized)


def test_bfloat16_logits_are_not_rounded_before_the_softmax():
    """Queries and keys in bfloat16 with logits of some tens: what is left of the error is that of the weights."""
    n, width = 64, 64
    q, k, v = (
        jnp.asarray(random(*shape, seed=i), jnp.bfloat16)
        for i, shape in enumerate([(1, 1, 4, width), (1, 1, width, n), (1, 1, n, width)])
    )
    exact_q, exact_k = (np.asarray(x, np.float64)[0, 0] for x in (q, k))
    logits = exact_q @ exact_k
    assert np.abs(logits).max() > 30
    out, total, top = cache._softmax_parts(q, k, v, jnp.ones((1, 1, 1, n), bool))
    exact_total = np.exp(logits - logits.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    rounded = np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float64)
    rounded_total = np.exp(rounded - rounded.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    before, error = (np.abs(x / exact_total - 1).max() for x in (rounded_total, np.asarray(total)[0, 0]))
    assert before > 1e-2
    assert error < before / 100
    np.testing.assert_allclose(np.asarray(top)[0, 0], logits.max(axis=-1, keepdims=True), rtol=1e-6)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    exact_out = np.asarray(jnp.asarray(weights, jnp.bfloat16), np.float64) @ np.asarray(v, np.float64)[0, 0]
    np.testing.assert_allclose(np.asarray(out)[0, 0], exact_out, atol=0.02)
    assert out.dtype == jnp.float32
    assert (np.asarray(out) != np.asarray(out.astype(jnp.bfloat16), np.float32)).any()  # nor is the sum of values
