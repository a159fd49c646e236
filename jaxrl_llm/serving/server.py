"""A rollout worker: gRPC service over a backend that samples, readiness and metrics over HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import hmac
import ipaddress
import math
import signal
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
import prometheus_client
from google.protobuf.message import Message

from jaxrl_llm import types
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler import wire
from jaxrl_llm.sampler.requests import Group, PartialAnswer, Request

REMEMBERED = 64 * 2**20  # bytes of replies that are kept for attempts that come again
ROOM = 4 * 2**30  # bytes of host memory for calls, until their replies have been read: messages and what is drawn
ANSWER_BYTES, TOKEN_BYTES = 4096, 128  # of an answer under way, and of each token that it may have
STALLED_S, SLOWEST = 30.0, 2**20  # a push without a chunk for so long, or with fewer bytes a second, is ended
DETAILS = 1000  # characters of a status
LISTENING = "listening on"  # a server's line when it is ready
GRACE_S = 5.0  # what runs at SIGTERM may go on for so long, less a second for its replies
MAX_CALLS = 1024  # of all methods and all peers
MAX_THREADS = 64  # of the process, with one for each connection over HTTP
Code = grpc.StatusCode


class Backend(Protocol):
    """What samples. Every method may be called from any thread; only `load` and `close` may take their time."""

    version: int  # of the weights
    manifest: wire.Manifest

    def check(self, request: Request) -> None:
        """ValueError if the request cannot be served."""

    def submit(self, request: Request) -> concurrent.futures.Future[Group]:
        """Queue a request. ValueError if it cannot be served."""

    def cancel(self, future: concurrent.futures.Future[Group]) -> None:
        """Free the request's slots; its answers end where they are, with finish `cancelled`."""

    def load(self, leaves: dict[str, np.ndarray], version: int) -> float:
        """Swap all weights between two tokens; the seconds it took. ValueError: the old ones stay."""

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Refusal(Exception):
    """Ends a call with a gRPC status: its code and details."""


@dataclass
class _GroupCall:
    """A request that is being sampled, and how many calls wait for it."""

    future: concurrent.futures.Future[Group]
    group: asyncio.Future[Group]  # the same for the event loop
    weights: int  # which succession of weights it has begun with
    waiters: int = 0
    cut: bool = False  # ended by its deadline or because the server stops


