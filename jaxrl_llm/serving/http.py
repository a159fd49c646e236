"""OpenAI's completions API over the same backend: /v1/completions, /v1/models, /health, and weights from a folder."""

from __future__ import annotations

import json
import secrets
import select
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.sampler import wire
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.serving import server
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, expect

OWNER = "jaxrl_llm"  # of the model, as /v1/models tells it
MAX_BODY = 4 * 2**20  # bytes of a request
CONNECTIONS = 512  # at once; what comes beyond is closed unanswered
LOOK_S = 0.5  # between two looks whether the client is still there
FINISH = {EOS: "stop", STOP: "stop", LENGTH: "length"}

_any = lambda x: True
_is_ids = lambda x: isinstance(x, list) and all(type(i) is int and 0 <= i < 2**31 for i in x)
_listed = lambda x: x if isinstance(x, list) else [x]
_are_stops = lambda x: len(x) <= 16 and all(isinstance(s, str) and 0 < len(s) <= 256 for s in x)
Known = Mapping[str, tuple[Any, Any, str, Callable[[Any], bool]]]  # default, type, what is expected, whether it is so
FIELDS: Known = {
    "model": ("", str, "text", _any),
    "prompt": ("", str | list, "text or token ids, or a list of either", _any),
    "n": (1, int, f"1 to {wire.MAX_GROUP}", lambda x: 1 <= x <= wire.MAX_GROUP),
    "max_tokens": (16, int, "at least 1", lambda x: 1 <= x < 2**31),
    # with less warmth float32 cannot tell what is left of two logits
    "temperature": (1.0, int | float, "0 (greedy) or 0.001 to 1000", lambda x: x == 0 or 1e-3 <= x <= 1e3),
    "top_p": (1.0, int | float, "a number in (0, 1]", lambda x: 0 < x <= 1),
    "top_k": (0, int, "-1 or 0 (no filter), or a positive number", lambda x: -1 <= x < 2**31),
    "stop": ([], str | list, "at most 16 texts of 1 to 256 characters", lambda x: _are_stops(_listed(x))),
    "seed": (None, int, "a whole number in [0, 2^63)", lambda x: 0 <= x < 2**63),
    "logprobs": (None, int, "0 or 1: there is the log-prob of the drawn token alone", lambda x: 0 <= x <= 1),
    "stop_token_ids": ([], list, "token ids", _is_ids),
    "stream": (False, bool, "true or false", _any),
    "return_token_ids": (False, bool, "true or false", _any),
    "user": ("", str, "text", _any),
}
RELOAD: Known = {
    "model_path": ("", str, "a folder", _any),
    "weight_version": (-1, int | str, "a whole number", lambda x: str(x).isdecimal() and int(x) < 2**31),
}


class Refused(Exception):
    """Ends a call with an HTTP status: it and what the client is told."""


