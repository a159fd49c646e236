"""Mixture of experts against loops in float64; what routers have said against sums by hand; every mesh the same."""

import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models import attention, moe, transformer
from jaxrl_llm.models.presets import PRESETS
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding

R, N, D, F, E, K = 3, 7, 6, 4, 5, 2
CONFIG = ModelConfig(
    vocab_size=13, layers=2, width=D, heads=2, kv_heads=1, head_width=4, mlp_width=9,
    experts=E, experts_per_token=K, expert_width=F,
)  # fmt: skip


def arrays(seed=0):
    """x [R,N,D] and the parameters of one layer, of which none is 0."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(R, N, D), {"router": draw(D, E), "gate": draw(E, D, F), "up": draw(E, D, F), "down": draw(E, F, D)}


@partial(jax.jit, static_argnames="norm_topk")
def run(x, params, replay=None, norm_topk=True):
    config = replace(CONFIG, norm_topk=norm_topk)
    model = nnx.eval_shape(lambda: moe.MoE(config, partial(transformer._param, nnx.Rngs(0))))
    nnx.update(model, params)
    return model(x, replay)


def gates_in_float64(x, params, chosen, norm_topk):
    """{expert: weight} of one token."""
    logits = x @ params["router"]
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    total = sum(p[e] for e in chosen) if norm_topk else 1.0
    return {e: p[e] / total for e in chosen}


def in_float64(x, params, chosen, norm_topk):
    """The layer's output for one token whose experts are `chosen`."""
    out = np.zeros(D)
    for e, weight in gates_in_float64(x, params, chosen, norm_topk).items():
        gate = x @ params["gate"][e]
        out += weight * ((gate / (1 + np.exp(-gate)) * (x @ params["up"][e])) @ params["down"][e])
    return out


def best(x, params):
    """A token's K experts: a loop that takes the largest logit that is left."""
    logits, chosen = list(x @ params["router"]), []
    for _ in range(K):
        chosen.append(max((e for e in range(E) if e not in chosen), key=lambda e: logits[e]))
    return chosen


@pytest.mark.parametrize("norm_topk", [True, False])
def test_a_token_goes_through_its_experts(norm_topk):
    x, params = arrays()
    y, logits = run(x, params, norm_topk=norm_topk)
    wide, at = jax.tree.map(np.float64, (x, params)), np.ndindex(R, N)
    assert logits.shape == (R, N, E)
    used = set()
    for i in at:
        chosen = best(wide[0][i], wide[1])
        used |= set(chosen)
        assert set(np.asarray(moe.top_experts(logits, K)[i]).tolist()) == set(chosen)
        np.testing.assert_allclose(y[i], in_float64(wide[0][i], wide[1], chosen, norm_topk), rtol=1e-4, atol=1e-5)
    assert used == set(range(E))


