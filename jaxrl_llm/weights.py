"""Learner mesh → sampler mesh: reshard, cast, unstack, count the version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import sharding
from jaxrl_llm.models import transformer


@dataclass(frozen=True)
class SamplerWeights:
    """Parameters as the sampler wants them, and how many pushes came before."""

    params: Any  # the tree of `transformer.init` with `layers` a list of per-layer trees
    version: int = 0


@partial(jax.jit, static_argnums=(0, 2))
def _unstack(config: transformer.ModelConfig, params: Any, mesh: Mesh | None) -> Any:
    """Cast to the compute dtype and cut the stacked layers apart.

    Decoding runs its layers one after the other, each with a cache of its own: a scan over stacked caches would copy
    all of them for every token. Weights are whole along `fsdp`, or each token would gather them again.
    """
    head_dtype = jnp.float32 if config.fp32_head else config.dtype

    def cast(path: Any, x: Any) -> Any:
        if path[-1].key == "scale":  # norms are taken in float32, in the learner too
            return x
        return x.astype(head_dtype if path[0].key in ("head", "embed") else config.dtype)

    params = jax.tree_util.tree_map_with_path(cast, params)
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(config.layers)]
    params = {**params, "layers": layers}
    if mesh is None:
        return params
    axes = transformer.logical_axes(config)
    is_axes = lambda x: isinstance(x, tuple)
    axes["layers"] = [jax.tree.map(lambda a: a[1:], axes["layers"], is_leaf=is_axes)] * config.layers
    whole = lambda a: PartitionSpec(*(None if m == "fsdp" else m for m in sharding.spec(a)))
    targets = jax.tree.map(lambda a: NamedSharding(mesh, whole(a)), axes, is_leaf=is_axes)
    return jax.lax.with_sharding_constraint(params, targets)


def push(
    config: transformer.ModelConfig, params: Any, mesh: Mesh | None, previous: SamplerWeights | None = None
) -> SamplerWeights:
    """The learner's parameters for the sampler, one version on. No copy passes through the host."""
    return SamplerWeights(_unstack(config, params, mesh), 0 if previous is None else previous.version + 1)
