"""The mesh and the number of micro-batches change where the numbers are, never what they are."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow

from jaxrl_llm.data import tokenizers
from jaxrl_llm.learner.batching import make_batch, placed, with_advantages, with_weights
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.learner.train_step import init_state, make_gradients, make_train_step, state_shardings
from jaxrl_llm.models import attention, transformer
from jaxrl_llm.objective import advantages, losses
from jaxrl_llm.objective.algorithms import Algorithm
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import groups, weights
from jaxrl_llm.sampler.decode import LocalEngine, push_weights
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import EOS, LENGTH, Prompt, Rollouts

MODEL = transformer.ModelConfig(
    vocab_size=16, layers=2, width=16, heads=4, kv_heads=2, head_width=8, mlp_width=32, qkv_bias=True, tied_head=False
)
MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)]
MICRO_BATCHES = [1, 2, 4]
PROMPTS, GROUP, PREFIX, LENGTH_MAX = 32, 3, 5, 7
ALGORITHM = Algorithm(
    advantages.grpo,
    partial(losses.ppo_clip, clip_low=0.1, clip_high=0.15),
    "prompt",
    kl="k3",
    kl_coef=0.1,
    entropy_coef=0.01,
    updates_per_batch=2,
)


def ragged(rng):
    """Prompts and answers of many lengths."""
    rows = PROMPTS * GROUP
    lengths = rng.integers(1, LENGTH_MAX + 1, rows).astype(np.int32)
    return Rollouts(
        prompts=tuple(Prompt(i, "") for i in range(PROMPTS)),
        prompt_tokens=rng.integers(0, MODEL.vocab_size, (PROMPTS, PREFIX + 1)).astype(np.int32),
        prompt_lengths=rng.integers(1, PREFIX + 2, PROMPTS).astype(np.int32),
        tokens=rng.integers(0, MODEL.vocab_size, (rows, LENGTH_MAX)).astype(np.int32),
        sampler_logp=-rng.exponential(size=(rows, LENGTH_MAX)).astype(np.float32),
        lengths=lengths,
        finish=np.where(lengths == LENGTH_MAX, LENGTH, EOS),
        texts=("",) * rows,
        draws=np.arange(PROMPTS),
    )


def made_batch(mesh, layout="grouped", micro_batches=1, model=MODEL, norm=ALGORITHM.norm, row_tokens=64):
    """Ragged answers, old and reference log-probs that are not the policy's, on the mesh."""
    rng = np.random.default_rng(0)
    rollouts, rows = ragged(rng), PROMPTS * GROUP
    multiple = attention.multiple(model.attention)
    cut = Division(1, micro_batches, mesh.shape["data"] * mesh.shape["fsdp"], layout, row_tokens, multiple)
    batch, _ = make_batch(rollouts, model, cut, mesh=mesh)
    filled_up = lambda x: placed(np.pad(x.astype(np.float32), ((0, len(batch.mask) - rows), (0, 0))), mesh)
    length = batch.mask.shape[1]
    filled_out = lambda x: filled_up(np.pad(x, ((0, 0), (0, length - 16))))
    batch = with_advantages(batch, filled_out(np.repeat(rng.normal(size=rows), 16).reshape(rows, 16)))
    old, ref = (filled_out(-2.5 + 0.3 * rng.normal(size=(rows, 16))) for _ in range(2))
    return with_weights(replace(batch, old_logp=old, ref_logp=ref), norm, LENGTH_MAX)


@cache
def host_state():
    """The same parameters for every mesh, made once."""
    return jax.device_get(transformer.init(MODEL, jax.random.key(0)))


@cache  # a compilation each
def compute(mesh_shape, micro_batches, layout="grouped"):
    """Gradients, loss, metrics and the parameters after one SGD step, on a mesh; and the shapes of the shards."""
    mesh = sharding.make_mesh(*mesh_shape)
    like = state_shardings(MODEL, optax.identity(), mesh).params
    gradients = make_gradients(MODEL, ALGORITHM, 1.0, chunk=11)

    @partial(jax.jit, out_shardings=(like, None, None, like))
    def run(params, batch):
        grads, loss, metrics = gradients(params, batch)
        return grads, loss, metrics, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    with jax.set_mesh(mesh):
        params, batch = jax.device_put(host_state(), like), made_batch(mesh, layout, micro_batches)
        out = run(params, batch)
    arrays = (params, batch.mask, batch.rows.inputs.tokens, out[0])
    return jax.device_get(out), [jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), tree) for tree in arrays]


@pytest.fixture(scope="module")
def reference():
    return compute((1, 1, 1), 1)[0]


QUICK = [(2, (2, 2, 2), "packed"), (1, (1, 8, 1), "packed"), (4, (8, 1, 1), "grouped")]
LAYOUTS = product(MICRO_BATCHES, MESHES, ("grouped", "packed"))


