"""Which gradients hold inf or nan, and how many? Read on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner


class NonfiniteGradient(NamedTuple):
    """What `find_nonfinite` says of one gradient.

    Attributes:
        name: its name.
        inf: how many of its values are inf or -inf.
        nan: how many are nan.
        largest_finite: the largest absolute value among the others, 0.0 if there are none.

    Examples:
        >>> from lossscale import find_nonfinite
        >>> from mindspore import Tensor
        >>> found = find_nonfinite((Tensor([float("nan"), -2.0]),), ("weight",))[0]
        >>> found.name, found.inf, found.nan, found.largest_finite
        ('weight', 0, 1, 2.0)
    """

    name: str
    inf: int
    nan: int
    largest_finite: float


def find_nonfinite(
    grads: Sequence[Tensor], names: Optional[Sequence[Union[str, Parameter]]] = None
) -> list[NonfiniteGradient]:
    """Return which gradients hold inf or nan, with counts. Reads all of them to the host: for diagnosis.

    Few inf and no nan, with a largest finite value near float16's 65504: the loss scale was too large, which
    dynamic scaling mends by itself. nan in nearly all gradients, at every scale: look at the data and the loss.

    Args:
        grads: the gradients.
        names: for each gradient its name, or the Parameter that has it, such as `optimizer.parameters`.
            Default: None, their numbers.

    Returns:
        A list of `NonfiniteGradient` (name, inf, nan, largest_finite), empty if all values are finite.

    Raises:
        TypeError: if `grads` is not a tuple or list of Tensors.
        ValueError: if there are not as many names as gradients.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import find_nonfinite
        >>> from mindspore import Tensor
        >>> for found in find_nonfinite((Tensor([1.0, 2.0]), Tensor([float("inf"), -3.0])), ("weight", "bias")):
        ...     print(found)
        NonfiniteGradient(name='bias', inf=1, nan=0, largest_finite=3.0)
    """
    if not isinstance(grads, (tuple, list)):
        raise TypeError(f"'grads' must be a tuple or list of Tensors, but got {type(grads).__name__}; write (grad,).")
    if names is None:
        names = [str(number) for number in range(len(grads))]
    if len(names) != len(grads):
        raise ValueError(f"There must be one name for each gradient, but got {len(names)} for {len(grads)}.")
    found = []
    for grad, name in zip(grads, names):
        values = _to_numpy(grad)
        finite = np.isfinite(values)
        if finite.all():
            continue
        nan = int(np.isnan(values).sum())
        inf = int(values.size - finite.sum()) - nan
        largest = float(np.abs(values[finite]).max(initial=0.0))
        found.append(NonfiniteGradient(getattr(name, "name", name), inf, nan, largest))
    return found


def _to_numpy(grad: Any) -> np.ndarray:
    if isinstance(grad, RowTensorInner):
        grad = grad.values
    if not isinstance(grad, Tensor):
        raise TypeError(f"'grads' must hold Tensors, but got {grad!r} of type {type(grad).__name__}.")
    if grad.dtype == mstype.bfloat16:  # numpy has no such type
        grad = grad.astype(mstype.float32)
    return grad.asnumpy()
