"""Model shapes by name."""

from __future__ import annotations

from jaxrl_llm.models.shape import ModelConfig

# 112 ids hold the 98 of the character tokenizer and divide by 16, for meshes that split the vocabulary.
NANO = ModelConfig(vocab_size=112, layers=3, width=96, heads=4, kv_heads=2, head_width=24, mlp_width=256)  # 0.3 M
MICRO = ModelConfig(vocab_size=112, layers=4, width=128, heads=4, kv_heads=2, head_width=32, mlp_width=384)  # 0.8 M
MINI = ModelConfig(vocab_size=112, layers=6, width=192, heads=6, kv_heads=2, head_width=32, mlp_width=512)  # 2.4 M

# Published shapes, computed in bfloat16 but for norms, routers and sums, and with every block recomputed.
PRESETS: dict[str, ModelConfig] = {
    "qwen3-30b-a3b": ModelConfig(
        151_936, 48, 2048, 32, 4, 128, 6144, dtype="bfloat16", fp32_head=False, remat="full", qk_norm=True,
        rope_theta=1e6, tied_head=False, experts=128, experts_per_token=8, expert_width=768,
    ),
}  # fmt: skip
