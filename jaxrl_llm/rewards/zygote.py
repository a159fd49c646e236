"""The process that forks warm workers for reward functions, and what such a worker does. `workers.py` talks to it.

It is a program of its own, not a fork of the trainer: it has one thread, none of the trainer's descriptors, and no jax
unless a reward function's own module imports it. The modules are imported here once; a fork of this process has them.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import operator
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD = struct.Struct("<Q")  # before every message: its bytes
MAX_RESULT = 16 << 20  # bytes of a result; a larger one counts as out of memory
STARTED = b""  # the message of a worker that begins an item


def send(sock: socket.socket, message: bytes, fds: tuple[int, ...] = ()) -> None:
    socket.send_fds(sock, [HEAD.pack(len(message))], fds) if fds else sock.sendall(HEAD.pack(len(message)))
    sock.sendall(message)


def messages(inbox: bytearray) -> list[bytes]:
    """The whole messages that `inbox` begins with, which are taken out of it."""
    out = []
    while len(inbox) >= HEAD.size and len(inbox) >= (end := HEAD.size + HEAD.unpack_from(inbox)[0]):
        out.append(bytes(inbox[HEAD.size : end]))
        del inbox[:end]
    return out


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := sock.recv(min(size - len(data), 1 << 20))):
            raise EOFError
        data += more
    return bytes(data)


# --- functions by name ----------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Functions and classes of a file that cannot be imported by name (an experiment, a script) go by its path."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.FunctionType | type) or obj is _named:
            return NotImplemented
        module = sys.modules.get(obj.__module__)
        file = getattr(module, "__file__", None)
        of_file = file and (obj.__module__ == "__main__" or obj.__module__ == file)
        try:
            found = operator.attrgetter(obj.__qualname__)(module)
        except AttributeError:
            found = None
        if isinstance(obj, types.FunctionType) and (
            obj not in (found, getattr(found, "fn", None)) or (obj.__module__ == "__main__" and not file)
        ):
            expected = "a function with a name of its own in a module or file, which workers import"
            raise ValueError(f"reward is {obj!r}; expected {expected}")
        if not of_file and found is obj:
            return NotImplemented
        return _named, (str(Path(file).resolve()) if of_file else obj.__module__, obj.__qualname__)


def dumps(obj: Any) -> bytes:
    """Pickled for a worker or by one. ValueError for a function that a worker could not import: a lambda, an inner."""
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(obj)
    return out.getvalue()


def _named(module: str, name: str) -> Any:
    """A function or class of a module, or of a file by its path; the function below a decorator that keeps it."""
    found = operator.attrgetter(name)(_file(module) if module.endswith(".py") else importlib.import_module(module))
    return found if isinstance(found, types.FunctionType | type) else found.fn


def _file(path: str) -> types.ModuleType:
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if file == path or (module.__name__ == "__main__" and file and str(Path(file).resolve()) == path):
            return module
    module = sys.modules[path] = types.ModuleType(path)
    module.__file__ = path
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except BaseException:
        del sys.modules[path]
        raise
    return module


# --- the zygote -----------------------------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Serves requests, one reply to each, until the trainer is gone; then no worker is left.

    (load, number, sys.path, pickled function) → "" or the traceback: the modules are imported; `warm_up()` of the
    function's own is called if there is one.   (fork, number), with a socket → None: a worker that knows all functions
    loaded so far.   (reap, number) → its wait status: it and its children are killed if they still run.
    """
    control, functions, workers, parent = socket.socket(fileno=fd), {}, {}, os.getppid()
    os.dup2(2, 1)  # what a reward function prints
    sys.stdout.reconfigure(line_buffering=True)
    try:
        while True:
            if not select.select([control], [], [], 1.0)[0]:
                if os.getppid() != parent:  # a fork of the trainer may hold the other end
                    return
                continue
            head, fds, *_ = socket.recv_fds(control, HEAD.size, 1)
            head += _read(control, HEAD.size - len(head)) if head else b""
            if not head:
                return
            verb, number, *rest = pickle.loads(_read(control, HEAD.unpack(head)[0]))
            reply = None
            if verb == "load":
                reply = _load(functions, number, *rest)
            elif verb == "fork":
                workers[number] = _fork(control, socket.socket(fileno=fds[0]), functions)
            else:
                reply = _reap(workers.pop(number))
            send(control, pickle.dumps(reply))
    except (EOFError, OSError):
        pass
    finally:
        for pid in workers.values():
            _reap(pid)


