"""What every loss keeps to: padding, row order, masked garbage, extremes, dtypes, jit, vmap and where gradients go."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jaxtyping import TypeCheckError
from losses_reference import COUPLED, batch, chosen, log_router_ratios

from jaxrl_llm.objective import losses

B, T, MORE = 5, 4, 3


def plain(loss, **hyper):
    return lambda logp, old, adv, router, selected, mask: loss(logp, old, adv, mask, **hyper)


# Every loss as f(logp, old, adv, router, selected, mask), with clips wide enough for gradients to be left.
CASES = {
    "reinforce": plain(losses.reinforce),
    "gpg": plain(losses.gpg),
    "ppo_clip": plain(losses.ppo_clip),
    "ppo_clip dual": plain(losses.ppo_clip, clip_high=0.28, dual_clip=1.5),
    "gspo": plain(losses.gspo, clip_low=0.5, clip_high=1.0),
    "gspo_token": plain(losses.gspo_token, clip_low=0.5, clip_high=1.0),
    "luspo": plain(losses.luspo, clip_low=0.5, clip_high=1.0),
    "gmpo": plain(losses.gmpo),
    "rspo": lambda l, o, a, router, s, m: losses.rspo(l, o, a, m, log_router_ratio=router),
    "opmd": plain(losses.opmd),
    "cispo": plain(losses.cispo),
    "cispo uncapped": plain(losses.cispo, ratio_max=float("inf")),
    "cispo floor": plain(losses.cispo, ratio_max=1.5, ratio_min=0.5),
    "sapo": plain(losses.sapo),
    "dcpo": plain(losses.dcpo),
    "topr": plain(losses.topr),
    "vespo": plain(losses.vespo),
    "dppo_tv": plain(losses.dppo_tv, clip_low=0.1, clip_high=0.3),
    "dppo_kl": plain(losses.dppo_kl),
    "clip_cov": lambda l, o, a, r, selected, m: losses.clip_cov(l, o, a, m, selected=selected),
    "kl_cov": lambda l, o, a, r, selected, m: losses.kl_cov(l, o, a, m, selected=selected),
    "value_loss": plain(losses.value_loss),
    "value_loss unclipped": plain(losses.value_loss, clip=None),
}
CASES |= {f"kl {kind}": lambda l, o, a, r, s, m, kind=kind: losses.kl(l, o, m, kind) for kind in losses.KL_KINDS}
CASES["kl unbiased"] = lambda l, o, a, router, s, m: losses.kl(l, router, m, old_logp=o)
NAMES = list(CASES)
NO_ADVANTAGE = [name for name in NAMES if name.startswith(("kl ", "value_loss"))]
AFFINE = ("opmd", "kl_cov")  # a term without the advantage comes on top


def with_grads(name, logp, old, adv, router, selected, mask, u):
    """x and the gradients of Σ u·x in logp, old_logp, adv and log_router_ratio."""
    x, pull = jax.vjp(lambda l, o, a, r: CASES[name](l, o, a, r, selected, mask), logp, old, adv, router)
    return x, *pull(u)


@cache
def compiled(name):
    return jax.jit(partial(with_grads, name))


def run(name, data):
    return [np.asarray(a) for a in compiled(name)(*data)]


def close(name, got, expected, rtol=1e-5):
    """x and the gradient in logp; the scale is that of the largest entry, for sums over a response may cancel."""
    for a, b in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6 * (1 + np.abs(b).max()), err_msg=name)


def number(low, high, *special):
    return st.one_of(st.floats(low, high, width=32), st.sampled_from([np.float32(v) for v in (low, high, *special)]))


def field(elements, dtype=np.float32):
    return arrays(dtype, (B, T), elements=elements, fill=st.nothing())  # each entry drawn: not mostly one number


@st.composite
def batches(draw):
    """(logp, old, adv, router, selected, mask, u): any mask; log ratios on both sides of, and on, the clips."""
    old = draw(field(number(-4, 0)))
    d = draw(field(number(-2, 2, 0.0, 0.2, -0.2, 0.4, -0.4)))
    adv = draw(field(number(-3, 3, 0.0)))
    router = draw(field(number(-1, 0)))
    selected, mask = draw(field(st.booleans(), bool)), draw(field(st.booleans(), bool))
    return old + d, old, adv, router, selected, mask, draw(field(number(-2, 2, 1.0)))


def sample(seed=0, rows=B, columns=T):
    logp, old, adv, mask = batch(seed, rows=rows, columns=columns)
    u = np.random.default_rng(seed).normal(size=mask.shape).astype(np.float32)
    return logp, old, adv, log_router_ratios(mask, seed), chosen(mask, seed), mask, u


check = settings(deadline=None, max_examples=30)


# ---- what must not change the answer ----


@check
@given(data=batches())
def test_zero_and_without_gradient_under_the_mask(data):
    mask = data[5]
    for name in NAMES:
        for got in run(name, data)[:2]:
            assert np.isfinite(got).all(), name
            assert not got[~mask].any(), name


@check
@given(data=batches())
def test_padding_width(data):
    wider = [np.pad(a, ((0, 0), (0, MORE))) for a in data]
    for name in NAMES:
        x, g, *_ = run(name, wider)
        close(name, (x[:, :T], g[:, :T]), run(name, data))
        assert not x[:, T:].any(), name
        assert not g[:, T:].any(), name


@check
@given(
    data=batches(),
    places=st.lists(st.integers(0, T), min_size=MORE, max_size=MORE),
    garbage=st.sampled_from([np.nan, np.inf, -np.inf, -3e38, 7.0]),
)
def test_masked_tokens_in_between(data, places, garbage):
    """A token that does not train, wherever it stands and whatever is on it, is as good as none."""
    *floats, selected, mask, u = data
    holed = [np.insert(a, places, np.float32(garbage), axis=1) for a in floats]
    holed += [np.insert(selected, places, True, axis=1), np.insert(mask, places, False, axis=1)]
    holed += [np.insert(u, places, 1, axis=1)]
    old_places = np.insert(np.ones(T, bool), places, False)
    for name in NAMES:
        x, g, *_ = run(name, holed)
        close(name, (x[:, old_places], g[:, old_places]), run(name, data))
        assert not x[:, ~old_places].any(), name
        assert not g[:, ~old_places].any(), name


@check
@given(data=batches(), spoiled=st.sets(st.integers(0, 3)), garbage=st.sampled_from([np.nan, np.inf, -np.inf, -3e38]))
def test_garbage_under_the_mask(data, spoiled, garbage):
    """To the bit, in whichever of logp, old_logp, advantage and router ratio it lies; `selected` is turned round."""
    mask = data[5]
    dirty = [np.where(mask, a, np.float32(garbage)) if i in spoiled else a for i, a in enumerate(data[:4])]
    dirty += [np.where(mask, data[4], ~data[4]), *data[5:]]
    for name in NAMES:
        for got, expected in zip(run(name, dirty), run(name, data), strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=name)


@check
@given(data=batches(), order=st.permutations(range(B)))
def test_row_order(data, order):
    for name in NAMES:
        x, g, *_ = run(name, data)
        close(name, run(name, [a[list(order)] for a in data]), (x[list(order)], g[list(order)]), rtol=1e-6)


@check
@given(data=batches(), others=batches(), kept=st.integers(0, B - 1))
def test_a_row_does_not_know_the_others(data, others, kept):
    """Hence any cut of the batch into micro-batches gives the same x."""
    mixed = [np.where(np.arange(B)[:, None] == kept, a, b) for a, b in zip(data, others, strict=True)]
    for name in NAMES:
        x, g, *_ = run(name, data)
        x_mixed, g_mixed, *_ = run(name, mixed)
        close(name, (x_mixed[kept], g_mixed[kept]), (x[kept], g[kept]), rtol=1e-6)


@check
@given(data=batches(), token=st.tuples(st.integers(0, B - 1), st.integers(0, T - 1)))
def test_tokens_are_coupled_within_a_response_only_where_they_should_be(data, token):
    """The gradient of one token's x reaches that token alone, except where the response has a single value."""
    u = np.zeros((B, T), np.float32)
    u[token] = 1
    for name in NAMES:
        reached = run(name, (*data[:-1], u))[1] != 0
        reached[token] = False
        if name in COUPLED:
            reached[token[0]] = False
        assert not reached.any(), name


