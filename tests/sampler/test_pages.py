"""Pages of keys and values: the ring's tokens and log-probs, in bounded memory, with none lost and none kept."""

import re
from collections import deque
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention
from test_decode import MANY, MODEL, PARAMS, PROMPTS, answers, assert_same, generate, make, requests

from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import decode, page_attention, pages, weights
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED

PAGED = {"cache": "pages", "max_prompt_tokens": 20, "page_tokens": 4, "prefill_tokens": 64}


@pytest.fixture(scope="module")
def base():
    """Answers from the ring, three a prompt."""
    return generate(make(MODEL, slots=12), MANY, group=3)


@pytest.fixture
def made(monkeypatch):
    """The slots that samplers make, so that they can be looked at afterwards."""
    out, init = [], pages.PagedSlots.__init__

    def recorded(self, config):
        out.append(self)
        init(self, config)

    monkeypatch.setattr(pages.PagedSlots, "__init__", recorded)
    return out


def nothing_leaks(paged):
    """Every page is free, or of an ended answer's or its prompt's, and of one alone."""
    kept = [held for held, _ in paged.left.values()]
    assert not paged.held
    for shard, free in enumerate(paged.free):
        of_prompts = [p for prompt in paged.prompts.values() if prompt.shard == shard for p in prompt.pages]
        of_answers = [p for held in kept if held.prompt.shard == shard for p in held.pages]
        assert sorted(free + of_prompts + of_answers) == list(range(paged.pages))


@pytest.mark.parametrize("tokens_per_call", [4, 32])
def test_the_rings_tokens_and_log_probs(base, made, tokens_per_call):
    engine = make(MODEL, slots=12, tokens_per_call=tokens_per_call, **PAGED)
    assert_same(answers(generate(engine, MANY, group=3)), answers(base))
    nothing_leaks(made[0])
    assert engine.counts["yields"] == 0


def test_with_few_pages_answers_yield_and_go_on(base, made):
    engine = make(MODEL, slots=12, tokens_per_call=4, **PAGED, kv_tokens=100)
    assert_same(answers(generate(engine, MANY, group=3)), answers(base))
    nothing_leaks(made[0])
    assert engine.counts["yields"] > 5


def test_a_budget_cuts_answers_which_keep_their_pages(base, made):
    engine = make(MODEL, slots=12, tokens_per_call=4, **PAGED, kv_tokens=4000)
    asked = deque(replace(r, budget=11) for r in requests(engine, MANY, group=3))
    done, put_aside = {}, deque()

    def next_request():
        return asked.popleft() if asked else put_aside.popleft() if put_aside else None

    for request, group in engine.sample(next_request):
        if any(a.finish == CANCELLED for a in group):
            put_aside.append(replace(request, begun=group))
        else:
            done[request.draw] = group
    assert_same(answers([done[i] for i in range(len(MANY))]), answers(base))
    assert made[0].prefills == len(MANY)  # nothing was read twice
    nothing_leaks(made[0])


def test_an_answer_of_another_call_goes_through_the_model_again(base):
    engine = make(MODEL, slots=12, **PAGED)
    parts = decode.generate(engine, [replace(r, budget=11) for r in requests(engine, MANY, group=3)])
    again = [replace(r, begun=group) for r, group in zip(requests(engine, MANY, group=3), parts, strict=True)]
    assert_same(answers(decode.generate(replace(engine, slots=5, kv_tokens=120), again)), answers(base))


def test_weights_may_change_at_any_call(base, made):
    other = weights.push(MODEL, jax.tree.map(lambda x: x * 0.5, PARAMS), None, version=1)

    def drawn(**fields):
        engine, calls = make(MODEL, slots=12, tokens_per_call=4, **fields), []
        latest = lambda: calls.append(1) or (other if len(calls) > 8 else engine.weights)
        queue = deque(requests(engine, MANY[:4], group=3))
        got = {r.draw: g for r, g in engine.sample(lambda: queue.popleft() if queue else None, latest)}
        return [got[i] for i in range(4)]

    ring, paged = drawn(), drawn(**PAGED)
    assert_same(answers(paged), answers(ring))
    assert {v for group in paged for a in group for v in a.versions.tolist()} == {0, 1}
    nothing_leaks(made[0])


def test_what_was_left_under_other_weights_is_not_used(made):
    engine = make(MODEL, slots=4, tokens_per_call=4, **PAGED)
    other = weights.push(MODEL, jax.tree.map(lambda x: x * 0.5, PARAMS), None, version=1)
    first = replace(requests(engine, PROMPTS[2:3], group=2)[0], budget=8)
    asked, parts = deque([first]), []
    for request, group in engine.sample(
        lambda: asked.popleft() if asked else None, lambda: other if parts else engine.weights
    ):
        parts.append(group)
        if len(parts) == 1:
            asked.append(replace(request, begun=group))
    expected = decode.generate(replace(engine, weights=other), [replace(first, begun=parts[0])])
    assert_same(answers(parts[1:]), answers(expected))
    assert made[0].prefills == 2


