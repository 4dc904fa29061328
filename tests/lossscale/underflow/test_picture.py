"""The picture of gradients: written and not blank, and each bar where its values fall."""

import numpy as np
import pytest
from mindspore import Tensor

from lossscale import find_loss_scale
from lossscale.underflow.picture import gradients_figure
from tests.lossscale.underflow.test_find import Halved
from tests.pictures import assert_picture

EXPONENTS = [-40, -30, -27, -26, -25, -20, -10, -4]


def test_the_picture_is_written_and_not_blank(tmp_path):
    report = find_loss_scale(Halved(EXPONENTS), None, Tensor(np.ones(8, np.float32)), progress=False)
    assert_picture(report.plot(tmp_path / "gradients.png"))


def test_histogram_shows_where_each_value_falls():
    report = find_loss_scale(Halved(EXPONENTS), None, Tensor(np.ones(8, np.float32)), progress=False)
    for panel, shift in zip(gradients_figure(report.total, report.recommended).axes, (0, 17)):
        bars = sorted((b.get_x() + b.get_width() / 2 - 0.5, b.get_height(), b.get_hatch() or "") for b in panel.patches)
        bars = [bar for bar in bars if bar[1] == pytest.approx(12.5)]
        assert [bar[0] for bar in bars] == pytest.approx([e + shift for e in EXPONENTS])
        assert [bar[2] for bar in bars] == ["////" if e + shift < -24 else "" for e in EXPONENTS]
