"""How are gradients unscaled and checked? Arithmetic in at least float32, and the finite check, in plain ops.

`cells.native` does the same in one op on CPU; `cells.backends` chooses. Ascend and GPU use MindSpore's own check.
"""

from typing import Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner

_cast_up = ops.MultitypeFuncGraph("cast_up")
_multiply = ops.MultitypeFuncGraph("multiply")
_cast_like = ops.MultitypeFuncGraph("cast_like")
_nonfinite = ops.MultitypeFuncGraph("nonfinite")
_sum = ops.MultitypeFuncGraph("sum")
_square_sum = ops.MultitypeFuncGraph("square_sum")
_map = ops.HyperMap()


@_cast_up.register("Tensor")
def _cast_up_tensor(grad):
    if grad.dtype == mstype.float16 or grad.dtype == mstype.bfloat16:
        return grad.astype(mstype.float32)
    return grad


@_cast_up.register("RowTensor")
def _cast_up_row_tensor(grad):
    return RowTensorInner(grad.indices, _cast_up_tensor(grad.values), grad.dense_shape)


@_multiply.register("Tensor", "Tensor")
def _multiply_tensor(factor, grad):
    return grad * factor.astype(grad.dtype)


@_multiply.register("Tensor", "RowTensor")
def _multiply_row_tensor(factor, grad):
    return RowTensorInner(grad.indices, _multiply_tensor(factor, grad.values), grad.dense_shape)


@_cast_like.register("Tensor", "Tensor")
def _cast_like_tensor(reference, grad):
    return grad.astype(reference.dtype)


@_cast_like.register("RowTensor", "RowTensor")
def _cast_like_row_tensor(reference, grad):
    return RowTensorInner(grad.indices, grad.values.astype(reference.values.dtype), grad.dense_shape)


@_nonfinite.register("Tensor")
def _nonfinite_tensor(grad):
    # bfloat16 has no IsFinite kernel on CPU; casting up changes no finite value.
    finite = ops.isfinite(_cast_up_tensor(grad))
    return ops.logical_not(finite.all())


@_nonfinite.register("RowTensor")
def _nonfinite_row_tensor(grad):
    return _nonfinite_tensor(grad.values)


@_sum.register("Tensor")
def _sum_tensor(grad):
    return _cast_up_tensor(grad).sum().astype(mstype.float32)


@_sum.register("RowTensor")
def _sum_row_tensor(grad):
    return _sum_tensor(grad.values)


@_square_sum.register("Tensor")
def _square_sum_tensor(grad):
    return ops.square(grad.astype(mstype.float64)).sum()


@_square_sum.register("RowTensor")
def _square_sum_row_tensor(grad):
    return _square_sum_tensor(grad.values)


def cast_up(grads: Any) -> Any:
    """Return the gradients with float16 and bfloat16 cast to float32; others as they are."""
    return _map(_cast_up, grads)


def cast_like(references: Any, grads: Any) -> Any:
    """Return each gradient in the dtype of its reference, the parameter's: the last cast before the optimizer."""
    return _map(_cast_like, references, grads)


def multiply(factor: Tensor, grads: Any) -> Any:
    """Return the gradients times the scalar `factor`, each in its own dtype."""
    return _map(ops.partial(_multiply, factor), grads)


def as_scalar(scale: Tensor) -> Tensor:
    """Return a Tensor of shape () or (1,) in shape (), by a reshape only if it must: in PYNATIVE_MODE that waits."""
    return scale if scale.shape == () else scale.reshape(())


def usable_scale(scale: Tensor, steps: int = 1) -> Tensor:
    """Return min(scale, 2**126 / steps).

    Beyond 2**126 the reciprocal of scale * steps is subnormal, and some of MindSpore's CPU threads flush it to zero.
    """
    return ops.minimum(scale, Tensor(2.0**126 / steps, mstype.float32))


def unscale(grads: Any, scale: Tensor) -> Any:
    """Return float32 or float64 gradients divided by the float32 scalar `scale`, as a multiply by its reciprocal.

    `scale` must be normal and at most 2**126, see `usable_scale`.
    """
    return multiply(ops.reciprocal(scale), grads)


def stacked_flags(grads: Any) -> Tensor:
    """Return a bool Tensor of shape (n,): which of the n gradients hold inf or nan. Exact, on every dtype."""
    return ops.stack(_map(_nonfinite, grads))