def test_stop_strings_and_turns_keep_pages(made):
    plain = make(MODEL, slots=12, stop=("ab", "c"))
    paged = make(MODEL, slots=12, stop=("ab", "c"), **PAGED)
    assert_same(answers(generate(paged, MANY, group=3)), answers(generate(plain, MANY, group=3)))
    nothing_leaks(made[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_gap(dtype):
    exact = make(replace(MODEL, dtype=dtype), slots=8, exact=True, **PAGED)
    asked = requests(exact, MANY, group=3)
    drawn = decode.generate(exact, asked)
    for order in (slice(None), slice(None, None, -1)):
        again = decode.forced_logprobs(exact, asked[order], drawn[order])
        for a, logp in zip((a for group in drawn[order] for a in group), again, strict=True):
            np.testing.assert_array_equal(a.logp, logp)


def test_int8_pages_make_the_gap_of_the_int8_ring(base):
    gaps = []
    for fields in ({}, PAGED):
        engine = make(MODEL, slots=12, kv_dtype="int8", **fields)
        scored = decode.forced_logprobs(engine, requests(engine, MANY, group=3), base)
        pairs = zip(scored, (a.logp for group in base for a in group), strict=True)
        gaps.append(np.concatenate([np.exp(a) - np.exp(b) for a, b in pairs]).std())
    assert 1e-4 < gaps[1] < 1.5 * gaps[0]


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 2)])
def test_on_a_mesh(base, made, sizes):
    mesh = sharding.make_mesh(*sizes)
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        engine = make(MODEL, slots=12, tokens_per_call=4, mesh=mesh, **PAGED, kv_tokens=240)
        engine = replace(engine, weights=weights.push(MODEL, params, mesh))
        assert_same(answers(generate(engine, MANY, group=3)), answers(base))
        pool = made[0].state.pools[0]
        assert pool.sharding.shard_shape(pool.shape)[0] == pool.shape[0] // (sizes[0] * sizes[1])
        assert pool.sharding.shard_shape(pool.shape)[2] == pool.shape[2] // sizes[2]
    nothing_leaks(made[0])


def test_the_gpus_kernel_interpreted():
    fields = {"slots": 6, "max_tokens": 6}
    got = generate(make(replace(MODEL, attention="pallas"), **fields, **PAGED), PROMPTS[:3])
    assert_same(answers(got), answers(generate(make(MODEL, **fields), PROMPTS[:3])))


@pytest.mark.parametrize("width", [1, 4])
def test_the_tpus_kernel_is_told_what_the_plain_attention_knows(width, monkeypatch):
    """By the kernel's own reference: jax cannot interpret the kernel itself."""
    kernel = lambda *args, num_kv_pages_per_block, num_queries_per_block: ref_ragged_paged_attention(*args)
    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", kernel)
    rng, out = np.random.default_rng(0), []
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v, old = normal(3, width, 4, 4), normal(3, width, 2, 4), normal(3, width, 2, 4), normal(9, 4, 4, 4)
    table = jnp.array([[0, 3, 9, 9], [5, 9, 9, 9], [8, 2, 7, 9]])
    blocks = page_attention.Blocks(table, jnp.array([7, 4, 12]), jnp.arange(width)[None] < jnp.array([[4], [1], [2]]))
    for name in ("xla", "splash"):
        model = replace(MODEL, attention=name)
        pool = jnp.pad(old, [(0, 0)] * 3 + [(0, page_attention.head_width(model) - 4)])
        attended, pool = page_attention.paged(model, blocks)(q, k, v, pool)
        out.append((np.where(blocks.real[:, :, None, None], attended, 0), pool[..., :4]))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *out)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache": "stack"}, "cache is 'stack'; expected auto, ring or pages"),
        ({"kv_tokens": -1}, "kv_tokens is -1"),
        ({"kv_tokens": 59}, "kv_tokens is 59; expected 0 or at least 60"),
        ({"kv_tokens": 300, "exact": True}, "kv_tokens is 300; expected 0 or at least 720"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        generate(make(MODEL, **{**PAGED, "slots": 12, **fields}), PROMPTS[:1])


def test_a_mixed_stream_compiles_few_programs(caplog):
    """Prompts of 1 to 19 tokens, groups of 1 to 8, filters, limits and stops, more and fewer than there are rows."""
    engine = make(MODEL, slots=14, tokens_per_call=4, **PAGED)
    kinds = [{}, {"sampling": Sampling(1.0, top_k=3)}, {"max_tokens": 3}, {"stop": ("a",)}, {"budget": 5}]
    asked = [
        replace(r, group=1 + (i * 5) % 8, **kinds[i % 5]) for i, r in enumerate(requests(engine, MANY * 2, group=1))
    ]
    jax.config.update("jax_log_compiles", True)
    try:
        for some in (asked[:1], asked, asked[3:9], asked[::-1]):
            decode.generate(engine, some)
    finally:
        jax.config.update("jax_log_compiles", False)
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert 3 <= len([name for name in compiled if name not in ("_keys", "_threefry_seed", "logical_and")]) <= 12
