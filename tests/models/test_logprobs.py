"""Log-probs and entropies against float64 loops, gradients against the closed form, and what never is in memory."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.logprobs import reverse_kl, token_logprobs

B, T, D, V = 3, 7, 5, 11
TEMPERATURE = 0.6
CHUNKS = [1, 2, 3, 7, 16, 20, 21, 22, 1024]  # B·T = 21: some divide it, some do not, some are larger


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32) * 2
    head = rng.normal(size=(D, V)).astype(np.float32)
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32)


def reference(hidden, head, targets, temperature):
    """A token at a time, in float64."""
    logp, entropy, probs = np.zeros((B, T)), np.zeros((B, T)), np.zeros((B, T, V))
    for b in range(B):
        for t in range(T):
            z = [sum(float(hidden[b, t, d]) * float(head[d, v]) for d in range(D)) / temperature for v in range(V)]
            top = max(z)
            p = np.exp(np.array(z) - top)
            p /= p.sum()
            logp[b, t] = np.log(p[targets[b, t]])
            entropy[b, t] = -sum(x * np.log(x) for x in p)
            probs[b, t] = p
    return logp, entropy, probs


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE, 3.0])
def test_float64_loops(case, temperature):
    expected = reference(*case, temperature)
    got = token_logprobs(*case, temperature=temperature, chunk=4)
    for x, y in zip(got, expected[:2], strict=True):
        assert x.dtype == jnp.float32
        assert x.shape == (B, T)
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=4e-6)


def test_entropy_is_of_the_tempered_distribution(case):
    untempered = reference(*case, 1.0)[1]
    assert np.abs(token_logprobs(*case, temperature=TEMPERATURE)[1] - untempered).min() > 1e-3


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunk_size_changes_nothing(case, chunk):
    whole = token_logprobs(*case, temperature=TEMPERATURE, chunk=B * T)
    for x, y in zip(token_logprobs(*case, temperature=TEMPERATURE, chunk=chunk), whole, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=2e-6)


def test_one_token(case):
    hidden, head, targets = case
    logp, entropy = token_logprobs(hidden[1:2, 2:3], head, targets[1:2, 2:3], temperature=TEMPERATURE)
    expected = reference(*case, TEMPERATURE)
    np.testing.assert_allclose([logp[0, 0], entropy[0, 0]], [expected[0][1, 2], expected[1][1, 2]], rtol=2e-6)


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("output", ["logp", "entropy", "both"])
def test_gradients_are_the_closed_form(case, chunk, output):
    # For z = hidden·head/τ:  ∂ log π(y)/∂z = 1[y] − π   and   ∂H/∂z = −π·(log π + H)
    hidden, head, targets = case
    rng = np.random.default_rng(1)
    a, b = (
        rng.normal(size=(2, B, T))
        * np.array({"logp": [1, 0], "entropy": [0, 1], "both": [1, 1]}[output])[:, None, None]
    )
    _, entropy, p = reference(*case, TEMPERATURE)
    dz = a[..., None] * (np.eye(V)[targets] - p) - b[..., None] * p * (np.log(p) + entropy[..., None])
    expected = (dz @ head.T.astype(np.float64) / TEMPERATURE, np.einsum("btd,btv->dv", hidden, dz) / TEMPERATURE)

    def total(hidden, head):
        logp, entropy = token_logprobs(hidden, head, targets, temperature=TEMPERATURE, chunk=chunk)
        return jnp.sum(a * logp) + jnp.sum(b * entropy)

    for x, y in zip(jax.grad(total, argnums=(0, 1))(hidden, head), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


def test_large_logits_stay_finite():
    hidden, head = np.full((1, 1, 1), 1e4, np.float32), np.array([[1.0, -1.0, 0.0]], np.float32)
    total = lambda h, y: sum(x.sum() for x in token_logprobs(h, head, y, chunk=1))
    for target, expected in ((0, 0.0), (1, -2e4)):
        y = np.full((1, 1), target, np.int32)
        logp, entropy = token_logprobs(hidden, head, y)
        np.testing.assert_allclose([logp[0, 0], entropy[0, 0]], [expected, 0.0])
        assert np.isfinite(jax.grad(total)(hidden, y)).all()


def test_bfloat16_hidden_states_keep_a_float32_head(case):
    hidden, head, targets = case
    half = jnp.asarray(hidden, jnp.bfloat16)
    expected = reference(np.asarray(half, np.float32), head, targets, TEMPERATURE)
    for x, y in zip(token_logprobs(half, head, targets, temperature=TEMPERATURE, chunk=4), expected[:2], strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("chunks", [16, 2048])
def test_a_bfloat16_head_sums_its_gradient_in_float32(chunks):
    """Rounding the sum once costs 2 thousandths with any number of chunks; rounding each partial sum, 7 hundredths."""
    rng = np.random.default_rng(3)
    hidden, head = (np.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((1, chunks, D), (D, V)))
    targets = rng.integers(0, V, (1, chunks)).astype(np.int32)
    got = jax.grad(lambda head: token_logprobs(hidden, head, targets, chunk=1)[0].sum())(head)
    wide, h = np.asarray(head, np.float64), np.asarray(hidden[0], np.float64)
    p = np.exp(h @ wide)
    expected = h.T @ (np.eye(V)[targets[0]] - p / p.sum(axis=1, keepdims=True))
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) < 4e-3 * np.linalg.norm(expected)


def sizes(jaxpr):
    """Elements of every array in a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)


