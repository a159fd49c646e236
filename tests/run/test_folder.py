"""A lock that is waited for: said once, given up on a signal, taken when it is free."""

import signal

import pytest

from jaxrl_llm.run import folder
from jaxrl_llm.run.stopping import Stopped


def test_who_waits_for_a_lock_says_so_once_and_stops_on_a_signal(tmp_path, capsys):
    signals = iter([0, 0, signal.SIGTERM, signal.SIGTERM])
    file = tmp_path / "base.lock"
    with folder.lock(file):
        with pytest.raises(Stopped) as stopped, folder.lock(file, lambda: next(signals)):
            pass
        assert stopped.value.exit_code == 143
        with pytest.raises(ValueError, match="is in use by process"), folder.lock(file):
            pass
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path / 'base'} is being made by process ")
    with folder.lock(file, lambda: 0):
        pass
