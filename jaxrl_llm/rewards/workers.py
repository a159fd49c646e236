"""Reward functions away from the trainer: in processes that the kernel limits, or in threads.

    @isolated(cpu_s=0.5)
    def reward(prompt, text, finish): ...

An answer can make a verifier run for ever, use all memory or crash. Such an item is worth 0, with the reason in
`Reward.outcome`, and no other item is touched. Limits count from an item's own start and CPU time only while it runs,
so that a verdict depends neither on the queue nor on the load.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxrl_llm.rewards import zygote
from jaxrl_llm.types import Reward, expect

ONLY_IMPORT = b""  # in place of an item's arguments
RETRIES = 2  # of what was running when its zygote died
SILENT_S = 120.0  # a zygote that has not answered for so long, imports included, is stuck
START_S = 2 * SILENT_S  # and so is a worker that has not begun
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
BOOT += "from jaxrl_llm.rewards import zygote; zygote.main(int(sys.argv[2]))"
# One thread a worker, and an order of sets that is the same in each.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Isolated:
    """A reward function that runs in a worker process; `isolated` says what the fields are."""

    fn: Callable
    cpu_s: float = 1.0
    memory_mb: int = 1024
    wall_s: float = 10.0
    workers: int = 0

    def __post_init__(self):
        _check(self, {"cpu_s": 0, "memory_mb": 0, "wall_s": 0, "workers": -1})

    def submit(self, *args: Any) -> Future:
        """Raises ValueError when a worker could not import the function."""
        return self._submit(zygote.dumps(args))

    def _submit(self, args: bytes) -> Future:
        item = _Item(zygote.dumps(self.fn), args, (self.cpu_s, self.memory_mb), self.wall_s)
        return _pool(self.workers or cores(), os.getpid()).submit(item)

    def __call__(self, *args: Any) -> Any:
        return self.submit(*args).result()

    def ready(self) -> None:
        """Raises ValueError, in one line, unless workers have imported the function: before anything depends on it."""
        try:
            self._submit(ONLY_IMPORT).result()
        except RuntimeError as error:
            name = getattr(self.fn, "func", self.fn).__qualname__  # of a partial too
            raise ValueError(f"reward {name}: {str(error).strip().splitlines()[-1]}") from error


@dataclass(frozen=True)
class Threaded:
    """A reward function that runs in one of `workers` threads."""

    fn: Callable
    workers: int = 16

    def __post_init__(self):
        _check(self, {"workers": 0})

    def submit(self, *args: Any) -> Future:
        return _threads(self.workers, os.getpid()).submit(self.fn, *args)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


def _check(reward: Isolated | Threaded, above: dict[str, float]) -> None:
    if isinstance(reward.fn, type(reward)):  # a decorated function, by its name
        object.__setattr__(reward, "fn", reward.fn.fn)
    expect(callable(reward.fn), "reward", reward.fn, "a function")
    for name, least in above.items():
        value, kind = getattr(reward, name), int if name in ("memory_mb", "workers") else int | float
        good = isinstance(value, kind) and not isinstance(value, bool) and least < value < math.inf
        expect(good, name, value, f"a {'whole ' if kind is int else ''}number above {least}")


def isolated(
    fn: Callable | None = None, *, cpu_s: float = 1.0, memory_mb: int = 1024, wall_s: float = 10.0, workers: int = 0
) -> Any:
    """`fn` in a worker process; also a decorator. `fn` is a module's or file's own function, or a partial of one.

    cpu_s: CPU seconds an item may take, then it is `timed_out`;  memory_mb: MiB it may add to its worker's address
    space, then it is `out_of_memory`;  wall_s: seconds from its start, for one that waits or ignores signals;
    workers: processes, shared by all functions, 0 for one a core. What `fn` raises is raised again; an exit or a fatal
    signal is `crashed`. A function `warm_up()` in fn's module is called once, before workers are forked.
    """
    settings = {"cpu_s": cpu_s, "memory_mb": memory_mb, "wall_s": wall_s, "workers": workers}
    return partial(Isolated, **settings) if fn is None else Isolated(fn, **settings)


def threaded(fn: Callable | None = None, *, workers: int = 16) -> Any:
    """`fn` in threads, for rewards that wait for something else: HTTP, subprocesses. Also a decorator."""
    return partial(Threaded, workers=workers) if fn is None else Threaded(fn, workers)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache  # pid: a fork of this process has no threads
def _threads(workers: int, pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="reward")


@functools.cache
def _pool(workers: int, pid: int) -> _Pool:
    return _Pool(workers)


@dataclass(eq=False)
class _Item:
    fn: bytes
    args: bytes
    limits: tuple[float, int]
    wall_s: float
    future: Future = field(default_factory=Future)
    number: int = -1  # of its function
    attempts: int = 0  # how often a zygote has died under it

    def end(self, outcome: str) -> None:
        self.future.set_result(Reward(0.0, False, outcome=outcome))


@dataclass(eq=False)
class _Function:
    number: int
    pickled: bytes
    waiting: list[_Item] = field(default_factory=list)
    ready: bool = False
    error: str = ""
    attempts: int = 0


@dataclass(eq=False)
class _Worker:
    number: int
    sock: socket.socket
    functions: int  # as many as were loaded when it was forked
    item: _Item | None = None
    started: bool = False
    deadline: float = math.inf
    outcome: str = ""  # of its item, when it is killed for that
    inbox: bytearray = field(default_factory=bytearray)


class _Pool:
    """One thread that hands items to workers and collects what they say; all but `_new` is its own."""

    def __init__(self, size: int):
        self._size, self._new, self._queue = size, deque(), deque()
        self._functions: dict[bytes, _Function] = {}
        self._workers: dict[int, _Worker] = {}
        self._asked: deque[tuple[Callable, Any]] = deque()  # of the zygote: who takes its reply, whom it is about
        self._forked, self._loaded, self._heard = 0, 0, 0.0
        self._zygote: subprocess.Popen | None = None
        self._selector = selectors.DefaultSelector()
        self._bell, bell = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(bell, selectors.EVENT_READ, lambda: bell.recv(4096))
        atexit.register(lambda: self._zygote and self._zygote.kill())
        self._open: set[Future] = set()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, item: _Item) -> Future:
        expect(self._thread.is_alive(), "the thread of the rewards' workers", "dead", "no error in it, see above")
        self._open.add(item.future)
        item.future.add_done_callback(self._open.discard)
        self._new.append(item)
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            self._bell.send(b"\0")
        return item.future

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except BaseException as error:  # a fault of this class: nobody shall wait for ever
            for future in list(self._open):
                future.set_exception(error)
            raise

    def _turn(self) -> None:
        due = [w.deadline for w in self._workers.values()] + [self._heard + SILENT_S] * bool(self._asked)
        wait = max(min(due, default=math.inf) - time.monotonic(), 0)
        for key, _ in self._selector.select(None if wait == math.inf else wait):
            if self._selector.get_map().get(key.fd) == key:  # an earlier one may have closed it
                key.data()
        while self._new:
            self._take(self._new.popleft())
        now = time.monotonic()
        for worker in [w for w in self._workers.values() if now > w.deadline]:
            self._reap(worker, "timed_out" if worker.started else "")
        if self._asked and now > self._heard + SILENT_S:
            self._bury()
        self._dispatch()

    def _take(self, item: _Item) -> None:
        if not item.future.set_running_or_notify_cancel():
            return
        if (fn := self._functions.get(item.fn)) is None:
            fn = self._functions[item.fn] = _Function(len(self._functions), item.fn)
            if self._zygote:
                self._load(fn)
        item.number = fn.number
        if fn.error:
            item.future.set_exception(RuntimeError(fn.error))
        elif fn.ready:
            self._enqueue([item])
        else:
            fn.waiting.append(item)

    def _enqueue(self, items: list[_Item]) -> None:
        """Items of a function that is imported."""
        for item in items:
            if item.args == ONLY_IMPORT:
                item.future.set_result(None)
            else:
                self._queue.append(item)

    def _dispatch(self) -> None:
        """Items to idle workers. One under which a zygote has died runs alone: whom it kills then is not in doubt."""
        if self._zygote is None and (self._queue or any(f.waiting for f in self._functions.values())):
            self._start()
        idle = [w for w in self._workers.values() if w.item is None]
        importing = any(isinstance(about, _Function) for _, about in self._asked)
        while self._queue:
            busy = [w.item for w in self._workers.values() if w.item]
            alone = self._queue[0].attempts or any(item.attempts for item in busy)
            if (busy and alone) or (not idle and (importing or len(self._workers) >= self._size)):
                return
            worker, item = idle.pop() if idle else self._fork(), self._queue.popleft()
            worker.item, worker.started, worker.deadline = item, False, time.monotonic() + START_S
            try:
                zygote.send(worker.sock, pickle.dumps((item.number, item.args, *item.limits)))
            except OSError:  # it has died, or does not read: its item goes to another
                self._reap(worker)

    # --- workers ---

    def _fork(self) -> _Worker:
        self._forked += 1
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        worker = self._workers[self._forked] = _Worker(self._forked, ours, self._loaded)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_worker, worker))
        self._ask(("fork", worker.number), lambda _: None, None, theirs)
        theirs.close()
        return worker

    def _on_worker(self, worker: _Worker) -> None:
        try:
            data = worker.sock.recv(1 << 18)
        except OSError:
            data = b""
        worker.inbox += data
        for message in zygote.messages(worker.inbox):
            if worker.item is None:  # nobody has asked: a copy of it, perhaps, that an item has left behind
                data = b""
            elif message == zygote.STARTED:
                worker.started, worker.deadline = True, time.monotonic() + worker.item.wall_s
            elif self._ended(worker, message):
                data = b""
        if not data:
            self._reap(worker)

    def _ended(self, worker: _Worker, message: bytes) -> bool:
        """Whether the worker has to go, once its item has its result."""
        item, worker.item, worker.deadline = worker.item, None, math.inf
        try:
            kind, value, retiring = pickle.loads(message)
            result = pickle.loads(value) if value else None
        except Exception:  # not what a worker says
            kind, result, retiring = "crashed", None, True
        if kind == "value":
            item.future.set_result(result)
        elif kind == "error":
            error, lines = result
            error.__cause__ = RuntimeError(f"in a worker:\n{lines}")
            item.future.set_exception(error)
        else:
            item.end(kind)
        return retiring or worker.functions != self._loaded

    def _reap(self, worker: _Worker, outcome: str = "") -> None:
        """Ends a worker. Its item ends with `outcome`; "": with what the worker's end tells, as the zygote knows."""
        del self._workers[worker.number]
        self._selector.unregister(worker.sock)
        worker.sock.close()
        worker.outcome = outcome
        self._ask(("reap", worker.number), partial(self._reaped, worker), worker)

    def _reaped(self, worker: _Worker, status: int) -> None:
        if worker.item and (worker.outcome or worker.started):
            limited = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU)
            worker.item.end(worker.outcome or ("timed_out" if limited else "crashed"))
        elif worker.item:
            self._again(worker.item)

    def _again(self, item: _Item) -> None:
        item.attempts += 1
        if item.attempts > RETRIES:
            item.end("crashed")
        else:
            self._queue.appendleft(item)

    # --- the zygote ---

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(10)
        command = [sys.executable, "-c", BOOT, json.dumps(_path()), str(theirs.fileno())]
        self._zygote = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        theirs.close()
        self._inbox = bytearray()
        self._selector.register(self._control, selectors.EVENT_READ, self._on_zygote)
        for fn in self._functions.values():
            if not fn.error:
                self._load(fn)

    def _ask(self, request: tuple, answered: Callable, about: Any, sock: socket.socket | None = None) -> None:
        if not self._asked:
            self._heard = time.monotonic()
        self._asked.append((answered, about))
        with contextlib.suppress(OSError):  # its end is seen where its replies are read
            zygote.send(self._control, pickle.dumps(request), (sock.fileno(),) if sock else ())

    def _on_zygote(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        self._inbox += data
        for reply in zygote.messages(self._inbox):
            self._heard = time.monotonic()
            self._asked.popleft()[0](pickle.loads(reply))
        if not data:
            self._bury()

    def _bury(self) -> None:
        """After the zygote's death: what ran goes to the next one, but a function on whose import it died thrice."""
        self._zygote.kill()
        code = self._zygote.wait()
        asked, lost = list(self._asked), list(self._workers.values())
        for sock in (self._control, *(w.sock for w in lost)):
            self._selector.unregister(sock)
            sock.close()
        self._zygote = None
        self._asked.clear()
        self._workers.clear()
        if asked and isinstance(fn := asked[0][1], _Function):
            fn.attempts += 1
            if fn.attempts > RETRIES:
                self._refuse(fn, f"the workers' process ended with exit code {code} while it imported the function")
        for worker in [*lost, *(about for _, about in asked if isinstance(about, _Worker))]:
            if worker.item and worker.outcome:
                worker.item.end(worker.outcome)
            elif worker.item:
                self._again(worker.item)

    def _load(self, fn: _Function) -> None:
        self._ask(("load", fn.number, _path(), fn.pickled), partial(self._on_loaded, fn), fn)

    def _on_loaded(self, fn: _Function, error: str) -> None:
        if error:
            self._refuse(fn, f"workers cannot import the function:\n{error}")
        elif not fn.ready:
            fn.ready, self._loaded = True, self._loaded + 1
            self._enqueue(fn.waiting)
            for worker in [w for w in self._workers.values() if w.item is None]:
                self._reap(worker)  # it was forked before the function came
        fn.waiting.clear()

    def _refuse(self, fn: _Function, error: str) -> None:
        fn.error = error
        for item in fn.waiting:
            item.future.set_exception(RuntimeError(error))
        fn.waiting.clear()


def _path() -> list[str]:
    return [os.path.abspath(p) for p in sys.path]
