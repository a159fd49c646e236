"""Checkpoints: what is saved comes back to the bit, and a damaged one gives way to the one before."""

import contextlib
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.arrays import TrainState
from jaxrl_llm.learner.optim import make_optimizer
from jaxrl_llm.learner.train_step import apply_gradients, first_state
from jaxrl_llm.models.quantize import quantize
from jaxrl_llm.run import checkpoint
from jaxrl_llm.run.checkpoint import Checkpoints, Damaged, checksums
from jaxrl_llm.types import Optimizer


def state(seed):
    """Leaves of every kind, one of them incompressible and larger than all files around it."""
    key = jax.random.key(seed)
    params = {
        "w": jax.random.normal(key, (64, 65)),
        "layers": [{"b": jax.random.normal(key, (7,), jnp.bfloat16)}, {"flags": jax.random.bernoulli(key, 0.5, (9,))}],
        "small": jnp.array([[-3, seed]], jnp.int8),
    }
    return TrainState(params, {"mu": jnp.full((3, 5), 1e-30 * seed), "count": jnp.int32(seed)}, jnp.int32(10 * seed))


def same(a, b):
    leaves = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    assert [p for p, _ in leaves[0]] == [p for p, _ in leaves[1]]
    for (path, x), (_, y) in zip(*leaves, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"draw": 100 * step, "note": "é"})
    checkpoints.close()
    return folder


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def restore(folder, **options):
    told = []
    checkpoints = Checkpoints(folder, **options)
    found = checkpoints.restore(state(0), told.append)
    checkpoints.close()
    return found, told


def test_the_newest_comes_back_with_types_shapes_and_bits(saved):
    found, told = restore(saved)
    assert (found.step, found.host, told) == (3, {"draw": 300, "note": "é"}, [])
    same(found.state, state(3))
    assert isinstance(found.state, TrainState)


def test_two_are_kept(saved):
    checkpoints = Checkpoints(saved)
    assert checkpoints.steps() == [2, 3]
    checkpoints.close()
    assert sorted(p.name for p in saved.iterdir()) == ["2", "3"]


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert restore(tmp_path / "new") == (None, [])


def test_a_step_that_is_there_is_left(run):
    checkpoints = Checkpoints(run)
    checkpoints.save(3, state(8), {"draw": 8})
    checkpoints.save(4, state(4), {"draw": 4})
    checkpoints.save(4, state(8), {"draw": 8})  # while the first is being written
    checkpoints.close()
    found, _ = restore(run)
    assert (found.step, found.host) == (4, {"draw": 4})
    same(found.state, state(4))


def test_what_is_saved_is_the_state_of_that_moment(tmp_path):
    """The next step takes the arrays' memory over while they are being written."""
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    now = {"w": jnp.zeros((1000, 1000))}
    checkpoints = Checkpoints(tmp_path / "run", keep=5)
    for i in range(1, 4):
        now = step(now)
        checkpoints.save(i, now, {})
    for _ in range(5):
        now = step(now)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "run", keep=5)
    found = checkpoints.restore(now, pytest.fail)
    checkpoints.close()
    assert np.unique(np.asarray(found.state["w"])).tolist() == [3.0]


def test_arrays_come_back_on_the_mesh_that_is_asked_for(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
    place = lambda tree, *axes: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))
    w = jax.random.normal(jax.random.key(0), (16, 6))
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, {"w": place(w, "data", "fsdp")}, {})
    like = {"w": jax.ShapeDtypeStruct((16, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))}
    found = checkpoints.restore(like, pytest.fail)
    checkpoints.close()
    same(found.state, {"w": w})
    assert found.state["w"].sharding.shard_shape((16, 6)) == (8, 6)


# ---- damage


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def largest(folder):
    return max(files(folder), key=lambda p: p.stat().st_size)


def flip(file, where):
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 0x10
    file.write_bytes(data)


def change_host(step):
    file = step / "host" / "metadata"
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "draw": data["draw"] + 1}))


