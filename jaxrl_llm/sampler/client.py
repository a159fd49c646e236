"""The trainer's end of the wire: requests spread over several servers, each answered exactly once."""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import jax
import numpy as np
from google.protobuf.message import Message

from jaxrl_llm import types
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import decode, requests, weights, wire
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler.requests import Group, NextRequest, Request
from jaxrl_llm.sampler.sampling import Sampling

PROBE_S = 2.0  # a server that takes longer to say that it is there gets no requests
BACKOFF_S = 0.1, 5.0  # between attempts to reach a server that is down: the first and the longest
FULL_S = 0.2  # a server that is full gets no request for so long
ASK_S = 0.2  # after so long a source that had no request is asked again: the learner may have caught up
Code = grpc.StatusCode
WRONG = {Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.UNIMPLEMENTED}  # no other attempt would do better
FORBIDDEN = {Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}


def address(text: str) -> str:
    """The address host:port of a server, checked; an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits = bare and (":" not in bare or bare != host) and "/" not in bare
    types.expect(fits and port.isdecimal() and 0 < int(port) < 2**16, "server", text, "host:port")
    return f"[{bare}]:{int(port)}" if ":" in bare else f"{bare}:{int(port)}"


@dataclass
class _Server:
    """A server as it answered last. The fields below `channel` are read and written under the client's lock."""

    name: str
    channel: grpc.Channel
    up: bool = False  # it may get requests: it answers, and has the newest weights or gets them now
    instance: str = ""
    loaded: tuple[str, int] | None = None  # to which instance of it which version of the weights was pushed
    in_flight: int = 0
    full_until: float = 0.0
    failures: int = 0  # attempts to reach it or to push to it, since it answered last
    last_error: str = "not asked yet"
    refusal: Exception | None = None  # which no other attempt would avoid; raised by the next call


class _Outgoing:
    """A request and its attempts so far, all with the same id. ValueError for what no server could serve."""

    def __init__(self, request: Request):
        requests.check(request, vocab_size=2**31, max_tokens=2**31 - 1)
        self.request, self.failures = request, 0
        self.message = wire.to_request_message(request, id=uuid.uuid4().hex)
        size = self.message.ByteSize() + 64  # room for the instance
        types.expect(size <= wire.MAX_MESSAGE, "request", f"{size} bytes", f"at most {wire.MAX_MESSAGE} bytes")


def _exception(server: _Server, error: grpc.RpcError, loading: bool = False) -> Exception | None:
    """What the caller shall see; None if another attempt may succeed."""
    text = f"{server.name}: {error.details()}"
    if error.code() in FORBIDDEN:
        return PermissionError(text)
    if error.code() in WRONG or (loading and error.code() is Code.FAILED_PRECONDITION):
        return ValueError(text)
    return None


