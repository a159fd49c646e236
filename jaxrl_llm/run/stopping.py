"""Ctrl-C and signals: the first lets the step end, the second stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal has ended a run before its last step; --resume goes on with it."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """A function that gives the signal that has come, 0 before. A second signal raises Stopped wherever it finds us."""
    first = 0

    def handler(number: int, _: Any) -> None:
        nonlocal first
        if first:
            raise Stopped(number)
        first = number
        with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(2, b"stopping after this step; once more to stop at once\n")

    before = {n: signal.signal(n, handler) for n in SIGNALS}
    try:
        yield lambda: first
    finally:
        for number, old in before.items():
            signal.signal(number, old)
