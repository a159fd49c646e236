"""Warm-up, schedules, clipping, short moments, and moments begun anew."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.learner import optim
from jaxrl_llm.learner.optim import make_optimizer, reset_moments, schedule, updates_applied
from jaxrl_llm.learner.train_step import apply_gradients, first_state, train_state_shardings
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import Optimizer

KINDS = {"adamw": {}, "bfloat16": {"moments_dtype": "bfloat16"}, "adafactor": {"kind": "adafactor"}}


def rates(config, steps):
    """Learning rates of all the steps, and the one after them."""
    f = schedule(config, steps)
    return [float(f(i)) for i in range(steps + 1)]


def test_warm_up_moves_at_the_first_step_and_reaches_lr_at_its_last():
    np.testing.assert_allclose(rates(Optimizer(lr=2.0, warmup=4), 7), [0.5, 1.0, 1.5, 2, 2, 2, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(rates(Optimizer(lr=2.0, warmup=1), 3), [2, 2, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(rates(Optimizer(lr=2.0), 2), [2, 2, 2], rtol=1e-6)


def test_linear_falls_evenly_to_0():
    np.testing.assert_allclose(rates(Optimizer(lr=1.0, schedule="linear"), 4), [1, 0.75, 0.5, 0.25, 0], atol=1e-7)
    warm = rates(Optimizer(lr=1.0, schedule="linear", warmup=2), 6)
    np.testing.assert_allclose(warm, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0], atol=1e-7)


def test_cosine_falls_to_0():
    wanted = [0.5 * (1 + np.cos(np.pi * i / 8)) for i in range(9)]
    np.testing.assert_allclose(rates(Optimizer(lr=1.0, schedule="cosine"), 8), wanted, atol=1e-7)
    warm = rates(Optimizer(lr=3.0, schedule="cosine", warmup=5), 50)
    assert warm[4] == pytest.approx(3.0)
    assert warm[-1] == pytest.approx(0.0, abs=1e-7)
    assert warm[-2] > 0
    assert all(a > b for a, b in zip(warm[5:], warm[6:], strict=False))


def test_a_warm_up_longer_than_the_run_never_divides_by_0():
    found = rates(Optimizer(lr=1.0, schedule="cosine", warmup=10), 5)
    np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], rtol=1e-6)


def step(tx, grads, opt_state, params):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def test_clipping_is_by_the_norm_of_all_gradients_together():
    """Adam does not see a common scale, so the first moment is what tells."""
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([6.0, 0.0]), "b": jnp.array([8.0])}  # norm 10
    first_moment = lambda clip: jax.tree.leaves(
        optax.tree_utils.tree_get(
            (tx := make_optimizer(Optimizer(clip_norm=clip, b1=0.5), 1)).update(grads, tx.init(params), params)[1], "mu"
        )
    )
    for clip, scale in ((1.0, 0.1), (5.0, 0.5), (100.0, 1.0)):
        a, b = first_moment(clip)
        np.testing.assert_allclose(np.concatenate([a, b]), 0.5 * scale * np.array([6.0, 0.0, 8.0]), rtol=1e-6)


def test_adamw_by_hand():
    config = Optimizer(lr=0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5, clip_norm=1e9)
    tx = make_optimizer(config, 2)
    params, opt_state = jnp.array([2.0]), tx.init(jnp.array([2.0]))
    x, mu, nu = 2.0, 0.0, 0.0
    for t, g in enumerate((1.0, -3.0), 1):
        params, opt_state = step(tx, jnp.array([g]), opt_state, params)
        mu, nu = 0.8 * mu + 0.2 * g, 0.9 * nu + 0.1 * g * g
        update = (mu / (1 - 0.8**t)) / (np.sqrt(nu / (1 - 0.9**t)) + 1e-3) + 0.5 * x
        x -= 0.1 * update
        assert float(params[0]) == pytest.approx(x, rel=1e-5)


@pytest.mark.parametrize("schedule_name", ["constant", "linear"])
def test_reset_begins_the_moments_anew_and_goes_on_with_the_schedule(schedule_name):
    config = Optimizer(lr=1.0, schedule=schedule_name, warmup=2)
    tx = make_optimizer(config, 10)
    params, fresh = {"w": jnp.array([1.0, 2.0])}, tx.init({"w": jnp.array([1.0, 2.0])})
    opt_state = fresh
    for _ in range(5):
        params, opt_state = step(tx, {"w": jnp.array([0.3, -0.1])}, opt_state, params)

    reset = reset_moments(opt_state)
    assert jax.tree.structure(reset) == jax.tree.structure(opt_state)
    assert [x.dtype for x in jax.tree.leaves(reset)] == [x.dtype for x in jax.tree.leaves(opt_state)]
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
    (adam,) = [x for x in jax.tree.leaves(reset, is_leaf=is_adam) if is_adam(x)]
    assert [float(jnp.abs(x).sum()) for x in jax.tree.leaves(adam)] == [0, 0, 0]
    assert float(jnp.abs(optax.tree_utils.tree_get(opt_state, "mu")["w"]).min()) > 0  # there was something to reset
    (counter,) = [x for x in jax.tree.leaves(reset, is_leaf=is_schedule) if is_schedule(x)]
    assert int(counter.count) == 5

    # The next step is a fresh Adam's first: lr · sign(g), with lr the sixth of the schedule.
    new, _ = step(tx, {"w": jnp.array([0.3, -0.1])}, reset, params)
    moved = np.asarray(new["w"] - params["w"])
    np.testing.assert_allclose(moved, float(schedule(config, 10)(5)) * np.array([-1.0, 1.0]), rtol=1e-5)


# --- moments in bfloat16 --------------------------------------------------------------------------------------------


def test_rounding_is_right_in_the_mean_and_never_further_than_a_neighbour():
    x = np.repeat(np.array([[1 + 0.3 * 2**-7], [-3 - 0.8 * 2**-6], [1e-30], [0.0], [1.5]], np.float32), 20_000, axis=1)
    got = np.asarray(optim.rounded(jnp.asarray(x), 7), np.float64)
    assert set(got[0]) == {1, 1 + 2**-7}
    assert set(got[1]) == {-3 - 2**-6, -3}
    assert set(got[3]) == {0}  # what bfloat16 holds stays as it is
    assert set(got[4]) == {1.5}
    up = [(got[0] > 1).mean(), (got[1] < -3).mean()]
    np.testing.assert_allclose(up, [0.3, 0.8], atol=5 * 0.5 / np.sqrt(20_000))
    np.testing.assert_allclose(got[2].mean(), 1e-30, rtol=1e-3)
    ups = np.stack([np.asarray(optim.rounded(jnp.asarray(x[0]), seed)) > 1 for seed in (7, 8, 7)])
    np.testing.assert_array_equal(ups[0], ups[2])
    for a, b in ((ups[0], ups[1]), (ups[0, 1:], ups[0, :-1])):  # no step and no place decides for another
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def second_moments(b2, noise, steps):
    """ν of 256 parameters after so many steps; each gradient is .3, or normal with that deviation."""
    tx = make_optimizer(Optimizer(b2=b2, moments_dtype="bfloat16", clip_norm=1e9), steps)
    params = jnp.zeros(256)

    def step(state, key):
        gradient = 0.3 * jax.random.normal(key, params.shape) if noise else jnp.full(params.shape, 0.3)
        return tx.update(gradient, state, params)[1], None

    state, _ = jax.jit(partial(jax.lax.scan, step))(tx.init(params), jax.random.split(jax.random.key(0), steps))
    nu = optax.tree_utils.tree_get(state, "nu")
    assert nu.dtype == optax.tree_utils.tree_get(state, "mu").dtype == jnp.bfloat16
    return np.asarray(nu, np.float64)


@pytest.mark.parametrize(("b2", "steps"), [(0.95, 200), (0.999, 10_000)])
def test_the_second_moment_in_bfloat16_is_that_of_the_gradients(b2, steps):
    np.testing.assert_allclose(second_moments(b2, False, steps), 0.09, rtol=0.01)
    np.testing.assert_allclose(second_moments(b2, True, steps).mean(), 0.09, rtol=0.01)


def test_a_step_with_moments_in_bfloat16_computes_in_float32():
    """The first steps of both are the same; what differs later is what the moments were rounded by."""
    plain, short = (make_optimizer(Optimizer(lr=0.1, **KINDS[kind]), 9) for kind in ("adamw", "bfloat16"))
    params = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([0.5])}
    grads = {"w": jnp.array([0.3, -0.1, 0.01]), "b": jnp.array([0.2])}
    states = [tx.init(params) for tx in (plain, short)]
    for i in range(4):
        updates, states = zip(
            *(tx.update(grads, s, params) for tx, s in zip((plain, short), states, strict=True)), strict=True
        )
        for a, b in zip(*map(jax.tree.leaves, updates), strict=True):
            np.testing.assert_allclose(a, b, rtol=0.02 if i else 1e-6)


# --- Adafactor ------------------------------------------------------------------------------------------------------


def test_adafactor_by_hand():
    """A stack of two matrices whose squared gradients are kept by row and column, and a vector with its own."""
    rng = np.random.default_rng(0)
    shapes = {"w": (2, 130, 128), "b": (3,)}
    x = {k: rng.normal(size=s) for k, s in shapes.items()}
    config = Optimizer(lr=0.1, kind="adafactor", weight_decay=0.5, clip_norm=1e9, warmup=2)
    tx = make_optimizer(config, 9)
    params = {k: jnp.asarray(v, jnp.float32) for k, v in x.items()}
    opt_state = tx.init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(opt_state)) == 2 * (130 + 128) + 3 + 3 + 2  # 3 stand-ins, 2 counts
    rows, columns, squares = np.zeros((2, 128)), np.zeros((2, 130)), np.zeros(3)
    for t, lr in ((1, 0.05), (2, 0.1), (3, 0.1)):
        g = {k: rng.normal(size=s) * (1 + np.arange(s[-1])) for k, s in shapes.items()}
        params, opt_state = step(tx, {k: jnp.asarray(v, jnp.float32) for k, v in g.items()}, opt_state, params)
        b2 = 1 - t**-0.8
        rows = b2 * rows + (1 - b2) * (g["w"] ** 2).mean(axis=1)
        columns = b2 * columns + (1 - b2) * (g["w"] ** 2).mean(axis=2)
        squares = b2 * squares + (1 - b2) * g["b"] ** 2
        v = columns[:, :, None] * rows[:, None, :] / columns.mean(axis=1)[:, None, None]
        for k, u in (("w", g["w"] / np.sqrt(v)), ("b", g["b"] / np.sqrt(squares))):
            u = u / max(1.0, np.sqrt((u**2).mean()))
            x[k] = x[k] - lr * (u + 0.5 * x[k])
            np.testing.assert_allclose(params[k], x[k], rtol=2e-5, atol=1e-5)


def test_what_adafactor_has_averaged_lies_like_the_axes_that_are_left():
    mesh = sharding.make_mesh(1, 4, 2)
    axes = {
        "gate": (None, "fsdp", "tensor"),
        "down": (None, "tensor", "fsdp"),
        "embed": ("tensor", "fsdp"),
        "b": ("fsdp",),
    }
    shapes = {"gate": (2, 128, 256), "down": (2, 256, 128), "embed": (512, 128), "b": (8,)}
    placed = {k: NamedSharding(mesh, PartitionSpec(*spec)) for k, spec in axes.items()}
    tx = make_optimizer(Optimizer(kind="adafactor"), 5)
    shaped = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    wanted = train_state_shardings(tx, shaped, placed, mesh)
    make = lambda: first_state(tx, {k: jnp.ones(s) for k, s in shapes.items()})
    state = jax.jit(make, out_shardings=wanted)()
    update = jax.jit(partial(apply_gradients, tx), donate_argnums=0)
    after, _ = update(
        state, jax.device_put({k: np.ones(s, np.float32) for k, s in shapes.items()}, placed), 1.0, jnp.ones(1)
    )
    found = next(s for s in after.opt_state[1] if isinstance(s, optax.FactoredState))
    shards = lambda tree: {k: x.sharding.shard_shape(x.shape) for k, x in tree.items()}
    assert shards(found.v_row) == {"gate": (2, 32), "down": (2, 32), "embed": (32,), "b": (1,)}
    assert shards(found.v_col) == {"gate": (2, 128), "down": (2, 128), "embed": (256,), "b": (1,)}
    assert shards(found.v) == {"gate": (1,), "down": (1,), "embed": (1,), "b": (2,)}
    same = jax.tree.map(lambda x, s: s.is_equivalent_to(x.sharding, x.ndim), after, wanted)
    assert all(jax.tree.leaves(same)), same


# --- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_makes_the_next_step_the_first_whatever_the_optimiser(kind):
    tx = make_optimizer(Optimizer(lr=0.1, **KINDS[kind]), 9)
    params = {"w": jnp.ones((128, 130)), "b": jnp.ones(3)}
    grads = {k: jax.random.normal(jax.random.key(0), x.shape) for k, x in params.items()}
    _, opt_state = tx.update(grads, tx.init(params), params)
    for scale in (2.0, 3.0):
        _, opt_state = tx.update(jax.tree.map(lambda g, s=scale: s * g**2, grads), opt_state, params)
    reset = reset_moments(opt_state)
    assert updates_applied(opt_state) == updates_applied(reset) == 3
    assert [x.dtype for x in jax.tree.leaves(reset)] == [x.dtype for x in jax.tree.leaves(tx.init(params))]
    begun, anew, went_on = (tx.update(grads, s, params)[0] for s in (tx.init(params), reset, opt_state))
    for a, b, other in zip(*map(jax.tree.leaves, (begun, anew, went_on)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(a != other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_keeps_everything_but_the_step_s_number(kind):
    tx = make_optimizer(Optimizer(**KINDS[kind]), 9)
    state = first_state(tx, {"w": jnp.ones((128, 130)), "b": jnp.arange(3.0)})
    grads, weights = jax.tree.map(lambda x: 0.1 * x + 0.3, state.params), jnp.ones(1)
    before, _ = apply_gradients(tx, state, grads, 1.0, weights)
    after, metrics = apply_gradients(tx, before, grads | {"b": jnp.array([0, jnp.nan, 0])}, 1.0, weights)
    assert (metrics["skipped"], int(after.step), updates_applied(after.opt_state)) == (1, 2, 1)
    kept = (jax.tree.leaves((s.params, s.opt_state)) for s in (before, after))
    for a, b in zip(*kept, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
