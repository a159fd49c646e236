"""The decoder against float64 loops; parameter declarations; remat; dtypes. Hugging Face's: see tests/parity."""

import itertools
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models import attention, transformer
from jaxrl_llm.models.logprobs import tempered_logits
from jaxrl_llm.models.transformer import ModelConfig, RopeScaling

TINY = ModelConfig(vocab_size=13, layers=2, width=12, heads=4, kv_heads=2, head_width=6, mlp_width=20)
# Wavelengths of 2π·θ^(i/3) = 6, 29, 135 tokens (θ = 100): one kept, one between, one stretched
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
ALL_FLAGS = replace(
    TINY, layers=1, qkv_bias=True, qk_norm=True, tied_head=False, rope_theta=100.0, rope_scaling=SCALING
)
FLAGS = list(itertools.product([False, True], repeat=3))

attend = lambda q, k, v, cache: (attention.causal(q, k, v), None)


def random_params(config, seed=0):
    """Parameters of which none is 0 or 1, so that a bias or a scale that is not used shows."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        scale = path[-1].key == "scale"
        return (rng.normal(size=x.shape) * (0.2 if scale else 0.4) + scale).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(config))


def shapes_of(config):
    return jax.eval_shape(partial(transformer.init, config), jax.random.key(0))


@partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, positions=None):
    model = nnx.merge(transformer.split(config), params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    hidden, _ = model(tokens, positions, attend)
    return tempered_logits(hidden.reshape(-1, config.width), model.head_matrix(), 1.0).reshape(*tokens.shape, -1)


def some_tokens(rows, n, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, (rows, n)).astype(np.int32)


# --- declarations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("qkv_bias", "qk_norm", "tied_head"), FLAGS)
def test_parameters_are_what_the_config_says(qkv_bias, qk_norm, tied_head):
    config = replace(TINY, layers=3, qkv_bias=qkv_bias, qk_norm=qk_norm, tied_head=tied_head)
    shapes = shapes_of(config)
    assert config.n_params == sum(x.size for x in jax.tree.leaves(shapes))
    assert ("head" in shapes, "q_bias" in shapes["layers"]["attention"]) == (not tied_head, qkv_bias)
    assert ("q_norm" in shapes["layers"]["attention"]) == qk_norm

    sizes = {
        "layers": 3, "vocab": 13, "embed": 12, "heads": 4, "kv_heads": 2, "head_width": 6, "mlp": 20,
    }  # fmt: skip
    axes = transformer.logical_axes(config)
    is_axes = lambda x: isinstance(x, tuple)
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(shapes)
    jax.tree.map(
        lambda a, x: np.testing.assert_equal(tuple(sizes[n] for n in a), x.shape), axes, shapes, is_leaf=is_axes
    )


def test_layers_differ_and_the_seed_decides():
    init = jax.jit(partial(transformer.init, TINY))
    one, two, same = (init(jax.random.key(s)) for s in (0, 1, 0))
    q = one["layers"]["attention"]["q"]
    assert np.abs(q[0] - q[1]).min() > 0
    assert np.abs(q - two["layers"]["attention"]["q"]).min() > 0
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert {x.dtype for x in jax.tree.leaves(one)} == {np.dtype(np.float32)}


# --- the forward pass in float64 ----------------------------------------------------------------------------------


def frequencies(config):
    """θ^(−i/half) of each pair; Llama 3 keeps short waves, divides long ones by the factor, and blends between."""
    half = config.head_width // 2
    out = []
    for i in range(half):
        f = config.rope_theta ** (-i / half)
        if s := config.rope_scaling:
            turns = s.original_max_position * f / (2 * math.pi)  # over the original context
            if turns < s.low_freq_factor:
                f = f / s.factor
            elif turns <= s.high_freq_factor:
                kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                f = kept * f + (1 - kept) * f / s.factor
        out.append(f)
    return out


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        ALL_FLAGS,
        replace(TINY, head_width=64, rope_theta=500_000.0, rope_scaling=RopeScaling(original_max_position=8192)),
    ],
    ids=["plain", "scaled", "llama 3"],
)
def test_rope(config):
    positions = np.array([[0, 1, 2, 100], [7, 50, 1000, 3]])
    cos, sin = transformer.rope(positions, config)
    half = config.head_width // 2
    assert cos.shape == sin.shape == (2, 4, 1, half)
    for (r, n), position in np.ndenumerate(positions):
        for i, f in enumerate(frequencies(config)):
            atol = 1e-6 + 3e-7 * position * f  # a frequency is off by a few ulp, which the position multiplies
            np.testing.assert_allclose(cos[r, n, 0, i], math.cos(position * f), atol=atol)
            np.testing.assert_allclose(sin[r, n, 0, i], math.sin(position * f), atol=atol)


def test_scaling_has_all_three_kinds_of_frequency():
    ratio = np.array(frequencies(replace(ALL_FLAGS, rope_scaling=None))) / frequencies(ALL_FLAGS)
    assert ratio[0] == 1
    assert 1 < ratio[1] < 8
    np.testing.assert_allclose(ratio[2], 8)


def reference_forward(config, params, tokens, positions):
    """Logits of one row of tokens, a position and a head at a time, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    f = np.array(frequencies(config))
    half = config.head_width // 2

    def norm(x, scale):
        return x / math.sqrt(sum(a * a for a in x) / len(x) + config.norm_eps) * scale

    def rotate(x, position):
        out = np.empty_like(x)
        for i in range(half):
            c, s = math.cos(position * f[i]), math.sin(position * f[i])
            out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
        return out

    def project(a, name, head, y, position):
        z = y @ a[name][:, head] + (a[f"{name}_bias"][head] if config.qkv_bias else 0)
        if name == "v":
            return z
        return rotate(norm(z, a[f"{name}_norm"]["scale"]) if config.qk_norm else z, position)

    x = [p["embed"][t] for t in tokens]
    for l in range(config.layers):
        layer = jax.tree.map(lambda a, l=l: a[l], p["layers"])
        a, mlp = layer["attention"], layer["mlp"]
        keys, values, after = [], [], []
        for n, position in enumerate(positions):
            y = norm(x[n], layer["attention_norm"]["scale"])
            keys.append([project(a, "k", h, y, position) for h in range(config.kv_heads)])
            values.append([project(a, "v", h, y, position) for h in range(config.kv_heads)])
            out = np.zeros(config.width)
            for h in range(config.heads):
                kv = h // (config.heads // config.kv_heads)
                q = project(a, "q", h, y, position)
                score = np.exp([q @ keys[m][kv] / math.sqrt(config.head_width) for m in range(n + 1)])
                mixed = sum(w * values[m][kv] for m, w in enumerate(score / score.sum()))
                out += mixed @ a["o"][h]
            after.append(x[n] + out)
        for n, y in enumerate(after):
            z = norm(y, layer["mlp_norm"]["scale"])
            gate = z @ mlp["gate"]
            after[n] = y + (gate / (1 + np.exp(-gate)) * (z @ mlp["up"])) @ mlp["down"]
        x = after
    head = p["embed"].T if config.tied_head else p["head"]
    return np.array([norm(y, p["norm"]["scale"]) @ head for y in x])


