"""A rollout worker: gRPC service over a backend that samples, readiness and metrics over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import prometheus_client

from jaxrl_llm import types
from jaxrl_llm.sampler import wire
from jaxrl_llm.serving.service import Backend, Code, Service, authorization_of, knows

LISTENING = "listening on"  # a server's line when it is ready
GRACE_S = 5.0  # what runs at SIGTERM may go on for so long, less a second for its replies
MAX_CALLS = 1024  # of all methods and all peers
PAGES_AT_ONCE = 16  # connections over HTTP


class _Auth(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED for every method of the port, known or not, unless the call brings a token; PERMISSION_DENIED for
    a push without the push token, if there is one."""

    def __init__(self, token: str | None, push_token: str | None):
        self._token, self._push_token = token, push_token

    async def intercept_service(self, continuation: Callable, details: grpc.HandlerCallDetails) -> Any:
        said = authorization_of(details.invocation_metadata)
        trusted = self._push_token is not None and knows(self._push_token, said)
        known = trusted or self._token is None or knows(self._token, said)
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
            refused = token and self.path == "/metrics" and not knows(token, self.headers["authorization"])
            status, body = (401, b"expected the token\n") if refused else _page(self.path, service())
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        places = threading.Semaphore(PAGES_AT_ONCE)

        def process_request(self, request: Any, address: Any) -> None:
            if self.places.acquire(blocking=False):
                super().process_request(request, address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, address: Any) -> None:
            try:
                super().process_request_thread(request, address)
            finally:
                self.places.release()

    with Server((host, port), Handler) as server:
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