def test_recorded_experts_are_taken_with_the_live_router_s_gates():
    x, params = arrays()
    replay = np.random.default_rng(1).permuted(np.tile(np.arange(E, dtype=np.uint8), (R, N, 1)), axis=-1)[..., :K]
    replay[0, 2:] = 255  # none recorded: the router chooses
    own = np.asarray(moe.top_experts(run(x, params)[1], K))
    assert (np.sort(replay) != np.sort(own)).any(-1).mean() > 0.5
    for norm_topk in (True, False):
        y, _ = run(x, params, replay, norm_topk=norm_topk)
        for i in np.ndindex(R, N):
            chosen = (own if replay[i][0] == 255 else replay)[i].tolist()
            want = in_float64(x[i].astype(np.float64), jax.tree.map(np.float64, params), chosen, norm_topk)
            np.testing.assert_allclose(y[i], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_topk", [True, False])
def test_gradients_are_those_of_all_experts_times_a_matrix_of_gates(norm_topk):
    """No sort and no ragged product: every token goes through every expert, most of which count nothing."""
    x, params = arrays()
    u = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)

    def dense(x, params):
        p = jax.nn.softmax(x @ params["router"])
        cut = jax.lax.stop_gradient(jnp.sort(p)[..., -K:][..., :1])
        p = jnp.where(p >= cut, p, 0.0)
        p = p / p.sum(-1, keepdims=True) if norm_topk else p
        hidden = jax.nn.silu(jnp.einsum("rnd,edf->rnef", x, params["gate"]))
        hidden = hidden * jnp.einsum("rnd,edf->rnef", x, params["up"])
        return jnp.sum(u * jnp.einsum("rnef,efd,rne->rnd", hidden, params["down"], p))

    got = jax.grad(lambda *a: jnp.sum(u * run(*a, norm_topk=norm_topk)[0]), argnums=(0, 1))(x, params)
    want = jax.grad(dense, argnums=(0, 1))(x, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    assert all(np.abs(g).max() > 0.1 for g in jax.tree.leaves(got))


def test_an_expert_that_no_token_has_and_one_that_all_have():
    x, params = arrays()
    params["router"] = np.abs(params["router"]) * np.array([1, 9, 0, 4, 2], np.float32)
    x = np.abs(x)  # so that the experts' order is the same for all tokens: 1, 3, the others
    params["router"][:] = np.array([0, 2, -1, 1, -2], np.float32)
    y, logits = run(x, params)
    assert set(np.asarray(moe.top_experts(logits, K)).ravel().tolist()) == {1, 3}
    for i in np.ndindex(R, N):
        want = in_float64(x[i].astype(np.float64), jax.tree.map(np.float64, params), [1, 3], True)
        np.testing.assert_allclose(y[i], want, rtol=1e-4, atol=1e-5)


def test_the_router_is_computed_in_float32():
    x, params = arrays()
    x = x.astype(jnp.bfloat16)
    y, logits = run(x, params)
    assert (y.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(logits, np.float32(x) @ params["router"], rtol=1e-5, atol=1e-5)


# --- the decoder --------------------------------------------------------------------------------------------------


def test_parameters_are_what_the_config_says():
    config = replace(CONFIG, layers=3)
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    assert config.n_params == sum(x.size for x in jax.tree.leaves(shapes))
    assert shapes["layers"]["moe"]["down"].shape == (3, E, F, D)
    assert config.n_params - config.n_active_params == 3 * (E - K) * 3 * D * F
    assert config.flops_per_token == 2 * 3 * (4 * D * 2 * (2 + 1) + D * E + K * 3 * D * F)
    dense = replace(config, experts=0)
    assert dense.n_active_params == dense.n_params
    assert dense.flops_per_token == 2 * 3 * (4 * D * 2 * (2 + 1) + 3 * D * 9)


def test_qwen3_30b_a3b():
    preset = PRESETS["qwen3-30b-a3b"]
    assert (preset.n_params, preset.n_active_params) == (30_532_122_624, 3_353_032_704)
    shapes = jax.eval_shape(partial(transformer.init, preset), jax.random.key(0))
    assert preset.n_params == sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


MESHED = replace(CONFIG, width=16, kv_heads=2, heads=4, experts=6, vocab_size=16)
ROWS = 16


def draw(path, x):
    rng = np.random.default_rng(sum(map(ord, jax.tree_util.keystr(path))))
    return (rng.normal(size=x.shape) * 0.4 + (path[-1].key == "scale")).astype(np.float32)


@cache
def on_mesh(sizes):
    """Value and gradients of a loss of hidden states and routers' logits, and the shape of a shard of the experts."""
    mesh = sharding.make_mesh(*sizes)
    shapes = jax.eval_shape(partial(transformer.init, MESHED), jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (ROWS, 5)).astype(np.int32)
    replay = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (ROWS, 5, 2, 1)), axis=-1)[..., :K]
    replay[::3] = 255  # in some rows the routers choose
    u, v = rng.normal(size=(ROWS, 5, 16)), rng.normal(size=(ROWS, 5, 2, 6))
    attend = lambda q, k, v, _: (attention.causal(q, k, v), None)

    def loss(params, tokens, replay):
        positions = jnp.broadcast_to(jnp.arange(5), tokens.shape)
        hidden, logits = nnx.merge(transformer.split(MESHED), params)(tokens, positions, attend, replay)
        return jnp.sum(u * hidden) + jnp.sum(v * jax.nn.log_softmax(logits)), logits

    with jax.set_mesh(mesh):
        placed = sharding.shardings(transformer.logical_axes(MESHED), shapes, mesh)
        params = jax.device_put(params, placed)
        tokens, replay = jax.device_put((tokens, replay), sharding.batch_sharding(mesh))
        (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens, replay)
    gate = params["layers"]["moe"]["gate"]
    return jax.device_get((value, logits, grads)), gate.sharding.shard_shape(gate.shape)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)], ids=str)
