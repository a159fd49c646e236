"""Checkpoints in and out, against files written by hand: values, shards, memory, and what a broken one says."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import checkpoints
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.data import hub, tokenizers
from jaxrl_llm.models import hf, hf_format, transformer
from jaxrl_llm.models.shape import ModelConfig, RopeScaling
from jaxrl_llm.parallel import sharding

# Every axis another size: 24 ids, 3 layers, width 16, 4 heads on 2, 6 wide, MLP 20
LLAMA = ModelConfig(24, 3, 16, 4, 2, 6, 20, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 512), norm_eps=1e-5)
FAMILIES = {
    "llama": replace(LLAMA, tied_head=False),
    "qwen2": replace(LLAMA, qkv_bias=True, rope_scaling=None, norm_eps=1e-6),
    "qwen3": replace(LLAMA, qk_norm=True, rope_scaling=None, tied_head=False),
}
MESHES = [(1, 1, 1), (2, 1, 1), (1, 4, 2), (2, 2, 2)]


def random_params(config, seed=0):
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def one():
    return sharding.make_mesh()


# --- in -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind", "shards"), [("llama", "F32", 1), ("qwen2", "BF16", 3), ("qwen3", "F16", 2)])
def test_a_checkpoint_is_read(family, kind, shards, one, tmp_path):
    config, params = FAMILIES[family], random_params(FAMILIES[family])
    checkpoints.write(tmp_path, config, params, kind, shards)
    assert hf.model(tmp_path, dtype="float32", remat="dots", fp32_head=True) == config
    loaded = hf.load(config, one, tmp_path)
    rounded = jax.tree.map(lambda x: x.astype(checkpoints.TYPES[kind]).astype(np.float32), params)
    equal(loaded, rounded)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    half = hf.load(replace(config, fp32_head=False), one, tmp_path, dtype="bfloat16")
    norms_stay = lambda path, x: x if path[-1].key == "scale" else x.astype(ml_dtypes.bfloat16)
    halved = jax.tree_util.tree_map_with_path(norms_stay, rounded)
    equal(half, halved)
    kept = hf.load(config, one, tmp_path, dtype="bfloat16")
    heads = {name: rounded[name] for name in ("embed", "head") if name in rounded}
    equal(kept, halved | heads)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_device_gets_its_shard(mesh, tmp_path):
    config, params = FAMILIES["qwen2"], random_params(FAMILIES["qwen2"])
    checkpoints.write(tmp_path, config, params, "BF16", 2)
    mesh = sharding.make_mesh(*mesh)
    loaded = hf.load(config, mesh, tmp_path)
    fresh = sharding.shardings(transformer.logical_axes(config), loaded, mesh)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding}"), loaded, fresh)
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    q = loaded["layers"]["attention"]["q"]
    assert q.addressable_shards[0].data.shape == (3, 16 // fsdp, 4 // tensor, 6)
    assert loaded["embed"].addressable_shards[-1].data.shape == (24 // tensor, 16 // fsdp)
    equal(loaded, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params))


def test_a_tied_checkpoint_may_repeat_its_head(one, tmp_path):
    config, params = FAMILIES["qwen2"], random_params(FAMILIES["qwen2"])
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3)}
    checkpoints.write(tmp_path, config, params, extra={"lm_head.weight": params["embed"], **inv_freq})
    equal(hf.load(config, one, tmp_path), params)
    other = params["embed"].copy()
    other[-1, -1] += 1
    checkpoints.write(tmp_path, config, params, extra={"lm_head.weight": other})
    with pytest.raises(
        ValueError, match=r"model.safetensors: lm_head.weight is .*; expected model.embed_tokens.weight"
    ):
        hf.load(config, one, tmp_path)


MEASURED = """
import re, sys, threading, time
from pathlib import Path
import jax
from jaxrl_llm.models import hf
from jaxrl_llm.parallel import sharding

def memory():  # bytes: of files that are mapped, of everything else
    status = Path("/proc/self/status").read_text()
    return [1024 * int(re.search(rf"{name}:\\s+(\\d+)", status)[1]) for name in ("RssFile", "RssAnon")]

folder, mesh = sys.argv[1], sharding.make_mesh(1, 1, 1)
config = hf.model(folder)
hf.load(config, mesh, folder, dtype="bfloat16")  # compiles
before, peaks, done = memory(), [0, 0], False

def watch():
    while not done:
        peaks[:] = map(max, peaks, memory())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
