"""The server: clear statuses for what is wrong, nothing sampled twice, weights whole or not at all, its process."""

import gc
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import fake_backend
import grpc
import numpy as np
import pytest
from fake_backend import FAKE, FakeBackend, assert_same, listening, process, running, slow_reader, until

from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler import wire
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.serving import server

Code = grpc.StatusCode
REQUEST = Request((1, 2, 3), group=2, max_tokens=8)


@contextmanager
def channel_to(address: str):
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


@pytest.fixture
def worker():
    with running(FakeBackend()) as worker, channel_to(worker.address) as channel:
        worker.channel = channel
        yield worker


def bytes_of(request: Request, id: str = "1", instance: str = "", run: str = "", **fields) -> bytes:
    message = wire.to_request_message(request, id, instance, run)
    for name, value in fields.items():
        setattr(message, name, value)
    return message.SerializeToString()


def call(channel: grpc.Channel, data: bytes, token: str | None = None, method: str = "Sample", **options) -> bytes:
    metadata = () if token is None else (("authorization", token),)
    return channel.unary_unary(f"/jaxrl.Rollout/{method}")(data, metadata=metadata, timeout=10, **options)


def group_of(data: bytes):
    return wire.from_reply(wire.parse(pb.SampleReply, data))


def stats(channel: grpc.Channel) -> pb.StatsReply:
    return wire.parse(pb.StatsReply, call(channel, b"", method="Stats"))


def load(channel: grpc.Channel, chunks) -> pb.LoadReply:
    method = channel.stream_unary("/jaxrl.Rollout/LoadWeights", pb.Chunk.SerializeToString, pb.LoadReply.FromString)
    return method(iter(chunks), timeout=10)


@contextmanager
def status(code: Code, details: str = ""):
    with pytest.raises(grpc.RpcError) as error:
        yield
    assert error.value.code() is code
    assert re.search(details, error.value.details()), error.value.details()


# --- sampling ---------------------------------------------------------------------------------------------------


def test_a_group_is_the_backends(worker):
    begun = (Answer(np.array([4], np.int32), np.array([-0.5], np.float32), np.array([3], np.int32), "cancelled"),) * 2
    request = Request((1, 2, 3), 2, 8, Sampling(0.5, 3, 0.9), ("stop",), 5, 6, begun, 3)
    assert_same(group_of(call(worker.channel, bytes_of(request))), fake_backend.answers(request, version=0))
    (arrived,) = worker.backend.submitted
    assert (arrived.sampling, arrived.stop, arrived.seed, arrived.draw) == (Sampling(0.5, 3, 0.9), ("stop",), 5, 6)
    assert arrived.budget == 3
    assert_same(arrived.begun, begun)


WRONG = {
    "prompt is '17 tokens'; expected 1 to 16": Request((1,) * 17),
    "prompt is '0 tokens'": Request(()),
    r"prompt is \[50, 50\]; expected token ids in \[0, 50\)": Request((50,)),
    "max_tokens is 65": Request((1,), max_tokens=65),
    "group is 0": Request((1,), max_tokens=8, group=0),
    "group is 1025": Request((1,), max_tokens=8, group=1025),
    "temperature is nan": Request((1,), max_tokens=8, sampling=Sampling(float("nan"))),
    "seed is -1": Request((1,), max_tokens=8, seed=-1),
    "stop='unservable'": Request((1,), max_tokens=8, stop=("unservable",)),
}


@pytest.mark.parametrize("details", WRONG)
def test_what_cannot_be_served_is_refused_by_name(worker, details):
    with status(Code.INVALID_ARGUMENT, details):
        call(worker.channel, bytes_of(WRONG[details]))
    assert worker.backend.submitted == []
    assert len(group_of(call(worker.channel, bytes_of(REQUEST)))) == 2


@pytest.mark.parametrize("method", ["Sample", "Stats"])
def test_garbage_is_refused(worker, method):
    with status(Code.INVALID_ARGUMENT, "16 bytes: expected a jaxrl"):
        call(worker.channel, b"\xff" * 16, method=method)
    assert stats(worker.channel).ready


def test_a_message_too_large_and_a_method_unknown_are_refused(worker):
    with status(Code.RESOURCE_EXHAUSTED, "larger than max"):
        call(worker.channel, bytes(wire.MAX_MESSAGE + 1))
    with status(Code.UNIMPLEMENTED):
        call(worker.channel, b"", method="Nothing")
    assert stats(worker.channel).ready