def test_a_mesh_changes_nothing(sizes):
    got, shard = on_mesh(sizes)
    want = on_mesh((1, 1, 1))[0]
    assert shard == (2, 6 // sizes[2], 16 // sizes[1], F)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
    assert all(np.abs(g).max() > 0.01 for g in jax.tree.leaves(got[2]))


# --- what routers have said ---------------------------------------------------------------------------------------


def test_the_load_balancing_loss_by_hand():
    """One layer, two experts, one for each token; three tokens, one of which is masked."""
    p = np.array([[0.75, 0.25], [0.6, 0.4], [0.1, 0.9]])
    logits, mask = np.log(p).astype(np.float32)[None, :, None], np.array([[True, True, False]])
    loads = moe.expert_loads(logits, mask, 1)
    np.testing.assert_array_equal(loads, [[2, 0]])
    np.testing.assert_allclose(moe.load_balancing(logits, mask, loads, 2), 2 * (1.0 * 0.675 + 0.0), rtol=1e-6)
    everything = np.ones_like(mask)
    loads = moe.expert_loads(logits, everything, 1)
    want = 2 * (2 / 3 * (0.75 + 0.6 + 0.1) / 3 + 1 / 3 * (0.25 + 0.4 + 0.9) / 3)
    np.testing.assert_allclose(moe.load_balancing(logits, everything, loads, 3), want, rtol=1e-6)
    even = np.zeros((1, 2, 1, 4), np.float32)
    np.testing.assert_allclose(moe.load_balancing(even, np.ones((1, 2), bool), np.full((1, 4), 1.0), 2), 2, rtol=1e-6)


def recorded(seed=0, b=3, t=4, layers=2):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(b, t, layers, E)).astype(np.float32)
    mask = np.arange(t) < np.array([4, 2, 3])[:, None]
    return logits, (logits + 0.4 * rng.normal(size=logits.shape)).astype(np.float32), mask


def test_the_load_balancing_loss_of_parts_adds_up_and_pulls_towards_even_loads():
    logits, _, mask = recorded()
    whole, n = moe.expert_loads(logits, mask, K), mask.sum()
    np.testing.assert_array_equal(whole.sum(-1), [K * n] * 2)
    value = moe.load_balancing(logits, mask, whole, n)
    parts = [moe.load_balancing(logits[i : i + 1], mask[i : i + 1], whole, n) for i in range(3)]
    np.testing.assert_allclose(sum(parts), value, rtol=1e-6)
    want = 0.0
    for layer in range(2):
        for e in range(E):
            p = [np.exp(logits[i, t, layer, e]) / np.exp(logits[i, t, layer]).sum() for i, t in np.argwhere(mask)]
            share = sum(e in np.argsort(logits[i, t, layer])[-K:] for i, t in np.argwhere(mask)) / n
            want += E * share * np.mean(p) / 2
    np.testing.assert_allclose(value, want, rtol=1e-5)
    slope = jax.grad(lambda x: moe.load_balancing(x, mask, moe.expert_loads(x, mask, K), n))(logits)
    assert np.abs(slope).max() > 0
    assert np.abs(slope[~mask]).max() == 0
    busiest = np.asarray(whole).argmax(-1)
    assert all(np.sum(np.asarray(slope)[:, :, layer, busiest[layer]]) > 0 for layer in range(2))


def test_the_router_ratio_against_a_loop():
    old, new, _ = recorded()
    experts = moe.top_experts(old, K)
    got = moe.log_router_ratio(new, experts, moe.router_logp(old, experts))
    log_softmax = lambda x: x - math.log(sum(math.exp(y) for y in x))
    for i in np.ndindex(3, 4):
        moved = []
        for layer in range(2):
            was, now = log_softmax(old[i][layer].astype(float)), log_softmax(new[i][layer].astype(float))
            moved += [abs(now[e] - was[e]) for e in sorted(range(E), key=lambda e: -was[e])[:K]]
        np.testing.assert_allclose(got[i], -sum(moved) / len(moved), rtol=1e-4)
    assert np.asarray(got).max() < -0.01
    assert not np.any(moe.log_router_ratio(old, experts, moe.router_logp(old, experts)))
    slope = jax.grad(lambda x: moe.log_router_ratio(x, experts, moe.router_logp(old, experts)).sum())(new)
    assert not np.any(slope)


def test_disagreement_is_of_sets():
    a = np.array([[[[0, 1], [2, 3]], [[4, 1], [0, 2]]]], np.uint8)
    b = np.array([[[[1, 0], [2, 4]], [[1, 3], [2, 1]]]], np.uint8)
    np.testing.assert_array_equal(moe.disagreement(a, b), [[0.5, 1.0]])
    np.testing.assert_array_equal(moe.disagreement(a, a[..., ::-1]), [[0.0, 0.0]])


def test_ids_are_kept_in_as_few_bytes_as_hold_them_and_one_that_is_none():
    assert [np.dtype(moe.id_dtype(e)).itemsize for e in (2, 255, 256, 512)] == [1, 1, 2, 2]
    logits = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    logits[:, 255] = 9
    assert np.asarray(moe.top_experts(logits, 1)).tolist() == [[255]] * 3
