"""Workers: every way for a reward to go wrong ends one item and touches no other; nothing is left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import pytest
import worker_functions as functions

from jaxrl_llm.config import files, values
from jaxrl_llm.rewards import workers
from jaxrl_llm.rewards.workers import Isolated, isolated, threaded
from jaxrl_llm.types import Prompt, Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux's kernel")
run = isolated(functions.run, cpu_s=0.25, wall_s=1.0, workers=2)
HARM = [(outcome, i) for outcome, kinds in functions.HARMFUL.items() for i in range(len(kinds))]


@pytest.mark.parametrize(("outcome", "index"), HARM)
def test_a_harmful_item_is_worth_nothing_and_the_next_is_scored(outcome, index):
    assert run(outcome, index) == Reward(0.0, False, outcome=outcome)
    assert run(7) == Reward(1.0, True, "7")


@pytest.mark.slow
def test_harmful_items_take_no_other_with_them():
    asked = {i: run.submit(i) if i % 10 else run.submit(*HARM[i // 10 % len(HARM)]) for i in range(300)}
    for i, future in asked.items():
        reward = future.result(120)
        assert reward == (Reward(1.0, True, str(i)) if i % 10 else Reward(0.0, False, outcome=reward.outcome))
        assert i % 10 or reward.outcome == HARM[i // 10 % len(HARM)][0]


def test_a_worker_is_replaced_in_milliseconds():
    run(1)
    taken = []
    for _ in range(7):
        run("crashed", 2)
        start = time.monotonic()
        run(1)
        taken.append(time.monotonic() - start)
    assert sorted(taken)[3] < 0.1


def test_what_a_function_raises_is_raised_with_its_lines():
    with pytest.raises(KeyError, match="boo") as caught:
        run("fail")
    assert "worker_functions.py" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):  # cannot be rebuilt from its arguments
        run("fail_oddly")
    with pytest.raises(ValueError, match="expected a function with a name of its own"):
        run("unpicklable")


def test_what_a_function_prints_does_no_harm():
    assert run("print_much").correct


def test_what_an_item_leaves_behind_is_not_for_the_next():
    one = isolated(functions.run, cpu_s=0.25, workers=1)
    for what in ("leave_thread", "leave_fork"):
        before = one("parent")
        assert one(what).correct
        assert [one(i).parsed for i in range(20)] == [str(i) for i in range(20)]
        if what == "leave_thread":
            assert one("parent") != before  # it has gone, and its thread with it
            time.sleep(0.5)  # so long the thread would have taken all the CPU time there is
            assert one(1).correct


def test_waiting_in_the_queue_is_not_counted():
    one = isolated(functions.sleep, cpu_s=0.1, wall_s=0.4, workers=1)
    assert all(f.result().correct for f in [one.submit(0.1) for _ in range(12)])  # 1.2 s in all
    assert one(1.0).outcome == "timed_out"


def test_verdicts_do_not_depend_on_the_load():
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=functions.spin, daemon=True) for _ in range(3 * workers.cores())]
    for process in others:
        process.start()
    try:
        burn = isolated(functions.burn, cpu_s=0.4, wall_s=60.0, workers=2)
        assert [f.result().outcome for f in [burn.submit(s) for s in (0.25, 5, 0.25, 0.25)]] == [
            "scored", "timed_out", "scored", "scored",
        ]  # fmt: skip
    finally:
        for process in others:
            process.kill()


def test_functions_that_workers_cannot_import_are_refused_at_once():
    inner = lambda *_: Reward(1.0, True)

    def named(*_): ...

    for fn in (inner, named, partial(inner)):
        with pytest.raises(ValueError, match="expected a function with a name of its own in a module or file"):
            isolated(fn)(1)
    assert isolated(partial(functions.scale, factor=3))(2) == 6


@pytest.mark.parametrize(
    ("code", "message"), [("1 / 0", "ZeroDivisionError"), ("import os; os._exit(3)", "exit code 3")]
)
def test_a_module_that_fails_in_workers_is_an_error(tmp_path, monkeypatch, code, message):
    name = f"breaks_{len(code)}"
    guard = "import os\nif 'JAXRL_TEST_PARENT' not in os.environ:\n    "
    (tmp_path / f"{name}.py").write_text(f"{guard}{code}\ndef fn(x): return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JAXRL_TEST_PARENT", "1")
    module = __import__(name)
    monkeypatch.delenv("JAXRL_TEST_PARENT")
    alone = isolated(module.fn, workers=3)
    with pytest.raises(RuntimeError, match=message):
        alone(1)
    with pytest.raises(RuntimeError, match=message):
        alone(1)
    assert isolated(functions.scale, workers=3)(4) == 4  # the others' pool


def test_workers_have_no_jax_and_no_descriptor_of_ours(tmp_path):
    with open(tmp_path / "ours", "w") as file:
        os.set_inheritable(file.fileno(), True)
        pool = isolated(functions.run, workers=4)
        assert pool("jax") is False
        assert not any("ours" in name for name in pool("descriptors"))
        assert len(pool("descriptors")) <= 4
        file.write("")


def test_the_zygotes_death_loses_nothing():
    slow = isolated(functions.sleep, workers=2)
    asked = [slow.submit(0.3) for _ in range(4)] + [run.submit(i) for i in range(50)]
    time.sleep(0.1)
    os.kill(workers._pool(2, os.getpid())._zygote.pid, signal.SIGKILL)
    assert all(f.result(30).correct for f in asked)


@pytest.mark.slow
def test_who_ran_beside_one_that_kills_the_zygote_is_not_blamed():
    slow = isolated(functions.sleep, workers=2)
    run(1)
    beside, killer = slow.submit(0.4), run.submit("crashed", 5)
    assert killer.result(30).outcome == "crashed"
    assert beside.result(30).correct


def test_no_zombies_and_flat_memory():
    run(1)
    zygote = workers._pool(2, os.getpid())._zygote.pid
    for _ in range(20):
        run("crashed", 0)
        run("out_of_memory", 0)
    children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children]
    assert len(children) <= 3
    assert "Z" not in states


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path.insert(0, {folder!r})
import worker_functions as functions
from jaxrl_llm.rewards.workers import isolated
reward = isolated(functions.run, cpu_s=60.0, wall_s=60.0, workers=2)
print(*reward("parent"), flush=True)
reward.submit("timed_out", 0), reward.submit("timed_out", 2)
time.sleep({seconds})
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_no_process_outlives_its_parent(end):
    script = SCRIPT.format(folder=str(Path(functions.__file__).parent), seconds=60 if end else 0.3)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    worker, zygote = map(int, parent.stdout.readline().split())
    time.sleep(0.3)
    started = Path(f"/proc/{zygote}/task/{zygote}/children")
    pids = [zygote, worker, *map(int, started.read_text().split())] if started.exists() else [zygote, worker]
    if end:
        parent.send_signal(end)
    parent.wait(60)
    deadline = time.monotonic() + 10
    alive = lambda pid: Path(f"/proc/{pid}").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_function_of_an_experiment_file(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 5\n")
    (tmp_path / "my reward.py").write_text(
        "from dataclasses import dataclass\nfrom jaxrl_llm.rewards.workers import isolated\nimport beside\n"
        "@dataclass\nclass Made:\n    value: int\n"
        "def plain(x):\n    return Made(x * beside.FACTOR)\n"
        "@isolated(cpu_s=.5, workers=2)\ndef wrapped(x):\n    return x + 1\n"
    )
    module = values.load_module(tmp_path / "my reward.py")
    assert isolated(module.plain, workers=2)(2) == module.Made(10)
    assert module.wrapped(2) == 3
    for reward in (module.wrapped, isolated(partial(functions.scale, factor=3)), threaded(functions.scale, workers=3)):
        written = json.loads(json.dumps(files.to_json(reward, keyword=True)))
        again = files._decode(object, written, None)
        assert files.to_json(again, keyword=True) == written
        assert again(2) == reward(2)
    assert (
        files._decode(object, json.loads(json.dumps(files.to_json(module.wrapped, keyword=True))), None)
        == module.wrapped
    )


def test_a_function_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from jaxrl_llm.rewards.workers import isolated\nfrom jaxrl_llm.types import Reward\n"
        "def fn(x):\n    return Reward(x, True)\n"
        "if __name__ == '__main__':\n    print(isolated(fn, workers=1)(2.0).value)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2.0\n", done.stderr


def test_a_decorated_function_takes_a_prompt():
    assert functions.decorated(Prompt(0, "a", meta={"x": 1}), "t", "eos") == Reward(1.0, True, "t")
    assert functions.decorated.cpu_s == 0.3


def test_large_items_pass():
    assert len(isolated(functions.scale)("x" * 5_000_000, 2)) == 10_000_000


@pytest.mark.parametrize(
    "settings", [{"cpu_s": 0}, {"cpu_s": "1"}, {"memory_mb": 0}, {"memory_mb": 1.5}, {"wall_s": 0}, {"workers": -1}]
)
def test_wrong_settings_name_themselves(settings):
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} is .*expected a"):
        Isolated(functions.run, **settings)


def test_threads_wait_side_by_side():
    start = time.monotonic()
    reward = threaded(functions.sleep, workers=8)
    assert all(f.result().correct for f in [reward.submit(0.2) for _ in range(8)])
    assert time.monotonic() - start < 1.0
    with pytest.raises(ValueError, match="workers is 0"):
        threaded(functions.sleep, workers=0)


def test_whether_workers_can_import_a_function_is_known_before_it_is_needed(tmp_path):
    run.ready()
    file = tmp_path / "lacking.py"
    file.write_text("import no_such_package\n\ndef reward(prompt, text, finish):\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "no_such_package", sys)
            import lacking
        missing = "reward .*: ModuleNotFoundError: No module named 'no_such_package'"
        with pytest.raises(ValueError, match=missing) as caught:
            isolated(lacking.reward).ready()
        assert "\n" not in str(caught.value)
    finally:
        sys.path.remove(str(tmp_path))
