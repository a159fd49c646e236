"""Runs a server in a process of its own, and again when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque

from jaxrl_llm.serving.server import GRACE_S, LISTENING

# What a child on Linux runs before its program: SIGKILL (by PR_SET_PDEATHSIG) when the supervisor is gone, or is gone
# already. Not subprocess's preexec_fn, which runs Python in a fork of a process that has threads.
DIES_WITH_PARENT = """
import ctypes, os, signal, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    os.kill(os.getpid(), signal.SIGKILL)
os.execvp(program[0], program)
"""


def _start(command: list[str]) -> tuple[subprocess.Popen, threading.Event]:
    """The child, and what is set when it listens. Its output goes on to ours."""
    before = [sys.executable, "-I", "-S", "-c", DIES_WITH_PARENT, str(os.getpid())] if sys.platform == "linux" else []
    child = subprocess.Popen([*before, *command], stdout=subprocess.PIPE, text=True, errors="replace")
    ready = threading.Event()

    def pass_on() -> None:
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith(LISTENING):
                ready.set()

    threading.Thread(target=pass_on, daemon=True).start()
    return child, ready


def supervise(command: list[str], *, deaths: int = 5, within_s: float = 60.0, backoff_s: float = 0.5) -> int:
    """Runs a command that calls `serve`, again each time it dies, until SIGTERM or SIGINT; its exit code at the end.

    To be called in the main thread; the command names its port, or it would have another one each time. Waits
    `backoff_s` before it starts again, twice as long after each death before the child listened, 10 s at most. A child
    that ends with exit code 0 has been told to; one that ends with 2 before any has listened cannot serve what it is
    asked to, and has said so. RuntimeError: `deaths` within `within_s` and it never listened.
    """
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    died, ever_listened = deque(maxlen=deaths), False  # died: times, since it listened last
    try:
        while True:
            child, ready = _start(command)
            try:
                while child.poll() is None and not stop.wait(0.05):
                    pass
            finally:
                child.terminate()
                try:
                    child.wait(GRACE_S + 10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
            ever_listened |= ready.is_set()
            code = child.returncode
            if stop.is_set() or code == 0 or (code == 2 and not ever_listened):
                return code
            if ready.is_set():
                died.clear()
            else:
                died.append(time.monotonic())
            if len(died) == deaths and died[-1] - died[0] < within_s:
                raise RuntimeError(f"{command} died {deaths} times and never listened: its last exit code is {code}")
            print(f"{command[0]} died with exit code {code}: starting it again", file=sys.stderr, flush=True)
            if stop.wait(min(backoff_s * 2 ** max(len(died) - 1, 0), 10.0)):
                return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
