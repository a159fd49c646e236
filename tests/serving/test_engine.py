"""JetStream's Driver over the core: the answers of the in-process loop, and a Driver that outlives what it is asked."""

import logging
import queue
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import slow
from fake_backend import running, until
from test_decode import CHAIN, MODEL, PARAMS, PROMPTS, TOKENIZER, chain, random_params

from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import decode, weights
from jaxrl_llm.sampler.client import Client, named
from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP

pytest.importorskip("jetstream", reason="google-jetstream is not installed (extra `serve`)")
from jaxrl_llm.sampler import slots as slots_module
from jaxrl_llm.serving import backend as backend_module
from jaxrl_llm.serving import engine as engine_module
from jaxrl_llm.serving.backend import DriverBackend
from jaxrl_llm.serving.engine import DriverGroup, JetStreamEngine

WARM, GREEDY = Sampling(0.7), Sampling(temperature=0.0)
WEIGHTS = weights.push(MODEL, PARAMS, None)
SIZES = {"max_prompt_tokens": 19, "max_tokens": 40, "tokens_per_call": 4}
FOREVER = {"a": {"b": 1.0}, "b": {"a": 1.0}, "c": {"c": 1.0}}  # a b a b …
A = tuple(TOKENIZER.encode("a"))
TIMEOUT_S = 60


@contextmanager
def closing(made):
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def backend():
    with closing(DriverBackend(MODEL, TOKENIZER, WEIGHTS, slots=4, **SIZES)) as made:
        yield made


@pytest.fixture(scope="module")
def endless():
    """Four slots, and answers of 400 tokens: 100 calls."""
    held = chain(FOREVER)[0].weights
    with closing(DriverBackend(CHAIN, TOKENIZER, held, slots=4, **SIZES | {"max_tokens": 400})) as made:
        yield made


def ask(made, requests):
    futures = [made.submit(r) for r in requests]
    return [f.result(TIMEOUT_S) for f in futures]


def ask_over_grpc(made, requests):
    with running(made) as worker, closing(Client([worker.address])) as calls:
        calls.push(named(made.engine.weights.params), made.engine.weights.version)
        return calls.ordered(requests)


def assert_same(got, expected):
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        for a, b in zip(g, e, strict=True):
            assert (a.tokens.tolist(), a.finish) == (b.tokens.tolist(), b.finish), f"request {i}"
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
            assert a.versions.tolist() == b.versions.tolist()


# --- the answers of the in-process loop ---------------------------------------------------------------------------


def mixed():
    """Every way to ask and to end. One request has answers that were begun: open, finished, and without a token."""
    asked = [Request(p, 1 + i % 3, 40, WARM, seed=3, draw=i) for i, p in enumerate(PROMPTS * 2)]
    asked[1] = replace(asked[1], sampling=GREEDY)
    asked[2] = replace(asked[2], sampling=Sampling(1.3, top_k=5))
    asked[3] = replace(asked[3], stop=("a", "kl", "nn", "dg"), group=3)
    asked[4] = replace(asked[4], max_tokens=1)
    asked[5] = replace(asked[5], budget=7)
    asked[6] = replace(asked[6], sampling=Sampling(1.0, top_p=0.8), max_tokens=11)
    return asked


@pytest.fixture(scope="module")
def expected():
    groups = decode.generate(decode.LocalEngine(MODEL, TOKENIZER, WEIGHTS), mixed())
    finishes = [a.finish for g in groups for a in g]
    assert set(finishes) == {EOS, STOP, LENGTH, CANCELLED}
    assert min(len(a.tokens) for g in groups for a in g) == 1
    return groups


@pytest.mark.parametrize("slots", [slow(1), 4, slow(16)])
def test_answers_are_those_of_the_in_process_loop(slots, backend, expected):
    with ExitStack() as opened:
        sized = lambda: opened.enter_context(closing(DriverBackend(MODEL, TOKENIZER, WEIGHTS, slots=slots, **SIZES)))
        made = backend if slots == 4 else sized()
        assert_same(ask(made, mixed()), expected)
        assert_same(ask_over_grpc(made, mixed()), expected)


