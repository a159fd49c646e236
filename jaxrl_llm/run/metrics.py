"""Where metrics go: JSON lines and TensorBoard, one line a step on the terminal, a progress bar, two clocks.

Metrics are one flat dict of floats, names grouped by slashes. Whatever depends on the wall clock or on the process
begins with `perf/`, so two runs of one config agree on all the other names.

reward/mean reward/std                     of the responses' values
accuracy eval/accuracy                     fraction correct, of the rollouts and of held-out problems
groups/all_correct groups/all_wrong        fraction of the groups that teach nothing
groups/sampled groups/stale                groups answered for this batch; groups dropped as too old
length/mean /max /correct /wrong           tokens; NaN where no response is correct, or none is wrong
length/accepted /rejected                  tokens, of groups that the filter kept and of the others
staleness/mean /max                        updates between the weights that drew a token and those that learn from it
truncated                                  fraction of responses cut at the token limit
entropy kl/old kl/ref                      nats per token
clip/low clip/high                         fraction of tokens without gradient because of a bound on the ratio
ratio/mean ratio/max                       π/π_old per token
gap/mean gap/max                           |p_learner − p_sampler| of the drawn tokens
loss grad_norm                             of the optimiser step
lr                                         of the last optimiser step that was applied
skipped                                    fraction of the batch's optimiser steps that changed nothing
perf/{rollout,train}_tokens_per_s          tokens per second of drawing answers, and of that stage
perf/{rollout,reward,train,eval,checkpoint,step}_s   seconds
perf/sampling_s                            seconds of drawing in the background; perf/rollout_s is the wait for it
perf/compilations                          XLA compilations since the process began
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.monitoring
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

_COMPILED = "/jax/core/compile/backend_compile_duration"
_compile_seconds: list[float] = []  # a list, because append is atomic and compilations may come from several threads


def _count(event: str, seconds: float, **_: Any) -> None:
    if event == _COMPILED:
        _compile_seconds.append(seconds)


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """XLA compilations of this process since this module was imported; one read from jax's disk cache counts too."""
    return len(_compile_seconds)


# --- files ------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """`value` as strict JSON: arrays and NumPy scalars become lists and numbers; NaN and infinities become None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
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
        row = json.loads(line)
    except ValueError:  # kill -9 in the middle of a write
        return False
    return isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step


def _truncate(path: Path, step: int) -> None:
    """Keep the whole lines of steps ≤ `step`: those after the checkpoint will be written again."""
    temporary = path.with_name(path.name + ".tmp")
    with open(path, "rb") as old, open(temporary, "wb") as new:
        new.writelines(line.rstrip(b"\r\n") + b"\n" for line in old if _is_of_step_up_to(step, line))
        new.flush()
        os.fsync(new.fileno())  # or a power cut could leave an empty file under the old name
    os.replace(temporary, path)


class _EventFile:
    """A TensorBoard event file, written by the caller's own thread: a full disk is an error of the caller."""

    def __init__(self, folder: Path, resume_step: int | None):
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("events.out.tfevents.*") if resume_step is None else ():
            stale.unlink()
        # Event files are named after the second they begin in: the suffix keeps a quick resume from overwriting one.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if resume_step is not None:  # TensorBoard hides what earlier files have from here on
            self._add(resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, step: int, **event: Any) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, **event))

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(step, summary=Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: the last step was not written", str(path)) from error


class RunLog:
    """Appends to metrics.jsonl, samples.jsonl and tensorboard/ in the run's folder; a context manager.

    resume_step k: what was logged up to step k stays, later lines and a half-written one go. None: the files of an
    earlier run in that folder are replaced.
    """

    def __init__(self, out: Path, resume_step: int | None, tensorboard: bool = True):
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        self._folder, paths = out, (out / "metrics.jsonl", out / "samples.jsonl")
        for path in paths:
            if resume_step is not None and path.exists():
                _truncate(path, resume_step)
        mode = "w" if resume_step is None else "a"
        self._metrics, self._samples = (open(p, mode, encoding="utf-8") for p in paths)  # noqa: SIM115 — see close()
        self._tensorboard = _EventFile(out / "tensorboard", resume_step) if tensorboard else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line {"step": step, name: value, …}; a value that is not finite becomes null, and no TensorBoard point.

        Raises ValueError on a value that is no number, or on a metric called "step".
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._write(self._metrics, _line(step, numbers))
        if self._tensorboard is not None:
            with _naming(self._folder / "tensorboard"):
                self._tensorboard.scalars(int(step), {k: v for k, v in numbers.items() if math.isfinite(v)})

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """One line {"step": step, **row} per row."""
        self._write(self._samples, "".join(_line(step, row) for row in rows))

    def _write(self, file: Any, lines: str) -> None:
        with _naming(Path(file.name)):
            file.write(lines)
            file.flush()

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._tensorboard):
            with suppress(OSError):  # of lines of which an earlier error has said that they are not written
                if file is not None:
                    file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# --- the terminal -----------------------------------------------------------------------------------------------


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
        f"len {_cell(get('length/mean'), 6, '.1f')}"
        f" (ok {_cell(get('length/correct'), 6, '.1f')} / bad {_cell(get('length/wrong'), 6, '.1f')})",
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
        self._bar = _bar(total, description) if sys.stdout.isatty() else None

    def line(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, n: int = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], n)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(total: int, description: str) -> Any:
    from rich import progress

    columns = [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    ]
    # Steps take seconds to minutes: the time left has to be guessed from more than rich's last 30 seconds.
    bar = progress.Progress(*columns, speed_estimate_period=1800)
    bar.add_task(description, total=total)
    return bar


# --- time -------------------------------------------------------------------------------------------------------


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
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def add(self, stage: str, seconds: float) -> None:
        """Correct a stage by what was measured elsewhere."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Stage → seconds since the last `reset`; logged as perf/<stage>_s."""
        return dict(self._seconds)

    def reset(self) -> None:
        self._seconds.clear()