class Client:
    """Samples on several servers, as if they were one.

    servers: host:port of each. token: what they ask for. ca: a PEM file of who signed their certificates; None: no
    TLS. deadline_s: of one attempt. in_flight: groups per server, queued ones included. retries: attempts of one
    request, after its first, that may fail. patience_s: how long no server at all may answer.
    run: names the learner that pushes weights, the same when it resumes; a new name if left out. A server has the
    weights of one run, and takes no other's while it hears from that learner's client (see `wire.LEARNER_S`).

    A server that fails or exceeds a deadline gets nothing until it answers a probe within 2 seconds and has the newest
    weights: one thread for each server looks after that. All methods may be called from several threads; they raise
    PermissionError for a wrong token, ValueError for what a server refuses, ConnectionError when patience or retries
    are over.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        token: str | None = None,
        ca: str | None = None,
        deadline_s: float = 600.0,
        in_flight: int = 32,
        retries: int = 10,
        patience_s: float = 120.0,
        run: str = "",
    ):
        names = [address(server) for server in servers]
        types.expect(names and len(set(names)) == len(names), "servers", list(servers), "at least one, each once")
        for name, seconds in (("deadline_s", deadline_s), ("patience_s", patience_s)):
            types.expect(seconds > 0, name, seconds, "a positive number")
        types.expect(in_flight >= 1, "in_flight", in_flight, "at least 1")
        types.expect(retries >= 0, "retries", retries, "0 or a positive number")
        types.expect(ca is None or Path(ca).is_file(), "ca", ca, "a file")
        self.deadline_s, self.in_flight, self.retries, self.patience_s = deadline_s, in_flight, retries, patience_s
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        credentials = None if ca is None else grpc.ssl_channel_credentials(Path(ca).read_bytes())
        self._servers = [_Server(name, _channel(name, credentials)) for name in names]
        self._client = uuid.uuid4().hex
        self._run = run or self._client
        self._changed = threading.Condition()  # guards what follows, and the servers
        self._newest: tuple[Mapping[str, np.ndarray], int] | None = None
        self._closed = False
        self._probers = [threading.Thread(target=self._keep, args=(s,), daemon=True) for s in self._servers]
        for prober in self._probers:
            prober.start()

    # --- sampling -----------------------------------------------------------------------------------------------

    def sample(self, next_request: NextRequest) -> Iterator[tuple[Request, Group]]:
        """Groups as they come, until `next_request` has none and none is in flight.

        All is done in the caller's thread, between two groups: `next_request` is asked when a server has room or
        nothing is in flight, and again after a moment if it had nothing; what has failed is sent again. Closing the
        iterator cancels what is in flight.
        """
        waiting: deque[_Outgoing] = deque()
        running: dict[grpc.Future, tuple[_Outgoing, _Server]] = {}
        done: deque[grpc.Future] = deque()
        try:
            while True:
                if not waiting and not running:
                    if (request := next_request()) is None:
                        return
                    waiting.append(_Outgoing(request))
                while self._able():
                    if not waiting and (request := next_request()) is not None:
                        waiting.append(_Outgoing(request))
                    if not waiting or (sent := self._send(waiting[0])) is None:  # another thread has taken the room
                        break
                    call, server = sent
                    running[call] = waiting.popleft(), server
                    call.add_done_callback(lambda call: self._wake(done, call))
                if (call := self._wait(done, bool(waiting))) is None:
                    continue
                outgoing, server = running.pop(call)
                self._release(server)
                if self._failed(call, outgoing, server):
                    waiting.appendleft(outgoing)
                else:
                    request, group = outgoing.request, wire.from_reply(call.result())
                    expected = f"group = {request.group}"
                    types.expect(len(group) == request.group, server.name, f"{len(group)} answers", expected)
                    yield request, group
        finally:
            for call, (_, server) in running.items():
                call.cancel()
                self._release(server)

    def ordered(self, requests: Sequence[Request]) -> list[Group]:
        """The groups of `requests`, in their order."""
        return decode.generate(self, requests)

    def on_each(self, request: Request) -> dict[str, Group]:
        """The answer to one request of every server that can be reached, by its name."""
        outgoing, calls = _Outgoing(request), {}
        for server in self._servers:
            with self._changed:
                outgoing.message.instance, outgoing.message.run = server.instance, self._pushed_run()
                up = server.up
            if up:
                sample = _method(server.channel.unary_unary, "Sample", pb.SampleReply)
                calls[server.name] = sample.future(outgoing.message, timeout=self.deadline_s, metadata=self._metadata)
        return {n: wire.from_reply(call.result()) for n, call in calls.items() if call.exception() is None}

    def _able(self) -> list[_Server]:
        """Servers that may get a request at this moment."""
        with self._changed:  # which may be held already
            now = time.monotonic()
            return [s for s in self._servers if s.up and s.in_flight < self.in_flight and s.full_until <= now]

    def _send(self, outgoing: _Outgoing) -> tuple[grpc.Future, _Server] | None:
        """An attempt on the least loaded server; None if there is room on none."""
        with self._changed:
            server = min(self._able(), key=lambda s: s.in_flight, default=None)
            if server is None:
                return None
            server.in_flight += 1
            outgoing.message.instance, outgoing.message.run = server.instance, self._pushed_run()
        sample = _method(server.channel.unary_unary, "Sample", pb.SampleReply)
        return sample.future(outgoing.message, timeout=self.deadline_s, metadata=self._metadata), server

    def _release(self, server: _Server) -> None:
        with self._changed:
            server.in_flight -= 1
            self._changed.notify_all()

    def _wake(self, done: deque[grpc.Future], call: grpc.Future) -> None:
        with self._changed:
            done.append(call)
            self._changed.notify_all()

    def _wait(self, done: deque[grpc.Future], waiting: bool) -> grpc.Future | None:
        """A call that has ended; None if a waiting request can be sent, or `next_request` is to be asked again."""
        answered = time.monotonic()
        with self._changed:
            while not done and not (waiting and self._able()):
                self._raise()
                if any(server.up for server in self._servers):
                    answered = time.monotonic()
                if time.monotonic() - answered > self.patience_s:
                    errors = "; ".join(f"{server.name}: {server.last_error}" for server in self._servers)
                    raise ConnectionError(f"no server answers for {self.patience_s:g} s: {errors}")
                self._changed.wait(ASK_S)
                if not waiting and self._able():
                    break
            return done.popleft() if done else None

    def _failed(self, call: grpc.Future, outgoing: _Outgoing, server: _Server) -> bool:
        """Whether the call is to be made again. Raises what no other attempt would avoid."""
        error = call.exception()
        if error is None:
            return False
        if exception := _exception(server, error):
            raise exception
        with self._changed:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                server.full_until = time.monotonic() + FULL_S
                return True
            last_error = self._down(server, error)
        # A failed precondition is no failure: the server has restarted, or has other weights.
        outgoing.failures += error.code() is not Code.FAILED_PRECONDITION
        if outgoing.failures > self.retries:
            raise ConnectionError(f"a request failed {outgoing.failures} times, at last on {server.name}: {last_error}")
        return True

    def _down(self, server: _Server, error: grpc.RpcError) -> str:
        """The server gets no requests until it answers. Returns what is wrong."""
        with self._changed:
            server.up, server.last_error = False, f"{error.code().name}: {error.details()}"
            self._changed.notify_all()
            return server.last_error

    # --- weights ------------------------------------------------------------------------------------------------

    def push(self, leaves: Mapping[str, np.ndarray], version: int) -> dict[str, float]:
        """New weights for every server; returns when each has them or has failed, with seconds and bytes sent.

        A server that is down gets them when it is back, before any request: `leaves` are kept until the next push and
        may not be changed meanwhile.
        """
        start = time.monotonic()
        with self._changed:
            loaded = -1 if self._newest is None else self._newest[1]
            types.expect(loaded <= version < 2**31, "version", version, f"at least {max(loaded, 0)}, an int32")
            self._newest = {name: np.asarray(leaf) for name, leaf in leaves.items()}, version
            for server in self._servers:
                server.loaded, server.refusal, server.failures = None, None, 0
            self._changed.notify_all()
            tried = lambda: all(s.loaded or s.refusal or s.failures for s in self._servers)
            self._changed.wait_for(lambda: tried() or self._closed)
            self._raise()
            reached = sum(s.loaded is not None for s in self._servers)
        return {"seconds": time.monotonic() - start, "bytes": float(reached * wire.size(leaves))}

    def _raise(self) -> None:
        types.expect(not self._closed, "client", "closed", "a client that is open")
        for server in self._servers:
            if server.refusal is not None:
                error, server.refusal = server.refusal, None
                self._changed.notify_all()  # another attempt, for the next call
                raise error

    # --- one thread for each server ------------------------------------------------------------------------------

    def _keep(self, server: _Server) -> None:
        """While the client is open: see that the server answers, has the newest weights and knows that we are here."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._behind(server), wire.LEARNER_S / 3)
                if self._closed:
                    return
                newest, loaded = self._newest, server.loaded
            try:
                reply = self._stats(server).result()
                weights = newest and (reply.instance, newest[1])
                if weights and (loaded != weights or (reply.run, reply.version) != (self._run, newest[1])):
                    load = _method(server.channel.stream_unary, "LoadWeights", pb.LoadReply)
                    chunks = wire.to_chunks(*newest, self._run, self._client)
                    load(chunks, timeout=self.deadline_s, metadata=self._metadata)
            except grpc.RpcError as error:
                self._pause(server, error)
                continue
            except ValueError:  # the channel is closed
                return
            with self._changed:
                if newest is self._newest:  # or there has been another push meanwhile
                    server.instance, server.loaded = reply.instance, weights
                    server.up, server.failures = not self._closed, 0
                    self._changed.notify_all()

    def _behind(self, server: _Server) -> bool:
        lacks_weights = self._newest is not None and server.loaded is None
        return server.refusal is None and (lacks_weights or not server.up)

    def _pause(self, server: _Server, error: grpc.RpcError) -> None:
        """Wait before the next attempt to reach a server, unless there are new weights before."""
        with self._changed:
            self._down(server, error)
            server.refusal = _exception(server, error, loading=True)
            server.failures += 1
            newest, (first, longest) = self._newest, BACKOFF_S
            pause = min(first * 2 ** min(server.failures - 1, 10), longest)
            self._changed.wait_for(lambda: self._closed or self._newest is not newest, pause)

    def _pushed_run(self) -> str:
        """Our run, if we have pushed weights: only then do we mind whose the server has."""
        return "" if self._newest is None else self._run

    def _stats(self, server: _Server, leaves: bool = False) -> grpc.Future:
        request = pb.StatsRequest(run=self._pushed_run(), leaves=leaves)
        call = _method(server.channel.unary_unary, "Stats", pb.StatsReply)
        return call.future(request, timeout=PROBE_S, metadata=self._metadata)

    # --- the rest -----------------------------------------------------------------------------------------------

    def stats(self) -> list[dict]:
        """For each server its name and whether it answers within 2 seconds, and if so its statistics."""
        rows = []
        for server, call in [(server, self._stats(server)) for server in self._servers]:
            row = {"server": server.name, "answers": call.exception() is None}
            if row["answers"]:
                reply = call.result()
                row |= {"ready": reply.ready, "version": reply.version, **reply.values}
            rows.append(row)
        return rows

    def close(self) -> None:
        """Ends what is in flight. Calls in other threads raise ValueError."""
        with self._changed:
            self._closed = True
            for server in self._servers:
                server.up = False
            self._changed.notify_all()
        for call in [self._stats(server, leaves=True) for server in self._servers if server.loaded]:
            call.exception()  # or the answer: another learner need not wait until we are taken to be gone
        for server in self._servers:
            server.channel.close()
        for prober in self._probers:
            prober.join()


