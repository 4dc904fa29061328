"""Arithmetic over a tuple of gradients in plain ops, for every device: cast, multiply, look for inf and nan, norms.

`cells.native` multiplies and looks in one op on CPU. Sparse gradients (RowTensors) are only handled here.
"""

from typing import Any

from mindspore import Tensor, context, nn, ops
from mindspore import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner

from cells.ranks import has_shards

_cast_up = ops.MultitypeFuncGraph("cast_up")
_multiply = ops.MultitypeFuncGraph("multiply")
_cast_like = ops.MultitypeFuncGraph("cast_like")
_nonfinite = ops.MultitypeFuncGraph("nonfinite")
_sum = ops.MultitypeFuncGraph("sum")
_norm = ops.MultitypeFuncGraph("norm")
_square_sum = ops.MultitypeFuncGraph("square_sum")
_reduce_sum = ops.ReduceSum(False)
_expand = ops.ExpandDims().add_prim_attr("grad_scale", True)
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


@_cast_like.register("Tensor", "RowTensor")
def _cast_row_tensor_like(reference, grad):
    return RowTensorInner(grad.indices, grad.values.astype(reference.dtype), grad.dense_shape)


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


@ops.constexpr
def on_cpu() -> bool:
    """Return whether the graph is compiled for CPU, the one device on which float64 costs little."""
    return context.get_context("device_target") == "CPU"


@ops.constexpr
def sharded() -> bool:
    """Return whether the graph is compiled for weights that may be spread over devices."""
    return has_shards()


@_norm.register("Tensor")
def _norm_tensor(grad):
    if on_cpu():
        return ops.sqrt(ops.square(grad.astype(mstype.float64)).sum())
    return scaled_norm(_cast_up_tensor(grad).astype(mstype.float32))


def scaled_norm(values: Tensor) -> Tensor:
    """Return the norm of a float32 Tensor in float32, divided by its largest magnitude first: no square overflows."""
    largest = ops.abs(values).max() if values.shape else ops.abs(values)
    divisor = ops.select(largest > 0, largest, ops.ones_like(largest))
    return largest * ops.sqrt(ops.square(values / divisor).sum())


@_square_sum.register("Tensor")
def _square_sum_tensor(grad):
    return _expand(_reduce_sum(ops.square(grad), ()).astype(mstype.float32), 0)


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


def norms_of(grads: tuple) -> Tensor:
    """Return the norm of each of n gradients, shape (n,): float64 on CPU, elsewhere float32."""
    return norms_over_shards(grads) if sharded() else ops.stack(_map(_norm, grads))


def norms_over_shards(grads: tuple) -> Tensor:
    """Return the norms of n whole gradients, of which this device holds a part, shape (n,), float32.

    MindSpore recognises each sum of squares by an attribute of ExpandDims, divides it by the number of devices that
    hold the same part, and puts one AllReduce before the square root. It finds one such sum for each gradient, so
    there is one range: squares are taken of 2**-36 times the values, which may be 7.5e-9 to 1.2e30.
    """
    sums = _map(_square_sum, multiply(Tensor(2.0**-36, mstype.float32), cast_up(grads)))
    return ops.sqrt(ops.cat(sums)) * 2.0**36


def global_norm(norms: Tensor) -> Tensor:
    """Return the norm of all gradients together from those of each, a scalar of their dtype."""
    if norms.dtype == mstype.float64:
        return ops.sqrt(ops.square(norms).sum())
    return scaled_norm(norms)


class PlainArithmetic(nn.Cell):
    """Gradient arithmetic by MindSpore's own ops. `cells.native.NativeArithmetic` has the same methods.

    `grads` is a tuple of n gradients, float16, bfloat16, float32 or float64. Products are float32, float64 for
    float64. `flags` is a bool Tensor of shape (n,): which of them hold inf or nan; `norms`, of shape (n,), their norms.

    Args:
        norms: whether `divide_and_look` and `look` return norms; an empty tuple where not.
        in_branch: whether it runs inside an `if`, where an `if` of its own would leak host memory in GRAPH_MODE.
    """

    def __init__(self, norms: bool = True, in_branch: bool = False):
        super().__init__()
        self.norms = norms
        self.looks_in_passing = False  # `look` forms the quotients
        self.in_branch = in_branch

    def divide_and_look(self, divisor: Tensor, grads: tuple) -> tuple:
        """Return (grads / divisor, flags, norms) for a float32 scalar `divisor`."""
        # In float64, for float64 gradients; rounded to float32 it is the same as the float32 reciprocal.
        factor = ops.reciprocal(divisor.astype(mstype.float64) if on_cpu() else divisor)
        quotients = multiply(factor, cast_up(grads))
        return quotients, self.flags(quotients), norms_of(quotients) if self.norms else ()

    def look(self, divisor: Tensor, grads: tuple) -> tuple:
        """Return (flags, norms) of grads / divisor, which is not kept."""
        _, flags, norms = self.divide_and_look(divisor, grads)
        return flags, norms

    def multiply(self, factor: Tensor, grads: tuple) -> tuple:
        """Return grads * factor, in at least float32; a factor of shape (n,) has one number for each of them."""
        # In two steps, because a factor below 2**-126 would be flushed to zero.
        coarse = ops.select(factor < 2.0**-60, ops.ones_like(factor) * 2.0**-60, factor)
        return _times(factor / coarse, _times(coarse, cast_up(grads)))

    def flags(self, grads: tuple) -> Tensor:
        """Return a bool Tensor of shape (n,): which gradients hold inf or nan. Exact."""
        if self.in_branch:
            return stacked_flags(grads)
        # A finite sum proves that all its terms are finite, and costs a third of looking at each. An infinite one
        # may come from finite terms and asks for the exact look.
        suspects = ops.logical_not(ops.isfinite(ops.stack(_map(_sum, grads))))
        flags = suspects
        if suspects.any():
            flags = stacked_flags(grads)
        return flags


def _times(factor: Tensor, grads: tuple) -> tuple:
    if factor.shape == ():
        return multiply(factor, grads)
    return _map(_multiply, ops.unstack(factor), grads)


def overflow_of(grads: tuple, sparse: bool) -> Tensor:
    """Return a bool scalar: whether any value of any gradient is inf or nan, with some of them sparse or not.

    MindSpore learns the type of a sparse gradient late; until then whatever is computed from it has no type
    either, and Stack, AddN and the assignments of the update cell refuse it. An `if` gives a flag its type.
    """
    if not sparse:
        return has_nonfinite(grads)
    count = Tensor(0.0, mstype.float32)
    for flag in _map(_nonfinite, grads):
        count = count + flag.astype(mstype.float32)
    return _typed(count > 0)


def flags_of(grads: tuple, sparse: bool) -> Tensor:
    """Return a bool Tensor of shape (n,): which of the n gradients hold inf or nan, with some of them sparse or not."""
    if not sparse:
        return stacked_flags(grads)
    flags: tuple = ()
    for flag in _map(_nonfinite, grads):
        flags += (_typed(flag),)
    return ops.stack(flags)


def _typed(flag: Tensor) -> Tensor:
    typed = Tensor(False, mstype.bool_)
    if flag:
        typed = Tensor(True, mstype.bool_)
    return typed


def may_have_sparse_gradients(network: nn.Cell) -> bool:
    """Return whether a cell of `network` holds an operator whose gradient is a RowTensor."""
    return any(
        primitive.name in ("EmbeddingLookup", "SparseGatherV2")
        for _, cell in network.cells_and_names()
        for primitive in cell._primitives.values()
    )