params = hf.load(config, mesh, folder, dtype="bfloat16")
done = True
thread.join()
print(peaks[0] - before[0], peaks[1] - before[1] - sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
def test_the_host_holds_at_most_two_of_the_largest_tensor(tmp_path):
    """The pages of a file that are in memory are one tensor's. Of the rest, all but a tensor on its way is what the
    devices hold: the parameters, which are subtracted, and the tensor that is put into its place, filed and turned.
    """
    config = ModelConfig(vocab_size=8192, layers=12, width=512, heads=8, kv_heads=8, head_width=64, mlp_width=8192)
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    checkpoints.write(tmp_path, config, jax.tree.map(lambda x: np.zeros(x.shape, np.float16), shapes), "BF16")
    size, largest = (tmp_path / "model.safetensors").stat().st_size, 8192 * 512 * 2
    assert size > 20 * largest
    run = subprocess.run([sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=True)
    mapped, held = map(int, run.stdout.split())
    assert mapped <= largest + 2**20, f"{mapped / 2**20:.1f} MiB"
    assert held <= 3 * largest + 2**22, f"{held / 2**20:.1f} MiB"


# --- what is wrong is said ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return checkpoints.write(tmp_path / "model", FAMILIES["llama"], random_params(FAMILIES["llama"]), shards=2)


def change(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; expected one of llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None; expected one of llama, qwen2, qwen3"),
        ({"architectures": ["LlamaModel"]}, r"architectures is .*; expected \['LlamaForCausalLM'\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected \"silu\""),
        ({"attention_bias": True}, "attention_bias is True; expected false"),
        ({"mlp_bias": True}, "mlp_bias is True; expected false"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; expected 0"),
        ({"use_sliding_window": True}, "use_sliding_window is True; expected false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*; expected full_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; expected null"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'; expected default"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None; expected a positive number"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type is 'linear'"),
        ({"hidden_size": None}, "hidden_size is None; expected a positive whole number"),
        ({"vocab_size": 24.5}, "vocab_size is 24.5; expected a positive whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
    ],
)  # fmt: skip
def test_an_unsupported_field_is_named(folder, fields, message):
    change(folder, **fields)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder / 'config.json'))}: {message}"):
        hf.model(folder)


def test_the_two_forms_of_rope_are_one(folder):
    change(folder, rope_scaling=None, rope_theta=None, rope_parameters={"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        "rope_theta": 5e5})  # fmt: skip
    assert hf.model(folder, dtype="float32", remat="dots", fp32_head=True) == FAMILIES["llama"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 4}, "model.kv_heads is 4; expected 2, as .*config.json has it"),
        ({"qk_norm": True}, "model.qk_norm is True; expected False"),
        ({"rope_scaling": None}, "model.rope_scaling is None; expected RopeScaling"),
        ({"vocab_size": 32}, "model.vocab_size is 32; expected 24"),
    ],
)
def test_another_shape_than_the_config_has_is_named(folder, one, changes, message):
    with pytest.raises(ValueError, match=message):
        hf.load(replace(FAMILIES["llama"], **changes), one, folder)
    how = {"dtype": "bfloat16", "remat": "none", "fp32_head": False, "max_positions": 7}
    hf.check(folder, replace(FAMILIES["llama"], **how))  # how it is computed is free


def rewrite(file, edit):
    held = load_file(file)
    edit(held)
    checkpoints.save_file(held, file)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


def damage(file):
    file.write_bytes(b"not weights")


def remove(file):
    file.unlink()


def empty(file):
    file.write_bytes(b"")


SECOND = "model-00002-of-00002.safetensors"  # every second tensor: the norm, layer 0's k


@pytest.mark.parametrize("wrong", [truncate, damage, remove, empty])
def test_a_broken_file_is_named(folder, wrong):
    file = folder / SECOND
    wrong(file)
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))}: .*; expected a whole file of weights") as error:
        hf.check(folder, FAMILIES["llama"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is 'missing'; expected the tensor, as .*index.json"),
        (lambda t: t.update({"model.norm.weight": np.ones(8, np.float32)}), r"weight is \[8\]; expected shape \[16\]"),
        (lambda t: t.update({"model.norm.weight": np.ones(16)}), r"dtype is \['F64'\]; expected one of F32, BF16, F16"),
    ],
)
def test_a_wrong_tensor_is_named(folder, edit, message):
    rewrite(folder / SECOND, edit)
    with pytest.raises(ValueError, match=f"{SECOND}: .*{message}|{SECOND}: {message}"):
        hf.check(folder, FAMILIES["llama"])


