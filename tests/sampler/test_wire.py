"""What goes over the wire arrives as it was sent, or not at all."""

import dataclasses

import fake_backend
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.sampler import rollout_pb2 as pb
from jaxrl_llm.sampler import wire
from jaxrl_llm.sampler.requests import Answer, Request
from jaxrl_llm.sampler.sampling import Sampling

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
real = st.floats(allow_nan=False)


@st.composite
def some_answer(draw) -> Answer:
    n = draw(st.integers(0, 5))
    column = lambda elements, dtype: np.array(draw(st.lists(elements, min_size=n, max_size=n)), dtype)
    logp = column(st.floats(width=32, allow_nan=False), np.float32)
    return Answer(column(int32, np.int32), logp, column(int32, np.int32), draw(st.text()))


some_request = st.builds(
    Request,
    prompt=st.lists(int32).map(tuple),
    group=int64,
    max_tokens=int64,
    sampling=st.builds(Sampling, temperature=real, top_k=int64, top_p=real),
    stop=st.lists(st.text()).map(tuple),
    seed=int64,
    draw=int64,
    begun=st.lists(some_answer(), max_size=3).map(tuple),
    budget=int64,
)


def same_answer(a: Answer, b: Answer) -> bool:
    columns = [(getattr(a, name), getattr(b, name)) for name in ("tokens", "logp", "versions")]
    return a.finish == b.finish and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in columns)


@settings(max_examples=100, deadline=None)
@given(request=some_request)
def test_a_request_arrives_as_it_was_sent(request):
    data = wire.to_request_message(request, id="7").SerializeToString()
    arrived = wire.from_request_message(wire.parse(pb.SampleRequest, data))
    assert dataclasses.replace(arrived, begun=()) == dataclasses.replace(request, begun=())
    assert len(arrived.begun) == len(request.begun)
    assert all(map(same_answer, arrived.begun, request.begun))


@settings(max_examples=100, deadline=None)
@given(group=st.lists(some_answer(), max_size=4))
def test_a_group_arrives_as_it_was_sent(group):
    data = wire.to_reply(group).SerializeToString()
    arrived = wire.from_reply(wire.parse(pb.SampleReply, data))
    assert len(arrived) == len(group)
    assert all(map(same_answer, arrived, group))


def test_every_field_of_a_request_travels():
    ours = {f.name for f in dataclasses.fields(Request)} | {f.name for f in dataclasses.fields(Sampling)}
    theirs = {field.name for field in pb.SampleRequest.DESCRIPTOR.fields}
    assert ours - {"sampling"} == theirs - {"id", "instance", "run", "version", "deadline_s"}


def test_a_token_takes_as_many_bytes_as_promised():
    n = 1000
    answer = Answer(np.full(n, 2**20, np.int32), np.ones(n, np.float32), np.full(n, 100, np.int32), "eos")
    assert wire.to_reply([answer]).ByteSize() < n * (3 + 4 + 1) + 32  # packed


def test_a_request_without_an_id_is_refused():
    with pytest.raises(ValueError, match="id is ''"):
        wire.from_request_message(pb.SampleRequest(prompt=[1]))


def test_answers_with_ragged_columns_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 1, 0\); expected as many log-probs and versions as tokens"):
        wire.from_reply(pb.SampleReply(answers=[pb.Answer(tokens=[1, 2], logp=[0.0])]))


def test_garbage_is_no_message():
    with pytest.raises(ValueError, match="3 bytes: expected a jaxrl.SampleRequest"):
        wire.parse(pb.SampleRequest, b"\xff\xff\xff")


# --- weights ----------------------------------------------------------------------------------------------------


def assembled(chunks, manifest=fake_backend.MANIFEST) -> dict[str, np.ndarray]:
    header, *rest = chunks
    assembly = wire.Assembly(header.header, manifest)
    for chunk in rest:
        assembly.add(wire.parse(pb.Chunk, chunk.SerializeToString()))
    return assembly.finish()


DTYPES = [np.float32, np.int8, ml_dtypes.bfloat16, np.float64, np.bool_, np.uint16, ml_dtypes.float8_e4m3fn]
some_shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=100, deadline=None)
@given(
    manifest=st.dictionaries(st.text(), st.tuples(some_shape, st.sampled_from(DTYPES)), max_size=5),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_weights_arrive_as_they_were_sent(manifest, chunk, seed):
    rng = np.random.default_rng(seed)
    sent = {name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype) in manifest.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "CHUNK", chunk)
        arrived = assembled(wire.to_chunks(sent, 3), manifest)
    assert list(arrived) == list(sent)
    for name, leaf in sent.items():
        assert arrived[name].dtype == leaf.dtype
        assert arrived[name].shape == leaf.shape
        assert arrived[name].tobytes() == leaf.tobytes()


