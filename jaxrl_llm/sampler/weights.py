"""Learner mesh → sampler mesh: reshard, cast or quantize, unstack, count the version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models import lora, transformer
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler.quantize import Quantized, quantize

QUANTIZED = ("int8", "int4")


@dataclass(frozen=True)
class SamplerWeights:
    """Parameters as the sampler wants them, and the number of updates behind them."""

    params: Any  # the tree of `transformer.init` with `layers` a list of per-layer trees
    version: int = 0

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.params))


def _shared(axes: tuple[str, ...]) -> tuple[int, ...]:
    """Axes of a matrix along which quantized numbers share a scale: those summed over; of the embedding its width."""
    if axes[0] == "embed":
        return (0,)
    if axes[0] == "expert":
        return (1,)
    return (len(axes) - 1,) if axes[0] == "vocab" else tuple(range(len(axes) - 1))


@partial(jax.jit, static_argnums=(0, 2, 3))
def _unstack(config: ModelConfig, params: Any, mesh: Mesh | None, quantized: str) -> Any:
    """Merge LoRA, cast to the compute dtype, or quantize, and cut the stacked layers apart.

    Decoding runs its layers one after the other, each with a cache of its own: a scan over stacked caches would copy
    all of them for every token. Weights are whole along `fsdp`, or each token would gather them again.
    """
    is_axes = lambda x: isinstance(x, tuple)
    axes = transformer.logical_axes(lora.without(config))
    axes["layers"] = [jax.tree.map(lambda a: a[1:], axes["layers"], is_leaf=is_axes)] * config.layers
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(config.layers)]
    params = {**params, "layers": [lora.merged_layer(config, x) for x in layers]}
    whole = lambda a: tuple(None if m == "fsdp" else m for m in sharding.spec(a))
    sharded = lambda spec: NamedSharding(mesh, PartitionSpec(*spec))
    pin = lambda x, spec: x if mesh is None else jax.lax.with_sharding_constraint(x, sharded(spec))

    def one(path: Any, names: tuple[str, ...], x: jax.Array) -> Any:
        spec, shared = whole(names), _shared(names)
        if quantized and not path[-1].key.endswith(("bias", "scale", "router")):
            q = quantize(x, shared, quantized)
            return Quantized(pin(q.x, spec), pin(q.scale, [None if i in shared else m for i, m in enumerate(spec)]))
        return pin(x.astype(transformer.compute_dtype(config, path[0].key, path[-1].key)), spec)

    return jax.tree_util.tree_map_with_path(one, axes, params, is_leaf=is_axes)


def push(
    config: ModelConfig, params: Any, mesh: Mesh | None, *, version: int = 0, quantized: str = ""
) -> SamplerWeights:
    """Convert the learner's parameters for the sampler. No copy passes through the host.

    quantized: int8 or int4: matrices are kept so, with a float32 scale per output channel, and multiplied in the
    compute dtype. Adapters of a config with LoRA are merged.
    """
    return SamplerWeights(_unstack(config, params, mesh, quantized), version)