def test_a_backend_that_fails_or_cuts_a_group_says_so(worker):
    with status(Code.UNKNOWN, "broken"):
        call(worker.channel, bytes_of(Request((1,), max_tokens=8, stop=("break",))))
    worker.backend.finish = "cancelled"
    with status(Code.ABORTED, "cancelled"):
        call(worker.channel, bytes_of(REQUEST))
    worker.backend.finish = ""
    assert len(group_of(call(worker.channel, bytes_of(REQUEST)))) == 2


def test_answers_that_their_budget_has_cut_are_answers(worker):
    worker.backend.finish = "cancelled"
    (whole,) = fake_backend.answers(Request((7,), max_tokens=64), 0)
    budget = len(whole.tokens)
    (answer,) = group_of(call(worker.channel, bytes_of(Request((7,), max_tokens=64, budget=budget), "1")))
    assert answer.finish == "cancelled"
    assert budget < 64  # or the budget is not what bounds it
    with status(Code.ABORTED, "cancelled"):
        call(worker.channel, bytes_of(Request((7,), max_tokens=64, budget=budget + 1), "2"))


def test_a_request_that_comes_again_is_not_sampled_again(worker):
    worker.backend.delay_s = 0.3
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: call(worker.channel, bytes_of(REQUEST, "same")), range(4)))
    replies.append(call(worker.channel, bytes_of(REQUEST, "same")))
    assert len(set(replies)) == 1
    assert len(worker.backend.submitted) == 1
    call(worker.channel, bytes_of(REQUEST, "other"))
    assert len(worker.backend.submitted) == 2
    values = stats(worker.channel).values
    assert (values["answered"], values["repeated"]) == (2, 4)


def test_an_id_with_another_request_gets_no_foreign_answer(worker):
    other = Request((3, 2, 1), group=1, max_tokens=8)
    call(worker.channel, bytes_of(REQUEST, "same"))
    assert_same(group_of(call(worker.channel, bytes_of(other, "same"))), fake_backend.answers(other, 0))


def test_few_replies_are_remembered(worker, monkeypatch):
    size = 32 + len(call(worker.channel, bytes_of(REQUEST, "1")))  # and a digest of the request
    monkeypatch.setattr(server, "REMEMBERED", 2 * size)
    for id in ("2", "3", "1", "3"):
        call(worker.channel, bytes_of(REQUEST, id))
    assert len(worker.backend.submitted) == 4  # 1 was forgotten, 3 was not


def test_a_request_for_an_earlier_life_of_the_server_is_refused(worker):
    with status(Code.FAILED_PRECONDITION, "restarted"):
        call(worker.channel, bytes_of(REQUEST, "1", instance="earlier"))
    call(worker.channel, bytes_of(REQUEST, "1", instance=stats(worker.channel).instance))
    assert len(worker.backend.submitted) == 1


def test_room_is_bounded():
    with running(FakeBackend(delay_s=60), max_waiting=2) as worker, channel_to(worker.address) as channel:
        sample = channel.unary_unary("/jaxrl.Rollout/Sample")
        calls = [sample.future(bytes_of(REQUEST, str(i)), timeout=30) for i in range(2)]
        until(lambda: len(worker.backend.submitted) == 2)
        with status(Code.RESOURCE_EXHAUSTED, "2 groups are being sampled"):
            call(channel, bytes_of(REQUEST, "2"))
        assert stats(channel).values["running"] == 2
        calls[0].cancel()
        until(lambda: len(worker.backend.cancelled) == 1)
        worker.backend.delay_s = 0
        call(channel, bytes_of(REQUEST, "2"))


def test_a_deadline_and_a_cancelled_call_free_the_slots():
    with running(FakeBackend(delay_s=60)) as worker, channel_to(worker.address) as channel:
        sample = channel.unary_unary("/jaxrl.Rollout/Sample")
        with status(Code.DEADLINE_EXCEEDED):
            sample(bytes_of(REQUEST, "1"), timeout=0.2)
        until(lambda: len(worker.backend.cancelled) == 1)
        twice = [sample.future(bytes_of(REQUEST, "2"), timeout=30) for _ in range(2)]
        until(lambda: stats(channel).values["repeated"] == 1)
        twice[0].cancel()
        time.sleep(0.2)
        assert len(worker.backend.cancelled) == 1  # the other call still wants it
        twice[1].cancel()
        until(lambda: len(worker.backend.cancelled) == 2)
        until(lambda: stats(channel).values["running"] == 0)
        worker.backend.delay_s = 0  # what was cancelled is not taken for the answer
        assert_same(group_of(call(channel, bytes_of(REQUEST, "2"))), fake_backend.answers(REQUEST, 0))