def test_chunks_are_small_and_counted():
    chunks = list(wire.to_chunks(fake_backend.leaves(), 5))
    assert chunks[0].header.version == 5
    assert chunks[0].header.bytes == sum(len(c.data.data) for c in chunks) == 700 * 900 * 4 + 1 + 30 + 7
    assert [c.data.sequence for c in chunks[1:-1]] == list(range(6))  # 3 of the first leaf, none of the empty one
    assert max(c.ByteSize() for c in chunks) < wire.CHUNK + 64
    assert chunks[-1].WhichOneof("part") == "digest"


def test_a_leaf_that_is_not_contiguous_arrives_in_its_own_order():
    sent = np.arange(12, dtype=np.float32).reshape(3, 4).T
    arrived = assembled(wire.to_chunks({"x": sent}, 0), {"x": ((4, 3), np.float32)})
    assert np.array_equal(arrived["x"], sent)


def flip(chunk: pb.Chunk) -> None:
    chunk.data.data = bytes([chunk.data.data[0] ^ 1]) + chunk.data.data[1:]


def flip_unnoticed(chunks) -> None:
    """Another byte and its checksum: only the digest knows."""
    flip(chunks[1])
    chunks[1].data.crc32 = wire.zlib.crc32(chunks[1].data.data)


def grow(chunks) -> None:
    chunks[3].data.data += b"\0"
    chunks[3].data.crc32 = wire.zlib.crc32(chunks[3].data.data)


DAMAGE = {
    "chunk 1: its CRC32": lambda chunks: flip(chunks[2]),
    "sequence=2: expected 1": lambda chunks: chunks.pop(2),
    "sequence=0: expected 1": lambda chunks: chunks.insert(2, chunks[1]),
    "sequence=1: expected 0": lambda chunks: chunks.insert(1, chunks.pop(2)),
    "7 bytes are missing after chunk 4": lambda chunks: chunks.pop(-2),
    "chunk 2 has 422849 bytes: expected at most what its leaf lacks": grow,
    "chunk 6 has 7 bytes": lambda chunks: chunks.insert(
        -1, pb.Chunk(data=pb.Data(sequence=6, data=b"7654321", crc32=wire.zlib.crc32(b"7654321")))
    ),
    "BLAKE2b": flip_unnoticed,
    "a data after chunk 5": lambda chunks: chunks.append(chunks[-2]),
    "a header after chunk 5": lambda chunks: chunks.append(chunks[0]),
    "a header after chunk -1": lambda chunks: chunks.insert(1, chunks[0]),
    "a None after chunk 0": lambda chunks: chunks.insert(2, pb.Chunk()),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_noticed(message):
    chunks = list(wire.to_chunks(fake_backend.leaves(), 1))
    DAMAGE[message](chunks)
    with pytest.raises(OSError, match=message):
        assembled(chunks)


def test_the_digest_is_needed_and_covers_the_version():
    chunks = list(wire.to_chunks(fake_backend.leaves(), 1))
    with pytest.raises(OSError, match="BLAKE2b"):
        assembled(chunks[:-1])
    chunks[0].header.version = 2
    with pytest.raises(OSError, match="BLAKE2b"):
        assembled(chunks)


HEADERS = {
    "version is -1": lambda header: setattr(header, "version", -1),
    "version is 2147483648": lambda header: setattr(header, "version", 2**31),
    r"leaves is .*each name once": lambda header: header.leaves.append(header.leaves[0]),
    r"leaves is \"without \['last'\]\"; expected all 5 leaves": lambda header: header.leaves.pop(),
    r"leaves is \['more'\]": lambda header: header.leaves.append(pb.Leaf(name="more")),
    r"b shape is \(3, 6\); expected \(3, 5\)": lambda header: header.leaves[2].shape.__setitem__(1, 6),
    r"b dtype is 'float16'; expected bfloat16": lambda header: setattr(header.leaves[2], "dtype", "float16"),
    r"b bytes is 31; expected 30": lambda header: setattr(header.leaves[2], "bytes", 31),
    r"bytes is 5; expected 2520038, the sum": lambda header: setattr(header, "bytes", 5),
}


@pytest.mark.parametrize("message", HEADERS)
def test_other_leaves_than_the_models_are_refused_before_memory_is_taken(message, monkeypatch):
    chunks = list(wire.to_chunks(fake_backend.leaves(), 1))
    HEADERS[message](chunks[0].header)
    monkeypatch.setattr(wire.np, "empty", None)
    with pytest.raises(ValueError, match=message):
        assembled(chunks)
