"""Logs that survive a crash, strict JSON, lines fit for a pipe, and the two clocks."""

import json
import math
import os
import pty
import select
import struct
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxrl_llm.run.metrics import Progress, RunLog, Stopwatch, compilations, step_line


def lines(path):
    reject = lambda name: pytest.fail(f"{name} is no JSON")
    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def events(folder):
    """All events of a TensorBoard folder: records of length (8 bytes), its checksum (4), data, its checksum (4)."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def scalars(folder):
    return [(e.step, v.tag, round(v.simple_value, 6)) for e in events(folder) for v in e.summary.value]


# --- files ------------------------------------------------------------------------------------------------------


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    with RunLog(tmp_path, None) as log:
        log.log(1, {"reward/mean": 0.25, "accuracy": 1})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.25, "accuracy": 1.0}]
        log.samples(1, [{"text": "a\nb"}, {"text": "ü"}])
        assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "text": "a\nb"}, {"step": 1, "text": "ü"}]


def test_json_is_strict_and_takes_array_scalars(tmp_path):
    with RunLog(tmp_path, None) as log:
        log.log(np.int64(3), {"a": math.nan, "b": np.float32("inf"), "c": jnp.float32(0.5), "d": np.float64("-inf")})
        log.samples(3, [{"parts": {"x": math.nan, "y": [np.int32(2), -math.inf]}, "n": np.arange(2), "ok": np.True_}])
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, "a": None, "b": None, "c": 0.5, "d": None}]
    row = {"step": 3, "parts": {"x": None, "y": [2, None]}, "n": [0, 1], "ok": True}
    assert lines(tmp_path / "samples.jsonl") == [row]


def test_what_is_no_number_is_refused_by_name_and_leaves_no_line(tmp_path):
    with RunLog(tmp_path, None) as log:
        with pytest.raises(ValueError, match="'accuracy' is 'high'"):
            log.log(1, {"loss": 0.0, "accuracy": "high"})
        with pytest.raises(ValueError, match="'step'"):
            log.log(1, {"step": 2.0})
        with pytest.raises(ValueError, match="type set"):
            log.samples(1, [{"text": "fine"}, {"text": {"a"}}])
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "samples.jsonl").read_text() == ""


@pytest.mark.parametrize("half", ['{"step": 2, "loss": 0.1', "\ud83d", "17", "null", '{"loss": 1.0}'])
def test_resuming_keeps_whole_lines_up_to_the_checkpoint(tmp_path, half):
    kept = '{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.30000000000000004}\n'
    after = '{"step": 3, "loss": 3.0}\n'
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes((kept + after + half).encode("utf-8", "surrogatepass"))
    with RunLog(tmp_path, 2) as log:
        assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "samples.jsonl").read_text() == kept
        log.log(3, {"loss": 4.0})
    assert (tmp_path / "metrics.jsonl").read_text() == kept + '{"step": 3, "loss": 4.0}\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl", "tensorboard"]


def test_resuming_after_a_kill_ends_the_last_whole_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    with RunLog(tmp_path, 1) as log:
        log.log(2, {})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_crash_while_truncating_loses_nothing(tmp_path, monkeypatch):
    text = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunLog(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_a_fresh_run_replaces_the_files_of_an_earlier_one(tmp_path):
    with RunLog(tmp_path, None) as log:
        log.log(1, {"old": 1.0})
        log.samples(1, [{"text": "old"}])
    with RunLog(tmp_path, None) as log:
        log.log(1, {"new": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "new": 1.0}]
    assert (tmp_path / "samples.jsonl").read_text() == ""
    assert scalars(tmp_path / "tensorboard") == [(1, "new", 1.0)]


def test_tensorboard_has_the_finite_scalars_and_a_resume_purges_what_comes_again(tmp_path):
    with RunLog(tmp_path, None) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": step / 10, "length/wrong": math.nan})
    with RunLog(tmp_path, 2) as log:
        log.log(3, {"loss": 0.9})
    assert scalars(tmp_path / "tensorboard") == [(1, "loss", 0.1), (2, "loss", 0.2), (3, "loss", 0.3), (3, "loss", 0.9)]
    starts = [e.step for e in events(tmp_path / "tensorboard") if e.session_log.status == SessionLog.START]
    assert starts == [3]  # TensorBoard hides earlier events of steps ≥ 3


# --- the terminal -----------------------------------------------------------------------------------------------

FULL = {
    "reward/mean": 0.43,
    "accuracy": 0.431,
    "length/mean": 31.24,
    "length/correct": 30.1,
    "length/wrong": 33.0,
    "entropy": 0.21,
    "kl/old": 0.002,
    "clip/low": 0.002,
    "clip/high": 0.01,
    "gap/mean": 3e-7,
    "grad_norm": 0.52,
    "perf/step_s": 1.3,
}


def test_step_line_says_what_was_measured():
    assert " ".join(step_line(12, 100, FULL).split()) == (
        "step 12/100 reward 0.43 acc 43.1% len 31.2 (ok 30.1 / bad 33.0) entropy 0.21 kl 0.002 clip 1.2% gap 3e-07"
        " grad 0.52 1.3s"
    )


def test_step_line_keeps_its_columns_and_shows_a_dash_for_what_is_undefined():
    full = step_line(12, 100, FULL)
    others = [
        {},
        dict.fromkeys(FULL, math.nan),
        dict.fromkeys(FULL, None),
        FULL | {"reward/mean": -1.0, "accuracy": 1.0, "gap/mean": 0.0},
        dict.fromkeys(FULL, 123456.7) | {"accuracy": 0.0, "clip/low": 1.0, "clip/high": 0.0},
        {k: jnp.float32(v) for k, v in FULL.items()},
    ]
    marks = lambda line: [line.index(w) for w in ("reward", "acc", "len", "(ok", "/ bad", "kl", "clip", "gap", "grad")]
    for metrics in others:
        line = step_line(7, 100, metrics)
        assert (len(line), marks(line)) == (len(full), marks(full)), line
    assert step_line(7, 100, {}).count("-") == len(FULL) - 1  # the two clip fractions share a column
    assert "wrong" not in full
    assert "bad      -)" in step_line(7, 100, FULL | {"length/wrong": math.nan})
    assert "clip   1.0%" in step_line(7, 100, {"clip/high": 0.01, "clip/low": math.nan})


SCRIPT = """
import time
from jaxrl_llm.run.metrics import Progress
with Progress(3, "train") as p:
    for i in range(3):
        p.line(f"step {i} [bold]/100 " + "x" * 120)
        p.advance()
        time.sleep({pause})