def test_parts_come_back_at_the_deadline_of_who_takes_them(worker):
    worker.backend.delay_s, worker.backend.drawn = 60, 2
    whole = fake_backend.answers(Request((7,), 3, 64), 0)
    assert max(len(a.tokens) for a in whole) > 2
    group = group_of(call(worker.channel, bytes_of(Request((7,), 3, 64), deadline_s=0.2)))
    assert [len(a.tokens) for a in group] == [min(len(a.tokens), 2) for a in whole]
    assert {a.finish for a in group if len(a.tokens) == 2} == {"cancelled"}
    again = group_of(call(worker.channel, bytes_of(Request((7,), 3, 64, begun=group), "2", deadline_s=0.2)))
    assert [len(a.tokens) for a in again] == [min(len(a.tokens), 4) for a in whole]
    values = stats(worker.channel).values
    assert (values["cut"], values["running"], values["held_bytes"]) == (2, 0, 0)


def test_a_server_that_stops_gives_parts_to_who_takes_them(worker):
    worker.backend.delay_s, worker.backend.drawn = 60, 2
    sample = worker.channel.unary_unary("/jaxrl.Rollout/Sample")
    takes = sample.future(bytes_of(Request((7,), 3, 64), "1", deadline_s=50), timeout=10)
    other = sample.future(bytes_of(Request((7,), 3, 64), "2"), timeout=10)
    until(lambda: len(worker.backend.submitted) == 2)
    worker.loop.call_soon_threadsafe(worker.service.stop)
    assert max(len(a.tokens) for a in group_of(takes.result())) == 2
    with status(Code.ABORTED, "the server has cancelled the group"):
        other.result()


@pytest.mark.parametrize("field", ["version", "deadline_s", "id", "instance", "run", "stop", "begun"])
def test_what_is_no_part_of_the_request_itself_is_bounded_too(worker, field):
    message = wire.to_request_message(REQUEST, "1")
    wrong = {"version": [-1, 2**31], "deadline_s": [-1.0, float("nan"), 1e9, float("inf")]}
    for value in wrong.get(field, ["x" * 4097] if field in ("id", "instance", "run") else [2_000_000]):
        if field in ("stop", "begun"):  # small on the wire, large as objects
            data = message.SerializeToString() + {"stop": b"\x4a\x00", "begun": b"\x62\x00"}[field] * value
        else:
            data = bytes_of(REQUEST, **{"id": "1", field: value})
        start = time.monotonic()
        with status(Code.INVALID_ARGUMENT, f"^{field} is "):
            call(worker.channel, data)
        assert time.monotonic() - start < 5


def test_a_request_is_for_weights_of_a_run_and_a_least_version(worker):
    load(worker.channel, wire.to_chunks(fake_backend.leaves(), 4, "mine", "c"))
    assert group_of(call(worker.channel, bytes_of(REQUEST, run="mine", version=4)))[0].versions[0] == 4
    with status(Code.FAILED_PRECONDITION, "version=5: the weights are version 4"):
        call(worker.channel, bytes_of(REQUEST, run="mine", version=5))
    with status(Code.FAILED_PRECONDITION, "run='other': the weights are those of run 'mine'"):
        call(worker.channel, bytes_of(REQUEST, run="other"))


@pytest.mark.parametrize(("run", "client", "version"), [("other", "d", 9), ("mine", "d", 3)])
def test_a_group_under_way_is_of_one_run(worker, run, client, version):
    """Another run's weights, or older ones of a learner that resumes, while it is being drawn."""
    load(worker.channel, wire.to_chunks(fake_backend.leaves(), 4, "mine", "c"))
    worker.backend.delay_s = 0.6
    sample = worker.channel.unary_unary("/jaxrl.Rollout/Sample")
    bound = sample.future(bytes_of(REQUEST, "1", run="mine"), timeout=10)
    free = sample.future(bytes_of(REQUEST, "2"), timeout=10)
    until(lambda: len(worker.backend.submitted) == 2)
    worker.service.learner_seen = -1e9  # as if it had been silent for long
    load(worker.channel, wire.to_chunks(fake_backend.leaves(), version, run, client))
    with status(Code.FAILED_PRECONDITION, "run='mine'"):
        bound.result()
    assert len(group_of(free.result())) == 2


