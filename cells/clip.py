"""How are gradients clipped? Cells that take a tuple of true, unscaled gradients and return one."""

from typing import Optional

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from cells.backends import gradient_arithmetic
from cells.checks import LARGEST_FLOAT32, check_positive_number
from cells.unscale import cast_like

_limit = ops.MultitypeFuncGraph("limit")


@_limit.register("Tensor", "Tensor")
def _limit_tensor(limit, grad):
    bound = limit.astype(grad.dtype)
    return ops.maximum(ops.minimum(grad, bound), -bound)


class ClipByNormBase(nn.Cell):
    """Base of the clips by a norm, which a train step folds with unscaling into one multiply.

    Args:
        max_norm: the largest norm that is left, a finite number > 0.
    """

    def __init__(self, max_norm: float):
        super().__init__()
        self.max_norm = check_positive_number("max_norm", max_norm, type(self).__name__)
        self.limit = Tensor(self.max_norm, mstype.float64)
        self.gradients = gradient_arithmetic()

    def construct(self, grads: tuple) -> tuple:
        clipped, _, _, _ = self.unscale_and_clip(grads, Tensor(1.0, mstype.float32))
        return cast_like(grads, clipped)

    def unscale_and_clip(self, grads: tuple, divisor: Tensor) -> tuple:
        """Return clip(grads / divisor), whether grads / divisor overflowed, the flags, and the global norm.

        The norm, a float64 scalar, is that of the unclipped grads / divisor.
        """
        raise TypeError(f"{type(self).__name__} must define unscale_and_clip.")

    def factor(self, square_sum: Tensor, divisor: Tensor) -> tuple:
        """Return what scaled gradients are multiplied by, float64, and their true norm."""
        wide = divisor.astype(mstype.float64)
        norm = ops.sqrt(square_sum) / wide
        # Not by a maximum, which loses nan on CPU: an overflow that is not dropped must not look like an update.
        shrink = ops.select(norm <= self.limit, ops.ones_like(norm), self.limit / norm)
        return shrink / wide, norm


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
            self.skip_above = check_positive_number("skip_above", skip_above, owner)
            if self.skip_above < self.max_norm:
                raise ValueError(
                    f"For '{owner}', 'skip_above' must be >= 'max_norm', but got {skip_above} < {max_norm}: every "
                    "step that is clipped would be skipped."
                )

    def unscale_and_clip(self, grads: tuple, divisor: Tensor) -> tuple:
        """Return clip(grads / divisor), overflow, flags and the norm of grads / divisor: one pass, one multiply."""
        overflow, flags, square_sum = self.gradients.check_with_norm(grads)
        factor, norm = self.factor(square_sum, divisor)
        # With a scale below 1 the true gradients can overflow where the scaled ones are finite.
        overflow = ops.logical_or(overflow, norm > LARGEST_FLOAT32)
        clipped, _, _ = self.gradients.multiply_and_check(grads, factor)
        return clipped, overflow, flags, norm


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

    def unscale_and_clip(self, grads: tuple, divisor: Tensor) -> tuple:
        """Return clip(grads / divisor), overflow, flags and the global norm: one multiply for each gradient."""
        overflow, flags, square_sum = self.gradients.check_with_norm(grads)
        _, norm = self.factor(square_sum, divisor)
        overflow = ops.logical_or(overflow, norm > LARGEST_FLOAT32)
        clipped: tuple = ()
        for grad in grads:
            _, _, own_square_sum = self.gradients.check_with_norm((grad,))
            factor, _ = self.factor(own_square_sum, divisor)
            product, _, _ = self.gradients.multiply_and_check((grad,), factor)
            clipped += product
        return clipped, overflow, flags, norm


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
        self.limit = Tensor(check_positive_number("limit", limit, type(self).__name__), mstype.float32)
        self.map = ops.HyperMap()

    def construct(self, grads: tuple) -> tuple:
        return self.map(ops.partial(_limit, self.limit), grads)
