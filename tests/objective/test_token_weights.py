"""Token weights: by hand, against float64 scalar loops, and the traps that a scalar loss curve cannot show."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError

from jaxrl_llm.objective.token_weights import NORMS, token_weights

GROUP, MAX_LEN = 3, 11
weights = partial(token_weights, group_size=GROUP, max_len=MAX_LEN)
MASKS = arrays(bool, (6, 5))


def ragged(seed, rows=6, columns=5):
    """Rows of different lengths with holes; row 1 is empty, and so are rows 3 to 5: with groups of three, a group."""
    rng = np.random.default_rng(seed)
    mask = np.arange(columns) < rng.integers(1, columns + 1, rows)[:, None]
    mask &= rng.random((rows, columns)) > 0.2
    mask[1] = False
    mask[3:6] = False
    mask[0, 0] = True
    return mask


def loop_loss(x, mask, norm, group_size, max_len, row_valid):
    """Σ w·x by the definition of each norm, in float64 scalars."""
    rows, columns = mask.shape
    total, count = [0.0] * rows, [0] * rows
    for i in range(rows):
        for t in range(columns):
            if mask[i, t] and row_valid[i]:
                total[i] += float(x[i, t])
                count[i] += 1
    if sum(count) == 0:
        return 0.0
    groups = [range(p, p + group_size) for p in range(0, rows, group_size)]
    live = [p for p in groups if any(count[i] for i in p)]
    if norm == "token":
        return sum(total) / sum(count)
    if norm == "sequence":
        means = [total[i] / count[i] for i in range(rows) if count[i]]
        return sum(means) / len(means)
    if norm == "prompt":
        return sum(sum(total[i] for i in p) / sum(count[i] for i in p) for p in live) / len(live)
    if norm == "otm":
        return sum(total[i] / count[i] for i in range(rows) if count[i]) / len(live)
    return sum(total) / (sum(bool(v) for v in row_valid) * max_len)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(6, 5, 3), (8, 3, 2), (10, 7, 5), (4, 6, 1)])
def test_scalar_loops(norm, rows, columns, group):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        mask, x = ragged(seed, rows, columns), rng.normal(size=(rows, columns)).astype(np.float32)
        valid = rng.random(rows) > 0.25
        for row_valid in (None, valid):
            w = token_weights(mask, norm, group_size=group, max_len=13, row_valid=row_valid)
            expected = loop_loss(x, mask, norm, group, 13, np.ones(rows, bool) if row_valid is None else valid)
            np.testing.assert_allclose((w * x).sum(), expected, rtol=1e-5, atol=1e-6)


# Two groups of two rows: 3 and 1 tokens, 2 and none. x is 1, 2, 3 | 10 and 4, 6.
HAND_MASK = np.array([[1, 1, 1], [1, 0, 0], [1, 0, 1], [0, 0, 0]], bool)
HAND_X = np.array([[1, 2, 3], [10, 99, 99], [4, 99, 6], [99, 99, 99]], np.float32)


@pytest.mark.parametrize(
    ("norm", "row_weights", "loss"),
    [
        ("token", [1 / 6, 1 / 6, 1 / 6], 26 / 6),
        ("sequence", [1 / 9, 1 / 3, 1 / 6], 17 / 3),  # three rows have tokens
        ("prompt", [1 / 8, 1 / 8, 1 / 4], 4.5),  # (16/4 + 10/2)/2
        ("constant", [1 / 40, 1 / 40, 1 / 40], 0.65),  # four rows of ten tokens, the empty one included
        ("otm", [1 / 6, 1 / 2, 1 / 4], 8.5),  # (2 + 10 + 5)/2
    ],
)
def test_by_hand(norm, row_weights, loss):
    w = token_weights(HAND_MASK, norm, group_size=2, max_len=10)
    expected = np.where(HAND_MASK, np.array([*row_weights, 0])[:, None], 0)
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    np.testing.assert_allclose((w * HAND_X).sum(), loss, rtol=1e-6)


def test_constant_with_max_len_one_is_the_mean_of_token_sums():
    w = token_weights(HAND_MASK, "constant", max_len=1)
    np.testing.assert_allclose((w * HAND_X).sum(), (6 + 10 + 10 + 0) / 4, rtol=1e-6)


@pytest.mark.parametrize(("norm", "total"), [("token", 1), ("sequence", 1), ("prompt", 1), ("otm", 2)])
def test_an_emptied_row_and_an_emptied_group_do_not_count(norm, total):
    """Groups of three: rows 0 and 2 have tokens, group 1 has none."""
    assert float(weights(ragged(0), norm).sum()) == pytest.approx(total, rel=1e-6)
    first = weights(ragged(0)[:3], norm)
    np.testing.assert_allclose(weights(ragged(0), norm)[:3], first, rtol=1e-6)


def test_constant_counts_emptied_rows_but_not_padding():
    mask = np.ones((6, 5), bool)
    emptied = mask.copy()
    emptied[3:] = False
    per_token = 1 / (6 * MAX_LEN)
    np.testing.assert_allclose(weights(emptied, "constant")[:3], per_token, rtol=1e-6)
    padding = np.array([True] * 3 + [False] * 3)
    np.testing.assert_allclose(weights(emptied, "constant", row_valid=padding)[:3], 2 * per_token, rtol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_padding_rows_never_count(norm):
    """Whole groups appended to fill a mesh change nothing, even where their mask was left True."""
    mask = ragged(2)
    padded = np.concatenate([mask, np.ones((3, 5), bool)])
    w = weights(padded, norm, row_valid=np.arange(9) < 6)
    np.testing.assert_array_equal(w[:6], weights(mask, norm))
    assert not np.any(w[6:])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("row_valid", [None, np.zeros(6, bool)])
def test_nothing_left_is_zero(norm, row_valid):
    mask = np.zeros((6, 5), bool) if row_valid is None else np.ones((6, 5), bool)
    with jax.debug_nans(True), jax.debug_infs(True):
        assert np.array_equal(weights(mask, norm, row_valid=row_valid), np.zeros((6, 5)))


def test_token_is_not_the_mean_of_micro_batch_means():
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    x = np.array([[1, 1, 1, 1], [6, 0, 0, 0]], np.float32)
    assert float((token_weights(mask, "token") * x).sum()) == pytest.approx(2.0)
    halves = [float((token_weights(mask[i : i + 1], "token") * x[i : i + 1]).sum()) for i in range(2)]
    assert sum(halves) / 2 == pytest.approx(3.5)


def test_gradient_is_the_weights():
    """Any number of micro-batches: parts of one weight array add up to the gradient of the whole."""
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    for norm in NORMS:
        w = weights(ragged(0), norm)
        loss = lambda x, w: (w * x).sum()
        parts = [jax.grad(loss)(x[i : i + 2], w[i : i + 2]) for i in range(0, 6, 2)]
        np.testing.assert_array_equal(np.concatenate(parts), w)


@settings(deadline=None, max_examples=25)
@given(mask=MASKS, row_valid=arrays(bool, 6))
def test_sums(mask, row_valid):
    live = mask & row_valid[:, None]
    rows, groups = live.any(1).sum(), live.reshape(2, -1).any(1).sum()
    totals = {norm: float(weights(mask, norm, row_valid=row_valid).sum()) for norm in NORMS}
    for norm in ("token", "sequence", "prompt"):
        assert totals[norm] == pytest.approx(1.0 if rows else 0.0, rel=1e-5)
    assert totals["otm"] == pytest.approx(rows / max(groups, 1), rel=1e-5)
    assert totals["constant"] == pytest.approx(live.sum() / (max(row_valid.sum(), 1) * MAX_LEN), rel=1e-5)


@settings(deadline=None, max_examples=25)
@given(mask=MASKS, row_valid=arrays(bool, 6), rows=st.permutations(range(3)), swap=st.booleans())
def test_padding_width_and_order(mask, row_valid, rows, swap):
    inside = np.arange(6).reshape(2, 3)[:, rows]
    order = (inside[::-1] if swap else inside).ravel()
    for norm in NORMS:
        w = weights(mask, norm, row_valid=row_valid)
        wider = weights(np.pad(mask, ((0, 0), (0, 3))), norm, row_valid=row_valid)
        np.testing.assert_array_equal(wider, np.pad(w, ((0, 0), (0, 3))))
        np.testing.assert_array_equal(weights(mask[order], norm, row_valid=row_valid[order]), w[order])


@settings(deadline=None, max_examples=25)
@given(mask=MASKS, order=st.permutations(range(6)).map(np.array))
def test_any_row_order_without_groups(mask, order):
    for norm in ("token", "sequence", "constant"):
        np.testing.assert_array_equal(weights(mask[order], norm), weights(mask, norm)[order])


@settings(deadline=None, max_examples=25)
@given(mask=MASKS)
def test_relations_between_norms(mask):
    one_group = token_weights(mask, "prompt", group_size=6)
    np.testing.assert_allclose(one_group, weights(mask, "token"), rtol=1e-6)
    np.testing.assert_allclose(token_weights(mask, "prompt", group_size=1), weights(mask, "sequence"), rtol=1e-6)
    np.testing.assert_allclose(token_weights(mask, "otm", group_size=1), weights(mask, "sequence"), rtol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_jit_and_vmap(norm):
    masks, valid = np.stack([ragged(s) for s in range(3)]), np.arange(6) < 5
    expected = np.stack([weights(m, norm, row_valid=valid) for m in masks])
    function = lambda m, v: weights(m, norm, row_valid=v)
    np.testing.assert_allclose(jax.jit(function)(masks[0], valid), expected[0], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(function, in_axes=(0, None))(masks, valid), expected, rtol=1e-6)
    assert expected.dtype == np.float32


@pytest.mark.parametrize("norm", NORMS)
def test_sharding_changes_nothing_and_shards(norm):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    mask = ragged(1, rows=24)
    w = jax.jit(partial(weights, norm=norm), out_shardings=rows)(jax.device_put(mask, rows))
    assert {shard.data.shape for shard in w.addressable_shards} == {(3, 5)}
    np.testing.assert_allclose(w, weights(mask, norm), rtol=1e-6)


def test_counts_beyond_int32():
    """Tokens times rows pass 2³¹ on a large batch; as an int32 product they would wrap to a negative weight."""
    mask = np.ones((4, 2), bool)
    np.testing.assert_allclose(token_weights(mask, "constant", max_len=2**30), 2.0**-32, rtol=1e-6)


def test_wrong_arguments():
    mask = ragged(0)
    with pytest.raises(ValueError, match="norm is 'mean'; expected one of token, sequence, prompt, constant, otm"):
        token_weights(mask, "mean")
    for norm in ("prompt", "otm"):
        for size in (None, 0, -3):
            with pytest.raises(ValueError, match=f"group_size={size}: norm='{norm}' needs"):
                token_weights(mask, norm, group_size=size, max_len=3)
        with pytest.raises(ValueError, match="group_size=4: does not divide the 6 rows"):
            token_weights(mask, norm, group_size=4)
    for length in (None, 0, -1):
        with pytest.raises(ValueError, match=f"max_len={length}: norm='constant' needs"):
            token_weights(mask, "constant", group_size=3, max_len=length)
    with pytest.raises(TypeCheckError):
        token_weights(mask, "token", row_valid=np.ones(5, bool))
    with pytest.raises(TypeCheckError):
        token_weights(mask.astype(np.float32), "token")
