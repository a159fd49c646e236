"""JetStream's own tests of its orchestrator, unchanged, with our engine in the place of its mock one."""

import importlib
import unittest

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data import tokenizers
from jaxrl_llm.models import transformer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import weights

pytest.importorskip("jetstream", reason="google-jetstream is not installed (extra `serve`)")
from jaxrl_llm.serving.engine import JetStreamEngine

SAID = {"A": 65, "B": 66, "Ċ": 266, "Ō": 332, "Ɵ": 415}  # the ids that the mock engine computes
MODEL = ModelConfig(vocab_size=416, layers=1, width=8, heads=2, kv_heads=1, head_width=4, mlp_width=8, tied_head=False)


def tokenizer():
    """The tests' characters under their code points."""
    backend = Backend(models.WordLevel({"<pad>": 0, "<eos>": 1, **SAID}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    return tokenizers.from_hf(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"))


def saying_the_expected():
    """Parameters of a model that says one character of SAID after the other: no block adds anything to a token."""
    params = jax.tree.map(np.zeros_like, transformer.init(MODEL, jax.random.key(0)))
    params["norm"]["scale"] += 1
    ids = list(SAID.values())
    for i, (last, following) in enumerate(zip(ids, ids[1:], strict=False)):
        params["embed"][last, i], params["head"][i, following] = 1, 10
    return params


def our_engine(batch_size, cache_length, weight):
    """What the mock engine is asked for; its weight makes it say what the model is made to say."""
    held = weights.push(MODEL, saying_the_expected(), None)
    sizes = {"max_prompt_tokens": 16, "max_tokens": 3, "tokens_per_call": 1}
    return JetStreamEngine(MODEL, tokenizer(), held, slots=batch_size, **sizes)


def test_the_orchestrators_own_tests(monkeypatch):
    monkeypatch.setattr(importlib.import_module("jetstream.engine.mock_engine"), "TestEngine", our_engine)
    module = importlib.import_module("jetstream.tests.core.test_orchestrator")
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    assert result.errors == result.failures == []
    assert result.testsRun == 3
