"""A server under hostile calls from three peers, without a token, with the one for sampling and with the one for
pushes: every bad call gets a status that says why, and a good client's answers are those of a quiet server.

The bad calls are made from the fields of the protocol, with values from the edges of their types, and by hand.
"""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import grpc
import jax
import numpy as np
import pytest
from cases import free_port
from fake_backend import until
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from test_load import EXPERIMENT, memory

from jaxrl_llm import config as configs
from jaxrl_llm.models import transformer
from jaxrl_llm.sampler import decode, weights, wire
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler.client import Client, named
from jaxrl_llm.sampler.requests import Request, check_group
from jaxrl_llm.sampler.sampling import Sampling

pytest.importorskip("jetstream")
from jetstream.core.proto import jetstream_pb2

Code = grpc.StatusCode
TOKENS = {"nobody": None, "sampler": "may sample", "pusher": "may push"}
SAMPLE, LOAD, STATS = (f"/{wire.SERVICE}/{name}" for name in ("Sample", "LoadWeights", "Stats"))
DECODE, HEALTH = (f"/jetstream_proto.Orchestrator/{name}" for name in ("Decode", "HealthCheck"))
GOOD = Request((5, 6, 7), group=2, max_tokens=12, sampling=Sampling(0.7), draw=1)
REFUSED = {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.DATA_LOSS}


# --- the server and who is good ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "tiny.py"
    path.write_text(EXPERIMENT)
    return path, configs.load(path)


@pytest.fixture(scope="module")
def params(config):
    return transformer.init(config[1].model, jax.random.key(7))


@pytest.fixture(scope="module")
def server(config):
    """Process and address."""
    port = free_port()
    command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", config[0], "--port", port, "--unwatched"]
    secrets = {"JAXRL_TOKEN": TOKENS["sampler"], "JAXRL_PUSH_TOKEN": TOKENS["pusher"]}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    child = subprocess.Popen(list(map(str, command)), env={**os.environ, "XLA_FLAGS": "", **secrets}, **pipes)
    assert any(line.startswith("listening") for line in child.stdout)
    yield child, f"127.0.0.1:{port}"
    child.terminate()
    assert child.wait(30) == 0


