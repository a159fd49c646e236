"""What a client knows of its servers and of the requests that it has sent them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import grpc
from google.protobuf.message import Message

from jaxrl_llm import types
from jaxrl_llm.sampler import requests, wire
from jaxrl_llm.sampler.requests import Group, Request

DEAD_S = 30.0  # a server that has not come back for so long is taken to have died
PARTIAL = 0.8  # of a call's deadline: then a server returns what there is
TOKEN_BYTES = 14  # of a token in a message, at most
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


@dataclass(eq=False)
class Server:
    """A server as it answered last. The fields below `channel` are read and written under the client's lock."""

    name: str
    channel: grpc.Channel
    up: bool = False  # it may get requests: it answers, and has the newest weights or gets them now
    instance: str = ""
    loaded: tuple[str, int] | None = None  # to which instance of it which version of the weights was pushed
    version: int = 0  # the one loaded last; requests are for no lower one
    in_flight: int = 0
    suspects: int = 0  # of those, requests that were in flight when a server died
    full_until: float = 0.0
    down_since: float = 0.0
    failures: int = 0  # attempts to reach it or to push to it, since it answered last
    last_error: str = "not asked yet"
    refusal: Exception | None = None  # which no other attempt would avoid; raised by the next call
    aside: str = ""  # what it has said that cannot be: it gets nothing any more


class Sent(NamedTuple):
    """One attempt."""

    server: Server
    instance: str
    version: int  # of the weights, the least that may draw
    suspected: bool

    @property
    def server_died(self) -> bool | None:
        """After the connection broke; None: not known yet."""
        s, silent_s = self.server, time.monotonic() - self.server.down_since
        return s.instance != self.instance or (False if s.up else silent_s > DEAD_S or None)


class Outgoing:
    """A request and its attempts so far. ValueError for what no server could serve."""

    def __init__(self, request: Request, deadline_s: float):
        """deadline_s: of a call; 0: no parts of the answers come back."""
        requests.check(request, vocab_size=2**31, max_tokens=2**31 - 1)
        self.request, self.failures, self.lost = request, 0, list[Sent]()
        # What comes back must not be too much to be sent again.
        fits = request.group * request.max_tokens * TOKEN_BYTES < wire.MAX_MESSAGE // 2
        self._deadline_s = PARTIAL * deadline_s if fits else 0.0
        self._ask(request)

    def _ask(self, request: Request) -> None:
        """request: with what was drawn already. The same id in every attempt, until more is drawn."""
        self.asked, self.message = request, wire.to_request_message(request, id=uuid.uuid4().hex)
        size = self.message.ByteSize() + 64  # room for the instance
        types.expect(size <= wire.MAX_MESSAGE, "request", f"{size} bytes", f"at most {wire.MAX_MESSAGE} bytes")
        self.message.deadline_s = self._deadline_s

    def go_on(self, group: Group) -> bool:
        """Ask for the rest of a group that a deadline has cut. Whether there was anything new in it."""
        more = sum(len(a.tokens) for a in group) > sum(len(a.tokens) for a in self.asked.begun)
        self._ask(replace(self.asked, begun=group))
        return more

    @property
    def deaths(self) -> int:
        """Of servers that died, or may have, with this request in flight. ConnectionError: two have."""
        died = {x[:2]: x.server_died for x in self.lost if x.server_died is not False}
        if sum(map(bool, died.values())) > 1:
            r, names = self.request, ", ".join(server.name for server, _ in died)
            what = f"a prompt of {len(r.prompt)} tokens, group of {r.group}, seed {r.seed}, draw {r.draw}"
            raise ConnectionError(f"two servers died with one request in flight ({what}): {names}")
        return len(died)


def exception_of(server: Server, error: grpc.RpcError, loading: bool = False) -> Exception | None:
    """What the caller shall see; None if another attempt may succeed."""
    text = f"{server.name}: {error.details()}"
    if error.code() in FORBIDDEN:
        return PermissionError(text)
    if error.code() in WRONG or (loading and error.code() is Code.FAILED_PRECONDITION):
        return ValueError(text)
    return None


def method(kind: Callable, name: str, reply: type[Message] | None = None) -> Callable:
    """A method of the service on a channel, whose `kind` is `unary_unary` or `stream_unary`. reply: None: bytes."""
    parse = None if reply is None else reply.FromString
    return kind(f"/{wire.SERVICE}/{name}", lambda request: request.SerializeToString(), parse)


def channel(name: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """To the server of that name. credentials: None: no TLS."""
    options = [("grpc.max_send_message_length", wire.MAX_MESSAGE), ("grpc.max_receive_message_length", -1)]
    options += [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
    options += [("grpc.min_reconnect_backoff_ms", 2_000), ("grpc.max_reconnect_backoff_ms", 2_000), *wire.KEEPALIVE]
    if credentials is None:
        return grpc.insecure_channel(name, options)
    return grpc.secure_channel(name, credentials, options)
