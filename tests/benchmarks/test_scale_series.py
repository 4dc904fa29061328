"""The scale series against PyTorch itself, where it is installed."""

import numpy as np
import pytest

from benchmarks import scale_series
from tests.oracles import TorchScale


def test_series_equal_those_of_pytorch():
    pytest.importorskip("torch", reason="PyTorch is not installed; `make bench` compares with it")
    assert scale_series.count_differences(20) == 0


def test_our_series_equal_the_plain_python_rule():
    rng = np.random.default_rng(1)
    for _ in range(10):
        settings, overflows = scale_series.random_case(rng)
        oracle, expected = TorchScale(*settings), []
        for overflow in overflows:
            oracle.update(overflow)
            expected.append(float(oracle.scale))
        assert scale_series.our_series(settings, overflows) == expected
