"""Calls the native kernel's entry points as MindSpore does, but straight from numpy: fast enough for thousands."""

import ctypes

import numpy as np

from cells.native import library_path

NONFINITE = {
    np.dtype(np.float16): [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0xFD55],
    np.dtype(np.float32): [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFFA5A5A5],
    np.dtype(np.float64): [0x7FF0 << 48, 0xFFF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1, (1 << 64) - 1, 0xFFF5 << 48],
}
"""Bit patterns: inf, -inf, quiet nan, signalling nan, a nan of all ones, another payload."""


def bits(dtype):
    """The unsigned integer dtype of the same width."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def of_bits(pattern, dtype):
    return np.array(pattern, bits(dtype)).view(dtype)


def call(name, arrays, dtypes=None):
    """Call entry point `name` with numpy arrays, inputs then outputs; bfloat16 is passed as uint16 with its name."""
    names = dtypes or [str(array.dtype) for array in arrays]
    count = len(arrays)
    shapes = [(ctypes.c_int64 * max(array.ndim, 1))(*array.shape) for array in arrays]
    function = getattr(ctypes.CDLL(library_path()), f"lossscale_{name}")
    return function(
        count,
        (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays]),
        (ctypes.c_int * count)(*[array.ndim for array in arrays]),
        (ctypes.c_void_p * count)(*[ctypes.addressof(shape) for shape in shapes]),
        (ctypes.c_char_p * count)(*[dtype.encode() for dtype in names]),
        None,
        None,
    )


def multiply(name, factor, grads, dtypes=None, norm=False):
    """Call "unscale", "multiply", or one with the norm; return (products, overflow, flags[, sum of squares])."""
    names = dtypes or [str(grad.dtype) for grad in grads]
    overflow, flags, total = np.zeros(1, bool), np.zeros(len(grads), bool), np.zeros(1)
    products = [np.empty(grad.shape, np.float64 if of == "float64" else np.float32) for grad, of in zip(grads, names)]
    outputs = [overflow, flags, *([total] if norm else []), *products]
    arrays = [np.asarray(factor), *grads, *outputs]
    status = call(name, arrays, [str(arrays[0].dtype), *names, *[str(output.dtype) for output in outputs]])
    assert status == 0
    return (products, bool(overflow[0]), flags.tolist(), *([total[0]] if norm else []))


def many_updates(overflow, rule, state):
    """Call "update_scale" once for each of n histories: arrays of length n, the state's written in place."""
    arrays = [overflow, *rule, *state, np.empty_like(overflow)]
    count = len(arrays)
    pointers = np.stack([array.ctypes.data + array.itemsize * np.arange(array.size) for array in arrays], axis=1)
    first, width = pointers.ctypes.data, pointers.itemsize * count
    ndims = (ctypes.c_int * count)()
    names = (ctypes.c_char_p * count)(*[str(array.dtype).encode() for array in arrays])
    function = ctypes.CDLL(library_path()).lossscale_update_scale
    for i in range(overflow.size):
        assert (
            function(count, ctypes.c_void_p(first + i * width), ndims, (ctypes.c_void_p * count)(), names, None, None)
            == 0
        )
