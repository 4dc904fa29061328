"""The rule against its plain-Python twin, over thousands of random states at once."""

import numpy as np
import pytest
from mindspore import Tensor
from mindspore import dtype as mstype

from cells.scale_rule import LossScaleRule, next_loss_scale
from tests.oracles import DynamicScale

LARGEST = float(np.finfo(np.float32).max)


def rule_on_arrays(scales, overflow, full, factor, backoff, floor, ceiling, dtype=mstype.float32):
    result = next_loss_scale(
        Tensor(scales),
        Tensor(overflow),
        Tensor(full),
        Tensor(factor, dtype),
        Tensor(backoff, dtype),
        Tensor(floor, mstype.float32),
        Tensor(ceiling, mstype.float32),
    )
    return result.asnumpy()


@pytest.mark.parametrize("factor", [1, 2, 3, 1.1, 1000])
@pytest.mark.parametrize(("floor", "ceiling"), [(1.0, LARGEST), (2.0**-20, 65504.0), (1e-30, 2.0**24)])
def test_rule_equals_plain_python(factor, floor, ceiling):
    rng = np.random.default_rng(0)
    scales = (2.0 ** rng.uniform(-60, 127.99, 3000)).astype(np.float32)
    overflow, full = rng.integers(0, 2, (2, 3000)).astype(bool)
    backoff = float(np.float32(1) / np.float32(factor))
    got = rule_on_arrays(scales, overflow, full & ~overflow, factor, backoff, floor, ceiling)
    for scale, over, window_is_full, value in zip(scales, overflow, full, got):
        twin = DynamicScale(scale, factor, window=1 if window_is_full else 2, floor=floor, ceiling=ceiling)
        assert twin.step(over) == value


def test_growth_stops_before_inf():
    got = rule_on_arrays(np.array([2.0**126, 2.0**127], np.float32), [False] * 2, [True] * 2, 2, 0.5, 1, LARGEST)
    assert got.tolist() == [2.0**127, 2.0**127]


def test_overflow_never_enlarges_a_scale_below_the_floor():
    got = rule_on_arrays(np.array([0.25, 1.5], np.float32), [True] * 2, [False] * 2, 2, 0.5, 1, LARGEST)
    assert got.tolist() == [0.25, 1.0]


def test_growth_never_shrinks_a_scale_above_the_ceiling():
    got = rule_on_arrays(np.array([4096.0, 600.0], np.float32), [False] * 2, [True] * 2, 2, 0.5, 1, 1024.0)
    assert got.tolist() == [4096.0, 1024.0]


def test_float64_factors_round_once():
    scales = np.float32([1.1, 3e5, 7.7e-3])
    got = rule_on_arrays(scales, [False] * 3, [True] * 3, 1.1, 0.5, 1e-30, LARGEST, mstype.float64)
    assert got.tolist() == np.float32(scales.astype(np.float64) * 1.1).tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"scale_factor": 0.5}, ValueError, "factor below 1"),
        ({"scale_factor": float("nan")}, ValueError, "finite"),
        ({"scale_factor": float("inf")}, ValueError, "finite"),
        ({"scale_factor": "2"}, TypeError, "number"),
        ({"scale_factor": True}, TypeError, "number"),
        ({"scale_window": 0}, ValueError, "> 0"),
        ({"scale_window": 2.0}, TypeError, "int"),
        ({"min_loss_scale": 0}, ValueError, "> 0"),
        ({"max_loss_scale": float("inf")}, ValueError, "finite"),
        ({"max_loss_scale": 0.5}, ValueError, "'max_loss_scale' must be >= 'min_loss_scale'"),
        ({"backoff_factor": 1.5}, ValueError, "<= 1"),
        ({"backoff_factor": 0}, ValueError, "> 0"),
        ({"hysteresis": 0}, ValueError, "> 0"),
    ],
)
def test_bad_numbers_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        LossScaleRule.checked("Owner", **{"scale_factor": 2, "scale_window": 10, **arguments})


@pytest.mark.parametrize(("start", "expected"), [(0.5, 4.0), (1e6, 1024.0)])
def test_start_outside_the_limits_is_clamped_with_a_warning(start, expected):
    rule = LossScaleRule.checked("Owner", 2, 10, min_loss_scale=4.0, max_loss_scale=1024.0)
    with pytest.warns(UserWarning, match="outside the limits"):
        assert rule.clamp("loss_scale_value", start, "Owner") == expected
