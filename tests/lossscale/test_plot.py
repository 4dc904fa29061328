"""Pictures: written and not blank, and what is drawn is what was recorded."""

import sys

import numpy as np
import pytest
from mindspore import Tensor

from lossscale import LossScaleMonitor, find_loss_scale, plot_history
from lossscale.plot import gradients_figure, history_figure
from tests.lossscale.test_find_loss_scale import Halved

STEPS = [(0.9, True, 512.0), (0.8, False, 512.0), (float("nan"), True, 256.0), (0.5, False, 512.0)]
EXPONENTS = [-40, -30, -27, -26, -25, -20, -10, -4]


def record(path=None):
    with LossScaleMonitor(path, progress=False, verbose=False).start() as monitor:
        for outputs in STEPS:
            monitor.step(outputs)
    return monitor.history


def picture(path):
    from matplotlib.image import imread

    return imread(path)


def test_history_is_drawn_as_recorded():
    top, bottom = history_figure(record()).axes
    np.testing.assert_array_equal(top.lines[0].get_xydata(), [(1, 0.9), (2, 0.8), (4, 0.5)])
    scale, marks = bottom.lines
    np.testing.assert_array_equal(scale.get_xydata(), [(1, 512), (2, 512), (3, 512), (4, 256), (5, 512)])
    np.testing.assert_array_equal(marks.get_xydata(), [(1, 512), (3, 512)])
    assert (bottom.get_yscale(), bottom.yaxis.get_transform().base) == ("log", 2)
    assert (top.get_ylabel(), bottom.get_ylabel(), bottom.get_xlabel()) == ("loss", "loss scale (log2)", "step")


def test_pictures_are_written_and_not_blank(tmp_path):
    record(tmp_path / "run.jsonl")
    report = find_loss_scale(Halved(EXPONENTS), None, Tensor(np.ones(8, np.float32)), progress=False)
    history = plot_history(tmp_path / "run.jsonl", tmp_path / "new" / "run.png")
    for path in (history, report.plot(tmp_path / "gradients.png")):
        pixels = picture(path)[..., :3]
        assert pixels.shape[0] > 500
        assert pixels.shape[1] > 900
        assert (pixels.min(), pixels.max()) == (0.0, 1.0)
        assert 0.02 < (pixels < 1).any(axis=2).mean() < 0.9


def test_histogram_shows_where_each_value_falls():
    report = find_loss_scale(Halved(EXPONENTS), None, Tensor(np.ones(8, np.float32)), progress=False)
    for panel, shift in zip(gradients_figure(report).axes, (0, 17)):
        bars = sorted((b.get_x() + b.get_width() / 2 - 0.5, b.get_height(), b.get_hatch() or "") for b in panel.patches)
        bars = [bar for bar in bars if bar[1] == pytest.approx(12.5)]
        assert [bar[0] for bar in bars] == pytest.approx([e + shift for e in EXPONENTS])
        assert [bar[2] for bar in bars] == ["////" if e + shift < -24 else "" for e in EXPONENTS]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'A picture needs matplotlib: pip install "lossscale\[plot\]"'):
        plot_history(record(), tmp_path / "run.png")


def test_an_empty_history_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no record"):
        plot_history([], tmp_path / "run.png")
