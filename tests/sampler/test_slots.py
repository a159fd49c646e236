"""Streams of requests through the slots: refilling, shapes that follow the work, continued answers, mixed requests."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from test_decode import MANY, MODEL, PARAMS, PROMPTS, TOKENIZER, answers, assert_same, generate, make, requests

from jaxrl_llm.parallel import sharding
from jaxrl_llm.run import metrics
from jaxrl_llm.sampler import core, decode, slots, weights
from jaxrl_llm.sampler.groups import make_request
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED, EOS, LENGTH


@pytest.fixture(scope="module")
def engine():
    return make(MODEL, slots=12)


@pytest.fixture(scope="module")
def base(engine):
    """Answers to all prompts, three a prompt."""
    return generate(engine, MANY, group=3)


def watched(monkeypatch):
    """Rows, prefixes and columns of every call of the decoding loop, and the answers that were live in it."""
    calls, inner = [], slots._decode

    def recording(*args):
        state, forced = args[4], args[7]
        columns, live = state.suffixes[0][1].shape[2], int(state.answers.live.sum())
        rows = len(forced), len(state.prefixes.lengths), columns, live
        calls.append(rows)
        return inner(*args)

    monkeypatch.setattr(slots, "_decode", recording)
    return calls


def test_a_row_that_is_done_is_filled_at_once(engine, base, monkeypatch):
    calls = watched(monkeypatch)
    got = generate(replace(engine, tokens_per_call=4), MANY, group=3)
    assert_same(answers(got), answers(base))
    drawn = sum(len(a.tokens) for group in got for a in group)
    waiting = calls[: -(MODEL.layers + 38 // 4)]  # all but the last answers' time
    assert all(live == 12 for *_, live in waiting)
    assert drawn > 0.75 * sum(rows * 4 for rows, *_ in calls)


def test_shapes_follow_the_work(engine, monkeypatch):
    calls = watched(monkeypatch)
    generate(replace(engine, slots=16, tokens_per_call=4), MANY[:5], group=3)
    rows = [c[0] for c in calls]
    assert rows[0] == 16
    assert sorted(rows, reverse=True) == rows  # nothing waits: rows are given back
    assert rows[-1] < 16
    assert all(live <= n for n, _, _, live in calls)
    columns = [c[2] for c in calls]
    assert columns == sorted(columns)  # the first tokens do not pay for the last
    assert set(columns) == {32, 40}


def stream(engine, asked):
    """The answers as they come, as in mode async: one call of `sample` for all."""
    left = iter(asked)
    return list(engine.sample(lambda: next(left, None)))


@pytest.mark.slow
def test_shapes_come_down_again_after_a_wide_and_long_group(monkeypatch):
    """One group of 64 with long answers and a long prompt, between many small ones: neither lanes nor columns stay."""
    calls, inner = [], slots._decode
    monkeypatch.setattr(slots, "PERIOD", 4)

    def recording(*args):
        state, lanes = args[4], args[5]
        sizes = state.suffixes[0][1].shape[2], state.prefixes.kv[0][1].shape[2], lanes.shape[1], lanes.shape[2]
        calls.append((args[:3], jax.tree.map(np.shape, args[4:]), sizes))
        return inner(*args)

    monkeypatch.setattr(slots, "_decode", recording)
    engine = make(MODEL, slots=8, tokens_per_call=8, max_tokens=128)
    small = requests(engine, [PROMPTS[0]] * 80, group=2)
    small = [replace(r, max_tokens=8) for r in small]
    wide = replace(requests(engine, [PROMPTS[2] * 2], group=64)[0], max_tokens=128, draw=1000)
    stream(engine, [*small[:20], wide, *small[20:]])
    columns, size, prefixes, lanes = map(max, zip(*(c[2] for c in calls), strict=True))
    assert (columns, size, lanes) == (128, 64, 64)
    assert calls[0][2] == calls[-1][2] == (8, 16, calls[0][2][2], 2)
    assert len({str(c[1:]) for c in calls}) <= 12  # programs of the decoding loop
    before = metrics.compilations()
    stream(engine, [*small[:20], wide, *small[20:]])
    assert metrics.compilations() == before


def test_shapes_stay_while_a_period_needs_them(engine, monkeypatch):
    """Groups of 2 and of 8 that take turns: the lanes of the larger stay, or each turn would be another program."""
    widths, inner = [], slots._decode
    monkeypatch.setattr(slots, "_decode", lambda *args: widths.append(args[5].shape[2]) or inner(*args))
    asked = [replace(r, group=8 if i % 4 == 0 else 2, max_tokens=3) for i, r in enumerate(requests(engine, MANY))]
    stream(engine, asked)
    assert sorted(widths) == widths


@pytest.mark.slow
def test_the_source_may_have_nothing_for_now(engine, base):
    """As with dynamic sampling: what is asked next depends on what was answered."""
    asked = requests(engine, MANY, group=3)
    left, got, allowed = list(range(len(asked))), {}, 2

    def next_request():
        return asked[left.pop(0)] if left and len(asked) - len(left) - len(got) < allowed else None

    for request, group in engine.sample(next_request):
        got[request.draw] = group
        allowed = 1 + len(got) % 4
    assert_same(answers([got[i] for i in range(len(asked))]), answers(base))


def test_closing_the_stream_is_all_it_takes_to_stop(engine):
    asked = iter(requests(engine, MANY))
    stream = engine.sample(lambda: next(asked, None))
    next(stream)
    stream.close()
    assert len(list(asked)) > 0


def test_requests_of_many_kinds_share_the_rows(engine, base):
    """Temperatures, filters, limits and stops differ from row to row; each is as if all were of its kind."""
    kinds = [
        {},
        {"sampling": Sampling(0.0)},
        {"sampling": Sampling(1.5, top_k=3)},
        {"sampling": Sampling(1.0, top_p=0.5)},
        {"max_tokens": 3},
        {"stop": ("a", "kl")},
    ]
    asked = [replace(r, **kinds[i % 6]) for i, r in enumerate(requests(engine, MANY, group=3))]
    got = decode.generate(replace(engine, tokens_per_call=5), asked)
    for i, kind in enumerate(kinds):
        alone = [replace(r, **kind) for r in requests(engine, MANY, group=3)[i::6]]
        assert_same(answers(decode.generate(engine, alone) if kind else base[::6]), answers(got[i::6]))
    assert all(len(a.tokens) <= 3 for i in (4, 10, 16) for a in got[i])
    for i in (1, 7, 13):
        assert len({tuple(a.tokens.tolist()) for a in got[i]}) == 1  # greedy
        assert not np.concatenate([a.logp for a in got[i]]).any()


@pytest.mark.parametrize("kv_dtype", ["", slow("int8")])
def test_answers_that_a_budget_cuts_go_on_as_if_nothing_had_been(engine, base, kv_dtype):
    engine = replace(engine, kv_dtype=kv_dtype)
    whole = base if not kv_dtype else generate(engine, MANY, group=3)
    asked = requests(engine, MANY, group=3)
    parts = [replace(r, budget=11) for r in asked]
    for turn in range(1, 5):
        got = decode.generate(replace(engine, slots=7), parts)
        for old, group in zip(whole, got, strict=True):
            for a, b in zip(old, group, strict=True):
                n = min(11 * turn, len(a.tokens))
                assert b.tokens.tolist() == a.tokens[:n].tolist() or kv_dtype
                assert b.finish == (a.finish if n == len(a.tokens) else CANCELLED) or kv_dtype
                np.testing.assert_allclose(b.logp[:5], a.logp[:5], atol=1e-5 if not kv_dtype else 0.5)
        parts = [replace(r, begun=group) for r, group in zip(parts, got, strict=True)]
    assert {a.finish for g in got for a in g} == {EOS, LENGTH}
    assert_same(answers(decode.generate(engine, parts)), answers(got))  # nothing is left to draw


def test_a_continued_group_is_prefilled_once(engine, monkeypatch):
    calls, prefill = [], slots._prefill
    monkeypatch.setattr(slots, "_prefill", lambda *args: calls.append(args[4].shape) or prefill(*args))
    asked = [replace(r, budget=11) for r in requests(engine, [PROMPTS[2]], group=8)]
    first = decode.generate(engine, asked)
    assert calls == [(1, 1, 0)]
    decode.generate(replace(engine, slots=2), [replace(asked[0], begun=first[0])])
    assert calls[1:] == [(1, 8, 16)]


def test_weights_change_between_calls_and_no_answer_is_lost(engine):
    other = weights.push(MODEL, jax.tree.map(lambda x: x * 0.5, PARAMS), None, version=1)
    calls = []

    def latest():
        calls.append(1)
        return other if len(calls) > 4 else engine.weights

    asked = iter(requests(engine, MANY, group=3))
    got = list(replace(engine, tokens_per_call=4).sample(lambda: next(asked, None), latest))
    assert len(got) == len(MANY)
    versions = [a.versions for _, group in got for a in group]
    assert all((np.diff(v) >= 0).all() for v in versions)
    assert any(set(v) == {0, 1} for v in versions)
    assert {0, 1} == {int(x) for v in versions for x in v}


@pytest.mark.slow
def test_int8_weights_and_keys_make_a_gap(engine, base):
    asked = requests(engine, MANY, group=3)
    for other in (make(MODEL, slots=12, quantized="int8"), replace(engine, kv_dtype="int8")):
        scored = decode.forced_logprobs(other, asked, base)
        gap = max(
            np.abs(np.exp(a) - np.exp(b.logp)).max() for a, b in zip(scored, (a for g in base for a in g), strict=True)
        )
        assert 1e-4 < gap < 0.1


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_zero_gap(dtype):
    """Log-probs of given tokens from the sampler's own programs are the recorded ones to the last bit, in any order."""
    exact = make(replace(MODEL, dtype=dtype), slots=8, max_prompt_tokens=24, exact=True)
    asked = requests(exact, MANY, group=3)
    drawn = decode.generate(exact, asked)
    for order in (slice(None), slice(None, None, -1)):
        again = decode.forced_logprobs(exact, asked[order], drawn[order])
        flat = [a for group in drawn[order] for a in group]
        for a, logp in zip(flat, again, strict=True):
            np.testing.assert_array_equal(a.logp, logp)
    loose = replace(exact, exact=False)
    again = decode.forced_logprobs(loose, asked, drawn)
    flat = [a for group in drawn for a in group]
    if dtype == "float32":  # why it takes a mode
        assert not all(np.array_equal(a.logp, logp) for a, logp in zip(flat, again, strict=True))
        assert_same(answers(decode.generate(loose, asked)), answers(drawn))


