"""No program gets out of the sandbox, and honest ones do not notice it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from escapes import ESCAPES, program

from jaxrl_llm.rewards import code, confine, sandbox
from jaxrl_llm.rewards.sandbox import Limits, run
from jaxrl_llm.types import EOS, Prompt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
LIMITS = Limits(cpu_s=1, wall_s=3.0, memory_mb=256, output_kb=256)
ENDED = {
    "huge_output": "flooded", "huge_error": "flooded", "memory_by_pieces": "out_of_memory", "sleep": "timed_out",
    "sleep_deaf": "timed_out", "spin": "timed_out", "spin_deaf": "timed_out", "stop_itself": "timed_out",
    "timers": "timed_out", "crash": "crashed", "int_0x80": "crashed", "core_dump": "crashed",
}  # fmt: skip
SIGNALS = []


@pytest.fixture(scope="module")
def world():
    """What the programs reach for: a server, a place to write, and a process that notes its signals."""
    before = signal.signal(signal.SIGUSR1, lambda *_: SIGNALS.append("USR1"))
    place = Path(tempfile.mkdtemp(prefix="victims", dir="/tmp"))
    place.chmod(0o777)
    (place / "victim").write_text("whole")
    (place / "victim").chmod(0o666)
    (place / "there").symlink_to(place / "victim")
    tcp, unix, abstract = socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))
    unix.bind(str(place / "socket"))
    (place / "socket").chmod(0o777)
    abstract.bind(f"\0{place.name}")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(f"\0{place.name}d")
    for listening in (unix, abstract):
        listening.listen()
        listening.set_inheritable(True)
    yield {"PORT": tcp.getsockname()[1], "PLACE": str(place), "ABSTRACT": place.name}
    for listening in (tcp, unix, abstract, datagrams):
        listening.close()
    for path in sorted(place.iterdir()):
        path.unlink()
    place.rmdir()
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture(scope="module")
def of_a_user(world):
    """What the same programs come to when an ordinary user runs them."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user; this is a user already")
    texts = [program(name, **world) for name in ESCAPES]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("as_user.py")], input=json.dumps([texts, vars(LIMITS)]),
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(ESCAPES, (sandbox.Outcome(**fields) for fields in json.loads(done.stdout)), strict=True))


def nothing_happened(name, outcome, world):
    assert "ESCAPED" not in outcome.stdout, outcome
    assert outcome.ended in (ENDED.get(name, "exited"), "timed_out"), outcome  # under load the wall may be first
    assert "NameError" not in outcome.stderr and "SyntaxError" not in outcome.stderr, outcome  # noqa: PT018
    place = Path(world["PLACE"])
    assert sorted(p.name for p in place.iterdir()) == ["socket", "there", "victim"]
    assert (place / "victim").read_text() == "whole"
    assert (place / "victim").stat().st_mode & 0o777 == 0o666
    assert SIGNALS == []


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape(name, world, monkeypatch):
    outcomes, begun = [], time.monotonic()
    monkeypatch.setattr(sandbox, "run", lambda *args, **kwargs: outcomes.append(run(*args, **kwargs)) or outcomes[0])
    prompt = Prompt(0, "?", {"stdin": [["", "what it cannot know"]]})
    limits = replace(LIMITS, wall_s=0.5) if ENDED.get(name) == "timed_out" else LIMITS
    found = code.reward(prompt, program(name, **world, PARENT=os.getpid()), EOS, limits=limits)
    nothing_happened(name, outcomes[0], world)
    assert (found.value, found.correct) == (0, False)
    assert len(outcomes[0].stdout) <= LIMITS.output_kb << 10
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape_of_a_user(name, world, of_a_user):
    nothing_happened(name, of_a_user[name], world)


HONEST = {
    "input": ("n = int(input())\nprint(sum(int(input()) for _ in range(n)))", "2\n3\n4\n", "7\n"),
    "standard_input": ("import sys\nprint(len(sys.stdin.read()), end='')", "é\n" * 10_000, "20000"),
    "heap": ("import heapq\nh = [3, 1, 2]\nheapq.heapify(h)\nprint(heapq.heappop(h))", "", "1\n"),
    "generators": ("def f():\n    yield from range(3)\nprint(*f())", "", "0 1 2\n"),
    "recursion": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def d(n): return n and 1 + d(n - 1)\nt = threading.Thread(target=lambda: print(d(50_000)))\nt.start()",
        "", "50000\n",
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor as P\nwith P(8) as p: print(sum(p.map(abs, range(-9, 0))))",
        "", "45\n",
    ),
    "asyncio": ("import asyncio\nasync def f():\n    print(await asyncio.sleep(0))\nasyncio.run(f())", "", "None\n"),
    "classes": (
        "from dataclasses import dataclass\nimport pickle\n@dataclass\nclass A:\n    x: int\n"
        "if __name__ == '__main__': print(pickle.loads(pickle.dumps(A(3))))",
        "", "A(x=3)\n",
    ),
    "libraries": (
        "import bisect, collections, datetime, decimal, fractions, functools, hashlib, json, math, random, re, sqlite3"
        "\nprint(re.sub('a', 'b', 'aa'), sqlite3.connect(':memory:').execute('select 1').fetchone())",
        "", "bb (1,)\n",
    ),
    "alarm": ("import signal\nsignal.alarm(9)\nopen('/dev/null', 'w').write('x')\nprint('é')", "", "é\n"),
    "its_own_signal": (
        "import os, signal as s\ns.signal(10, lambda *_: print('got'))\nos.kill(os.getpid(), 10)\ns.raise_signal(10)",
        "", "got\ngot\n",
    ),
    "order_of_sets": ("print(*{'a', 'b', 'c', 'd'})", "", None),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_work(name):
    text, stdin, expected = HONEST[name]
    found = run(text, stdin)
    assert (found.ended, found.exit_code, found.stderr) == ("exited", 0, "")
    assert found.stdout == (run(text, stdin).stdout if expected is None else expected)


