"""Messages of rollout.proto from and to plain host data, and weights cut into checked chunks."""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from jaxrl_llm import types
from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler.requests import COLUMNS, MAX_STOPS, Answer, Group, Request
from jaxrl_llm.sampler.sampling import Sampling

SERVICE = "jaxrl.Rollout"
CHUNK = 2**20  # bytes of weights in one message, at most
MAX_MESSAGE = 4 * 2**20 + CHUNK  # bytes of one message that a server receives, at most
MAX_GROUP = 1024  # answers of one request
MAX_NAME = 4096  # characters of an id, an instance or a run
DAY_S = 86_400.0  # the longest deadline
LEARNER_S = 30.0  # a learner from which a server has heard nothing for so long is taken to be gone
# Idle connections are probed: a peer that is gone without a word is noticed within 15 seconds.
KEEPALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]
KEEPALIVE += [("grpc.keepalive_permit_without_calls", 1)]

SAME = ("prompt", "group", "max_tokens", "stop", "seed", "draw", "budget")  # fields of a Request and of its message

M = TypeVar("M", bound=Message)
Manifest = Mapping[str, tuple[tuple[int, ...], Any]]  # leaf -> shape, dtype


def parse(message: type[M], data: bytes) -> M:
    """The message that `data` is; ValueError if it is none."""
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise ValueError(f"{len(data)} bytes: expected a {message.DESCRIPTOR.full_name} ({error})") from None


def check_names(message: Message, *names: str) -> None:
    """ValueError for a name that is too long: it would be kept, and shown in errors."""
    for name in names:
        size = len(getattr(message, name))
        types.expect(size <= MAX_NAME, name, f"{size} characters", f"at most {MAX_NAME}")


def secrets() -> dict[str, str | None]:
    """The tokens, from the environment: a command line is there for all to see."""
    return {"token": os.environ.get("JAXRL_TOKEN"), "push_token": os.environ.get("JAXRL_PUSH_TOKEN")}


# --- requests and answers ---------------------------------------------------------------------------------------


def _answer_message(answer: Answer) -> pb.Answer:
    return pb.Answer(finish=answer.finish, **{name: getattr(answer, name).tolist() for name in COLUMNS})


def _answer(message: pb.Answer) -> Answer:
    sizes = tuple(len(getattr(message, name)) for name in COLUMNS)
    types.expect(len(set(sizes)) == 1, "answer", sizes, "as many log-probs and versions as tokens")
    columns = [np.fromiter(getattr(message, name), dtype, sizes[0]) for name, dtype in COLUMNS.items()]
    return Answer(*columns, str(message.finish))


def to_request_message(request: Request, id: str, instance: str = "", run: str = "") -> pb.SampleRequest:
    """`request`, which `requests.check` has passed, for the server `instance` with weights of `run` ("": any)."""
    same = {name: getattr(request, name) for name in SAME} | asdict(request.sampling)
    return pb.SampleRequest(id=id, instance=instance, run=run, begun=map(_answer_message, request.begun), **same)


def from_request_message(message: pb.SampleRequest) -> Request:
    """The request, not checked but for what would take time or memory here, and for what it is no part of."""
    m = message
    types.expect(m.id, "id", m.id, "a string that is not empty")
    check_names(m, "id", "instance", "run")
    for name, most in (("stop", MAX_STOPS), ("begun", MAX_GROUP)):
        types.expect(len(getattr(m, name)) <= most, name, f"{len(getattr(m, name))} entries", f"at most {most}")
    types.expect(0 <= m.version < 2**31, "version", m.version, "a number in [0, 2^31)")
    types.expect(0 <= m.deadline_s <= DAY_S, "deadline_s", m.deadline_s, f"0 (none) to {DAY_S:g}")
    same = {name: getattr(m, name) for name in SAME} | {"prompt": tuple(m.prompt), "stop": tuple(m.stop)}
    return Request(sampling=Sampling(m.temperature, m.top_k, m.top_p), begun=tuple(map(_answer, m.begun)), **same)


def to_reply(group: Sequence[Answer]) -> pb.SampleReply:
    return pb.SampleReply(answers=map(_answer_message, group))


def from_reply(reply: pb.SampleReply) -> Group:
    return tuple(map(_answer, reply.answers))


# --- weights ----------------------------------------------------------------------------------------------------


def _digest(header: pb.Header) -> Any:
    leaves = [(leaf.name, leaf.dtype, tuple(leaf.shape)) for leaf in header.leaves]
    return hashlib.blake2b(repr((header.version, leaves)).encode(), digest_size=32)


