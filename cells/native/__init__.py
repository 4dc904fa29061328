"""The native CPU kernel: all gradients of a network in one op and one pass over memory, called through `ops.Custom`.

`kernels.cc` and `optimizers.cc` hold the arithmetic and `ops.cc` its entry points. `setup.py` builds them into the
shared library ``cells/_native.*.so`` where there is a C++ compiler; `cells.backends` says whether it is used.
"""

import ctypes
import platform
import struct
import warnings
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Optional

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import signature as sig

# Of the header of a 64-bit ELF file: where the table of its sections is, which comes last, and its entries.
_ELF_HEADER = struct.Struct("=40xQ10xHH2x")


@cache
def library_path() -> Optional[str]:
    """Return the path of the compiled kernel, or None where it was not built or, with one warning, can't be used."""
    if platform.system() != "Linux":
        return None
    # Beside this package and nowhere else: another installation's library may be of another version.
    folder = Path(__file__).parents[1]
    paths = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    reason = _why_unusable(path)
    if reason is not None:
        warnings.warn(
            f"The native kernel {path} is not used: {reason}. Steps run by MindSpore's own ops, with the same results; "
            "install lossscale again to have the kernel (pip install --force-reinstall --no-deps).",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return str(path)


def _why_unusable(path: Path) -> Optional[str]:
    """Return why MindSpore could not call the library, or None. To open one that is cut off would be a bus error."""
    if ":" in str(path):
        return "MindSpore can't open a library whose path has a colon in it"
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
    if len(head) < _ELF_HEADER.size or not head.startswith(b"\x7fELF"):
        return "the file is no library"
    table, entry_size, entries = _ELF_HEADER.unpack(head)
    if path.stat().st_size < table + entry_size * entries:
        return "the file is cut off"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"it can't be opened ({error})"
    return None


class NativeOp(ops.Custom):
    """An entry point of the kernel that can be copied and pickled, as MindSpore's own can't.

    Args:
        rebuild: the function and the arguments that make it again, in another process too.
    """

    def __init__(self, rebuild: tuple, *args: Any):
        super().__init__(*args, func_type="aot")
        self.rebuild = rebuild

    def __deepcopy__(self, memo: dict) -> "NativeOp":
        return self  # without state

    def __reduce__(self) -> tuple:
        return self.rebuild


def native_op(name: str, out_shape: Any, out_dtype: Any) -> NativeOp:
    """Return the entry point ``lossscale_<name>`` of the compiled kernel as an op.

    Raises:
        RuntimeError: if the kernel was not built.
    """
    path = library_path()
    if path is None:
        raise RuntimeError("The native kernel is not built; install lossscale with a C++ compiler on the machine.")
    rebuild = native_op, (name, out_shape, out_dtype)
    return NativeOp(rebuild, f"{path}:lossscale_{name}", out_shape, out_dtype)


def in_place_op(name: str, out_shape: Any, out_dtype: Any, read: int, written: int) -> NativeOp:
    """Return entry point `name`, declared as MindSpore's own optimizer ops are: it writes its last inputs in place.

    The declaration makes the compiler order the op after every earlier read of a Parameter and before every later
    one, and hand it the Parameters themselves instead of copies.

    Args:
        name, out_shape, out_dtype: see `native_op`.
        read: how many inputs come first, which are only read.
        written: how many Parameters follow.
    """
    op = native_op(name, out_shape, out_dtype)
    op.rebuild = in_place_op, (name, out_shape, out_dtype, read, written)
    op.add_prim_attr("side_effect_mem", True)
    inputs = [sig.make_sig(f"input{i}") for i in range(read)]
    op.set_signatures([*inputs, *(sig.make_sig(f"state{i}", sig.sig_rw.RW_WRITE) for i in range(written))])
    return op


def flag_shapes(count: int) -> list:
    """Return the shapes of the two outputs of every op: overflow, and a flag for each of `count` gradients."""
    return [[1], [count]]


_reshape_like = ops.MultitypeFuncGraph("reshape_like")
_map = ops.HyperMap()


@_reshape_like.register("Tensor", "Tensor")
def _reshape_like_tensor(product, grad):
    return product.reshape(grad.shape)


class _MultiplyShapes:
    """The outputs of the one primitive: overflow, n flags, with `norms` n sums of squares, with `products` those."""

    def __init__(self, norms: bool, products: bool):
        self.norms, self.products = norms, products

    def shapes(self, factor, *grads):
        # An output of shape () would leave the op as a Python number.
        products = [list(shape) or [1] for shape in grads] if self.products else []
        return (*flag_shapes(len(grads)), *([[len(grads)]] if self.norms else []), *products)

    def dtypes(self, factor, *grads):
        wide = [mstype.float64 if grad.element_type() == mstype.float64 else mstype.float32 for grad in grads]
        norms = [mstype.float64] if self.norms else []
        return (mstype.bool_, mstype.bool_, *norms, *(wide if self.products else []))


def _multiply_op(name: str, norms: bool, products: bool) -> ops.Custom:
    outputs = _MultiplyShapes(norms, products)
    return native_op(name, outputs.shapes, outputs.dtypes)


class NativeArithmetic(nn.Cell):
    """Gradient arithmetic by the native kernel: the methods of `cells.gradient_ops.PlainArithmetic`, one op each.

    Args:
        norms: whether `divide_and_look` and `look` return norms.
        scalars: whether some gradients may have shape (). False makes compiling faster where there are many.
    """

    def __init__(self, norms: bool = True, scalars: bool = True):
        super().__init__()
        self.norms = norms
        self.looks_in_passing = True  # looking costs one reading of the gradients and no memory
        self.scalars = scalars
        self.divide_op = _multiply_op("unscale_norm" if norms else "unscale", norms, True)
        self.look_op = _multiply_op("look_norm" if norms else "look", norms, False)
        self.multiply_op = _multiply_op("multiply", False, True)

    def __reduce__(self) -> tuple:
        return NativeArithmetic, (self.norms, self.scalars)  # for copies too: MindSpore's Custom can't be copied

    def divide_and_look(self, divisor: Tensor, grads: tuple) -> tuple:
        """Return (grads / divisor, flags, norms)."""
        outputs = self.divide_op(divisor, *grads)
        if self.norms:
            return self.shaped(outputs[3:], grads), outputs[1], ops.sqrt(outputs[2])
        return self.shaped(outputs[2:], grads), outputs[1], ()

    def look(self, divisor: Tensor, grads: tuple) -> tuple:
        """Return (flags, norms) of grads / divisor, which is not kept."""
        outputs = self.look_op(divisor, *grads)
        return outputs[1], ops.sqrt(outputs[2]) if self.norms else ()

    def multiply(self, factor: Tensor, grads: tuple) -> tuple:
        """Return grads * factor, in at least float32; a factor of shape (n,) has one number for each of them."""
        return self.shaped(self.multiply_op(factor, *grads)[2:], grads)

    def shaped(self, products: tuple, grads: tuple) -> tuple:
        """Return the products with those of scalar gradients, which leave the op in shape (1,), in shape () again."""
        return _map(_reshape_like, products, grads) if self.scalars else products