@pytest.mark.parametrize(
    ("micro_batches", "mesh_shape", "layout"), [case if case in QUICK else slow(*case) for case in LAYOUTS], ids=str
)
def test_same_gradient_loss_and_parameters(reference, mesh_shape, micro_batches, layout):
    grads, loss, metrics, stepped = compute(mesh_shape, micro_batches, layout)[0]
    want_grads, want_loss, want_metrics, want_stepped = reference
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        bound = 1e-5 * np.abs(want).max()
        assert np.abs(want).max() > 0, f"{jax.tree_util.keystr(path)} has no gradient"
        assert np.abs(got - want).max() <= bound, jax.tree_util.keystr(path)
    for got, want in zip(jax.tree.leaves(stepped), jax.tree.leaves(want_stepped), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == want_metrics.keys()
    for name, want in want_metrics.items():
        np.testing.assert_allclose(metrics[name], want, rtol=2e-5, atol=1e-6, err_msg=name)


def test_shards_have_the_expected_shapes():
    _, (params, mask, tokens, grads) = compute((2, 2, 2), 1)
    assert mask == (PROMPTS * GROUP // 4, 16)
    assert tokens == (1, 1, PROMPTS // 4, 16 + GROUP * 16)
    assert params["embed"] == (16 // 2, 16 // 2)  # vocabulary over tensor, embed over fsdp
    assert params["head"] == (16 // 2, 16 // 2)
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    assert attention["q"] == (2, 16 // 2, 4 // 2, 8)
    assert attention["k"] == attention["v"] == (2, 16 // 2, 2 // 2, 8)
    assert attention["o"] == (2, 4 // 2, 8, 16 // 2)
    assert attention["q_bias"] == (2, 4 // 2, 8)
    assert mlp["gate"] == mlp["up"] == (2, 16 // 2, 32 // 2)
    assert mlp["down"] == (2, 32 // 2, 16 // 2)
    assert params["norm"]["scale"] == (16 // 2,)
    assert grads == params


def test_the_train_step_keeps_shardings_and_counts_steps():
    mesh = sharding.make_mesh(1, 4, 2)
    tx = optax.adamw(1e-3)
    with jax.set_mesh(mesh):
        state = init_state(MODEL, tx, 0, mesh)
        before = jax.tree.map(lambda x: x.sharding, state)
        step = make_train_step(MODEL, ALGORITHM, tx, 1.0)
        batch = made_batch(mesh, micro_batches=2)
        old = jax.device_get(state.params)
        state, metrics = step(state, batch)
    assert int(state.step) == 1
    assert float(metrics["skipped"]) == 0
    assert all(
        np.any(a != b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(jax.device_get(state.params)), strict=True)
    )
    same = jax.tree.map(lambda x, s: s.is_equivalent_to(x.sharding, x.ndim), state, before)
    assert all(jax.tree.leaves(same)), same
    mu = state.opt_state[0].mu["layers"]["mlp"]["gate"]
    assert mu.sharding.shard_shape(mu.shape) == (2, 16 // 4, 32 // 2)


def test_nan_never_reaches_the_weights():
    mesh = sharding.make_mesh(1, 1, 1)
    tx = optax.adamw(1e-3)
    with jax.set_mesh(mesh):
        state = init_state(MODEL, tx, 0, mesh)
        batch = made_batch(mesh)
        poisoned = with_advantages(batch, jnp.full(batch.mask.shape, jnp.nan))
        old = jax.device_get(state)
        state, metrics = make_train_step(MODEL, ALGORITHM, tx)(state, poisoned)
    assert float(metrics["skipped"]) == 1
    for was, now in zip(jax.tree.leaves(old.params), jax.tree.leaves(jax.device_get(state.params)), strict=True):
        np.testing.assert_array_equal(was, now)
    assert int(state.opt_state[0].count) == 0


def test_sizes_that_do_not_divide_are_named():
    mesh = sharding.make_mesh(1, 1, 8)
    with pytest.raises(ValueError, match=r"tensor = 8 does not divide axis kv_heads = 2 of .*'k'"):
        state_shardings(MODEL, optax.sgd(0.1), mesh)


def test_a_mesh_axis_used_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        sharding.spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="'width' has no rule"):
        sharding.spec(("width",))


def test_too_few_devices():
    with pytest.raises(ValueError, match="4×4×1 needs 16 devices, 8 are visible"):
        sharding.make_mesh(4, 4, 1)


def answers_on(mesh_shape):
    """Answers to six prompts, eight at a time, sampled with weights that were pushed on a mesh."""
    prompts = tuple(Prompt(i, "abcdefgh"[: i + 1]) for i in range(6))
    mesh = sharding.make_mesh(*mesh_shape)
    with jax.set_mesh(mesh):
        params = init_state(MODEL, optax.sgd(0.1), 0, mesh).params
        tokenizer, first = tokenizers.characters("abcdefghijklmn"), weights.push(MODEL, params, mesh)
        engine = push_weights(LocalEngine(MODEL, tokenizer, first, Sampling(), 12, slots=8, mesh=mesh), params)
        answers = groups.sample_groups(engine, prompts, GROUP, seed=1, draws=np.arange(6), max_prompt_tokens=8)
    return answers, engine.weights


@pytest.mark.slow
def test_the_sampler_on_a_mesh_gives_the_same_answers():
    one, _ = answers_on((1, 1, 1))
    eight, held = answers_on((2, 2, 2))
    np.testing.assert_array_equal(one.tokens, eight.tokens)
    np.testing.assert_allclose(one.sampler_logp, eight.sampler_logp, atol=1e-5)
    assert held.version == 1
    gate = held.params["layers"][0]["mlp"]["gate"]
    assert gate.sharding.shard_shape(gate.shape) == (16, 32 // 2)  # over tensor, and whole along fsdp
