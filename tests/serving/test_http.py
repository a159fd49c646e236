"""OpenAI's API: tokens and log-probs of the in-process loop, one clear error for what is wrong, streams, weights."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_backend import until
from test_decode import CHAIN, PROMPTS, TEXTS, TOKENIZER, chain
from test_openai import FIRST, SECOND
from test_openai import FOLDERED as MODEL

pytest.importorskip("jetstream", reason="google-jetstream is not installed (extra `serve`)")
from test_engine import FOREVER, SIZES, closing

from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import decode, weights
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.serving import http as http_api
from jaxrl_llm.serving.backend import DriverBackend
from jaxrl_llm.serving.http import MAX_BODY, Api, listening
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP

WEIGHTS = weights.push(MODEL, FIRST, None)
LOCAL = decode.LocalEngine(MODEL, TOKENIZER, WEIGHTS, max_tokens=40)
SEED, DRAW = 5, 7
ASKED = {"prompt": TEXTS[0], "max_tokens": 20, "seed": DRAW * 2**32 + SEED, "return_token_ids": True, "logprobs": 1}


@contextmanager
def serving(backend, name="policy", **options):
    api = Api(name, **options)
    api.backend = backend
    with listening(api, "127.0.0.1", 0) as port:
        api.port = port
        yield api


@pytest.fixture(scope="module")
def api():
    with closing(DriverBackend(MODEL, TOKENIZER, WEIGHTS, slots=4, **SIZES)) as made, serving(made) as served:
        yield served


def send(api, body, path="/v1/completions", method="POST", headers=None):
    """Status and JSON of the reply; the body may be bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def choices(api, **asked):
    status, reply = send(api, ASKED | asked)
    assert status == 200, reply
    assert [c["index"] for c in reply["choices"]] == list(range(len(reply["choices"])))
    return reply["choices"]


def drawn(prompt=PROMPTS[0], engine=LOCAL, **asked):
    return decode.generate(engine, [Request(prompt, **{"max_tokens": 20, "seed": SEED, "draw": DRAW} | asked)])[0]


def assert_same(found, answers):
    for choice, answer in zip(found, answers, strict=True):
        assert choice["token_ids"] == answer.tokens.tolist()
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], answer.logp, atol=1e-5)
        assert choice["finish_reason"] == ("length" if answer.finish == LENGTH else "stop")


# --- answers ------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_in_process_loop(api):
    assert_same(choices(api, n=3), expected := drawn(group=3))
    assert len({tuple(a.tokens) for a in expected}) == 3
    assert_same(choices(api, prompt=list(PROMPTS[0])), drawn())
    assert_same(
        choices(api, prompt=[list(PROMPTS[2]), list(PROMPTS[3])], n=2),
        [*drawn(PROMPTS[2], group=2), *drawn(PROMPTS[3], group=2)],
    )
    found = choices(api, prompt=[TEXTS[2], TEXTS[3]], temperature=0.5, top_k=3, top_p=0.9)
    sampling = Sampling(0.5, 3, 0.9)
    assert_same(found, [*drawn(PROMPTS[2], sampling=sampling), *drawn(PROMPTS[3], sampling=sampling)])
    assert_same(choices(api, temperature=0, top_k=-1), drawn(sampling=Sampling(0.0)))


def test_a_reply_tells_prompt_text_and_lengths(api):
    status, reply = send(api, ASKED | {"n": 2})
    for choice in reply["choices"]:
        ids = choice["token_ids"]
        assert choice["prompt_token_ids"] == list(PROMPTS[0])
        assert choice["text"] == TOKENIZER.decode([i for i in ids if i != 1])
        assert choice["logprobs"]["tokens"] == [TOKENIZER.decode([i]) for i in ids]
    new = sum(len(c["token_ids"]) for c in reply["choices"])
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": new, "total_tokens": 3 + new}
    assert (reply["object"], reply["model"]) == ("text_completion", "policy")
    bare = send(api, {"prompt": TEXTS[0], "model": "policy", "echo": False, "user": "me", "stop": None})[1]["choices"][
        0
    ]
    assert bare.keys() == {"index", "text", "finish_reason", "logprobs"}
    assert bare["logprobs"] is None


