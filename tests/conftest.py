"""Every test runs on 8 virtual CPU devices, with silent rank promotion forbidden and array shapes checked."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# jax reads the environment when it starts, hence only now.
import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)

MODULES = ("advantages", "losses", "batching", "logprobs", "corrections", "rewards.length")
# is_pep484_tower: a hyper-parameter declared float may be written as an int.
install_import_hook(
    [f"jaxrl_llm.{name}" for name in MODULES],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
