"""One decoder: Qwen2/2.5/3, Qwen3-MoE, Llama 3 and the small models trained from scratch here.

Pre-norm blocks of grouped-query attention with RoPE and a SwiGLU or a mixture of them, RMSNorm throughout. Each
parameter is declared once, with its shape, initialiser and logical axes; shardings, optimiser state and checkpoints
derive from that declaration. Layers are stacked on a leading `layers` axis and scanned.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Integer

from jaxrl_llm.models.attention import Attend
from jaxrl_llm.models.moe import MoE
from jaxrl_llm.models.quantize import Quantized, dequantized, quantize, shared_axes
from jaxrl_llm.models.shape import LoRA
from jaxrl_llm.models.shape import ModelConfig as ModelConfig
from jaxrl_llm.models.shape import RopeScaling as RopeScaling
from jaxrl_llm.parallel.sharding import constrain

# The backward pass of a block: keep everything, keep the projections' outputs (recompute norms, activations and the
# attention weights: little work, half the memory), keep only the block's input (a third more work, least memory).
REMAT = {
    "none": lambda block: block,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "full": jax.checkpoint,
}


def rope(positions: Int[Array, "*N"], config: ModelConfig) -> tuple[Float[Array, "*N 1 c"], Float[Array, "*N 1 c"]]:
    """Cosines and sines of the rotary embedding (2104.09864), of both halves of a head: c is half its width."""
    half = config.head_width // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if s := config.rope_scaling:
        wavelength = 2 * math.pi / frequency
        low, high = s.original_max_position / s.low_freq_factor, s.original_max_position / s.high_freq_factor
        smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        between = (1 - smooth) * frequency / s.factor + smooth * frequency
        frequency = jnp.where(wavelength > low, frequency / s.factor, jnp.where(wavelength < high, frequency, between))
    angle = jnp.multiply.outer(positions.astype(jnp.float32), frequency)[..., None, :]
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x turned by its angles, in the rotate-half convention of Hugging Face."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _param(rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], std: float | None) -> nnx.Param:
    """A float32 parameter: normal with `std`, zeros for std 0, ones for None (norm scales)."""
    constant = jnp.full(shape, float(std is None), jnp.float32)
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32) if std else constant, axes=axes)


def _adapt(module: nnx.Module, lora: LoRA | None, rngs: nnx.Rngs, **inputs: int) -> None:
    """Beside each targeted W [in…, out…] A [in…, rank], normal, and B [rank, out…], zeros. inputs: W → axes in."""
    for name, n in inputs.items():
        if lora is not None and name in lora.targets:
            w, r = getattr(module, name), lora.rank
            axes, std = w.get_metadata()["axes"], math.prod(w.shape[:n]) ** -0.5
            own = nnx.Rngs(rngs.lora())  # W's keys stay as without LoRA
            setattr(module, f"{name}_a", _param(own, (*axes[:n], "rank"), (*w.shape[:n], r), std))
            setattr(module, f"{name}_b", _param(rngs, ("rank", *axes[n:]), (r, *w.shape[n:]), 0))


class RMSNorm(nnx.Module):
    def __init__(self, axis: str, size: int, eps: float, rngs: nnx.Rngs):
        self.scale = _param(rngs, (axis,), (size,), None)
        self.eps = eps

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return (y * scale.reshape((1,) * (y.ndim - 1) + scale.shape)).astype(x.dtype)


def _matmul(x: Array, w: Array, n: int = 1) -> Array:
    """x [*N,*A] · w [*A,*B], n axes A; the tokens on one axis: over two, XLA would transpose for the gradient of w."""
    inputs = math.prod(w.shape[:n])
    y = x.reshape(-1, inputs) @ w.astype(x.dtype).reshape(inputs, -1)
    return y.reshape(*x.shape[:-n], *w.shape[n:])


def _project(module: nnx.Module, name: str, x: Array, lora: LoRA | None, n: int = 1) -> Array:
    """x·W, and with LoRA + (α/r)·(x·A)·B: W's gradient, as large as W, is never formed."""
    y = _matmul(x, getattr(module, name)[...], n)
    if lora is None or name not in lora.targets:
        return y
    a, b = (getattr(module, f"{name}_{x}")[...] for x in "ab")
    return y + lora.alpha / lora.rank * _matmul(_matmul(x, a, n), b)


