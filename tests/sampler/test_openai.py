"""Other engines: their answers are the in-process loop's, whatever they do wrong; weights go out as folders."""

import hashlib
import json
import math
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import pytest
from cases import free_port
from test_decode import MODEL, PROMPTS, TOKENIZER, random_params

from jaxrl_llm.models import hf
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import decode, weights
from jaxrl_llm.sampler.openai import OpenAIEngine, Servers, from_disk, vllm
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP

EOS_ID, A, B = TOKENIZER.eos_ids[0], *TOKENIZER.encode("ab")


def engine_of(urls, tmp_path, *, reload=lambda *_: None, tokenizer=TOKENIZER, stop=(), push=True, **options):
    options = {"patience_s": 60.0, "deadline_s": 20.0} | options
    servers = Servers([f"openai+{url}" for url in urls], reload, tmp_path / "weights", **options)
    if push:
        servers.push(lambda folder: folder.mkdir(parents=True), 4)
    return OpenAIEngine(servers, MODEL, tokenizer, Sampling(), 40, stop)


# --- a server by hand ---------------------------------------------------------------------------------------------


def tokens_of(prompt, seed, n):
    """What every stub draws: letters, or their end."""
    rng = np.random.default_rng([*prompt, seed])
    ids = rng.integers(2, 16, n).tolist()
    k = int(rng.integers(1, 2 * n))
    return (ids[: k - 1] + [EOS_ID], "stop") if k <= n else (ids, "length")


def logp_of(ids):
    return [-0.25 * i for i in ids]


def completion(body):
    """The reply of vLLM, whose choices have the seeds after the request's."""
    choices = []
    for i in range(body["n"]):
        ids, finish = tokens_of(body["prompt"], body.get("seed", 0) + i, body["max_tokens"])
        logprobs = {"token_logprobs": logp_of(ids), "tokens": list(map(str, ids))}
        choices.append({"index": i, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish})
        choices[-1] |= {"text": "", "prompt_token_ids": body["prompt"]}
    return {"choices": choices[::-1]}


def generation(body):
    """The reply of SGLang."""
    asked = body["sampling_params"]
    assert (asked["n"], body["return_logprob"]) == (1, True)
    ids, finish = tokens_of(body["input_ids"], asked["sampling_seed"], asked["max_new_tokens"])
    meta = {"output_token_logprobs": [[x, i, None] for i, x in zip(ids, logp_of(ids), strict=True)]}
    return {"text": "", "meta_info": meta | {"finish_reason": {"type": finish}}}


class Stub:
    """`replies[path](body)` gives JSON, bytes, or (status, JSON); what was asked is in `seen`."""

    def __init__(self, owner="vllm", **replies):
        self.seen, self.lock = [], threading.Lock()
        models = {"data": [{"id": "policy", "owned_by": owner}]}
        self.replies = {"/v1/models": lambda body: models, "/v1/completions": completion, "/generate": generation}
        self.replies |= replies

    def of(self, path):
        return [body for p, body in self.seen if p == path]


@contextmanager
def running(stub, port=0):
    class Handler(BaseHTTPRequestHandler):
        log_message = lambda self, *_: None

        def do_GET(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "null")
            with stub.lock:
                stub.seen.append((self.path, body))
            stub.token = self.headers["authorization"]
            reply = stub.replies[self.path](body)
            status, reply = reply if isinstance(reply, tuple) else (200, reply)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(data)

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def seed_of(request, number=0, begun=0):
    text = f"({request.seed}, {request.draw}, {number}, {begun})".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") // 4


def asked(n=12, group=2, **fields):
    return [Request(PROMPTS[i % 6], group, 12, seed=3, draw=i, **fields) for i in range(n)]


def expected(request, group_seeds=True):
    """Tokens, log-probs and finish that a request's answers have to have."""
    for g in range(request.group):
        seed = seed_of(request) + g if group_seeds else seed_of(request, g)
        ids, finish = tokens_of(request.prompt, seed, request.max_tokens)
        yield ids, logp_of(ids), EOS if finish == "stop" else LENGTH