def size(leaves: Mapping[str, np.ndarray]) -> int:
    """Bytes of all leaves."""
    return sum(leaf.nbytes for leaf in leaves.values())


def to_chunks(leaves: Mapping[str, np.ndarray], version: int, run: str = "", client: str = "") -> Iterator[pb.Chunk]:
    """The header, the data in chunks of at most CHUNK bytes, the digest. run, client: see Header."""
    described = [pb.Leaf(name=n, dtype=x.dtype.name, shape=x.shape, bytes=x.nbytes) for n, x in leaves.items()]
    header = pb.Header(version=version, leaves=described, bytes=size(leaves), run=run, client=client)
    yield pb.Chunk(header=header)
    digest, sequence = _digest(header), 0
    for leaf in leaves.values():
        flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, CHUNK):
            data = flat[start : start + CHUNK].tobytes()
            digest.update(data)
            yield pb.Chunk(data=pb.Data(sequence=sequence, data=data, crc32=zlib.crc32(data)))
            sequence += 1
    yield pb.Chunk(digest=digest.digest())


def _check_header(header: pb.Header, manifest: Manifest) -> None:
    types.expect(0 <= header.version < 2**31, "version", header.version, "a number in [0, 2^31)")
    check_names(header, "run", "client")
    names = [leaf.name for leaf in header.leaves]
    types.expect(len(set(names)) == len(names), "leaves", names[:9], "each name once")
    missing, unknown = sorted(set(manifest) - set(names)), sorted(set(names) - set(manifest))
    types.expect(not missing, "leaves", f"without {missing[:3]}", f"all {len(manifest)} leaves of the model")
    types.expect(not unknown, "leaves", unknown[:3], "leaves of the model")
    for leaf in header.leaves:
        shape, dtype = tuple(manifest[leaf.name][0]), np.dtype(manifest[leaf.name][1])
        types.expect(tuple(leaf.shape) == shape, f"{leaf.name} shape", tuple(leaf.shape), str(shape))
        types.expect(leaf.dtype == dtype.name, f"{leaf.name} dtype", leaf.dtype, dtype.name)
        expected = math.prod(shape) * dtype.itemsize
        types.expect(leaf.bytes == expected, f"{leaf.name} bytes", leaf.bytes, str(expected))
    total = sum(leaf.bytes for leaf in header.leaves)
    types.expect(header.bytes == total, "bytes", header.bytes, f"{total}, the sum of the leaves")


class Assembly:
    """Leaves in host memory, from the chunks of one LoadWeights.

    ValueError: the header asks for other leaves than the model has. OSError: the data are damaged, out of their order
    or not complete. After an error the assembly is of no use.
    """

    def __init__(self, header: pb.Header, manifest: Manifest):
        _check_header(header, manifest)  # before memory is taken for what it announces
        self.header = header
        self._leaves = {leaf.name: np.empty(tuple(leaf.shape), manifest[leaf.name][1]) for leaf in header.leaves}
        self._unfilled = [flat for x in self._leaves.values() if (flat := x.reshape(-1).view(np.uint8)).size][::-1]
        self._hash, self._sequence, self._digest = _digest(header), 0, b""

    def add(self, chunk: pb.Chunk) -> None:
        """The next message after the header."""
        part = chunk.WhichOneof("part")
        if self._digest or part not in ("data", "digest"):
            raise OSError(f"a {part} after chunk {self._sequence - 1}: expected data, then a digest")
        if chunk.digest:
            self._digest = chunk.digest
            return
        data, sequence = chunk.data.data, chunk.data.sequence
        if sequence != self._sequence:
            raise OSError(f"sequence={sequence}: expected {self._sequence}")
        if zlib.crc32(data) != chunk.data.crc32:
            raise OSError(f"chunk {sequence}: its CRC32 is not the one it was sent with")
        if not 0 < len(data) <= (self._unfilled[-1].size if self._unfilled else 0):
            raise OSError(f"chunk {sequence} has {len(data)} bytes: expected at most what its leaf lacks")
        leaf = self._unfilled.pop()
        leaf[: len(data)] = np.frombuffer(data, np.uint8)
        if len(data) < leaf.size:
            self._unfilled.append(leaf[len(data) :])
        self._hash.update(data)
        self._sequence += 1

    def finish(self) -> dict[str, np.ndarray]:
        """The leaves, complete and as they were sent."""
        if self._unfilled:
            missing = sum(leaf.size for leaf in self._unfilled)
            raise OSError(f"{missing} bytes are missing after chunk {self._sequence - 1}")
        if self._digest != self._hash.digest():
            raise OSError("the BLAKE2b digest of all data is not the one that was sent")
        return self._leaves
