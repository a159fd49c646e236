"""What Hugging Face's files call things: config.json against ModelConfig, tensors' names against parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.models import presets, transformer
from jaxrl_llm.models.shape import ModelConfig, RopeScaling
from jaxrl_llm.types import expect

CONFIG = "config.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED = ("rotary_emb.inv_freq",)  # ends of names of what is computed here

# model_type → the class that `transformers` loads, and what the family's models have besides those of the others
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "experts": True}),
}
FIELDS = {  # of config.json → of ModelConfig
    "vocab_size": "vocab_size",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_width",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_width",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_head",
    "max_position_embeddings": "max_positions",
}
EXPERT_FIELDS = {"num_experts": "experts", "num_experts_per_tok": "experts_per_token"}
EXPERT_FIELDS |= {"moe_intermediate_size": "expert_width", "norm_topk_prob": "norm_topk"}
ROPE_FIELDS = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
ROPE_FIELDS["original_max_position_embeddings"] = "original_max_position"
# What this decoder does, and a model that says otherwise would need; null and a field left out mean the same.
ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "use_sliding_window": False,
    "use_mrope": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError names a file that is missing or holds none."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{file}: {why}; expected a JSON file of a Hugging Face checkpoint") from error
    expect(isinstance(data, dict), str(file), type(data).__name__, "a JSON object")
    return data


def read_config(folder: Path) -> ModelConfig:
    """The shape that the folder's config.json tells, computed as `presets.COMPUTE` says.

    Raises ValueError that names the file and the field: a family or a feature that this decoder does not have.
    """
    file = folder / CONFIG
    data = read_json(file)
    given = lambda name, default=None: default if data.get(name) is None else data[name]
    kind = given("model_type")
    expect(kind in FAMILIES, f"{file}: model_type", kind, f"one of {', '.join(FAMILIES)}")
    architecture, features = FAMILIES[kind]
    architectures = given("architectures", [architecture])
    expect(architectures == [architecture], f"{file}: architectures", architectures, f"{[architecture]}")
    for name, only in ONLY.items():
        expect(given(name, only) == only, f"{file}: {name}", data.get(name), f"{json.dumps(only)}, all that is known")
    kinds = set(given("layer_types", ["full_attention"]))
    expect(kinds == {"full_attention"}, f"{file}: layer_types", sorted(kinds), "full_attention alone")

    def number(name: str, default: float | None = None, of: dict[str, Any] = data, kind: type = int) -> Any:
        value = default if of.get(name) is None else of[name]
        sound = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and kind(value) == value
        expect(sound, f"{file}: {name}", value, "a positive number" if kind is float else "a positive whole number")
        return kind(value)

    heads, width = number("num_attention_heads"), number("hidden_size")
    head_width = 128 if kind.startswith("qwen3") else width // heads
    theta, scaling = _rope(file, data, number)
    tied = given("tie_word_embeddings", False)
    expect(isinstance(tied, bool), f"{file}: tie_word_embeddings", tied, "true or false")
    if "experts" in features:
        experts = number("num_experts", data.get("num_local_experts"))  # the latter is transformers 5's
        features = features | {"experts": experts, "norm_topk": bool(given("norm_topk_prob", False))}
        sizes = ("num_experts_per_tok", "moe_intermediate_size")
        features |= {EXPERT_FIELDS[name]: number(name) for name in sizes}
    return ModelConfig(
        vocab_size=number("vocab_size"),
        layers=number("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_width=number("head_dim", head_width),
        mlp_width=number("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=tied,
        norm_eps=number("rms_norm_eps", 1e-6, kind=float),
        max_positions=number("max_position_embeddings", 32_768),
        **features,
        **presets.COMPUTE,
    )


def _rope(file: Path, data: dict[str, Any], number: Any) -> tuple[float, RopeScaling | None]:
    """θ and the scaling: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of those before."""
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    rope = data.get(name) or {}
    expect(isinstance(rope, dict), f"{file}: {name}", rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    expect(kind in ("default", "llama3"), f"{file}: {name}.rope_type", kind, "default or llama3")
    theta = number("rope_theta", data.get("rope_theta") or 10_000, rope, float)
    if kind == "default":
        return theta, None
    kinds = {"original_max_position": int}
    return theta, RopeScaling(**{o: number(n, None, rope, kinds.get(o, float)) for n, o in ROPE_FIELDS.items()})


def family(model: ModelConfig) -> str:
    """The family whose models have what this one has. Raises ValueError when none has."""
    has = {name: getattr(model, name) for _, features in FAMILIES.values() for name in features}
    features = {name: True for name, value in has.items() if value}
    found = next((f for f, (_, own) in FAMILIES.items() if own == features), None)
    expect(found, "model", has, f"what one of the families {', '.join(FAMILIES)} has")
    return found


def write_config(model: ModelConfig, dtype: str, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a model's export, which transformers 4 and 5 read as the same family."""
    kind = family(model)
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling is not None:
        rope = {"rope_type": "llama3"} | {n: getattr(model.rope_scaling, ours) for n, ours in ROPE_FIELDS.items()}
    fields = FIELDS | (EXPERT_FIELDS if model.experts else {})
    return {
        "architectures": [FAMILIES[kind][0]],
        "model_type": kind,
        "hidden_act": "silu",
        **{name: getattr(model, ours) for name, ours in fields.items()},
        **({} if kind == "qwen2" else {"attention_bias": False}),
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.rope_scaling is not None else None,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


# --- names of tensors ---------------------------------------------------------------------------------------------

_FLAT, _MATRIX, _SAME = ((0, 1),), ((1,), (0,)), ((0,), (1,))
_LAYER = "model.layers.{}."
# A parameter's path → the name of its tensors, with a {} for an index of each leading axis that they lack (layers, then
# experts), and which of the other axes make a tensor's first axis, its second: [in, out] lies as [out, in].
NAMES: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "embed": (EMBED, _SAME),
    "head": (HEAD, _MATRIX),
    "norm.scale": ("model.norm.weight", ((0,),)),
    "layers.attention_norm.scale": (_LAYER + "input_layernorm.weight", ((0,),)),
    "layers.mlp_norm.scale": (_LAYER + "post_attention_layernorm.weight", ((0,),)),
    "layers.attention.o": (_LAYER + "self_attn.o_proj.weight", ((2,), (0, 1))),
    **{f"layers.attention.{x}": (_LAYER + f"self_attn.{x}_proj.weight", ((1, 2), (0,))) for x in "qkv"},
    **{f"layers.attention.{x}_bias": (_LAYER + f"self_attn.{x}_proj.bias", _FLAT) for x in "qkv"},
    **{f"layers.attention.{x}_norm.scale": (_LAYER + f"self_attn.{x}_norm.weight", ((0,),)) for x in "qk"},
    **{f"layers.mlp.{x}": (_LAYER + f"mlp.{x}_proj.weight", _MATRIX) for x in ("gate", "up", "down")},
    "layers.moe.router": (_LAYER + "mlp.gate.weight", _MATRIX),
    **{f"layers.moe.{x}": (_LAYER + f"mlp.experts.{{}}.{x}_proj.weight", _MATRIX) for x in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class Layout:
    """How one parameter lies in a checkpoint: as a tensor for each index of its leading axes."""

    template: str
    lead: tuple[int, ...]  # the parameter's leading axes, which the tensors lack
    part: tuple[int, ...]  # its other axes
    order: tuple[int, ...]  # these as a tensor has them
    tensor: tuple[int, ...]  # a tensor's shape, axes that lie together as one

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each index of the leading axes with its tensor's name."""
        for index in product(*map(range, self.lead)):
            yield index, self.template.format(*index)


def layouts(model: ModelConfig) -> dict[str, Layout]:
    """The parameters of a model by their paths, in the order of `jax.tree.leaves`."""
    shapes, found = jax.eval_shape(partial(transformer.init, model), jax.random.key(0)), {}
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        name = ".".join(str(k.key) for k in path)
        template, axes = NAMES[name]
        lead, part = x.shape[: template.count("{}")], x.shape[template.count("{}") :]
        tensor = tuple(math.prod(part[a] for a in group) for group in axes)
        found[name] = Layout(template, lead, part, sum(axes, ()), tensor)
    return found
