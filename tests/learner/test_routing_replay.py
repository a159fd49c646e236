"""Routing replay and the router ratio, from recorded routing to an update."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored
from flax import nnx

from jaxrl_llm import config as configs
from jaxrl_llm.config import Mesh
from jaxrl_llm.learner import batching, learner, train_step
from jaxrl_llm.learner.packing import Division
from jaxrl_llm.models import attention, moe, transformer
from jaxrl_llm.objective import losses
from jaxrl_llm.objective.algorithms import ALGORITHMS, Updates
from jaxrl_llm.parallel import sharding

E, K, L, LENGTHS = 5, 2, 3, [3, 4, 5, 6]
MODEL = replace(CONFIG.model, layers=L, experts=E, experts_per_token=K, expert_width=6)
RSPO = replace(ALGORITHMS["rspo"], updates_per_batch=2)


def answers():
    rollouts = rollouts_of(LENGTHS)
    drawn = np.random.default_rng(3).permuted(
        np.tile(np.arange(E, dtype=np.uint8), (*rollouts.tokens.shape, L, 1)), axis=-1
    )
    return replace(rollouts, experts=drawn[..., :K])


def build(algorithm=PLAIN, **changes):
    made = learner.build(replace(CONFIG, algorithm=algorithm, model=replace(MODEL, **changes)))
    with jax.set_mesh(made.mesh):
        state = learner.fresh_state(made)
    params = jax.tree.map(lambda x: x.copy(), state.params)
    params["layers"]["moe"]["router"] *= 3.0
    return made, replace(state, params=params)


@jax.jit
def forward(params, batch):
    """Log-probs, entropies and routers' logits of the answers, with what the batch says is replayed."""
    one = lambda rows, answers: train_step.response_logprobs(MODEL, params, rows, 0.7, 1024, None, answers.replay)
    logp, entropy, _, router = train_step.over_micro_batches(one, batch, batch.rows)
    return logp, entropy, router


@jax.jit
def alone(params, tokens, replay):
    """Hidden states and routers' logits of plain rows."""
    attend = lambda q, k, v, _: (attention.causal(q, k, v), None)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return nnx.merge(transformer.split(MODEL), params)(tokens, positions, attend, replay)


def routers(state, batch):
    return forward(state.params, batch)[2]


def on_tokens(x):
    """What is recorded of the answers' own tokens."""
    return np.concatenate([np.asarray(x)[i, :n] for i, n in enumerate(LENGTHS)])


@pytest.mark.parametrize("replay", ["", "R2", "R3"])
def test_whose_choice_is_replayed(replay):
    made, state = build(replace(RSPO, updates=Updates(routing_replay=replay)))
    batch, _, _ = learner.learn_batch(made, state, scored(answers(), REWARDS))
    routing, given = batch.routing, answers().experts
    np.testing.assert_array_equal(on_tokens(routing.sampler), on_tokens(given))
    assert np.all(np.asarray(routing.sampler)[0, 3:] == 255)
    own = routers(state, replace(batch, routing=routing._replace(replay=None)))
    own = np.sort(on_tokens(moe.top_experts(own, K)))
    if replay == "R3":  # what the old pass has recorded is its own routers' choice, on the hidden states of the replay
        np.testing.assert_array_equal(on_tokens(routing.replay), on_tokens(given))
        assert np.any(np.sort(on_tokens(routing.old))[:, 1:] != own[:, 1:])
    else:
        np.testing.assert_array_equal(np.sort(on_tokens(routing.old)), own)
        assert (routing.replay is None) == (replay == "")
    if replay == "R2":
        np.testing.assert_array_equal(routing.replay, routing.old)
    live = routers(state, batch)
    np.testing.assert_allclose(moe.router_logp(live, routing.old), routing.old_logp, atol=1e-5)
    logp = forward(state.params, batch)[0]
    np.testing.assert_allclose(on_tokens(logp), on_tokens(batch.old_logp), atol=1e-5)


