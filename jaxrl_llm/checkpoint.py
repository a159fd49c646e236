"""Checkpoints (Orbax): the train state, and where the host was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every file it writes


@dataclass(frozen=True)
class Restored:
    state: Any
    host: dict[str, Any]
    step: int


class Checkpoints:
    """Saved states of one run, the newest `keep` of them. Writes are atomic and happen in the background."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Write `state` (a pytree of arrays) and `host` (JSON) as `step`; a step that is there already is left."""
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        self._manager.save(step, args=args)

    def restore(self, like: Any, warn: Callable[[str], None]) -> Restored | None:
        """The newest checkpoint that can be read, placed and shaped `like` (arrays or ShapeDtypeStructs with shardings).

        A corrupt one is told of through `warn`, deleted so that its step can be written again, and the one before it is
        tried; None when none is left.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), like
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore())
        for step in reversed(self.steps()):
            try:
                found = self._manager.restore(step, args=args)
                return Restored(found["state"], found["host"], step)
            except Exception as error:  # whatever a damaged file makes Orbax or TensorStore raise
                first_line = (str(error).strip().splitlines() or [""])[0]
                warn(f"checkpoint {step} cannot be read ({type(error).__name__}: {first_line[:120]}); trying the one before")
                self._manager.delete(step)
        return None

    def close(self) -> None:
        """Wait for the writes under way."""
        self._manager.wait_until_finished()
        self._manager.close()
