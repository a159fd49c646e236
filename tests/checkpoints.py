"""Checkpoints as Hugging Face writes them, made here by hand: what jaxrl_llm/models/hf.py is tested against."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}


def tensors(config, params) -> dict[str, np.ndarray]:
    """Our parameters by Hugging Face's names, in its layout: matrices are [out, in], heads come one after the other."""
    c, layers = config, params["layers"]
    out = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]["scale"]}
    for i in range(c.layers):
        a, at = layers["attention"], f"model.layers.{i}."
        for x, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            rows = [a[x][i][:, h, d] for h in range(heads) for d in range(c.head_width)]
            out[f"{at}self_attn.{x}_proj.weight"] = np.stack(rows)
            if c.qkv_bias:
                out[f"{at}self_attn.{x}_proj.bias"] = np.concatenate(list(a[f"{x}_bias"][i]))
            if c.qk_norm and x != "v":
                out[f"{at}self_attn.{x}_norm.weight"] = a[f"{x}_norm"]["scale"][i]
        columns = [a["o"][i][h, d] for h in range(c.heads) for d in range(c.head_width)]
        out[f"{at}self_attn.o_proj.weight"] = np.stack(columns, axis=1)
        out[f"{at}input_layernorm.weight"] = layers["attention_norm"]["scale"][i]
        out[f"{at}post_attention_layernorm.weight"] = layers["mlp_norm"]["scale"][i]
        for x in ("gate", "up", "down"):
            out[f"{at}mlp.{x}_proj.weight"] = layers["mlp"][x][i].T
    return out if c.tied_head else out | {"lm_head.weight": params["head"].T}


def config_json(config) -> dict:
    """As transformers 4 writes it."""
    c = config
    family = "qwen2" if c.qkv_bias else "qwen3" if c.qk_norm else "llama"
    data = {
        "architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "hidden_act": "silu",
        "vocab_size": c.vocab_size, "num_hidden_layers": c.layers, "hidden_size": c.width, "head_dim": c.head_width,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "intermediate_size": c.mlp_width,
        "rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tied_head, "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_positions, "torch_dtype": "bfloat16", "rope_scaling": None,
    }  # fmt: skip
    if s := c.rope_scaling:
        data["rope_scaling"] = {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position}  # fmt: skip
    return data


def write(folder: Path, config, params, kind: str = "F32", shards: int = 1, extra=()) -> Path:
    """A checkpoint in `folder`: a file of weights, or several with their index. extra: tensors to be added."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    named = tensors(config, params) | dict(extra)
    named = {k: np.ascontiguousarray(v).astype(TYPES[kind]) for k, v in named.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {name: f"model-{1 + i % shards:05}-of-{shards:05}.safetensors" for i, name in enumerate(named)}
    for file in set(places.values()):
        save_file({k: v for k, v in named.items() if places[k] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