def test_missing_and_unexpected_tensors_are_named(folder):
    index = folder / hf.INDEX
    places = json.loads(index.read_text())["weight_map"]
    without = {k: v for k, v in places.items() if k != "lm_head.weight"}
    index.write_text(json.dumps({"weight_map": without}))
    with pytest.raises(ValueError, match=r"lm_head.weight is 'missing'; expected a tensor of shape \[24, 16\]"):
        hf.check(folder, FAMILIES["llama"])
    index.write_text(json.dumps({"weight_map": places | {"model.extra": SECOND}}))
    rewrite(folder / SECOND, lambda t: t.update({"model.extra": np.ones(1, np.float32)}))
    with pytest.raises(ValueError, match=rf"{SECOND}: model.extra is 'there'; expected no tensor of that name"):
        hf.check(folder, FAMILIES["llama"])
    index.unlink()
    with pytest.raises(ValueError, match="model is 'without weights'; expected model.safetensors, or shards and"):
        hf.check(folder, FAMILIES["llama"])
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: .*; expected a JSON file"):
        hf.model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json: No such file or directory; expected a JSON file"):
        hf.model(folder)


def test_a_source_that_is_not_there(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"no-such-folder: no such folder; expected a folder, or OWNER/NAME"):
        hf.model("no-such-folder")
    with pytest.raises(ValueError, match=r"\./no/such: no such folder"):
        hf.model("./no/such")
    asked = {}

    def snapshot(repo, revision, allow_patterns, repo_type):
        asked.update(repo=repo, revision=revision, patterns=allow_patterns, kind=repo_type)
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(
        OSError, match=r"a/b@v1: no such folder, and not downloaded \(ConnectionError: no route to host\)"
    ):
        hf.check("a/b@v1", FAMILIES["llama"])
    assert asked["repo"] == "a/b"
    assert (asked["revision"], asked["kind"]) == ("v1", "model")
    assert "config.json" in asked["patterns"]
    assert not any("bin" in p or p == "*" for p in asked["patterns"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.local("a/b", ("config.json",)) == tmp_path


# --- out ----------------------------------------------------------------------------------------------------------

TOKENIZER = tokenizers.characters("abcdefghijklmnopqrst")


@pytest.mark.parametrize(
    ("family", "dtype", "mesh", "limit"),
    [
        ("llama", "float32", (1, 1, 1), 10**9),
        ("qwen2", "bfloat16", (2, 2, 2), 700),
        ("qwen3", "bfloat16", (1, 4, 2), 10**9),
    ],
)
def test_what_is_exported_can_be_read(family, dtype, mesh, limit, tmp_path):
    config, params = FAMILIES[family], random_params(FAMILIES[family])
    mesh = sharding.make_mesh(*mesh)
    checkpoints.write(tmp_path / "in", config, params)
    loaded, out = hf.load(config, mesh, tmp_path / "in"), tmp_path / "out"
    hf.export(loaded, config, TOKENIZER, out, dtype, max_shard_bytes=limit)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) == 1) == (limit > 10**6)
    found = {k: v for f in files for k, v in load_file(f).items()}
    expected = {k: v.astype(found[k].dtype) for k, v in checkpoints.tensors(config, params).items()}
    assert {str(v.dtype) for v in found.values()} == {dtype}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    if len(files) > 1:
        index = json.loads((out / hf.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
        assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
        assert max(sum(v.nbytes for v in load_file(f).values()) for f in files) <= max(700, found_largest(found))
    assert hf.model(out, dtype="float32", remat="dots", fp32_head=True) == config
    assert tokenizers.load(out).eos_ids == TOKENIZER.eos_ids
    assert tokenizers.load(out).encode("abc") == TOKENIZER.encode("abc")
    again = hf.load(config, mesh, out)
    equal(again, jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), loaded))


def found_largest(tensors):
    return max(v.nbytes for v in tensors.values())


def test_an_export_is_whole_or_not_there(tmp_path, monkeypatch):
    config, params = FAMILIES["qwen2"], random_params(FAMILIES["qwen2"])
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there is 'there already'; expected a new folder"):
        hf.export(params, config, TOKENIZER, tmp_path / "there")
    with pytest.raises(ValueError, match="dtype is 'int8'; expected bfloat16 or float32"):
        hf.export(params, config, TOKENIZER, tmp_path / "new", "int8")
    both = replace(config, qk_norm=True)
    with pytest.raises(
        ValueError, match="model is .*; expected what one of the families llama, qwen2, qwen3, qwen3_moe has"
    ):
        hf.export(random_params(both), both, TOKENIZER, tmp_path / "new")
    monkeypatch.setattr(tokenizers.Tokenizer, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hf.export(params, config, TOKENIZER, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_every_parameter_has_a_name():
    """A parameter of a new kind has to be given a place in a checkpoint."""
    for config in FAMILIES.values():
        found = [n for layout in hf_format.layouts(config).values() for _, n in layout.tensors()]
        assert sorted(found) == sorted(checkpoints.tensors(config, random_params(config)))
