"""LoRA: beside each matrix W that it targets lie two thin ones, A and B, which alone are trained (2106.09685).

    y = x·W + (α/r)·(x·A)·B        W [in…, out…], A [in…, r], B [r, out…], which is 0 at first

The tree of `transformer.init` has them beside W, named NAME_a and NAME_b. Without them it is the base's, all frozen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import transformer
from jaxrl_llm.models.shape import LoRA, ModelConfig


def without(config: ModelConfig) -> ModelConfig:
    """The model that the base, and what is merged, are parameters of."""
    return replace(config, lora=None)


def _adapters(lora: LoRA) -> set[str]:
    return {f"{name}_{x}" for name in lora.targets for x in "ab"}


def trained(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """The part of a tree that the optimiser changes: with LoRA the adapters, else all. Leaves may be anything."""
    if config.lora is None:
        return params
    inner = {name: trained(config, x) for name, x in params.items() if isinstance(x, dict)}
    own = {name: x for name, x in params.items() if name in _adapters(config.lora)}
    return {name: x for name, x in inner.items() if x} | own


def joined(frozen: Any, trained: Any) -> Any:
    """The leaves of both trees in one; of two in one place the second's. No array is copied."""
    if not isinstance(frozen, dict) or not isinstance(trained, dict):
        return trained
    return frozen | {name: joined(frozen.get(name), x) for name, x in trained.items()}


def merged_layer(config: ModelConfig, layer: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """One layer's W + (α/r)·A·B, computed in float32, without its adapters; what has none stays as it is."""
    if (c := config.lora) is None:
        return layer

    def one(name: str, x: Any) -> Any:
        if isinstance(x, dict):
            return merged_layer(config, x, dtype)
        if f"{name}_a" not in layer:
            return x
        a, b = (layer[f"{name}_{x}"].astype(jnp.float32) for x in "ab")
        return (x.astype(jnp.float32) + c.alpha / c.rank * jnp.tensordot(a, b, 1, precision="highest")).astype(dtype)

    return {name: one(name, x) for name, x in layer.items() if name not in _adapters(c)}


@partial(jax.jit, static_argnames=("config", "dtype"))
def _merged(config: ModelConfig, layers: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Layer by layer, or all of them would exist in float32."""
    return jax.lax.map(partial(merged_layer, config, dtype=dtype), layers)


def merged(config: ModelConfig, params: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """The parameters of the model without LoRA that computes the same; what is merged is in this dtype."""
    if config.lora is None:
        return params
    return {**params, "layers": _merged(config, params["layers"], dtype)}


def frozen(config: ModelConfig, params: dict[str, Any], quantized: str = "") -> dict[str, Any]:
    """Parameters that are not trained, in the dtypes in which they are computed with: nothing of a result is lost.

    quantized: int8 or int4, for the matrices of a model without LoRA: something is.
    """
    one = lambda path, x, axes=(): transformer.kept(config, path, x, quantized, axes)
    return jax.tree_util.tree_map_with_path(one, params, *([transformer.logical_axes(config)] if quantized else []))