class Service:
    """The coroutines behind rollout.proto. Status codes: see `sample` and `load_weights`."""

    def __init__(self, backend: Backend, max_waiting: int = 256, push_token: str | None = None):
        types.expect(max_waiting >= 1, "max_waiting", max_waiting, "at least 1")
        self.backend, self.max_waiting = backend, max_waiting
        self.instance, self.ready = uuid.uuid4().hex, True
        self.run, self.client = "", ""  # whose weights are loaded (see Header)
        self.learner_seen = -math.inf  # when that run's learner was heard of last, by the monotonic clock
        self.counts: Counter[str] = Counter(answered=0, repeated=0, refused=0, failed=0, cancelled=0, cut=0, loaded=0)
        self._push_token = push_token
        self._running: dict[bytes, _GroupCall] = {}  # by the digest of the request's bytes, its id among them
        self._answered: OrderedDict[bytes, bytes] = OrderedDict()  # replies, as they are sent, by the same
        self._remembered, self._held = 0, 0  # bytes
        self._weights = 0  # counts successions of weights: a new one begins with another run's, or with lower versions
        self._assembling, self._swapping = asyncio.Lock(), threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Messages arrive as bytes: the methods parse them, so that garbage gets a status of its own."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        methods = {"Sample": unary(self._answering(self.sample)), "Stats": unary(self._answering(self.stats))}
        methods["LoadWeights"] = stream(self._answering(self.load_weights))
        return grpc.method_handlers_generic_handler(wire.SERVICE, methods)

    def _answering(self, method: Callable[[Any, grpc.aio.ServicerContext], Awaitable[Message]]) -> Callable:
        """The method as grpc calls it. ValueError is INVALID_ARGUMENT, a Refusal what it says, the rest UNKNOWN."""

        async def answer(asked: Any, context: grpc.aio.ServicerContext) -> bytes:
            try:
                reply = await method(asked, context)
                return reply if isinstance(reply, bytes) else reply.SerializeToString()
            except (Refusal, ValueError) as error:
                self.counts["refused"] += 1
                code, details = error.args if isinstance(error, Refusal) else (Code.INVALID_ARGUMENT, str(error))
            except Exception as error:
                self.counts["failed"] += 1
                code, details = Code.UNKNOWN, f"{type(error).__name__}: {error}"
            await context.abort(code, details_of(details))

        return answer

    def _hold(self, context: grpc.aio.ServicerContext, size: int) -> None:
        """Counts bytes until the call is over, its reply read. One call alone may be as large as its fields allow."""
        if self._held and self._held + size > ROOM:
            raise Refusal(Code.RESOURCE_EXHAUSTED, f"{self._held} bytes are taken: no room for {size} more")
        self._held += size
        context.add_done_callback(lambda _: setattr(self, "_held", self._held - size))

    async def sample(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """The whole group. An attempt that comes again joins the one that runs, or gets its answer.

        INVALID_ARGUMENT: cannot be served. FAILED_PRECONDITION: meant for a server that has restarted since, for one
        with another run's weights, or with newer ones. RESOURCE_EXHAUSTED: `max_waiting` groups are being sampled, or
        as many bytes are taken as there is room for. ABORTED: ended by the server. UNKNOWN: it failed. A call that ends
        early, by deadline or cancelled, cancels the group unless another call waits for it.
        """
        message = wire.parse(pb.SampleRequest, data)
        request = wire.from_request_message(message)
        types.expect(request.group <= wire.MAX_GROUP, "group", request.group, f"at most {wire.MAX_GROUP}")
        self.backend.check(request)
        self._check_weights(message)
        self._hear(message.run, context)
        self._hold(context, len(data) + request.group * (ANSWER_BYTES + TOKEN_BYTES * request.max_tokens))
        key = hashlib.blake2b(data, digest_size=32).digest()
        self.counts["repeated"] += key in self._answered or key in self._running
        if key in self._answered:
            return self._answered[key]
        if key not in self._running and len(self._running) >= self.max_waiting:
            raise Refusal(Code.RESOURCE_EXHAUSTED, f"{len(self._running)} groups are being sampled")
        group = await self._sampled(key, request, message)
        reply = wire.to_reply(group).SerializeToString()
        if key not in self._answered:
            self.counts["answered"] += 1
            self._answered[key] = reply
            self._remembered += len(key) + len(reply)
        while self._remembered > REMEMBERED:
            self._remembered -= sum(map(len, self._answered.popitem(last=False)))
        return reply

    def _check_weights(self, message: pb.SampleRequest) -> None:
        """Refuses a request for weights that are not here."""
        if message.instance not in ("", self.instance):
            raise Refusal(Code.FAILED_PRECONDITION, "the server has restarted since its last Stats")
        if message.run not in ("", self.run):
            raise Refusal(Code.FAILED_PRECONDITION, f"run={message.run!r}: the weights are those of run {self.run!r}")
        if message.version > (version := self.backend.version):
            raise Refusal(Code.FAILED_PRECONDITION, f"version={message.version}: the weights are version {version}")

    async def _sampled(self, key: bytes, request: Request, message: pb.SampleRequest) -> Group:
        """The group, which the backend samples once for all calls with this key, until no call waits for it."""
        if key not in self._running:
            future, seconds = self.backend.submit(request), message.deadline_s
            self._running[key] = work = _GroupCall(future, asyncio.wrap_future(future), self._weights)
            if seconds:
                timer = asyncio.get_running_loop().call_later(seconds, self._cut, work)
                work.group.add_done_callback(lambda _: timer.cancel())
        work = self._running[key]
        work.waiters += 1
        try:
            group = await asyncio.shield(work.group)  # shielded: the future is the backend's, it alone resolves it
        finally:
            work.waiters -= 1
            if not work.waiters:
                del self._running[key]
                if not work.group.done():
                    self.counts["cancelled"] += 1
                    self.backend.cancel(work.future)
        self._check_weights(message)
        if message.run and work.weights != self._weights:
            raise Refusal(Code.FAILED_PRECONDITION, f"run={message.run!r}: other weights were loaded meanwhile")
        limits = [PartialAnswer(request, g).limit for g in range(request.group)]
        ended = any(a.finish == types.CANCELLED and len(a.tokens) < n for a, n in zip(group, limits, strict=True))
        if ended and not (work.cut and message.deadline_s):
            raise Refusal(Code.ABORTED, "the server has cancelled the group")
        return group

    def _cut(self, work: _GroupCall) -> None:
        if not work.future.done():
            work.cut = True
            self.counts["cut"] += 1
            self.backend.cancel(work.future)

    def stop(self) -> None:
        """Ends all groups: parts for those that take them, ABORTED for the others."""
        for work in self._running.values():
            self._cut(work)

    async def load_weights(self, chunks: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> pb.LoadReply:
        """All weights, swapped when the last byte is verified; after any error the old ones stay.

        INVALID_ARGUMENT: not this model's leaves, or no message. FAILED_PRECONDITION: a lower version than the one of
        the same client that is loaded, or the learner of another run is there. DATA_LOSS: damaged, out of order or
        incomplete. DEADLINE_EXCEEDED: stalled.
        """
        try:
            async with self._assembling:  # host memory for one copy, whoever pushes
                leaves, header = await self._assembled(chunks)
        except TimeoutError:
            raise Refusal(Code.DEADLINE_EXCEEDED, f"no chunk for {STALLED_S:g} s, or less than 1 MiB/s") from None
        except OSError as error:
            raise Refusal(Code.DATA_LOSS, str(error)) from None
        seconds = await asyncio.to_thread(self._swap, leaves, header)
        self.counts["loaded"] += 1
        return pb.LoadReply(version=header.version, seconds=seconds)

    async def _assembled(self, chunks: AsyncIterator[bytes]) -> tuple[dict[str, np.ndarray], pb.Header]:
        """What is pushed, verified. TimeoutError if it stalls."""
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(STALLED_S) as limit:
            first = wire.parse(pb.Chunk, await anext(chunks, b""))
            if (part := first.WhichOneof("part")) != "header":
                raise OSError(f"a {part} before the header" if part else "no header")
            self._check_header(header := first.header)
            assembly = wire.Assembly(header, self.backend.manifest)
            end = clock() + STALLED_S + header.bytes / SLOWEST
            async for data in chunks:
                limit.reschedule(min(clock() + STALLED_S, end))
                assembly.add(wire.parse(pb.Chunk, data))
            return assembly.finish(), header

    def _hear(self, run: str, context: grpc.aio.ServicerContext, leaves: bool = False) -> None:
        """Only who may push is a learner."""
        may_push = self._push_token is None or knows(self._push_token, context.invocation_metadata())
        if run and run == self.run and may_push:
            self.learner_seen = -math.inf if leaves else time.monotonic()

    def _check_header(self, header: pb.Header) -> None:
        """Refuses weights that may not be loaded now."""
        loaded, silent_s = self.backend.version, time.monotonic() - self.learner_seen
        if header.client == self.client and header.version < loaded:
            raise Refusal(Code.FAILED_PRECONDITION, f"version={header.version}: {loaded} is loaded")
        if header.run != self.run and silent_s < wire.LEARNER_S:
            there = f"the learner of run {self.run!r} was here {silent_s:.0f} s ago"
            wanted = f"expected it to have ended, or to be silent for {wire.LEARNER_S:.0f} s"
            raise Refusal(Code.FAILED_PRECONDITION, f"run={header.run!r}: {there}; {wanted}")

    def _swap(self, leaves: dict[str, np.ndarray], header: pb.Header) -> float:
        with self._swapping:  # a thread's lock: a call that is cancelled leaves its thread at work
            self._check_header(header)  # again: another push may have been faster
            self._weights += header.run != self.run or header.version < self.backend.version
            seconds = self.backend.load(leaves, header.version)
            self.run, self.client = header.run, header.client
            self.learner_seen = time.monotonic() if header.run else -math.inf
            return seconds

    async def stats(self, data: bytes, context: grpc.aio.ServicerContext) -> pb.StatsReply:
        request = wire.parse(pb.StatsRequest, data)
        wire.check_names(request, "run")
        self._hear(request.run, context, request.leaves)
        weights = {"version": self.backend.version, "run": self.run}
        return pb.StatsReply(ready=self.ready, instance=self.instance, **weights, values=self.values())

    def values(self) -> dict[str, float]:
        """The backend's statistics and the service's counts, as plain numbers."""
        values = {**self.backend.stats(), **self.counts, "running": len(self._running), "held_bytes": self._held}
        return {name: float(value) for name, value in values.items()}


def details_of(text: str) -> str:
    """The text as a status may have it, which travels in a header of 8 KiB."""
    return text.encode("ascii", "backslashreplace").decode()[:DETAILS]


def knows(token: str, metadata: Any) -> bool:
    """Whether a call's metadata, or headers by their names in lower case, bring the token."""
    return hmac.compare_digest((dict(metadata or ()).get("authorization") or "").encode(), f"Bearer {token}".encode())


class _Auth(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED for every method of the port, known or not, without a token; PERMISSION_DENIED for a push without
    its own."""

    def __init__(self, token: str | None, push_token: str | None):
        self._token, self._push_token = token, push_token

    async def intercept_service(self, continuation: Callable, details: grpc.HandlerCallDetails) -> Any:
        trusted = self._push_token is not None and knows(self._push_token, details.invocation_metadata)
        known = trusted or self._token is None or knows(self._token, details.invocation_metadata)
        pushes = self._push_token is not None and details.method == f"/{wire.SERVICE}/LoadWeights"
        if known and (trusted or not pushes):
            return await continuation(details)

        async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            if known:
                await context.abort(Code.PERMISSION_DENIED, "authorization: expected Bearer and the token for pushes")
            await context.abort(Code.UNAUTHENTICATED, "authorization: expected Bearer and the token")

        return grpc.stream_stream_rpc_method_handler(refuse)  # reads nothing, whatever the method's kind


def check_listen(
    host: str, token: str | None, cert: str | None, key: str | None, push_token: str | None = None, **ports: int | None
) -> None:
    """ValueError unless these are ports and it is safe to listen there."""
    for name, port in ports.items():
        types.expect(port is None or 0 <= port < 2**16, name, port, "a port, 0 (any that is free) to 65535")
    types.expect((cert is None) == (key is None), "cert, key", (cert, key), "both or none")
    for name, path in (("cert", cert), ("key", key)):
        types.expect(path is None or Path(path).is_file(), name, path, "a file")
    for name, secret in (("token", token), ("push_token", push_token)):
        types.expect(secret is None or (secret.isascii() and secret.strip()), name, "(not shown)", "ASCII, not blank")
    types.expect(push_token is None or push_token != token, "push_token", "the token", "one of its own")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    types.expect(loopback or token is not None, "host", host, "127.0.0.1 or another loopback address without a token")
    expected = "127.0.0.1 or another loopback address without a token for pushes"
    types.expect(loopback or push_token is not None, "host", host, expected)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(
    host: str, port: int, token: str | None, cert: str | None, key: str | None, push_token: str | None = None
) -> tuple[grpc.aio.Server, int]:
    """A server that has its port (0: any that is free) but does not answer yet. OSError if the port is taken."""
    options = [
        ("grpc.max_receive_message_length", wire.MAX_MESSAGE),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # or two servers would share a port, unnoticed
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # or clients that look for dead peers are cut off
        *wire.KEEPALIVE,
    ]
    interceptors = [_Auth(token, push_token)] if token or push_token else []
    server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=MAX_CALLS)
    address = _address(host, port)
    secure = cert and key and grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(cert).read_bytes())])
    try:
        port = server.add_secure_port(address, secure) if secure else server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    return server, port


def _page(path: str, service: Service | None) -> tuple[int, bytes]:
    if path == "/healthz":
        return 200, b"alive\n"
    if path == "/readyz":
        return (200, b"ready\n") if service and service.ready else (503, b"not ready\n")
    if path == "/metrics":
        registry = prometheus_client.CollectorRegistry()
        for name, value in (service.values() if service else {}).items():
            prometheus_client.Gauge(f"jaxrl_{name}", f"{name} of the rollout worker", registry=registry).set(value)
        return 200, prometheus_client.generate_latest() + prometheus_client.generate_latest(registry)
    return 404, b"there are /healthz, /readyz, /metrics\n"


@contextmanager
def http(host: str, port: int, token: str | None, service: Callable[[], Service | None]) -> Iterator[int]:
    """Serves /healthz, /readyz and /metrics meanwhile; yields the port. /metrics wants the token, if there is one."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds that a silent connection may keep its thread

        def do_GET(self) -> None:
            refused = (
                token and self.path == "/metrics" and not knows(token, {"authorization": self.headers["authorization"]})
            )
            status, body = (401, b"expected the token\n") if refused else _page(self.path, service())
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer((host, port), Handler) as server:
        server.verify_request = lambda *_: threading.active_count() < MAX_THREADS
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def serve(
    make_backend: Callable[[], Backend], *, host: str = "127.0.0.1", port: int = 0, token: str | None = None,
    push_token: str | None = None, cert: str | None = None, key: str | None = None, metrics_port: int | None = None,
    max_waiting: int = 256, register: Callable[[Any, grpc.aio.Server], None] | None = None,
) -> None:  # fmt: skip
    """Samples for whoever asks, until SIGTERM or SIGINT; to be called in the main thread.

    Takes its ports first (0: any that is free), then makes the backend, prints `listening on host:port` and answers.
    token: what every call must bring; push_token: what one that pushes weights must bring in its place, and others may;
    without it the token does for both. A host beyond loopback wants two. cert, key: PEM files, for TLS. metrics_port:
    of /healthz, /readyz and /metrics on the same host. max_waiting: groups that are sampled or wait at once. register:
    adds further services of the backend to the server.
    """
    check_listen(host, token, cert, key, push_token, port=port, metrics_port=metrics_port)

    async def run() -> None:
        server, bound = bind(host, port, token, cert, key, push_token)
        service, stop, loop = None, asyncio.Event(), asyncio.get_running_loop()
        with nullcontext() if metrics_port is None else http(host, metrics_port, token, lambda: service) as metrics:
            backend = make_backend()
            try:
                service = Service(backend, max_waiting, push_token)
                server.add_generic_rpc_handlers((service.handlers(),))
                if register is not None:
                    register(backend, server)
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, stop.set)
                await server.start()
                if metrics is not None:
                    print(f"metrics on {_address(host, metrics)}", flush=True)
                print(f"{LISTENING} {_address(host, bound)}", flush=True)
                await stop.wait()
                service.ready = False
                loop.call_later(GRACE_S - 1, service.stop)
                await server.stop(GRACE_S)
            finally:
                backend.close()

    asyncio.run(run())
