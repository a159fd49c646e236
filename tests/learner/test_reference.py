"""The reference policy in few bits: what of the policy it keeps, and that its log-probs are the policy's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CONFIG, PLAIN, REWARDS, rollouts_of, scored

from jaxrl_llm.learner import batching, learner, train_step
from jaxrl_llm.models import lora, transformer
from jaxrl_llm.models.quantize import Quantized, dequantized

SHORT = replace(CONFIG.model, dtype="bfloat16", layers=2, qkv_bias=True, qk_norm=True)
MODELS = {
    "head in bfloat16": replace(SHORT, fp32_head=False, tied_head=False),
    "experts, head in float32": replace(SHORT, experts=4, experts_per_token=2, expert_width=24),
}


def fixture_of(model):
    return transformer.init(model, jax.random.key(0)), batching.make_batch(rollouts_of([3, 4, 5, 6]), model)[0]


def named(params):
    is_quantized = lambda x: isinstance(x, Quantized)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    return {".".join(key.key for key in path): x for path, x in leaves}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_the_float32_copy_to_the_bit(name):
    model = MODELS[name]
    params, batch = fixture_of(model)
    logprobs = train_step.make_logprobs(model, 0.7)
    kept = learner.reference_of(model, params)
    for a, b in zip(logprobs(params, batch), logprobs(kept, batch), strict=True):
        np.testing.assert_array_equal(a, b)
    of_head = jnp.float32 if model.fp32_head else jnp.bfloat16
    for path, x in named(kept).items():
        *_, last = path.split(".")
        exact = jnp.float32 if last in ("scale", "router") else of_head if last in ("embed", "head") else jnp.bfloat16
        assert x.dtype == exact, path


def test_a_float32_model_s_reference_is_a_copy_that_a_step_does_not_take_away():
    params = transformer.init(CONFIG.model, jax.random.key(0))
    kept = learner.reference_of(CONFIG.model, params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(kept), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()


def test_eight_bits_are_made_numbers_of_one_layer_at_a_time():
    """The numbers are those of the whole copy that is never made: no more than a layer or two of temporaries."""
    model = replace(CONFIG.model, layers=12, width=64, mlp_width=512, qk_norm=True)
    params, batch = fixture_of(model)
    kept = learner.reference_of(model, params, "int8")
    quantized = {path for path, x in named(kept).items() if isinstance(x, Quantized)}
    assert quantized == {path for path in named(params) if not path.endswith("scale")}
    assert {path: x.scale.shape for path, x in named(kept).items() if path in quantized} == {
        "embed": (112, 1), "layers.attention.q": (12, 1, 2, 8), "layers.attention.k": (12, 1, 1, 8),
        "layers.attention.v": (12, 1, 1, 8), "layers.attention.o": (12, 1, 1, 64), "layers.mlp.gate": (12, 1, 512),
        "layers.mlp.up": (12, 1, 512), "layers.mlp.down": (12, 1, 64),
    }  # fmt: skip
    logprobs = jax.jit(train_step.make_logprobs(model, 0.7))
    programs = [logprobs.lower(p, batch).compile() for p in (params, kept)]
    whole = dequantized(kept, jnp.float32)
    got, want, exact = programs[1](kept, batch)[0], programs[0](whole, batch)[0], programs[0](params, batch)[0]
    np.testing.assert_allclose(got, want, atol=2e-5)
    off = np.abs(got - exact)[np.asarray(batch.mask)]
    assert 1e-4 < off.mean() < 0.05
    plain, short = (p.memory_analysis().temp_size_in_bytes for p in programs)
    layer = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) / model.layers
    assert short - plain < 3 * layer + params["embed"].nbytes


def test_with_lora_adapters_alone_are_copied():
    """The base that they stand beside is the reference's, too."""
    model = replace(SHORT, lora=transformer.LoRA(rank=2, targets=("q", "down")))
    adapters = lora.trained(model, transformer.init(model, jax.random.key(0)))
    kept = named(learner.reference_of(model, adapters))
    paths = [f"layers.{x}_{ab}" for x in ("attention.q", "mlp.down") for ab in "ab"]
    assert {path: x.dtype for path, x in kept.items()} == dict.fromkeys(paths, jnp.bfloat16)


@pytest.mark.parametrize("refresh", [0, 1])
def test_a_run_holds_on_to_eight_bits(refresh):
    a = replace(PLAIN, kl="k3", kl_coef=0.1, kl_refresh=refresh)
    made = learner.build(replace(CONFIG, algorithm=a, learner=replace(CONFIG.learner, reference_dtype="int8")))
    with jax.set_mesh(made.mesh):
        state = learner.fresh_state(made)
        made = replace(
            made, ref_params=None if refresh else learner.reference_of(made.config.model, state.params, "int8")
        )
        seen = []
        for _ in range(2):
            batch, state, _ = learner.learn_batch(made, state, scored(rollouts_of([3, 4, 5, 6]), REWARDS))
            state, row = learner.update(made, state, batch)
            seen.append((np.asarray(batch.ref_logp), row["kl/ref"]))
    assert row["skipped"] == 0
    assert 0 < seen[0][1] < 1e-3 < seen[1][1] or refresh
    assert np.array_equal(seen[0][0], seen[1][0]) == (not refresh)