def test_prompt_and_answer_share_the_context(api):
    """What of a prompt is longer than prompts are is a begun answer, of which nothing is told."""
    tail = Answer(np.array(PROMPTS[0], np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), CANCELLED)
    asked = {"prompt": TEXTS[2] + TEXTS[0], "n": 2, "stop": "ca"}  # of which "c" is the prompt's
    request = Request(PROMPTS[2], 2, 23, stop=("ca",), seed=SEED, draw=DRAW, begun=(tail, tail))
    expected, found, pieces = api.backend.submit(request).result(60), choices(api, **asked), events(api, **asked)
    for choice, answer in zip(found, expected, strict=True):
        assert choice["token_ids"] == answer.tokens.tolist()[3:]
        assert choice["prompt_token_ids"] == [*PROMPTS[2], *PROMPTS[0]]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], answer.logp[3:], atol=1e-5)
        parts = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert [i for c in parts for i in c["token_ids"]] == choice["token_ids"]
        assert "".join(c["text"] for c in parts) == choice["text"]
    assert pieces[-1]["usage"]["prompt_tokens"] == 22


def test_answers_without_a_seed_differ(api):
    assert len({choices(api, seed=None)[0]["text"] for _ in range(4)}) > 1


def test_stop_strings_end_an_answer_and_are_not_shown(api):
    whole = drawn()[0]
    text = TOKENIZER.decode(whole.tokens)
    stop = text[4:6]
    (choice,) = choices(api, stop=["zz" * 9, stop])
    (expected,) = drawn(stop=(stop,))
    assert_same([choice], [expected])
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(stop)], "stop")
    (alone,) = choices(api, stop=stop)
    assert_same([alone], [expected])
    assert alone["text"] == choice["text"]


# --- streams ------------------------------------------------------------------------------------------------------


def events(api, **asked):
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(ASKED | {"stream": True} | asked))
    reply = connection.getresponse()
    assert reply.headers["content-type"] == "text/event-stream"
    lines = [line for line in reply.read().decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_is_the_answer_in_pieces(api):
    for asked in ({}, {"n": 3, "max_tokens": 40}, {"stop": TOKENIZER.decode(drawn()[0].tokens)[4:6]}):
        whole, pieces = choices(api, **asked), events(api, **asked)
        joined = [{"text": "", "token_ids": [], "logp": [], "finish": []} for _ in whole]
        for choice in (c for piece in pieces for c in piece["choices"]):
            row = joined[choice["index"]]
            assert ("prompt_token_ids" in choice) == (not row["token_ids"])
            row["text"] += choice["text"]
            row["token_ids"] += choice["token_ids"]
            row["logp"] += choice["logprobs"]["token_logprobs"]
            row["finish"].append(choice["finish_reason"])
        for row, choice in zip(joined, whole, strict=True):
            assert (row["text"], row["token_ids"]) == (choice["text"], choice["token_ids"])
            np.testing.assert_allclose(row["logp"], choice["logprobs"]["token_logprobs"], atol=1e-5)
            assert row["finish"][-1] == choice["finish_reason"]
            assert set(row["finish"][:-1]) <= {None}
        assert [piece["usage"] is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]


def test_what_may_yet_change_is_not_shown():
    spoken = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"), eos_ids=(0,))
    shown = lambda text, stop=(), finish=CANCELLED: http_api._text(spoken, list(text.encode()), stop, finish)
    half = list("aé".encode())[:2]  # of a character of two bytes
    assert [http_api._text(spoken, half, (), finish) for finish in (CANCELLED, LENGTH)] == ["a", "a\ufffd"]
    assert [shown("abcd", stop) for stop in ((), ("x",), ("xyz",), ("x", "abcdef"))] == ["abcd", "abcd", "ab", ""]
    assert [shown("abcabc", stop, STOP) for stop in (("c", "bc"), ("ca",), ("zz",))] == ["a", "ab", "abcabc"]
    assert [shown(text, (), EOS) for text in ("ab\0", "ab")] == ["ab", "ab"]


# --- what is wrong ------------------------------------------------------------------------------------------------

WRONG = {
    "echo is True; expected none": {"echo": True},
    "best_of is 2; expected none": {"best_of": 2},
    "n is 0": {"n": 0},
    "n is 1025": {"n": 1025},
    "n is 600; expected at most 1024 answers in all": {"n": 600, "prompt": ["a", "b"]},
    "n is True": {"n": True},
    "n is 1.0": {"n": 1.0},
    "max_tokens is 0": {"max_tokens": 0},
    "max_tokens is 41; expected at most 40": {"max_tokens": 41, "prompt": "a"},
    "max_tokens is 2147483648": {"max_tokens": 2**31},
    "temperature is -1": {"temperature": -1},
    "temperature is 1e-39": {"temperature": 1e-39},
    "temperature is nan": {"temperature": float("nan")},
    "temperature is inf": {"temperature": float("inf")},
    "temperature is 'hot'": {"temperature": "hot"},
    "top_p is 0": {"top_p": 0},
    "top_p is 1.5": {"top_p": 1.5},
    "top_k is 2147483648": {"top_k": 2**31},
    "top_k is -2": {"top_k": -2},
    "seed is -1": {"seed": -1},
    "seed is 9223372036854775808": {"seed": 2**63},
    "logprobs is 5": {"logprobs": 5},
    "stop is ''": {"stop": ""},
    "stop is ['a', 3]": {"stop": ["a", 3]},
    "stop is ['a', 'a'": {"stop": ["a"] * 17},
    "stop is 'aaaa": {"stop": "a" * 257},
    "stop_token_ids is [3]; expected [1], which end an answer anyway, or none": {"stop_token_ids": [3]},
    "stop_token_ids is {}": {"stop_token_ids": {}},
    "stream is 'yes'": {"stream": "yes"},
    "prompt is '0 tokens'; expected 1 to 19": {"prompt": []},
    "prompt is '40 tokens'; expected at most 39, for max_tokens = 20": {"prompt": "a" * 40},
    "prompt is 16; expected token ids in [0, 16)": {"prompt": [16]},
    "prompt is 99; expected token ids in [0, 16)": {"prompt": [2] * 20 + [99]},
    "prompt is [-1]": {"prompt": [-1]},
    "prompt is [True]": {"prompt": [True]},
    "prompt is [['a']]": {"prompt": [["a"]]},
    "prompt is {}": {"prompt": {}},
    "the tokenizer has no token for ['?']": {"prompt": "?"},
    "no token for ['\\ud800']": {"prompt": "\ud800"},
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(api, message, stream):
    before = api.backend.stats()
    status, reply = send(api, ASKED | {"stream": stream} | WRONG[message])
    assert (status, reply["error"]["code"]) == (400, 400)
    assert message in reply["error"]["message"]
    assert len(reply["error"]["message"]) <= 500
    assert api.backend.stats() == before
    assert api._under_way == 0


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b'{"a": 1}']
)
def test_what_is_no_request_is_refused(api, body):
    status, reply = send(api, body)
    assert status == 400, reply
    assert_same(choices(api), drawn())