def has_nonfinite(grads: Any) -> Tensor:
    """Return a bool scalar: whether any value of any gradient is inf or nan. Exact, on every dtype."""
    return stacked_flags(grads).any()


class PlainGradients(nn.Cell):
    """Gradient arithmetic by MindSpore's own ops, for every device and for sparse gradients.

    In all methods `grads` is a tuple of n gradients, float16, bfloat16, float32 or float64. Products are float32,
    float64 for float64; `overflow` is a bool scalar: any inf or nan in what is returned, or in `grads` where they
    are only looked at; `flags`, of shape (n,), says in which. Sums of squares are taken in float64, over all.
    """

    def unscale_and_check(self, grads: tuple, scale: Tensor) -> tuple:
        """Return (grads / scale, overflow, flags) for a float32 scalar `scale`."""
        # In float64, for float64 gradients; rounded to float32 it is the same as the float32 reciprocal.
        return self.multiply_and_check(grads, ops.reciprocal(scale.astype(mstype.float64)))

    def unscale_with_norm(self, grads: tuple, scale: Tensor) -> tuple:
        """Return (grads / scale, overflow, flags, sum of squares of grads / scale)."""
        unscaled, overflow, flags = self.unscale_and_check(grads, scale)
        return unscaled, overflow, flags, _sum_of_squares(unscaled)

    def multiply_and_check(self, grads: tuple, factor: Tensor) -> tuple:
        """Return (grads * factor, overflow, flags) for a float32 or float64 scalar `factor`."""
        products = multiply(factor, cast_up(grads))
        overflow, flags = self.check(products)
        return products, overflow, flags

    def check(self, grads: tuple) -> tuple:
        """Return (overflow, flags)."""
        # A finite sum proves that all its terms are finite, and costs a third of looking at each. An infinite one
        # may come from finite terms and asks for the exact look.
        suspects = ops.logical_not(ops.isfinite(ops.stack(_map(_sum, grads))))
        flags = suspects
        if suspects.any():
            flags = stacked_flags(grads)
        return flags.any(), flags

    def check_with_norm(self, grads: tuple) -> tuple:
        """Return (overflow, flags, sum of squares)."""
        overflow, flags = self.check(grads)
        return overflow, flags, _sum_of_squares(grads)

    def global_norm(self, grads: tuple) -> Tensor:
        """Return the norm of all gradients together, a float64 scalar."""
        return ops.sqrt(self.check_with_norm(grads)[2])

    def nonfinite_flags(self, grads: tuple) -> Tensor:
        """Return a bool Tensor of shape (n,): which of the n gradients hold inf or nan."""
        return stacked_flags(grads)


class SparseGradients(PlainGradients):
    """Gradient arithmetic where some gradients are RowTensors.

    MindSpore learns the type of a sparse gradient late; until then whatever is computed from it has no type
    either, and Stack, AddN and the assignments of the update cell refuse it. An `if` gives a flag its type.
    """

    def check(self, grads: tuple) -> tuple:
        """Return (overflow, no flags)."""
        count = Tensor(0.0, mstype.float32)
        for flag in _map(_nonfinite, grads):
            count = count + flag.astype(mstype.float32)
        return _typed(count > 0), ()

    def nonfinite_flags(self, grads: tuple) -> Tensor:
        """Return a bool Tensor of shape (n,): which of the n gradients hold inf or nan."""
        flags: tuple = ()
        for flag in _map(_nonfinite, grads):
            flags += (_typed(flag),)
        return ops.stack(flags)


def may_have_sparse_gradients(network: nn.Cell) -> bool:
    """Return whether a cell of `network` holds an operator whose gradient is a RowTensor."""
    return any(
        primitive.name in ("EmbeddingLookup", "SparseGatherV2")
        for _, cell in network.cells_and_names()
        for primitive in cell._primitives.values()
    )


def _typed(flag: Tensor) -> Tensor:
    """Return a flag whose type MindSpore does not know yet as a bool scalar."""
    typed = Tensor(False, mstype.bool_)
    if flag:
        typed = Tensor(True, mstype.bool_)
    return typed


def _sum_of_squares(grads: Any) -> Tensor:
    return ops.stack(_map(_square_sum, grads)).sum()
