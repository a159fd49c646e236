"""The client: every sample exactly once and in order, whatever the servers do, and what it says when it cannot."""

import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager

import fake_backend
import numpy as np
import pytest
from cases import free_port
from fake_backend import FAKE, FakeBackend, assert_same, child_of, listening, process, running, until

from jaxrl_llm.sampler import client as clients
from jaxrl_llm.sampler import peers, wire
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler.client import Client
from jaxrl_llm.sampler.peers import address
from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.serving import server as servers


@contextmanager
def client_of(*servers: str, **options):
    client = Client(servers, **options)
    try:
        yield client
    finally:
        client.close()


def requests_(n: int) -> list[Request]:
    return [Request((1 + i % 9, i // 9 % 50), group=1 + i % 3, max_tokens=8, draw=i) for i in range(n)]


def assert_answered(groups, requests, version: int = 0):
    assert len(groups) == len(requests)
    for group, request in zip(groups, requests, strict=True):
        assert_same(group, fake_backend.answers(request, version))


# --- in this process --------------------------------------------------------------------------------------------


def test_groups_come_in_order_from_all_servers():
    requests = requests_(60)
    with running(FakeBackend(0.01)) as a, running(FakeBackend(0.01)) as b, client_of(a.address, b.address) as client:
        until(lambda: all(row["answers"] for row in client.stats()))
        assert_answered(client.ordered(requests), requests)
        drawn = [r.draw for worker in (a, b) for r in worker.backend.submitted]
        assert sorted(drawn) == list(range(60))
        assert min(len(a.backend.submitted), len(b.backend.submitted)) > 10
        assert client.ordered([]) == []
        twice = [requests[0], requests[1], requests[0]]
        assert_answered(client.ordered(twice), twice)


def test_requests_are_pulled_only_when_there_is_room():
    requests = iter(requests_(50))
    pulled = itertools.count()
    with running(FakeBackend(0.05)) as a, client_of(a.address, in_flight=4) as client:
        groups = client.sample(lambda: next(pulled) >= 0 and next(requests, None))
        for seen, _ in enumerate(itertools.islice(groups, 20), start=1):
            assert next(pulled) <= 2 * seen - 1 + 4 + 1  # counts its own calls too
            assert len(a.backend.submitted) <= seen + 4
        groups.close()
        assert a.service.counts["answered"] < 30


def test_more_is_asked_again_after_each_group():
    left = [Request((1,), max_tokens=4, draw=0)]
    draws = []
    with running(FakeBackend()) as a, client_of(a.address) as client:
        for request, _ in client.sample(lambda: left.pop() if left else None):
            draws.append(request.draw)
            if request.draw < 3:
                left.append(Request((1,), max_tokens=4, draw=request.draw + 1))
    assert draws == [0, 1, 2, 3]


def test_more_is_asked_again_while_a_straggler_runs():
    """A learner that catches up has room for more; nobody tells the client so."""
    backend = FakeBackend(60.0)
    late, begun = Request((2,), max_tokens=4, draw=1), time.monotonic()
    left = [Request((1,), max_tokens=4, draw=0)]

    def next_request():
        if left:
            return left.pop()
        if len(backend.submitted) == 1 and time.monotonic() > begun + 1:
            backend.delay_s = 0.0
            return late
        return None

    with running(backend) as a, client_of(a.address) as client:
        groups = client.sample(next_request)
        assert next(groups)[0] is late
        groups.close()


def test_closing_the_iterator_cancels_what_is_in_flight():
    with running(FakeBackend(0.3)) as a, client_of(a.address, in_flight=8) as client:
        requests = iter(requests_(100))
        groups = client.sample(lambda: next(requests, None))
        next(groups)
        a.backend.delay_s = 60
        for _ in range(7):
            next(groups)
        until(lambda: len(a.backend.submitted) == 15)  # room is filled again before each group
        groups.close()
        until(lambda: len(a.backend.cancelled) == 7)
        assert a.service.counts["answered"] == 8
        assert [server.in_flight for server in client._servers] == [0]
        a.backend.delay_s = 0
        assert_answered(client.ordered(requests_(9)), requests_(9))


def test_a_server_without_room_is_asked_again():
    requests = requests_(20)
    with running(FakeBackend(0.02), max_waiting=2) as a, client_of(a.address, in_flight=6, retries=0) as client:
        assert_answered(client.ordered(requests), requests)
        assert 0 < a.service.counts["refused"] < 50  # it is left alone for a while each time


WRONG = {
    "max_tokens is 65; expected at most 64": Request((1,), max_tokens=65),  # by the server
    "temperature": Request((1,), sampling=clients.requests.Sampling(-1.0)),
    "request is '.* bytes'; expected at most 5242880 bytes": Request((2**30,) * (wire.MAX_MESSAGE // 5 + 1)),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_served_is_a_value_error(message):
    with running(FakeBackend()) as a, client_of(a.address, in_flight=1) as client:
        with pytest.raises(ValueError, match=message):
            client.ordered([WRONG[message]])
        assert a.backend.submitted == []
        with pytest.raises(ValueError, match=message):
            client.ordered([*requests_(2), WRONG[message]])
        assert [server.in_flight for server in client._servers] == [0]
        assert_answered(client.ordered(requests_(2)), requests_(2))


def test_a_wrong_token_is_a_permission_error():
    with running(FakeBackend(), token="secret") as a:
        with client_of(a.address, token="wrong") as client:
            with pytest.raises(PermissionError, match=f"{a.address}: authorization"):
                client.ordered(requests_(1))
            with pytest.raises(PermissionError, match="authorization"):
                client.push(fake_backend.leaves(), 1)
            assert client.stats() == [{"server": a.address, "answers": False}]
        with client_of(a.address, token="secret") as client:
            assert_answered(client.ordered(requests_(3)), requests_(3))


def test_patience_ends_with_the_names_of_the_servers():
    names = [f"localhost:{free_port()}" for _ in range(2)]
    with client_of(*names, patience_s=0.5) as client:
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=f"0.5 s: {names[0]}: UNAVAILABLE.*{names[1]}: UNAVAILABLE"):
            client.ordered(requests_(1))
        assert 0.5 <= time.monotonic() - start < 10


def test_a_request_that_always_fails_is_given_up():
    with running(FakeBackend()) as a, client_of(a.address, retries=2) as client:
        with pytest.raises(ConnectionError, match=f"failed 3 times, at last on {a.address}: UNKNOWN.*broken"):
            client.ordered([Request((1,), max_tokens=4, stop=("break",))])
        assert len(a.backend.submitted) == 3


def test_a_server_too_slow_for_the_deadline_is_passed_over():
    requests = requests_(12)
    with (
        running(FakeBackend(60)) as slow,
        running(FakeBackend()) as a,
        client_of(slow.address, a.address, deadline_s=0.5, retries=50) as client,
    ):
        until(lambda: len(client._able()) == 2)
        assert_answered(client.ordered(requests), requests)
        assert len(slow.backend.submitted) >= 1
        until(lambda: len(slow.backend.cancelled) == len(slow.backend.submitted))


def test_a_closed_client_says_so():
    with running(FakeBackend()) as a:
        client = Client([a.address])
        client.close()
        with pytest.raises(ValueError, match="closed"):
            client.ordered(requests_(1))
        with pytest.raises(ValueError, match="closed"):
            client.push(fake_backend.leaves(), 1)


def test_closing_ends_a_call_in_another_thread():
    with running(FakeBackend(60)) as a:
        client, errors = Client([a.address]), []

        def work():
            with pytest.raises(ValueError, match="closed") as error:
                client.ordered(requests_(3))
            errors.append(error.value)

        thread = threading.Thread(target=work)
        thread.start()
        until(lambda: len(a.backend.submitted) == 3)
        client.close()
        thread.join(5)
        assert len(errors) == 1
        until(lambda: len(a.backend.cancelled) == 3)


# --- answers that cannot be ---------------------------------------------------------------------------------------


def changed(group, **columns):
    return (dataclasses.replace(group[0], **{n: f(getattr(group[0], n)) for n, f in columns.items()}), *group[1:])


LIES = {
    "token ids in": lambda group: changed(group, tokens=lambda x: x + 50),
    "finite log-probs": lambda group: changed(group, logp=lambda x: x * np.nan),
    "none above 0": lambda group: changed(group, logp=lambda x: -x),
    "as many log-probs": lambda group: changed(group, logp=lambda x: x[1:]),
    "the versions pushed": lambda group: changed(group, versions=lambda x: x + 1),
    "5 to 5, the versions pushed": lambda group: changed(group, versions=lambda x: x - 1),
    "finish is 'done'": lambda group: changed(group, finish=lambda x: "done"),
    "at most 8": lambda group: changed(group, **{n: lambda x: np.resize(x, 9) for n in ("tokens", "logp", "versions")}),
}


@pytest.mark.parametrize("message", LIES)
def test_a_server_that_lies_is_set_aside_and_the_others_go_on(message):
    requests, liar = requests_(12), FakeBackend()
    liar.lie = LIES[message]
    with (
        running(liar) as bad,
        running(FakeBackend()) as good,
        client_of(bad.address, good.address, vocab_size=50) as client,
    ):
        client.push(fake_backend.leaves(), 5)
        until(lambda: len(client._able()) == 2)
        with pytest.warns(UserWarning, match=f"server {bad.address} is set aside: its reply cannot be: .*{message}"):
            assert_answered(client.ordered(requests), requests, version=5)
        assert len(liar.submitted) >= 1
        asked = len(liar.submitted)
        client.push(fake_backend.leaves(), 6)  # which does not wait for it
        assert liar.version == 5
        assert_answered(client.ordered(requests), requests, version=6)
        assert len(liar.submitted) == asked
        assert message in client.stats()[0]["aside"]


def test_garbage_is_a_lie_and_with_no_server_left_that_is_said(monkeypatch):
    monkeypatch.setattr(wire, "to_reply", lambda _: pb.StatsReply(instance="\x7f" * 9))
    with (
        running(FakeBackend()) as a,
        client_of(a.address) as client,
        pytest.warns(UserWarning, match="set aside"),
        pytest.raises(ConnectionError, match=f"every server is set aside: {a.address}: its reply cannot be"),
    ):
        client.ordered(requests_(2))


def test_a_server_that_says_it_has_loaded_other_weights_is_set_aside(monkeypatch):
    liar, real = FakeBackend(), servers.Service.load_weights

    async def load_weights(service, chunks, context):
        reply = await real(service, chunks, context)
        reply.version += service.backend is liar
        return reply

    monkeypatch.setattr(servers.Service, "load_weights", load_weights)
    with running(liar) as a, running(FakeBackend()) as b, client_of(a.address, b.address) as client:
        with pytest.warns(UserWarning, match=f"{a.address} is set aside: it has loaded version 6 in place of 5"):
            client.push(fake_backend.leaves(), 5)
        assert_answered(client.ordered(requests_(4)), requests_(4), version=5)
        assert not liar.submitted


def test_a_server_with_older_weights_than_were_pushed_gets_them_again():
    with running(FakeBackend()) as a, client_of(a.address) as client:
        client.push(fake_backend.leaves(), 5)
        a.backend.version = 4  # as if the run's learner had resumed, and gone again
        assert_answered(client.ordered(requests_(4)), requests_(4), version=5)
        assert a.service.counts["loaded"] == 2


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_parts_that_come_back_at_a_deadline_go_on():
    requests = [Request((1 + i,), group=3, max_tokens=20, draw=i) for i in range(4)]
    assert max(len(a.tokens) for r in requests for a in fake_backend.answers(r, 0)) > 12
    slow = FakeBackend(60)
    slow.drawn = 4
    with running(slow) as a, client_of(a.address, deadline_s=0.25, retries=0) as client:
        assert_answered(client.ordered(requests), requests)
        assert len(slow.submitted) > 8
        assert all(r.begun for r in slow.submitted[4:])
        assert a.service.counts["cut"] == len(slow.submitted)


def test_parts_of_a_request_with_a_budget_are_given_to_who_asked():
    slow, request = FakeBackend(60), Request((1,), group=3, max_tokens=20, budget=10)
    slow.drawn = 4
    with running(slow) as a, client_of(a.address, deadline_s=0.25, retries=0) as client:
        [group] = client.ordered([request])
    assert max(len(a.tokens) for a in group) == 4
    assert "cancelled" in {a.finish for a in group}


def test_what_would_be_too_much_to_be_sent_again_does_not_come_back_in_parts():
    small, large = (Request((1,), group=g, max_tokens=8192) for g in (16, 64))
    deadlines = [peers.Outgoing(r, 480.0).message.deadline_s for r in (small, large)]
    assert deadlines == [384.0, 0.0]


# --- weights ----------------------------------------------------------------------------------------------------


def test_a_push_reaches_every_server():
    sent = fake_backend.leaves()
    with running(FakeBackend()) as a, running(FakeBackend()) as b, client_of(a.address, b.address) as client:
        result = client.push(sent, 5)
        assert result["bytes"] == 2 * sum(leaf.nbytes for leaf in sent.values())
        assert 0 < result["seconds"] < 5
        for worker in (a, b):
            assert all(np.array_equal(worker.backend.loaded[name], leaf) for name, leaf in sent.items())
        assert [row["version"] for row in client.stats()] == [5, 5]
        assert_answered(client.ordered(requests_(9)), requests_(9), version=5)
        client.push(fake_backend.leaves(1), 5)  # the same version again, other weights
        assert np.array_equal(b.backend.loaded["b"], fake_backend.leaves(1)["b"])
        with pytest.raises(ValueError, match="version is 4; expected at least 5"):
            client.push(sent, 4)


def test_a_probe_is_answered_by_every_server_that_is_there():
    probe = Request((3, 4), group=1, max_tokens=8, draw=5)
    with running(FakeBackend()) as a, running(FakeBackend()) as b, client_of(a.address, b.address) as client:
        client.push(fake_backend.leaves(), 5)
        answered = client.on_each(probe)
        assert list(answered) == [a.address, b.address]
        for group in answered.values():
            assert_answered([group], [probe], version=5)
        assert [len(worker.backend.submitted) for worker in (a, b)] == [1, 1]
        assert client.on_each(Request((3, 4), stop=("unservable",))) == {}  # what a server refuses is no answer


def test_weights_that_a_server_refuses():
    with running(FakeBackend()) as a, client_of(a.address) as client:
        with pytest.raises(ValueError, match=re.escape(f"{a.address}: leaves is ")):
            client.push({"other": np.zeros(3)}, 1)
        client.push(fake_backend.leaves(), 1)
        a.backend.version = 7
        with pytest.raises(ValueError, match="version=2: 7 is loaded"):
            client.push(fake_backend.leaves(), 2)
        client.push(fake_backend.leaves(), 8)
        assert_answered(client.ordered(requests_(3)), requests_(3), version=8)


def test_a_second_learner_is_refused_while_the_first_is_there():
    with running(FakeBackend()) as a, client_of(a.address, run="second") as second:
        with client_of(a.address, run="first") as first:
            first.push(fake_backend.leaves(), 5)
            with pytest.raises(ValueError, match=f"{a.address}: run='second': the learner of run 'first' was here 0 s"):
                second.push(fake_backend.leaves(1), 0)
            assert_answered(first.ordered(requests_(3)), requests_(3), version=5)
        second.push(fake_backend.leaves(1), 0)  # at a version of its own; the first has said that it leaves
        assert_answered(second.ordered(requests_(3)), requests_(3), version=0)


def test_a_learner_that_resumes_takes_over_from_itself_and_a_silent_one_loses_its_server(monkeypatch):
    with running(FakeBackend()) as a, client_of(a.address, run="first") as killed:
        killed.push(fake_backend.leaves(), 5)
        with client_of(a.address, run="first") as resumed:
            resumed.push(fake_backend.leaves(), 3)  # from its last checkpoint
            assert_answered(resumed.ordered(requests_(3)), requests_(3), version=3)
        with client_of(a.address, run="other") as other:
            other.push(fake_backend.leaves(), 0)
            with pytest.raises(ValueError, match="run='first': the learner of run 'other'"):  # no foreign answers
                killed.ordered(requests_(1))
            monkeypatch.setattr(wire, "LEARNER_S", 0.0)  # as if the other had not been heard of for long
            assert_answered(killed.ordered(requests_(3)), requests_(3), version=5)


def test_a_learner_that_trains_for_long_keeps_its_server(monkeypatch):
    monkeypatch.setattr(wire, "LEARNER_S", 1.5)
    with running(FakeBackend()) as a, client_of(a.address, run="first") as first:
        first.push(fake_backend.leaves(), 5)
        time.sleep(2.5)
        with client_of(a.address) as second, pytest.raises(ValueError, match="the learner of run 'first' was here"):
            second.push(fake_backend.leaves(1), 0)


def test_a_server_that_restarts_while_nobody_calls_gets_its_weights_before_a_request():
    port = free_port()
    with running(FakeBackend(), port=port) as a, client_of(a.address, f"localhost:{free_port()}") as client:
        assert client.push(fake_backend.leaves(), 0)["bytes"] == wire.size(fake_backend.leaves())  # one is down
        assert_answered(client.ordered(requests_(3)), requests_(3))
        a.service.instance, a.backend.loaded = "another life", {}  # as if it had restarted, with the same version
        assert_answered(client.ordered(requests_(3)), requests_(3))
        assert a.backend.loaded != {}
        assert len(a.backend.submitted) == 6


def test_a_transfer_that_is_damaged_is_repeated(monkeypatch):
    damaged = iter([True])
    real = wire.to_chunks

    def to_chunks(*args):
        for chunk in real(*args):
            if chunk.WhichOneof("part") == "data" and next(damaged, False):
                chunk.data.crc32 ^= 1
            yield chunk

    monkeypatch.setattr(wire, "to_chunks", to_chunks)
    with running(FakeBackend()) as a, client_of(a.address) as client:
        assert client.push(fake_backend.leaves(), 3)["bytes"] == 0
        assert_answered(client.ordered(requests_(3)), requests_(3), version=3)
        assert a.service.counts["loaded"] == 1


# --- addresses and options --------------------------------------------------------------------------------------


def test_addresses():
    assert address("worker-1.lan:080") == "worker-1.lan:80"
    assert address("[::1]:65535") == "[::1]:65535"
    assert address("[localhost]:1") == "localhost:1"


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "::1:80", "http://a:1"])
def test_bad_addresses(text):
    with pytest.raises(ValueError, match="server is .*expected host:port"):
        address(text)


BAD = [{"deadline_s": 0}, {"in_flight": 0}, {"retries": -1}, {"patience_s": 0}, {"ca": "nowhere"}]


@pytest.mark.parametrize("options", BAD, ids=lambda options: next(iter(options)))
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Client(["localhost:1"], **options)


@pytest.mark.parametrize("servers", [[], ["localhost:1", "localhost:1"]])
def test_bad_servers(servers):
    with pytest.raises(ValueError, match="servers"):
        Client(servers)


# --- TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {cert}"
    subprocess.run([*command.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    return cert, key


def test_tls(certificate):
    cert, key = certificate
    with running(FakeBackend(), token="secret", cert=cert, key=key) as a:
        with client_of(a.address, token="secret", ca=cert) as client:
            client.push(fake_backend.leaves(), 2)
            assert_answered(client.ordered(requests_(5)), requests_(5), version=2)
        for options in ({"ca": str(key)}, {}):  # no trust, no TLS
            with (
                client_of(a.address, token="secret", patience_s=0.5, **options) as client,
                pytest.raises(ConnectionError, match="UNAVAILABLE"),
            ):
                client.ordered(requests_(1))


# --- processes that die and hang --------------------------------------------------------------------------------


def test_servers_killed_under_load_lose_nothing():
    ports, requests = [free_port(), free_port()], requests_(300)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(process(FAKE, "--port", port, "--delay-s", 0.05, "--supervised")) for port in ports
        ]
        names = [listening(worker).replace("127.0.0.1", "localhost") for worker in workers]
        client = stack.enter_context(client_of(*names, in_flight=4))
        client.push(fake_backend.leaves(), 3)
        left, groups, kills = iter(requests), {}, {60: workers[0], 120: workers[1]}
        for request, group in client.sample(lambda: next(left, None)):
            assert request.draw not in groups
            groups[request.draw] = group
            if worker := kills.get(len(groups)):
                os.kill(child_of(worker.pid), signal.SIGKILL)
        # version 3: the servers that came back had been given the weights before they got requests
        assert_answered([groups[i] for i in range(300)], requests, version=3)
        until(lambda: [row.get("version") for row in client.stats()] == [3, 3])


@pytest.mark.slow
def test_ordered_survives_two_kills_of_the_only_server():
    port, requests, answered = free_port(), requests_(200), []
    with (
        process(FAKE, "--port", port, "--delay-s", 0.05, "--supervised") as worker,
        client_of(listening(worker), in_flight=4) as client,
    ):

        def kill_twice():
            for _ in range(2):
                before = len(answered)
                until(lambda before=before: len(answered) > before + 20)  # those that the first has cut among them
                os.kill(child_of(worker.pid), signal.SIGKILL)
                listening(worker)

        client.push(fake_backend.leaves(), 1)
        killer, left = threading.Thread(target=kill_twice), iter(requests)
        killer.start()
        for request, group in client.sample(lambda: next(left, None)):
            answered.append(request.draw)
            assert_same(group, fake_backend.answers(request, 1))
        killer.join()
        assert sorted(answered) == list(range(200))


def test_a_request_that_kills_two_servers_is_not_sent_to_a_third():
    """The others that were in flight with it are answered, one at a time where it has been."""
    requests, answered = requests_(40), []
    deadly = Request((7, 7, 7), group=2, max_tokens=8, stop=("die",), draw=40)
    with ExitStack() as stack:
        ports = [free_port() for _ in range(3)]
        workers = [stack.enter_context(process(FAKE, "--port", p, "--supervised", "--delay-s", 0.1)) for p in ports]
        names = [listening(worker) for worker in workers]
        client = stack.enter_context(client_of(*names, in_flight=3, patience_s=60))
        until(lambda: len(client._able()) == 3)
        left = iter([*requests[:10], deadly, *requests[10:]])
        drawn = (
            (r.draw, assert_same(g, fake_backend.answers(r, 0))) for r, g in client.sample(lambda: next(left, None))
        )
        with pytest.raises(
            ConnectionError, match="prompt of 3 tokens, group of 2, seed 0, draw 40.: 127.0.0.1.*, 127.0.0.1"
        ):
            answered.extend(drawn)
        answered = [draw for draw, _ in answered]
        assert sum(map(deaths, workers)) == 2
        rest = [r for r in requests if r.draw not in answered]
        assert_answered(client.ordered(rest), rest)


def test_requests_that_may_have_killed_a_server_are_sent_one_at_a_time():
    one, two, fresh = (peers.Outgoing(r, 60.0) for r in requests_(3))
    with running(FakeBackend(60)) as a, client_of(a.address) as client:
        until(lambda: client._able())
        [server] = client._servers
        for outgoing in (one, two):
            outgoing.lost.append(peers.Sent(server, "an earlier life", 0, False))
        assert client._able(one) == client._able(two) == client._able(fresh) == [server]
        call, sent = client._send(one)
        assert client._able(two) == []
        assert client._able(fresh) == [server]
        call.cancel()
        client._release(sent)
        assert client._able(two) == [server]
        two.lost.append(peers.Sent(server, server.instance, 0, False))
        assert client._able(two) == [server]  # the server has not died: the connection has
        server.up, server.down_since = False, time.monotonic()
        assert two.deaths == 2  # perhaps
        server.down_since -= peers.DEAD_S + 1
        with pytest.raises(ConnectionError, match="two servers died with one request in flight .*draw 1"):
            client._able(two)


def deaths(worker) -> int:
    """How often a supervisor has started its server again."""
    os.set_blocking(worker.stderr.fileno(), False)
    try:
        return os.read(worker.stderr.fileno(), 2**16).count(b"starting it again")
    except BlockingIOError:
        return 0


def test_a_server_that_hangs_is_passed_over_and_comes_back():
    requests = requests_(40)
    with (
        process(FAKE, "--port", 0, "--delay-s", 0.02) as hangs,
        running(FakeBackend(0.02)) as a,
        client_of(listening(hangs), a.address, deadline_s=1.0, in_flight=4) as client,
    ):
        client.push(fake_backend.leaves(), 1)
        left, draws = iter(requests), []
        for request, group in client.sample(lambda: next(left, None)):
            draws.append(request.draw)
            assert_same(group, fake_backend.answers(request, 1))
            if len(draws) == 5:
                hangs.send_signal(signal.SIGSTOP)
        assert sorted(draws) == list(range(40))
        assert [row["answers"] for row in client.stats()] == [False, True]
        assert client.push(fake_backend.leaves(), 2)["bytes"] == wire.size(fake_backend.leaves())
        hangs.send_signal(signal.SIGCONT)
        until(lambda: [row.get("version") for row in client.stats()] == [2, 2])
        assert_answered(client.ordered(requests), requests, version=2)