@pytest.mark.slow
def test_answers_on_a_mesh(expected):
    mesh = sharding.make_mesh(data=2, tensor=2)
    held = weights.push(MODEL, PARAMS, mesh)
    with closing(DriverBackend(MODEL, TOKENIZER, held, slots=3, mesh=mesh, **SIZES)) as made:
        assert made.stats()["slots"] == 4
        assert_same(ask(made, mixed()[:6]), expected[:6])
        leaves = {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(held.params)}
        made.load(leaves, 1)
        layouts = zip(jax.tree.leaves(made.engine.weights.params), jax.tree.leaves(held.params), strict=True)
        assert all(a.sharding == b.sharding for a, b in layouts)


@pytest.mark.slow
def test_answers_go_on_where_they_were_cut(backend):
    whole = Request(PROMPTS[0], 3, 40, WARM, seed=3)
    [expected] = ask(backend, [whole])
    assert [len(a.tokens) for a in expected] == [5, 15, 40]
    begun, calls = (), 0
    while not begun or any(a.finish == CANCELLED for a in begun):
        [begun] = ask(backend, [replace(whole, begun=begun, budget=9)])
        calls += 1
        assert all(len(a.tokens) <= 9 * calls for a in begun)
    assert calls == 5
    assert_same([begun], [expected])
    assert ask(backend, [replace(whole, begun=begun)])[0][0].tokens.tolist() == begun[0].tokens.tolist()


@pytest.mark.slow
def test_end_of_sequence_as_first_token():
    held = chain({"a": {"$": 1.0}, "c": {"d": 1.0}, "d": {"$": 1.0}})[0].weights
    c = tuple(TOKENIZER.encode("c"))
    asked = [Request(prompt, 2, 40) for prompt in (A, c, A)]
    with closing(DriverBackend(CHAIN, TOKENIZER, held, slots=4, **SIZES)) as made:
        ways = ask(made, asked), ask_over_grpc(made, asked)
    for groups in ways:
        rows = [[(a.tokens.tolist(), a.finish) for a in g] for g in groups]
        assert rows == [[([1], EOS)] * 2, [(TOKENIZER.encode("d") + [1], EOS)] * 2, [([1], EOS)] * 2]


def test_a_group_is_prefilled_once(backend, monkeypatch):
    prompts, prefill = [], slots_module._prefill
    monkeypatch.setattr(slots_module, "_prefill", lambda *args: prompts.extend(args[2]) or prefill(*args))
    before = backend.stats()["prefills"]
    asked = [Request(p, 5, 8, WARM, seed=i) for i, p in enumerate(PROMPTS)]
    groups = ask(backend, asked)
    begun = tuple(replace(a, tokens=a.tokens[:3], logp=a.logp[:3], versions=a.versions[:3]) for a in groups[0])
    ask(backend, [replace(asked[0], begun=tuple(replace(a, finish=CANCELLED) for a in begun))])
    sizes = [np.count_nonzero(prompt) for prompt in prompts]
    assert sizes == [len(p) - 1 for p in (*PROMPTS, PROMPTS[0])]
    assert backend.stats()["prefills"] - before == 7


def test_a_stop_string_ends_the_work(endless):
    before = endless.stats()
    groups = ask(endless, [Request(A, 4, 400, WARM, stop=("bab",))] * 3)
    assert {(TOKENIZER.decode(a.tokens), a.finish) for g in groups for a in g} == {("bab", STOP)}
    assert endless.stats()["steps"] - before["steps"] < 50  # 400 tokens take 100
    assert endless.stats()["tokens"] - before["tokens"] == 36


# --- weights ------------------------------------------------------------------------------------------------------