@pytest.mark.parametrize(
    ("text", "code", "ended", "says"),
    [
        ("1/0", 1, "exited", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", 3, "exited", ""),
        ("print('x", 1, "exited", "SyntaxError"),
        ("print('\udc80')", 1, "exited", "?"),
        ("print(1)\0", 1, "exited", "null bytes"),
        ("import numpy", 1, "exited", "No module named 'numpy'"),
        ("raise MemoryError", 1, "out_of_memory", "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "timed_out", ""),
    ],
)
def test_how_a_program_ended(text, code, ended, says):
    found = run(text)
    if says != "?":  # what cannot be written as UTF-8 becomes a question mark in the program
        assert (found.exit_code, found.ended) == (code, ended)
        assert says in found.stderr
    else:
        assert found.stdout == "?\n"


def test_the_kernel_counts_the_time():
    """A program that computes is ended by CPU time, long before the wall's."""
    text = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    for deaf, number in ((text, signal.SIGKILL), ("while True: pass", signal.SIGXCPU)):
        found = run(deaf, limits=Limits(cpu_s=1, wall_s=60))
        assert (found.ended, found.exit_code) == ("timed_out", -number)


def test_the_kernel_counts_memory_and_threads(world):
    found = run(program("memory_by_pieces", **world), limits=Limits(cpu_s=20, wall_s=60, memory_mb=256))
    assert (found.ended, found.stdout) == ("out_of_memory", "")
    if os.geteuid() == 0:  # else those of the user's other processes count too
        text = (
            "import threading as t, time, os\nt.stack_size(65536)\ntry:\n"
            "    while True: t.Thread(target=time.sleep, args=(9,)).start()\n"
            "except RuntimeError: pass\nprint(t.active_count(), flush=True)\nos._exit(0)"
        )
        found = run(text)
        assert int(found.stdout) == confine.THREADS


def test_many_at_once():
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: run("print(int(input()) ** 2)", str(i)).stdout, range(64)))
    assert found == [f"{i * i}\n" for i in range(64)]
    assert threading.active_count() < 20
    assert len(os.listdir("/proc/self/fd")) == before


def of_parent(pid):
    """The sandboxed processes that `pid` has started, by their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(pid).encode() in words and any(b"confine" in word for word in words):
            found.append(path)
    return found


def test_no_orphan_is_left_when_the_parent_is_killed():
    text = "from jaxrl_llm.rewards.sandbox import *; run('import time; time.sleep(99)', limits=Limits(wall_s=99))"
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", text], env=environment)
    give_up = time.monotonic() + 30
    while not of_parent(parent.pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    time.sleep(0.2)
    assert of_parent(parent.pid)
    parent.kill()
    parent.wait()
    while of_parent(parent.pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not of_parent(parent.pid)
    assert not of_parent(os.getpid())


@pytest.fixture
def another_kernel(monkeypatch, tmp_path):
    """A kernel that gives other answers: one without Landlock, one of its first version."""

    def change(old, new):
        text = Path(sandbox.confine.__file__).read_text()
        assert old in text
        (tmp_path / "confine.py").write_text(text.replace(old, new))
        monkeypatch.setattr(sandbox, "SCRIPT", str(tmp_path / "confine.py"))
        sandbox._tried.cache_clear()

    yield change
    sandbox._tried.cache_clear()


def test_without_landlock_it_refuses(another_kernel):
    another_kernel('call("syscall", 444, None', 'call("syscall", 9999, None')
    with pytest.raises(RuntimeError, match=r"sandbox: this kernel has no Landlock .*expected Linux .*unsafe=True"):
        run("print(1)")
    assert run("print(1)", unsafe=True).stdout == "1\n"


@pytest.mark.parametrize("version", range(1, 7))
def test_every_version_of_landlock(another_kernel, version):
    another_kernel('version = call("syscall", 444, None, 0, 1)', f"version = {version}")
    text = "print(1)\nfor mode in 'rw':\n    try: print(open('/tmp/escaped' if mode == 'w' else '/etc/passwd', mode))\n"
    assert run(text + "    except OSError as error: print(error.errno)").stdout == "1\n13\n13\n"


@pytest.mark.parametrize("limits", [Limits(cpu_s=0), Limits(cpu_s=0.5), Limits(wall_s=0), Limits(output_kb=0)])
def test_bad_limits_are_named(limits):
    with pytest.raises(ValueError, match="limits is .*; expected whole numbers"):
        run("", limits=limits)
