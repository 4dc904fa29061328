"""The native kernel against numpy, called directly; through MindSpore in test_backends.py."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.native import library_path
from tests.kernel_calls import NONFINITE, bits, call, multiply, of_bits
from tests.oracles import DynamicScale

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")

LARGEST = float(np.finfo(np.float32).max)
DTYPES = [np.float16, np.float32, np.float64]


def expected(grad, scale):
    """grad / scale by the rule: reciprocal in float64, applied in float32, or in float64 for float64."""
    reciprocal = 1 / np.float64(scale)
    with np.errstate(all="ignore"):
        if grad.dtype == np.float64:
            return grad * reciprocal
        return grad.astype(np.float32) * np.float32(reciprocal)


def assert_same_bits(actual, wanted):
    assert actual.dtype == wanted.dtype
    np.testing.assert_array_equal(actual.view(bits(actual.dtype)), wanted.view(bits(wanted.dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_every_nonfinite_value_at_every_index(dtype):
    for size in range(71):
        clean, dirty = np.ones(size, dtype), np.ones(size, dtype)
        assert multiply("unscale", np.float32(8), [clean, dirty])[1:] == (False, [False, False])
        for index in range(size):
            pattern = NONFINITE[np.dtype(dtype)][index % 6]
            dirty[index] = of_bits(pattern, dtype)
            assert multiply("unscale", np.float32(8), [clean, dirty])[1:] == (True, [False, True])
            dirty[index] = 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", range(6))
def test_flags_every_kind_of_nonfinite_value_in_large_tensors(dtype, kind):
    rng = np.random.default_rng(kind)
    grad = rng.standard_normal(5_000_001).astype(dtype)  # several threads, several blocks
    assert multiply("unscale", np.float32(1024), [grad])[1:] == (False, [False])
    for index in [0, grad.size - 1, 2**15 - 1, 2**15, *rng.integers(0, grad.size, 5)]:
        kept = grad[index]
        grad[index] = of_bits(NONFINITE[np.dtype(dtype)][kind], dtype)
        assert multiply("unscale", np.float32(1024), [grad])[1:] == (True, [True])
        grad[index] = kept


def test_bfloat16_is_flagged_and_unscaled():
    patterns = np.arange(2**16, dtype=np.uint32)
    wanted = expected((patterns << 16).view(np.float32), 2)
    products, overflow, flags = multiply("unscale", np.float32(2), [patterns.astype(np.uint16)], ["bfloat16"])
    assert (overflow, flags) == (True, [True])
    finite = np.isfinite(wanted)
    assert_same_bits(products[0][finite], wanted[finite])
    for pattern in patterns[::17]:
        one = np.full(3, pattern, np.uint16)
        flagged = multiply("unscale", np.float32(2), [one], ["bfloat16"])[1]
        assert flagged == (not finite[pattern])


def test_every_float16_is_unscaled_to_the_bit():
    grad = np.arange(2**16, dtype=np.uint16).view(np.float16)
    (product,), _, _ = multiply("unscale", np.float32(3), [grad])
    finite = np.isfinite(grad)
    assert_same_bits(product[finite], expected(grad, 3)[finite])
    assert not np.isfinite(product[~finite]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-20, 0.7, 1.0, 1000.0, 2.0**24, 2.0**127, 3e38])
def test_values_at_the_limits_are_unscaled_to_the_bit(dtype, scale):
    info = np.finfo(dtype)
    limits = [info.max, -info.max, info.tiny, -info.tiny, info.smallest_subnormal, -info.smallest_subnormal, 0.0, -0.0]
    grad = np.array(limits * 9, dtype)
    scale = np.float32(scale)
    wanted = expected(grad, scale)
    (product,), overflow, flags = multiply("unscale", scale, [grad])
    assert_same_bits(product, wanted)
    assert overflow == (not np.isfinite(wanted).all())
    assert flags == [overflow]


def test_a_finite_gradient_that_unscaling_makes_infinite_is_an_overflow():
    assert multiply("unscale", np.float32(0.5), [np.float32([3e38])])[1:] == (True, [True])


def test_a_large_factor_keeps_float64_gradients_finite():
    (product,), overflow, _ = multiply("multiply", np.float64(1e300), [np.array([2.0])])
    assert (product[0], overflow) == (2e300, False)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_many_tensors_of_mixed_dtypes_in_one_call(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scale = np.float32(2.0 ** data.draw(st.integers(-20, 127)) * data.draw(st.sampled_from([1.0, 1.5, 1.9])))
    shapes = st.lists(st.integers(0, 9), max_size=4)
    grads = [
        np.asarray(rng.standard_normal(shape) * 100).astype(data.draw(st.sampled_from(DTYPES)))
        for shape in data.draw(st.lists(shapes, min_size=1, max_size=12))
    ]
    for grad in grads:
        if grad.size and data.draw(st.booleans()):
            pattern = data.draw(st.sampled_from(NONFINITE[grad.dtype]))
            grad.reshape(-1)[data.draw(st.integers(0, grad.size - 1))] = of_bits(pattern, grad.dtype)
    wanted = [expected(grad, scale) for grad in grads]
    products, overflow, flags, total = multiply("unscale_norm", scale, grads, norm=True)
    assert flags == [not np.isfinite(grad).all() for grad in wanted]
    assert overflow == any(flags)
    for product, grad in zip(products, wanted):
        np.testing.assert_array_equal(product, grad)
    if not overflow:
        squares = sum(float(np.square(grad.astype(np.float64)).sum()) for grad in wanted)
        assert total == pytest.approx(squares, rel=1e-12)


def test_check_looks_without_writing():
    grads = [np.ones(7, np.float16), np.array(np.inf), np.zeros((0, 3), np.float32)]
    overflow, flags, total = np.zeros(1, bool), np.zeros(3, bool), np.zeros(1)
    assert call("check", [*grads, overflow, flags]) == 0
    assert (overflow[0], flags.tolist()) == (True, [False, True, False])
    assert call("check_norm", [grads[0], np.full(2, 1e20, np.float32), overflow, flags[:2], total]) == 0
    assert (overflow[0], total[0]) == (False, pytest.approx(7 + 2e40))


def test_the_sum_of_squares_does_not_overflow_and_does_not_depend_on_threads():
    grad = np.full(5_000_001, 3e20, np.float32)
    total = multiply("unscale_norm", np.float32(1), [grad], norm=True)[3]
    assert total == pytest.approx(grad.size * 9e40)
    assert multiply("unscale_norm", np.float32(1), [grad], norm=True)[3] == total


def test_the_calling_thread_keeps_its_floating_point_mode():
    _, overflow, _ = multiply("unscale", np.float32(2), [np.float32([1e-45, 1e-40])])
    assert not overflow
    assert np.float32(1e-40) * np.float32(1) != 0


def test_bad_calls_are_refused():
    grad, overflow, flags = np.ones(3, np.int32), np.zeros(1, bool), np.zeros(1, bool)
    assert call("check", [grad, overflow, flags]) != 0
    assert call("check", [overflow, flags]) != 0
    update = [np.zeros((), dtype) for dtype in ["?", *"ffff", *"ii", "f", *"iiii", "?"]]
    assert call("update_scale", update) == 0
    assert call("update_scale", update[1:]) != 0
    assert call("update_scale", [*update[:7], np.zeros(()), *update[8:]]) != 0
    assert call("update_scale", [*update[:7], np.zeros(2, np.float32), *update[8:]]) != 0


@settings(deadline=None)
@given(
    start=st.floats(2.0**-30, LARGEST, width=32),
    factor=st.floats(1, 1e10, width=32),
    backoff=st.floats(2.0**-20, 1, width=32),
    limits=st.tuples(st.floats(2.0**-30, LARGEST, width=32), st.floats(2.0**-30, LARGEST, width=32)).map(sorted),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    overflows=st.lists(st.booleans(), max_size=30),
)
def test_scale_updates_equal_plain_python(start, factor, backoff, limits, window, hysteresis, overflows):
    twin = DynamicScale(start, factor, window, limits[0], limits[1], backoff, hysteresis)
    rule = [np.array(value, np.float32) for value in (factor, backoff, *limits)]
    rule += [np.array(value, np.int32) for value in (window, hysteresis)]
    state = [np.array(start, np.float32), *(np.array(value, np.int32) for value in (1, 0, 0, 0))]
    for overflow in overflows:
        out = np.array([not overflow])
        assert call("update_scale", [np.array(overflow), *rule, *state, out]) == 0
        assert out[0] == overflow
        twin.step(overflow)
        assert [value.item() for value in state] == [twin.scale, twin.current, twin.last, twin.in_a_row, twin.total]


@pytest.mark.processes
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", pytest.param("thread", marks=pytest.mark.slow)])
@pytest.mark.parametrize("build", [[], ["-DLOSSSCALE_PORTABLE"]], ids=["dispatched", "portable"])
def test_the_sanitizers_find_nothing(tmp_path, sanitizers, build):
    sources = [ROOT / "tests/cells/native/kernels_test.cc", *sorted((ROOT / "cells/native").glob("*.cc"))]
    options = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", *build]
    program = tmp_path / "kernels_test"
    sanitize = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    subprocess.run([COMPILER, *options, *sanitize, "-o", program, *sources], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