@pytest.mark.parametrize("config", [ALL_FLAGS, TINY], ids=["all flags", "no flags, two layers"])
def test_forward_in_float64(config):
    params, tokens = random_params(config), some_tokens(2, 9)
    positions = np.stack([np.arange(9), 40 + 3 * np.arange(9)])
    got = logits_of(config, params, tokens, positions)
    for r in range(2):
        np.testing.assert_allclose(
            got[r], reference_forward(config, params, tokens[r], positions[r]), atol=3e-5, rtol=1e-5
        )


# --- remat and dtypes ---------------------------------------------------------------------------------------------


def test_remat_changes_work_but_no_number():
    params, tokens = random_params(TINY), some_tokens(2, 6)
    values, products = {}, {}
    for remat in ("none", "dots", "full"):
        config = replace(TINY, remat=remat)
        f = jax.value_and_grad(lambda p, config=config: jnp.sum(jnp.sin(logits_of(config, p, tokens))))
        values[remat] = jax.jit(f)(params)
        products[remat] = str(jax.make_jaxpr(f)(params)).count("dot_general")
    assert products["none"] < products["dots"] < products["full"]
    for remat in ("dots", "full"):
        same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        jax.tree.map(same, values[remat], values["none"])
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(values["none"][1]))


def test_bfloat16_activations_with_a_float32_head():
    params, tokens = random_params(TINY), some_tokens(2, 6)
    half = replace(TINY, dtype="bfloat16")
    exact = logits_of(TINY, params, tokens)
    logits = logits_of(half, params, tokens)
    assert logits.dtype == jnp.float32
    gap = float(np.abs(logits - exact).max())
    assert 1e-4 < gap < 0.3  # it ran in bfloat16, and came near
    # in float32 the head tells apart what bfloat16 would round to one value
    rounded = np.asarray(logits.astype(jnp.bfloat16).astype(jnp.float32))
    assert (rounded != np.asarray(logits)).mean() > 0.9

    for fp32_head, dtype in ((True, jnp.float32), (False, jnp.bfloat16)):
        model = nnx.merge(transformer.split(replace(half, fp32_head=fp32_head)), params)
        assert model.head_matrix().dtype == dtype
    hidden, _ = model(tokens, np.broadcast_to(np.arange(6), tokens.shape), attend)
    assert hidden.dtype == jnp.bfloat16
    assert tempered_logits(hidden.reshape(-1, 12), jnp.asarray(model.head_matrix()), 0.5).dtype == jnp.float32
