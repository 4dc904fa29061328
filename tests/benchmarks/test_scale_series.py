"""The scale series against PyTorch itself, where it is installed."""

import json
import sys

import numpy as np
import pytest

from benchmarks import scale_series
from tests.oracles import TorchScale


def test_series_equal_those_of_pytorch():
    pytest.importorskip("torch", reason="PyTorch is not installed; `make bench` compares with it")
    cases = scale_series.random_cases(20)
    series = [scale_series.our_series(*case) for case in cases]
    assert scale_series.count_differences(series, [scale_series.torch_series(*case) for case in cases]) == 0


def test_a_written_series_is_read_back_to_the_bit(tmp_path, monkeypatch):
    out = tmp_path / "ours.json"
    monkeypatch.setattr(sys, "argv", ["scale_series", "--count", "3", "--out", str(out)])
    scale_series.main()
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["cases"] == [list(map(list, case)) for case in scale_series.random_cases(3)]
    series = [scale_series.our_series(*case) for case in written["cases"]]
    assert scale_series.count_differences(written["series"], series) == 0
    series[1][5] = np.nextafter(series[1][5], 0)
    assert scale_series.count_differences(written["series"], series) == 1


def test_our_series_equal_the_plain_python_rule():
    rng = np.random.default_rng(1)
    for _ in range(10):
        settings, overflows = scale_series.random_case(rng)
        oracle, expected = TorchScale(*settings), []
        for overflow in overflows:
            oracle.update(overflow)
            expected.append(float(oracle.scale))
        assert scale_series.our_series(settings, overflows) == expected
