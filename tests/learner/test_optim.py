"""Warm-up, schedules, clipping, and moments begun anew."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.learner.optim import make_optimizer, reset_moments, schedule
from jaxrl_llm.types import Optimizer


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
