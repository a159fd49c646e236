"""A run's folder: who may write it, which config it belongs to, what --resume may change."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.run.stopping import Stopped

# What --resume may change. (So may `steps`, unless a learning rate's schedule or a curriculum depends on it.)
NO_NUMBER = ("evaluation.", "checkpoint.", "logged_samples", "compile_cache", "abort_after", "rollout.max_rounds",
    "rollout.tokens_per_call", "rollout.deadline_s", "rollout.in_flight",
    "rollout.max_waiting")  # of the training  # fmt: skip
ROUNDING = ("mesh.", "learner.layout", "learner.row_tokens", "learner.logprob_chunk", "micro_batches", "rollout.slots",
    "rollout.servers", "rollout.cache", "rollout.kv_tokens", "rollout.prefill_tokens")  # fmt: skip


@contextlib.contextmanager
def lock(path: Path, stopping: Callable[[], int] | None = None) -> Iterator[None]:
    """Hold a lock file, which the system releases when this process ends, however it ends.

    A file that another process holds is waited for until `stopping()` gives a signal, which raises Stopped; without
    `stopping`, ValueError tells that process, its host and since when it holds the file.
    """
    with open(path, "a+", encoding="utf-8") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
            if stopping is None:
                raise ValueError(f"{path.parent} is in use by {holder}; expected a folder of its own")
            if stopping():
                raise Stopped(stopping())
            if not waiting:
                print(f"{path.with_suffix('')} is being made by {holder}: waiting for it", flush=True)
            waiting = True
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield


@contextlib.contextmanager
def opened(config: Config, out: Path, resume: bool) -> Iterator[None]:
    """The run's folder, locked. Raises ValueError when it cannot be used, or when it belongs to another config."""
    if resume and not (out / "config.json").is_file():
        raise ValueError(f"--resume: {out / 'config.json'} is missing; expected the folder of an earlier run")
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(out / ".lock"))
        except OSError as error:
            why = error.strerror
            raise ValueError(f"--out {out}: cannot be written ({why}); expected a writable folder") from error
        if resume:
            compare(config, out)
        elif any((out / "checkpoints").glob("[0-9]*")):
            raise ValueError(f"--out {out}: holds a run already; expected --resume or another folder")
        yield


def compare(config: Config, out: Path) -> None:
    """Print which fields differ from the run's that may; ValueError for those that may not.

    Fields that the run's config.json does not know have had their defaults.
    """
    critic = config.algorithm.critic
    schedules = {config.optimizer.schedule, critic.optimizer.schedule if critic else "constant"}
    steps_matter = schedules != {"constant"} or config.rollout.difficulty is not None
    harmless = NO_NUMBER + (() if steps_matter else ("steps",))
    recorded = configs.to_json(configs.from_json(json.loads((out / "config.json").read_text()), out))
    differ = configs.differences(recorded, configs.to_json(config))
    if wrong := [d for d in differ if not d.startswith(harmless + ROUNDING)]:
        raise ValueError(f"--resume: the config differs from the run's in {'; '.join(wrong)}")
    if rounding := [d for d in differ if d.startswith(ROUNDING)]:
        print(f"--resume: {'; '.join(rounding)} (changes rounding, and so the samples to come)")
    if others := [d for d in differ if not d.startswith(ROUNDING)]:
        print(f"--resume: {'; '.join(others)} (changes no number of the steps)")


def machine() -> dict[str, Any]:
    """What decides rounding besides the config: a run goes on bit for bit only where this is the same."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = f"{jax.devices()[0].device_kind} × {jax.device_count()}"
    return {"CPU threads": cpus, "devices": devices, "jax": jax.__version__}


def record(config: Config, out: Path, source: Path | None) -> None:
    """Write config.json, whole or not at all, and a copy of the experiment."""
    copy = None if source is None or source.suffix != ".py" else out / source.name
    if copy and copy.exists() and copy.read_bytes() != source.read_bytes():
        print(f"{source} differs from the run's copy {copy}: the run goes on with {source}, which replaces the copy")
    write_whole(out / "config.json", configs.dumps(config))
    if copy and source.resolve() != copy.resolve():
        shutil.copyfile(source, copy)


def edited(out: Path) -> list[str]:
    """A line for each experiment file that has changed since the run: the file is used, not the run's copy."""
    files = re.findall(r'"([^"]+\.py):[^":]+"', (out / "config.json").read_text())
    pairs = [(Path(f), out / Path(f).name) for f in dict.fromkeys(files)]
    both = [(file, copy) for file, copy in pairs if file.is_file() and copy.is_file()]
    return [f"{f} differs from the run's copy {c}: {f} is used" for f, c in both if f.read_bytes() != c.read_bytes()]


def write_whole(file: Path, text: str) -> None:
    """Write a file such that a kill, or a full disk, leaves the old one or the new one."""
    part = file.with_name(file.name + ".tmp")
    try:
        with open(part, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())  # or a power cut could leave an empty file
        part.replace(file)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: not written", str(file)) from error


def copy_whole(source: Path, target: Path) -> None:
    """Copy a folder such that `target` is whole or absent."""
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(source, part)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def resume_command(source: Path | None, out: Path, assignments: tuple[str, ...], algorithm: str | None = None) -> str:
    """The shell command that goes on with a run."""
    method = () if algorithm is None else ("--algorithm", algorithm)
    changes = [word for a in assignments for word in ("--set", a)]
    return shlex.join(["jaxrl", "train", str(source), *method, *changes, "--resume", "--out", str(out)])
