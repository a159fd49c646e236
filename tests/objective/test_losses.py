"""Policy losses and the KL: by hand, against float64 scalar loops, closed-form gradients, and invariances."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jaxrl_llm.objective.losses import KL_KINDS, kl, ppo_clip, reinforce
from jaxrl_llm.objective.token_weights import token_weights

B, T = 5, 7
DUAL = partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
LOSSES = [reinforce, ppo_clip, partial(ppo_clip, clip_low=0.1, clip_high=0.28), DUAL]


def batch(seed=0, spread=0.6, rows=B, columns=T):
    """Ragged rows, one of them empty, holes inside, ratios on both sides of any clip."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, columns)).astype(np.float32)
    logp = old + spread * rng.normal(size=(rows, columns)).astype(np.float32)
    adv = rng.normal(size=(rows, columns)).astype(np.float32)
    mask = np.arange(columns) < rng.integers(1, columns + 1, rows)[:, None]
    mask &= rng.random((rows, columns)) > 0.15
    mask[rows // 2] = False
    return logp, old, adv, mask


def value_and_grad(loss, logp, *rest):
    """x[B,T] and d Σx / d logp: losses act token by token, so this is each token's own derivative."""
    return loss(logp, *rest), jax.grad(lambda l: loss(l, *rest).sum())(jnp.asarray(logp))


def one_token(loss, ratio, adv, **hyper):
    logp, old = np.array([[math.log(ratio) - 1.3]], np.float32), np.array([[-1.3]], np.float32)
    x, g = value_and_grad(partial(loss, **hyper), logp, old, np.array([[adv]], np.float32), np.array([[True]]))
    return float(x[0, 0]), float(g[0, 0])


# ---- float64 scalar loops ----


def loop_policy(name, logp, old, adv, mask, low=0.2, high=0.2, dual=None):
    """Value and closed-form gradient, token by token; the surrogate written case by case, with no min or clip."""
    x, g = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[i, t]:
                continue
            a, l, d = float(adv[i, t]), float(logp[i, t]), float(logp[i, t]) - float(old[i, t])
            r = math.exp(d)
            if name == "reinforce":
                x[i, t], g[i, t] = -a * l, -a
            elif a >= 0 and r > 1 + high:
                x[i, t] = -(1 + high) * a
            elif a < 0 and r < 1 - low:
                x[i, t] = -(1 - low) * a
            elif a < 0 and dual is not None and r > dual:
                x[i, t] = -dual * a
            else:
                x[i, t], g[i, t] = -r * a, -r * a
    return x, g


def loop_kl(kind, logp, ref, mask):
    x, g = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[i, t]:
                u = float(logp[i, t]) - float(ref[i, t])
                k3 = math.exp(-u) - 1 + u
                sign = (u > 0) - (u < 0)
                table = {"k1": (u, 1), "k2": (u * u / 2, u), "k3": (k3, 1 - math.exp(-u))}
                table |= {"k1+": (u, u), "k3+": (k3, u), "abs": (abs(u), sign)}
                x[i, t], g[i, t] = table[kind]
    return x, g


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.1, 0.28, None), (0.2, 0.28, 3.0), (0, 0, 1.5)])
def test_ppo_clip_scalar_loops(seed, low, high, dual):
    data = batch(seed)
    x, g = value_and_grad(partial(ppo_clip, clip_low=low, clip_high=high, dual_clip=dual), *data)
    expected_x, expected_g = loop_policy("ppo_clip", *data, low, high, dual)
    np.testing.assert_allclose(x, expected_x, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(g, expected_g, rtol=2e-6, atol=1e-7)


def test_reinforce_scalar_loops():
    data = batch()
    x, g = value_and_grad(reinforce, *data)
    expected_x, expected_g = loop_policy("reinforce", *data)
    np.testing.assert_allclose(x, expected_x, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(g, expected_g, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_scalar_loops(kind):
    logp, ref, _, mask = batch(1)
    x, g = value_and_grad(partial(kl, kind=kind), logp, ref, mask)
    expected_x, expected_g = loop_kl(kind, logp, ref, mask)
    np.testing.assert_allclose(x, expected_x, rtol=1e-5, atol=3e-7)
    np.testing.assert_allclose(g, expected_g, rtol=1e-5, atol=3e-7)


# ---- by hand ----


@pytest.mark.parametrize(
    ("adv", "ratio", "value", "gradient"),
    [
        (1.0, 0.5, -0.5, -0.5),  # worse than before, should be better: pull
        (1.0, 1.5, -1.2, 0.0),  # already better: stop
        (-1.0, 0.5, 0.8, 0.0),  # already less likely: stop
        (-1.0, 1.5, 1.5, 1.5),  # more likely, should be less: `max` for `min` would stop here and push above
        (1.0, 1.1, -1.1, -1.1),
        (-1.0, 0.9, 0.9, 0.9),
    ],
)
def test_ppo_clip_quadrants(adv, ratio, value, gradient):
    assert one_token(ppo_clip, ratio, adv) == pytest.approx((value, gradient), rel=1e-6)


@pytest.mark.parametrize(
    ("adv", "ratio", "value", "gradient"),
    [
        (-1.0, 2.9, 2.9, 2.9),
        (-1.0, 4.0, 3.0, 0.0),  # the second bound
        (-2.0, 4.0, 6.0, 0.0),
        (-1.0, 0.5, 0.8, 0.0),  # the first still holds
        (1.0, 0.1, -0.1, -0.1),
        (1.0, 4.0, -1.28, 0.0),  # not for A > 0
    ],
)
def test_dual_clip(adv, ratio, value, gradient):
    assert one_token(DUAL, ratio, adv) == pytest.approx((value, gradient), rel=1e-6)


def test_unequal_clips_are_not_swapped():
    assert one_token(ppo_clip, 1.25, 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((-1.25, -1.25), rel=1e-6)
    assert one_token(ppo_clip, 0.85, -1.0, clip_low=0.1, clip_high=0.3) == pytest.approx((0.9, 0.0), rel=1e-6)


def test_reinforce_by_hand():
    old, mask = np.zeros((1, 3), np.float32), np.array([[True, True, False]])
    logp, adv = np.array([[-0.5, -2.0, -1.0]]), np.array([[2.0, -3.0, 1.0]])
    x, g = value_and_grad(reinforce, logp, old, adv, mask)
    np.testing.assert_array_equal(x, [[1.0, -6.0, 0.0]])
    np.testing.assert_array_equal(g, [[-2.0, 3.0, 0.0]])


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -0.5, 1.0),
        ("k2", 0.125, -0.5),
        ("k3", 0.148721, -0.648721),
        ("k1+", -0.5, -0.5),
        ("k3+", 0.148721, -0.5),
        ("abs", 0.5, -1.0),
    ],
)
def test_kl_by_hand(kind, value, gradient):
    logp, ref = np.array([[-2.0]], np.float32), np.array([[-1.5]], np.float32)
    x, g = value_and_grad(partial(kl, kind=kind), logp, ref, np.array([[True]]))
    np.testing.assert_allclose([x[0, 0], g[0, 0]], [value, gradient], atol=6e-7)


def test_kl_default_is_k3():
    logp, ref, _, mask = batch()
    np.testing.assert_array_equal(kl(logp, ref, mask), kl(logp, ref, mask, "k3"))


def toy():
    d = np.array([[0.1, -0.2, 0.6], [-0.5, 0.05, 0.3]], np.float32)
    mask = np.array([[True, True, True], [True, True, False]])
    old = np.full((2, 3), -1.0, np.float32)
    return old + d, old, np.array([[1.0] * 3, [-1.0] * 3], np.float32), mask


@pytest.mark.parametrize(
    ("norm", "hyper", "loss"),
    [("sequence", {}, -0.0578325), ("token", {}, -0.2545261), ("constant", {"max_len": 8}, -0.0795394)],
)
def test_worked_toy(norm, hyper, loss):
    logp, old, adv, mask = toy()
    x = ppo_clip(logp, old, adv, mask)
    np.testing.assert_allclose(x, [[-1.105171, -0.818731, -1.2], [0.8, 1.051271, 0]], atol=6e-7)
    np.testing.assert_allclose((token_weights(mask, norm, **hyper) * x).sum(), loss, atol=6e-8)


# ---- what the gradient is the gradient of ----


def test_ratio_is_one_only_in_value():
    """With old = live the value is −A whatever the policy, yet the gradient is the policy gradient."""
    logp, _, adv, mask = batch()
    x, g = value_and_grad(lambda l, a, m: ppo_clip(l, l, a, m), logp, adv, mask)
    np.testing.assert_array_equal(x, np.where(mask, -adv, 0))
    np.testing.assert_array_equal(g, np.where(mask, -adv, 0))


def test_old_logp_is_used():
    """A loss that compares the live policy with itself has ratio 1 for ever and never clips."""
    logp, old, adv, mask = batch()
    assert np.abs(ppo_clip(logp, old, adv, mask) + np.where(mask, adv, 0)).max() > 0.1


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_one_on_policy_step_of_ppo_is_a2c_to_the_bit(clip):
    logp, _, adv, mask = batch()
    weights = token_weights(mask, "token")
    ppo = lambda l: (weights * ppo_clip(l, logp, adv, mask, clip_low=clip, clip_high=clip)).sum()
    a2c = lambda l: (weights * reinforce(l, logp, adv, mask)).sum()
    np.testing.assert_array_equal(jax.grad(ppo)(jnp.asarray(logp)), jax.grad(a2c)(jnp.asarray(logp)))


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_only_through_logp(loss):
    logp, old, adv, mask = batch()
    g_logp, g_old, g_adv = jax.grad(lambda *a: loss(*a, mask).sum(), argnums=(0, 1, 2))(
        *map(jnp.asarray, (logp, old, adv))
    )
    assert np.any(g_logp)
    assert not np.any(g_old)
    assert not np.any(g_adv)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_no_gradient_to_the_reference(kind):
    logp, ref, _, mask = batch()
    assert not np.any(jax.grad(lambda r: kl(logp, r, mask, kind).sum())(jnp.asarray(ref)))


def test_expected_gradients_of_the_kl_estimators():
    """Summed over a whole vocabulary with the policy's probabilities, each kind is what its docstring says."""
    rng = np.random.default_rng(3)
    logits, ref = jnp.asarray(rng.normal(size=6)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=6)))
    mask = np.ones((1, 6), bool)
    p = jax.nn.softmax(logits)  # drawn from, hence constant

    def expected(kind, z):
        return (p * kl(jax.nn.log_softmax(z)[None], ref[None], mask, kind)[0]).sum()

    def policy_ref(z):
        return (jax.nn.softmax(z) * (jax.nn.log_softmax(z) - ref)).sum()

    def ref_policy(z):
        return (jnp.exp(ref) * (ref - jax.nn.log_softmax(z))).sum()

    for kind in ("k1", "k3", "k1+", "k3+"):
        np.testing.assert_allclose(expected(kind, logits), policy_ref(logits), rtol=1e-5)
    for kind, gradient in [
        ("k1", np.zeros(6)),
        ("k2", jax.grad(policy_ref)(logits)),
        ("k1+", jax.grad(policy_ref)(logits)),
        ("k3+", jax.grad(policy_ref)(logits)),
        ("k3", jax.grad(ref_policy)(logits)),
    ]:
        np.testing.assert_allclose(jax.grad(partial(expected, kind))(logits), gradient, atol=1e-6, err_msg=kind)


