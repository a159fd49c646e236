"""What the tests let workers run: a module, because workers import functions by name."""

import ctypes
import os
import signal
import sys
import threading
import time

from jaxrl_llm.rewards.workers import isolated
from jaxrl_llm.types import Reward


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def spin():
    while True:
        pass


def stubborn():
    for number in (signal.SIGPROF, signal.SIGXCPU, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spin()


def leave_thread():
    threading.Thread(target=spin, daemon=True).start()
    return Reward(1.0, True)


def leave_fork():
    return Reward(1.0, True, str(os.fork() == 0))


def fail():
    raise KeyError("boo")


def fail_oddly():
    raise Odd(1, 2)


def print_much():
    print("x" * 100_000)
    sys.stderr.flush()
    return Reward(1.0, True)


HARMFUL = {
    "timed_out": (spin, stubborn, lambda: time.sleep(100), lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "out_of_memory": (lambda: [0] * 10**10, lambda: "x" * (20 << 20)),
    "crashed": (
        lambda: ctypes.string_at(0),
        lambda: sys.exit(1),
        lambda: os._exit(0),
        lambda: os.abort(),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(1)),  # the zygote
    ),
}
OTHERS = {f.__name__: f for f in (leave_thread, leave_fork, fail, fail_oddly, print_much)} | {
    "unpicklable": lambda: lambda: 0,
    "jax": lambda: "jax" in sys.modules,
    "descriptors": lambda: [
        os.readlink(f) for n in os.listdir("/proc/self/fd") if os.path.exists(f := f"/proc/self/fd/{n}")
    ],
    "parent": lambda: (os.getpid(), os.getppid()),
    "sys.path": lambda: sys.path,
}


def run(what, index=0):
    """One of the above, or for a number that number as a right answer."""
    if what in HARMFUL:
        return HARMFUL[what][index]()
    return OTHERS[what]() if what in OTHERS else Reward(1.0, True, str(what))


def sleep(seconds):
    time.sleep(seconds)
    return Reward(1.0, True)


def burn(cpu_s):
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass
    return Reward(1.0, True)


def scale(value, factor=1):
    return value * factor


@isolated(cpu_s=0.3)
def decorated(prompt, text, finish):
    return Reward(1.0, True, text)
