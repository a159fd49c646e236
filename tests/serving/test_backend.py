"""JetStream's own client, over gRPC."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from fake_backend import until
from test_decode import CHAIN, MODEL, PROMPTS, TOKENIZER, chain
from test_engine import FOREVER, SIZES, TIMEOUT_S, WEIGHTS, A, closing, greedy

from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.serving.backend import DriverBackend, add_decode_service
from jaxrl_llm.serving.engine import DriverTicket, js
from jaxrl_llm.types import EOS

pb = js.jetstream_pb2


@pytest.fixture(scope="module")
def backend():
    with closing(DriverBackend(MODEL, TOKENIZER, WEIGHTS, slots=4, **SIZES)) as made:
        yield made


@pytest.fixture(scope="module")
def expected_ids():
    """What is to be said to three prompts."""
    return greedy(PROMPTS[0], PROMPTS[2], A)


def serving(made, talk, **options):
    """The result of talk(stub), with a server of JetStream's service."""

    async def run():
        server = grpc.aio.server()
        add_decode_service(made, server, **options)
        port = server.add_insecure_port("localhost:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
                return await asyncio.wait_for(talk(js.jetstream_pb2_grpc.OrchestratorStub(channel)), TIMEOUT_S)
        finally:
            await server.stop(0)

    return asyncio.run(run())


def decode_request(text=None, ids=None, max_tokens=40, **fields):
    if text is not None:
        fields["text_content"] = pb.DecodeRequest.TextContent(text=text)
    if ids is not None:
        fields["token_content"] = pb.DecodeRequest.TokenContent(token_ids=ids)
    return pb.DecodeRequest(max_tokens=max_tokens, **fields)


async def decoded(stub, request):
    samples = [r.stream_content.samples[0] async for r in stub.Decode(request)]
    return "".join(s.text for s in samples), [i for s in samples for i in s.token_ids], len(samples)


def test_texts_and_token_ids(backend, expected_ids):
    async def talk(stub):
        health = await stub.HealthCheck(pb.HealthCheckRequest())
        asked = [decode_request(text="abc"), decode_request(ids=PROMPTS[2]), decode_request(ids=A, max_tokens=5)]
        return health.is_live, await asyncio.gather(*(decoded(stub, r) for r in asked))

    live, ((text, by_text, parts), (none, by_ids, _), (_, short, _)) = serving(backend, talk)
    assert live is True
    expected = [expected_ids[0], expected_ids[1], expected_ids[2][:5]]
    without_end = [[i for i in ids if i != 1] for ids in expected]
    assert [by_text, by_ids, short] == without_end
    assert text == TOKENIZER.decode(by_text)
    assert none == ""
    assert parts == -(-len(by_text) // SIZES["tokens_per_call"])


def test_the_end_is_not_sent():
    held = chain({"a": {"b": 1.0}, "b": {"$": 1.0}})[0].weights
    with closing(DriverBackend(CHAIN, TOKENIZER, held, slots=4, **SIZES)) as made:
        text, ids, _ = serving(made, lambda stub: decoded(stub, decode_request(text="a")))
    assert (text, ids) == ("b", TOKENIZER.encode("b"))


def test_any_of_several_end_of_sequence_tokens_ends_an_answer_and_is_not_sent():
    n = TOKENIZER.encode("n")[0]
    made = chain({"a": {"b": 1.0}, "b": {"n": 1.0}, "c": {"$": 1.0}})[0].weights
    several = replace(TOKENIZER, eos_ids=(1, n))
    with closing(DriverBackend(CHAIN, several, made, slots=4, **SIZES)) as made:
        talk = lambda stub: asyncio.gather(*(decoded(stub, decode_request(text=t)) for t in "ac"))
        (first, second) = serving(made, talk)
        group = made.submit(Request(tuple(TOKENIZER.encode("a")), 2, 40)).result(TIMEOUT_S)
    assert [first[:2], second[:2]] == [("b", TOKENIZER.encode("b")), ("", [])]
    assert [(a.tokens.tolist(), a.finish) for a in group] == [(TOKENIZER.encode("bn"), EOS)] * 2


class Bytes:
    """A tokenizer whose tokens a and b are the two bytes of é."""

    added_tokens_decoder = {}

    def encode(self, text, **how):
        return TOKENIZER.hf.encode(text, **how)

    def decode(self, ids, **_):
        said = TOKENIZER.decode(ids).encode()
        return said.replace(b"a", b"\xc3").replace(b"b", b"\xa9").decode("utf-8", "replace")


def test_characters_are_sent_whole():
    held = chain({"c": {"d": 1.0}, "d": {"a": 1.0}, "a": {"b": 1.0}, "b": {"a": 1.0}})[0].weights
    with closing(DriverBackend(CHAIN, replace(TOKENIZER, hf=Bytes()), held, slots=4, **SIZES)) as made:
        asked = [decode_request(text="c", max_tokens=n) for n in (6, 7, 8, 9)]
        got = serving(made, lambda stub: asyncio.gather(*(decoded(stub, r) for r in asked)))
    ids = TOKENIZER.encode("dabababab")
    texts = ["déé\ufffd", "dééé", "dééé\ufffd", "déééé"]
    assert got == [(text, ids[:n], 1) for n, text in zip((6, 7, 8, 9), texts, strict=True)]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (decode_request(), "content"),
        (decode_request(text=""), "prompt"),
        (decode_request(text="Z"), "no token for"),
        (decode_request(text="a", session_cache="x"), "session_cache"),
        (decode_request(ids=[2, 99]), "prompt"),
        (decode_request(ids=[-1]), "prompt"),
        (decode_request(ids=[2] * 20), "prompt"),
        (decode_request(text="a", max_tokens=0), "max_tokens"),
        (decode_request(text="a", max_tokens=41), "max_tokens"),
        (decode_request(text="a" * 5000), "text is '5000 characters'; expected at most 4864"),
        (decode_request(text="a", session_cache="x" * 3_000_000), "session_cache"),
        (decode_request(ids=[2] * 900_000), "prompt is '900000 tokens'"),
    ],
)
def test_what_cannot_be_served_is_refused(backend, expected_ids, request_, message):
    async def talk(stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await decoded(stub, request_)
        return error.value, await decoded(stub, decode_request(text="abc", max_tokens=4))

    error, (_, ids, _) = serving(backend, talk)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in error.details()
    assert ids == [i for i in expected_ids[0][:4] if i != 1]


def test_a_client_that_goes_frees_its_slot():
    async def talk(stub):
        call = stub.Decode(decode_request(text="a", max_tokens=8000))
        await call.read()
        call.cancel()

    held = chain(FOREVER)[0].weights
    with closing(DriverBackend(CHAIN, TOKENIZER, held, slots=4, **SIZES | {"max_tokens": 8000})) as endless:
        serving(endless, talk)
        until(lambda: endless.stats()["slots_free"] == 4)
        assert 0 < endless.stats()["tokens"] < 8000


def test_few_calls_are_answered_at_once():
    async def talk(stub):
        calls = [stub.Decode(decode_request(text="a", max_tokens=8000)) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await decoded(stub, decode_request(text="a", max_tokens=4))
        for call in calls:
            call.cancel()
        for _ in range(500):  # until their places are free
            try:
                return error.value, await decoded(stub, decode_request(text="a", max_tokens=4))
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)

    held = chain(FOREVER)[0].weights
    with closing(DriverBackend(CHAIN, TOKENIZER, held, slots=4, **SIZES | {"max_tokens": 8000})) as endless:
        error, (text, *_) = serving(endless, talk, max_waiting=2)
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "2 calls are being answered")
    assert text == "baba"


def test_an_error_inside_a_call_is_its_own(backend, monkeypatch):
    async def talk(stub):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await decoded(stub, decode_request(text="abc", max_tokens=12))
        return error.value, await decoded(stub, decode_request(text="abc", max_tokens=4))

    real = DriverTicket.add_result

    def add_result(ticket, samples):
        real(ticket, samples)
        if ticket.group.request.max_tokens == 12:
            ticket.group.fail(OSError("broken"))

    monkeypatch.setattr(DriverTicket, "add_result", add_result)
    error, (_, ids, _) = serving(backend, talk)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, "OSError: broken")
    assert len(ids) == 4