@pytest.mark.slow
def test_a_long_answer_that_goes_on_behind_a_full_shard():
    """On two shards of three rows, answers further back are placed first: there has to be room for what they have."""
    mesh = sharding.make_mesh(2)
    asked = [replace(r, max_tokens=200) for r in requests(make(MODEL), [PROMPTS[2], PROMPTS[4]], group=4)]
    whole = decode.generate(make(MODEL, slots=8), [replace(r, max_tokens=100) for r in asked])
    part = lambda a, n: Answer(a.tokens[:n], a.logp[:n], a.versions[:n], CANCELLED)
    forced = np.resize(np.arange(2, 16), 100).astype(np.int32)  # a hundred tokens, whatever would have been drawn
    zeros = np.zeros(100, np.int32)
    told = [
        part(whole[1][0], 2),
        part(whole[1][1], 2),
        *[Answer(forced, zeros.astype(np.float32), zeros, CANCELLED)] * 2,
    ]
    asked[1] = replace(asked[1], begun=tuple(told), budget=50)
    one = decode.generate(make(MODEL, slots=8), asked)
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        held = weights.push(MODEL, params, mesh)
        two = decode.generate(replace(make(MODEL, slots=6), weights=held, mesh=mesh), asked)
    assert_same(answers(two), answers(one))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "prompt is '0 tokens'; expected 1"),
        ({"prompt": (3, 16)}, r"prompt is \[3, 16\]; expected token ids in \[0, 16\)"),
        ({"group": 0}, "group is 0; expected a whole number from 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"sampling": Sampling(-1.0)}, "temperature is -1.0"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("",)}, "stop is"),
        ({"budget": -2}, "budget is -2"),
    ],
)
def test_a_bad_request_is_refused_by_name(engine, change, message):
    with pytest.raises(ValueError, match=message):
        decode.generate(engine, [replace(Request((3, 4)), **change)])


def test_a_request_takes_what_it_leaves_out_from_the_engine(engine):
    made = make_request(replace(engine, stop=("x",)), [2, 3], 4, seed=1, draw=2)
    assert made == Request((2, 3), 4, 40, engine.sampling, ("x",), 1, 2)
    assert TOKENIZER.eos_ids == (1,)


@pytest.mark.parametrize(("have", "columns"), [(4, 4), (4, 8), (4, 12), (4, 6), (6, 8)])
def test_a_wider_ring_has_every_token_of_the_narrow_one_at_its_step(have, columns):
    for step in range(have, 3 * columns):
        times = np.array([step - 1 - (step - 1 - c) % have for c in range(have)], np.float32)  # of what was written
        keys = np.broadcast_to(times, (3, 1, 2, have)) + 100 * np.arange(3)[:, None, None, None]
        values = keys.swapaxes(2, 3)
        ((k, v),) = core.repack_suffixes(((jnp.array(keys), jnp.array(values)),), step, jnp.array([2, 0]), columns)
        for age in range(have):
            time = step - 1 - age
            assert (k[:, 0, :, time % columns] == np.array([[200 + time], [time]])).all()
            assert (v[:, 0, time % columns] == np.array([[200 + time], [time]])).all()
