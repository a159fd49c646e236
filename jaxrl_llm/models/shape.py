"""The shape of a decoder, without the decoder: what a config needs, imported in no time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch of the low RoPE frequencies to a longer context."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = True
    norm_eps: float = 1e-6
    max_positions: int = 32_768  # tokens of the longest context: nothing is computed with it, config.json tells it
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters are kept in float32
    fp32_head: bool = True  # the head's product in float32 even when dtype is bfloat16
    remat: Literal["none", "dots", "full"] = "dots"  # what the backward pass recomputes, see REMAT
    attention: Literal["auto", "xla", "splash", "cudnn", "pallas"] = "auto"  # see models/attention.py

    @property
    def flops_per_token(self) -> int:
        """Operations of the blocks' matrix products for a token, forward: 2 per multiply-add."""
        attention = self.width * self.head_width * 2 * (self.heads + self.kv_heads)
        return 2 * self.layers * (attention + 3 * self.width * self.mlp_width)

    @property
    def flops_per_pair(self) -> int:
        """Operations of attention for a query and a key that it sees, forward."""
        return 4 * self.layers * self.heads * self.head_width

    @property
    def flops_of_head(self) -> int:
        """Operations of the output projection for a token, forward."""
        return 2 * self.width * self.vocab_size

    @property
    def n_params(self) -> int:
        attention = self.width * self.head_width * 2 * (self.heads + self.kv_heads)
        attention += (self.heads + 2 * self.kv_heads) * self.head_width if self.qkv_bias else 0
        attention += 2 * self.head_width if self.qk_norm else 0
        block = attention + 3 * self.width * self.mlp_width + 2 * self.width
        return self.layers * block + self.width + self.vocab_size * self.width * (1 if self.tied_head else 2)
