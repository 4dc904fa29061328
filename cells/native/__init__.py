"""The native CPU kernel: all gradients of a network in one op and one pass over memory, called through `ops.Custom`.

`kernels.cc` holds the arithmetic and `ops.cc` its entry points. `setup.py` builds both into the shared library
``cells/_native.*.so`` where there is a C++ compiler; `cells.backends` says whether it is used.
"""

import platform
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Optional

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import signature as sig


@cache
def library_path() -> Optional[str]:
    """Return the path of the compiled kernel, or None where it was not built."""
    if platform.system() != "Linux":
        return None
    # Beside this package and nowhere else: another installation's library may be of another version.
    folder = Path(__file__).parents[1]
    paths = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((str(path) for path in paths if path.is_file()), None)


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


def _shapes(grads: tuple) -> list:
    # An output of shape () would leave the op as a Python number.
    return [list(shape) or [1] for shape in grads]


def _dtypes(grads: tuple) -> list:
    return [mstype.float64 if grad.element_type() == mstype.float64 else mstype.float32 for grad in grads]


def _product_shapes(factor, *grads):
    return (*flag_shapes(len(grads)), *_shapes(grads))


def _product_dtypes(factor, *grads):
    return (mstype.bool_, mstype.bool_, *_dtypes(grads))


def _product_norm_shapes(factor, *grads):
    return (*flag_shapes(len(grads)), [1], *_shapes(grads))


def _product_norm_dtypes(factor, *grads):
    return (mstype.bool_, mstype.bool_, mstype.float64, *_dtypes(grads))


def _check_shapes(*grads):
    return tuple(flag_shapes(len(grads)))


def _check_dtypes(*grads):
    return (mstype.bool_, mstype.bool_)


def _check_norm_shapes(*grads):
    return (*flag_shapes(len(grads)), [1])


def _check_norm_dtypes(*grads):
    return (mstype.bool_, mstype.bool_, mstype.float64)


_reshape_like = ops.MultitypeFuncGraph("reshape_like")
_map = ops.HyperMap()


@_reshape_like.register("Tensor", "Tensor")
def _reshape_like_tensor(product, grad):
    return product.reshape(grad.shape)


class NativeGradients(nn.Cell):
    """Gradient arithmetic by the native kernel; see `cells.unscale.PlainGradients` for the methods.

    Args:
        scalars: whether some gradients may have shape (). False makes compiling faster where there are many.
    """

    def __init__(self, scalars: bool = True):
        super().__init__()
        self.scalars = scalars
        self.unscale_op = native_op("unscale", _product_shapes, _product_dtypes)
        self.unscale_norm_op = native_op("unscale_norm", _product_norm_shapes, _product_norm_dtypes)
        self.multiply_op = native_op("multiply", _product_shapes, _product_dtypes)
        self.check_op = native_op("check", _check_shapes, _check_dtypes)
        self.check_norm_op = native_op("check_norm", _check_norm_shapes, _check_norm_dtypes)

    def unscale_and_check(self, grads: tuple, scale: Tensor) -> tuple:
        """Return (grads / scale, overflow, flags)."""
        outputs = self.unscale_op(scale, *grads)
        return self.shaped(outputs[2:], grads), outputs[0].reshape(()), outputs[1]

    def unscale_with_norm(self, grads: tuple, scale: Tensor) -> tuple:
        """Return (grads / scale, overflow, flags, sum of squares of grads / scale)."""
        outputs = self.unscale_norm_op(scale, *grads)
        return self.shaped(outputs[3:], grads), outputs[0].reshape(()), outputs[1], outputs[2].reshape(())

    def multiply_and_check(self, grads: tuple, factor: Tensor) -> tuple:
        """Return (grads * factor, overflow, flags)."""
        outputs = self.multiply_op(factor, *grads)
        return self.shaped(outputs[2:], grads), outputs[0].reshape(()), outputs[1]

    def check(self, grads: tuple) -> tuple:
        """Return (overflow, flags)."""
        outputs = self.check_op(*grads)
        return outputs[0].reshape(()), outputs[1]

    def check_with_norm(self, grads: tuple) -> tuple:
        """Return (overflow, flags, sum of squares)."""
        outputs = self.check_norm_op(*grads)
        return outputs[0].reshape(()), outputs[1], outputs[2].reshape(())

    def global_norm(self, grads: tuple) -> Tensor:
        """Return the norm of all gradients together, a float64 scalar."""
        return ops.sqrt(self.check_with_norm(grads)[2])

    def nonfinite_flags(self, grads: tuple) -> Tensor:
        """Return a bool Tensor of shape (n,): which of the n gradients hold inf or nan."""
        return self.check_op(*grads)[1]

    def shaped(self, products: tuple, grads: tuple) -> tuple:
        """Return the products with those of scalar gradients, which leave the op in shape (1,), in shape () again."""
        return _map(_reshape_like, products, grads) if self.scalars else products
