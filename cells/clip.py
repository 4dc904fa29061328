"""How are gradients clipped? Cells that take a tuple of true, unscaled gradients and return one."""

from typing import Any, Optional

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from cells.backends import gradient_arithmetic
from cells.checks import LARGEST_FLOAT32, SMALLEST_NORMAL_FLOAT32, check_positive_number
from cells.gradient_ops import cast_like, cast_up, global_norm

_map = ops.HyperMap()
_limit = ops.MultitypeFuncGraph("limit")


@_limit.register("Tensor", "Tensor")
def _limit_tensor(limit, grad):
    # In float32, where the limit is not 0. By select, because a minimum loses nan on CPU.
    wide = cast_up((grad,))[0]
    bound = limit.astype(wide.dtype)
    below = ops.select(wide > bound, bound, wide)
    return ops.select(below < -bound, -bound, below).astype(grad.dtype)


def check_limit(name: str, value: Any, owner: str) -> float:
    """Return `value` as a float if it is a number > 0 that float32 can hold."""
    number = check_positive_number(name, value, owner)
    if not SMALLEST_NORMAL_FLOAT32 <= number <= LARGEST_FLOAT32:
        raise ValueError(
            f"For '{owner}', '{name}' must be between {SMALLEST_NORMAL_FLOAT32:g} and {LARGEST_FLOAT32:g}, the range "
            f"of float32, but got {value}. A usual one is 1.0."
        )
    return number


class ClipByNormBase(nn.Cell):
    """Base of the clips by a norm: float64 on CPU, float32 elsewhere, divided by the largest magnitude first.

    Args:
        max_norm: the largest norm that is left, a finite number > 0.
    """

    def __init__(self, max_norm: float):
        super().__init__(auto_prefix=False)
        self.max_norm = check_limit("max_norm", max_norm, type(self).__name__)
        self.arithmetic = gradient_arithmetic()

    def construct(self, grads: tuple) -> tuple:
        _, norms = self.arithmetic.look(Tensor(1.0, mstype.float32), grads)
        return cast_like(grads, self.arithmetic.multiply(self.factor(norms), grads))

    def factor(self, norms: Tensor) -> Tensor:
        """Return what the gradients with these norms, shape (n,), are multiplied by: a scalar, or shape (n,)."""
        raise TypeError(f"{type(self).__name__} must define factor.")

    def shrink(self, norm: Tensor) -> Tensor:
        """Return min(1, max_norm / norm), nan for nan."""
        # Not by a minimum, which loses nan on CPU: an overflow that is not dropped must not look like an update.
        limit = Tensor(self.max_norm, norm.dtype)
        return ops.select(norm <= limit, ops.ones_like(norm), limit / norm)


class ClipByGlobalNorm(ClipByNormBase):
    """Clip by the norm over all gradients together, in float64.

    ::

        norm  = sqrt(sum of the squares of all values)
        if norm > max_norm: grads = grads * max_norm / norm

    In a train step the norm is that of the true gradients: unscaled, averaged over the window and the devices.

    Args:
        max_norm: the largest norm that is left, a finite number > 0.
        skip_above: a train step skips the update where the norm is larger: a spike of the loss. For the rule of
            the loss scale that is a step without overflow. Default: None, never.

    Inputs:
        - **grads** (tuple of Tensor) - float16, bfloat16, float32 or float64, any shapes.

    Outputs:
        The gradients, in their dtypes.

    Raises:
        TypeError: if a limit is not a number.
        ValueError: if a limit is not finite and > 0, or `skip_above` is below `max_norm`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor, mutable
        >>> from lossscale import ClipByGlobalNorm
        >>> clip = ClipByGlobalNorm(max_norm=1.0)
        >>> print(clip(mutable((Tensor([3.0]), Tensor([0.0, 4.0]))))[1])
        [0.  0.8]
    """

    def __init__(self, max_norm: float, skip_above: Optional[float] = None):
        owner = type(self).__name__
        super().__init__(max_norm)
        self.skip_above = None
        if skip_above is not None:
            self.skip_above = check_limit("skip_above", skip_above, owner)
            if self.skip_above < self.max_norm:
                raise ValueError(
                    f"For '{owner}', 'skip_above' must be >= 'max_norm', but got {skip_above} < {max_norm}: every "
                    "step that is clipped would be skipped."
                )

    def factor(self, norms: Tensor) -> Tensor:
        return self.shrink(global_norm(norms))


class ClipByNorm(ClipByNormBase):
    """Clip each gradient by its own norm, in float64.

    ::

        for each grad:
            norm = sqrt(sum of the squares of its values)
            if norm > max_norm: grad = grad * max_norm / norm

    Args:
        max_norm: the largest norm that is left to a gradient, a finite number > 0.

    Inputs:
        - **grads** (tuple of Tensor) - float16, bfloat16, float32 or float64, any shapes.

    Outputs:
        The gradients, in their dtypes.

    Raises:
        TypeError: if `max_norm` is not a number.
        ValueError: if `max_norm` is not finite and > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor, mutable
        >>> from lossscale import ClipByNorm
        >>> print(ClipByNorm(max_norm=1.0)(mutable((Tensor([3.0, 4.0]), Tensor([0.5]))))[0])
        [0.6 0.8]
    """

    def factor(self, norms: Tensor) -> Tensor:
        return self.shrink(norms)


class ClipByValue(nn.Cell):
    """Clip each value of each gradient into [-limit, limit].

    In a train step it sees the gradients after the check for overflow, which clipping would hide.

    Args:
        limit: the largest magnitude that is left, a finite number > 0.

    Inputs:
        - **grads** (tuple of Tensor) - any float dtypes and shapes.

    Outputs:
        The gradients, in their dtypes.

    Raises:
        TypeError: if `limit` is not a number.
        ValueError: if `limit` is not finite and > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor, mutable
        >>> from lossscale import ClipByValue
        >>> print(ClipByValue(limit=1.0)(mutable((Tensor([3.0, -0.5]),)))[0])
        [ 1.  -0.5]
    """

    def __init__(self, limit: float):
        super().__init__()
        self.limit = Tensor(check_limit("limit", limit, type(self).__name__), mstype.float32)

    def construct(self, grads: tuple) -> tuple:
        return _map(ops.partial(_limit, self.limit), grads)
