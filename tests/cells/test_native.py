"""The native kernel against numpy, called directly; through MindSpore in test_backends.py."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cells.native
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


def library_of(folder, monkeypatch):
    """What `library_path` says where `folder` holds the library, and the messages of two calls."""
    monkeypatch.setattr(cells.native, "__file__", str(folder / "native/__init__.py"))
    library_path.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paths = {library_path(), library_path()}
    library_path.cache_clear()
    return *paths, [str(warning.message) for warning in caught]


def spoiled(whole):
    header = len(whole) // 2
    yield from ((whole[:size], "cut off") for size in (64, 4096, header, len(whole) - 1))
    yield from ((content, "no library") for content in (b"", whole[:63], b"\xff" * len(whole)))
    yield whole[:18] + b"\xf7\x00" + whole[20:], "can't be opened"  # of another machine
    yield whole[:64] + b"\xff" * (len(whole) - 64), "can't be opened"


def test_a_library_that_can_not_be_opened_is_left_out_with_one_warning(tmp_path, monkeypatch):
    built = Path(library_path())
    whole = built.read_bytes()
    assert library_of(built.parent, monkeypatch) == (str(built), [])
    for content, reason in spoiled(whole):
        (tmp_path / built.name).write_bytes(content)
        path, (message,) = library_of(tmp_path, monkeypatch)
        assert path is None and reason in message and "install lossscale again" in message
    with_colon = tmp_path / "a:b"
    with_colon.mkdir()
    shutil.copy(built, with_colon)
    path, (message,) = library_of(with_colon, monkeypatch)
    assert path is None and "colon" in message


STEP = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import lossscale, numpy as np
    from mindspore import Tensor, nn
    net = nn.Dense(3, 1)
    optimizer, scale = nn.Momentum(net.trainable_params(), 0.1, 0.9), lossscale.DynamicLossScaleManager()
    step = lossscale.build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=scale)
    x, y = Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones((2, 1), np.float32))
    losses = [float(step(x, y)[0]) for _ in range(9)]
assert (lossscale.backend(), losses[-1] < losses[0]) == ("plain", True), (lossscale.backend(), losses)
assert sum("cut off" in str(warning.message) for warning in caught) == 1, [str(warning.message) for warning in caught]
"""