def _method(kind: Callable, name: str, reply: type[Message]) -> Callable:
    """A method of the service on a channel, whose `kind` is `unary_unary` or `stream_unary`."""
    return kind(f"/{wire.SERVICE}/{name}", lambda request: request.SerializeToString(), reply.FromString)


def _channel(name: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = [("grpc.max_send_message_length", wire.MAX_MESSAGE), ("grpc.max_receive_message_length", -1)]
    options += [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
    options += [("grpc.min_reconnect_backoff_ms", 2_000), ("grpc.max_reconnect_backoff_ms", 2_000), *wire.KEEPALIVE]
    if credentials is None:
        return grpc.insecure_channel(name, options)
    return grpc.secure_channel(name, credentials, options)


@dataclass(frozen=True)
class RemoteEngine:
    """Servers (`jaxrl serve`), and how they draw unless a request says otherwise."""

    client: Client
    model: ModelConfig  # as the servers compute it
    tokenizer: Tokenizer
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    quantized: str = ""  # int8 or int4: how pushed weights are kept
    version: int = 0  # of the weights pushed last
    bytes: int = 0  # of them, to each server

    def sample(self, next_request: NextRequest, latest: Callable | None = None) -> Iterator[tuple[Request, Group]]:
        """Groups as they are done. The servers change to pushed weights by themselves, between two of their calls."""
        return self.client.sample(next_request)

    def pushed(self, params: Any, version: int | None = None) -> RemoteEngine:
        """The same servers with the learner's parameters, one version on."""
        version = self.version + 1 if version is None else version
        new = weights.push(self.model, params, None, version=version, quantized=self.quantized)
        self.client.push(named(new.params), version)
        return replace(self, version=version, bytes=new.bytes)

    def probe(self, request: Request) -> dict[str, Group]:
        """The answer to a request of each server that can be reached, by its name."""
        return self.client.on_each(request)

    def close(self) -> None:
        self.client.close()


def named(params: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(params))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
