"""Hugging Face checkpoints in and out: safetensors into the shards of a mesh, and from them.

No host ever holds a model: a tensor is read where it lies in its file, put into its place on the devices, and forgotten
before the next; each process reads the slices that its own devices hold.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxrl_llm.data import hub, tokenizers
from jaxrl_llm.models import hf_format, transformer
from jaxrl_llm.models.hf_format import CONFIG, EMBED, HEAD, Layout
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.types import expect

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
# What a checkpoint need not share with a config: how the model is computed, and what nothing is computed with.
FREE = ("dtype", "fp32_head", "remat", "attention", "router_aux_coef", "max_positions")
SHARD_BYTES = 5 * 10**9


def model(source: Path | str, **changes: Any) -> ModelConfig:
    """The shape of a checkpoint: a folder, or OWNER/NAME of the hub. changes: of its fields, such as dtype or remat."""
    return replace(hf_format.read_config(hub.local(source, (CONFIG,))), **changes)


def start(source: Path | str, **changes: Any) -> dict[str, Any]:
    """What a Config needs to start from a checkpoint: `Config(…, **hf.start("Qwen/Qwen2.5-0.5B"))`.

    changes: of the model's fields.
    """
    found, folder = model(source, **changes), Path(source).expanduser()
    source = str(folder.resolve() if folder.is_dir() else source)
    return {"model": found, "tokenizer": partial(tokenizers.load, source), "init": partial(load, source=source)}


# --- in -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """Where one lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, seen in this shape; only what is used of it is read."""
        return np.memmap(self.file, self.dtype, "r", self.offset, shape)


def check(source: Path | str, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, of which only the files' headers are read.

    Raises ValueError that names the file and what was expected: fields of config.json unlike `config`'s, a file that is
    missing or truncated, a tensor that is missing, unknown, or of another shape or dtype.
    """
    folder = hub.local(source, (CONFIG, WEIGHTS, INDEX, "model-*.safetensors"))
    found = hf_format.read_config(folder)
    for name in (f.name for f in fields(found) if f.name not in FREE):
        ours, theirs = getattr(config, name), getattr(found, name)
        expect(ours == theirs, f"model.{name}", ours, f"{theirs!r}, as {folder / CONFIG} has it")
    tensors = _tensors(folder)
    wanted = {name: layout for layout in hf_format.layouts(config).values() for _, name in layout.tensors()}
    for name, layout in wanted.items():
        expect(name in tensors, f"{folder}: {name}", "missing", f"a tensor of shape {list(layout.tensor)}")
        t = tensors[name]
        expect(t.shape == layout.tensor, f"{t.file}: {name}", list(t.shape), f"shape {list(layout.tensor)}")
    for name in tensors.keys() - wanted.keys():
        known = name.endswith(hf_format.IGNORED) or (name == HEAD and config.tied_head)
        expect(known, f"{tensors[name].file}: {name}", "there", f"no tensor of that name, as {folder / CONFIG} says")
    return tensors


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).is_file():
        return _header(folder / WEIGHTS)
    index = folder / INDEX
    expect(index.is_file(), str(folder), "without weights", f"{WEIGHTS}, or shards and {INDEX}")
    places = hf_format.read_json(index).get("weight_map")
    expect(isinstance(places, dict), f"{index}: weight_map", places, "an object: tensor → file")
    files = {name: _header(folder / name) for name in dict.fromkeys(places.values())}
    for name, file in places.items():
        expect(name in files[file], f"{folder / file}: {name}", "missing", f"the tensor, as {index} says")
    return {name: files[file][name] for name, file in places.items()}


def _header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes of length, so much JSON, the data."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy"), open(file, "rb") as f:  # the first checks that lengths and offsets fit the file
            start = 8 + int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(start - 8))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: {error}; expected a whole file of weights") from error
    header.pop("__metadata__", None)
    unknown = {t["dtype"] for t in header.values()} - DTYPES.keys()
    expect(not unknown, f"{file}: dtype", sorted(unknown), f"one of {', '.join(DTYPES)}")
    at = lambda t: (DTYPES[t["dtype"]], tuple(t["shape"]), start + t["data_offsets"][0])
    return {name: Tensor(file, *at(t)) for name, t in header.items()}


def load(config: ModelConfig, mesh: Mesh, source: Path | str, dtype: str = "float32") -> dict[str, Any]:
    """The parameters of a checkpoint, in the tree and shardings of a fresh model's, each as a model of `dtype` has it.

    source: a folder, or OWNER/NAME of the hub. Raises as `check` does, before a device is used, and for tied embeddings
    with another head beside them.
    """
    tensors = check(source, config)
    if config.tied_head and HEAD in tensors:
        _check_tied(tensors[EMBED], tensors[HEAD])
    layouts = hf_format.layouts(config)
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    placed, tree = jax.tree.flatten(sharding.shardings(transformer.logical_axes(config), shapes, mesh))
    computed, paths = replace(config, dtype=dtype), [name.split(".") for name in layouts]
    dtypes = [transformer.compute_dtype(computed, path[0], path[-1]) for path in paths]
    leaves = zip(layouts.values(), placed, dtypes, strict=True)
    return tree.unflatten([_parameter(layout, where, tensors, of) for layout, where, of in leaves])


