"""Learner mesh → sampler mesh: reshard, cast or quantize, unstack, count the version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models import lora, transformer
from jaxrl_llm.models.quantize import Quantized
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.parallel import sharding

QUANTIZED = ("int8", "int4")


@dataclass(frozen=True)
class SamplerWeights:
    """Parameters as the sampler wants them, and the number of updates behind them."""

    params: Any  # the tree of `transformer.init` with `layers` a list of per-layer trees
    version: int = 0

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.params))


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
        spec, x = whole(names), transformer.kept(config, path, x, quantized, names)
        if isinstance(x, Quantized):
            split = [None if size == 1 else m for size, m in zip(x.scale.shape, spec, strict=True)]
            return Quantized(pin(x.x, spec), pin(x.scale, split))
        return pin(x, spec)

    return jax.tree_util.tree_map_with_path(one, axes, params, is_leaf=is_axes)


def push(
    config: ModelConfig, params: Any, mesh: Mesh | None, *, version: int = 0, quantized: str = ""
) -> SamplerWeights:
    """Convert the learner's parameters for the sampler. No copy passes through the host.

    quantized: int8 or int4: matrices are kept so, with a float32 scale per output channel, and multiplied in the
    compute dtype. Adapters of a config with LoRA are merged.
    """
    return SamplerWeights(_unstack(config, params, mesh, quantized), version)
