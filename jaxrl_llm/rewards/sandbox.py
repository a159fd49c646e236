"""Python programs that nobody trusts, each in a process that can compute and write its output, and nothing else."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

from jaxrl_llm.rewards import confine
from jaxrl_llm.types import expect

# As compiled when it was imported here, or each program would wait for that.
SCRIPT = confine.__spec__.cached if Path(confine.__spec__.cached or "").is_file() else confine.__file__


@dataclass(frozen=True)
class Limits:
    """What a program may use. CPU time decides, and does not depend on load; the wall time is for one that sleeps."""

    cpu_s: int = 4  # whole seconds, as the kernel counts them
    wall_s: float = 20.0
    memory_mb: int = 1024  # of address space, the interpreter's 30 MB included
    output_kb: int = 1024  # of its standard output, and as much of its standard error


LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """What a program wrote and how it ended: exit_code as of `subprocess`, negative for a signal."""

    stdout: str
    stderr: str
    exit_code: int
    ended: Literal["exited", "timed_out", "out_of_memory", "flooded", "crashed"]


def run(program: str, stdin: str = "", *, limits: Limits = LIMITS, unsafe: bool = False) -> Outcome:
    """Run a Python program in a sandbox, and wait for its end. Any number of threads may call this.

    The program has the standard library and threads, but no network, no files to write, no files of others to read, no
    other process and none of the environment; see `confine`. Its hash seed is 0, so that its sets have one order.
    unsafe: run without Landlock and seccomp, where they are missing, with this user's rights.
    Raises ValueError for bad limits, RuntimeError where there is no sandbox.
    """
    whole = all(type(n) is int and n >= 1 for n in (limits.cpu_s, limits.memory_mb, limits.output_kb))
    expect(whole and limits.wall_s > 0, "limits", limits, "whole numbers >= 1, and wall_s > 0")
    _tried(unsafe)
    return _run(program, stdin, limits, unsafe)


@lru_cache
def _tried(unsafe: bool) -> None:
    """RuntimeError unless a sandbox comes about here: asked once, for later a program could feign the failure."""
    found = _run("print(7)", "", LIMITS, unsafe)
    if found.stdout != "7\n":
        why = found.stderr.strip().rpartition("\n")[2] or f"exit code {found.exit_code}"
        expected = "expected Linux >= 5.13 with Landlock and seccomp, on x86_64 or aarch64"
        raise RuntimeError(
            f"sandbox: {why}; {expected}. With unsafe=True programs run as you, with all that you may do"
        )


def _run(program: str, stdin: str, limits: Limits, unsafe: bool) -> Outcome:
    source, most = program.encode(errors="replace"), limits.output_kb << 10
    given = (os.getpid(), len(source), limits.cpu_s, limits.memory_mb, limits.output_kb, int(unsafe))
    # The interpreter beneath a virtual environment, without site-packages and without what the user has set.
    python = [getattr(sys, "_base_executable", None) or sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8"]
    with TemporaryFile() as standard, TemporaryFile() as out, TemporaryFile() as err:  # files: nothing to pump, no pipe
        standard.write(source + stdin.encode(errors="replace"))
        standard.seek(0)
        process = subprocess.Popen(
            [*python, SCRIPT, *map(str, given)], stdin=standard, stdout=out, stderr=err,
            cwd="/", env={"PYTHONHASHSEED": "0"}, start_new_session=True,
        )  # fmt: skip
        try:
            in_time = _ends(process, limits.wall_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # its group, which is itself: it can have no children
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        out.seek(0)
        err.seek(0)
        texts = [file.read(most + 1) for file in (out, err)]
    stdout, stderr = (text[:most].decode(errors="replace") for text in texts)
    ended = "crashed" if code < 0 else "exited"
    if not in_time or code in (-signal.SIGXCPU, -signal.SIGKILL):
        ended = "timed_out"
    elif any(len(text) >= most for text in texts):
        ended = "flooded"
    elif code > 0 and stderr.strip().rpartition("\n")[2].startswith("MemoryError"):
        ended = "out_of_memory"
    return Outcome(stdout, stderr, code, ended)


def _ends(process: subprocess.Popen, seconds: float) -> bool:
    """Whether it ends within so many seconds. A descriptor tells at once; `Popen.wait` would look every 50 ms."""
    if not hasattr(os, "pidfd_open"):
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None
    with open(os.pidfd_open(process.pid), "rb", buffering=0) as descriptor:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
