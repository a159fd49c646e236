"""The reported log-prob is that of the distribution really drawn from: its support, its values, its frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.sampler.sampling import Draw, Sampling, keep, sample

V, N = 9, 20_000
LOGITS = np.array([0.3, 2.0, -1.0, 1.4, 0.9, -3.0, 1.9, 0.0, -0.4], np.float32)
FILTERS = [
    Sampling(),
    Sampling(top_k=3),
    Sampling(top_p=0.8),
    Sampling(top_k=4, top_p=0.7),
    Sampling(top_k=2, top_p=0.95),
    Sampling(top_k=V + 5, top_p=0.5),
]

compiled = jax.jit(sample, static_argnums=4)


def run(logits, keys, sampling, position=0, forced=None):
    """Rows that are all drawn alike."""
    n = len(logits)
    every = lambda value, dtype: np.full(n, value, dtype)
    draw = Draw(keys, *(every(getattr(sampling, f), d) for f, d in FIELDS))
    forced = every(-1, np.int32) if forced is None else forced
    return compiled(logits, draw, every(position, np.int32), forced, sampling.filtered)


FIELDS = (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32))


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def reference(logits, sampling):
    """Probabilities really drawn from, in float64: top-k first, then the nucleus of what is left, renormalised."""
    logits = [float(x) for x in logits]
    alive = set(range(len(logits)))
    if sampling.top_k:
        border = sorted(logits, reverse=True)[min(sampling.top_k, len(logits)) - 1]
        alive = {v for v in alive if logits[v] >= border}
    if sampling.top_p < 1:
        total = sum(np.exp(logits[v]) for v in alive)
        mass, chosen = 0.0, []
        for v in sorted(alive, key=lambda v: -logits[v]):
            if chosen and mass >= sampling.top_p and logits[v] < logits[chosen[-1]]:
                break
            chosen.append(v)
            mass += np.exp(logits[v]) / total
        alive = set(chosen)
    p = np.array([np.exp(logits[v]) if v in alive else 0.0 for v in range(len(logits))])
    return p / p.sum()


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_log_probs_and_frequencies_are_of_the_filtered_distribution(sampling):
    expected = reference(LOGITS, sampling)
    tokens, logp = (np.asarray(x) for x in run(np.tile(LOGITS, (N, 1)), keys(N), sampling))
    assert tokens.dtype == np.int32
    assert logp.dtype == np.float32
    assert set(tokens) == set(np.flatnonzero(expected))  # the rarest has probability 0.002: 40 of 20,000 draws
    np.testing.assert_allclose(logp, np.log(expected[tokens]), atol=1e-6)
    frequency = np.bincount(tokens, minlength=V) / N
    np.testing.assert_array_less(np.abs(frequency - expected), 4.5 * np.sqrt(expected * (1 - expected) / N) + 1e-12)


@pytest.mark.parametrize("sampling", FILTERS[1:4], ids=str)
def test_not_the_full_softmax(sampling):
    tokens, logp = (np.asarray(x) for x in run(np.tile(LOGITS, (N, 1)), keys(N), sampling))
    full = np.asarray(jax.nn.log_softmax(LOGITS))[tokens]
    removed = np.log(np.exp(np.asarray(jax.nn.log_softmax(LOGITS)))[reference(LOGITS, sampling) > 0].sum())
    assert removed < -0.1
    np.testing.assert_allclose(full - logp, removed, atol=1e-6)  # the mass that the filter removed, in nats


def test_random_rows_and_filters():
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(64, V)) * rng.uniform(0.1, 5, (64, 1))).astype(np.float32)
    for sampling in (Sampling(top_k=5, top_p=0.9), Sampling(top_p=0.3)):
        kept = np.asarray(keep(jnp.asarray(logits), np.full(64, sampling.top_k), np.full(64, sampling.top_p)))
        expected = np.array([reference(row, sampling) for row in logits])
        np.testing.assert_array_equal(kept, expected > 0)
        tokens, logp = run(logits, keys(64), sampling)
        np.testing.assert_allclose(logp, np.log(expected[np.arange(64), tokens]), atol=3e-6)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_comes_before_the_filter(temperature):
    sampling = Sampling(temperature=temperature, top_p=0.8)
    expected = reference(LOGITS.astype(np.float64) / temperature, sampling)
    tokens, logp = (np.asarray(x) for x in run(np.tile(LOGITS, (N, 1)), keys(N, 1), sampling))
    np.testing.assert_allclose(logp, np.log(expected[tokens]), atol=1e-6)
    np.testing.assert_allclose(np.bincount(tokens, minlength=V) / N, expected, atol=0.016)


def test_greedy():
    logits = np.random.default_rng(0).normal(size=(5, V)).astype(np.float32)
    tokens, logp = run(logits, keys(5), Sampling(temperature=0))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_array_equal(logp, 0)
    tied = np.array([[0.0, 2.0, 1.0, 2.0]], np.float32)
    assert [int(run(tied, keys(1, s), Sampling(temperature=0))[0][0]) for s in range(5)] == [1] * 5  # the first of them


@pytest.mark.parametrize(
    ("logits", "sampling", "kept"),
    [
        ([3, 2, 2, 1], Sampling(top_k=2), [1, 1, 1, 0]),
        ([2, 2, 2, 2], Sampling(top_k=1), [1, 1, 1, 1]),
        ([2, 2, 2, 2], Sampling(top_p=0.1), [1, 1, 1, 1]),
        ([0, 1, 1, -9], Sampling(top_p=0.3), [0, 1, 1, 0]),
        ([3, 2, 1, 0], Sampling(top_p=1e-9), [1, 0, 0, 0]),
        ([3, 2, 1, 0], Sampling(top_p=0.0), [1, 0, 0, 0]),
        # top_k leaves e¹ : e⁰ = 0.73 : 0.27, of which the first is enough; of all four it would not be
        ([1, 0, -0.1, -0.1], Sampling(top_k=2, top_p=0.7), [1, 0, 0, 0]),
        ([1, 0, -0.1, -0.1], Sampling(top_p=0.7), [1, 1, 1, 1]),
    ],
)
def test_borders(logits, sampling, kept):
    logits = np.array([logits], np.float32)
    top_k, top_p = np.array([sampling.top_k]), np.array([sampling.top_p])
    np.testing.assert_array_equal(keep(jnp.asarray(logits), top_k, top_p)[0], np.array(kept, bool))
    tokens, logp = (np.asarray(x) for x in run(np.tile(logits, (50, 1)), keys(50), sampling))
    assert all(kept[t] for t in tokens)
    p = np.exp(logits[0]) * kept
    np.testing.assert_allclose(logp, np.log(p[tokens] / p.sum()), atol=1e-6)


def test_a_row_depends_on_its_own_key_alone():
    logits = np.random.default_rng(1).normal(size=(6, V)).astype(np.float32)
    draw = lambda l, k: run(l, k, Sampling(top_p=0.9))
    tokens, logp = draw(logits, keys(6))
    order = np.array([4, 0, 5, 1, 3, 2])
    again = draw(logits[order], keys(6)[order])
    np.testing.assert_array_equal(tokens[order], again[0])
    np.testing.assert_array_equal(logp[order], again[1])
    one = draw(logits[2:3], keys(6)[2:3])
    assert (int(one[0][0]), float(one[1][0])) == (int(tokens[2]), float(logp[2]))


def test_rows_of_many_kinds_at_once():
    kinds = [Sampling(), Sampling(0.0), Sampling(0.5, 3), Sampling(2.0, 0, 0.6), Sampling(1.0, 4, 0.7)]
    logits = np.random.default_rng(2).normal(size=(5, V)).astype(np.float32)
    columns = [np.array([getattr(k, f) for k in kinds], d) for f, d in FIELDS]
    position, forced = np.arange(5, dtype=np.int32), np.full(5, -1, np.int32)
    tokens, logp = compiled(logits, Draw(keys(5), *columns), position, forced, True)
    for i, kind in enumerate(kinds):
        one = run(logits[i : i + 1], keys(5)[i : i + 1], kind, position=i)
        assert int(one[0][0]) == int(tokens[i])
        np.testing.assert_allclose(one[1][0], logp[i], atol=1e-6)


def test_positions_draw_differently():
    logits, key = np.zeros((1, 1000), np.float32), keys(1)
    drawn = [int(run(logits, key, Sampling(), position=p)[0][0]) for p in range(20)]
    assert len(set(drawn)) > 15
    assert int(run(logits, key, Sampling(), position=3)[0][0]) == drawn[3]


def test_forced_tokens_have_their_log_prob():
    logits = np.tile(LOGITS, (V, 1))
    for sampling in (Sampling(), Sampling(0.7), Sampling(top_k=3), Sampling(top_k=4, top_p=0.7)):
        expected = reference(LOGITS.astype(np.float64) / sampling.temperature, sampling)
        tokens, logp = run(logits, keys(V), sampling, forced=np.arange(V, dtype=np.int32))
        np.testing.assert_array_equal(tokens, np.arange(V))
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(logp, np.log(expected), atol=1e-6)  # −inf for what a filter removes