def assert_answered(groups, requests, group_seeds=True, version=4):
    for group, request in zip(groups, requests, strict=True):
        for answer, (ids, logp, finish) in zip(group, expected(request, group_seeds), strict=True):
            assert (answer.tokens.tolist(), answer.finish) == (ids, finish)
            np.testing.assert_allclose(answer.logp, logp)
            assert answer.versions.tolist() == [version] * len(ids)


# --- what is asked ------------------------------------------------------------------------------------------------


def test_a_group_is_one_request_where_its_answers_have_seeds_of_their_own(tmp_path):
    with running(stub := Stub()) as url:
        engine = engine_of([url], tmp_path)
        assert_answered(decode.generate(engine, requests := asked()), requests)
        finishes = Counter(a.finish for g in decode.generate(engine, requests) for a in g)
        assert finishes.keys() == {EOS, LENGTH}
        (body,) = [b for b in stub.of("/v1/completions")[:12] if b["seed"] == seed_of(requests[1])]
        assert body == {
            "model": "policy", "prompt": list(PROMPTS[1]), "n": 2, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0,
            "top_k": -1, "stop": [], "stop_token_ids": [EOS_ID], "seed": seed_of(requests[1]), "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        assert len(stub.of("/v1/completions")) == 24
        filtered = Request(PROMPTS[0], 2, 12, Sampling(0.5, 3, 0.9), ("zz",))
        decode.generate(engine, [filtered])
        body = stub.of("/v1/completions")[-1]
        assert [body[k] for k in ("temperature", "top_k", "top_p", "stop")] == [0.5, 3, 0.9, ["zz"]]
        decode.generate(engine, [replace(filtered, sampling=Sampling(0.0))])
        assert [b["n"] for b in stub.of("/v1/completions")[-2:]] == [1, 1]


@pytest.mark.parametrize("owner", ["sglang", "someone"])
def test_elsewhere_each_answer_is_a_request(owner, tmp_path):
    path = "/generate" if owner == "sglang" else "/v1/completions"
    with running(stub := Stub(owner)) as url:
        engine = engine_of([url], tmp_path)
        requests = asked(4)
        assert_answered(decode.generate(engine, requests), requests, group_seeds=False)
        assert len(stub.of(path)) == 8
        if owner == "sglang":
            (body,) = [b for b in stub.of(path) if b["sampling_params"]["sampling_seed"] == seed_of(requests[1], 1)]
            assert body["input_ids"] == list(PROMPTS[1])
            assert body["sampling_params"]["stop_token_ids"] == [EOS_ID]


def test_an_engine_without_seeds_gets_none(tmp_path):
    with running(stub := Stub()) as url:
        decode.generate(engine_of([url], tmp_path, seeded=False), asked(1))
        assert "seed" not in stub.of("/v1/completions")[0]


def test_answers_go_on_where_they_were_cut(tmp_path):
    done = Answer(*(np.array(x) for x in ([A, EOS_ID], [-1.0, -2.0], [1, 1])), EOS)
    begun = Answer(*(np.array(x) for x in ([A, B, A], [-1.0, -2.0, -3.0], [1, 1, 2])), CANCELLED)
    request = Request(PROMPTS[0], 3, 12, begun=(begun, done, begun), budget=4)
    with running(stub := Stub()) as url:
        (group,) = decode.generate(engine_of([url], tmp_path), [request])
        bodies = stub.of("/v1/completions")
    assert group[1].tokens.tolist() == [A, EOS_ID]
    for g in (0, 2):
        ids, finish = tokens_of([*PROMPTS[0], A, B, A], seed_of(request, g, 3), 4)
        assert group[g].tokens.tolist() == [A, B, A, *ids]
        assert group[g].versions.tolist() == [1, 1, 2] + [4] * len(ids)
        assert group[g].finish == (EOS if finish == "stop" else CANCELLED)
    assert sorted(b["seed"] for b in bodies) == sorted(seed_of(request, g, 3) for g in (0, 2))
    assert {(len(b["prompt"]), b["max_tokens"], b["n"]) for b in bodies} == {(6, 4, 1)}
    with running(Stub()) as url:  # the last tokens of an answer that has a budget
        request = Request(PROMPTS[0], 1, 5, begun=(begun,), budget=4)
        (group,) = decode.generate(engine_of([url], tmp_path), [request])
        assert group[0].finish in (EOS, LENGTH)
        assert len(group[0].tokens) <= 5


def test_a_stop_string_ends_an_answer_at_its_last_token(tmp_path):
    def reply(body):
        ids = [A, A, B, A, A]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": logp_of(ids)}, "finish_reason": "stop"}
        return {"choices": [choice]}

    with running(Stub(**{"/v1/completions": reply})) as url:
        (group,) = decode.generate(engine_of([url], tmp_path), [Request(PROMPTS[0], 1, 9, stop=("ab",))])
    assert (group[0].tokens.tolist(), group[0].finish) == ([A, A, B], STOP)
    assert len(group[0].logp) == 3


def test_more_is_asked_as_answers_come_and_not_more_than_there_is_room_for(tmp_path):
    most, under_way, lock = 0, 0, threading.Lock()

    def slow(body):
        nonlocal most, under_way
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.02)
        with lock:
            under_way -= 1
        return completion(body)

    with running(Stub(**{"/v1/completions": slow})) as url:
        engine = engine_of([url], tmp_path, in_flight=4)
        left = asked(3)
        found = []
        for request, group in engine.sample(lambda: left.pop() if left else None):
            found.append((request, group))
            if len(found) < 9:
                left.append(Request(PROMPTS[0], 2, 12, seed=3, draw=100 + len(found)))
        assert len(found) == 11
        assert_answered([g for _, g in found], [r for r, _ in found])
        decode.generate(engine, asked(20))
        assert most == 4
        assert decode.generate(engine, []) == []
        most = 0
        with running(Stub()) as other:  # has room again and again, which is not room at the slow one
            decode.generate(engine_of([url, other], tmp_path, in_flight=2), asked(20))
        assert most == 2


