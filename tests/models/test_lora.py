"""LoRA: what its adapters compute is what the merged model computes, and B = 0 is the base bit for bit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models import attention, lora, transformer
from jaxrl_llm.models.quantize import dequantized
from jaxrl_llm.models.transformer import LoRA, ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import weights

BASE = ModelConfig(13, 2, 12, 4, 2, 6, 20, qkv_bias=True, qk_norm=True, remat="none")
MODEL = replace(BASE, lora=LoRA(rank=3, alpha=7.5))
MOE = replace(BASE, experts=3, experts_per_token=2, expert_width=8, lora=LoRA(2, 4.0, ("q", "o")))
IN_AXES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
ROOM = {name: "mlp" if name in ("gate", "up", "down") else "attention" for name in IN_AXES}

attend = lambda q, k, v, cache: (attention.causal(q, k, v), None)


def shapes_of(config):
    return jax.eval_shape(partial(transformer.init, config), jax.random.key(0))


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), jnp.float32), shapes_of(config))


TOKENS = np.random.default_rng(0).integers(0, 13, (2, 5)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(5), (2, 5)).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def hidden_of(config, params):
    return nnx.merge(transformer.split(config), params)(TOKENS, POSITIONS, attend)[0]


def by_hand(config, params):
    """W + (α/r)·A·B, layer by layer in float64 with the axes flattened."""
    r, scale = config.lora.rank, config.lora.alpha / config.lora.rank
    out = jax.tree.map(np.asarray, params)
    for name in config.lora.targets:
        room = out["layers"][ROOM[name]]
        w, a, b = (room.pop(n).astype(np.float64) for n in (name, f"{name}_a", f"{name}_b"))
        layers = range(config.layers)
        room[name] = np.stack(
            [w[i] + scale * (a[i].reshape(-1, r) @ b[i].reshape(r, -1)).reshape(w[i].shape) for i in layers]
        )
    return out


def leaves(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


# --- the tree -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MODEL, MOE], ids=["dense", "experts"])
def test_the_tree_is_the_base_s_with_the_adapters_beside(config):
    drawn, base = (transformer.init(c, jax.random.key(3)) for c in (config, lora.without(config)))
    adapters = lora.trained(config, drawn)
    whole, frozen, own = map(leaves, (drawn, base, adapters))
    assert len(frozen) + len(own) == len(whole)
    for path, x in frozen.items():
        np.testing.assert_array_equal(x, whole[path])  # the keys of the base's parameters are as without LoRA
    r, sizes = config.lora.rank, leaves(base)
    for name in config.lora.targets:
        shape, n = sizes[f"['layers']['{ROOM[name]}']['{name}']"].shape, IN_AXES[name]
        a, b = (own.pop(f"['layers']['{ROOM[name]}']['{name}_{x}']") for x in "ab")
        assert a.shape == (2, *shape[1 : 1 + n], r)
        assert b.shape == (2, r, *shape[1 + n :])
        assert not b.any()
        fan_in = np.prod(shape[1 : 1 + n])
        assert 0.6 < np.std(a) * np.sqrt(fan_in) < 1.4
        assert (a[0] != a[1]).all()
    assert not own
    assert config.n_params == lora.without(config).n_params == sum(x.size for x in frozen.values())
    again = lora.joined(base, adapters)
    assert jax.tree.structure(again) == jax.tree.structure(drawn)


def test_taking_apart_and_joining_work_on_any_leaves():
    axes = transformer.logical_axes(MODEL)
    own = lora.trained(MODEL, axes)
    assert set(own) == {"layers"}
    assert set(own["layers"]) == {"attention", "mlp"}
    assert own["layers"]["attention"]["o_a"] == ("layers", "heads", "head_width", "rank")
    assert own["layers"]["attention"]["o_b"] == ("layers", "rank", "embed")
    assert own["layers"]["mlp"]["down_a"] == ("layers", "mlp", "rank")
    assert set(lora.trained(MOE, transformer.logical_axes(MOE))["layers"]) == {"attention"}
    assert lora.trained(BASE, axes) is axes
    assert lora.joined(None, own) is own
    first, second = {"x": 1, "y": {"a": 2, "b": 3}}, {"y": {"b": 4, "c": 5}}
    assert lora.joined(first, second) == {"x": 1, "y": {"a": 2, "b": 4, "c": 5}}
    assert first == {"x": 1, "y": {"a": 2, "b": 3}}


# --- what it computes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MODEL, MOE], ids=["dense", "experts"])
def test_adapters_compute_what_the_merged_model_does(config):
    params = random_params(config)
    want = by_hand(config, params)
    got = lora.merged(config, params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)
    hidden = hidden_of(config, params)
    np.testing.assert_allclose(hidden, hidden_of(lora.without(config), got), rtol=1e-5, atol=1e-5)
    base = {k: v for k, v in leaves(params).items() if k in leaves(want)}
    apart = hidden_of(
        lora.without(config), jax.tree.unflatten(jax.tree.structure(want), [base[k] for k in leaves(want)])
    )
    assert np.abs(hidden - apart).mean() > 0.1


def test_b_0_is_the_base_bit_for_bit():
    base = random_params(BASE)
    fresh = lora.trained(MODEL, transformer.init(MODEL, jax.random.key(0)))
    np.testing.assert_array_equal(hidden_of(MODEL, lora.joined(base, fresh)), hidden_of(BASE, base))


def test_gradients_are_those_through_the_merged_matrix():
    """dA = s·dW·Bᵀ and dB = s·Aᵀ·dW, where dW is the merged model's."""
    params, scale, r = random_params(MODEL), 7.5 / 3, 3
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 12)), jnp.float32)
    of = lambda config: jax.jit(jax.grad(lambda p: jnp.sum(weight * hidden_of(config, p))))
    got, of_merged = of(MODEL)(params)["layers"], of(BASE)(lora.merged(MODEL, params))["layers"]
    for name, n in IN_AXES.items():
        room, held = ROOM[name], params["layers"][ROOM[name]]
        for i in range(2):
            dw = np.asarray(of_merged[room][name][i])
            dw = dw.reshape(np.prod(dw.shape[:n]), -1)
            a, b = held[f"{name}_a"][i].reshape(-1, r), held[f"{name}_b"][i].reshape(r, -1)
            da, db = (got[room][f"{name}_{x}"][i] for x in "ab")
            close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4, err_msg=name)
            close(da.reshape(-1, r), scale * dw @ b.T)
            close(db.reshape(r, -1), scale * a.T @ dw)