@pytest.fixture(scope="module")
def quiet(config, params):
    """Requests of a good client and what a sampler that nobody disturbs answers to them."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(2, 98) for _ in range(n)) for n in (1, 5, 20, 31)]
    asked = [Request(prompts[i % 4], 1 + i % 2, (8, 30)[i // 2 % 2], Sampling(0.7), draw=i) for i in range(12)]
    model = config[1].model
    engine = decode.LocalEngine(model, config[1].tokenizer(), weights.push(model, params, None), slots=16)
    return asked, decode.generate(engine, asked)


@contextmanager
def good_client(config, params, server, quiet):
    """Asks again and again, meanwhile; gives the client, and the number of answers that were right."""
    process, address = server
    client = Client([address], token=TOKENS["sampler"], push_token=TOKENS["pusher"], run="good", vocab_size=112)
    asked, expected = quiet
    right, errors, over = [0], [], threading.Event()

    def run():
        try:
            while not over.is_set():
                for group, wanted in zip(client.ordered(asked), expected, strict=True):
                    for a, b in zip(group, wanted, strict=True):
                        assert (a.tokens.tolist(), a.finish) == (b.tokens.tolist(), b.finish)
                        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
                    right[0] += 1
        except BaseException as error:
            errors.append(error)

    client.push(named(weights.push(config[1].model, params, None).params), 3)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: right[0] >= len(asked) or errors, 120)
        yield client, right
    finally:
        over.set()
        thread.join()
        client.close()
    assert not errors, errors
    assert process.poll() is None


# --- bad calls -----------------------------------------------------------------------------------------------------


class Peer:
    def __init__(self, address: str, token: str | None):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options)
        self.how = {"timeout": 60, "metadata": () if token is None else (("authorization", f"Bearer {token}"),)}

    def call(self, method: str, data: bytes | list[bytes]) -> tuple[Code, str, bytes]:
        """Status, details and reply."""
        try:
            if method == LOAD:
                return Code.OK, "", self.channel.stream_unary(method)(iter(data), **self.how)
            if method == DECODE:
                return Code.OK, "", b"".join(self.channel.unary_stream(method)(data, **self.how))
            return Code.OK, "", self.channel.unary_unary(method)(data, **self.how)
        except grpc.RpcError as error:
            return error.code(), error.details(), b""


@pytest.fixture
def peers(server):
    made = {name: Peer(server[1], token) for name, token in TOKENS.items()}
    yield made
    for peer in made.values():
        peer.channel.close()


INTS = (-1, 0, -(2**31), 2**31, 2**32, -(2**63), 2**63 - 1)
REALS = (float("nan"), float("inf"), float("-inf"), -1.0, 1e-39, 5e-324, 1e-46, 1e39, 1.7e308)
TEXTS = ("", "\0", "x" * 5000, "\ufffd" * 2000, "eos\n")


def edges(field: FieldDescriptor) -> tuple:
    """Values of a field from the edges of its type."""
    kinds = FieldDescriptor
    if field.cpp_type in (kinds.CPPTYPE_FLOAT, kinds.CPPTYPE_DOUBLE):
        return REALS
    if field.cpp_type == kinds.CPPTYPE_STRING:
        return tuple(t.encode() for t in TEXTS) if field.type == kinds.TYPE_BYTES else TEXTS
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return True, False
    low, high = {kinds.CPPTYPE_INT32: (-(2**31), 2**31 - 1), kinds.CPPTYPE_INT64: (-(2**63), 2**63 - 1)}.get(
        field.cpp_type, (0, 2**32 - 1)
    )
    return tuple(sorted({min(max(x, low), high) for x in INTS}))


def put(message, field: FieldDescriptor, value) -> None:
    if not field.is_repeated:
        setattr(message, field.name, value)
    else:
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend([value] if not isinstance(value, list) else value)


def of_fields(message) -> list[tuple[str, object]]:
    """The message with each field in turn set to each of its edges, in messages inside it too."""
    made = []
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            for value in edges(field):
                other = type(message)()
                other.CopyFrom(message)
                put(other, field, value)
                made.append((field.name, other))
        elif field.is_repeated and not field.message_type.GetOptions().map_entry:
            for i, inner in enumerate(getattr(message, field.name)):
                for name, changed in of_fields(inner):
                    other = type(message)()
                    other.CopyFrom(message)
                    getattr(other, field.name)[i].CopyFrom(changed)
                    made.append((f"{field.name}.{name}", other))
    return made


def asked(request: Request, **fields) -> pb.SampleRequest:
    message = wire.to_request_message(request, "1", run="good")
    for name, value in fields.items():
        put(message, message.DESCRIPTOR.fields_by_name[name], value)
    return message


def begun(*columns, finish="cancelled", n=2) -> list[pb.Answer]:
    return [pb.Answer(tokens=columns[0], logp=columns[1], versions=columns[2], finish=finish)] * n


BY_HAND = {  # what the status says: the request
    "prompt is '0 tokens'": {"prompt": []},
    "prompt is '33 tokens'": {"prompt": [3] * 33},
    "prompt is '1000000 tokens'": {"prompt": [3] * 1_000_000},
    "prompt is [3, 112]": {"prompt": [3, 112]},
    "prompt is [-1, 3]": {"prompt": [3, -1]},
    "group is 257; expected at most 256": {"group": 257},
    "group is 1025; expected at most 1024": {"group": 1025},
    "max_tokens is 49; expected at most 48": {"max_tokens": 49},
    "temperature is 1e-39": {"temperature": 1e-39},
    "temperature is nan": {"temperature": float("nan")},
    "temperature is -0.5": {"temperature": -0.5},
    "top_k is 2147483648": {"top_k": 2**31},
    "top_p is nan": {"top_p": float("nan")},
    "top_p is 1e-39": {"top_p": 1e-39},
    "stop is ('',)": {"stop": [""]},
    "stop is '65 entries'": {"stop": ["x"] * 65},
    "stop is ('xxx": {"stop": ["x" * 3_000_000]},
    "begun is '1000000 entries'": {"begun": [pb.Answer()] * 1_000_000},
    "begun is '1 answers'": {"begun": begun([3], [-1.0], [0], n=1)},
    "(1, 2, 1); expected as many log-probs and versions": {"begun": begun([3], [-1.0, -1.0], [0])},
    "begun tokens is [200, 200]": {"begun": begun([200], [-1.0], [0])},
    "begun tokens is [-7, -7]": {"begun": begun([-7], [-1.0], [0])},
    "begun logp is [nan, nan]": {"begun": begun([3], [float("nan")], [0])},
    "begun logp is [-inf, -inf]": {"begun": begun([3], [float("-inf")], [0])},
    "begun logp is [1.0, 1.0]": {"begun": begun([3], [1.0], [0])},
    "begun versions is -1": {"begun": begun([3], [-1.0], [-1])},
    "begun finish is 'over'": {"begun": begun([3], [-1.0], [0], finish="over")},
    "begun is 12; expected at most 11 tokens": {"begun": begun([3] * 12, [-1.0] * 12, [0] * 12)},
    "begun is 'no token'": {"begun": begun([], [], [], finish="eos")},
    "id is ''": {"id": ""},
    "id is '5000 characters'": {"id": "x" * 5000},
    "version=4: the weights are version 3": {"version": 4},
    "deadline_s is nan": {"deadline_s": float("nan")},
    "the server has restarted": {"instance": "another"},
    "run='bad': the weights are those of run 'good'": {"run": "bad"},
}


def chunks_of(leaves, version=9, run="good") -> list[pb.Chunk]:
    return list(wire.to_chunks(leaves, version, run, "another client"))


def pushes(leaves) -> list[tuple[str, list[pb.Chunk]]]:
    """Pushes of which one field is wrong, or the order."""
    good, made = chunks_of(leaves), []
    header = pb.Header()
    header.CopyFrom(good[0].header)
    del header.leaves[2:]
    for name, changed in of_fields(header):
        if name not in ("client", "run"):  # of which any is allowed; another run is below
            del changed.leaves[2:]
            changed.leaves.extend(good[0].header.leaves[2:])
            if changed != good[0].header:
                made.append((f"header.{name}", [pb.Chunk(header=changed), *good[1:]]))
    for name, changed in of_fields(good[1].data):
        if changed != good[1].data:
            made.append((f"data.{name}", [good[0], pb.Chunk(data=changed), *good[2:]]))
    made += [(f"digest {text!r}"[:40], [*good[:-1], pb.Chunk(digest=text.encode())]) for text in TEXTS]
    made += [("another run", chunks_of(leaves, run="bad")), ("twice", [*good, *good]), ("no data", [good[0], good[-1]])]
    made += [("no header", good[1:]), ("nothing", []), ("reversed", good[::-1]), ("empty", [pb.Chunk()])]
    bad = {name: leaf.copy() for name, leaf in leaves.items()}
    next(iter(bad.values())).reshape(-1)[0] = np.nan
    return [*made, ("not finite", chunks_of(bad)), ("fewer leaves", chunks_of(dict(list(leaves.items())[1:])))]


def decodes() -> list[tuple[str, object]]:
    """Of JetStream's own service."""
    text = lambda t, **more: jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(text=t), **{"max_tokens": 8, **more}
    )
    ids = lambda x: jetstream_pb2.DecodeRequest(
        token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=x), max_tokens=8
    )
    made = [("max_tokens", text("1+2", max_tokens=n)) for n in (-1, 0, 49, 2**31 - 1, -(2**31))]
    made += [("session_cache", text("1+2", session_cache=x)) for x in ("x", "/etc/passwd", "x" * 100_000)]
    made += [("text", text("1" * 9000)), ("prompt", text("")), ("prompt", text("1" * 100)), ("content", text("1"))]
    made[-1][1].ClearField("content")
    return [*made, *(("prompt", ids(x)) for x in ([], [-1], [112], [2**31 - 1], [3] * 33, [3] * 500_000))]