def test_memory_for_calls_is_bounded(worker, monkeypatch):
    need = len(bytes_of(REQUEST, "1")) + 2 * (server.ANSWER_BYTES + 8 * server.TOKEN_BYTES)
    monkeypatch.setattr(server, "ROOM", 2 * need)
    worker.backend.delay_s = 1.0
    sample = worker.channel.unary_unary("/jaxrl.Rollout/Sample")
    calls = [sample.future(bytes_of(REQUEST, str(i)), timeout=30) for i in range(2)]
    until(lambda: len(worker.backend.submitted) == 2)
    assert stats(worker.channel).values["held_bytes"] == 2 * need
    with status(Code.RESOURCE_EXHAUSTED, f"{2 * need} bytes are taken: no room for {need} more"):
        call(worker.channel, bytes_of(REQUEST, "2"))
    for done in calls:
        done.result()
    until(lambda: stats(worker.channel).values["held_bytes"] == 0)
    monkeypatch.setattr(server, "ROOM", 1)
    call(worker.channel, bytes_of(REQUEST, "3"))  # one is always served


def test_memory_for_calls_is_held_until_replies_are_read(worker, monkeypatch):
    large = pb.SampleReply(answers=[pb.Answer(finish="x" * 2**25)])  # more than sockets keep
    monkeypatch.setattr(wire, "to_reply", lambda _: large)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    with (
        slow_reader(port_of(worker)) as (port, release),
        grpc.insecure_channel(f"localhost:{port}", options) as channel,
    ):
        future = channel.unary_unary("/jaxrl.Rollout/Sample").future(bytes_of(REQUEST), timeout=30)
        until(lambda: worker.service.counts["answered"] == 1)
        time.sleep(0.3)
        assert stats(worker.channel).values["held_bytes"] > 0
        release()
        assert len(future.result()) == large.ByteSize()
    until(lambda: stats(worker.channel).values["held_bytes"] == 0)


# --- weights ----------------------------------------------------------------------------------------------------


def test_weights_are_swapped(worker):
    sent = fake_backend.leaves()
    reply = load(worker.channel, wire.to_chunks(sent, 3))
    assert (reply.version, reply.seconds) == (3, 0.25)
    assert list(worker.backend.loaded) == list(sent)
    for name, leaf in sent.items():
        assert worker.backend.loaded[name].dtype == leaf.dtype
        assert np.array_equal(worker.backend.loaded[name], leaf)
    assert stats(worker.channel).version == 3
    assert group_of(call(worker.channel, bytes_of(REQUEST)))[0].versions[0] == 3


def corrupt(chunks):
    chunks[2].data.data = b"\1" + chunks[2].data.data[1:]


DAMAGE = {
    (Code.DATA_LOSS, "chunk 1: its CRC32"): corrupt,
    (Code.DATA_LOSS, "sequence=2: expected 1"): lambda chunks: chunks.pop(2),
    (Code.DATA_LOSS, "7 bytes are missing"): lambda chunks: chunks.pop(-2),
    (Code.DATA_LOSS, "BLAKE2b"): lambda chunks: chunks.pop(),
    (Code.DATA_LOSS, "a data before the header"): lambda chunks: chunks.pop(0),
    (Code.DATA_LOSS, "no header"): lambda chunks: chunks.clear(),
    (Code.INVALID_ARGUMENT, "b dtype"): lambda chunks: setattr(chunks[0].header.leaves[2], "dtype", "float16"),
    (Code.INVALID_ARGUMENT, "a/scale shape"): lambda chunks: chunks[0].header.leaves[1].shape.append(2),
    (Code.FAILED_PRECONDITION, "version=3: 4 is loaded"): lambda chunks: setattr(chunks[0].header, "version", 3),
}


@pytest.mark.parametrize("wanted", DAMAGE, ids=lambda wanted: wanted[1])
def test_damaged_weights_leave_the_old_ones(worker, wanted):
    load(worker.channel, wire.to_chunks(fake_backend.leaves(0), 4))
    old, chunks = worker.backend.loaded, list(wire.to_chunks(fake_backend.leaves(1), 5))
    DAMAGE[wanted](chunks)
    with status(*wanted):
        load(worker.channel, chunks)
    assert worker.backend.loaded is old
    assert stats(worker.channel).version == 4
    assert load(worker.channel, wire.to_chunks(fake_backend.leaves(1), 5)).version == 5