def test_a_frozen_base_loses_nothing_in_the_dtype_it_is_computed_in():
    config = replace(MOE, dtype="bfloat16", fp32_head=False)
    params = random_params(config)
    base = lora.frozen(config, params)
    kinds = {path.split("'")[-2]: x.dtype.name for path, x in leaves(base).items()}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {"scale", "router"}
    np.testing.assert_array_equal(hidden_of(config, base), hidden_of(config, params))
    kept = lora.frozen(replace(config, fp32_head=True), params)
    assert kept["embed"].dtype == jnp.float32


# --- what the sampler gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "quantized"), [(None, ""), ((1, 2, 2), ""), (None, "int8")])
def test_a_push_is_the_merged_model(mesh, quantized):
    mesh, params = mesh and sharding.make_mesh(*mesh), random_params(MODEL)
    given = {"mesh": mesh, "quantized": quantized}
    got = weights.push(MODEL, params, **given).params
    want = weights.push(BASE, lora.merged(MODEL, params), **given).params
    assert jax.tree.structure(got) == jax.tree.structure(want)
    same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, dequantized(got, "float32"), dequantized(want, "float32"))
    plain = random_params(BASE)  # a base policy, before there are adapters
    jax.tree.map(same, *(weights.push(c, plain, None).params for c in (MODEL, BASE)))
