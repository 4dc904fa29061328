"""How are gradients unscaled and checked? Arithmetic in at least float32, and the finite check.

This is the one place where the CPU's unscale and finite check live; Ascend and GPU use MindSpore's own check.
"""

from typing import Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner

_cast_up = ops.MultitypeFuncGraph("cast_up")
_multiply = ops.MultitypeFuncGraph("multiply")
_cast_like = ops.MultitypeFuncGraph("cast_like")
_nonfinite = ops.MultitypeFuncGraph("nonfinite")
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
    return ops.logical_not(finite.all()).astype(mstype.float32)


@_nonfinite.register("RowTensor")
def _nonfinite_row_tensor(grad):
    return _nonfinite_tensor(grad.values)


def cast_up(grads: Any) -> Any:
    """Return the gradients with float16 and bfloat16 cast to float32; others as they are."""
    return _map(_cast_up, grads)


def cast_like(references: Any, grads: Any) -> Any:
    """Return each gradient in the dtype of its reference, the parameter's: the last cast before the optimizer."""
    return _map(_cast_like, references, grads)


def multiply(factor: Tensor, grads: Any) -> Any:
    """Return the gradients times the scalar `factor`, each in its own dtype."""
    return _map(ops.partial(_multiply, factor), grads)


def usable_scale(scale: Tensor) -> Tensor:
    """Return min(scale, 2**126): beyond it the reciprocal is subnormal, and flushed to zero by some CPU threads."""
    return ops.minimum(scale, Tensor(2.0**126, mstype.float32))


def unscale(grads: Any, scale: Tensor) -> Any:
    """Return float32 or float64 gradients divided by the float32 scalar `scale`, as a multiply by its reciprocal.

    `scale` must be normal and at most 2**126, see `usable_scale`.
    """
    return multiply(ops.reciprocal(scale), grads)


def has_nonfinite(grads: Any) -> Tensor:
    """Return a bool scalar: whether any value of any dense gradient is inf or nan. Exact, on every dtype."""
    return ops.addn(_map(_nonfinite, grads)) > 0


def has_nonfinite_sparse(grads: Any) -> Tensor:
    """Return what `has_nonfinite` does, for gradients some of which are RowTensors.

    MindSpore learns the type of a sparse gradient late; until then whatever is computed from it has no type
    either, and neither AddN nor the assignments of the update cell take that. The `if` gives it one.
    """
    count = Tensor(0.0, mstype.float32)
    for flag in _map(_nonfinite, grads):
        count = count + flag
    overflow = Tensor(False, mstype.bool_)
    if count > 0:
        overflow = Tensor(True, mstype.bool_)
    return overflow


def may_have_sparse_gradients(network: nn.Cell) -> bool:
    """Return whether a cell of `network` holds an operator whose gradient is a RowTensor."""
    return any(
        primitive.name in ("EmbeddingLookup", "SparseGatherV2")
        for _, cell in network.cells_and_names()
        for primitive in cell._primitives.values()
    )