# ---- masks, extremes, dtypes ----


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("loss", LOSSES)
def test_garbage_under_the_mask_reaches_nothing(loss, garbage):
    logp, old, adv, mask = batch()
    clean_x, clean_g = value_and_grad(loss, logp, old, adv, mask)
    for spoiled in [(0,), (1,), (2,), (0, 1, 2)]:
        arrays = [np.where(mask, a, garbage) if i in spoiled else a for i, a in enumerate((logp, old, adv))]
        x, g = value_and_grad(loss, *arrays, mask)
        np.testing.assert_array_equal(x, clean_x)
        np.testing.assert_array_equal(g, clean_g)
    assert not np.any(np.where(mask, 0, clean_x))
    assert not np.any(np.where(mask, 0, clean_g))


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_garbage_under_the_mask_reaches_no_kl(kind, garbage):
    logp, ref, _, mask = batch()
    clean = value_and_grad(partial(kl, kind=kind), logp, ref, mask)
    for arrays in [(np.where(mask, logp, garbage), ref), (logp, np.where(mask, ref, garbage))]:
        for got, expected in zip(value_and_grad(partial(kl, kind=kind), *arrays, mask), clean, strict=True):
            np.testing.assert_array_equal(got, expected)


EXTREME = np.array([[-80.0, -30.0, -1e-3, 0.0, 1e-3, 30.0, 80.0]], np.float32)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("adv", [-2.0, 2.0])
def test_log_ratios_up_to_80_are_exact(loss, adv):
    old, mask = np.zeros_like(EXTREME), np.ones(EXTREME.shape, bool)
    data = EXTREME, old, np.full_like(EXTREME, adv), mask
    x, g = value_and_grad(loss, *data)
    name = "reinforce" if loss is reinforce else "ppo_clip"
    hyper = [
        getattr(loss, "keywords", {}).get(k, d) for k, d in [("clip_low", 0.2), ("clip_high", 0.2), ("dual_clip", None)]
    ]
    expected_x, expected_g = loop_policy(name, *data, *hyper)
    np.testing.assert_allclose(x, expected_x, rtol=1e-5)
    np.testing.assert_allclose(g, expected_g, rtol=1e-5)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_of_log_ratios_up_to_80_is_exact(kind):
    ref, mask = np.zeros_like(EXTREME), np.ones(EXTREME.shape, bool)
    x, g = value_and_grad(partial(kl, kind=kind), EXTREME, ref, mask)
    expected_x, expected_g = loop_kl(kind, EXTREME, ref, mask)
    np.testing.assert_allclose(x, expected_x, rtol=1e-3, atol=1e-9)  # k3 at u = .001 has 4 digits in float32
    np.testing.assert_allclose(g, expected_g, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("d", [-1e5, -200.0, -89.0, 89.0, 200.0, 1e5, 3e38])
@pytest.mark.parametrize("adv", [-3.0, 0.0, 3.0])
def test_finite_whatever_the_log_ratio(d, adv):
    logp, old = np.array([[d]], np.float32), np.zeros((1, 1), np.float32)
    a, mask = np.array([[adv]], np.float32), np.array([[True]])
    for loss in LOSSES[1:]:
        assert np.isfinite(value_and_grad(loss, logp, old, a, mask)).all()
    for kind in KL_KINDS:
        assert np.isfinite(value_and_grad(partial(kl, kind=kind), logp, old, mask)).all()


def test_nan_on_a_token_that_trains_is_not_hidden():
    one = np.ones((1, 1), np.float32)
    for loss in LOSSES:
        assert np.isnan(loss(np.nan * one, one, one, one > 0)).all()
        assert np.isnan(loss(one, one, np.nan * one, one > 0)).all()
    for kind in KL_KINDS:
        assert np.isnan(kl(np.nan * one, one, one > 0, kind)).all()


def test_all_masked_is_zero():
    logp, old, adv, mask = batch()
    for loss in LOSSES:
        x, g = value_and_grad(loss, logp, old, adv, np.zeros_like(mask))
        assert not np.any(x)
        assert not np.any(g)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_arithmetic_is_float32(loss, dtype):
    *arrays, mask = batch()
    cast = [a.astype(dtype) for a in arrays]
    x = loss(*cast, mask)
    assert x.dtype == jnp.float32
    np.testing.assert_array_equal(x, loss(*[jnp.asarray(a, jnp.float32) for a in cast], mask))
    assert kl(cast[0], cast[1], mask).dtype == jnp.float32


# ---- what must not change the answer ----


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_width_and_row_order(loss):
    data = batch()
    x, g = value_and_grad(loss, *data)
    wider = [np.pad(a, ((0, 0), (0, 4))) for a in data]
    for got, expected in zip(value_and_grad(loss, *wider), (x, g), strict=True):
        np.testing.assert_array_equal(got[:, :T], expected)
        assert not np.any(got[:, T:])
    order = np.random.default_rng(0).permutation(B)
    for got, expected in zip(value_and_grad(loss, *[a[order] for a in data]), (x, g), strict=True):
        np.testing.assert_array_equal(got, expected[order])


@pytest.mark.parametrize("loss", LOSSES)
def test_jit_and_vmap(loss):
    stacked = [np.stack(arrays) for arrays in zip(batch(0), batch(1), batch(2), strict=True)]
    expected = np.stack([loss(*batch(seed)) for seed in range(3)])
    np.testing.assert_allclose(jax.jit(loss)(*batch(0)), expected[0], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(loss))(*stacked), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_jit_and_vmap(kind):
    pairs = [(l, r, m) for l, r, _, m in (batch(0), batch(1))]
    expected = np.stack([kl(*pair, kind) for pair in pairs])
    stacked = [np.stack(arrays) for arrays in zip(*pairs, strict=True)]
    np.testing.assert_allclose(jax.jit(jax.vmap(partial(kl, kind=kind)))(*stacked), expected, rtol=1e-5, atol=1e-7)


finite = partial(st.floats, allow_nan=False, width=32)


@settings(deadline=None, max_examples=60)
@given(d=finite(-4, 4), adv=finite(-3, 3), low=st.sampled_from([0.0, 0.2, 1.0]), high=st.sampled_from([0.0, 0.28]))
def test_ppo_clip_properties(d, adv, low, high):
    """Never below the unclipped surrogate's loss; the gradient points as the policy gradient does or is 0."""
    one = np.ones((1, 1), np.float32)
    loss = partial(ppo_clip, clip_low=low, clip_high=high)
    x, g = value_and_grad(loss, d * one, 0 * one, adv * one, one > 0)
    unclipped = -jnp.exp(np.float32(d)) * np.float32(adv)
    assert x[0, 0] >= unclipped - 1e-6 * abs(unclipped)
    assert g[0, 0] == 0 or np.sign(g[0, 0]) == -np.sign(adv)
    dual = partial(loss, dual_clip=3.0)(d * one, 0 * one, adv * one, one > 0)
    assert dual[0, 0] <= x[0, 0]
    assert dual[0, 0] <= max(3.0, 1 + high) * abs(adv) * (1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(u=finite(-90, 90))
def test_kl_properties(u):
    """k2, k3 and abs are never negative, k1 is odd, and the straight-through kinds keep the value to the bit."""
    one = np.ones((1, 1), np.float32)
    value = {kind: float(kl(u * one, 0 * one, one > 0, kind)[0, 0]) for kind in KL_KINDS}
    assert min(value["k2"], value["k3"], value["abs"]) >= -1e-7
    assert value["k1"] == -float(kl(0 * one, u * one, one > 0, "k1")[0, 0])
    assert value["k1+"] == value["k1"]
    assert value["k3+"] == value["k3"]


# ---- wrong arguments ----


def test_wrong_hyperparameters():
    data = batch()
    for hyper in [{"clip_low": -0.1}, {"clip_low": 1.2}, {"clip_high": -0.1}, {"dual_clip": 1.0}]:
        with pytest.raises(ValueError, match=f"{next(iter(hyper))} is {next(iter(hyper.values()))}; expected"):
            ppo_clip(*data, **hyper)
    with pytest.raises(ValueError, match="kind is 'k4'; expected one of k1, k2, k3"):
        kl(data[0], data[1], data[3], "k4")


def test_shapes_are_checked():
    """A [B,1] advantage would broadcast in silence."""
    logp, old, adv, mask = batch()
    for wrong in [
        (logp, old, adv[:, :1], mask),
        (logp, old[:, :1], adv, mask),
        (logp, old, adv, mask.astype(np.int32)),
    ]:
        for loss in LOSSES:
            with pytest.raises(TypeCheckError):
                loss(*wrong)
    with pytest.raises(TypeCheckError):
        kl(logp, old[:, :1], mask)
