"""What several commands share: their common arguments, the config of a source, the devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:  # importing it takes a second; what the command line itself gets wrong should not wait for it
    from jaxrl_llm.config import Config

_changes = tyro.conf.arg(name="set", metavar="path.to.field=value", help="override a field of CONFIG; may be repeated.")
Set = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], _changes]
_method = tyro.conf.arg(help="a method by name (see `jaxrl algorithms`) in place of CONFIG's; --set applies to it.")
Method = Annotated[str | None, _method]
Out = Annotated[str | None, tyro.conf.arg(help="the run's folder; runs/<name of the experiment> if left out.")]
File = tyro.conf.Positional[Path]


def load(source: Path, set_: tuple[str, ...] = (), algorithm: str | None = None) -> Config:
    """The config of an experiment file or of a run's folder."""
    if not source.exists():
        raise ValueError(f"{source}: no such file; expected an experiment or a run's folder")
    from jaxrl_llm.config import load

    return load(source, set_, algorithm)


def run_folder(out: str | None, experiment: Path) -> Path:
    if out == "":
        raise ValueError("--out is ''; expected a folder")
    return Path(out or f"runs/{experiment.stem}")


def use_devices(config: Config | None = None, whole_mesh: bool = False) -> None:
    """Say where compiled programs are kept, unless the environment has, and fail where jax finds no device.

    whole_mesh: also say what the run will use, and fail on a mesh that the machine cannot hold.
    """
    import jax

    from jaxrl_llm.data.datasets import cache_folder
    from jaxrl_llm.parallel.sharding import make_mesh

    cache = "auto" if config is None else config.compile_cache
    if cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = cache_folder() / "xla" if cache == "auto" else Path(cache)
        jax.config.update("jax_compilation_cache_dir", str(folder / f"jax-{jax.__version__}"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    try:
        device = jax.devices()[0].device_kind
    except Exception as error:  # an AssertionError where jax lacks the platform's plugin
        platform = os.environ.get("JAX_PLATFORMS")
        raise ValueError(f"JAX_PLATFORMS is {platform!r}; expected a platform of this machine, or cpu") from error
    if whole_mesh:
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        shape = "×".join(map(str, mesh.devices.shape))
        print(f"{device} × {mesh.size}, mesh {shape}, {config.model.n_params / 1e6:.2f} M parameters")
