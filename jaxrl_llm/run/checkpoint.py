"""Checkpoints (Orbax): the train state, and where the host was."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file it writes


@dataclass(frozen=True)
class Restored:
    state: Any
    host: dict[str, Any]
    step: int


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Σ bits[i]·(2i+1) mod 2³² of each leaf, where it lies, however it is cut. An odd factor loses no flipped bit."""

    def one(x: jax.Array) -> jax.Array:
        width = min(x.dtype.itemsize, 4)
        bits = x.astype(jnp.uint8) if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * width}")
        odd = jnp.ones(bits.shape, jnp.uint32)
        stride = 2
        for axis in reversed(range(bits.ndim)):
            odd += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        return jnp.sum(bits.astype(jnp.uint32) * odd, dtype=jnp.uint32)

    return [one(x) for x in leaves]


def checksums(state: Any, host: dict[str, Any]) -> dict[str, Any]:
    """A number for each leaf of `state` and one for `host`: TensorStore does not notice a flipped byte of an array."""
    named = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_sums([x for _, x in named]))
    digest = hashlib.blake2b(json.dumps(host, sort_keys=True).encode(), digest_size=8).hexdigest()
    return {jax.tree_util.keystr(path): int(s) for (path, _), s in zip(named, sums, strict=True)} | {"host": digest}


class Checkpoints:
    """Saved states of one run, the newest `keep` of them. Writes are atomic and happen in the background.

    `read_only` leaves the folder as it is, down to what another process may be writing there.
    """

    def __init__(self, folder: Path, keep: int = 2, *, read_only: bool = False):
        self.folder, self._read_only = Path(folder).resolve(), read_only
        # Orbax itself keeps and cleans nothing when it only reads
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, create=not read_only, read_only=read_only
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Write `state` (a pytree of arrays) and `host` (JSON) as `step`; a step that is there already is left."""
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            host=ocp.args.JsonSave(host),
            checksums=ocp.args.JsonSave(checksums(state, host)),
        )
        self._manager.save(step, args=args)

    def restore(self, like: Any, warn: Callable[[str], None]) -> Restored | None:
        """The newest checkpoint that can be read, placed and shaped `like` (arrays or ShapeDtypeStructs).

        One that is damaged is told of through `warn`, put aside as `<step>.unreadable` so that its step can be written
        again, and the one before it is tried; None when none is left.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), like
        )
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore(), checksums=ocp.args.JsonRestore()
        )
        for step in reversed(self.steps()):
            try:
                found = self._manager.restore(step, args=args)
                sums = checksums(found["state"], found["host"])
                wrong = [name for name in sums if sums[name] != found["checksums"].get(name)]
                if wrong:
                    raise ValueError(f"the checksum of {wrong[0]} is not what was saved")
                return Restored(found["state"], found["host"], step)
            except Exception as error:  # whatever a damaged file makes Orbax or TensorStore raise
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                warn(f"checkpoint {step} cannot be read ({why}); trying the one before")
                if not self._read_only:
                    self._put_aside(step)
        return None

    def _put_aside(self, step: int) -> None:
        aside = self.folder / f"{step}.unreadable"
        shutil.rmtree(aside, ignore_errors=True)
        (self.folder / str(step)).rename(aside)
        self._manager.reload()

    def close(self) -> None:
        """Wait for the writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