@pytest.mark.processes
def test_training_goes_on_beside_a_library_that_is_cut_off(tmp_path):
    for package in ("cells", "lossscale"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path / "cells" / Path(library_path()).name
    os.truncate(built, built.stat().st_size // 2)
    environment = {name: value for name, value in os.environ.items() if name != "LOSSSCALE_BACKEND"}
    subprocess.run([sys.executable, "-c", STEP], cwd=tmp_path, env=environment, check=True, timeout=120)


LEVELS = """
import ctypes, sys
import numpy as np
from cells.native import library_path
from tests.cells.test_native import assert_equal_to_numpy, assert_optimizers_equal_to_numpy
if ctypes.CDLL(library_path()).lossscale_level() != int(sys.argv[1]):
    sys.exit(77)
assert_equal_to_numpy(5_000_001)
assert_optimizers_equal_to_numpy()
"""


def in_bfloat16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def assert_equal_to_numpy(size):
    """Products, flags and norms of random values of every dtype, in tensors of 1 to `size` values, to the bit."""
    rng = np.random.default_rng(size)
    for length in (1, 15, 17, 2047, 2049, 2**15 + 1, size):
        values = rng.standard_normal(length) * 2.0 ** rng.integers(-12, 12, length)
        narrow = in_bfloat16(values)
        grads = [*(values.astype(dtype) for dtype in DTYPES), narrow]
        names = [str(grad.dtype) for grad in grads[:3]] + ["bfloat16"]
        wide = [*grads[:3], (narrow.astype(np.uint32) << 16).view(np.float32)]
        for scale in np.float32([1000, 0.25])[: 1 if length > 10**6 else 2]:
            wanted = [expected(grad, scale) for grad in wide]
            products, overflow, flags, total = multiply("unscale_norm", scale, grads, names, norm=True)
            assert not overflow and not any(flags)
            for product, plain, want in zip(products, multiply("unscale", scale, grads, names)[0], wanted):
                assert_same_bits(product, want)
                assert_same_bits(plain, want)
            squares = sum(float(np.square(want.astype(np.float64)).sum()) for want in wanted)
            assert total == pytest.approx(squares, rel=1e-12)


def assert_optimizers_equal_to_numpy():
    """Momentum and Adam on 100,001 random values and two tensors, every dtype of gradients, against float64."""
    rng = np.random.default_rng(0)
    steps, flag, number = np.zeros((), np.int32), np.zeros(1, bool), np.zeros((), np.float32)
    for name in ("float16", "bfloat16", "float32", "float64"):
        values = [rng.standard_normal(length) for length in (100_001, 7)]
        grads = [in_bfloat16(value) if name == "bfloat16" else value.astype(name) for value in values]
        wide = [(g.astype(np.uint32) << 16).view(np.float32) if name == "bfloat16" else g for g in grads]
        wide = [grad.astype(np.float64) / 4 for grad in wide]
        for kind in ("momentum", "adam_weight_decay"):
            states = 1 if kind == "momentum" else 2
            weights, first, second = ([rng.random(g.shape).astype(np.float32) for g in grads] for _ in range(3))
            old = [[array.astype(np.float64) for array in arrays] for arrays in (weights, first, second)]
            options = np.float32([1] if kind == "momentum" else [0.9, 0.999, 1e-6, 1])
            each = [np.full(2, value, np.float32) for value in (0.1, 0.01)]
            written = [*weights, *first, *(second if states == 2 else [])]
            fixed = [np.float32(4), np.zeros((), bool), *each, np.float32(0.9), options]
            arrays = [np.asarray(array) for array in fixed] + [*grads, *written, steps, flag.copy(), np.zeros(2, bool)]
            names = [name if any(array is grad for grad in grads) else str(array.dtype) for array in arrays]
            assert call(kind, arrays, names) == 0
            for i, grad in enumerate(wide):
                weight, m, v = (kept[i] for kept in old)
                if kind == "momentum":
                    m = m * 0.9 + grad + weight * 0.01
                    wanted = [weight - m * 0.1, m, v]
                else:
                    m, v = m * 0.9 + grad * 0.1, v * 0.999 + grad * grad * 0.001
                    wanted = [weight - 0.1 * (m / (np.sqrt(v) + 1e-6) + 0.01 * weight), m, v]
                for actual, want in zip((weights[i], first[i], second[i]), wanted):
                    np.testing.assert_allclose(actual, want, rtol=2e-5, atol=2e-6)
    assert steps == 8 and number == 0


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one level")
@pytest.mark.parametrize(("level", "name"), list(enumerate(["portable", "avx2", "avx512"])))
def test_every_instruction_level_equals_numpy(level, name):
    environment = {**os.environ, "LOSSSCALE_ISA": name}
    result = subprocess.run([sys.executable, "-c", LEVELS, str(level)], cwd=ROOT, env=environment, timeout=300)
    if result.returncode == 77:
        pytest.skip(f"this machine has no {name}")
    assert result.returncode == 0


FLUSHED = """
#include <xmmintrin.h>
void flush_subnormals() { _mm_setcsr(_mm_getcsr() | 0x8040u); }
int flushing() { return (_mm_getcsr() & 0x8040u) == 0x8040u; }
"""


@pytest.mark.skipif(COMPILER is None or platform.machine() != "x86_64", reason="needs a compiler for x86")
def test_subnormals_count_in_a_thread_that_flushes_them(tmp_path):
    (tmp_path / "flush.c").write_text(FLUSHED)
    library = tmp_path / "flush.so"
    compiler = shutil.which("gcc") or COMPILER
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", library, tmp_path / "flush.c"], check=True)
    flush, kept, products = ctypes.CDLL(str(library)), [], []
    grad = np.full(5_000_001, 1e-40, np.float32)  # by several threads
    products_before = multiply("unscale", np.float32(0.5), [grad])[0]

    def work():
        flush.flush_subnormals()
        products.extend(multiply("unscale", np.float32(0.5), [grad])[0])
        kept.append(flush.flushing())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kept == [1]
    assert_same_bits(products[0], expected(grad, 0.5))
    assert_same_bits(products[0], products_before[0])


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


@pytest.mark.slow
@pytest.mark.processes
def test_the_kernels_by_themselves_for_aarch64(tmp_path):
    """Compiled wherever there is a cross compiler, run where qemu can."""
    compiler, machine = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None:
        pytest.skip("no cross compiler: apt-get install g++-aarch64-linux-gnu qemu-user")
    sources = [ROOT / "tests/cells/native/kernels_test.cc", *sorted((ROOT / "cells/native").glob("*.cc"))]
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", "-static"]
    program = tmp_path / "kernels_test"
    subprocess.run([compiler, *options, "-o", program, *sources], check=True)
    if machine is None:
        pytest.skip("compiled, but not run: apt-get install qemu-user")
    result = subprocess.run([machine, program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
