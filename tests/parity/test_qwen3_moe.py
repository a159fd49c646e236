"""Qwen3-MoE against `transformers` on PyTorch: logits of random small models, from the tensors that it saves."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models import attention, transformer
from jaxrl_llm.models.logprobs import tempered_logits
from jaxrl_llm.models.transformer import ModelConfig

pytestmark = pytest.mark.torch

CONFIG = ModelConfig(
    vocab_size=23, layers=3, width=12, heads=4, kv_heads=2, head_width=6, mlp_width=20, rope_theta=1000.0, qk_norm=True,
    tied_head=False, experts=5, experts_per_token=2, expert_width=8,
)  # fmt: skip


def saved(config, folder):
    """A random model in a folder, and its logits."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_width,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied_head,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            num_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            moe_intermediate_size=config.expert_width,
            norm_topk_prob=config.norm_topk,
            attn_implementation="eager",
        )
    ).float()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 90)).astype(np.int32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        logits = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    theirs.save_pretrained(folder)
    return tokens, logits


def parameters(config, folder):
    """Published names: an expert's matrices are tensors of their own, [out, in]."""
    from safetensors.numpy import load_file

    c, tensors = config, load_file(folder / "model.safetensors")
    flip = lambda name, *shape: tensors.pop(name).T.reshape(shape)

    def layer(i):
        at = f"model.layers.{i}."
        norm = lambda name: {"scale": tensors.pop(f"{at}{name}.weight")}
        heads = (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        a = {x: flip(f"{at}self_attn.{x}_proj.weight", c.width, n, c.head_width) for x, n in heads}
        a["o"] = flip(f"{at}self_attn.o_proj.weight", c.heads, c.head_width, c.width)
        a |= {f"{x}_norm": norm(f"self_attn.{x}_norm") for x in "qk"}
        sizes = {"gate": (c.width, c.expert_width), "up": (c.width, c.expert_width), "down": (c.expert_width, c.width)}
        names = {x: [f"{at}mlp.experts.{e}.{x}_proj.weight" for e in range(c.experts)] for x in sizes}
        mixture = {x: np.stack([flip(name, *sizes[x]) for name in names[x]]) for x in sizes}
        mixture["router"] = flip(f"{at}mlp.gate.weight", c.width, c.experts)
        norms = {"attention_norm": norm("input_layernorm"), "mlp_norm": norm("post_attention_layernorm")}
        return {"attention": a, "moe": mixture, **norms}

    layers = jax.tree.map(lambda *x: np.stack(x), *map(layer, range(c.layers)))
    params = {"embed": tensors.pop("model.embed_tokens.weight"), "layers": layers}
    params |= {"norm": {"scale": tensors.pop("model.norm.weight")}}
    params |= {} if c.tied_head else {"head": tensors.pop("lm_head.weight").T}
    assert not tensors
    return params


@partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens):
    model = nnx.merge(transformer.split(config), params)
    attend = lambda q, k, v, _: (attention.causal(q, k, v), None)
    hidden, _ = model(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), attend)
    return tempered_logits(hidden.reshape(-1, config.width), model.head_matrix(), 1.0).reshape(*tokens.shape, -1)


@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, norm_topk=False, tied_head=True)], ids=["as Qwen3-30B-A3B", "tied, not normed"]
)
def test_logits_are_those_of_transformers(config, tmp_path):
    tokens, expected = saved(config, tmp_path)
    params = parameters(config, tmp_path)
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), params, shapes)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits_of(config, params, tokens), expected, atol=1e-4, rtol=1e-4)