def garbage(rng: random.Random) -> bytes:
    data = bytearray(asked(GOOD, begun=begun([3], [-1.0], [0])).SerializeToString())
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(1, len(data) + 1)])


def assert_refused_or_right(data: bytes, status: tuple[Code, str, bytes]) -> Code:
    """What is not refused is a request that can be served, and has been."""
    code, details, reply = status
    if code is not Code.OK:
        assert code in REFUSED, (code, details)
        assert details
        return code
    request = wire.from_request_message(pb.SampleRequest.FromString(data))
    check_group(request, wire.from_reply(pb.SampleReply.FromString(reply)), vocab_size=112, cut=True)
    return code


def talk_to(address: str, data: bytes) -> None:
    """Bytes that are no HTTP/2 perhaps."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(data)
        connection.settimeout(0.05)
        try:
            while connection.recv(4096):
                pass
        except OSError:
            return


# --- the suite -----------------------------------------------------------------------------------------------------


def bad_calls(leaves, every: int) -> list[tuple[str, str, object, str]]:
    """(kind, method, message or messages, what its status says). every: of those made from fields one in so many."""
    calls = [("by hand", SAMPLE, asked(GOOD, **fields), says) for says, fields in BY_HAND.items()]
    whole = asked(GOOD, begun=begun([3], [-1.0], [0]), stop=["x"])
    calls += [("field", SAMPLE, message, name) for name, message in of_fields(whole)[::every]]
    calls += [("decode", DECODE, message, name) for name, message in decodes()]
    calls += [("push", LOAD, chunks, "") for _, chunks in pushes(leaves)[::every]]
    return [*calls, ("stats", STATS, pb.StatsRequest(run="x" * 5000), "run is '5000 characters'")]


def attack(peers, leaves, every: int, rng: random.Random) -> Counter:
    """Every bad call from every peer; counts of (peer, status)."""
    seen: Counter = Counter()
    for kind, method, message, says in bad_calls(leaves, every):
        data = [m.SerializeToString() for m in message] if method == LOAD else message.SerializeToString()
        for name, peer in peers.items():
            code, details, reply = status = peer.call(method, data)
            seen[name, code] += 1
            if name == "nobody":
                assert code is Code.UNAUTHENTICATED, (kind, says, status)
            elif method == LOAD and name == "sampler":
                assert code is Code.PERMISSION_DENIED, (kind, says, status)
            elif kind == "field":
                if assert_refused_or_right(data, status) is Code.INVALID_ARGUMENT:
                    assert says.partition(".")[0] in details, (says, details)
            else:
                assert code in REFUSED, (kind, says, status)
                assert says in details, (says, details)
    for i in range(200 // every):
        data = garbage(rng)
        name = list(peers)[i % 3]
        status = peers[name].call(SAMPLE, data)
        seen[name, status[0]] += 1
        if name == "nobody":
            assert status[0] is Code.UNAUTHENTICATED
        else:
            assert_refused_or_right(data, status)
    for method in (SAMPLE, STATS, HEALTH, DECODE, LOAD, f"/{wire.SERVICE}/Nothing"):
        assert peers["nobody"].call(method, [b""] if method == LOAD else b"")[0] is Code.UNAUTHENTICATED
    assert peers["pusher"].call(f"/{wire.SERVICE}/Nothing", b"")[0] is Code.UNIMPLEMENTED
    code, details, _ = peers["sampler"].call(SAMPLE, bytes(wire.MAX_MESSAGE + 1))
    assert (code, "larger than max" in details) == (Code.RESOURCE_EXHAUSTED, True)
    return seen


def suite(config, params, server, quiet, peers, *, every: int, rounds: int) -> None:
    process, address = server
    leaves = {name: np.asarray(x) for name, x in named(weights.push(config[1].model, params, None).params).items()}
    seen, rng = Counter(), random.Random(1)
    with good_client(config, params, server, quiet) as (client, right):
        begun_with, sizes = right[0], [memory(process)]
        for _ in range(rounds):
            seen += attack(peers, leaves, every, rng)
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                rng.randbytes(3000),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(99),
            ):
                talk_to(address, data)
            sizes.append(memory(process))
        [stats] = client.stats()
        assert right[0] > begun_with
        assert stats["version"] == 3
        assert stats["loaded"] == 1
    until(lambda: pb.StatsReply.FromString(peers["sampler"].call(STATS, b"")[2]).values["held_bytes"] == 0)
    print({f"{peer} {code.name}": n for (peer, code), n in sorted(seen.items(), key=str)}, right[0], "right")
    print("MB", [round(x / 1e6) for x in sizes])
    assert sum(n for (_, code), n in seen.items() if code is not Code.OK) >= 200
    assert process.poll() is None
    if rounds > 2:
        assert min(sizes[-rounds // 3 :]) < 1.05 * min(sizes[rounds // 3 :]) + 20e6
    else:
        assert sizes[-1] < sizes[0] + 400e6  # programs are compiled


def test_hostile_calls(config, params, server, quiet, peers):
    suite(config, params, server, quiet, peers, every=6, rounds=1)


@pytest.mark.slow
def test_hostile_calls_all_of_them(config, params, server, quiet, peers):
    suite(config, params, server, quiet, peers, every=1, rounds=4)


some = {
    "prompt": st.lists(st.integers(-2, 130), max_size=40),
    "stop": st.lists(st.text(max_size=9), max_size=4),
    "begun": st.lists(
        st.builds(
            lambda n, finish, t, p, v: pb.Answer(tokens=[t] * n, logp=[p] * n, versions=[v] * n, finish=finish),
            st.integers(0, 14),
            st.sampled_from(["eos", "stop", "length", "cancelled", "", "x"]),
            st.integers(-1, 112),
            st.floats(-9, 0.125, width=32),
            st.integers(-1, 4),
        ),
        max_size=3,
    ),
}
numbers = {FieldDescriptor.CPPTYPE_INT64: st.integers(-2, 60), FieldDescriptor.CPPTYPE_DOUBLE: st.floats(-0.5, 2.0)}


@st.composite
def some_message(draw) -> pb.SampleRequest:
    """A request that can be served, with up to four fields that are drawn."""
    message = asked(GOOD)
    fields = [f for f in message.DESCRIPTOR.fields if f.name not in ("id", "group")]
    for field in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=4, unique_by=lambda f: f.name)):
        of_type = st.nothing() if field.message_type is not None else st.sampled_from(edges(field))
        usual = some[field.name] if field.name in some else numbers.get(field.cpp_type, st.nothing())
        put(message, field, draw(usual | of_type))
    return message


def examples(n: int):
    """Random requests, always the same."""
    checks = [HealthCheck.function_scoped_fixture]
    return lambda test: seed(1)(settings(
        max_examples=n, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=checks
    )(given(message=some_message())(test)))  # fmt: skip


@examples(25)
def test_any_request_is_refused_or_answered(server, peers, message):
    message.id, message.run = f"{time.monotonic()}", ""
    data = message.SerializeToString()
    assert_refused_or_right(data, peers["sampler"].call(SAMPLE, data))
    assert server[0].poll() is None


@pytest.mark.slow
@examples(1000)
def test_any_of_many_requests_is_refused_or_answered(server, peers, message):
    message.id, message.run = f"{time.monotonic()}", ""
    data = message.SerializeToString()
    assert_refused_or_right(data, peers["pusher"].call(SAMPLE, data))
    assert server[0].poll() is None
