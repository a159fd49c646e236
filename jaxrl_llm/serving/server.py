"""A rollout worker: gRPC service over a backend that samples, readiness and metrics over HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
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

MAX_GROUP = 1024  # answers of one request
REMEMBERED = 64 * 2**20  # bytes of requests and replies that are kept for attempts that come again
LISTENING = "listening on"  # a server's line when it is ready
GRACE_S = 5.0  # what runs at SIGTERM may go on for so long
Code = grpc.StatusCode


class Backend(Protocol):
    """What samples. Every method may be called from any thread; only `load` and `close` may take their time."""

    version: int  # of the weights
    manifest: wire.Manifest

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
    waiters: int = 0


class Service:
    """The coroutines behind rollout.proto. Status codes: see `sample` and `load_weights`."""

    def __init__(self, backend: Backend, max_waiting: int = 256):
        types.expect(max_waiting >= 1, "max_waiting", max_waiting, "at least 1")
        self.backend, self.max_waiting = backend, max_waiting
        self.instance, self.ready = uuid.uuid4().hex, True
        self.run, self.client = "", ""  # whose weights are loaded (see Header)
        self.learner_seen = -math.inf  # when that run's learner was heard of last, by the monotonic clock
        self.counts: Counter[str] = Counter(answered=0, repeated=0, refused=0, cancelled=0, loaded=0)
        self._running: dict[bytes, _GroupCall] = {}  # by the request's bytes, its id among them
        self._answered: OrderedDict[bytes, bytes] = OrderedDict()  # replies to requests, both as they are sent
        self._remembered = 0
        self._assembling, self._swapping = asyncio.Lock(), threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Messages arrive as bytes: the methods parse them, so that garbage gets a status of its own."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        methods = {"Sample": unary(self._answering(self.sample)), "Stats": unary(self._answering(self.stats))}
        methods["LoadWeights"] = stream(self._answering(self.load_weights))
        return grpc.method_handlers_generic_handler(wire.SERVICE, methods)

    def _answering(self, method: Callable[[Any], Awaitable[Message]]) -> Callable:
        """The method as grpc calls it. ValueError is INVALID_ARGUMENT, a Refusal what it says, the rest UNKNOWN."""

        async def answer(asked: Any, context: grpc.aio.ServicerContext) -> bytes:
            try:
                reply = await method(asked)
                return reply if isinstance(reply, bytes) else reply.SerializeToString()
            except (Refusal, ValueError) as error:
                self.counts["refused"] += 1
                status = error.args if isinstance(error, Refusal) else (Code.INVALID_ARGUMENT, str(error))
            await context.abort(*status)

        return answer

    async def sample(self, data: bytes) -> bytes:
        """The whole group. An attempt that comes again joins the one that runs, or gets its answer.

        INVALID_ARGUMENT: cannot be served. FAILED_PRECONDITION: meant for a server that has restarted since, or for one
        with another run's weights. RESOURCE_EXHAUSTED: `max_waiting` groups are being sampled. UNAVAILABLE: cancelled
        by the server. UNKNOWN: it failed. A call that ends early, by deadline or cancelled, cancels the group unless
        another call waits for it.
        """
        message = wire.parse(pb.SampleRequest, data)
        request = wire.from_request_message(message)
        types.expect(request.group <= MAX_GROUP, "group", request.group, f"at most {MAX_GROUP}")
        if message.instance not in ("", self.instance):
            raise Refusal(Code.FAILED_PRECONDITION, "the server has restarted since its last Stats")
        if message.run not in ("", self.run):
            raise Refusal(Code.FAILED_PRECONDITION, f"run={message.run!r}: the weights are those of run {self.run!r}")
        self._hear(message.run)
        self.counts["repeated"] += data in self._answered or data in self._running
        if data in self._answered:
            return self._answered[data]
        if data not in self._running and len(self._running) >= self.max_waiting:
            raise Refusal(Code.RESOURCE_EXHAUSTED, f"{len(self._running)} groups are being sampled")
        group = await self._sampled(data, request)
        limits = [PartialAnswer(request, g).limit for g in range(request.group)]
        if any(a.finish == types.CANCELLED and len(a.tokens) < n for a, n in zip(group, limits, strict=True)):
            raise Refusal(Code.UNAVAILABLE, "the server has cancelled the group")
        reply = wire.to_reply(group).SerializeToString()
        if data not in self._answered:
            self.counts["answered"] += 1
            self._answered[data] = reply
            self._remembered += len(data) + len(reply)
        while self._remembered > REMEMBERED:
            self._remembered -= sum(map(len, self._answered.popitem(last=False)))
        return reply

    async def _sampled(self, data: bytes, request: Request) -> Group:
        """The group, which the backend samples once for all calls with these data, until no call waits for it."""
        if data not in self._running:
            future = self.backend.submit(request)
            self._running[data] = _GroupCall(future, asyncio.wrap_future(future))
        work = self._running[data]
        work.waiters += 1
        try:
            return await asyncio.shield(work.group)  # shielded: the future is the backend's, it alone resolves it
        finally:
            work.waiters -= 1
            if not work.waiters:
                del self._running[data]
                if not work.group.done():
                    self.counts["cancelled"] += 1
                    self.backend.cancel(work.future)

    async def load_weights(self, chunks: AsyncIterator[bytes]) -> pb.LoadReply:
        """All weights, swapped when the last byte is verified; after any error the old ones stay.

        INVALID_ARGUMENT: not this model's leaves, or no message. FAILED_PRECONDITION: a lower version than the one of
        the same client that is loaded, or the learner of another run is there. DATA_LOSS: damaged, out of order or
        incomplete.
        """
        try:
            async with self._assembling:  # host memory for one copy, whoever pushes
                first = wire.parse(pb.Chunk, await anext(chunks, b""))
                if (part := first.WhichOneof("part")) != "header":
                    raise OSError(f"a {part} before the header" if part else "no header")
                self._check_header(header := first.header)
                assembly = wire.Assembly(header, self.backend.manifest)
                async for data in chunks:
                    assembly.add(wire.parse(pb.Chunk, data))
                leaves = assembly.finish()
        except OSError as error:
            raise Refusal(Code.DATA_LOSS, str(error)) from None
        seconds = await asyncio.to_thread(self._swap, leaves, header)
        self.counts["loaded"] += 1
        return pb.LoadReply(version=header.version, seconds=seconds)

    def _hear(self, run: str) -> None:
        if run and run == self.run:
            self.learner_seen = time.monotonic()

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
            seconds = self.backend.load(leaves, header.version)
            self.run, self.client = header.run, header.client
            self._hear(header.run)
            return seconds

    async def stats(self, data: bytes) -> pb.StatsReply:
        request = wire.parse(pb.StatsRequest, data)
        self._hear(request.run)
        if request.leaves and request.run == self.run:
            self.learner_seen = -math.inf
        weights = {"version": self.backend.version, "run": self.run}
        return pb.StatsReply(ready=self.ready, instance=self.instance, **weights, values=self.values())

    def values(self) -> dict[str, float]:
        """The backend's statistics and the service's counts, as plain numbers."""
        values = {**self.backend.stats(), **self.counts, "running": len(self._running)}
        return {name: float(value) for name, value in values.items()}


def _knows(token: str, authorization: str | None) -> bool:
    return hmac.compare_digest((authorization or "").encode(), f"Bearer {token}".encode())


class _Auth(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED for every method of the port, known or not, unless the call brings the token."""

    def __init__(self, token: str):
        self._token = token

    async def intercept_service(self, continuation: Callable, details: grpc.HandlerCallDetails) -> Any:
        if _knows(self._token, dict(details.invocation_metadata or ()).get("authorization")):
            return await continuation(details)

        async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            await context.abort(Code.UNAUTHENTICATED, "authorization: expected Bearer and the token")

        return grpc.stream_stream_rpc_method_handler(refuse)  # reads nothing, whatever the method's kind


