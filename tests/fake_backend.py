"""A backend without a model: answers computed from the request. As a program: a server with it, for tests to kill."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from jaxrl_llm.sampler.requests import Answer, Group, Request, check
from jaxrl_llm.serving import server, supervisor

FAKE = Path(__file__)  # the program
MANIFEST = {"a/kernel": ((700, 900), np.float32), "a/scale": ((), np.int8), "b": ((3, 5), ml_dtypes.bfloat16)}
MANIFEST |= {"empty": ((0, 4), np.float32), "last": ((7,), np.int8)}


def leaves(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-100, 100, shape).astype(dtype) for name, (shape, dtype) in MANIFEST.items()}


def answers(request: Request, version: int) -> Group:
    """What every FakeBackend answers; tokens and log-probs do not depend on the version."""

    def answer(g: int) -> Answer:
        rng = np.random.default_rng([*request.prompt, request.seed, request.draw, g])
        n = int(rng.integers(1, request.max_tokens + 1))
        tokens, logp = rng.integers(0, 50, n).astype(np.int32), -rng.exponential(size=n).astype(np.float32)
        return Answer(tokens, logp, np.full(n, version, np.int32), "eos")

    return tuple(answer(g) for g in range(request.group))


def part(whole: Answer, request: Request, number: int, more: int) -> Answer:
    """An answer that was cancelled when it had `more` tokens than its begun part, unless that is all of it."""
    n = len(request.begun[number].tokens) + more if request.begun else more
    columns = whole.tokens[:n], whole.logp[:n], whole.versions[:n]
    return whole if n >= len(whole.tokens) else Answer(*columns, "cancelled")


class FakeBackend:
    """Answers after `delay_s`, all requests at once. `submitted` and `cancelled` are for tests to read."""

    def __init__(self, delay_s: float = 0.0):
        self.delay_s, self.version, self.manifest = delay_s, 0, MANIFEST
        self.loaded: dict[str, np.ndarray] = {}
        self.submitted: list[Request] = []
        self.cancelled: list[Request] = []
        self.refuses = ""  # a message: every load fails with it
        self.drawn = 0  # tokens that an answer has at least when it is cancelled
        self.lie = lambda group: group  # what is answered in place of a group
        self.finish = ""  # what the answers' finish is replaced by
        self._timers: dict[Future, tuple[threading.Timer, Request]] = {}
        self._lock = threading.Lock()

    def check(self, request: Request) -> None:
        check(request, vocab_size=50, max_prompt_tokens=16, max_tokens=64)

    def submit(self, request: Request) -> Future[Group]:
        self.check(request)
        if request.stop == ("unservable",):
            raise ValueError("stop='unservable': expected another")
        future: Future[Group] = Future()
        timer = threading.Timer(self.delay_s, self._answer, (future, request))
        timer.daemon = True
        with self._lock:
            self.submitted.append(request)
            self._timers[future] = timer, request
        timer.start()
        return future

    def _answer(self, future: Future[Group], request: Request) -> None:
        with self._lock:
            if self._timers.pop(future, None) is None:
                return
        group = answers(request, self.version)
        if self.finish:
            group = tuple(Answer(a.tokens, a.logp, a.versions, self.finish) for a in group)
        if request.stop == ("die",):
            os.kill(os.getpid(), signal.SIGKILL)
        failed = request.stop == ("break",)
        future.set_exception(OSError("broken")) if failed else future.set_result(self.lie(group))

    def cancel(self, future: Future[Group]) -> None:
        with self._lock:
            timer, request = self._timers.pop(future)
            self.cancelled.append(request)
        timer.cancel()
        future.set_result(tuple(part(a, request, g, self.drawn) for g, a in enumerate(answers(request, self.version))))

    def load(self, leaves: dict[str, np.ndarray], version: int) -> float:
        if self.refuses:
            raise ValueError(self.refuses)
        self.loaded, self.version = leaves, version
        return 0.25

    def stats(self) -> dict[str, float]:
        return {"slots": 4, "queued": len(self._timers)}

    def close(self) -> None: ...


@contextmanager
def running(backend: FakeBackend, *, token=None, push_token=None, cert=None, key=None, max_waiting=256, port=0):
    """A server in this process, on an event loop in a thread: its address, service and loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    call = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    async def start():
        grpc_server, bound = server.bind("127.0.0.1", port, token, cert, key, push_token)
        service = server.Service(backend, max_waiting, push_token)
        grpc_server.add_generic_rpc_handlers((service.handlers(),))
        await grpc_server.start()
        return grpc_server, service, f"localhost:{bound}"

    try:
        grpc_server, service, address = call(start())
        yield SimpleNamespace(address=address, service=service, backend=backend, loop=loop)
        call(grpc_server.stop(0))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def slow_reader(port: int):
    """A port from which what a server says is passed on only after `release` is called: (port, release)."""
    released, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, to: socket.socket, waits: bool) -> None:
        with suppress(OSError):
            if waits:
                to.sendall(source.recv(200))  # the settings of the connection
                released.wait(60)
            while data := source.recv(65536):
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], released.set
    finally:
        released.set()
        listener.close()


def until(condition, timeout_s: float = 10.0) -> None:
    """Waits; AssertionError if the condition does not come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_same(group, expected):
    assert len(group) == len(expected)
    for a, b in zip(group, expected, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.logp, b.logp)
        assert np.array_equal(a.versions, b.versions)
        assert a.finish == b.finish


@contextmanager
def process(*command: object):
    child = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def listening(child: subprocess.Popen) -> str:
    for line in child.stdout:
        if line.startswith("listening on "):
            return line.split()[-1]
    raise AssertionError(child.stderr.read())


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--supervised", action="store_true")
    arguments = vars(parser.parse_args())
    if arguments.pop("supervised"):
        command = [sys.executable, *(argument for argument in sys.argv if argument != "--supervised")]
        sys.exit(supervisor.supervise(command, backoff_s=0.05))
    delay_s = arguments.pop("delay_s")
    server.serve(lambda: FakeBackend(delay_s), **arguments)
