"""The kernels of TPU and GPU, interpreted on the CPU, against the attention that the CPU runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention
from jaxrl_llm.parallel import sharding

R, H, K, C = 4, 6, 2, 16
AT = np.arange(200)
SEGMENTS = np.array([AT // 80 + 1, AT // 130 + 1, AT < 150, AT < 0], np.int32)  # the last row is padding
PREFIX, S, G, T = np.array([30, 0, 40, 7]), 40, 3, 60
LAYOUTS = {"packed": partial(attention.packed, SEGMENTS), "grouped": partial(attention.grouped, PREFIX, S, G)}
REAL = {
    "packed": SEGMENTS > 0,
    "grouped": np.concatenate([np.arange(S) < PREFIX[:, None], np.ones((R, G * T), bool)], axis=1),
}


def value_and_gradients(layout, implementation):
    """Output of the real tokens, and gradients of Σ weights·output² over them."""
    real = REAL[layout][:, :, None, None]
    shape = lambda heads: (*REAL[layout].shape, heads, C)
    rng = np.random.default_rng(0)
    q, k, v, weights = (rng.normal(size=shape(h)).astype(np.float32) for h in (H, K, K, H))

    @jax.jit
    def run(q, k, v):
        attend = lambda *x: jnp.where(real, LAYOUTS[layout](implementation)(*x, None)[0], 0.0)
        out, gradients = jax.vjp(attend, q, k, v)
        return (out, *gradients(2 * weights * out))

    return [np.asarray(x) for x in run(1.5 * q, 1.5 * k, v)]


# cuDNN refuses packed rows: see test_attention.py
PAIRS = [
    (name, layout)
    for name in ("splash", "pallas", "cudnn")
    for layout in LAYOUTS
    if (name, layout) != ("cudnn", "packed")
]


@pytest.mark.parametrize(("implementation", "layout"), PAIRS)
def test_a_kernel_is_plain_attention(monkeypatch, layout, implementation):
    if implementation == "cudnn":  # what is around cuDNN, for there is none on a CPU
        plain = jax.nn.dot_product_attention
        monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, **k: plain(*x, **k | {"implementation": "xla"}))
    expected = value_and_gradients(layout, "xla")
    for i, (got, right) in enumerate(zip(value_and_gradients(layout, implementation), expected, strict=True)):
        np.testing.assert_allclose(got, right, rtol=0, atol=5e-5 if i else 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_a_mesh_splits_rows_and_heads(monkeypatch, implementation):
    expected = value_and_gradients("grouped", "xla")
    monkeypatch.setattr(attention, "DENSE", 0)
    with jax.set_mesh(sharding.make_mesh(2, 2, 2)):
        got = value_and_gradients("grouped", implementation)
    for x, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, right, rtol=0, atol=5e-5)