@pytest.mark.parametrize("layout", ["grouped", "packed"])
@pytest.mark.parametrize(("mini_batches", "micro_batches", "shards"), [(1, 1, 1), (2, 2, 2)])
def test_recorded_experts_come_to_their_tokens(layout, mini_batches, micro_batches, shards):
    """Whatever shares a row or fills up the batch: as in a row for each answer alone, where only its tokens replay."""
    lengths, given = [3, 4, 5, 6, 2, 7], rollouts_of([3, 4, 5, 6, 2, 7], prompts=3)
    drawn = np.random.default_rng(4).integers(0, E, (*given.tokens.shape, L, 1))
    given = replace(given, experts=np.concatenate([drawn, (drawn + 1) % E], axis=-1).astype(np.uint8))
    mesh, (_, state) = sharding.make_mesh(shards), build()
    params = jax.device_get(state.params)
    with jax.set_mesh(mesh):
        batch, _ = batching.make_batch(given, MODEL, Division(mini_batches, micro_batches, shards, layout), mesh=mesh)
        assert len(batch.mask) == (6 if mini_batches == 1 else 8)
        batch = replace(batch, routing=batch.routing._replace(replay=batch.routing.sampler))
        logp, _, got = jax.device_get(forward(params, batch))
    before = np.repeat(given.prompt_tokens, 2, axis=0)
    rows = np.concatenate([before, given.tokens[:, :-1]], axis=1)
    replay = np.full((*rows.shape, L, K), 255, np.uint8)
    for i, n in enumerate(lengths):
        replay[i, 2 : 2 + n] = given.experts[i, :n]
    hidden, want = alone(params, rows, replay)
    want_logp = jax.nn.log_softmax(hidden @ params["embed"].T / 0.7)
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(got[i, :n], want[i, 2 : 2 + n], atol=1e-4)
        expected = np.take_along_axis(np.asarray(want_logp)[i, 2 : 2 + n], given.tokens[i, :n, None], axis=1)[:, 0]
        np.testing.assert_allclose(logp[i, :n], expected, atol=1e-4)
        assert not np.any(got[i, n:])


def test_the_reference_is_never_replayed():
    made, state = build(replace(PLAIN, kl="k3", kl_coef=0.1, updates=Updates(routing_replay="R3", epochs=2)))
    made = replace(made, ref_params=state.params)
    batch, _, _ = learner.learn_batch(made, state, scored(answers(), REWARDS))
    plain = learner.learn_batch(*build(replace(PLAIN, updates=Updates(epochs=2))), scored(answers(), REWARDS))[0]
    np.testing.assert_allclose(on_tokens(batch.ref_logp), on_tokens(plain.old_logp), atol=1e-5)
    assert np.abs(on_tokens(batch.ref_logp) - on_tokens(batch.old_logp)).max() > 0.01


def moved(state):
    """Another policy: each parameter a little elsewhere."""
    rng = np.random.default_rng(5)
    return replace(state, params=jax.tree.map(lambda x: x + 0.15 * rng.normal(size=x.shape).astype("f"), state.params))


def test_rspo_gets_the_ratio_of_the_real_routers():
    made, state = build(RSPO)
    batch, state, _ = learner.learn_batch(made, state, scored(answers(), REWARDS))
    batch = batching.with_weights(batch, "sequence", None)
    new = moved(state)
    grads, value, metrics = jax.jit(train_step.make_gradients(MODEL, RSPO, 0.7))(new.params, batch)
    logp, _, router = forward(new.params, batch)
    log_softmax = lambda x: np.asarray(jax.nn.log_softmax(x), np.float64)
    was, now = log_softmax(routers(state, batch)), log_softmax(router)
    ratio, differs = np.zeros(batch.mask.shape, np.float32), np.zeros(batch.mask.shape)
    for i in np.ndindex(batch.mask.shape):
        old = [np.argsort(-was[i][l])[:K] for l in range(L)]
        ratio[i] = -np.mean([abs(now[i][l][e] - was[i][l][e]) for l in range(L) for e in old[l]])
        differs[i] = np.mean([set(old[l]) != set(np.argsort(-now[i][l])[:K]) for l in range(L)])
    x = losses.rspo(logp, batch.old_logp, batch.adv, batch.mask, log_router_ratio=ratio)
    np.testing.assert_allclose(value, np.sum(np.asarray(batch.weights) * x), rtol=1e-4)
    assert ratio[np.asarray(batch.mask)].max() < -0.05
    mean = lambda x: np.mean(on_tokens(x))
    np.testing.assert_allclose(metrics["router/log_ratio"], mean(ratio), rtol=1e-3)
    np.testing.assert_allclose(metrics["router/old_differs"], mean(differs), rtol=1e-5)
    sampler = [
        np.mean([set(np.argsort(-was[i][l])[:K]) != set(answers().experts[i][l].tolist()) for l in range(L)])
        for i in np.argwhere(np.asarray(batch.mask)).tolist() for i in [tuple(i)]
    ]  # fmt: skip
    np.testing.assert_allclose(metrics["router/sampler_differs"], np.mean(sampler), rtol=1e-5)
    assert 0.05 < metrics["router/old_differs"] < 0.95
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


