"""The trainer's end of the wire: requests spread over several servers, each answered exactly once."""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import jax
import numpy as np

from jaxrl_llm import types
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import decode, peers, requests, weights, wire
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler.peers import Code, Outgoing, Sent, Server
from jaxrl_llm.sampler.requests import Group, NextRequest, Request
from jaxrl_llm.sampler.sampling import Sampling

PROBE_S = 2.0  # a server that takes longer to say that it is there gets no requests
BACKOFF_S = 0.1, 5.0  # between attempts to reach a server that is down: the first and the longest
FULL_S = 0.2  # a server that is full gets no request for so long
ASK_S = 0.2  # after so long a source that had no request is asked again: the learner may have caught up


class Client:
    """Samples on several servers, as if they were one.

    servers: host:port of each. token: what they ask for. push_token: the same of who pushes weights, if another. ca: a
    PEM file of who signed their certificates; None: no TLS. deadline_s: of one attempt; what is drawn comes back before
    and goes on, unless there is a budget. in_flight: groups per server, queued ones included. retries: attempts of one
    request, after its first, that may fail. patience_s: how long no server at all may answer. vocab_size: the model's.
    run: names the learner that pushes weights, the same when it resumes; a new name if left out. A server has the
    weights of one run, and takes no other's while it hears from that learner's client (see `wire.LEARNER_S`). A request
    is drawn with this run's weights, and none older than those pushed to its server.

    A server that fails or exceeds a deadline gets nothing until it answers a probe within 2 seconds and has the newest
    weights: one thread for each server looks after that. One whose answer cannot be (`requests.check_group`) is set
    aside. A request with which a server died shares its next one with no other such request. All methods may be called
    from several threads; they raise PermissionError for a wrong token, ValueError for what a server refuses, and
    ConnectionError when patience or retries are over, two servers died with a request, or all are set aside.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        token: str | None = None,
        push_token: str | None = None,
        ca: str | None = None,
        deadline_s: float = 600.0,
        in_flight: int = 32,
        retries: int = 10,
        patience_s: float = 120.0,
        vocab_size: int = 2**31,
        run: str = "",
    ):
        names = [peers.address(server) for server in servers]
        types.expect(names and len(set(names)) == len(names), "servers", list(servers), "at least one, each once")
        for name, seconds in (("deadline_s", deadline_s), ("patience_s", patience_s)):
            types.expect(0 < seconds <= wire.DAY_S, name, seconds, f"a positive number, at most {wire.DAY_S:g}")
        types.expect(in_flight >= 1, "in_flight", in_flight, "at least 1")
        types.expect(retries >= 0, "retries", retries, "0 or a positive number")
        types.expect(ca is None or Path(ca).is_file(), "ca", ca, "a file")
        self.deadline_s, self.in_flight, self.retries, self.patience_s = deadline_s, in_flight, retries, patience_s
        bearer = lambda secret: () if secret is None else (("authorization", f"Bearer {secret}"),)
        self._metadata, self._push_metadata = bearer(token), bearer(push_token or token)
        self.vocab_size = vocab_size
        credentials = None if ca is None else grpc.ssl_channel_credentials(Path(ca).read_bytes())
        self._servers = [Server(name, peers.channel(name, credentials)) for name in names]
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
        waiting: list[Outgoing] = []
        running: dict[grpc.Future, tuple[Outgoing, Sent]] = {}
        done: deque[grpc.Future] = deque()
        try:
            while True:
                if not waiting and not running:
                    if (request := next_request()) is None:
                        return
                    waiting.append(Outgoing(request, self.deadline_s))
                while self._able():
                    outgoing = next((o for o in waiting if self._able(o)), None)
                    if outgoing is None and (request := next_request()) is not None:
                        outgoing = Outgoing(request, self.deadline_s)
                        waiting.append(outgoing)
                    if outgoing is None or (attempt := self._send(outgoing)) is None:  # another thread took the room
                        break
                    waiting.remove(outgoing)
                    call, sent = attempt
                    running[call] = outgoing, sent
                    call.add_done_callback(lambda call: self._wake(done, call))
                if (call := self._wait(done, waiting)) is None:
                    continue
                outgoing, sent = running.pop(call)
                self._release(sent)
                if (group := self._drawn(call, outgoing, sent)) is None:
                    waiting.insert(0, outgoing)
                else:
                    yield outgoing.request, group
        finally:
            for call, (_, sent) in running.items():
                call.cancel()
                self._release(sent)

    def ordered(self, requests: Sequence[Request]) -> list[Group]:
        """The groups of `requests`, in their order."""
        return decode.generate(self, requests)

    def on_each(self, request: Request) -> dict[str, Group]:
        """The answer to one request of every server that can be reached, by its name."""
        calls = [self._call(Outgoing(request, 0.0), s, suspected=False) for s in self._servers if s.up]
        answered = [(call.result(), sent) for call, sent in calls if call.exception() is None]
        groups = {sent.server.name: self._checked(data, request, sent) for data, sent in answered}
        return {name: group for name, group in groups.items() if group is not None}

    def _able(self, outgoing: Outgoing | None = None) -> list[Server]:
        """Servers that may get this request, or a new one, at this moment."""
        with self._changed:  # which may be held already
            now, deaths = time.monotonic(), 0 if outgoing is None else outgoing.deaths
            able = [s for s in self._servers if s.up and s.in_flight < self.in_flight and s.full_until <= now]
            return [s for s in able if deaths == 0 or (deaths == 1 and not s.suspects)]

    def _send(self, outgoing: Outgoing) -> tuple[grpc.Future, Sent] | None:
        """An attempt on the least loaded server; None if there is room on none."""
        with self._changed:
            server = min(self._able(outgoing), key=lambda s: s.in_flight, default=None)
            if server is None:
                return None
            suspected = bool(outgoing.deaths)
            server.in_flight += 1
            server.suspects += suspected
            return self._call(outgoing, server, suspected)

    def _call(self, outgoing: Outgoing, server: Server, suspected: bool) -> tuple[grpc.Future, Sent]:
        with self._changed:
            run = self._pushed_run()
            sent = Sent(server, server.instance, server.version if run else 0, suspected)
        message = outgoing.message
        message.instance, message.run, message.version = sent.instance, run, sent.version
        sample = peers.method(server.channel.unary_unary, "Sample")
        return sample.future(message, timeout=self.deadline_s, metadata=self._metadata), sent

    def _release(self, sent: Sent) -> None:
        with self._changed:
            sent.server.in_flight -= 1
            sent.server.suspects -= sent.suspected
            self._changed.notify_all()

    def _wake(self, done: deque[grpc.Future], call: grpc.Future) -> None:
        with self._changed:
            done.append(call)
            self._changed.notify_all()

    def _wait(self, done: deque[grpc.Future], waiting: Sequence[Outgoing]) -> grpc.Future | None:
        """A call that has ended; None if a waiting request can be sent, or `next_request` is to be asked again."""
        answered = time.monotonic()
        with self._changed:
            while not done and not any(self._able(outgoing) for outgoing in waiting):
                self._raise()
                if any(server.up for server in self._servers):
                    answered = time.monotonic()
                if time.monotonic() - answered > self.patience_s:
                    errors = "; ".join(f"{server.name}: {server.last_error}" for server in self._servers)
                    raise ConnectionError(f"no server answers for {self.patience_s:g} s: {errors}")
                self._changed.wait(ASK_S)
                if self._able():
                    break
            return done.popleft() if done else None

    def _drawn(self, call: grpc.Future, outgoing: Outgoing, sent: Sent) -> Group | None:
        """The group; None if the request is to be sent again. Raises what no other attempt would avoid."""
        if error := call.exception():
            return self._failed(error, outgoing, sent)
        cut_s = outgoing.message.deadline_s
        group = self._checked(call.result(), outgoing.asked, sent, cut_s > 0)
        if group is None or outgoing.request.budget or all(a.finish != types.CANCELLED for a in group):
            return group
        if not outgoing.go_on(group):
            sent.server.full_until = time.monotonic() + FULL_S
            self._again(outgoing, f"{sent.server.name}: no token in {cut_s:g} s")
        return None

    def _checked(self, data: bytes, request: Request, sent: Sent, cut: bool = False) -> Group | None:
        """The group of a reply; None if it cannot be true."""
        versions = sent.version, 2**31 - 1 if self._newest is None else self._newest[1]
        try:
            group = wire.from_reply(wire.parse(pb.SampleReply, data))
            requests.check_group(request, group, vocab_size=self.vocab_size, versions=versions, cut=cut)
            return group
        except ValueError as error:
            self._set_aside(sent.server, f"its reply cannot be: {error}")
            return None

    def _set_aside(self, server: Server, why: str) -> None:
        with self._changed:
            server.up, server.aside, server.last_error = False, why, f"set aside: {why}"
            self._changed.notify_all()
        warnings.warn(f"server {server.name} is set aside: {why}", stacklevel=2)

    def _failed(self, error: grpc.RpcError, outgoing: Outgoing, sent: Sent) -> None:
        """Raises what no other attempt would avoid, and notes the rest."""
        if exception := peers.exception_of(sent.server, error):
            raise exception
        with self._changed:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                sent.server.full_until = time.monotonic() + FULL_S
                return
            last_error = self._down(sent.server, error)
            if error.code() is Code.UNAVAILABLE and "failed to connect" not in str(error.details()):
                outgoing.lost.append(sent)
        # A failed precondition is no failure: the server has restarted, or has other weights.
        if error.code() is not Code.FAILED_PRECONDITION:
            self._again(outgoing, f"{sent.server.name}: {last_error}")

    def _again(self, outgoing: Outgoing, why: str) -> None:
        outgoing.failures += 1
        if outgoing.failures > self.retries:
            raise ConnectionError(f"a request failed {outgoing.failures} times, at last on {why}")

    def _down(self, server: Server, error: grpc.RpcError) -> str:
        """The server gets no requests until it answers. Returns what is wrong."""
        with self._changed:
            server.down_since = time.monotonic() if server.up else server.down_since
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
            tried = lambda: all(s.loaded or s.refusal or s.failures or s.aside for s in self._servers)
            self._changed.wait_for(lambda: tried() or self._closed)
            self._raise()
            reached = sum(s.loaded is not None for s in self._servers)
        return {"seconds": time.monotonic() - start, "bytes": float(reached * wire.size(leaves))}

    def _raise(self) -> None:
        types.expect(not self._closed, "client", "closed", "a client that is open")
        if all(server.aside for server in self._servers):
            whys = "; ".join(f"{server.name}: {server.aside}" for server in self._servers)
            raise ConnectionError(f"every server is set aside: {whys}")
        for server in self._servers:
            if server.refusal is not None:
                error, server.refusal = server.refusal, None
                self._changed.notify_all()  # another attempt, for the next call
                raise error

    # --- one thread for each server ------------------------------------------------------------------------------

    def _keep(self, server: Server) -> None:
        """While the client is open: see that the server answers, has the newest weights and knows that we are here."""
        while True:
            with self._changed:
                waits_for = lambda: self._closed or server.aside or self._behind(server)
                self._changed.wait_for(waits_for, wire.LEARNER_S / 3)
                if self._closed or server.aside:
                    return
                newest, loaded = self._newest, server.loaded
            try:
                reply = self._stats(server).result()
                weights = newest and (reply.instance, newest[1])
                if weights and (loaded != weights or (reply.run, reply.version) != (self._run, newest[1])):
                    load = peers.method(server.channel.stream_unary, "LoadWeights", pb.LoadReply)
                    chunks = wire.to_chunks(*newest, self._run, self._client)
                    version = load(chunks, timeout=self.deadline_s, metadata=self._push_metadata).version
                    if version != newest[1]:
                        return self._set_aside(server, f"it has loaded version {version} in place of {newest[1]}")
            except grpc.RpcError as error:
                self._pause(server, error)
                continue
            except ValueError:  # the channel is closed
                return
            with self._changed:
                if newest is self._newest:  # or there has been another push meanwhile
                    server.instance, server.loaded = reply.instance, weights
                    server.version = weights[1] if weights else 0
                    server.up, server.failures = not (self._closed or server.aside), 0
                    self._changed.notify_all()

    def _behind(self, server: Server) -> bool:
        lacks_weights = self._newest is not None and server.loaded is None
        return server.refusal is None and (lacks_weights or not server.up)

    def _pause(self, server: Server, error: grpc.RpcError) -> None:
        """Wait before the next attempt to reach a server, unless there are new weights before."""
        with self._changed:
            self._down(server, error)
            server.refusal = peers.exception_of(server, error, loading=True)
            server.failures += 1
            newest, (first, longest) = self._newest, BACKOFF_S
            pause = min(first * 2 ** min(server.failures - 1, 10), longest)
            self._changed.wait_for(lambda: self._closed or self._newest is not newest, pause)

    def _pushed_run(self) -> str:
        """Our run, if we have pushed weights: only then do we mind whose the server has."""
        return "" if self._newest is None else self._run

    def _stats(self, server: Server, leaves: bool = False) -> grpc.Future:
        request = pb.StatsRequest(run=self._pushed_run(), leaves=leaves)
        call = peers.method(server.channel.unary_unary, "Stats", pb.StatsReply)
        return call.future(request, timeout=PROBE_S, metadata=self._push_metadata)

    # --- the rest -----------------------------------------------------------------------------------------------

    def stats(self) -> list[dict]:
        """For each server its name and whether it answers within 2 seconds, and if so its statistics."""
        rows = []
        for server, call in [(server, self._stats(server)) for server in self._servers]:
            row = {"server": server.name, "answers": call.exception() is None}
            row |= {"aside": server.aside} if server.aside else {}
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
