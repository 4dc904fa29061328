"""Pictures: written and not blank, and what is drawn is what was recorded."""

import sys

import numpy as np
import pytest

from lossscale import LossScaleMonitor, plot_history
from lossscale.monitor.picture import history_figure
from tests.pictures import assert_picture

STEPS = [(0.9, True, 512.0), (0.8, False, 512.0), (float("nan"), True, 256.0), (0.5, False, 512.0)]


def record(path=None):
    with LossScaleMonitor(path, progress=False, verbose=False).start() as monitor:
        for outputs in STEPS:
            monitor.step(outputs)
    return monitor.history


def test_history_is_drawn_as_recorded():
    top, bottom = history_figure(record()).axes
    np.testing.assert_array_equal(top.lines[0].get_xydata(), [(1, 0.9), (2, 0.8), (4, 0.5)])
    scale, marks = bottom.lines
    np.testing.assert_array_equal(scale.get_xydata(), [(1, 512), (2, 512), (3, 512), (4, 256), (5, 512)])
    np.testing.assert_array_equal(marks.get_xydata(), [(1, 512), (3, 512)])
    assert (bottom.get_yscale(), bottom.yaxis.get_transform().base) == ("log", 2)
    assert (top.get_ylabel(), bottom.get_ylabel(), bottom.get_xlabel()) == ("loss", "loss scale (log2)", "step")


def test_a_picture_is_written_and_not_blank(tmp_path):
    record(tmp_path / "run.jsonl")
    assert_picture(plot_history(tmp_path / "run.jsonl", tmp_path / "new" / "run.png"))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'A picture needs matplotlib: pip install "lossscale\[plot\]"'):
        plot_history(record(), tmp_path / "run.png")


def test_an_empty_history_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no record"):
        plot_history([], tmp_path / "run.png")


def test_the_path_that_was_written_comes_back(tmp_path):
    for name, written in (("picture", "picture.png"), ("picture.svg", "picture.svg"), ("v1.5", "v1.5.png")):
        path = plot_history(record(), tmp_path / name)
        assert path == tmp_path / written
        assert path.stat().st_size > 5000


def test_a_picture_does_not_replace_its_history_or_a_folder(tmp_path):
    path = tmp_path / "run.png"
    record(path)
    content = path.read_bytes()
    for picture in (path, tmp_path / "run", tmp_path / ".." / tmp_path.name / "run.png"):
        with pytest.raises(ValueError, match=r"run\.png would replace the history"):
            plot_history(path, picture)
    with pytest.raises(ValueError, match="is a folder: name a picture in it"):
        plot_history(path, tmp_path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