def check_listen(host: str, token: str | None, cert: str | None, key: str | None, **ports: int | None) -> None:
    """ValueError unless these are ports and it is safe to listen there."""
    for name, port in ports.items():
        types.expect(port is None or 0 <= port < 2**16, name, port, "a port, 0 (any that is free) to 65535")
    types.expect((cert is None) == (key is None), "cert, key", (cert, key), "both or none")
    for name, path in (("cert", cert), ("key", key)):
        types.expect(path is None or Path(path).is_file(), name, path, "a file")
    types.expect(token is None or (token.isascii() and token.strip()), "token", "(not shown)", "ASCII, not blank")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    types.expect(loopback or token is not None, "host", host, "127.0.0.1 or another loopback address without a token")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, token: str | None, cert: str | None, key: str | None) -> tuple[grpc.aio.Server, int]:
    """A server that has its port (0: any that is free) but does not answer yet. OSError if the port is taken."""
    options = [
        ("grpc.max_receive_message_length", wire.MAX_MESSAGE),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # or two servers would share a port, unnoticed
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # or clients that look for dead peers are cut off
        *wire.KEEPALIVE,
    ]
    server = grpc.aio.server(interceptors=[_Auth(token)] if token else [], options=options)
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
            refused = token and self.path == "/metrics" and not _knows(token, self.headers["authorization"])
            status, body = (401, b"expected the token\n") if refused else _page(self.path, service())
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer((host, port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def serve(
    make_backend: Callable[[], Backend], *, host: str = "127.0.0.1", port: int = 0, token: str | None = None,
    cert: str | None = None, key: str | None = None, metrics_port: int | None = None,
    register: Callable[[Any, grpc.aio.Server], None] | None = None,
) -> None:  # fmt: skip
    """Samples for whoever asks, until SIGTERM or SIGINT; to be called in the main thread.

    Takes its ports first (0: any that is free), then makes the backend, prints `listening on host:port` and answers.
    token: what every call must bring; a host beyond loopback wants one. cert, key: PEM files, for TLS. metrics_port:
    of /healthz, /readyz and /metrics on the same host. register: adds further services of the backend to the server.
    """
    check_listen(host, token, cert, key, port=port, metrics_port=metrics_port)

    async def run() -> None:
        server, bound = bind(host, port, token, cert, key)
        service, stop = None, asyncio.Event()
        with nullcontext() if metrics_port is None else http(host, metrics_port, token, lambda: service) as metrics:
            backend = make_backend()
            try:
                service = Service(backend)
                server.add_generic_rpc_handlers((service.handlers(),))
                if register is not None:
                    register(backend, server)
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, stop.set)
                await server.start()
                if metrics is not None:
                    print(f"metrics on {_address(host, metrics)}", flush=True)
                print(f"{LISTENING} {_address(host, bound)}", flush=True)
                await stop.wait()
                service.ready = False
                await server.stop(GRACE_S)
            finally:
                backend.close()

    asyncio.run(run())
