"""Every preset has the parameters that its checkpoint was published with, and the shape of its config.json."""

import json
from dataclasses import replace

import pytest

from jaxrl_llm.models import hf_format, presets
from jaxrl_llm.models.shape import ModelConfig

# As the hub counts them, or as the authors do where the hub counts a tied head's copy too (Qwen3-0.6B, 1.7B)
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-math-1.5b": 1_543_714_304,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_every_preset_is_counted():
    dense = {name for name, m in presets.PRESETS.items() if not getattr(m, "experts", 0)}
    assert dense == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    m = presets.PRESETS[name]
    assert m.n_params == PUBLISHED[name]
    assert (m.dtype, m.remat, m.fp32_head) == ("bfloat16", "full", False)
    assert m.heads % m.kv_heads == 0


# What the counts do not tell: RoPE, eps, context. From the config.json of each repository, in the forms of their time.
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "model_type": "qwen2",
    "rms_norm_eps": 1e-06, "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "bos_token_id": 151643, "eos_token_id": 151643, "initializer_range": 0.02}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "hidden_act": "silu", "model_type": "llama", "rms_norm_eps": 1e-05, "pretraining_tp": 1, "vocab_size": 128256,
    "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"}}  # fmt: skip


def sizes(*numbers):
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    return dict(zip(names, numbers, strict=True))


FILES = {
    "qwen2.5-0.5b": QWEN2 | sizes(896, 4864, 14, 24, 2) | {"max_position_embeddings": 32768, "max_window_layers": 24,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "vocab_size": 151936},
    "qwen2.5-14b": QWEN2 | sizes(5120, 13824, 40, 48, 8) | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 152064},
    "qwen2.5-math-7b": QWEN2 | sizes(3584, 18944, 28, 28, 4) | {"max_position_embeddings": 4096, "rope_theta": 10000,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 152064},
    "qwen3-0.6b": sizes(1024, 3072, 16, 28, 8) | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
    "llama-3.2-1b": LLAMA | sizes(2048, 8192, 32, 16, 8) | {"head_dim": 64, "tie_word_embeddings": True},
    "llama-3.1-8b": LLAMA | sizes(4096, 14336, 32, 32, 8) | {"tie_word_embeddings": False,
        "rope_scaling": LLAMA["rope_scaling"] | {"factor": 8.0}},
    "smollm2-135m": LLAMA | sizes(576, 1536, 9, 30, 3) | {"max_position_embeddings": 8192, "rope_interleaved": False,
        "is_llama_config": True, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "vocab_size": 49152},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_presets_are_their_published_configs(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    assert hf_format.read_config(tmp_path) == presets.PRESETS[name]


def test_small_ones_are_computed_in_float32():
    for m in (presets.NANO, presets.MICRO, presets.MINI):
        assert replace(m, dtype="float32", fp32_head=True, remat="dots") == m
        assert isinstance(m, ModelConfig)