def _check_tied(embed: Tensor, head: Tensor) -> None:
    for start in range(0, embed.shape[0], 4096):
        rows = (t.read(t.shape)[start : start + 4096] for t in (embed, head))
        expected = f"{EMBED} again, or none, as {CONFIG} says tie_word_embeddings"
        expect(np.array_equal(*rows), f"{head.file}: {HEAD}", "a matrix of its own", expected)


def _parameter(layout: Layout, where: NamedSharding, tensors: dict[str, Tensor], dtype: str) -> Array:
    """One parameter on its devices, put together tensor by tensor."""
    spec = where.spec[len(layout.lead) :]
    as_filed = NamedSharding(where.mesh, PartitionSpec(*(spec[a] for a in layout.order)))
    shape = tuple(layout.part[a] for a in layout.order)
    whole = jax.jit(partial(jnp.zeros, layout.lead + layout.part, dtype), out_shardings=where)()
    for index, name in layout.tensors():
        lies = tensors[name].read(shape)
        piece = jax.make_array_from_callback(shape, as_filed, lambda slices, lies=lies: np.asarray(lies[slices]))
        whole = _put(whole, piece, np.array(index, np.int32), order=layout.order, where=where)
        whole.block_until_ready()  # or the host would hold what waits for the devices
    return whole


@partial(jax.jit, static_argnames=("order", "where"), donate_argnums=0)
def _put(whole: Array, piece: Array, index: Array, *, order: tuple[int, ...], where: NamedSharding) -> Array:
    """`whole` with `piece`, whose axes are the parameter's axes `order`, at an index of the leading axes."""
    piece = piece.transpose(np.argsort(order)).astype(whole.dtype)
    stacked = whole.ndim - piece.ndim
    at = (*(index[i] for i in range(stacked)), *(jnp.int32(0) for _ in order))
    whole = jax.lax.dynamic_update_slice(whole, piece.reshape((1,) * stacked + piece.shape), at)
    return jax.lax.with_sharding_constraint(whole, where)


# --- out ----------------------------------------------------------------------------------------------------------


def export(
    params: Any, config: ModelConfig, tokenizer: tokenizers.Tokenizer, folder: Path, dtype: str = "bfloat16",
    max_shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write a folder that `transformers` loads: weights, config.json, generation_config.json, tokenizer, chat template.

    Tensor by tensor: the host holds one. The folder is there whole or not at all. Raises ValueError for a folder that
    is there already, for another dtype than bfloat16 and float32, and for a model that no family has.
    """
    expect(dtype in ("bfloat16", "float32"), "dtype", dtype, "bfloat16 or float32")
    expect(not folder.exists(), str(folder), "there already", "a new folder")
    written = hf_format.write_config(config, dtype, tokenizer.eos_ids)
    leaves = zip(hf_format.layouts(config).values(), jax.tree.leaves(params), strict=True)
    tensors = [(n, layout, leaf, i) for layout, leaf in leaves for i, n in layout.tensors()]
    shards = list(_shards(tensors, jnp.dtype(dtype).itemsize, max_shard_bytes))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [WEIGHTS] if len(shards) == 1 else names
    part, first = folder.with_name(f"{folder.name}.{os.getpid()}.tmp"), jax.process_index() == 0
    try:
        if first:
            part.mkdir(parents=True)
        for name, shard in zip(names, shards, strict=True):
            _write(part / name if first else Path(os.devnull), shard, dtype)
        if not first:
            return
        if len(shards) > 1:
            places = {t[0]: name for name, shard in zip(names, shards, strict=True) for t in shard}
            size = sum(np.prod(t[1].tensor) for t in tensors) * jnp.dtype(dtype).itemsize
            _write_json(part / INDEX, {"metadata": {"total_size": int(size)}, "weight_map": places})
        _write_json(part / CONFIG, written)
        tokenizer.save(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _shards(tensors: list[tuple], itemsize: int, limit: int) -> Iterator[list[tuple]]:
    """The tensors in runs of at most `limit` bytes; one that is larger is a run by itself."""
    run, size = [], 0
    for tensor in tensors:
        more = int(np.prod(tensor[1].tensor)) * itemsize
        if run and size + more > limit:
            yield run
            run, size = [], 0
        run.append(tensor)
        size += more
    yield run


def _write(file: Path, tensors: list[tuple], dtype: str) -> None:
    """A safetensors file, its tensors fetched one after the other."""
    itemsize, code = jnp.dtype(dtype).itemsize, {"float32": "F32", "bfloat16": "BF16"}[dtype]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, layout, *_ in tensors:
        begin, end = end, end + int(np.prod(layout.tensor)) * itemsize
        header[name] = {"dtype": code, "shape": layout.tensor, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, layout, leaf, index in tensors:
            array = _take(leaf, np.array(index, np.int32), layout=layout, dtype=dtype)
            if not array.is_fully_addressable:
                array = multihost_utils.process_allgather(array, tiled=True)
            f.write(np.ascontiguousarray(array).view(np.uint8))


@partial(jax.jit, static_argnames=("layout", "dtype"))
def _take(whole: Array, index: Array, *, layout: Layout, dtype: str) -> Array:
    """The tensor of a parameter at an index of its leading axes."""
    at = (*(index[i] for i in range(len(layout.lead))), *(jnp.int32(0) for _ in layout.part))
    piece = jax.lax.dynamic_slice(whole, at, (1,) * len(layout.lead) + layout.part).reshape(layout.part)
    return piece.transpose(layout.order).reshape(layout.tensor).astype(dtype)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n")
