"""One call of the native kernel against a copy of the same bytes, by number of tensors and of values."""

import argparse
import ctypes
from collections.abc import Callable

import numpy as np

from benchmarks import timing
from cells.native import library_path

SIZES = [1, 10**3, 10**6, 10**7, 10**8]
COUNTS = [10, 100, 1000]
VALUES_EACH = 10_000


def kernel_call(name: str, arrays: list[np.ndarray]) -> Callable[[], float]:
    """Return a call of entry point `name` with these inputs and outputs, as MindSpore makes it."""
    count = len(arrays)
    shapes = [(ctypes.c_int64 * max(array.ndim, 1))(*array.shape) for array in arrays]
    arguments = (
        (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays]),
        (ctypes.c_int * count)(*[array.ndim for array in arrays]),
        (ctypes.c_void_p * count)(*[ctypes.addressof(shape) for shape in shapes]),
        (ctypes.c_char_p * count)(*[str(array.dtype).encode() for array in arrays]),
    )
    function = getattr(ctypes.CDLL(library_path()), f"lossscale_{name}")

    def call(kept=(arrays, shapes)) -> float:
        return float(function(count, *arguments, None, None))

    return call


def build(count: int, size: int, dtype: type = np.float32) -> dict[str, Callable[[], float]]:
    """Return copy, unscale, unscale with norm and check of `count` tensors of `size` values."""
    grads = [np.full(size, 0.5, dtype) for _ in range(count)]
    products = [np.zeros(size, np.float32) for _ in range(count)]
    overflow, flags, total = np.zeros(1, bool), np.zeros(count, bool), np.zeros(1)
    scale = np.array(1024, np.float32)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pairs = [(out.ctypes.data, grad.ctypes.data, out.nbytes) for out, grad in zip(products, grads)]

    def copy() -> float:
        for target, source, size_ in pairs:
            memcpy(target, source, size_)
        return 0.0

    return {
        "plain": copy,
        "unscale": kernel_call("unscale", [scale, *grads, overflow, flags, *products]),
        "unscale and norm": kernel_call("unscale_norm", [scale, *grads, overflow, flags, total, *products]),
        "check": kernel_call("check", [*grads, overflow, flags]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    sizes = SIZES[:4] if options.quick else SIZES
    calls = [(1, size) for size in sizes] + [(6, 2048 * 2048)] + [(count, VALUES_EACH) for count in COUNTS]
    rows = {f"{count:,} x {size:,}": lambda call=(count, size): build(*call) for count, size in calls}
    timing.write(options.out, timing.measure(rows, options.rounds))
