"""The gradient arithmetic of scalers, at any loss scale: by the native kernel where it serves, else by plain ops."""

from typing import Any

from mindspore import Tensor, amp, context, ops
from mindspore import dtype as mstype

from cells.backends import backend
from cells.gradient_ops import cast_up, has_nonfinite, multiply, unscale, usable_scale
from cells.native import NativeArithmetic, library_path

_FLOATS = (mstype.float32, mstype.float16, mstype.bfloat16, mstype.float64)
# Built on import: a compiled function can use a Cell of this module but not keep one that it builds.
_native: Any = NativeArithmetic(norms=False) if library_path() is not None else None


@ops.constexpr
def _backend() -> str:
    return backend()


@ops.constexpr
def _on_cpu() -> bool:
    return context.get_context("device_target") == "CPU"


def unscale_wide(grads: Any, scale: Tensor) -> Any:
    """Return the gradients, in at least float32, times the reciprocal of `scale`, in plain ops: differentiable.

    Args:
        grads: a Tensor or a tuple of Tensors.
        scale: float32 scalar. Above 2**126 its reciprocal is subnormal, which some CPU threads flush to zero, so
            the product is formed in two steps, of which the second is a multiply by 1 for any smaller scale.
    """
    usable = usable_scale(scale)
    return multiply(usable / scale, unscale(cast_up(grads), usable))


def unscale_and_check(grads: tuple, scale: Tensor) -> tuple:
    """Return (grads / scale in at least float32, whether any value of them is inf or nan)."""
    if _native_serves(grads):
        unscaled, flags, _ = _native.divide_and_look(scale, grads)
        return unscaled, flags.any()
    unscaled = unscale_wide(grads, scale)
    return unscaled, overflows(unscaled)


def overflows(tensors: tuple) -> Tensor:
    """Return a bool scalar: whether any value of the Tensors, at least one, is inf or nan."""
    if _native_serves(tensors):
        # The kernel can't be differentiated, and an `if` on its answer in a forward function would ask for that.
        flags, _ = _native.look(Tensor(1.0, mstype.float32), ops.stop_gradient(tensors))
        return ops.stop_gradient(flags.any())
    if _on_cpu():
        return has_nonfinite(tensors)
    return ops.logical_not(amp.all_finite(tensors))


def _native_serves(tensors: tuple) -> bool:
    """Return whether the native kernel is in use and takes these Tensors; known when a graph is compiled."""
    serves = _backend() == "native"
    for tensor in tensors:
        serves = serves and isinstance(tensor, Tensor) and tensor.dtype in _FLOATS
    return serves