class Attention(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        std, out_std = c.width**-0.5, (c.heads * c.head_width * 2 * c.layers) ** -0.5
        self.q = _param(rngs, ("embed", "heads", "head_width"), (c.width, c.heads, c.head_width), std)
        self.k = _param(rngs, ("embed", "kv_heads", "head_width"), (c.width, c.kv_heads, c.head_width), std)
        self.v = _param(rngs, ("embed", "kv_heads", "head_width"), (c.width, c.kv_heads, c.head_width), std)
        self.o = _param(rngs, ("heads", "head_width", "embed"), (c.heads, c.head_width, c.width), out_std)
        if c.qkv_bias:
            self.q_bias = _param(rngs, ("heads", "head_width"), (c.heads, c.head_width), 0)
            self.k_bias = _param(rngs, ("kv_heads", "head_width"), (c.kv_heads, c.head_width), 0)
            self.v_bias = _param(rngs, ("kv_heads", "head_width"), (c.kv_heads, c.head_width), 0)
        if c.qk_norm:
            self.q_norm = RMSNorm("head_width", c.head_width, c.norm_eps, rngs)
            self.k_norm = RMSNorm("head_width", c.head_width, c.norm_eps, rngs)
        _adapt(self, c.lora, rngs, q=1, k=1, v=1, o=2)
        self.config = c

    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any) -> tuple[Array, Any]:
        q, k, v = (_project(self, name, x, self.config.lora) for name in "qkv")
        if self.config.qkv_bias:
            biases = (self.q_bias, self.k_bias, self.v_bias)
            q, k, v = (y + b[...].astype(x.dtype)[None, None] for y, b in zip((q, k, v), biases, strict=True))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(_rotate(q, *angles), _rotate(k, *angles), v, cache)
        return _project(self, "o", out, self.config.lora, 2), cache


