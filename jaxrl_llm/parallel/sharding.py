"""The mesh, and the one place where logical axes meet mesh axes.

Rows of a batch are split over `data` and `fsdp`; parameters over `fsdp` (their embed axis) and `tensor` (heads, MLP,
experts, vocabulary). Optimiser state follows its parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

BATCH = ("data", "fsdp")
RULES: dict[str, str | tuple[str, ...] | None] = {"batch": BATCH, "embed": "fsdp"}
RULES |= dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "expert"), "tensor")
RULES |= dict.fromkeys(("head_width", "expert_width", "router", "rank", "layers"))  # whole on every device


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A (data, fsdp, tensor) mesh over the first data·fsdp·tensor devices. Raises when there are too few."""
    need, devices = data * fsdp * tensor, jax.devices()
    if need > len(devices):
        raise ValueError(f"mesh: {data}×{fsdp}×{tensor} needs {need} devices, {len(devices)} are visible")
    if need == len(devices):
        return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return Mesh(np.array(devices[:need]).reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Logical axes of one array → its PartitionSpec. Raises on an unknown axis and on a mesh axis used twice."""
    unknown = [a for a in axes if a is not None and a not in RULES]
    if unknown:
        raise ValueError(f"logical axis {unknown[0]!r} has no rule; known: {', '.join(RULES)}")
    mesh_axes = [None if a is None else RULES[a] for a in axes]
    flat = [m for entry in mesh_axes if entry for m in ((entry,) if isinstance(entry, str) else entry)]
    if len(set(flat)) < len(flat):
        raise ValueError(f"logical axes {axes} use a mesh axis twice: {mesh_axes}")
    return PartitionSpec(*mesh_axes)


def shardings(axes_tree: Any, shapes: Any, mesh: Mesh) -> Any:
    """NamedShardings for a tree of logical axes. Raises on a size that its mesh axes do not divide."""

    def one(path: Any, axes: tuple[str, ...], shape: Any) -> NamedSharding:
        partition = spec(axes)
        for axis, size, entry in zip(axes, shape.shape, partition, strict=True):
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            parts = int(np.prod([mesh.shape[n] for n in names]))
            if size % parts:
                name = jax.tree_util.keystr(path)
                raise ValueError(f"mesh: {'×'.join(names)} = {parts} does not divide axis {axis} = {size} of {name}")
        return NamedSharding(mesh, partition)

    is_axes = lambda x: isinstance(x, tuple) and all(isinstance(a, str) for a in x)
    return jax.tree_util.tree_map_with_path(one, axes_tree, shapes, is_leaf=is_axes)


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Splits one axis over data and fsdp, and no other."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """Everything on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(n: int, mesh: Mesh | None) -> int:
    """The smallest number of rows ≥ n that divides evenly among the devices which share a batch."""
    ways = 1 if mesh is None else int(np.prod([mesh.shape[a] for a in BATCH]))
    return -(-n // ways) * ways


def shards() -> int:
    """Parts into which the mesh of `jax.set_mesh` splits a batch; 1 without a mesh."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return int(np.prod([sizes.get(a, 1) for a in BATCH]))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x with its leading axes split by RULES over the mesh of `jax.set_mesh`; without a mesh, x as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))
