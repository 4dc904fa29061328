"""Parameters that go with a weight, such as its sum of gradients or its average: in its layout, at least float32."""

from collections.abc import Sequence

from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore import dtype as mstype

from cells.ranks import has_shards


def state_of(weights: Sequence, prefix: str, zeros: bool) -> ParameterTuple:
    """Return a Parameter named ``<prefix>.<weight>`` for each weight, which is not trained.

    Args:
        weights: the Parameters.
        prefix: what the names start with.
        zeros: whether they start at zero, or at the weights' values.
    """
    one = _clone_of if has_shards() else _state_of
    return ParameterTuple([one(weight, f"{prefix}.{weight.name}", zeros) for weight in weights])


def _state_of(weight: Parameter, name: str, zeros: bool) -> Parameter:
    dtype = mstype.float64 if weight.dtype == mstype.float64 else mstype.float32
    value = ops.zeros(weight.shape, dtype) if zeros else Tensor(weight.asnumpy().copy(), dtype)
    return Parameter(value, name=name, requires_grad=False)


def _clone_of(weight: Parameter, name: str, zeros: bool) -> Parameter:
    """Return a clone, which MindSpore shards as it shards the weight."""
    state = weight.clone(init="zeros" if zeros else "same")
    state.name, state.requires_grad = name, False
    if state.dtype in (mstype.float16, mstype.bfloat16):
        state.set_dtype(mstype.float32)
    return state
