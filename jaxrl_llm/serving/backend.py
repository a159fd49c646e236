"""Groups of answers through JetStream's orchestrator, for `server.serve`, and JetStream's own service beside it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.serving.engine import GREEDY, DriverGroup, JetStreamEngine, Listen, js, manifest
from jaxrl_llm.serving.server import details_of
from jaxrl_llm.types import expect

TOKEN_LENGTH = 256  # characters of a token, as far as a prompt's text may be long


class Driver(js.orchestrator.Driver):
    """JetStream's Driver over one engine that both prefills and generates."""

    def __init__(self, engine: JetStreamEngine):
        params = engine.load_params()  # each is for prefill, then for generate
        super().__init__([engine], [engine], [params], [params], interleaved_mode=True)
        # Results that wait to be looked at are decoding steps for answers that may have ended.
        self._detokenize_backlogs[0].maxsize = 1

    def _generate_thread(self, idx: int) -> None:
        """JetStream asserts that some slot is taken after it has looked for free ones; the last one may be freed in
        between. Nothing is lost then, so the loop starts again."""
        while True:
            try:
                return super()._generate_thread(idx)
            except AssertionError:
                if self._generate_slots[idx].qsize() < self._generate_engines[idx].max_concurrent_decodes:
                    raise

    def withdraw(self, group: DriverGroup) -> None:
        """Takes the tickets of a group that are still queued out of the queue."""
        backlog = self._prefill_backlog
        with backlog.mutex:
            kept = [r for r in backlog.queue if r is None or r.prefill_content.group is not group]
            backlog.queue.clear()
            backlog.queue.extend(kept)


class DriverBackend:
    """Samples groups through JetStream's Driver. All methods may be called from any thread.

    An error in one of the Driver's threads kills the process: requests are checked before they enter it, and what goes
    wrong there nevertheless fails the request that it belongs to (see `JetStreamEngine`).
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, weights: SamplerWeights, **engine: Any):
        """engine: keywords of `JetStreamEngine`."""
        self.engine = JetStreamEngine(model, tokenizer, weights, **engine)
        self.manifest = manifest(weights.params)
        self.driver = Driver(self.engine)
        self._groups: set[DriverGroup] = set()  # under way
        self._lock, self._closed = threading.Lock(), False

    @property
    def version(self) -> int:
        return self.engine.weights.version

    def check(self, request: Request) -> None:
        """Raises ValueError if the request cannot be served."""
        self.engine.check(request)

    def submit(self, request: Request, listen: Listen | None = None) -> DriverGroup:
        """The group, when all of its answers are done. listen: see `DriverGroup`. Raises ValueError if the request
        cannot be served, RuntimeError after `close`."""
        self.engine.check(request)
        group = DriverGroup(request, listen)
        with self._lock:
            if self._closed:
                raise RuntimeError("the backend is closed")
            self._groups.add(group)
            for ticket in group.tickets:
                active = js.orchestrator.ActiveRequest(request.max_tokens, ticket, prefill_content=ticket)
                active.is_client_side_tokenization = True  # the Driver need not decode
                self.driver.place_request_on_prefill_queue(active)
        group.add_done_callback(self._groups.discard)
        return group

    def cancel(self, future: DriverGroup) -> None:
        """Ends the group at once with what there is, unless it is done; its slots are free after the call under way."""
        if not future.done():
            future.end()
            self.driver.withdraw(future)

    def load(self, leaves: dict[str, np.ndarray], version: int) -> float:
        """Swaps all weights between two calls of `generate`; the seconds it took. See `JetStreamEngine.swap`."""
        start = time.monotonic()
        self.engine.swap(leaves, version)
        return time.monotonic() - start

    def stats(self) -> dict[str, float]:
        """Slots and those free, answers that wait for one, groups prefilled, tokens, calls of `generate`, version."""
        tickets = self.engine.tickets
        free = sum(ticket is None or not ticket.answer.open for ticket in tickets)
        sizes = {"slots": len(tickets), "slots_free": free, "queued": self.driver._prefill_backlog.qsize()}
        return {**sizes, **self.engine.counts, "version": self.version}

    def close(self) -> None:
        """Cancels what is under way and ends the Driver's threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for group in list(self._groups):
            self.cancel(group)
        self.driver.stop()


class Orchestrator(js.orchestrator.LLMOrchestrator):
    """JetStream's service: text or token ids in, new text or token ids out as they are drawn, greedily."""

    def __init__(self, backend: DriverBackend, max_waiting: int):
        super().__init__(backend.driver)
        self._backend, self._max_waiting, self._calls = backend, max_waiting, 0
        self._draws = itertools.count()

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Nothing is prepended to the prompt, and the end-of-sequence token is not sent. A call that ends early frees
        its slot. INVALID_ARGUMENT: cannot be served. RESOURCE_EXHAUSTED: `max_waiting` calls are being answered.
        UNKNOWN: it failed."""
        if self._calls >= self._max_waiting:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._calls} calls are being answered")
        self._calls += 1
        context.add_done_callback(lambda _: setattr(self, "_calls", self._calls - 1))
        loop, drawn = asyncio.get_running_loop(), asyncio.Queue()  # of token ids, None at the end

        def put(ids: list[int] | None) -> None:
            with suppress(RuntimeError):  # the loop is closed, nobody listens
                loop.call_soon_threadsafe(drawn.put_nowait, ids)

        try:
            future = self._backend.submit(await self._request(request), put)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details_of(str(error)))
        context.add_done_callback(lambda _: self._backend.cancel(future))
        future.add_done_callback(lambda _: put(None))
        as_text = request.WhichOneof("content") == "text_content"
        unsent, sent_text, ids = [], "", []
        while (new := await drawn.get()) is not None:
            unsent, ids = unsent + new, ids + new
            text = self._backend.engine.config.tokenizer.decode(ids) if as_text else ""
            if not text.endswith("\ufffd"):  # a character that is not whole yet
                yield _response(text[len(sent_text) :], unsent)
                unsent, sent_text = [], text
        if unsent:
            yield _response(text[len(sent_text) :], unsent)
        if error := future.exception():
            await context.abort(grpc.StatusCode.UNKNOWN, details_of(f"{type(error).__name__}: {error}"))

    async def _request(self, asked: Any) -> Request:
        content, c, text = asked.WhichOneof("content"), self._backend.engine.config, asked.text_content.text
        expect(not asked.session_cache, "session_cache", asked.session_cache, "none: sessions are not kept")
        expect(content is not None, "content", content, "text_content or token_content")
        most = TOKEN_LENGTH * c.max_prompt_tokens
        expect(len(text) <= most, "text", f"{len(text)} characters", f"at most {most}")
        ids = asked.token_content.token_ids
        ids = ids if content == "token_content" else await asyncio.to_thread(c.tokenizer.encode, text)
        return Request(tuple(ids), max_tokens=asked.max_tokens, sampling=GREEDY, draw=next(self._draws) % 2**32)


def _response(text: str, ids: list[int]) -> Any:
    content = js.jetstream_pb2.DecodeResponse.StreamContent
    return js.jetstream_pb2.DecodeResponse(stream_content=content(samples=[content.Sample(text=text, token_ids=ids)]))


def add_decode_service(backend: DriverBackend, server: grpc.aio.Server, max_waiting: int = 256) -> None:
    """Adds JetStream's service to a server. max_waiting: calls that it answers at once."""
    js.jetstream_pb2_grpc.add_OrchestratorServicer_to_server(Orchestrator(backend, max_waiting), server)
