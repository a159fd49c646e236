"""The shared-prompt layouts of attention against plain causal attention on every [prompt + response] by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention

R, S, G, T, H, K, C = 3, 6, 2, 4, 4, 2, 5
PREFIX = np.array([3, 0, 6])  # tokens before the prompt's last; 0: a prompt of one token


def plain(q, k, v):
    """Causal attention of one row in float64: q [N,H,C], k and v [N,K,C]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for n in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            logits = k[: n + 1, kv] @ q[n, h] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            out[n, h] = weights / weights.sum() @ v[: n + 1, kv]
    return out


def random(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 1.5


def heads(n, seed=0):
    """q, k, v of R rows of n tokens."""
    return [random(R, n, h, C, seed=seed + i) for i, h in enumerate((H, K, K))]


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6)


@pytest.fixture(scope="module")
def grouped():
    run = lambda lengths, q, k, v: attention.grouped(lengths, S, G)(q, k, v, None)[0]
    return jax.jit(run)


def in_padding(x, value):
    """x with `value` in the prefix's padding."""
    x = x.copy()
    for r, n in enumerate(PREFIX):
        x[r, n:S] = value
    return x


@pytest.mark.parametrize("blocks", [(256, 8), (3, 8), (1, 2), (2, 100)])
def test_causal(monkeypatch, blocks):
    monkeypatch.setattr(attention, "MIN_BLOCK", blocks[0])
    monkeypatch.setattr(attention, "MAX_BLOCKS", blocks[1])
    q, k, v = heads(7)
    got = attention.causal(q, k, v)
    assert attention.causal(q[:, :0], k[:, :0], v[:, :0]).shape == (R, 0, H, C)
    for r in range(R):
        close(got[r], plain(q[r], k[r], v[r]))


def test_grouped_is_plain_attention_on_each_sequence(grouped):
    rows = heads(S + G * T)
    got = np.asarray(grouped(PREFIX, *rows))
    for r, n in enumerate(PREFIX):
        close(got[r, :n], plain(*(x[r, :n] for x in rows)))
        for g in range(G):
            own = slice(S + g * T, S + (g + 1) * T)
            sequence = [np.concatenate([x[r, :n], x[r, own]]) for x in rows]
            close(got[r, own], plain(*sequence)[n:])


@pytest.mark.parametrize("large", [slice(0, S), slice(S, None)], ids=["prefix", "own"])
def test_one_of_the_two_sets_of_keys_may_dominate(grouped, large):
    # logits hundreds of nats apart: exp of either minus the other's maximum overflows, or leaves nothing
    q, k, v = heads(S + G * T)
    k = k.copy()
    k[:, large] *= 100
    got = np.asarray(grouped(PREFIX, q, k, v))
    for r, n in enumerate(PREFIX):
        own = slice(S, S + T)
        sequence = [np.concatenate([x[r, :n], x[r, own]]) for x in (q, k, v)]
        np.testing.assert_allclose(got[r, own], plain(*sequence)[n:], rtol=1e-4, atol=1e-4)


def test_prefix_padding_has_no_effect(grouped):
    q, k, v = heads(S + G * T)
    clean = np.asarray(grouped(PREFIX, *(in_padding(x, 0.0) for x in (q, k, v))))
    dirty = np.asarray(grouped(PREFIX, *(in_padding(x, 1e4) for x in (q, k, v))))
    np.testing.assert_array_equal(clean[:, S:], dirty[:, S:])
    for r, n in enumerate(PREFIX):
        np.testing.assert_array_equal(clean[r, :n], dirty[r, :n])


def test_no_gradient_reaches_the_padding(grouped):
    rows = heads(S + G * T)
    loss = lambda *x: jnp.sum(grouped(PREFIX, *x)[:, S:] ** 2)
    for gradient in jax.grad(loss, argnums=(0, 1, 2))(*rows):
        gradient = np.asarray(gradient)
        assert np.isfinite(gradient).all()
        for r, n in enumerate(PREFIX):
            assert (gradient[r, n:S] == 0).all()
    k_gradient = np.asarray(jax.grad(loss, argnums=1)(*rows))
    assert (k_gradient[0, : PREFIX[0]] != 0).all()  # every answer reads the prompt


def test_answers_do_not_see_each_other_nor_their_own_future(grouped):
    rows = heads(S + G * T)
    before = np.asarray(grouped(PREFIX, *rows))
    later = S + T + 2  # token 2 of answer 1
    changed = [np.concatenate([x[:, :later], random(*x[:, later:].shape, seed=9)], axis=1) for x in rows]
    after = np.asarray(grouped(PREFIX, *changed))
    np.testing.assert_array_equal(before[:, :later], after[:, :later])
    assert (np.abs(before[:, later:] - after[:, later:]).max(axis=(2, 3)) > 1e-3).all()


def test_grouped_without_any_prefix():
    # a batch whose prompts all have one token may have no prefix column at all
    q, k, v = heads(G * T)
    got = attention.grouped(np.zeros(R, np.int32), 0, G)(q, k, v, None)[0]
    for r in range(R):
        for g in range(G):
            own = slice(g * T, (g + 1) * T)
            close(got[r, own], plain(q[r, own], k[r, own], v[r, own]))


def errors_in_bfloat16(attend, scale):
    """Relative errors of the output and the gradients of q, k and v in bfloat16; in float32 they are below 1e-5."""
    q, k, v = (random(1, 256, n, 64, seed=i) for i, n in enumerate((H, K, K)))
    q, k, v, slope = (
        np.asarray(x, jnp.bfloat16) for x in (q * scale, k * scale, v, random(*attend(q, k, v).shape, seed=3))
    )

    @jax.jit
    def run(q, k, v):
        out, gradients = jax.vjp(attend, q, k, v)
        return (out, *gradients(jnp.asarray(slope, out.dtype)))

    exact = run(*(x.astype(np.float32) for x in (q, k, v)))
    size = lambda x: np.linalg.norm(np.asarray(x, np.float32))
    return [size(a.astype(jnp.float32) - b) / size(b) for a, b in zip(run(q, k, v), exact, strict=True)]


@pytest.mark.parametrize("layout", ["causal", "grouped"])
def test_logits_are_not_rounded_to_bfloat16(layout):
    """Inputs and outputs in bfloat16 cost two or three thousandths; logits in it would cost 1 to 2 hundredths."""
    grouped = attention.grouped(np.array([100], np.int32), 128, 2)
    attend = {"causal": attention.causal, "grouped": lambda *x: grouped(*x, None)[0][:, 128:]}[layout]
    assert max(errors_in_bfloat16(attend, scale=2.0)) < 5e-3
