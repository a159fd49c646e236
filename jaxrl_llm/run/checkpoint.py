"""Checkpoints (Orbax): the train state, and where the host was."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxrl_llm.arrays import TrainState
from jaxrl_llm.learner.train_step import param_shapes
from jaxrl_llm.models.shape import ModelConfig

logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every file, and each error that it also raises


@dataclass(frozen=True)
class Restored:
    state: Any
    host: dict[str, Any]
    step: int


class Damaged(ValueError):
    """A file does not hold what was saved."""


# What TensorStore and Orbax report of bytes that were read and make no sense. A device that fails to give the bytes has
# another status (UNKNOWN, RESOURCE_EXHAUSTED, PERMISSION_DENIED, …), and the number of the system's error.
_NONSENSE = re.compile(
    "^(FAILED_PRECONDITION|OUT_OF_RANGE|DATA_LOSS|INVALID_ARGUMENT|NOT_FOUND): "
    """|Item ".*" was not found|pytree structure error|dataclass node type mismatch"""
)


def is_damage(error: BaseException | None) -> bool:
    """Whether an error of Orbax says that a checkpoint's files are damaged: anything else may pass, as an I/O error."""
    damage = False
    while error is not None:
        if "os_error_code" in str(error) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            return False
        damage |= isinstance(error, Damaged | FileNotFoundError | json.JSONDecodeError | UnicodeDecodeError)
        damage |= isinstance(error, ValueError | KeyError) and _NONSENSE.search(str(error)) is not None
        error = error.__cause__ or error.__context__
    return damage


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Σ bits[i]·(2i+1) mod 2³² of each leaf, computed on its shards.

    The factors are odd, which makes them invertible mod 2³²: one element that changes always changes the sum.
    """

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
        access = {"create": not read_only, "read_only": read_only}
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True, **access)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._writing: int | None = None  # the step that is being written

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Write `state` (a pytree of arrays) and `host` (JSON) as `step`; a step that is there already is left.

        Raises OSError with the step that could not be written, this one or the one before.
        """
        if step in self._manager.all_steps():
            return
        self.wait()
        as_json = {"host": ocp.args.JsonSave(host), "checksums": ocp.args.JsonSave(checksums(state, host))}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), **as_json)
        self._writing = step
        with self._naming():
            # Seen before Orbax begins: when the disk fills up, its threads print hundreds of lines
            need = sum(x.nbytes for x in jax.tree.leaves(state)) + 2**20  # for the files besides the arrays
            if (free := shutil.disk_usage(self.folder).free) < need:
                raise OSError(errno.ENOSPC, f"{free / 2**20:.1f} MiB free; expected {need / 2**20:.1f}")
            self._manager.save(step, args=args)

    def wait(self) -> None:
        """Until what is being written is written. Raises OSError with the step that could not be."""
        with self._naming():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise OSError(f"checkpoint {self._writing} in {self.folder} was not written ({why})") from error

    def restore(
        self, like: Any, warn: Callable[[str], None], step: int | None = None, *, partial: bool = False
    ) -> Restored | None:
        """The newest whole checkpoint, placed and shaped `like` (arrays or ShapeDtypeStructs); None if none was saved.

        With a `step` it is that one or none.

        One that is damaged is reported through `warn`, and the one before it is tried. When that is whole, the damaged
        ones are renamed `<step>.unreadable`, so that their steps can be written again. Raises Damaged when none is
        whole, and RuntimeError when one cannot be read for another reason; neither changes anything.
        `partial`: `like` is a dataclass, and only those of the state's fields are read that are not None in it.
        """
        shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
        like = jax.tree.map(shaped, like)
        state, json_ = ocp.args.StandardRestore(like), ocp.args.JsonRestore()
        if partial:
            given = {name: x for name, x in vars(like).items() if x is not None}
            placed = ocp.checkpoint_utils.construct_restore_args(given)
            state = ocp.args.PyTreeRestore(given, restore_args=placed, partial_restore=True)
        args = ocp.args.Composite(state=state, host=json_, checksums=json_)
        damaged: dict[int, str] = {}
        steps = [s for s in self.steps() if step in (None, s)]
        for step in reversed(steps):
            try:
                found = self._manager.restore(step, args=args)
                restored = replace(like, **found["state"]) if partial else found["state"]
                for name, checksum in checksums(restored, found["host"]).items():
                    if checksum != found["checksums"].get(name):
                        raise Damaged(f"the checksum of {name} is not what was saved")
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error.__cause__ or error).split())[:120]}"
                if not is_damage(error):
                    raise RuntimeError(f"checkpoint {self.folder / str(step)}: {why}; nothing was changed") from error
                damaged[step] = why
                warn(f"checkpoint {step} cannot be read ({why}); trying the one before")
                continue
            if damaged and not self._read_only:
                for bad in damaged:
                    aside = self.folder / f"{bad}.unreadable"
                    shutil.rmtree(aside, ignore_errors=True)
                    (self.folder / str(bad)).rename(aside)
                self._manager.reload()
            return Restored(restored, found["host"], step)
        earlier = sorted(p.name for p in self.folder.glob("*.unreadable"))
        if damaged or earlier:
            listed = "; ".join([*(f"{step}: {why}" for step, why in damaged.items()), *earlier])
            raise Damaged(f"{self.folder}: no checkpoint is whole ({listed}); expected one, or another folder")
        return None

    def close(self) -> None:
        """Wait for the writes under way."""
        try:
            self.wait()
        finally:
            self._manager.close()


def newest_policy(folder: Path, model: ModelConfig, mesh: Mesh) -> Restored | None:
    """The newest checkpoint of the run, or of the base policy, in a folder; of its state only the parameters."""
    checkpoints, warn = Checkpoints(Path(folder) / "checkpoints", read_only=True), partial(print, file=sys.stderr)
    return checkpoints.restore(TrainState(param_shapes(model, mesh), None, None), warn, partial=True)
