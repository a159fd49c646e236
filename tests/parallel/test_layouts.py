"""Every loss, on rows packed or grouped, cut and spread in any way: the update of answers padded one by one."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_sharding import MESHES, MICRO_BATCHES, MODEL, host_state, made_batch, ragged

from jaxrl_llm.config.values import unbound
from jaxrl_llm.learner.train_step import make_gradients, objective
from jaxrl_llm.models import attention, transformer
from jaxrl_llm.objective.algorithms import ALGORITHMS
from jaxrl_llm.parallel import sharding

# A method for each loss, correction and kind of weights; those that need a teacher's parameters have tests of their own
METHODS = {}
for name, row in ALGORITHMS.items():
    if not row.distill_coef:
        correction = row.correction and unbound(row.correction)[0]
        METHODS.setdefault((unbound(row.loss)[0], correction, row.norm, row.kl_in, row.kl), name)
LAYOUTS = list(product(("packed", "grouped"), MICRO_BATCHES, MESHES))


def one_by_one(algorithm, batch, rollouts):
    """Gradient and loss: each answer behind its own prompt in a row of its own, one causal model, a plain softmax."""
    prompts, answers = len(rollouts.prompt_lengths), len(rollouts.lengths)
    width = int(rollouts.prompt_lengths.max()) + rollouts.tokens.shape[1]
    tokens, places = np.zeros((answers, width), np.int32), np.zeros(batch.mask.shape, np.int32)
    for i in range(answers):
        before = rollouts.prompt_tokens[i // (answers // prompts), : rollouts.prompt_lengths[i // (answers // prompts)]]
        whole = np.concatenate([before, rollouts.tokens[i, : rollouts.lengths[i]]])
        tokens[i, : len(whole)] = whole
        places[i, : rollouts.lengths[i]] = len(before) - 1 + np.arange(rollouts.lengths[i])

    def loss(params):
        model = nnx.merge(transformer.split(MODEL), params)
        positions = np.broadcast_to(np.arange(width), tokens.shape)
        hidden, _ = model(tokens, positions, lambda q, k, v, cache: (attention.causal(q, k, v), cache))
        logps = jax.nn.log_softmax(jnp.dot(hidden, model.head_matrix(), precision="highest"))
        at = lambda x: jnp.take_along_axis(x, places, axis=1)
        logp = at(jnp.take_along_axis(logps, np.roll(tokens, -1, axis=1)[..., None], axis=2)[..., 0])
        return objective(algorithm, batch, logp, at(-jnp.sum(jnp.exp(logps) * logps, axis=-1)))

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(host_state()))


def same(got, want):
    (loss, grads), (want_loss, want_grads) = got, want
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.abs(y).max() > 0, f"{jax.tree_util.keystr(path)} has no gradient"
        assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max(), jax.tree_util.keystr(path)


def computed(algorithm, mesh_shape, batch_of, model=MODEL):
    mesh = sharding.make_mesh(*mesh_shape)
    with jax.set_mesh(mesh):
        grads, loss, _ = jax.jit(make_gradients(model, algorithm, 1.0, chunk=11))(host_state(), batch_of(mesh))
    return jax.device_get((loss, grads))


def with_choice(batch):
    """For the losses that need it: tokens that are chosen."""
    rng = np.random.default_rng(1)
    shape = batch.mask.shape
    chosen = np.zeros(shape, bool)
    chosen[:, :16] = rng.random((shape[0], 16)) < 0.3
    return replace(batch, selected=jax.device_put(chosen, batch.mask.sharding))


@pytest.mark.slow
@pytest.mark.parametrize(("i", "name"), list(enumerate(METHODS.values())))
def test_every_loss_in_every_layout(i, name):
    algorithm = ALGORITHMS[name]
    single = sharding.make_mesh(1, 1, 1)
    made = lambda mesh, *cut: with_choice(made_batch(mesh, *cut, norm=algorithm.norm))
    want = one_by_one(algorithm, jax.device_get(made(single)), ragged(np.random.default_rng(0)))
    for k in (2 * i, 2 * i + 1):  # the methods together meet every layout, micro-batch and mesh
        layout, micro_batches, mesh_shape = LAYOUTS[7 * k % len(LAYOUTS)]
        same(computed(algorithm, mesh_shape, lambda mesh, c=(layout, micro_batches): made(mesh, *c)), want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "grouped"])
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (1, 4, 2)], ids=str)
def test_splash_computes_the_same(layout, mesh_shape):
    """Interpreted: a kernel for TPUs."""
    model, algorithm = replace(MODEL, attention="splash"), ALGORITHMS["dapo"]
    made = lambda mesh, *cut, **kept: made_batch(mesh, *cut, norm=algorithm.norm, **kept)
    batch = jax.device_get(made(sharding.make_mesh(1, 1, 1)))
    want = one_by_one(algorithm, batch, ragged(np.random.default_rng(0)))
    same(computed(algorithm, mesh_shape, lambda mesh: made(mesh, layout, 2, model=model, row_tokens=0), model), want)