def test_replay_keeps_the_experts_of_an_update_where_they_were():
    """Nothing differs of what is used: the policy that has moved has the log-probs of a loop with the old experts."""
    made, state = build(replace(PLAIN, updates=Updates(routing_replay="R2", epochs=2)))
    batch, state, _ = learner.learn_batch(made, state, scored(answers(), REWARDS))
    new = moved(state)
    logp = forward(new.params, batch)[0]
    free = forward(new.params, replace(batch, routing=None))[0]
    assert np.abs(on_tokens(logp) - on_tokens(free)).max() > 1e-3
    state, row = learner.update(made, state, batch)
    assert 0 < row["router/sampler_differs"] <= 1
    assert row["skipped"] == 0


@pytest.mark.slow
def test_the_load_balancing_loss_is_of_the_whole_batch():
    config = replace(MODEL, router_aux_coef=0.1)
    made, state = build(PLAIN)
    batch, _, _ = learner.learn_batch(made, state, scored(answers(), REWARDS))
    batch = batching.with_weights(batch, "token", None)

    def by_hand(params):
        logp, entropy, logits = forward(params, batch)
        loads = moe.expert_loads(logits, batch.mask, K)
        aux = moe.load_balancing(logits, batch.mask, loads, sum(LENGTHS))
        return train_step.objective(PLAIN, batch, logp, entropy) + 0.1 * aux, aux

    (value, aux), grads = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(state.params)
    assert abs(aux - K) > 0.01
    gradients = jax.jit(train_step.make_gradients(config, PLAIN, 0.7))
    for micro_batches in (1, 2):
        of_parts = replace(made, config=replace(made.config, micro_batches=micro_batches))
        cut = learner.learn_batch(of_parts, state, scored(answers(), REWARDS))[0].rows
        got, loss, _ = gradients(state.params, replace(batch, rows=cut))
        np.testing.assert_allclose(loss, value, rtol=1e-5)
        for a, b in zip(*map(jax.tree.leaves, (got, grads)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * float(np.abs(b).max()))


@pytest.mark.slow
def test_an_update_of_packed_rows_on_a_mesh_is_that_of_grouped_rows_on_one_device():
    """Experts split over `tensor`, ragged products over each device's rows, recorded routing, the loads' loss."""
    config = replace(MODEL, layers=2, heads=4, kv_heads=2, experts=6, router_aux_coef=0.1)
    algorithm = replace(RSPO, updates=Updates(routing_replay="R3"))
    base = replace(CONFIG, model=config, algorithm=algorithm)
    given, seen = replace(answers(), experts=answers().experts[:, :, :2]), []
    for mesh, layout, parts in (((1, 1, 1), "grouped", 1), ((1, 2, 2), "packed", 2)):
        at = replace(base, mesh=Mesh(*mesh), micro_batches=parts, learner=replace(base.learner, layout=layout))
        made = learner.build(at)
        with jax.set_mesh(made.mesh):
            state = moved(learner.fresh_state(made))
            batch, state, _ = learner.learn_batch(made, state, scored(given, REWARDS))
            assert (batch.rows.inputs.layout.group == 0) == (layout == "packed")
            state, row = learner.update(made, state, batch)
        seen.append(jax.device_get((batch.mask, batch.old_logp, batch.routing.old_logp, state.params, row)))
    (mask, *one), (_, *other) = seen
    for a, b in zip(one[:2], other[:2], strict=True):
        np.testing.assert_allclose(a[mask], b[mask], atol=1e-4)
    for a, b in zip(jax.tree.leaves(one[2]), jax.tree.leaves(other[2]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)
    assert one[3].keys() == other[3].keys()
    for name, x in one[3].items():
        np.testing.assert_allclose(other[3][name], x, rtol=1e-3, atol=1e-5, err_msg=name)
    assert one[3]["grad_norm"] > 0.01


def test_a_dense_model_has_nothing_to_replay_and_servers_record_nothing():
    at = replace(CONFIG, algorithm=replace(PLAIN, updates=Updates(routing_replay="R2")))
    message = "algorithm.updates.routing_replay is 'R2'; expected '': a model without experts"
    with pytest.raises(ValueError, match=re.escape(message)):
        configs.validate(at)
    at = replace(at, model=MODEL, rollout=replace(at.rollout, servers=("host:1",)))
    configs.validate(at)
    at = replace(at, algorithm=replace(PLAIN, updates=Updates(routing_replay="R3")))
    with pytest.raises(ValueError, match="routing_replay is 'R3'; expected '' or 'R2' with rollout.servers"):
        configs.validate(at)
    with pytest.raises(ValueError, match="model.experts_per_token is 6; expected at most model.experts = 5"):
        configs.validate(replace(CONFIG, model=replace(MODEL, experts_per_token=6)))