class SwiGLU(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.gate = _param(rngs, ("embed", "mlp"), (c.width, c.mlp_width), c.width**-0.5)
        self.up = _param(rngs, ("embed", "mlp"), (c.width, c.mlp_width), c.width**-0.5)
        self.down = _param(rngs, ("mlp", "embed"), (c.mlp_width, c.width), (c.mlp_width * 2 * c.layers) ** -0.5)
        _adapt(self, c.lora, rngs, gate=1, up=1, down=1)
        self.lora = c.lora

    def __call__(self, x: Array) -> Array:
        gate, up = (_project(self, name, x, self.lora) for name in ("gate", "up"))
        return _project(self, "down", jax.nn.silu(gate) * up, self.lora)


class Block(nnx.Module):
    def __init__(self, c: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm("embed", c.width, c.norm_eps, rngs)
        self.attention = Attention(c, rngs)
        self.mlp_norm = RMSNorm("embed", c.width, c.norm_eps, rngs)
        if c.experts:
            self.moe = MoE(c, partial(_param, rngs))
        else:
            self.mlp = SwiGLU(c, rngs)

    def __call__(
        self, x: Array, angles: tuple[Array, Array], attend: Attend, cache: Any, replay: Array | None = None
    ) -> tuple[Array, Any, Array | None]:
        """The block's output, its cache and, of a mixture of experts (see `MoE`), its router's logits."""
        with jax.named_scope("attention"):
            y, cache = self.attention(self.attention_norm(x), angles, attend, cache)
        x = constrain(x + y, "batch")
        with jax.named_scope("mlp"):
            y = self.mlp_norm(x)
            y, logits = self.moe(y, replay) if hasattr(self, "moe") else (self.mlp(y), None)
        return constrain(x + y, "batch"), cache, logits


class Transformer(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c = self.config = config
        self.embed = _param(rngs, ("vocab", "embed"), (c.vocab_size, c.width), c.width**-0.5)
        self.layers = nnx.vmap(lambda r: Block(c, r), axis_size=c.layers)(rngs.split(c.layers))
        self.norm = RMSNorm("embed", c.width, c.norm_eps, rngs)
        if not c.tied_head:
            self.head = _param(rngs, ("embed", "vocab"), (c.width, c.vocab_size), c.width**-0.5)

    def __call__(
        self, tokens: Int[Array, "R N"], positions: Int[Array, "R N"], attend: Attend,
        replay: Integer[Array, "R N L K"] | None = None,
    ) -> tuple[Float[Array, "R N D"], Float[Array, "R N L E"] | None]:  # fmt: skip
        """Final hidden states, and the routers' logits if there are any. replay: see `MoE`."""
        angles = rope(positions, self.config)
        graph, layers = nnx.split(self.layers)

        def block(x: Array, inputs: tuple[Any, Array | None]) -> tuple[Array, Array | None]:
            layer = nnx.merge(graph, dequantized(inputs[0], self.config.dtype))  # one layer at a time
            x, _, logits = layer(x, angles, attend, None, inputs[1])
            return x, logits

        by_layer = None if replay is None else jnp.moveaxis(replay, 2, 0)
        x, logits = jax.lax.scan(REMAT[self.config.remat](block), self.embedded(tokens), (layers, by_layer))
        return self.norm(x), None if logits is None else jnp.moveaxis(logits, 0, 2)

    def embedded(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        rows = jax.tree.map(lambda x: x[tokens], self.embed.get_value())  # of a quantized one also its scales
        return constrain(dequantized(rows, self.config.dtype).astype(self.config.dtype), "batch")

    def head_matrix(self) -> Float[Array, "D V"]:
        """The output projection, in the dtype in which its product is taken."""
        dtype = compute_dtype(self.config, "head", "head")
        head = dequantized((self.embed if self.config.tied_head else self.head).get_value(), dtype).astype(dtype)
        return head.T if self.config.tied_head else head


def split(config: ModelConfig) -> nnx.GraphDef:
    """The model's structure without its arrays; `nnx.merge(split(config), params)` is the model."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))[0]


def init(config: ModelConfig, key: Array) -> dict[str, Any]:
    """Fresh parameters as a plain nested dict of float32 arrays; with LoRA the model's without it, and the adapters."""
    rngs = nnx.Rngs(params=key, lora=jax.random.fold_in(key, 2**32 - 1))
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs), nnx.Param))


def compute_dtype(config: ModelConfig, first: str, last: str) -> str:
    """In which dtype a parameter enters its product; first, last: of the names on its path in the tree."""
    if last in ("scale", "router") or (first in ("embed", "head") and config.fp32_head):
        return "float32"
    return config.dtype


def kept(
    config: ModelConfig, path: Any, x: Array, quantized: str = "", axes: tuple[str, ...] = ()
) -> Array | Quantized:
    """A parameter that does not learn: in its compute dtype, or a matrix in int8 or int4. axes: their names."""
    first, last = path[0].key, path[-1].key
    if quantized and not last.endswith(("bias", "scale", "router")):
        return quantize(x, shared_axes(axes), quantized)
    return x.astype(compute_dtype(config, first, last))


def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """The logical axis names of every parameter, in the tree of `init`; stacked ones begin with `layers`."""
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))

    def axes(param: nnx.Param) -> tuple[str, ...]:
        names = param.get_metadata()["axes"]
        return ("layers",) * (len(param.shape) - len(names)) + names

    named = jax.tree.map(axes, nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.to_pure_dict(named)