@pytest.mark.parametrize("backward", [False, True])
def test_all_tokens_times_vocabulary_never_exists(backward):
    b, t, d, v, chunk = 4, 16, 3, 40, 8
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((b, t, d), (d, v))]
    targets = jax.ShapeDtypeStruct((b, t), np.int32)

    def total(chunk, hidden, head, targets):
        logp, entropy = token_logprobs(hidden, head, targets, chunk=chunk)
        return jnp.sum(logp * entropy)

    def largest(chunk):
        f = partial(jax.grad(total, argnums=(1, 2)) if backward else total, chunk)
        compiled = jax.jit(f).lower(*shapes, targets).compile().as_text()
        in_hlo = [np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"\w\d+\[([\d,]+)\]", compiled)]
        return max(sizes(jax.make_jaxpr(f)(*shapes, targets).jaxpr)), max(in_hlo)

    assert largest(b * t) == (b * t * v,) * 2  # the probe sees it when it is there
    assert max(largest(chunk)) <= chunk * v


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(case, temperature):
    with pytest.raises(ValueError, match=f"temperature is {temperature}"):
        token_logprobs(*case, temperature=temperature)


@pytest.mark.parametrize("chunk", [0, -3])
def test_chunk_must_be_positive(case, chunk):
    with pytest.raises(ValueError, match=f"chunk is {chunk}"):
        token_logprobs(*case, chunk=chunk)


# --- the divergence from a teacher ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher():
    """Another width than the policy's."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(B, T, D + 2)).astype(np.float32), rng.normal(size=(D + 2, V)).astype(np.float32)


def probabilities(hidden, head, temperature):
    z = hidden.astype(np.float64) @ head.astype(np.float64) / temperature
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def loop_kl(case, teacher, temperature):
    """A token at a time, in float64."""
    p, q = probabilities(*case[:2], temperature), probabilities(*teacher, temperature)
    return np.array(
        [[sum(x * np.log(x / y) for x, y in zip(p[b, t], q[b, t], strict=True)) for t in range(T)] for b in range(B)]
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_reverse_kl_float64_loops(case, teacher, chunk):
    for temperature in (1.0, TEMPERATURE):
        got = reverse_kl(*case[:2], *teacher, temperature=temperature, chunk=chunk)
        assert (got.dtype, got.shape) == (jnp.float32, (B, T))
        np.testing.assert_allclose(got, loop_kl(case, teacher, temperature), rtol=3e-6, atol=4e-6)


def test_reverse_kl_of_the_policy_itself_is_zero_and_flat(case):
    kl, pull = jax.vjp(lambda h, w: reverse_kl(h, w, *case[:2]), *case[:2])
    np.testing.assert_allclose(kl, np.zeros((B, T)), atol=1e-6)
    for g in pull(jnp.ones((B, T))):
        np.testing.assert_allclose(g, np.zeros(g.shape), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_reverse_kl_s_gradient_is_the_closed_form(case, teacher, chunk):
    # For z = hidden·head/τ:  ∂KL/∂z = π·(log π − log π_T − KL); none for the teacher
    hidden, head, _ = case
    u = np.random.default_rng(1).normal(size=(B, T))
    p, q = probabilities(hidden, head, TEMPERATURE), probabilities(*teacher, TEMPERATURE)
    dz = u[..., None] * p * (np.log(p / q) - loop_kl(case, teacher, TEMPERATURE)[..., None])
    expected = (dz @ head.T.astype(np.float64) / TEMPERATURE, np.einsum("btd,btv->dv", hidden, dz) / TEMPERATURE)
    total = lambda *arrays: jnp.sum(u * reverse_kl(*arrays, temperature=TEMPERATURE, chunk=chunk))
    got = jax.grad(total, argnums=(0, 1, 2, 3))(hidden, head, *teacher)
    for x, y in zip(got, expected, strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)
    assert not any(np.any(x) for x in got[2:])


@pytest.mark.parametrize("wider", ["policy", "teacher"])
def test_columns_that_only_one_head_has_stand_for_no_token(case, teacher, wider):
    """Padding of the vocabulary, to which neither gives weight."""
    pad = lambda head: np.pad(head, ((0, 0), (0, 3)))
    hidden, head, _ = case
    own, other = np.abs(hidden) + 1, np.abs(teacher[0]) + 1
    padded = lambda head: np.concatenate([head, np.full((head.shape[0], 3), -30, np.float32)], axis=1)
    plain = reverse_kl(own, head, other, teacher[1])
    if wider == "policy":
        got = reverse_kl(own, padded(head), other, teacher[1])
    else:
        got = reverse_kl(own, head, other, padded(teacher[1]))
    np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-5)
    assert np.abs(reverse_kl(own, pad(head), other, teacher[1]) - plain).max() > 0.01  # some weight: it is missed


@pytest.mark.parametrize("backward", [False, True])
def test_reverse_kl_never_holds_all_tokens_times_vocabulary(backward):
    b, t, d, v, chunk = 4, 16, 3, 40, 8
    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((b, t, d), (d, v)) * 2]

    def total(chunk, *arrays):
        return jnp.sum(reverse_kl(*arrays, chunk=chunk) ** 2)

    def largest(chunk):
        f = partial(jax.grad(total, argnums=(1, 2)) if backward else total, chunk)
        compiled = jax.jit(f).lower(*shapes).compile().as_text()
        in_hlo = [np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"\w\d+\[([\d,]+)\]", compiled)]
        return max(sizes(jax.make_jaxpr(f)(*shapes).jaxpr)), max(in_hlo)

    assert largest(b * t) == (b * t * v,) * 2
    assert max(largest(chunk)) <= chunk * v


def test_reverse_kl_s_arguments(case, teacher):
    with pytest.raises(ValueError, match="temperature is 0.0"):
        reverse_kl(*case[:2], *teacher, temperature=0.0)
    with pytest.raises(ValueError, match="chunk is 0"):
        reverse_kl(*case[:2], *teacher, chunk=0)
