"""Engines that are not ours, behind OpenAI's completions API or SGLang's own, as one sampler: see docs/engines.md."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models import hf, lora
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler.requests import Answer, Group, NextRequest, PartialAnswer, Request, check
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.scoring import gathered
from jaxrl_llm.types import CANCELLED, expect

SCHEME = "openai+"  # before http:// or https:// in rollout.servers
LOOK_S = 10.0  # a server that takes longer to say what it has is down
BACKOFF_S = 0.1, 5.0  # between attempts to reach a server that is down: the first and the longest
ASK_S = 0.2  # after so long a source that had no request is asked again: the learner may have caught up
ROUNDING = 1e-5  # nats that a log-prob may be above 0
SEEDED_CHOICES = {"jaxrl_llm", "vllm"}  # owners of engines that give each of n answers to one request its own seed
# Of statuses: where no other attempt would do better, and the rest
FINAL = {400: ValueError, 404: ValueError, 422: ValueError, 401: PermissionError, 403: PermissionError}


class Lie(Exception):
    """What a server has answered cannot be so."""


class Busy(OSError):
    """A server has answered that it cannot do this now."""


def call(
    url: str, path: str, body: Any = None, *, ca: str | None = None, timeout_s: float = 600.0, push: bool = False
) -> Any:
    """The JSON that a server replies to a POST, or to a GET without a body.

    $JAXRL_TOKEN goes along if it is set, or, with `push`, $JAXRL_PUSH_TOKEN if that is. Raises what `FINAL` has for a
    status of failure, Busy for others, OSError where there is no reply, Lie if it is no JSON.
    """
    token = (push and os.environ.get("JAXRL_PUSH_TOKEN")) or os.environ.get("JAXRL_TOKEN")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    secure = [HTTPSHandler(context=ssl.create_default_context(cafile=ca))] * url.startswith("https")
    post = urllib.request.Request(url + path, body if body is None else json.dumps(body).encode(), headers)
    try:
        with build_opener(ProxyHandler({}), *secure).open(post, timeout=timeout_s) as reply:
            text = reply.read().decode(errors="replace")
    except HTTPError as error:
        text = " ".join(error.read(1000).decode(errors="replace").split())
        raise FINAL.get(error.code, Busy)(f"{url}{path}: {error.code}: {text[:300]}") from None
    except HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from None
    try:
        return json.loads(text or "{}")
    except ValueError:
        raise Lie(f"{path} is answered by {text[:100]!r}; expected JSON") from None


def from_disk(url: str, folder: str, version: int, ca: str | None = None) -> None:
    """`rollout.reload` for SGLang, and for `jaxrl serve --weights`."""
    call(url, "/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)}, ca=ca, push=True)


def vllm(url: str, folder: str, version: int, ca: str | None = None) -> None:
    """`rollout.reload` for vLLM, started with VLLM_SERVER_DEV_MODE=1."""
    call(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}, ca=ca)
    call(url, "/reset_prefix_cache?reset_running_requests=true", {}, ca=ca)  # keys and values by the old weights


@dataclass
class _Server:
    """A server as it answered last. What stands below `loading` is read and written under the lock of its `Servers`."""

    url: str
    model: str = ""  # what it calls its model, and who it says has made it
    owner: str = ""
    loaded: int = -1  # version of the weights that it has
    loading: threading.Lock = field(default_factory=threading.Lock)
    in_flight: int = 0
    failures: int = 0  # since it answered last,
    since: float = 0.0  # the first of them at
    again: float = 0.0  # when it may be tried again
    error: str = ""
    aside: bool = False  # for good


class Servers:
    """Where calls go, each to the server with fewest.

    A server that is down is tried again for `patience_s`, and gets the newest weights before it is asked anything; then
    it is set aside, and at once if what it has answered cannot be so.
    """

    def __init__(
        self, urls: Sequence[str], reload: Callable[[str, str, int], Any], folder: Path, *, ca: str | None = None,
        seeded: bool = True, in_flight: int = 32, deadline_s: float = 600.0, retries: int = 10,
        patience_s: float = 120.0,
    ):  # fmt: skip
        """reload: (url, folder, version): makes the server take the weights in a folder of `folder`."""
        self.servers, self.reload, self.folder = [_Server(url.removeprefix(SCHEME)) for url in urls], reload, folder
        self.ca, self.seeded, self.in_flight, self.deadline_s = ca, seeded, in_flight, deadline_s
        self.retries, self.patience_s, self.room = retries, patience_s, in_flight * len(self.servers)
        self._changed, self._written, self.closed = threading.Condition(), list[tuple[Path, int]](), threading.Event()

    def push(self, write: Callable[[Path], None], version: int) -> int:
        """Weights for every server, in a folder that `write` makes: its bytes. One that is down gets them later."""
        folder = self.folder.resolve() / f"version-{version:06}"
        shutil.rmtree(folder, ignore_errors=True)  # that of an earlier run
        write(folder)
        self._written.append((folder, version))
        for pushed in [spawn(partial(self.on, server, lambda *_: True)) for server in self.left()]:
            pushed.result()
        for old, _ in self._written[:-2]:  # a server that has failed may still be reading the one before
            shutil.rmtree(old, ignore_errors=True)
        del self._written[:-2]
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def left(self) -> list[_Server]:
        return [server for server in self.servers if not server.aside]

    def on(self, server: _Server, ask: Callable[[_Server, int], Any]) -> Any:
        """What `ask` finds at a server, which has the newest weights, of this version; None if it fails."""
        try:
            with server.loading:
                folder, version = self._written[-1]
                if server.loaded != version:
                    card = call(server.url, "/v1/models", ca=self.ca, timeout_s=LOOK_S)["data"][0]
                    server.model, server.owner = str(card["id"]), str(card.get("owned_by"))
                    self.reload(server.url, str(folder), version)
                    server.loaded = version
            found = ask(server, version)
        except PermissionError:
            raise
        except (OSError, Lie, KeyError, IndexError, TypeError, AttributeError) as error:
            self._failed(server, error)
            return None
        with self._changed:
            server.failures = 0
        return found

    def _failed(self, server: _Server, error: Exception) -> None:
        with self._changed:
            now, (first, longest), down = time.monotonic(), BACKOFF_S, isinstance(error, OSError)
            server.since, server.failures = server.since if server.failures else now, server.failures + 1
            server.again = now + min(first * 2 ** min(server.failures - 1, 10), longest)
            server.error = f"{server.url}: {type(error).__name__}: {error}"
            if not isinstance(error, Busy):
                server.loaded = -1  # it may have been started again, with other weights
            if not server.aside and not (down and now - server.since < self.patience_s):
                server.aside = True
                print(f"a sampler is set aside: {server.error}", file=sys.stderr)

    def attempt(self, ask: Callable[[_Server, int], Any], over: threading.Event) -> Any:
        """What `ask` finds at a server, at another one if that fails; ConnectionError when none is left."""
        for _ in range(self.retries + 1):
            with self._changed:
                while (server := self._free(over)) is None:
                    self._changed.wait(BACKOFF_S[0])
                server.in_flight += 1
            try:
                if (found := self.on(server, ask)) is not None:
                    return found
            finally:
                with self._changed:
                    server.in_flight -= 1
                    self._changed.notify_all()
        raise ConnectionError(f"a request failed {self.retries + 1} times, at last on {server.error}")

    def _free(self, over: threading.Event) -> _Server | None:
        expect(not over.is_set() and not self.closed.is_set(), "sampler", "closed", "one that is open")
        if not self.left():
            raise ConnectionError(f"no sampler is left: {'; '.join(server.error for server in self.servers)}")
        able = [s for s in self.left() if s.in_flight < self.in_flight and s.again <= time.monotonic()]
        return min(able, key=lambda s: s.in_flight, default=None)


def spawn(fn: Callable[[], Any]) -> Future:
    """The future of fn(), in a thread that does not keep the process from ending."""
    begun = Future()
    out = gathered([begun], fn)
    threading.Thread(target=begun.set_result, args=(None,), daemon=True).start()
    return out


@dataclass(frozen=True)
class OpenAIEngine:
    """Servers, and how they draw unless a request says otherwise."""

    servers: Servers
    model: ModelConfig  # dtype: of the weights that are pushed
    tokenizer: Tokenizer
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    version: int = 0  # of the weights pushed last
    bytes: int = 0  # of them

    def sample(self, next_request: NextRequest, latest: Callable | None = None) -> Iterator[tuple[Request, Group]]:
        """Groups as they are done. A token's version is that of the weights that its server had when it was asked."""
        running, over = dict[Future[Group], tuple[Request, int]](), threading.Event()
        room = lambda: sum(calls for _, calls in running.values()) < self.servers.room
        try:
            while True:
                expect(not self.servers.closed.is_set(), "sampler", "closed", "one that is open")
                while room() and (request := next_request()) is not None:
                    future, calls = self._begin(request, over)
                    running[future] = request, calls
                if not running:
                    return
                for future in wait(running, ASK_S, FIRST_COMPLETED).done:
                    yield running.pop(future)[0], future.result()
        finally:
            over.set()

    def pushed(self, params: Any, version: int | None = None) -> OpenAIEngine:
        """The same servers with the learner's parameters, one version on."""
        version, dtype = self.version + 1 if version is None else version, self.model.dtype
        params, model = lora.merged(self.model, params, dtype), lora.without(self.model)
        write = lambda folder: hf.export(params, model, self.tokenizer, folder, dtype)
        return replace(self, version=version, bytes=self.servers.push(write, version))

    def probe(self, request: Request) -> dict[str, Group]:
        """The answer to a request of each server that can be reached, by its name."""
        numbers, servers = range(request.group), self.servers.left()
        ask = lambda server, version: [self._draw(request, [g], server, version)[g] for g in numbers]
        return {server.url: tuple(group) for server in servers if (group := self.servers.on(server, ask)) is not None}

    def close(self) -> None:
        """Nothing is asked any more. Calls in other threads raise ValueError when those under way are answered."""
        self.servers.closed.set()

    def _begin(self, request: Request, over: threading.Event) -> tuple[Future[Group], int]:
        """The future group, and how many calls it takes."""
        check(request, vocab_size=self.model.vocab_size)
        kept = {g: a.answer() for g in range(request.group) if not (a := PartialAnswer(request, g)).open}
        numbers = [g for g in range(request.group) if g not in kept]
        known = {server.owner for server in self.servers.left() if server.owner}
        # Greedy answers are equal, and vLLM does not draw several of them.
        whole = not request.begun and request.sampling.temperature > 0 and known <= SEEDED_CHOICES
        asks = [partial(self._draw, request, part) for part in ([numbers] if whole else [[g] for g in numbers])]
        calls = [spawn(partial(self.servers.attempt, ask, over)) for ask in asks]

        def group() -> Group:
            found = kept | {g: answer for call in calls for g, answer in call.result().items()}
            return tuple(found[g] for g in range(request.group))

        return gathered(calls, group), len(calls)

    def _draw(self, request: Request, numbers: Sequence[int], server: _Server, version: int) -> dict[int, Answer]:
        """Answers of these numbers, from one call to a server. Lie: what it says cannot be so."""
        if len(numbers) > 1 and server.owner not in SEEDED_CHOICES:  # which was not known when this was begun
            return {g: self._draw(request, [g], server, version)[g] for g in numbers}
        answers, sglang = [PartialAnswer(request, g) for g in numbers], "sgl" in server.owner
        prompt, most = [*request.prompt, *answers[0].tokens], answers[0].limit - len(answers[0].tokens)
        s, ends, stop = request.sampling, list(self.tokenizer.eos_ids), list(request.stop)
        drawn = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k or -1, "n": len(numbers)}
        drawn |= {"stop": stop, "stop_token_ids": ends}
        if self.servers.seeded:
            named = repr((request.seed, request.draw, numbers[0], len(answers[0].tokens))).encode()
            seed = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) >> 2
            drawn["sampling_seed" if sglang else "seed"] = seed
        if sglang:
            path, body = "/generate", {"input_ids": prompt, "return_logprob": True}
            body |= {"sampling_params": drawn | {"max_new_tokens": most}}
        else:
            path, body = "/v1/completions", {"model": server.model, "prompt": prompt, "max_tokens": most, **drawn}
            body |= {"logprobs": 0, "return_token_ids": True}
        reply = call(server.url, path, body, ca=self.servers.ca, timeout_s=self.servers.deadline_s)
        try:
            for answer, choice in zip(answers, _choices(reply, sglang, len(numbers)), strict=True):
                if choice[-1] == "abort":
                    raise Busy("it has aborted a request")
                self._take(answer, prompt, most, version, *choice)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise Lie(f"{path}: {type(error).__name__}: {error}"[:300]) from None
        return {answer.number: answer.answer() for answer in answers}

    def _take(
        self, answer: PartialAnswer, prompt: list, most: int, version: int, seen: Any, tokens: Any, logp: Any, why: Any
    ) -> None:
        """Put what a server says that it has drawn behind an answer. ValueError: it cannot be so."""
        size, ends, n = self.model.vocab_size, self.tokenizer.eos_ids, len(tokens)
        expect(seen is None or list(seen) == prompt, "prompt_token_ids", seen, "those that were sent")
        expect(1 <= n <= most, "token_ids", f"{n} tokens", f"1 to {most}")
        expect(all(type(t) is int and 0 <= t < size for t in tokens), "token_ids", tokens, f"ids in [0, {size})")
        expect(len(logp) == n, "token_logprobs", f"{len(logp)} for {n} tokens", "one for each")
        sound = all(type(x) in (int, float) and math.isfinite(x) and x <= ROUNDING for x in logp)
        expect(sound, "token_logprobs", logp, "finite numbers, at most 0")
        expect(not {*tokens[:-1]} & {*ends}, "token_ids", tokens, f"nothing behind {list(ends)}, which end an answer")
        answer.take(tokens, [min(float(x), 0.0) for x in logp], version, self.tokenizer)
        full = why == "length" and n == most
        ended = full or (why == "stop" and answer.finish != CANCELLED)
        expected = "stop, behind an end-of-sequence token or a stop string, or length, at so many tokens as were asked"
        expect(ended, "finish_reason", f"{why!r} after {n} tokens", expected)


def _choices(reply: Any, sglang: bool, n: int) -> list[tuple[Any, Any, Any, Any]]:
    """Prompt (None: not told), tokens, log-probs and finish reason of the n answers in a reply."""
    if sglang:
        metas = [answer["meta_info"] for answer in (reply if isinstance(reply, list) else [reply])]
        columns = [[*zip(*meta["output_token_logprobs"], strict=True)] for meta in metas]
        return [(None, list(c[1]), list(c[0]), m["finish_reason"]["type"]) for c, m in zip(columns, metas, strict=True)]
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    expect([c["index"] for c in choices] == [*range(n)], "choices", len(choices), f"{n}, numbered from 0")
    drawn = lambda c: (c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"])
    return [(c.get("prompt_token_ids"), *drawn(c)) for c in choices]
