"""curves.png is drawn, at its size, from whatever a log holds. Ink in a panel is counted in pixels of its colour."""

import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from jaxrl_llm.reports import curves as report
from jaxrl_llm.reports.curves import draw

METRICS = {
    "accuracy": 0.4,
    "eval/accuracy": 0.5,
    "reward/mean": 0.3,
    "length/mean": 30.0,
    "length/correct": 28.0,
    "length/wrong": 35.0,
    "entropy": 0.2,
    "gap/mean": 1e-7,
    "gap/max": 1e-5,
    "grad_norm": 0.5,
    "clip/low": 0.01,
    "clip/high": 0.02,
    "perf/step_s": 1.0,
}
# Inside of the panels, in pixels (rows, columns).
PANELS = {
    "accuracy": np.s_[110:345, 70:390],
    "reward": np.s_[110:345, 465:785],
    "length": np.s_[110:345, 860:1180],
    "entropy": np.s_[420:652, 70:390],
    "gap": np.s_[420:652, 465:785],
    "norm": np.s_[420:507, 860:1180],
    "clip": np.s_[565:652, 860:1180],
}
OF_PANEL = {
    "accuracy": ("accuracy", report.BLUE),
    "eval/accuracy": ("accuracy", report.ORANGE),
    "reward/mean": ("reward", report.BLUE),
    "length/mean": ("length", report.BLUE),
    "length/correct": ("length", report.GREEN),
    "length/wrong": ("length", report.RED),
    "entropy": ("entropy", report.BLUE),
    "gap/mean": ("gap", report.BLUE),
    "gap/max": ("gap", report.ORANGE),
    "grad_norm": ("norm", report.BLUE),
    "clip/low": ("clip", report.BLUE),
    "clip/high": ("clip", report.ORANGE),
}


def drawn(folder, rows, title=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = draw(folder, title)
    assert path == folder / "curves.png"
    picture = np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int)
    assert picture.shape == (700, 1200, 3)
    return picture


def ink(picture, panel, color):
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(picture[PANELS[panel]] - rgb).max(-1) <= 6).sum())


def run(n):
    """`n` steps of noise around METRICS, evaluated at most 40 times."""
    rng = np.random.default_rng(0)
    rows = [{"step": s + 1, **{k: v * float(np.exp(rng.normal(0, 0.2))) for k, v in METRICS.items()}} for s in range(n)]
    for i, row in enumerate(rows):
        if i % -(-n // 40):
            del row["eval/accuracy"]
    return rows


@pytest.mark.parametrize("n", [1, 2, 40, 10_000])
def test_every_metric_shows_in_its_panel(tmp_path, n):
    picture = drawn(tmp_path, run(n))
    for name, (panel, color) in OF_PANEL.items():
        assert ink(picture, panel, color) > (4 if n == 1 else 60), name


@pytest.mark.parametrize("name", OF_PANEL)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_metric_that_was_not_recorded_is_left_out(tmp_path, name, how):
    rows = run(12)
    for row in rows:
        row.pop(name)
        if how == "null":
            row[name] = None
    picture = drawn(tmp_path, rows)
    for other, (panel, color) in OF_PANEL.items():
        assert (ink(picture, panel, color) > 0) == (other != name), other


def test_an_empty_log_and_one_cut_off_in_a_line_are_drawn(tmp_path):
    empty = drawn(tmp_path, [])
    assert all(ink(empty, panel, color) == 0 for panel, color in OF_PANEL.values())
    assert (empty[PANELS["gap"]] < 200).any()  # "not recorded"
    with open(tmp_path / "metrics.jsonl", "w") as f:
        f.write('{"step": 1, "entropy": 0.5}\n{"step": 2, "entr')
    picture = matplotlib.image.imread(draw(tmp_path))[..., :3] * 255
    assert ink(picture, "entropy", report.BLUE) > 4


def test_no_log_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        draw(tmp_path)


@pytest.mark.parametrize("zeros", ["some", "all"])
def test_a_gap_of_zero_is_drawn_on_the_log_axis(tmp_path, zeros):
    rows = [{"step": s, "gap/mean": 0.0 if zeros == "all" or s > 15 else 1e-7, "gap/max": 0.0} for s in range(1, 31)]
    picture = drawn(tmp_path, rows)
    assert ink(picture, "gap", report.ORANGE) > 200  # the maximum, all along the axis' 0
    if zeros == "some":
        rows_with_blue = np.flatnonzero((np.abs(picture[PANELS["gap"]] - [0x2F, 0x6B, 0xD8]).max(-1) <= 6).any(1))
        assert np.ptp(rows_with_blue) > 50  # 1e-7 and 0 are far apart


def test_evaluations_on_lines_of_their_own_are_drawn_at_their_step(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    rows += [{"step": s, "accuracy": 0.2} for s in range(1, 101)] + [{"step": 100, "eval/accuracy": 0.9}]
    picture = drawn(tmp_path, rows)
    orange = np.abs(picture[PANELS["accuracy"]] - [0xE8, 0x82, 0x0C]).max(-1) <= 6
    where = np.argwhere(orange)
    left, right = where[where[:, 1].argmin()], where[where[:, 1].argmax()]
    assert left[1] < 20
    assert right[1] > 300
    assert right[0] < left[0] - 100  # 90% is higher up than 10%


def test_smoothing_keeps_constants_bridges_gaps_and_leaves_short_runs_alone():
    values = np.full(400, 3.0)
    values[50], values[200:300] = np.nan, np.nan
    smooth = report._smooth(values)
    np.testing.assert_allclose(smooth[np.isfinite(smooth)], 3.0, rtol=1e-9)
    assert np.isfinite(smooth[50])
    assert np.isnan(smooth[220:280]).all()
    ramp = np.arange(400.0)
    np.testing.assert_allclose(report._smooth(ramp)[30:370], ramp[30:370], rtol=1e-9)  # centred: no lag
    noisy = np.random.default_rng(0).normal(size=4000)
    assert report._smooth(noisy).std() < 0.15
    np.testing.assert_array_equal(report._smooth(ramp[:30]), ramp[:30])


def test_the_title_is_the_folder_s_name_unless_given(tmp_path):
    header = np.s_[10:50, :]
    folders = [tmp_path / name for name in ("countdown", "other")]
    for folder in folders:
        folder.mkdir()
    named, other = (drawn(folder, run(3))[header] for folder in folders)
    given = drawn(folders[1], run(3), "countdown")[header]
    np.testing.assert_array_equal(named, given)
    assert (named != other).any()


def test_drawing_the_same_log_gives_the_same_bytes(tmp_path):
    drawn(tmp_path, rows := run(20))
    first = (tmp_path / "curves.png").read_bytes()
    drawn(tmp_path, rows)
    assert (tmp_path / "curves.png").read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_pyplot_and_its_global_state_are_not_loaded(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "entropy": 0.5}\n')
    code = (
        "import sys, pathlib; from jaxrl_llm.reports.curves import draw; draw(pathlib.Path(sys.argv[1]));"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
