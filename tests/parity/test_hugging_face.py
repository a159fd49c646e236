"""Models of `transformers` (PyTorch) against ours: logits, log-probs, greedy answers, and checkpoints bit for bit.

These need PyTorch: `make test-torch`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxrl_llm.data import tokenizers  # noqa: E402
from jaxrl_llm.learner.batching import make_batch  # noqa: E402
from jaxrl_llm.learner.packing import Division  # noqa: E402
from jaxrl_llm.learner.train_step import make_logprobs, response_hidden  # noqa: E402
from jaxrl_llm.models import hf  # noqa: E402
from jaxrl_llm.models.logprobs import tempered_logits  # noqa: E402
from jaxrl_llm.parallel import sharding  # noqa: E402
from jaxrl_llm.sampler import decode, weights  # noqa: E402
from jaxrl_llm.sampler.requests import Request  # noqa: E402
from jaxrl_llm.sampler.sampling import Sampling  # noqa: E402
from jaxrl_llm.types import EOS, Prompt, Rollouts  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, TOKENIZER = 29, tokenizers.characters("abcdefghijklmnopqrstuvwxy")  # 27 ids: two rows of the head are padding
# Wavelengths of 2π·θ^(i/3) = 6, 29, 135 tokens (θ = 100): one kept, one between, one stretched
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64}  # fmt: skip
SHAPE = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
MODELS = {  # head widths: hidden_size / heads where the family has no other; Qwen3's is its own
    "Qwen2.5": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1000.0}),
    "Qwen2.5-7B": ("Qwen2", {"tie_word_embeddings": False, "rope_theta": 1000.0}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 10, "rope_theta": 1000.0}),
    "Qwen3-8B": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 8, "num_key_value_heads": 1}),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 10,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        },
    ),
    "Llama-3.1": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "Llama-3.2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 6, "hidden_size": 32}),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 3}),
}


def theirs(name):
    """A random model of the family, no parameter of which is 0 or 1, in float32."""
    family, fields = MODELS[name]
    fields = SHAPE | {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0} | fields
    if "rope_theta" in fields:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    TOKENIZER.save(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Their model, our config and our parameters, which were read from the files that theirs has written."""
    model = theirs(request.param)
    folder = saved(model, tmp_path_factory.mktemp(request.param))
    config = hf.model(folder, dtype="float32", remat="dots", fp32_head=True)
    return model, config, hf.load(config, sharding.make_mesh(), folder)


def rollouts(rng, prompts, responses):
    """Made-up answers, two a prompt, of the given lengths."""
    pad = lambda lengths, n: np.where(
        np.arange(n) < np.array(lengths)[:, None], rng.integers(2, 27, (len(lengths), n)), 0
    )
    tokens = pad(responses, max(responses)).astype(np.int32)
    lengths = np.array(responses, np.int32)
    return Rollouts(
        tuple(Prompt(i, "") for i in range(len(prompts))), pad(prompts, max(prompts)).astype(np.int32),
        np.array(prompts, np.int32), tokens, np.zeros(tokens.shape, np.float32), lengths,
        np.full(len(lengths), EOS), ("",) * len(lengths), np.arange(len(prompts)),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["grouped", "packed"])