def test_what_there_is_not(api):
    assert send(api, ASKED | {"model": "gpt"})[0] == 404
    assert send(api, {}, "/v1/chat/completions")[0] == 404
    assert send(api, None, "/v1/completions", "GET")[0] == 404
    status, reply = send(api, None, "/v1/models?limit=1", "GET")
    (model,) = reply["data"]
    assert status == 200
    assert (model["id"], model["owned_by"], model["max_model_len"], model["version"]) == ("policy", "jaxrl_llm", 59, 0)
    assert send(api, None, "/health", "GET") == (200, {"status": "ok", "version": 0})


def test_a_body_too_large_or_of_no_length(api):
    status, reply = send(api, b" " * (MAX_BODY + 1))
    assert (status, reply["error"]["message"]) == (413, f"body is {MAX_BODY + 1} bytes; expected at most {MAX_BODY}")
    for length in ("-1", "x", "1" * 50):
        assert send(api, b"", headers={"Content-Length": length})[0] == 400


def test_the_token_is_asked_for(api):
    with serving(api.backend, token="a secret") as served:
        for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "a secret"}):
            assert send(served, ASKED, headers=headers)[0] == 401
            assert send(served, {}, "/update_weights_from_disk", headers=headers)[0] == 401
            assert send(served, None, "/v1/models", "GET", headers)[0] == 401
        assert send(served, ASKED, headers={"Authorization": "Bearer a secret"})[0] == 200
        assert send(served, None, "/health", "GET")[0] == 200
        served.push_token = "for pushes"
        reload = lambda token: send(
            served, {}, "/update_weights_from_disk", headers={"Authorization": f"Bearer {token}"}
        )
        assert [reload(token)[0] for token in ("another", "a secret")] == [401, 403]
        assert "jaxrl serve --weights" in reload("for pushes")[1]["error"]["message"]
        assert send(served, ASKED, headers={"Authorization": "Bearer for pushes"})[0] == 200


def test_before_there_is_a_backend_and_after():
    with serving(None) as served:
        assert send(served, ASKED)[0] == send(served, None, "/health", "GET")[0] == 503
        with closing(DriverBackend(MODEL, TOKENIZER, WEIGHTS, slots=4, **SIZES)) as made:
            served.backend = made
            assert send(served, ASKED)[0] == 200
        assert send(served, ASKED) == (
            503,
            {"error": {"message": "the backend is closed", "type": "error", "code": 503}},
        )