def test_weights_that_are_garbage_or_that_the_backend_refuses(worker):
    with status(Code.INVALID_ARGUMENT, "4 bytes: expected a jaxrl.Chunk"):
        worker.channel.stream_unary("/jaxrl.Rollout/LoadWeights")(iter([b"\xff" * 4]), timeout=10)
    worker.backend.refuses = "no room"
    with status(Code.INVALID_ARGUMENT, "no room"):
        load(worker.channel, wire.to_chunks(fake_backend.leaves(), 1))
    assert stats(worker.channel).values["loaded"] == 0


def test_a_push_that_breaks_off_leaves_the_old_weights_and_room_for_the_next(worker):
    def endless():
        yield from list(wire.to_chunks(fake_backend.leaves(), 1))[:3]
        time.sleep(0.5)
        raise RuntimeError

    push = worker.channel.stream_unary("/jaxrl.Rollout/LoadWeights", pb.Chunk.SerializeToString)
    with pytest.raises(grpc.RpcError):
        push(endless(), timeout=5)
    assert worker.backend.version == 0
    assert load(worker.channel, wire.to_chunks(fake_backend.leaves(), 1)).version == 1


@pytest.mark.parametrize("slowly", [False, True])
def test_a_push_that_stalls_is_ended_and_its_memory_free(worker, monkeypatch, slowly):
    monkeypatch.setattr(server, "STALLED_S", 0.4)
    monkeypatch.setattr(server, "SLOWEST", 2**22)  # bytes a second: 0.6 s more for all of it
    monkeypatch.setattr(wire, "CHUNK", 2**16)
    going_on = threading.Event()

    def stalls():
        for chunk in list(wire.to_chunks(fake_backend.leaves(), 1))[: 99 if slowly else 2]:
            yield chunk
            going_on.wait(0.15 if slowly else 0)  # 6 s for all of it
        going_on.wait(20)

    start = time.monotonic()
    with status(Code.DEADLINE_EXCEEDED, "no chunk for 0.4 s, or less than"):
        load(worker.channel, stalls())
    assert time.monotonic() - start < 3
    going_on.set()
    gc.collect()
    assert not [x for x in gc.get_objects() if isinstance(x, wire.Assembly)]
    assert worker.backend.version == 0
    assert load(worker.channel, wire.to_chunks(fake_backend.leaves(), 1)).version == 1


# --- who may call -----------------------------------------------------------------------------------------------


def test_every_method_wants_the_token():
    with running(FakeBackend(), token="secret") as worker, channel_to(worker.address) as channel:
        for token in (None, "", "secret", "Bearer", "Bearer wrong", "Bearer secret2", "bearer secret"):
            for method in ("Sample", "Stats", "Nothing"):
                with status(Code.UNAUTHENTICATED, "Bearer"):
                    call(channel, bytes_of(REQUEST), token, method)
            with status(Code.UNAUTHENTICATED, "Bearer"):
                load(channel, wire.to_chunks(fake_backend.leaves(), 1))
        assert worker.backend.submitted == []
        assert worker.backend.version == 0
        assert_same(group_of(call(channel, bytes_of(REQUEST), "Bearer secret")), fake_backend.answers(REQUEST, 0))


def push(channel, token=None):
    method = channel.stream_unary("/jaxrl.Rollout/LoadWeights", pb.Chunk.SerializeToString, pb.LoadReply.FromString)
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    return method(wire.to_chunks(fake_backend.leaves(), 1, "mine"), timeout=10, metadata=metadata)


@pytest.mark.parametrize("token", ["secret", None])
def test_pushes_want_a_token_of_their_own(token):
    """None: whoever asks may sample, as on loopback."""
    with running(FakeBackend(), token=token, push_token="weights") as worker, channel_to(worker.address) as channel:
        for wrong, code in ((token, Code.PERMISSION_DENIED), ("wrong", Code.UNAUTHENTICATED if token else None)):
            with status(code or Code.PERMISSION_DENIED, "token"):
                push(channel, wrong)
        assert worker.backend.version == 0
        assert push(channel, "weights").version == 1
        said = lambda secret: None if secret is None else f"Bearer {secret}"
        for known in (token, "weights"):
            assert len(group_of(call(channel, bytes_of(REQUEST), said(known)))) == 2
        # Who may only sample does not speak for the learner.
        for request in (pb.StatsRequest(run="mine"), pb.StatsRequest(run="mine", leaves=True)):
            seen = worker.service.learner_seen
            call(channel, request.SerializeToString(), said(token), "Stats")
            call(channel, bytes_of(REQUEST, "2", run="mine"), said(token))
            assert worker.service.learner_seen == seen
        call(channel, pb.StatsRequest(run="mine", leaves=True).SerializeToString(), "Bearer weights", "Stats")
        assert worker.service.learner_seen < 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_no_wide_host_without_a_token(host):
    with pytest.raises(ValueError, match=f"host is '{host}'; expected 127.0.0.1"):
        server.check_listen(host, None, None, None)
    with pytest.raises(ValueError, match=f"host is '{host}'; expected 127.0.0.1 .* without a token for pushes"):
        server.check_listen(host, "secret", None, None)
    with pytest.raises(ValueError, match="push_token is 'the token'; expected one of its own"):
        server.check_listen(host, "secret", None, None, "secret")
    server.check_listen(host, "secret", None, None, "another")