def fields(data: bytes, known: Known) -> dict[str, Any]:
    """The fields of a JSON object, defaults where they are missing or null. ValueError names one that is wrong.

    What is not known may be there if it says nothing: `"echo": false`.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body is no JSON: {error}") from None
    expect(isinstance(body, dict), "body", type(body).__name__, "a JSON object")
    for name, value in body.items():
        expect(name in known or not value, name, value, f"none: it is not served; known are {', '.join(known)}")
        if name in known and value is not None:
            _, kind, expected, holds = known[name]
            sound = isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) and holds(value)
            expect(sound, name, value, expected)
    return {name: spec[0] if body.get(name) is None else body[name] for name, spec in known.items()}


def parse(data: bytes, model: str, config: Any) -> dict[str, Any]:
    """The fields of a body for /v1/completions, and `requests`, one a prompt, for the backend to check.

    Sample i of a prompt depends on (prompt, sampling, seed, i) alone. The seed's lower 32 bits are `Request.seed`, the
    31 above them `Request.draw`. What of a prompt is beyond the longest is a begun answer: prompt and answer share the
    context. config: the engine's `SlotConfig`. ValueError names a field; Refused: the model has another name.
    """
    f, tokenizer, ends = fields(data, FIELDS), config.tokenizer, config.tokenizer.eos_ids
    if f["model"] not in ("", model):
        raise Refused(404, f"model is {f['model']!r}; expected {model!r}")
    ids, prompts = f["stop_token_ids"], f["prompt"]
    expect(not ids or {*ids} == {*ends}, "stop_token_ids", ids, f"{list(ends)}, which end an answer anyway, or none")
    prompts = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else prompts
    expect(all(isinstance(p, str) or _is_ids(p) for p in prompts), "prompt", prompts, FIELDS["prompt"][2])
    expect(len(prompts) * f["n"] <= wire.MAX_GROUP, "n", f["n"], f"at most {wire.MAX_GROUP} answers in all")
    sampling = Sampling(float(f["temperature"]), max(f["top_k"], 0), float(f["top_p"]))
    stop, requests = tuple(_listed(f["stop"])), []
    for prompt in prompts:
        draw, seed = divmod(secrets.randbits(63) if f["seed"] is None else f["seed"], 2**32)
        tokens = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        tail, room = np.array(tokens[config.max_prompt_tokens :], np.int32), config.max_tokens - f["max_tokens"]
        expected = f"at most {config.max_prompt_tokens + room}, for max_tokens = {f['max_tokens']}"
        expect(len(tail) <= max(room, 0), "prompt", f"{len(tokens)} tokens", expected)
        highest, size = max(tokens, default=0), config.model.vocab_size
        expect(highest < size, "prompt", highest, f"token ids in [0, {size})")
        begun = (Answer(tail, np.zeros(len(tail), np.float32), np.zeros_like(tail), CANCELLED),) * f["n"]
        asked = (f["n"], f["max_tokens"] + len(tail), sampling, stop, seed, draw, begun if len(tail) else ())
        requests.append(Request(tokens[: config.max_prompt_tokens], *asked))
    return f | {"requests": requests}


def _tail(request: Request) -> list[int]:
    """The end of a prompt that is longer than prompts are."""
    return request.begun[0].tokens.tolist() if request.begun else []


def _text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str], finish: str) -> str:
    """What is shown of an answer: neither what has ended it nor, while it is drawn, what may yet turn out to."""
    text = tokenizer.decode([t for t in tokens if t not in tokenizer.eos_ids])
    if finish == STOP:
        return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=None)]  # it may begin in the prompt
    if finish == CANCELLED:  # a character may lack a part, and a stop string its end
        text = text.rstrip("\ufffd")
        return text[: max(0, len(text) - max((len(s) - 1 for s in stop), default=0))]
    return text


@dataclass
class _Choice:
    """An answer on its way to the client, and how much of it has been sent."""

    index: int
    request: Request
    tokens: int = 0
    characters: int = 0
    finish: str | None = None

    def news(self, asked: dict, tokenizer: Tokenizer, tokens: list, logp: list, finish: str) -> list[dict[str, Any]]:
        """What has not been sent of it, as a choice of the reply, or nothing."""
        text, begin, first = _text(tokenizer, tokens, self.request.stop, finish), self.characters, self.tokens
        if self.finish or (len(tokens) == first and len(text) <= begin and finish == CANCELLED):
            return []
        self.tokens, self.characters, self.finish = len(tokens), max(begin, len(text)), FINISH.get(finish)
        choice = {"index": self.index, "text": text[begin:], "finish_reason": self.finish, "logprobs": None}
        if asked["logprobs"] is not None:
            names = [tokenizer.decode([t]) for t in tokens[first:]]
            choice["logprobs"] = {"tokens": names, "token_logprobs": logp[first:]}
        if asked["return_token_ids"]:
            choice["token_ids"] = tokens[first:]
            choice |= {} if first else {"prompt_token_ids": [*self.request.prompt, *_tail(self.request)]}
        return [choice]


@dataclass
class Api:
    """Completions of one policy, from any thread; before there is a backend it answers 503."""

    name: str  # of the model
    token: str | None = (
        None  # that callers have to bring; push_token: that those who bring weights have to, in its place
    )
    push_token: str | None = None
    max_waiting: int = 256  # groups that may be under way
    deadline_s: float = 600.0  # for each request
    root: Path | None = None  # where folders with weights may lie
    load: Callable[[Path, int], Any] | None = None  # puts a folder in Hugging Face format into the backend
    backend: Any = None  # a `backend.DriverBackend`
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(CONNECTIONS))
    _under_way: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def models(self) -> dict[str, Any]:
        c = self.backend.engine.config
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": OWNER, "version": self.backend.version}
        return {"object": "list", "data": [model | {"max_model_len": c.max_prompt_tokens + c.max_tokens}]}

    def reload(self, data: bytes) -> dict[str, Any]:
        """SGLang's call: the weights of folder `model_path`, as `weight_version`, or the next version if left out."""
        asked = fields(data, RELOAD)
        if self.load is None or self.root is None:
            raise Refused(403, "weights are not taken from folders here; expected jaxrl serve --weights FOLDER")
        folder, version = Path(asked["model_path"]).resolve(), int(asked["weight_version"])
        inside = self.root.resolve() in folder.parents and folder.is_dir()
        expect(inside, "model_path", asked["model_path"], f"a folder in {self.root}")
        with self._loading:
            self.load(folder, self.backend.version + 1 if version < 0 else version)
        return {"success": True, "message": f"{folder} is version {self.backend.version}"}

    def complete(self, asked: dict, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """The reply; with `stream` piece by piece. gone: whether the client has hung up, which ends all."""
        wake, groups, count, end = threading.Event(), [], len(asked["requests"]), time.monotonic() + self.deadline_s
        choices = [_Choice(i, r) for i, r in enumerate(r for r in asked["requests"] for _ in range(r.group))]
        about = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time())}
        with self._lock:
            if self._under_way + count > self.max_waiting:
                raise Refused(429, f"{self._under_way} groups are under way; expected room for {count} more")
            self._under_way += count
        try:
            for request in asked["requests"]:
                groups.append(self.backend.submit(request, (lambda _: wake.set()) if asked["stream"] else None))
                groups[-1].add_done_callback(lambda _: wake.set())
            done = False
            while not done:
                wake.wait(LOOK_S)
                wake.clear()
                done = all(group.done() for group in groups)
                if gone():
                    raise ConnectionError("the client has hung up")
                if not done and time.monotonic() > end:
                    raise Refused(503, f"not done within {self.deadline_s:g} s")
                if (done or asked["stream"]) and (news := self._news(asked, groups, choices, done)):
                    yield about | {"model": self.name} | news
        except RuntimeError as error:  # the backend is closed
            raise Refused(503, str(error)) from None
        finally:
            for group in groups:
                self.backend.cancel(group)
            with self._lock:
                self._under_way -= count

    def _news(self, asked: dict, groups: list, choices: list[_Choice], done: bool) -> dict[str, Any]:
        """Choices of which there is something to tell, and, when all are done, how many tokens there were."""
        states, tokenizer = [], self.backend.engine.config.tokenizer
        for group in groups:
            with group.lock:
                skip = len(_tail(group.request))
                states += [(a.tokens[skip:], a.logp[skip:], a.finish) for a in group.active.answers]
        if done and any(finish == CANCELLED for *_, finish in states):
            raise Refused(503, "the server has cancelled it")
        news = [x for c, state in zip(choices, states, strict=True) for x in c.news(asked, tokenizer, *state)]
        old, new = (
            sum(len(r.prompt) + len(_tail(r)) for r in asked["requests"]),
            sum(len(tokens) for tokens, *_ in states),
        )
        used = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
        return {"choices": news, "usage": used if done else None} if news else {}