# ---- advantages and gradients ----


@check
@given(data=batches(), scale=st.floats(0.0625, 64, width=32))
def test_linear_in_the_advantages(data, scale):
    """x(s·A) = s·x(A) for s > 0. Where a term without A is added (OPMD's square, KL-Cov's penalty), x − x(A = 0)."""
    logp, old, adv, *rest = data
    scale = np.float32(scale)
    for name in NAMES:
        if name in NO_ADVANTAGE:
            continue
        x, g, *_ = run(name, data)
        scaled = run(name, (logp, old, scale * adv, *rest))
        if name in AFFINE:
            x0, g0, *_ = run(name, (logp, old, 0 * adv, *rest))
            x, g = x + (x0 / scale - x0), g + (g0 / scale - g0)
        close(name, scaled, (scale * x, scale * g))


@check
@given(data=batches())
def test_gradient_through_logp_alone(data):
    for name in NAMES:
        for other in run(name, data)[2:]:
            assert not other.any(), name


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_gradient(name):
    """Without which the two tests above would hold of a constant."""
    assert np.any(run(name, sample())[1])


@pytest.mark.parametrize("adv", [2.0, -2.0])
@pytest.mark.parametrize(
    ("d", "loss"),
    [
        (0.0, plain(losses.ppo_clip, clip_low=0, clip_high=0)),
        (0.0, plain(losses.gspo, clip_low=0, clip_high=0)),
        (0.0, plain(losses.gspo_token, clip_low=0, clip_high=0)),
        (0.0, plain(losses.luspo, clip_low=0, clip_high=0)),
        (0.0, plain(losses.dppo_tv, clip_low=0, clip_high=0)),
        (0.0, plain(losses.dppo_kl, clip_low=0, clip_high=0)),
        (0.0, plain(losses.dcpo, eps_low=0, eps_high=0)),
        (0.0, lambda l, o, a, r, s, m: losses.clip_cov(l, o, a, m, selected=s, clip_low=0, clip_high=0)),
        (0.5, plain(losses.gmpo, clip=0.5)),
        (0.5, lambda l, o, a, r, s, m: losses.rspo(l, o, a, m, log_router_ratio=r, clip=0.5)),
    ],
)
def test_at_the_clips_bound_the_unclipped_gradient(d, loss, adv):
    """Neither half of it nor none: a first on-policy step with a clip of 0 is a whole policy gradient."""
    one = np.ones((1, 1), np.float32)
    d = np.float32(d * np.sign(adv)) * one
    g = jax.grad(lambda l: loss(l, -one, adv * one, 0 * one, one < 0, one > 0).sum())(jnp.asarray(d - one))
    np.testing.assert_allclose(g, -np.exp(d) * adv, rtol=1e-6)