"""


def test_a_pipe_gets_plain_lines_each_flushed_at_once():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{pause}", "60")], stdout=subprocess.PIPE, env=environment
    )
    ready, _, _ = select.select([process.stdout], [], [], 30)
    process.kill()
    assert ready, "nothing came before the pause after the first line"
    assert process.communicate()[0] == f"step 0 [bold]/100 {'x' * 120}\n".encode()


def test_piped_output_has_no_control_characters():
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{pause}", "0")], capture_output=True, check=True, timeout=60
    )
    assert out.stdout.decode() == "".join(f"step {i} [bold]/100 {'x' * 120}\n" for i in range(3))
    assert out.stderr == b""


def test_a_terminal_gets_a_bar_below_unbroken_lines():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{pause}", "0")], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    data = b""
    try:
        while chunk := os.read(ours, 65536):
            data += chunk
    except OSError:  # Linux: the other end is closed
        pass
    assert process.wait(timeout=60) == 0
    text = data.decode()
    for i in range(3):
        assert f"step {i} [bold]/100 {'x' * 120}" in text  # neither wrapped by rich nor read as its markup
    assert "train" in text
    assert "3/3" in text
    assert "\x1b[" in text


def test_progress_stops_its_bar_when_the_body_raises(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    progress = Progress(2, "train")

    def body():
        with progress:
            assert progress._bar.live.is_started
            progress.advance(2)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        body()
    assert not progress._bar.live.is_started
    assert progress._bar.finished


# --- time -------------------------------------------------------------------------------------------------------


def test_compilations_counts_a_fresh_compilation_and_no_cached_call():
    x, y = jnp.ones(3), jnp.ones(4)
    function = jax.jit(lambda x: 3 * x + 1)
    before = compilations()
    function(x).block_until_ready()
    assert compilations() == before + 1
    function(x).block_until_ready()
    assert compilations() == before + 1
    function(y).block_until_ready()  # another shape
    assert compilations() == before + 2


def test_stopwatch_adds_up_per_stage_also_when_one_raises():
    watch = Stopwatch()
    for _ in range(2):
        with watch("rollout"):
            time.sleep(0.02)

    def train():
        with watch("train"):
            time.sleep(0.01)
            raise KeyError

    with pytest.raises(KeyError):
        train()
    seconds = watch.seconds()
    assert list(seconds) == ["rollout", "train"]
    assert 0.04 <= seconds["rollout"] < 1
    assert 0.01 <= seconds["train"] < 1
    watch.add("rollout", 1.0)
    assert seconds["rollout"] < 1  # what was read stays
