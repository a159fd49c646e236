"""What a client knows of its servers and of the requests that it has sent them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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


@dataclass
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
    failures: int = 0  # attempts to reach it or to push to it, since it answered last
    last_error: str = "not asked yet"
    refusal: Exception | None = None  # which no other attempt would avoid; raised by the next call
    aside: str = ""  # what it has said that cannot be: it gets nothing any more


@dataclass(frozen=True)
class Loss:
    """A connection that broke with a request in flight."""

    server: Server
    instance: str  # of the server
    at: float = field(default_factory=time.monotonic)

    @property
    def fatal(self) -> bool | None:
        """Whether the server died; None: not known yet."""
        if self.server.instance != self.instance:
            return True
        if self.server.up:
            return False
        return True if time.monotonic() - self.at > DEAD_S else None


@dataclass(frozen=True)
class Sent:
    """One attempt."""

    server: Server
    instance: str
    version: int  # of the weights, the least that may draw
    suspected: bool


class Outgoing:
    """A request and its attempts so far. ValueError for what no server could serve."""

    def __init__(self, request: Request, deadline_s: float):
        requests.check(request, vocab_size=2**31, max_tokens=2**31 - 1)
        self.request, self.failures, self.losses = request, 0, list[Loss]()
        self._whole_size = request.group * request.max_tokens * TOKEN_BYTES
        self._deadline_s = deadline_s
        self._ask(request)

    def _ask(self, request: Request) -> None:
        """request: with what was drawn already. The same id in every attempt, until more is drawn."""
        self.asked, self.message = request, wire.to_request_message(request, id=uuid.uuid4().hex)
        size = self.message.ByteSize() + 64  # room for the instance
        types.expect(size <= wire.MAX_MESSAGE, "request", f"{size} bytes", f"at most {wire.MAX_MESSAGE} bytes")
        if self._whole_size + size <= wire.MAX_MESSAGE:  # or what comes back might be too much to be sent again
            self.message.deadline_s = self._deadline_s

    def go_on(self, group: Group) -> bool:
        """Ask for the rest of a group that a deadline has cut. Whether there was anything new in it."""
        more = sum(len(a.tokens) for a in group) > sum(len(a.tokens) for a in self.asked.begun)
        self._ask(replace(self.asked, begun=group))
        return more

    @property
    def deaths(self) -> list[Loss]:
        """Of servers that died, or may have, with this request in flight, each once."""
        lost = {(x.server.name, x.instance): x for x in self.losses}
        return [x for x in lost.values() if x.fatal is not False]


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