class Handler(BaseHTTPRequestHandler):
    """One request of one connection, which is closed behind it."""

    timeout = 10.0  # seconds that a connection may neither send nor take a byte
    log_message = lambda self, *_: None

    def __init__(self, api: Api, *connection: Any):
        self.api = api
        super().__init__(*connection)

    def handle(self) -> None:
        if self.api.room.acquire(blocking=False):
            try:
                with suppress(OSError):  # of one connection
                    super().handle()
            finally:
                self.api.room.release()

    def do_GET(self) -> None:
        health = lambda: {"status": "ok", "version": self.api.backend.version}
        self._answer({"/health": health, "/v1/models": self.api.models})

    def do_POST(self) -> None:
        reload = lambda: self.api.reload(self._body())
        self._answer({"/v1/completions": self._complete, "/update_weights_from_disk": reload})

    def _answer(self, methods: dict[str, Callable[[], dict[str, Any] | None]]) -> None:
        path, said = self.path.partition("?")[0], self.headers["authorization"]
        knows = lambda secret: secret is not None and server.knows(secret, {"authorization": said})
        trusted = knows(self.api.push_token) or self.api.push_token is None
        try:
            if path != "/health" and self.api.token and not (knows(self.api.token) or knows(self.api.push_token)):
                raise Refused(401, "authorization: expected Bearer and the token")
            if path == "/update_weights_from_disk" and not trusted:
                raise Refused(403, "authorization: expected Bearer and the token for pushes")
            if path not in methods:
                raise Refused(404, f"{self.command} {path[:100]}: expected {' or '.join(methods)}")
            if self.api.backend is None:
                raise Refused(503, "not ready yet")
            if (reply := methods[path]()) is not None:
                self._send(200, reply)
        except Exception as error:  # an OSError: the client has gone, or takes nothing any more
            other = (400, str(error)) if isinstance(error, ValueError) else (500, f"{type(error).__name__}: {error}")
            status, text = error.args if isinstance(error, Refused) else other
            with suppress(OSError):
                self._send(status, {"error": {"message": text[:500], "type": "error", "code": status}})

    def _send(self, status: int, reply: dict[str, Any] | None, kind: str = "application/json") -> None:
        """The whole reply; None: its head alone."""
        data = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if reply is not None:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        length = self.headers["content-length"] or ""
        expect(length.isdecimal() and len(length) < 20, "Content-Length", length[:50], "the bytes of the body")
        if int(length) > MAX_BODY:
            for _ in range(64):  # a client that is still sending would not see the answer
                self.rfile.read1(2**16)
            raise Refused(413, f"body is {length} bytes; expected at most {MAX_BODY}")
        return self.rfile.read(int(length))

    def _gone(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0))  # nothing else is to come than the connection's end

    def _complete(self) -> dict[str, Any] | None:
        asked = parse(self._body(), self.api.name, self.api.backend.engine.config)
        event = lambda data: self.wfile.write(f"data: {data}\n\n".encode())
        with closing(self.api.complete(asked, self._gone)) as replies:
            first = next(replies)  # what is wrong has its status up to here
            if not asked["stream"]:
                return first
            self._send(200, None, "text/event-stream")
            event(json.dumps(first))
            try:
                for reply in replies:
                    event(json.dumps(reply))
                event("[DONE]")
            except Refused as error:
                event(json.dumps({"error": {"message": error.args[1], "code": error.args[0]}}))


@contextmanager
def listening(api: Api, host: str, port: int, cert: str | None = None, key: str | None = None) -> Iterator[int]:
    """Answers meanwhile; yields the port (0: any that is free). cert, key: PEM files, for TLS. OSError: it is taken."""
    with ThreadingHTTPServer((host, port), partial(Handler, api)) as listener:
        if cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            listener.socket = context.wrap_socket(listener.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield listener.server_address[1]
        finally:
            listener.shutdown()
