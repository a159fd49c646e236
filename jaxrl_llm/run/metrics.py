"""Where metrics go: JSON lines and TensorBoard, one line a step on the terminal, a progress bar, a stopwatch.

Metrics are one flat dict of floats, names grouped by slashes. Whatever depends on the wall clock or on the process
begins with `perf/`, so two runs of one config agree on all the other names. docs/runs.md says what names
mean, corrections.py and critic.py what the rest of gap/ and critic/ is.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import jax.monitoring
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxrl_llm.run import folder

_compile_seconds: list[float] = []  # a list, because append is atomic and compilations may come from several threads


def _count(event: str, seconds: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compile_seconds.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """XLA compilations of this process since this module was imported; one read from jax's disk cache counts too."""
    return len(_compile_seconds)


def _plain(value: Any) -> Any:
    """`value` as strict JSON: arrays and NumPy scalars become lists and numbers; NaN and infinities become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    raise ValueError(f"cannot log {value!r} of type {type(value).__name__}: expected numbers, strings, lists or dicts")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name!r} is {value!r}: expected a number") from None


def _line(step: int, row: Mapping[str, Any]) -> str:
    if "step" in row:
        raise ValueError(f"a logged row has a key 'step' of its own ({row['step']!r}): expected only other names")
    return json.dumps({"step": int(step), **_plain(row)}, allow_nan=False) + "\n"


def _is_of_step_up_to(step: int, line: bytes) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, TypeError, KeyError):  # kill -9 in the middle of a write
        return False


def _opened(path: Path, resume_step: int | None) -> TextIO:
    if resume_step is not None and path.exists():  # later lines will be written again
        lines = [line for line in path.read_bytes().splitlines() if _is_of_step_up_to(resume_step, line)]
        folder.write_whole(path, "".join(line.decode() + "\n" for line in lines))
    return open(path, "w" if resume_step is None else "a", encoding="utf-8")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: the last step was not written", str(path)) from error


class RunLog(AbstractContextManager):
    """Appends to metrics.jsonl, samples.jsonl and tensorboard/ in the run's folder; a context manager.

    resume_step k: what was logged up to step k stays, later lines and a half-written one go. None: the files of an
    earlier run in that folder are replaced.
    """

    def __init__(self, out: Path, resume_step: int | None):
        self._events_folder = out / "tensorboard"
        self._events_folder.mkdir(parents=True, exist_ok=True)
        self._metrics, self._samples = (_opened(out / f"{name}.jsonl", resume_step) for name in ("metrics", "samples"))
        for stale in self._events_folder.glob("events.out.tfevents.*") if resume_step is None else ():
            stale.unlink()
        # Not a SummaryWriter, whose thread ends at the first error and whose queue then blocks its caller for ever.
        # An event file is named after the second it begins in: the suffix keeps a quick resume from overwriting one.
        self._events = EventsWriter(str(self._events_folder / "events"), f".{time.time_ns()}")
        if resume_step is not None:  # TensorBoard hides what earlier files have from here on
            self._add_event(resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add_event(self, step: int, **event: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **event))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line {"step": step, name: value, …}; a value that is not finite becomes null, and no TensorBoard point.

        Raises ValueError on a value that is no number, or on a metric called "step".
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._write(self._metrics, _line(step, numbers))
        finite = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items() if math.isfinite(v)]
        with _naming(self._events_folder):
            self._add_event(int(step), summary=Summary(value=finite))
            self._events.flush()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """One line {"step": step, **row} per row."""
        self._write(self._samples, "".join(_line(step, row) for row in rows))

    def _write(self, file: TextIO, lines: str) -> None:
        with _naming(Path(file.name)):
            file.write(lines)
            file.flush()

    def __exit__(self, *_: Any) -> None:
        for file in (self._metrics, self._samples, self._events):
            with suppress(OSError):  # of lines of which an earlier error has said that they are not written
                file.close()


def _cell(value: float | None, width: int, spec: str) -> str:
    """`value` right-aligned in `width` characters: '-' if undefined, one digit and an exponent if it does not fit."""
    if value is None or not math.isfinite(value):
        return "-".rjust(width)
    text = format(float(value), spec)
    return (text if len(text) <= width else format(float(value), ".0e")).rjust(width)


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """One step for a person, in columns that stay where they are from step to step; '-' for what is undefined."""
    get = lambda name: metrics.get(name, math.nan)
    bounds = [v for v in map(get, ("clip/low", "clip/high")) if v is not None and math.isfinite(v)]
    columns = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"reward {_cell(get('reward/mean'), 6, '.2f')}",
        f"acc {_cell(get('accuracy'), 6, '.1%')}",
        f"len {_cell(get('length/mean'), 6, '.1f')} (ok {_cell(get('length/correct'), 6, '.1f')}"
        f" / bad {_cell(get('length/wrong'), 6, '.1f')})",
        f"entropy {_cell(get('entropy'), 5, '.2f')}",
        f"kl {_cell(get('kl/old'), 6, '.3f')}",
        f"clip {_cell(sum(bounds) if bounds else math.nan, 6, '.1%')}",
        f"gap {_cell(get('gap/mean'), 5, '.0g')}",
        f"grad {_cell(get('grad_norm'), 6, '.2f')}",
        f"{_cell(get('perf/step_s'), 6, '.1f')}s",
    ]
    if get("skipped") > 0:
        columns.append(f"skipped {get('skipped'):.0%}")
    return "  ".join(columns)


class Progress:
    """Lines, and below them on a terminal a bar with the time left; a pipe gets the plain lines alone, each flushed.

    with Progress(100, "train") as progress:
        progress.line("step 1 …")
        progress.advance()
    """

    def __init__(self, total: int, description: str):
        from rich import progress as rich

        left = (rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn())
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), *left)
        # Steps take seconds to minutes: the time left has to be guessed from more than rich's last 30 seconds.
        self._bar = rich.Progress(*columns, speed_estimate_period=1800, disable=not sys.stdout.isatty())
        self._task = self._bar.add_task(description, total=total)

    def line(self, text: str) -> None:
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, n: int = 1) -> None:
        self._bar.advance(self._task, n)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()


class Stopwatch:
    """Seconds per stage, summed over its visits: `with watch("rollout"): …`.

    jax returns before a device has finished: what a stage computes must be waited for inside it.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - start)

    def add(self, stage: str, seconds: float) -> None:
        """Correct a stage by what was measured elsewhere."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Stage → seconds; logged as perf/<stage>_s."""
        return dict(self._seconds)
