"""A server that dies is started again, by a supervisor that takes it along when it goes."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_backend import FAKE, child_of, listening, process, until

from jaxrl_llm.serving import supervisor


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_supervisor_starts_a_killed_server_again_and_takes_it_along(tmp_path):
    with process(FAKE, "--port", 0, "--supervised") as watched:
        listening(watched)
        first = child_of(watched.pid)
        os.kill(first, signal.SIGKILL)
        listening(watched)
        second = child_of(watched.pid)
        assert second != first
        watched.kill()  # a supervisor that is killed cannot stop its child
        until(lambda: not alive(second))
    with process(FAKE, "--port", 0, "--supervised") as watched:
        listening(watched)
        child = child_of(watched.pid)
        watched.send_signal(signal.SIGTERM)
        assert watched.wait(10) == 0
        assert not alive(child)
        assert watched.stderr.read() == ""


def test_the_supervisor_gives_up_on_what_never_listens(capfd, tmp_path):
    log = tmp_path / "log"
    dies = [sys.executable, "-c", f"open({str(log)!r}, 'a').write('x'); raise SystemExit(7)"]
    with pytest.raises(RuntimeError, match="died 5 times and never listened: its last exit code is 7"):
        supervisor.supervise(dies, backoff_s=0.01)
    assert log.read_text() == "xxxxx"
    assert capfd.readouterr().err.count("exit code 7: starting it again") == 4


def test_what_cannot_serve_as_it_is_asked_to_is_not_started_again(tmp_path, capfd):
    log = tmp_path / "log"
    program = f"open({str(log)!r}, 'a').write('x'); raise SystemExit(2)"
    assert supervisor.supervise([sys.executable, "-c", program], backoff_s=0.01) == 2
    assert log.read_text() == "x"
    assert capfd.readouterr().err == ""


def test_the_supervisor_waits_longer_each_time_and_counts_only_recent_deaths(tmp_path):
    log = tmp_path / "log"
    program = f"import time; f = open({str(log)!r}, 'a+'); f.write(f'{{time.time()}}\\n'); f.flush(); f.seek(0)\n"
    program += "raise SystemExit(len(f.readlines()) < 5)"
    assert supervisor.supervise([sys.executable, "-c", program], deaths=3, within_s=0.2, backoff_s=0.1) == 0
    times = [float(line) for line in log.read_text().split()]
    waits = np.diff(times)
    assert len(times) == 5  # it ended well, and was not started again
    assert (waits > [0.1, 0.2, 0.4, 0.4]).all()  # the count of deaths it looks at bounds the wait too


def test_the_supervisor_never_gives_up_on_what_has_listened():
    dies = "print('listening on x', flush=True); import os; os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", dies]
    program = f"from jaxrl_llm.serving import supervisor; supervisor.supervise({command}, backoff_s=0.01)"
    with process("-c", program) as s:
        for _ in range(7):
            assert listening(s) == "x"
        s.send_signal(signal.SIGTERM)
        s.wait(10)
