"""With LoRA the optimiser changes the adapters alone, on any mesh alike; the frozen base is the learner's."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored

from jaxrl_llm.config import Mesh
from jaxrl_llm.learner import learner
from jaxrl_llm.models import lora, transformer
from jaxrl_llm.models.transformer import LoRA, ModelConfig
from jaxrl_llm.objective import advantages
from jaxrl_llm.objective.algorithms import Algorithm, Critic
from jaxrl_llm.types import Optimizer

MODEL = ModelConfig(112, 2, 16, 4, 2, 8, 32, remat="none", lora=LoRA(rank=2, alpha=6.0))
SHAPE = [3, 4, 5, 6]
KL = replace(PLAIN, kl="k3", kl_coef=0.1, updates_per_batch=2)  # old log-probs are needed


def build(algorithm, mesh=(1, 1, 1)):
    """A learner and its first state, whose B is not 0: as after some steps."""
    made = learner.build(replace(CONFIG, algorithm=algorithm, model=MODEL, mesh=Mesh(*mesh), micro_batches=2))
    with jax.set_mesh(made.mesh):
        state = learner.fresh_state(made)
        made = replace(made, ref_params=state.params, base=transformer.init(lora.without(MODEL), jax.random.key(1)))
        drawn = np.random.default_rng(0)
        some = lambda x: jax.device_put(0.1 * drawn.normal(size=x.shape).astype(np.float32), x.sharding)
        return made, replace(state, params=jax.tree.map(some, state.params))


@cache
def stepped(mesh):
    made, state = build(KL, mesh)
    before = jax.device_get((made.base, state.params))
    with jax.set_mesh(made.mesh):
        batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of(SHAPE), REWARDS))
        shards = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), state.params)
        state, row = learner.update(made, state, batch)
    return before, jax.device_get((made.base, state, batch)), row, shards


@pytest.mark.slow
def test_a_step_changes_the_adapters_and_nothing_else():
    (base, params), (base_after, state, batch), row, _ = stepped((1, 1, 1))
    sizes = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    c, r = MODEL, MODEL.lora.rank
    attention = 3 * c.width + 2 * c.kv_heads * c.head_width + c.heads * c.head_width + c.heads * c.head_width + c.width
    mlp = 3 * (c.width + c.mlp_width)
    assert sizes(state.params) == c.layers * r * (attention + mlp)
    assert sizes(state.opt_state[1][0].mu) == sizes(state.opt_state[1][0].nu) == sizes(state.params)
    jax.tree.map(np.testing.assert_array_equal, base, base_after)
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True))
    assert row["grad_norm"] > 0
    assert (row["skipped"], int(state.step)) == (0, 2)


def test_reference_and_old_are_the_base_and_the_merged_policy():
    (base, params), (_, _, batch), row, _ = stepped((1, 1, 1))
    plain = learner.build(replace(CONFIG, algorithm=KL, model=lora.without(MODEL)))
    merged = lora.merged(MODEL, lora.joined(base, params))
    logp = lambda params: np.where(batch.mask, plain.logprobs(params, batch)[0], 0)
    got = (np.where(batch.mask, x, 0) for x in (batch.ref_logp, batch.old_logp))
    for x, want in zip(got, (base, merged), strict=True):
        np.testing.assert_allclose(x, logp(want), rtol=1e-5, atol=1e-5)
    assert np.abs(logp(base) - logp(merged)).max() > 1e-3
    assert row["kl/ref"] > 0


@pytest.mark.slow
def test_the_same_update_on_a_mesh():
    (_, (_, want, _), row, _), (_, (_, got, _), other, shards) = stepped((1, 1, 1)), stepped((1, 4, 2))
    for x, y in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other["grad_norm"], row["grad_norm"], rtol=1e-5)
    attention, mlp = shards["layers"]["attention"], shards["layers"]["mlp"]
    assert (attention["q_a"], attention["q_b"]) == ((2, 16 // 4, 2), (2, 2, 4 // 2, 8))
    assert (attention["o_a"], attention["o_b"]) == ((2, 4 // 2, 8, 2), (2, 2, 16 // 4))
    assert (mlp["down_a"], mlp["down_b"]) == ((2, 32 // 2, 2), (2, 2, 16 // 4))


@pytest.mark.parametrize("kind", ["network", "head"])
def test_a_critic_reads_the_base_through_adapters_of_its_own(kind):
    a = Algorithm(advantages.raw, PLAIN.loss, "token", token_advantage=advantages.gae,
                  critic=Critic(kind=kind, head_std=0.5, optimizer=Optimizer(lr=1e-2)))  # fmt: skip
    made, state = build(a)
    with jax.set_mesh(made.mesh):
        first = made.critic.init(state.params)
        trunk = jax.device_get(first.params.get("trunk"))
        jax.tree.map(np.testing.assert_array_equal, trunk, jax.device_get(state.params) if kind == "network" else None)
        batch, state, _ = learner.learn_batch(made, replace(state, critic=first), scored(rollouts_of(SHAPE), REWARDS))
        values, base = np.asarray(batch.values), jax.tree.map(lambda x: 2 * x, made.base)
        other = made.critic.values(first.params, lora.joined(base, state.params), batch)
        assert (np.asarray(other) != values).any()  # it reads the base
        after, row = learner.update_critic(made, state, batch)
    assert row["critic/grad_norm"] > 0
    if kind == "network":
        moved = jax.device_get(after.critic.params["trunk"])
        assert all((a != b).any() for a, b in zip(jax.tree.leaves(trunk), jax.tree.leaves(moved), strict=True))
    else:
        assert set(after.critic.params) == {"value"}