def test_logits_and_logprobs_of_ragged_rows(pair, layout):
    """Each response by itself and without padding there, in rows with others here."""
    model, config, params = pair
    answers, temperature = rollouts(np.random.default_rng(0), (5, 1, 90), (7, 40, 1, 12, 33, 80)), 0.7
    batch, _ = make_batch(answers, config, Division(layout=layout))
    logp, entropy = make_logprobs(config, temperature)(params, batch)
    rows = jax.tree.map(lambda x: x[0, 0], batch.rows.inputs)

    @jax.jit
    def logits_of(params):
        hidden, ours, *_ = response_hidden(config, params, rows)
        return tempered_logits(hidden[0], ours.head_matrix(), 1.0)

    place = rows.put[0].reshape(-1, logp.shape[1])[batch.rows.where[0]]  # of each token of each answer
    logits = logits_of(params)[jnp.minimum(place, rows.take.shape[1] - 1)]
    for i, n in enumerate(answers.lengths):
        p = i // 2
        start = answers.prompt_lengths[p]
        row = np.concatenate([answers.prompt_tokens[p, :start], answers.tokens[i, :n]])
        with torch.no_grad():
            expected = model(torch.from_numpy(row[None]).long()).logits[0, start - 1 : -1].double()
        np.testing.assert_allclose(logits[i, :n], expected.numpy(), atol=1e-4, rtol=1e-4)
        log_probs = torch.log_softmax(expected / temperature, -1).numpy()
        np.testing.assert_allclose(logp[i, :n], log_probs[np.arange(n), answers.tokens[i, :n]], atol=1e-4)
        np.testing.assert_allclose(entropy[i, :n], -(np.exp(log_probs) * log_probs).sum(-1), atol=1e-4)
    assert np.abs(logits).max() > 1


def test_greedy_answers_token_for_token(pair):
    model, config, params = pair
    held = weights.push(config, params, None)
    engine = decode.LocalEngine(config, TOKENIZER, held, Sampling(0.0), max_tokens=48, slots=2)
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(2, 27, n).tolist()) for n in (3, 16, 1, 11)]
    answers = decode.generate(engine, [Request(p, 1, 48, Sampling(0.0)) for p in prompts])
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=48, eos_token_id=1)
        assert answer.tokens.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("limit", [10**9, 4000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", MODELS)
def test_out_of_transformers_and_back_bit_for_bit(name, dtype, limit, tmp_path):
    model = theirs(name).to(getattr(torch, dtype))
    folder = saved(model, tmp_path / "theirs", max_shard_size=limit)
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (limit == 10**9)
    config = hf.model(folder)
    params = hf.load(config, sharding.make_mesh(1, 2, 1), folder)
    hf.export(params, config, TOKENIZER, tmp_path / "ours", dtype, max_shard_bytes=limit)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) == 1) == (limit == 10**9)
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(again) is type(model)
    assert again.dtype == model.dtype
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert value.dtype == found[key].dtype
        assert torch.equal(value, found[key]), key
    assert again.config.rope_parameters == model.config.rope_parameters
    for field in (*SHAPE, "rms_norm_eps", "tie_word_embeddings", "head_dim"):
        if hasattr(model.config, field):  # Qwen2's has no head_dim, ours says it all the same
            assert getattr(again.config, field) == getattr(model.config, field), field
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("abc")["input_ids"] == TOKENIZER.encode("abc")
    assert again.generation_config.eos_token_id in (1, [1])


def test_a_greedy_answer_of_an_export_is_ours(tmp_path):
    """Round and round: exported in float32, loaded by them, the same answer."""
    model = theirs("Qwen3")
    config = hf.model(saved(model, tmp_path / "in"), dtype="float32", fp32_head=True)
    params = jax.tree.map(lambda x: x * 1.25, hf.load(config, sharding.make_mesh(), tmp_path / "in"))
    hf.export(params, config, TOKENIZER, tmp_path / "out", "float32")
    engine = decode.LocalEngine(config, TOKENIZER, weights.push(config, params, None), Sampling(0.0), 30, slots=1)
    ((answer,),) = decode.generate(engine, [Request((3, 4, 5), 1, 30, Sampling(0.0))])
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float().eval()
    with torch.no_grad():
        expected = changed.generate(torch.tensor([[3, 4, 5]]), do_sample=False, max_new_tokens=30, eos_token_id=1)
        before = model.generate(torch.tensor([[3, 4, 5]]), do_sample=False, max_new_tokens=30, eos_token_id=1)
    assert answer.tokens.tolist() == expected[0, 3:].tolist() != before[0, 3:].tolist()
    assert replace(config, dtype="bfloat16") != config