def test_loopback_needs_no_token():
    for host in ("127.0.0.1", "::1", "localhost"):
        server.check_listen(host, None, None, None)


def test_bad_ways_to_listen():
    with pytest.raises(ValueError, match="token is .*not blank") as error:
        server.check_listen("127.0.0.1", " ", None, None)
    assert "' '" not in str(error.value)
    with pytest.raises(ValueError, match="cert, key"):
        server.check_listen("127.0.0.1", None, str(FAKE), None)
    with pytest.raises(ValueError, match="key is 'nowhere'; expected a file"):
        server.check_listen("127.0.0.1", None, str(FAKE), "nowhere")
    with pytest.raises(ValueError, match="max_waiting is 0"):
        server.Service(FakeBackend(), 0)


@pytest.mark.parametrize("name", ["port", "metrics_port"])
@pytest.mark.parametrize("value", [-1, 65536, 99999])
def test_a_number_that_is_no_port_is_refused_before_anything_is_loaded(name, value):
    loaded = []
    with pytest.raises(ValueError, match=f"{name} is {value}; expected a port, 0 .* to 65535"):
        server.serve(lambda: loaded.append(1), **{name: value})
    assert not loaded


def test_a_port_that_is_taken(worker):
    with pytest.raises(OSError, match="cannot listen on 127.0.0.1"), running(FakeBackend(), port=port_of(worker)):
        pass


def port_of(worker) -> int:
    return int(worker.address.rpartition(":")[2])


# --- HTTP -------------------------------------------------------------------------------------------------------


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_readiness_and_metrics(worker):
    service = None
    with server.http("127.0.0.1", 0, None, lambda: service) as port:
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz")[0] == 503
        assert get(port, "/metrics")[0] == 200
        service = worker.service
        call(worker.channel, bytes_of(REQUEST))
        assert get(port, "/readyz")[0] == 200
        code, text = get(port, "/metrics")
        assert code == 200
        assert {"jaxrl_answered 1.0", "jaxrl_slots 4.0", "jaxrl_running 0.0"} <= set(text.splitlines())
        assert "process_cpu_seconds_total" in text  # the default registry's
        assert get(port, "/other")[0] == 404
        service.ready = False
        assert get(port, "/readyz")[0] == 503


def test_metrics_want_the_token():
    with server.http("127.0.0.1", 0, "secret", lambda: None) as port:
        assert get(port, "/metrics")[0] == get(port, "/metrics", Authorization="Bearer wrong")[0] == 401
        assert get(port, "/metrics", Authorization="Bearer secret")[0] == 200
        assert get(port, "/healthz")[0] == 200


def test_silent_connections_take_few_threads(monkeypatch):
    with server.http("127.0.0.1", 0, None, lambda: None) as port:
        before = threading.active_count()
        monkeypatch.setattr(server, "MAX_THREADS", before + 5)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
        until(lambda: sum(not closed(s) for s in silent) == 5)
        assert threading.active_count() == before + 5
        for s in silent:
            s.close()
        until(lambda: threading.active_count() == before)
        assert get(port, "/healthz")[0] == 200


def closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


# --- processes --------------------------------------------------------------------------------------------------


def test_a_server_ends_on_sigterm_when_its_groups_are_answered():
    with process(FAKE, "--port", 0, "--delay-s", 1, "--metrics-port", 0) as child:
        metrics = int(child.stdout.readline().rpartition(":")[2])
        with channel_to(listening(child)) as channel:
            assert get(metrics, "/readyz") == (200, "ready\n")
            call_ = channel.unary_unary("/jaxrl.Rollout/Sample").future(bytes_of(REQUEST), timeout=10)
            until(lambda: stats(channel).values["running"] == 1)
            child.send_signal(signal.SIGTERM)
            assert_same(group_of(call_.result()), fake_backend.answers(REQUEST, 0))
        assert child.wait(10) == 0