# ---- extremes ----


@settings(deadline=None, max_examples=40)
@given(
    d=field(number(-80, 80, 80, -80, 88.8, 500, -500, 1e5, -1e5, 0)),
    base=st.sampled_from([0.0, -1.0, -500.0]),
    adv=field(number(-3, 3, 0.0, 1e3, -1e3)),
    data=batches(),
)
def test_finite_whatever_the_log_ratio(d, base, adv, data):
    old = np.full((B, T), base, np.float32)
    for pair in [(old + d, old), (old, old + d)]:
        for name in NAMES:
            if name == "kl unbiased":
                continue  # the product of two ratios, each as large as a float32 holds
            x, *grads = run(name, (*pair, adv, *data[3:]))
            # Without a cap CISPO's value is r·A·logp, here beyond float32; only its gradient r·A is within.
            for got in grads if name == "cispo uncapped" else (x, *grads):
                assert np.isfinite(got).all(), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adv", [-1.0, 0.0, 1.0])
def test_a_token_that_has_become_certain_or_impossible(name, adv):
    """logp 0 against −500 and the reverse, alone and next to ordinary tokens, in responses of either sign."""
    logp = np.array([[0, -1, -2, -1], [-500, -1, -2, -1], [0, 0, 0, 0], [-500] * 4, [-1] * 4], np.float32)
    old = np.array([[-500, -1, -1, -3], [0, -1, -1, -3], [-500] * 4, [0, 0, 0, 0], [-1] * 4], np.float32)
    _, _, _, router, selected, _, u = sample()
    for got in run(name, (logp, old, np.full((B, T), adv, np.float32), router, selected, np.ones((B, T), bool), u)):
        assert np.isfinite(got).all()


@pytest.mark.parametrize("name", NAMES)
def test_nan_on_a_token_that_trains_is_not_hidden(name):
    for spoiled in (0, 2):
        data = [a.copy() for a in sample()]
        data[4][:], data[5][:] = False, True
        data[spoiled][1, 2] = np.nan
        if spoiled == 2 and name.startswith("kl "):
            continue  # no advantage
        x = run(name, data)[0]
        assert np.isnan(x[1, 2])
        assert not np.isnan(np.delete(x, 1, axis=0)).any()


# ---- dtypes, jit, vmap, shapes ----


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_arithmetic_is_float32(name, dtype):
    *floats, selected, mask, _ = sample()
    cast = [a.astype(dtype) for a in floats]
    x = CASES[name](*cast, selected, mask)
    assert x.dtype == jnp.float32
    np.testing.assert_array_equal(x, CASES[name](*[jnp.asarray(a, jnp.float32) for a in cast], selected, mask))


@pytest.mark.parametrize("name", NAMES)
def test_jit_and_vmap(name):
    eager = [with_grads(name, *map(jnp.asarray, sample(seed))) for seed in range(3)]
    stacked = [np.stack(a) for a in zip(*(sample(seed) for seed in range(3)), strict=True)]
    mapped = jax.jit(jax.vmap(partial(with_grads, name)))(*stacked)
    for seed in range(3):
        close(name, run(name, sample(seed)), eager[seed], rtol=3e-6)
        close(name, [a[seed] for a in mapped], eager[seed], rtol=3e-6)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_checked(name):
    """A [B,1] advantage or a [T] mask would broadcast in silence."""
    *arguments, _ = sample()
    used = {"rspo": (0, 1, 2, 3, 5), "kl unbiased": (0, 1, 3, 5)} | dict.fromkeys(
        ("clip_cov", "kl_cov"), (0, 1, 2, 4, 5)
    )
    used = used.get(name, (0, 1, 2, 5))
    for i in [i for i in used if not (i == 2 and name.startswith("kl "))]:
        wrong = [a[:, :1] if j == i else a for j, a in enumerate(arguments)]
        with pytest.raises(TypeCheckError):
            CASES[name](*wrong)
    with pytest.raises(TypeCheckError):
        CASES[name](*arguments[:-1], arguments[-1].astype(np.float32))