def _load(functions: dict[int, Callable], number: int, path: list[str], pickled: bytes) -> str:
    try:
        sys.path[:] = path
        fn = functions[number] = pickle.loads(pickled)
        module = sys.modules.get(getattr(getattr(fn, "func", fn), "__module__", None))
        if warm_up := getattr(module, "warm_up", None):
            warm_up()
        gc.collect()
        gc.freeze()  # the collector of a worker leaves the shared pages alone
        return ""
    except BaseException:
        return traceback.format_exc()


def _fork(control: socket.socket, sock: socket.socket, functions: dict[int, Callable]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        sock.close()
        return pid
    try:
        control.close()
        _work(sock, functions, parent)
    except (EOFError, OSError):
        pass  # the trainer has no more for it
    finally:
        os._exit(0)


def _reap(pid: int) -> int:
    for kill in (os.killpg, os.kill):  # its group, once it has one, holds what it has started
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]  # of one that had ended by itself, that end


# --- a worker -------------------------------------------------------------------------------------------------------


def _work(sock: socket.socket, functions: dict[int, Callable], parent: int) -> None:
    """Items until the socket is closed: (function's number, arguments, cpu_s, memory_mb) → (kind, bytes, retiring)."""
    me = os.getpid()
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    at_start = _address_space()
    while True:
        message = _read(sock, HEAD.unpack(_read(sock, HEAD.size))[0])
        try:
            number, pickled, cpu_s, memory_mb = pickle.loads(message)
            args = pickle.loads(pickled)
        except Exception as error:
            send(sock, pickle.dumps(("error", pickle.dumps((RuntimeError(f"arguments: {error}"), "")), False)))
            continue
        send(sock, STARTED)
        kind, value = _limited(functions.get(number), args, cpu_s, memory_mb << 20)
        if os.getpid() != me:  # a fork that the function has made and not ended
            return
        # What an item leaves behind, memory or threads, is not for the next one to pay.
        retiring = threading.active_count() > 1 or _address_space() > at_start + (memory_mb << 19)
        send(sock, pickle.dumps((kind, value, retiring)))
        if retiring:
            return


def _limited(fn: Callable, args: tuple, cpu_s: float, memory: int) -> tuple[str, bytes]:
    """What `fn` returns or raises; the kernel ends this process at `cpu_s` of its CPU time. memory: bytes more."""
    spaces, cpus = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    least = lambda limit, hard: limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    for number in (signal.SIGPROF, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    if now := _address_space():
        resource.setrlimit(resource.RLIMIT_AS, (least(now + memory, spaces[1]), spaces[1]))
    seconds = int(time.process_time() + cpu_s) + 2  # for a function that ignores the timer's signal
    resource.setrlimit(resource.RLIMIT_CPU, (least(seconds, cpus[1]), cpus[1]))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return _called(fn, args)
    except MemoryError:
        return "out_of_memory", b""
    except BaseException:  # sys.exit, and what is no error of the function
        return "crashed", b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, cpus)
        resource.setrlimit(resource.RLIMIT_AS, spaces)


def _called(fn: Callable, args: tuple) -> tuple[str, bytes]:
    try:
        value = dumps(fn(*args))
        if len(value) > MAX_RESULT:
            raise MemoryError
        return "value", value
    except MemoryError:
        raise
    except Exception as error:
        lines = "".join(traceback.format_exception(error.with_traceback(error.__traceback__.tb_next)))[-8000:]
        try:
            pickle.loads(dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return "error", dumps((error, lines))


def _address_space() -> int:
    """Bytes; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