@pytest.fixture
def endless():
    held = chain(FOREVER)[0].weights
    sizes = SIZES | {"max_tokens": 100_000, "tokens_per_call": 4}
    with closing(DriverBackend(CHAIN, TOKENIZER, held, slots=2, **sizes)) as made:
        yield made


LONG = {"prompt": "a", "max_tokens": 100_000}


def hanging(api, body):
    connection = socket.create_connection(("127.0.0.1", api.port))
    data = json.dumps(body).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slots_and_others_are_told_to_wait(endless, stream):
    with serving(endless, max_waiting=1) as served:
        connection = hanging(served, LONG | {"n": 2, "stream": stream})
        until(lambda: endless.stats()["slots_free"] == 0)
        assert send(served, LONG)[0] == 429
        connection.close()
        until(lambda: endless.stats()["slots_free"] == 2)
        until(lambda: served._under_way == 0)


def test_a_request_that_takes_too_long_ends_and_a_stream_tells_what_there_is(endless):
    with serving(endless, deadline_s=0.5) as served:
        begun = time.monotonic()
        assert send(served, LONG)[0] == 503
        assert time.monotonic() - begun < 5
        served.deadline_s = 5.0
        connection = hanging(served, LONG | {"stream": True})
        data = b"".join(iter(lambda: connection.recv(2**16), b""))
        pieces = [json.loads(x.removeprefix(b"data: ")) for x in data.split(b"\r\n\r\n")[1].split(b"\n\n") if x]
        assert pieces[-1] == {"error": {"message": "not done within 5 s", "code": 503}}
        text = "".join(p["choices"][0]["text"] for p in pieces[:-1])
        assert len(pieces) > 3
        assert ("ba" * len(text))[: len(text)] == text
        until(lambda: endless.stats()["slots_free"] == 2)


def test_an_error_of_the_server_fails_that_request_alone(api, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(api.backend, "submit", lambda *_: 1 / 0)
        assert send(api, ASKED)[0] == 500
    assert_same(choices(api), drawn())


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_come_from_a_folder_below_the_one_that_is_named(tmp_path):
    from jaxrl_llm.models import hf
    from jaxrl_llm.sampler.client import named

    (root := tmp_path / "weights").mkdir()
    hf.export(SECOND, MODEL, TOKENIZER, root / "second", "float32")
    hf.export(SECOND, MODEL, TOKENIZER, tmp_path / "outside", "float32")
    (root / "link").symlink_to(tmp_path / "outside")
    held = lambda params, version=0: weights.push(MODEL, params, None, version=version)
    with closing(DriverBackend(MODEL, TOKENIZER, held(FIRST), slots=4, **SIZES)) as made, serving(made) as served:
        reload = lambda **body: send(served, body, "/update_weights_from_disk")
        assert reload(model_path=str(root / "second"))[0] == 403
        mesh = sharding.make_mesh()

        def load(folder, version):
            with jax.set_mesh(mesh):
                made.load(named(weights.push(MODEL, hf.load(MODEL, mesh, folder), mesh).params), version)

        served.root, served.load = root, load
        for path in (
            tmp_path / "outside",
            root,
            root / "none",
            root / "second" / ".." / ".." / "outside",
            root / "link",
            "",
        ):
            assert reload(model_path=str(path))[0] == 400, path
        (root / "broken").mkdir()
        for wrong in (
            {"model_path": str(root / "broken")},
            {"weight_version": -1},
            {"weight_version": "x"},
            {"model_path": 3},
        ):
            assert reload(**{"model_path": str(root / "second")} | wrong)[0] == 400
        old = decode.LocalEngine(MODEL, TOKENIZER, held(FIRST), max_tokens=40)
        assert_same(choices(served, n=2), drawn(group=2, engine=old))
        assert reload(model_path=str(root / "second"), weight_version="6")[0] == 200
        new = decode.LocalEngine(MODEL, TOKENIZER, held(SECOND), max_tokens=40)
        assert_same(choices(served, n=2), drawn(group=2, engine=new))
        assert send(served, None, "/health", "GET")[1]["version"] == 6
        assert reload(model_path=str(root / "second"))[0] == 200
        assert made.version == 7


def test_connections_are_bounded(api):
    with serving(api.backend) as served:
        served.room = threading.Semaphore(1)
        with hanging(served, {}) as idle:
            idle.recv(1)
        silent = socket.create_connection(("127.0.0.1", served.port))
        silent.sendall(b"POST")
        until(lambda: served.room._value == 0)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            send(served, ASKED)
        silent.close()
        until(lambda: served.room._value == 1)
        assert send(served, ASKED)[0] == 200
