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
class LoRA:
    """Training of a few thin matrices beside the frozen ones (2106.09685): see models/lora.py."""

    rank: int = 16
    alpha: float = 32.0  # what the thin matrices add is scaled by alpha / rank
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")  # of a mixture of experts only the first four


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int  # not used in a mixture of experts
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
    experts: int = 0  # in every layer, in place of its MLP; 0: a dense model
    experts_per_token: int = 8
    expert_width: int = 768
    norm_topk: bool = True  # a token's weights on its experts sum to 1
    router_aux_coef: float = 0.0  # of the load-balancing loss
    lora: LoRA | None = None  # None: all parameters are trained

    @property
    def flops_per_token(self) -> int:
        """Operations of the blocks' matrix products for a token, forward: 2 per multiply-add."""
        attention = self.width * self.head_width * 2 * (self.heads + self.kv_heads)
        return 2 * self.layers * (attention + self._mlp_params(min(self.experts, self.experts_per_token)))

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
        return self._params(self.experts)

    @property
    def n_active_params(self) -> int:
        """Parameters that one token meets: n_params but for the experts that are not its own."""
        return self._params(min(self.experts, self.experts_per_token))

    def _params(self, experts: int) -> int:
        attention = self.width * self.head_width * 2 * (self.heads + self.kv_heads)
        attention += (self.heads + 2 * self.kv_heads) * self.head_width if self.qkv_bias else 0
        attention += 2 * self.head_width if self.qk_norm else 0
        block = attention + self._mlp_params(experts) + 2 * self.width
        return self.layers * block + self.width + self.vocab_size * self.width * (1 if self.tied_head else 2)

    def _mlp_params(self, experts: int) -> int:
        """Of a block: of its MLP, or of its router and this many experts."""
        return self.width * (self.experts + 3 * (experts * self.expert_width if self.experts else self.mlp_width))
