"""Model shapes by name: small ones that are trained from scratch here, and those of published checkpoints."""

from __future__ import annotations

from functools import partial

from jaxrl_llm.models.shape import ModelConfig, RopeScaling

# 112 ids hold the 98 of the character tokenizer and divide by 16, for meshes that split the vocabulary.
NANO = ModelConfig(vocab_size=112, layers=3, width=96, heads=4, kv_heads=2, head_width=24, mlp_width=256)  # 0.3 M
MICRO = ModelConfig(vocab_size=112, layers=4, width=128, heads=4, kv_heads=2, head_width=32, mlp_width=384)  # 0.8 M
MINI = ModelConfig(vocab_size=112, layers=6, width=192, heads=6, kv_heads=2, head_width=32, mlp_width=512)  # 2.4 M

# How a published model is computed unless a config says otherwise. The head's operands are bfloat16, its sums float32:
# a product of float32 operands takes six passes of the matrix unit, which at 150,000 ids is a fifth to a half of a
# step. `fp32_head=True` narrows the gap between sampler and learner, where that matters more.
COMPUTE = {"dtype": "bfloat16", "fp32_head": False, "remat": "full"}

_qwen2 = partial(ModelConfig, **COMPUTE, qkv_bias=True, rope_theta=1e6)
_qwen2_math = partial(_qwen2, rope_theta=1e4, max_positions=4096)
_qwen3 = partial(ModelConfig, 151_936, **COMPUTE, qk_norm=True, rope_theta=1e6, max_positions=40_960)
_llama3 = partial(ModelConfig, 128_256, **COMPUTE, rope_theta=5e5, norm_eps=1e-5, max_positions=131_072)
_smollm2 = partial(ModelConfig, 49_152, **COMPUTE, norm_eps=1e-5, max_positions=8192)
_untied = {"tied_head": False}
_long = {"tied_head": False, "max_positions": 131_072}

# In the order of ModelConfig: [vocabulary,] layers, width, heads, key-value heads, head width, MLP width. Those of
# Qwen2.5 are the base models'; the instruction-tuned 14B and 32B have norm_eps=1e-6.
PRESETS: dict[str, ModelConfig] = {
    "qwen2.5-0.5b": _qwen2(151_936, 24, 896, 14, 2, 64, 4864),
    "qwen2.5-1.5b": _qwen2(151_936, 28, 1536, 12, 2, 128, 8960, max_positions=131_072),
    "qwen2.5-3b": _qwen2(151_936, 36, 2048, 16, 2, 128, 11_008),
    "qwen2.5-7b": _qwen2(152_064, 28, 3584, 28, 4, 128, 18_944, **_long),
    "qwen2.5-14b": _qwen2(152_064, 48, 5120, 40, 8, 128, 13_824, norm_eps=1e-5, **_long),
    "qwen2.5-32b": _qwen2(152_064, 64, 5120, 40, 8, 128, 27_648, norm_eps=1e-5, **_long),
    "qwen2.5-math-1.5b": _qwen2_math(151_936, 28, 1536, 12, 2, 128, 8960),
    "qwen2.5-math-7b": _qwen2_math(152_064, 28, 3584, 28, 4, 128, 18_944, **_untied),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 128, 3072),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 128, 6144),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 128, 9728),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 128, 12_288, **_untied),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 128, 17_408, **_untied),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 128, 25_600, **_untied),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 128, 6144, **_untied, experts=128, experts_per_token=8, expert_width=768),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8, 64, 8192, rope_scaling=RopeScaling(factor=32.0)),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8, 128, 8192, rope_scaling=RopeScaling(factor=32.0)),
    "llama-3.1-8b": _llama3(32, 4096, 32, 8, 128, 14_336, rope_scaling=RopeScaling(), **_untied),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 64, 1536, rope_theta=1e5),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 64, 2560, rope_theta=1e5),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 64, 8192, rope_theta=1.3e5),
}