def leaves_of(params):
    return {jax.tree_util.keystr(p): np.array(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}


def test_weights_are_swapped_while_answers_are_drawn():
    old = chain(FOREVER)[0].weights
    new = chain({"a": {"c": 1.0}, "b": {"c": 1.0}, "c": {"c": 1.0}})[0].weights
    with closing(DriverBackend(CHAIN, TOKENIZER, old, slots=4, **SIZES)) as made:
        leaves, loaded = leaves_of(new.params), []

        def listen(ids):  # the Driver looks at the first results
            if not loaded:
                loaded.append(made.load(leaves, 5))
                for leaf in leaves.values():
                    leaf[...] = 0  # the caller's arrays are its own again

        groups = [made.submit(Request(A, 3, 40, WARM), listen) for _ in range(3)]
        answers = [a for f in groups for a in f.result(TIMEOUT_S)]
        assert made.version == made.stats()["version"] == 5
        assert 0 < loaded[0] < 10
    assert {(len(a.tokens), a.finish) for a in answers} == {(40, LENGTH)}
    assert {tuple(np.unique(a.versions)) for a in answers} >= {(0, 5), (5,)}
    for a in answers:
        n = np.count_nonzero(a.versions == 0)
        assert a.versions.tolist() == [0] * n + [5] * (40 - n)
        assert TOKENIZER.decode(a.tokens) == ("ba" * 20)[:n] + "c" * (40 - n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("['embed']"), "leaves is .*embed.*all of the"),
        (lambda x: x.update({"['tail']": np.zeros(3)}), "leaves is .*tail.*leaves of the model"),
        (lambda x: x.update({"['embed']": np.zeros((3, 2), np.float32)}), r"\['embed'\] shape is \(3, 2\).*\(16, 16\)"),
        (lambda x: x.update({"['embed']": np.zeros((16, 16), np.float16)}), r"\['embed'\] dtype is .*float16.*float32"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(backend, change, message):
    leaves = leaves_of(weights.push(MODEL, random_params(MODEL, 1), None).params)
    assert {n: (x.shape, x.dtype) for n, x in leaves.items()} == backend.manifest
    held = backend.engine.weights
    change(leaves)
    with pytest.raises(ValueError, match=message):
        backend.load(leaves, 3)
    assert backend.version == 0
    assert backend.engine.weights is held


def test_versions_are_32_bits(backend):
    with pytest.raises(ValueError, match=r"version is 2147483648; expected a number in \[0, 2\^31\)"):
        backend.load(leaves_of(WEIGHTS.params), 2**31)


# --- cancelling and closing ---------------------------------------------------------------------------------------


def test_cancelling_frees_the_slots(endless):
    """The Driver is held up as soon as a group has all slots; it is cancelled, and so is one that waits."""
    gate, reached = threading.Event(), threading.Event()

    def listen(ids):
        if endless.stats()["slots_free"] == 0:
            reached.set()
            gate.wait(TIMEOUT_S)

    before = endless.stats()
    try:
        drawn = endless.submit(Request(A, 4, 400, WARM), listen)
        assert reached.wait(TIMEOUT_S)
        waits, other = (endless.submit(Request(A, n, 6, WARM)) for n in (50, 2))
        endless.cancel(waits)
        assert [(a.tokens.size, a.finish) for a in waits.result(0)] == [(0, CANCELLED)] * 50
        assert endless.stats()["queued"] <= 2
        endless.cancel(drawn)
        cut = drawn.result(0)
        assert {(len(a.tokens) % 4, a.finish) for a in cut} == {(0, CANCELLED)}
        assert max(len(a.tokens) for a in cut) >= 4
        assert not other.done()
    finally:
        gate.set()
    assert [len(a.tokens) for a in other.result(TIMEOUT_S)] == [6, 6]
    assert endless.stats()["steps"] - before["steps"] < 50  # `drawn` wanted 100
    until(lambda: endless.stats()["slots_free"] == 4)
    endless.cancel(drawn)  # done: nothing to be cancelled
    limit = max(len(a.tokens) for a in cut) + 6
    [whole] = ask(endless, [Request(A, 4, limit, WARM, begun=cut)])
    assert [TOKENIZER.decode(a.tokens) for a in whole] == ["ba" * (limit // 2)] * 4


def test_closing_answers_everybody():
    made = DriverBackend(CHAIN, TOKENIZER, chain(FOREVER)[0].weights, slots=4, **SIZES | {"max_tokens": 400})
    futures = [made.submit(Request(A, 30, 400, WARM)) for _ in range(3)]
    until(lambda: made.stats()["tokens"] > 0, TIMEOUT_S)
    made.close()
    groups = [f.result(0) for f in futures]
    assert {a.finish for g in groups for a in g} == {CANCELLED}
    assert not any(t.is_alive() for t in made.driver._all_threads)
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.submit(Request(A))


def test_whoever_waits_cannot_break_the_driver(backend):
    """Someone who cancels the future itself, as asyncio does, or whose callback fails."""
    future = backend.submit(Request(PROMPTS[0], 2, 40, WARM))
    assert not future.cancel()
    future.add_done_callback(lambda _: 1 / 0)
    assert len(future.result(TIMEOUT_S)) == 2
    assert len(ask(backend, [Request(PROMPTS[1], 1, 40)])[0]) == 1


@pytest.mark.slow
def test_the_last_slot_may_be_freed_while_the_driver_looks_for_one(backend):
    with closing(DriverBackend(MODEL, TOKENIZER, WEIGHTS, slots=4, **SIZES)) as made:
        backlog, restarts = made.driver._generate_backlogs[0], []
        get, init = backlog.get, made.engine.init_decode_state

        def slow(block=True, timeout=None):
            try:
                return get(block=block, timeout=timeout)
            except queue.Empty:
                time.sleep(0 if block else 0.1)
                raise

        backlog.get = slow
        made.engine.init_decode_state = lambda: restarts.append(1) or init()
        asked = [replace(r, sampling=WARM) for r in mixed()[:3]]
        got = [ask(made, [r])[0] for r in asked]
        del backlog.get
        assert restarts
    assert_same(got, ask(backend, asked))


def test_answers_that_deadlines_cut_go_on_to_the_same_end(endless, monkeypatch):
    real = slots_module.Slots.step
    monkeypatch.setattr(slots_module.Slots, "step", lambda *args: time.sleep(0.05) or real(*args))
    with running(endless) as worker, closing(Client([worker.address], deadline_s=0.6, retries=999)) as calls:
        [group] = calls.ordered([Request(A, 2, 60, WARM)])
        assert worker.service.counts["cut"] > 1
    assert [TOKENIZER.decode(a.tokens) for a in group] == ["ba" * 30] * 2


# --- errors --------------------------------------------------------------------------------------------------------


class Broken:
    """A tokenizer that raises when it decodes a text with `bad` in it."""

    added_tokens_decoder = {}

    def __init__(self, bad):
        self.bad = bad

    def encode(self, text, **how):
        return TOKENIZER.hf.encode(text, **how)

    def decode(self, ids, **_):
        text = TOKENIZER.decode(ids)
        if self.bad in text:
            raise RuntimeError(f"{self.bad} cannot be decoded")
        return text


def test_an_error_of_the_tokenizer_fails_its_request_alone(backend):
    asked = warm(3)
    expected = ask(backend, asked)
    bad = TOKENIZER.decode(expected[0][0].tokens[-3:-1])
    with closing(DriverBackend(MODEL, replace(TOKENIZER, hf=Broken(bad)), WEIGHTS, slots=4, **SIZES)) as made:
        futures = [made.submit(r) for r in (*asked, replace(asked[0], stop=("never",)))]
        assert_same([f.result(TIMEOUT_S) for f in futures[:-1]], expected)  # nothing to search for: nothing is decoded
        with pytest.raises(RuntimeError, match="cannot be decoded"):
            futures[-1].result(TIMEOUT_S)
        until(lambda: made.stats()["slots_free"] == 4)


def test_an_error_of_who_listens_fails_its_request_alone(backend):
    def listen(ids):
        raise KeyError("gone")

    other, deaf = backend.submit(warm(1)[0]), backend.submit(warm(2)[1], listen)
    with pytest.raises(KeyError, match="gone"):
        deaf.result(TIMEOUT_S)
    assert_same([other.result(TIMEOUT_S)], ask(backend, warm(1)))


def warm(n):
    return [Request(PROMPTS[i % 2], 1, 12, WARM, seed=3, draw=i) for i in range(n)]


@pytest.mark.parametrize("where", ["fill", "step"])
def test_an_error_on_the_device_fails_the_request_that_causes_it_alone(where, backend, monkeypatch):
    """Of several that begin at once, with others under way."""
    poison, real = replace(warm(1)[0], prompt=(15, 15)), getattr(slots_module.Slots, where)

    def failing(slots, *args):
        result = real(slots, *args) if where == "fill" else None
        if any(a.request.prompt == poison.prompt for a in slots.rows if a):
            raise RuntimeError("out of memory")
        return result if where == "fill" else real(slots, *args)

    asked = warm(3)
    expected = ask(backend, asked)
    monkeypatch.setattr(slots_module.Slots, where, failing)
    futures = [backend.submit(r) for r in (asked[0], poison, asked[1], poison, asked[2])]
    for i in (3, 1):
        with pytest.raises(RuntimeError, match="out of memory"):
            futures.pop(i).result(TIMEOUT_S)
    assert_same([f.result(TIMEOUT_S) for f in futures], expected)
    until(lambda: backend.stats()["slots_free"] == 4)


def test_an_error_that_is_no_requests_fault_fails_none(backend, monkeypatch):
    expected, real, calls = ask(backend, warm(3)), slots_module.Slots.step, []

    def once(slots, *args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a hiccup")
        return real(slots, *args)

    monkeypatch.setattr(slots_module.Slots, "step", once)
    assert_same(ask(backend, warm(3)), expected)
    assert len(calls) > 3


def test_a_device_that_always_fails_is_given_up(engine, monkeypatch):
    monkeypatch.setattr(engine_module, "BROKEN", 3)

    def fails(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(slots_module.Slots, "step", fails)
    state = engine.init_decode_state()
    for slot in range(4):
        group = DriverGroup(Request(PROMPTS[0], 1, 4, WARM, draw=slot))
        state = engine.insert(group.tickets[0], state, slot=slot)
    for _ in range(2):
        state, _ = engine.generate(engine, state)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.generate(engine, state)


def test_weights_that_are_not_finite_change_nothing(backend):
    leaves, held = leaves_of(WEIGHTS.params), backend.engine.weights
    leaves["['embed']"][3, 2] = np.nan
    with pytest.raises(ValueError, match="leaves is .not finite in .*embed.*; expected finite numbers"):
        backend.load(leaves, 3)
    assert backend.engine.weights is held


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "prompt is '0 tokens'; expected 1 to 19"),
        (Request((2,) * 20), "prompt is '20 tokens'; expected 1 to 19"),
        (Request((16,)), "prompt is .*token ids in"),
        (Request(A, max_tokens=41), "max_tokens is 41; expected at most 40"),
        (Request(A, group=0), "group is 0"),
        (Request(A, 257, 8), "group is 257; expected at most 256"),
        (Request(A, 1, 8, Sampling(1e-39)), "temperature is 1e-39"),
        (Request(A, 1, 8, Sampling(top_k=2**31)), "top_k is 2147483648"),
    ],
)
def test_what_cannot_be_served_is_refused(backend, request_, message):
    with pytest.raises(ValueError, match=message):
        backend.submit(request_)


@pytest.mark.parametrize("name", ["slots", "max_prompt_tokens", "max_tokens", "tokens_per_call"])
def test_sizes_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} is 0; expected at least 1"):
        JetStreamEngine(MODEL, TOKENIZER, WEIGHTS, **{"slots": 4, **SIZES, name: 0})


# --- JetStream's own tests of an engine ---------------------------------------------------------------------------


@pytest.fixture
def engine():
    return JetStreamEngine(MODEL, TOKENIZER, WEIGHTS, slots=4, **SIZES)


def greedy(*prompts):
    """What is to be said to them, 40 tokens at most."""
    groups = decode.generate(
        decode.LocalEngine(MODEL, TOKENIZER, WEIGHTS), [Request(p, 1, 40, GREEDY) for p in prompts]
    )
    return [g[0].tokens.tolist() for g in groups]


def test_the_driver_gets_the_engine_for_weights(engine):
    assert engine.load_params().weights is WEIGHTS
    assert engine.max_concurrent_decodes == 4
    assert engine.max_prefill_length == 32  # of the sizes that JetStream knows, the least that holds a prompt
    assert engine.samples_per_slot == 1


@pytest.mark.parametrize("jax_padding", [True, False])
def test_prefill(engine, jax_padding):
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    tokens, length = tokenizer.encode("abc", is_bos=True, jax_padding=jax_padding)
    assert isinstance(tokens, jax.Array if jax_padding else np.ndarray)
    assert (tokens.tolist(), length) == ([2, 3, 4] + [0] * 13, 3)
    prefix = engine.prefill(params=engine.load_params(), padded_tokens=tokens, true_length=length)
    assert prefix.group.request.prompt == (2, 3, 4)
    with pytest.raises(ValueError, match="existing_prefix"):
        engine.prefill(params=engine.load_params(), existing_prefix=prefix, padded_tokens=tokens, true_length=3)


@pytest.mark.parametrize("slot", [1, 3])
def test_generate(engine, slot):
    params, tokenizer = engine.load_params(), engine.build_tokenizer(engine.get_tokenizer())
    tokens, length = tokenizer.encode("abc")
    prefix = engine.prefill(params=params, padded_tokens=tokens, true_length=length)
    state = engine.insert(prefix=prefix, decode_state=engine.init_decode_state(), slot=slot)
    got = []
    for _ in range(10):
        state, results = engine.generate(params=params, decode_state=state)
        data = results.get_result_at_slot(slot)
        got += data.tokens[0, data.valid[0] == 1].tolist()
        assert data.tokens.shape == data.valid.shape
        assert data.lengths.shape == (1,)
        assert results.get_result_at_slot(0).valid.tolist() == [[0]]  # nobody is there
    assert [got] == greedy(PROMPTS[0])


def test_an_answer_that_was_cancelled_gives_up_its_row(engine):
    params, state = engine.load_params(), engine.init_decode_state()
    jobs = [DriverGroup(Request(PROMPTS[0], 2, 40, WARM)), DriverGroup(Request(PROMPTS[1], 1, 40, GREEDY))]
    for slot, ticket in enumerate([*jobs[0].tickets, *jobs[1].tickets]):
        prefix = engine.prefill(params=params, padded_tokens=ticket, true_length=3)
        state = engine.insert(prefix, state, slot=slot)
    state, results = engine.generate(params, state)
    assert [results.get_result_at_slot(i).valid.sum() for i in range(4)] == [4, 4, 4, 0]
    jobs[0].end()
    assert [a.tokens.size for a in jobs[0].result(0)] == [4, 4]
    state, results = engine.generate(params, state)
    assert results.get_result_at_slot(0).valid.tolist() == [[0]]  # the Driver may have the slot again
    assert results.get_result_at_slot(2).valid.sum() == 4
    assert state.busy == 1
    assert [a.tokens.size for a in jobs[0].result(0)] == [4, 4]


def test_a_group_cancelled_while_a_call_ends_keeps_its_prompt_as_long_as_a_row(engine, monkeypatch):
    """After its first row was looked at and before its last: the first is still taken in the next call."""
    params, job = engine.load_params(), DriverGroup(Request(PROMPTS[0], 2, 40, WARM))
    state = engine.init_decode_state()
    for slot, ticket in enumerate(job.tickets):
        state = engine.insert(engine.prefill(params=params, padded_tokens=ticket, true_length=3), state, slot=slot)
    last = job.active.answers[1]
    monkeypatch.setattr(last, "take", lambda *_: job.end())
    state, _ = engine.generate(params, state)
    assert state.busy == 1
    assert state.prefixes[state.rows[0].group.prefix] is job.active
    asked = DriverGroup(Request(PROMPTS[1], 8, 4, GREEDY))
    for slot, ticket in enumerate(asked.tickets[:2]):
        state = engine.insert(engine.prefill(params=params, padded_tokens=ticket, true_length=1), state, slot=slot)
    state, _ = engine.generate(params, state)
    assert [d.tokens for d in asked.active.answers[:2]] == [greedy(PROMPTS[1])[0][:4]] * 2
    state, _ = engine.generate(params, state)
    assert state.busy == 0
    assert job.active not in state.prefixes


def test_an_answer_cancelled_on_its_way_costs_nothing(engine):
    job = DriverGroup(Request(PROMPTS[0], 1, 40, WARM))
    job.end()
    prefix = engine.prefill(params=engine.load_params(), padded_tokens=job.tickets[0], true_length=3)
    state = engine.insert(prefix, engine.init_decode_state(), slot=2)
    state, results = engine.generate(engine.load_params(), state)
    assert results.get_result_at_slot(2).valid.tolist() == [[0]]
    assert engine.counts["prefills"] == state.busy == 0


def test_a_ticket_passes_the_tokenizer(engine):
    [ticket] = DriverGroup(Request((2, 3, 4))).tickets
    assert isinstance(ticket, str)
    tokenizer = engine.build_tokenizer(None)
    same, length = tokenizer.encode(ticket, is_bos=True, max_prefill_length=32, jax_padding=True)
    assert same is ticket
    assert length == 3
    assert tokenizer.stop_tokens == {1}
    assert tokenizer.decode([2, 3]) == "ab"


def test_importing_jetstream_leaves_the_interpreter_as_it_was():
    root = logging.getLogger()
    assert root.level == logging.WARNING
    assert not any(getattr(h, "stream", None) is sys.__stdout__ for h in root.handlers)
    assert not [name for name in sys.modules if name.startswith("seqio")]
    assert backend_module.js.orchestrator.logging is logging.getLogger("jetstream")
