"""A mixture of experts in the sampler: its log-probs and its routers' choice are the learner's."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_decode import GROUP, PROMPTS, TEMPERATURE, TEXTS, TOKENIZER, random_params, requests

from jaxrl_llm.learner.batching import make_batch
from jaxrl_llm.learner.train_step import make_logprobs
from jaxrl_llm.models import moe
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.run.modes import Position
from jaxrl_llm.sampler import decode, groups, weights
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED, Prompt

E, K, L = 6, 2, 2
MODEL = ModelConfig(
    vocab_size=16, layers=L, width=16, heads=4, kv_heads=2, head_width=4, mlp_width=24, qk_norm=True,
    experts=E, experts_per_token=K, expert_width=8,
)  # fmt: skip
PARAMS = random_params(MODEL, 0)
logprobs = make_logprobs(MODEL, TEMPERATURE)


def make(mesh=None, **fields):
    held = weights.push(MODEL, PARAMS, mesh, quantized=fields.get("quantized", ""))
    return decode.LocalEngine(
        MODEL, TOKENIZER, held, Sampling(TEMPERATURE), 20, record_experts=True, mesh=mesh, **fields
    )


def sample(engine):
    prompts = tuple(Prompt(i, t) for i, t in enumerate(TEXTS))
    return groups.sample_groups(engine, prompts, GROUP, seed=0, draws=np.arange(len(TEXTS)), max_prompt_tokens=19)


@pytest.fixture(scope="module")
def sampled():
    return sample(make())


@pytest.fixture(scope="module")
def learner():
    """The learner's log-probs and choice of experts for answers, and the batch that they are in."""

    def of(rollouts):
        batch, _ = make_batch(rollouts, MODEL)
        logp, _, experts, _ = logprobs(PARAMS, batch, record=True)
        return batch, np.asarray(logp), experts

    return of


def test_log_probs_and_experts_are_the_learner_s(sampled, learner):
    batch, logp, experts = learner(sampled)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(logp[mask], np.asarray(batch.sampler_logp)[mask], atol=1e-5)
    assert sampled.experts.shape == (*sampled.tokens.shape, L, K)
    assert sampled.experts.dtype == np.uint8
    np.testing.assert_array_equal(np.asarray(moe.disagreement(experts, batch.routing.sampler))[mask], 0)
    assert np.all(np.asarray(batch.routing.sampler)[~mask] == 255)
    counts = np.bincount(sampled.experts[mask[:, : sampled.tokens.shape[1]]].ravel(), minlength=E)
    assert counts.min() > 0.02 * counts.sum()


def test_the_learner_replays_the_sampler_s_choice(sampled, learner):
    """With another choice the log-probs are others; with that of the sampler they are its own."""
    batch, logp, _ = learner(sampled)
    other = np.where(np.asarray(batch.routing.sampler) == 255, 255, (np.asarray(batch.routing.sampler) + 1) % E)
    replayed = lambda x: replace(batch, routing=batch.routing._replace(replay=x.astype(np.uint8)))
    mask = np.asarray(batch.mask)
    same = logprobs(PARAMS, replayed(np.asarray(batch.routing.sampler)))[0]
    np.testing.assert_allclose(np.asarray(same)[mask], logp[mask], atol=1e-6)
    assert np.abs(np.asarray(logprobs(PARAMS, replayed(other))[0]) - logp)[mask].mean() > 0.1


@pytest.mark.slow
def test_a_mesh_with_the_experts_split_draws_the_same(sampled):
    mesh = sharding.make_mesh(2, 1, 2)
    with jax.set_mesh(mesh):
        engine = make(mesh)
        gate = engine.weights.params["layers"][0]["moe"]["gate"]
        again = sample(engine)
    assert gate.sharding.shard_shape(gate.shape) == (E // 2, 16, 8)
    np.testing.assert_array_equal(again.tokens, sampled.tokens)
    np.testing.assert_array_equal(again.experts, sampled.experts)
    np.testing.assert_allclose(again.sampler_logp, sampled.sampler_logp, atol=1e-5)


def test_int8_experts_come_near(learner):
    """A scale for each column of each expert; the router stays as it is."""
    engine = make(quantized="int8")
    layer = engine.weights.params["layers"][0]["moe"]
    assert layer["down"].scale.shape == (E, 1, 16)
    assert layer["router"].dtype == np.float32
    batch, logp, experts = learner(sample(engine))
    mask = np.asarray(batch.mask)
    gap = np.abs(logp - np.asarray(batch.sampler_logp))[mask]
    assert 1e-4 < gap.mean() < 0.1
    assert 0 < np.asarray(moe.disagreement(experts, batch.routing.sampler))[mask].mean() < 0.2


def test_an_interrupted_answer_keeps_its_routing():
    engine = make(tokens_per_call=3)
    whole = decode.generate(engine, requests(engine, PROMPTS[:2]))
    parts = decode.generate(engine, [replace(r, budget=7) for r in requests(engine, PROMPTS[:2])])
    assert any(a.finish == CANCELLED for group in parts for a in group)
    pending = tuple(groups.PendingPrompt(i, i, group) for i, group in enumerate(parts))
    kept = Position.from_json(0, Position(0, pending=pending).to_json()).pending
    asked = [replace(r, begun=p.begun) for r, p in zip(requests(engine, PROMPTS[:2]), kept, strict=True)]
    for a, b in zip(whole, decode.generate(engine, asked), strict=True):
        for x, y in zip(a, b, strict=True):
            assert len(x.experts) == len(x.tokens)
            np.testing.assert_array_equal(x.tokens, y.tokens)
            np.testing.assert_array_equal(np.sort(x.experts), np.sort(y.experts))


def test_nothing_is_recorded_unless_asked():
    engine = replace(make(), record_experts=False)
    assert decode.generate(engine, requests(engine, PROMPTS[:1]))[0][0].experts is None