# --- what goes wrong ----------------------------------------------------------------------------------------------


def changed(**fields):
    def reply(body):
        choice = completion(body)["choices"][-1]
        ids = [A, B, EOS_ID]
        sound = {"token_ids": ids, "logprobs": {"token_logprobs": logp_of(ids)}, "finish_reason": "stop"}
        return {"choices": [choice | sound | {k: v(sound) if callable(v) else v for k, v in fields.items()}]}

    return reply


logprobs = lambda *x: {"token_logprobs": list(x)}
LIES = {
    "token_ids is [2, 16, 1]; expected ids in [0, 16)": {"token_ids": [A, 16, EOS_ID]},
    "token_ids is [2, -1, 1]": {"token_ids": [A, -1, EOS_ID]},
    "token_ids is [2, True, 1]": {"token_ids": [A, True, EOS_ID]},
    "token_ids is [2, 3.0, 1]": {"token_ids": [A, 3.0, EOS_ID]},
    "token_ids is '0 tokens'": {"token_ids": []},
    "token_ids is '13 tokens'; expected 1 to 12": {"token_ids": [A] * 13},
    "TypeError": {"token_ids": None},
    "token_logprobs is '2 for 3 tokens'": {"logprobs": logprobs(-1.0, -1.0)},
    "token_logprobs is [-1.0, nan, -1.0]": {"logprobs": logprobs(-1.0, math.nan, -1.0)},
    "token_logprobs is [-1.0, -inf, -1.0]": {"logprobs": logprobs(-1.0, -math.inf, -1.0)},
    "token_logprobs is [-1.0, 0.1, -1.0]; expected finite numbers, at most 0": {"logprobs": logprobs(-1.0, 0.1, -1.0)},
    "token_logprobs is [-1.0, None, -1.0]": {"logprobs": logprobs(-1.0, None, -1.0)},
    "'NoneType' object is not subscriptable": {"logprobs": None},
    "KeyError: 'token_logprobs'": {"logprobs": {}},
    "finish_reason is \"'length' after 3 tokens\"": {"finish_reason": "length"},
    "finish_reason is \"'tool_calls' after 3 tokens\"": {"finish_reason": "tool_calls"},
    "finish_reason is 'None after 3 tokens'": {"finish_reason": None},
    "finish_reason is \"'stop' after 2 tokens\"": {"token_ids": [A, B], "logprobs": logprobs(-1.0, -1.0)},
    "token_ids is [2, 1, 3]; expected nothing behind [1]": {"token_ids": [A, EOS_ID, B]},
    "prompt_token_ids is [0, 2, 3, 4]; expected those that were sent": {"prompt_token_ids": [0, *PROMPTS[0]]},
    "choices is 1; expected 1, numbered from 0": {"index": 1},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_set_aside_and_another_answers(lie, tmp_path, capsys):
    with running(liar := Stub(**{"/v1/completions": changed(**LIES[lie])})) as bad, running(Stub()) as good:
        engine = engine_of([bad, good], tmp_path)
        requests = asked(8, group=1)
        assert_answered(decode.generate(engine, requests), requests)
        assert [server.aside for server in engine.servers.servers] == [True, False]
        said = capsys.readouterr().err
        assert f"a sampler is set aside: {bad}: Lie: /v1/completions: " in said
        assert lie in said
        assert len(said.splitlines()) == 1
        n = len(liar.seen)
        decode.generate(engine, requests)
        assert len(liar.seen) == n
        alone = engine_of([bad], tmp_path)
        with pytest.raises(ConnectionError, match=f"no sampler is left: {bad}: Lie: {re.escape('/v1/completions')}"):
            decode.generate(alone, requests)


@pytest.mark.parametrize("reply", [b"<html>", b"[]", b'{"choices": {}}', b'{"choices": [{}]}', b"null"])
def test_what_is_no_reply_is_a_lie(reply, tmp_path):
    with (
        running(Stub(**{"/v1/completions": lambda body: reply})) as url,
        pytest.raises(ConnectionError, match="is left"),
    ):
        decode.generate(engine_of([url], tmp_path), asked(1))


def test_a_log_prob_that_rounding_has_lifted_is_zero(tmp_path):
    with running(Stub(**{"/v1/completions": changed(logprobs=logprobs(-1.0, 1e-7, -1.0))})) as url:
        ((answer,),) = decode.generate(engine_of([url], tmp_path), asked(1, group=1))
    assert answer.logp.tolist() == [-1.0, 0.0, -1.0]


def test_a_request_that_no_server_can_serve_is_told_at_once(tmp_path):
    for status, kind in (
        (400, ValueError),
        (404, ValueError),
        (422, ValueError),
        (401, PermissionError),
        (403, PermissionError),
    ):
        with running(
            stub := Stub(**{"/v1/completions": lambda body, s=status: (s, {"error": "n is too much"})})
        ) as url:
            with pytest.raises(kind, match=rf"{url}/v1/completions: {status}: .*n is too much"):
                decode.generate(engine_of([url], tmp_path), asked(1))
            assert len(stub.of("/v1/completions")) == 1


def test_what_has_failed_is_asked_again_with_the_same_seed(tmp_path):
    calls = Counter()

    def flaky(body):
        calls[body["seed"]] += 1
        if calls[body["seed"]] == 1:
            return 500, {"error": "boom"}
        if calls[body["seed"]] == 2:
            return {"choices": [c | {"finish_reason": "abort"} for c in completion(body)["choices"]]}
        return completion(body)

    with running(stub := Stub(**{"/v1/completions": flaky})) as url:
        engine = engine_of([url], tmp_path)
        assert_answered(decode.generate(engine, requests := asked(3)), requests)
        assert set(calls.values()) == {3}
        assert len(stub.of("/v1/models")) == 1  # it was there all the time: its weights are the newest


def test_a_request_that_fails_everywhere_ends_in_time(tmp_path):
    with running(Stub(**{"/v1/completions": lambda body: (500, {"error": "boom"})})) as url:
        with pytest.raises(ConnectionError, match="a request failed 3 times, at last on .*500: .*boom"):
            decode.generate(engine_of([url], tmp_path, retries=2, patience_s=60), asked(1))
        with pytest.raises(ConnectionError, match="no sampler is left: .*500"):
            decode.generate(engine_of([url], tmp_path, patience_s=0.3), asked(1))


def test_a_server_that_is_back_gets_the_weights_before_it_is_asked(tmp_path):
    loads, port = [], free_port()
    reload = lambda url, folder, version: loads.append((url, version))
    url = f"http://127.0.0.1:{port}"
    engine = engine_of([url], tmp_path, reload=reload, patience_s=30)
    assert loads == []
    requests, found = asked(4), []
    thread = threading.Thread(target=lambda: found.extend(decode.generate(engine, requests)))
    thread.start()
    time.sleep(0.3)
    with running(stub := Stub(), port):
        thread.join(20)
        assert_answered(found, requests)
        assert [p for p, _ in stub.seen].count("/v1/models") == len(loads) == 1
    engine.servers.patience_s = 0.2
    with pytest.raises(ConnectionError, match="no sampler is left"):
        decode.generate(engine, requests)
    with running(Stub()) as one, running(Stub()) as other:
        engine = engine_of([one, other, url], tmp_path, reload=reload)
        assert_answered(decode.generate(engine, requests), requests)
    engine = engine_of([url], tmp_path, patience_s=30)
    with running(Stub("sglang"), port):  # for whose kind nobody has divided the group
        assert_answered(decode.generate(engine, requests), requests, group_seeds=False)


def test_what_hangs_is_given_up_and_closing_ends_what_waits(tmp_path):
    hang = threading.Event()
    with running(Stub(**{"/v1/completions": lambda body: hang.wait(20) and b""})) as slow, running(Stub()) as good:
        engine = engine_of([slow, good], tmp_path, deadline_s=0.3, patience_s=0.0)
        assert_answered(decode.generate(engine, requests := asked(6)), requests)
        engine = engine_of([slow], tmp_path)
        groups = []
        thread = threading.Thread(
            target=lambda: groups.append(pytest.raises(ValueError, decode.generate, engine, asked(2)))
        )
        thread.start()
        time.sleep(0.2)
        engine.close()
        thread.join(5)
        assert "sampler is 'closed'" in str(groups[0].value)
        hang.set()


def test_the_token_goes_along(tmp_path, monkeypatch):
    with running(stub := Stub()) as url:
        decode.generate(engine_of([url], tmp_path), asked(1))
        assert stub.token is None
        monkeypatch.setenv("JAXRL_TOKEN", "a secret")
        decode.generate(engine_of([url], tmp_path), asked(1))
        assert stub.token == "Bearer a secret"
        monkeypatch.setenv("JAXRL_PUSH_TOKEN", "for pushes")
        decode.generate(engine_of([url], tmp_path), asked(1))
        assert stub.token == "Bearer a secret"
        stub.replies["/update_weights_from_disk"] = lambda body: {}
        from_disk(url, "/w", 1)
        assert stub.token == "Bearer for pushes"


# --- weights ------------------------------------------------------------------------------------------------------

FOLDERED = replace(MODEL, qkv_bias=False)  # a qwen3
FIRST, SECOND = (random_params(FOLDERED, seed) for seed in (0, 1))


def test_weights_go_out_as_a_folder_and_two_are_kept(tmp_path):
    calls = []

    def reload(url, folder, version):
        found = hf.load(FOLDERED, sharding.make_mesh(), folder)
        calls.append((url, version, float(np.abs(found["embed"] - SECOND["embed"]).max())))

    with running(Stub()) as one, running(Stub()) as other:
        engine = replace(engine_of([one, other], tmp_path, reload=reload, push=False), model=FOLDERED)
        (tmp_path / "weights" / "version-000007").mkdir(parents=True)  # of an earlier run
        engine = engine.pushed(SECOND, 7)
        assert sorted(calls) == sorted((url, 7, 0.0) for url in (one, other))
        assert engine.version == 7
        assert engine.bytes > sum(x.nbytes for x in jax.tree.leaves(SECOND))
        for version in (8, 9):
            engine = engine.pushed(FIRST)
            assert engine.version == version
        assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["version-000008", "version-000009"]
        assert [c[1] for c in calls] == [7, 7, 8, 8, 9, 9]
        requests = asked(4)
        assert_answered(decode.generate(engine, requests), requests, version=9)
        probed = engine.probe(requests[0])
        assert probed.keys() == {one, other}
        for group in probed.values():
            assert_answered([group], [requests[0]], group_seeds=False, version=9)
    bfloat = replace(engine, model=replace(FOLDERED, dtype="bfloat16"))
    bfloat.servers.left()[0].aside = bfloat.servers.left()[-1].aside = True
    assert bfloat.pushed(FIRST).bytes < engine.bytes


def test_a_reload_that_is_refused_ends_the_push_and_one_that_fails_is_made_later(tmp_path):
    def refused(url, folder, version):
        raise ValueError("no such folder")

    with running(Stub()) as url:
        with pytest.raises(ValueError, match="no such folder"):
            engine_of([url], tmp_path, reload=refused)
        calls = []

        def fails_once(url, folder, version):
            calls.append(version)
            if len(calls) == 1:
                raise TimeoutError("slow")

        engine = engine_of([url], tmp_path, reload=fails_once)
        assert calls == [4]
        assert_answered(decode.generate(engine, requests := asked(2)), requests)
        assert calls == [4, 4]


def test_reload_calls():
    load = "/update_weights_from_disk"
    rpc, cache = "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true"
    fine = lambda body: {}
    with running(stub := Stub(**{load: fine, rpc: fine, cache: lambda body: b""})) as url:
        from_disk(url, "/w/version-000003", 3)
        vllm(url, "/w/version-000003", 3)
    kwargs = {"weights_path": "/w/version-000003"}
    disk = {"model_path": "/w/version-000003", "weight_version": "3"}
    assert stub.seen == [(load, disk), (rpc, {"method": "reload_weights", "kwargs": kwargs}), (cache, {})]


# --- our own server -----------------------------------------------------------------------------------------------


def test_answers_of_our_own_server_are_those_of_this_process(tmp_path):
    """Its weights come by a folder; whole groups, parts of answers, stop strings, two prompts at once."""
    pytest.importorskip("jetstream", reason="google-jetstream is not installed (extra `serve`)")
    from test_engine import SIZES, closing
    from test_http import serving

    from jaxrl_llm.sampler.client import named
    from jaxrl_llm.serving.backend import DriverBackend

    mesh, held = sharding.make_mesh(), lambda params: weights.push(FOLDERED, params, None)
    with closing(DriverBackend(FOLDERED, TOKENIZER, held(FIRST), slots=4, **SIZES)) as made, serving(made) as api:

        def load(folder, version):
            with jax.set_mesh(mesh):
                made.load(named(weights.push(FOLDERED, hf.load(FOLDERED, mesh, folder), mesh).params), version)

        api.root, api.load = tmp_path, load
        engine = engine_of([f"http://127.0.0.1:{api.port}"], tmp_path, reload=from_disk, push=False)
        engine = replace(engine, model=FOLDERED).pushed(SECOND, 6)
        assert made.version == 6
        local = decode.LocalEngine(FOLDERED, TOKENIZER, held(SECOND), max_tokens=40)
        requests = [Request(p, 2, 20, Sampling(0.7), ("ab",), 3, i) for i, p in enumerate(PROMPTS)]
        parts = lambda r: [divmod(seed_of(r), 2**32)]
        same = [replace(r, draw=d, seed=s) for r in requests for d, s in parts(r)]
        found, alone = decode.generate(engine, requests), decode.generate(local, same)
        for group, there in zip(found, alone, strict=True):
            for a, b in zip(group, there, strict=True):
                assert (a.tokens.tolist(), a.finish) == (b.tokens.tolist(), b.finish)
                np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
                assert set(a.versions.tolist()) == {6}
        assert {a.finish for g in found for a in g} >= {EOS, LENGTH}
        (cut,) = decode.generate(engine, [replace(requests[2], group=1, budget=5, stop=())])
        (on,) = decode.generate(engine, [replace(requests[2], group=1, stop=(), begun=cut)])
        assert cut[0].finish == CANCELLED
        assert on[0].tokens[:5].tolist() == cut[0].tokens.tolist()
        script = lambda request, number: tuple(on[0].tokens.tolist())
        (forced,) = decode.generate(local, [replace(requests[2], group=1, stop=())], script=script)
        np.testing.assert_allclose(on[0].logp, forced[0].logp, atol=1e-5)
        with pytest.raises(ValueError, match="400: .*max_tokens is 41; expected at most 40"):
            decode.generate(engine, [replace(requests[0], max_tokens=41)])
        (greedy,) = decode.generate(engine, [replace(requests[0], sampling=Sampling(0.0), stop=())])
        assert greedy[0].tokens.tolist() == greedy[1].tokens.tolist()
