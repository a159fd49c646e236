"""The shared-prompt layouts of attention against plain causal attention on every [prompt + response] by itself."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow

from jaxrl_llm.models import attention, kernels

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


@contextmanager
def blocks_of(size):
    """Rows are computed as long ones are, in blocks of `size` tokens; 0: as short ones are, all at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "DENSE", 0 if size else 2**20)
        patch.setattr(kernels, "BLOCK", size)
        yield


@pytest.fixture(scope="module", params=[0, 4], ids=["dense", "blocked"])
def grouped(request):
    def run(lengths, q, k, v):
        with blocks_of(request.param):
            return attention.grouped(lengths, S, G)(q, k, v, None)[0]

    return jax.jit(run)


def in_padding(x, value):
    """x with `value` in the prefix's padding."""
    x = x.copy()
    for r, n in enumerate(PREFIX):
        x[r, n:S] = value
    return x


@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_causal(size):
    q, k, v = heads(7)
    with blocks_of(size):
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


@pytest.mark.parametrize("size", [0, 4], ids=["dense", "blocked"])
def test_grouped_without_any_prefix(size):
    # a batch whose prompts all have one token may have no prefix column at all
    q, k, v = heads(G * T)
    with blocks_of(size):
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


@pytest.mark.parametrize("size", [0, 64], ids=["dense", "blocked"])
@pytest.mark.parametrize("layout", ["causal", "packed", "grouped"])
def test_logits_are_not_rounded_to_bfloat16(layout, size):
    """Inputs and outputs in bfloat16 cost two or three thousandths; logits in it would cost 1 to 2 hundredths."""
    grouped = attention.grouped(np.array([100], np.int32), 128, 2)
    packed = attention.packed(np.arange(256)[None] // 100 + 1)
    attend = {
        "causal": attention.causal,
        "packed": lambda *x: packed(*x, None)[0],
        "grouped": lambda *x: grouped(*x, None)[0][:, 128:],
    }[layout]
    with blocks_of(size):
        assert max(errors_in_bfloat16(attend, scale=2.0)) < 5e-3


# Two rows of sequences, one behind the other: their lengths, then padding.
PACKED = ((5, 1, 9), (13,))
N = 17
SEGMENTS = np.array([np.repeat(np.arange(1, len(row) + 2), [*row, N - sum(row)]) for row in PACKED])
SEGMENTS[np.array([[len(row)] for row in PACKED]) < SEGMENTS] = 0


def value_and_gradients(attend, weights, *x):
    """Output, and gradients of Σ weights·output², which differ from token to token."""
    out, gradients = jax.vjp(attend, *x)
    return (out, *gradients(2 * weights * out))


def by_itself(x, weights, segments=SEGMENTS):
    """`value_and_gradients` of every segment of every row, alone in a row of its own; 0 in padding."""
    everything = [np.zeros(y.shape, np.float32) for y in (x[0], *x)]
    for r, ids in enumerate(segments):
        for own in (ids == s for s in set(ids) - {0}):
            alone = value_and_gradients(attention.causal, weights[r, own][None], *(y[r, own][None] for y in x))
            for whole, part in zip(everything, alone, strict=True):
                whole[r, own] = part[0]
    return everything


def rows_of(n, rows=2, width=C, kv_heads=K):
    return [random(rows, n, h, width, seed=i) for i, h in enumerate((H, kv_heads, kv_heads))]


@pytest.mark.parametrize(
    "size", [0, slow(1), 4, slow(32)]
)  # 0: dense; blocks that hold a token, cut segments, hold the row
def test_packed_is_each_segment_alone(size):
    x, weights = rows_of(N), (SEGMENTS > 0)[:, :, None, None] * random(2, N, H, C, seed=5)
    with blocks_of(size):
        got = value_and_gradients(lambda *x: attention.packed(SEGMENTS)(*x, None)[0], weights, *x)
    for a, b in zip(got, by_itself(x, weights), strict=True):
        a = np.asarray(a)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a[SEGMENTS > 0], b[SEGMENTS > 0], rtol=1e-5, atol=1e-5)
    for gradient in got[1:]:
        assert (np.asarray(gradient)[SEGMENTS == 0] == 0).all()


def test_a_row_of_padding_is_finite():
    x = rows_of(N)
    for size in (0, 4):
        with blocks_of(size):
            attend = lambda *x: attention.packed(np.zeros((2, N), np.int32))(*x, None)[0]
            got = value_and_gradients(attend, np.zeros((2, N, H, C), np.float32), *x)
        assert all(np.isfinite(y).all() for y in got)
        assert all((np.asarray(y) == 0).all() for y in got[1:])


def test_blocks_without_a_common_segment_are_left_out():
    meet = lambda ids, n: int(kernels._meetings(jnp.array(ids).reshape(len(ids), 1, -1), n)[2])
    assert meet([[1, 1], [1, 1], [1, 1]], 3) == 6  # the lower triangle
    assert meet([[1, 1], [1, 2], [2, 2]], 3) == 5  # the third does not meet the first
    assert meet([[1, 1], [2, 2], [0, 0]], 3) == 2  # padding meets nobody, not even itself
    assert meet([[1, 0], [0, 0], [1, 1]], 1) == 2  # one block of queries, behind a prefix with padding


@pytest.mark.parametrize(("layout", "dense"), [("packed", False), ("grouped", False), ("packed", True)])
def test_memory_is_linear_in_tokens(monkeypatch, layout, dense):
    """Forward and backward of a layer, by the compiler's account; what is dense grows as the square."""
    monkeypatch.setattr(attention, "DENSE", 2**62 if dense else attention.DENSE)

    def mib(n):
        if layout == "packed":
            attend = attention.packed(np.arange(n)[None] // 500 + 1)
        else:
            attend = attention.grouped(np.array([n // 9]), n // 9, 8)
        loss = lambda *x: jnp.sum(attend(*x, None)[0] ** 2)
        shapes = [jax.ShapeDtypeStruct((1, n, heads, 64), jnp.float32) for heads in (4, 2, 2)]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    ratio = mib(18432) / mib(9216)
    assert ratio > 3 if dense else 1.7 < ratio < 2.3


def test_a_config_cannot_name_what_its_machine_does_not_run():
    for name, platform in (("auto", "cpu"), ("xla", "tpu"), ("splash", "tpu"), ("cudnn", "gpu"), ("pallas", "gpu")):
        attention.check(name, platform)
    with pytest.raises(ValueError, match="model.attention is 'splash'; expected auto, xla on cpu"):
        attention.check("splash", "cpu")
    with pytest.raises(ValueError, match="model.attention is 'cudnn'; expected auto, xla, splash on tpu"):
        attention.check("cudnn", "tpu")
    with pytest.raises(ValueError, match="cudnn.*packed"):
        attention.packed(SEGMENTS, "cudnn")


def test_auto_is_what_the_machine_runs_best(monkeypatch):
    for platform, name, tokens in (("cpu", "xla", 1), ("gpu", "pallas", 128), ("tpu", "splash", 128)):
        monkeypatch.setattr(kernels, "platform", lambda platform=platform: platform)
        assert (attention.resolve("auto"), attention.multiple("auto")) == (name, tokens)
        assert attention.resolve("cudnn") == "cudnn"
