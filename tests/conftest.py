"""Every test runs on 8 virtual CPU devices, with silent rank promotion forbidden and array shapes checked."""

import os
import time
from importlib.metadata import version
from pathlib import Path

# Many tests compile the same programs: the workers, the processes that they start and the next run of the tests share
# what XLA has made of them. What is two weeks old is made anew.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = Path(os.environ.get("JAXRL_CACHE") or Path.home() / ".cache" / "jaxrl_llm") / f"tests-jax-{version('jax')}"
    for program in cache.glob("*"):
        if program.stat().st_mtime < time.time() - 14 * 24 * 3600:
            program.unlink(missing_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Compiling is what the suite costs: a third of it is LLVM's optimiser, which `make test-all` leaves on.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# jax reads the environment when it starts, hence only now.
import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)

# Not objective.algorithms: what a config may hold is checked by its own messages.
MODULES = (
    *(f"objective.{name}" for name in ("advantages", "corrections", "filters", "losses", "shared", "token_weights")),
    "learner.batching",
    "models.logprobs",
    "rewards.length",
)
# is_pep484_tower: a hyper-parameter declared float may be written as an int.
install_import_hook(
    [f"jaxrl_llm.{name}" for name in MODULES],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


@pytest.fixture(scope="module", autouse=True)
def programs_forgotten():
    """A compiled program keeps pieces of the address space, of which Linux gives a process 65,530: then XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


LONG = ("test_sharding.py", "test_slots.py", "test_engine.py", "test_modes.py", "test_resume.py", "test_cli.py")


def pytest_collection_modifyitems(items):
    """The files that compile most come first, or one of the two workers would be left alone with them at the end."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
