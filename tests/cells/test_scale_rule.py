"""The rule against its plain-Python twin, over thousands of random states at once."""

import numpy as np
import pytest
from mindspore import Tensor
from mindspore import dtype as mstype

from cells.native import library_path
from cells.scale_rule import LARGEST_INT32, LossScaleRule, advance, next_loss_scale
from tests.kernel_calls import many_updates
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


def random_histories(count, steps, seed=0):
    """A rule and a state for each of many histories, and their overflows; many near the ends of float32 and int32."""
    rng = np.random.default_rng(seed)
    limits = np.sort(2.0 ** rng.uniform(-126, 127.9, (2, count)), axis=0)
    floats = [rng.choice([1, 2, 3, 1.1, 1000, 2.0**126], count), rng.choice([0.5, 0.25, 0.7, 1, 2.0**-126], count)]
    window = rng.choice([1, 2, 3, 5, LARGEST_INT32 - 1, LARGEST_INT32], count)
    hysteresis = rng.choice([1, 2, 3, LARGEST_INT32], count)
    rule = [x.astype(np.float32) for x in (*floats, *limits)] + [n.astype(np.int32) for n in (window, hysteresis)]
    scale = (2.0 ** rng.uniform(-126, 127.99, count)).astype(np.float32)
    counts = [rng.choice([0, 0, 1, LARGEST_INT32 - 3, LARGEST_INT32], count).astype(np.int32) for _ in range(4)]
    return rule, scale, counts, rng.integers(0, 2, (steps, count)).astype(bool)


@pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")
def test_the_native_twin_equals_the_rule_over_10000_histories():
    rule, scale, (last, in_a_row, total, _), overflows = random_histories(10_000, 30)
    step = np.maximum(last, 1).astype(np.int32)
    last = np.maximum(step.astype(np.int64) - 1 - np.roll(last, 1), -1).astype(np.int32)
    native = [each.copy() for each in (scale, step, last, in_a_row, total)]
    tensors = [Tensor(each) for each in rule]
    state = Tensor(scale), Tensor(step - 1 - last), Tensor(in_a_row)
    for overflow in overflows:
        state = advance(tensors, *state, Tensor(overflow))
        many_updates(overflow, rule, native)
        clean = native[1].astype(np.int64) - 1 - native[2]
        for ours, twin in zip(state, (native[0], clean, native[3])):
            np.testing.assert_array_equal(ours.asnumpy(), twin)
    assert (np.stack(native[1:]) >= -1).all()


def test_advance_equals_plain_python_over_whole_histories():
    rule, scale, _, overflows = random_histories(200, 30, seed=1)
    twins = [
        DynamicScale(s, r[0], r[4], r[2], r[3], r[1], r[5]) for s, *r in zip(scale, *(each.tolist() for each in rule))
    ]
    zeros = Tensor(np.zeros(200, np.int32))
    state = Tensor(scale), zeros, zeros
    for overflow in overflows:
        state = advance([Tensor(each) for each in rule], *state, Tensor(overflow))
        wanted = [twin.step(over) for twin, over in zip(twins, overflow)]
        assert state[0].asnumpy().tolist() == wanted
        assert state[1].asnumpy().tolist() == [twin.current - 1 - twin.last for twin in twins]
        assert state[2].asnumpy().tolist() == [twin.in_a_row for twin in twins]


@pytest.mark.parametrize(("window", "grows"), [(LARGEST_INT32 - 1, True), (LARGEST_INT32, False), (10**30, False)])
def test_counters_stop_at_the_end_of_int32(window, grows):
    rule = LossScaleRule.checked("Owner", 2, window, hysteresis=LARGEST_INT32).tensors()
    state = [Tensor(value) for value in (np.float32(8), np.int32(LARGEST_INT32 - 3), np.int32(LARGEST_INT32 - 2))]
    clean = [advance(rule, *state, Tensor(False))]
    for _ in range(2):
        clean.append(advance(rule, *clean[-1], Tensor(False)))
    assert [float(scale) for scale, _, _ in clean] == ([8, 16, 16] if grows else [8, 8, 8])
    bad = [advance(rule, *state, Tensor(True))]
    bad.append(advance(rule, *bad[-1], Tensor(True)))
    assert [(float(scale), int(count)) for scale, _, count in bad] == [(8, LARGEST_INT32 - 1), (4, LARGEST_INT32)]
    assert int(advance(rule, *bad[-1], Tensor(True))[2]) == LARGEST_INT32


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
        ({"backoff_factor": 1e-50}, ValueError, "as a float32"),
        ({"scale_factor": 1e38}, ValueError, "reciprocal"),
        ({"scale_factor": 10**400}, ValueError, "finite"),
        ({"scale_factor": None}, TypeError, "number"),
        ({"min_loss_scale": 10**400}, ValueError, "finite"),
        ({"hysteresis": 0}, ValueError, "> 0"),
        ({"hysteresis": 2**31}, ValueError, "at most 2"),
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