DAMAGE = {
    "flipped byte in the middle": lambda step: flip(largest(step), 0.5),
    "flipped byte at a third": lambda step: flip(largest(step), 0.33),
    "flipped byte near the end": lambda step: flip(largest(step), 0.9),
    "garbage for data": lambda step: largest(step).write_bytes(b"garbage" * 5000),
    "half of the data": lambda step: largest(step).write_bytes(largest(step).read_bytes()[: 64 * 65 * 2]),
    "no data": lambda step: largest(step).unlink(),
    "empty metadata": lambda step: (step / "state" / "_METADATA").write_text(""),
    "no metadata": lambda step: (step / "state" / "_METADATA").unlink(),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no host": lambda step: shutil.rmtree(step / "host"),
    "garbage for host": lambda step: (step / "host" / "metadata").write_text("{"),
    "another draw": change_host,
    "no checksums": lambda step: shutil.rmtree(step / "checksums"),
    "other checksums": lambda step: (step / "checksums" / "metadata").write_text("{}"),
    "everything empty": lambda step: [f.write_bytes(b"") for f in files(step)],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # reads that Orbax gave up
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_says_so(run, damage):
    damage(run / "3")
    found, told = restore(run)
    assert (found.step, found.host["draw"]) == (2, 200)
    same(found.state, state(2))
    assert len(told) == 1
    assert told[0].startswith("checkpoint 3 cannot be read (")
    assert told[0].endswith("trying the one before")
    assert "\n" not in told[0]


def test_metadata_that_nobody_needs_may_be_lost(run):
    (run / "3" / "_CHECKPOINT_METADATA").write_text("")
    found, told = restore(run)
    assert (found.step, told) == (3, [])
    same(found.state, state(3))


def test_the_step_of_a_damaged_checkpoint_can_be_written_again_and_the_damaged_one_is_kept(run):
    broken = largest(run / "3").relative_to(run / "3")
    flip(run / "3" / broken, 0.5)
    checkpoints = Checkpoints(run)
    assert checkpoints.restore(state(0), lambda _: None).step == 2
    assert checkpoints.steps() == [2]
    checkpoints.save(3, state(9), {"draw": 9})
    checkpoints.close()
    assert (run / "3.unreadable" / broken).exists()
    found, told = restore(run)
    assert (found.step, found.host, told) == (3, {"draw": 9}, [])
    same(found.state, state(9))


def test_all_damaged_is_an_error_that_lists_them_and_changes_nothing(run):
    flip(largest(run / "2"), 0.5)
    largest(run / "3").write_bytes(b"")
    before = [(p, p.read_bytes()) for p in files(run)]
    with pytest.raises(Damaged, match=r"no checkpoint is whole \(3: .*; 2: Damaged: the checksum of .*\); expected"):
        restore(run)
    assert [(p, p.read_bytes()) for p in files(run)] == before


def test_nothing_but_what_an_earlier_version_put_aside_is_an_error_too(run):
    for step in (2, 3):
        (run / str(step)).rename(run / f"{step}.unreadable")
    with pytest.raises(Damaged, match=r"no checkpoint is whole \(2.unreadable; 3.unreadable\)"):
        restore(run)


def loop(file):
    """A file that is there and cannot be opened, even by root."""
    file.unlink()
    file.symlink_to(file.name)


def io_error(monkeypatch, file):
    """The system fails to read this one file of those that Python opens."""
    true_open = open

    def fails(path, *args, **kwargs):
        if str(path).endswith(file):
            raise OSError(5, "Input/output error", str(path))
        return true_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", fails)
    monkeypatch.setattr("io.open", fails)


PASSES = {  # what says nothing about the files
    "data that cannot be opened": lambda run, patch: loop(largest(run / "3")),
    "a manifest that cannot be opened": lambda run, patch: loop(run / "3" / "state" / "manifest.ocdbt"),
    "an I/O error of the host's file": lambda run, patch: io_error(patch, "host/metadata"),
    "no memory": lambda run, patch: patch.setattr(checkpoint, "checksums", raises(MemoryError())),
    "no device memory": lambda run, patch: patch.setattr(
        checkpoint, "checksums", raises(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    ),
    "an error of ours": lambda run, patch: patch.setattr(checkpoint, "checksums", raises(TypeError("no"))),
}


def raises(error):
    def fails(*_, **__):
        raise error

    return fails


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # reads that Orbax gave up
@pytest.mark.parametrize("happens", PASSES.values(), ids=PASSES.keys())
def test_what_may_pass_is_an_error_and_puts_no_checkpoint_aside(run, monkeypatch, happens):
    happens(run, monkeypatch)
    names = sorted(p.relative_to(run) for p in run.rglob("*"))
    with pytest.raises(RuntimeError, match=r"checkpoint .*/run/3: .*; nothing was changed"):
        restore(run)
    assert sorted(p.relative_to(run) for p in run.rglob("*")) == names


def test_a_checkpoint_that_cannot_be_written_is_named(run, monkeypatch):
    checkpoints = Checkpoints(run)
    full = raises(OSError(28, "No space left on device"))
    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(OSError, match=r"checkpoint 7 in .*run was not written \(OSError: .*No space left"):
        checkpoints.save(7, state(7), {})


def test_a_half_written_folder_is_ignored(run):
    """What a kill leaves behind: a folder under a temporary name, whole or not."""
    shutil.copytree(run / "3", run / "4.orbax-checkpoint-tmp")
    shutil.copytree(run / "3", run / "5.orbax-checkpoint-tmp-1700000000000")
    (run / "4.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").unlink()
    found, told = restore(run)
    assert (found.step, told) == (3, [])
    checkpoints = Checkpoints(run)
    checkpoints.save(4, state(4), {"draw": 4})
    checkpoints.close()
    found, told = restore(run)
    assert (found.step, told) == (4, [])
    same(found.state, state(4))


def test_reading_only_changes_nothing(run, tmp_path):
    shutil.copytree(run / "3", run / "4.orbax-checkpoint-tmp")  # another process is writing it
    flip(largest(run / "3"), 0.5)
    before = [(p, p.read_bytes()) for p in files(run)]
    found, told = restore(run, read_only=True)
    assert found.step == 2
    assert len(told) == 1
    assert [(p, p.read_bytes()) for p in files(run)] == before
    assert restore(tmp_path / "none", read_only=True) == (None, [])
    assert not (tmp_path / "none").exists()


def test_a_checksum_feels_every_bit_and_place_but_not_the_sharding():
    whole = state(1)
    sums = checksums(whole, {"draw": 1})
    assert len(sums) == len(jax.tree.leaves(whole)) + 1

    def changed(leaf, at, by):
        x = np.array(leaf).reshape(-1)
        x.view(np.uint8)[at] ^= by
        return jnp.asarray(x.reshape(leaf.shape))

    leaves, tree = jax.tree.flatten(whole)
    for i, leaf in enumerate(leaves):
        bits = [1] if leaf.dtype == bool else [1, 4, 128]
        for at in {0, leaf.nbytes // 2, leaf.nbytes - 1}:
            for by in bits:
                other = checksums(tree.unflatten([*leaves[:i], changed(leaf, at, by), *leaves[i + 1 :]]), {"draw": 1})
                assert [k for k in sums if sums[k] != other[k]] == [list(sums)[i]]
    x = jnp.arange(12.0).reshape(3, 4)
    one = lambda x: checksums({"x": x}, {})["['x']"]
    assert len({one(x), one(x.T), one(x[::-1]), one(x.reshape(4, 3)), one(x[:, ::-1])}) >= 4
    assert checksums({}, {"draw": 1}) != checksums({}, {"draw": 2})

    mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
    w = jax.random.normal(jax.random.key(0), (16, 6))
    assert one(jax.device_put(w, NamedSharding(mesh, PartitionSpec("data", "fsdp")))) == one(w)


@pytest.mark.parametrize("fields", [{"moments_dtype": "bfloat16"}, {"kind": "adafactor"}], ids=str)
def test_an_optimiser_goes_on_bit_for_bit(tmp_path, fields):
    """With a reference in 8 bits beside it, as `kl_refresh` has one."""
    tx = make_optimizer(Optimizer(lr=0.1, **fields), 9)
    grads = lambda i: {"w": jax.random.normal(jax.random.key(i), (130, 128)), "b": jnp.arange(3.0) + i}
    update = jax.jit(lambda state, g: apply_gradients(tx, state, g, 1.0, jnp.ones(1))[0])
    fresh = replace(first_state(tx, grads(9)), reference=quantize(grads(9)["w"], 0))
    before = update(update(fresh, grads(0)), grads(1))
    with contextlib.closing(Checkpoints(tmp_path / "run")) as checkpoints:
        checkpoints.save(2, before, {})
        checkpoints.wait()
        restored = checkpoints.restore(jax.tree.map(jnp.zeros_like, fresh), pytest.fail).state
    same(restored, before)
    same(update(restored, grads(2)), update(before, grads(2)))
