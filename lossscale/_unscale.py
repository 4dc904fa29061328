"""Unscaling for callers whose loss scale may be any normal float32."""

from typing import Any

from mindspore import Tensor

from cells.unscale import cast_up, multiply, unscale, usable_scale


def unscale_wide(grads: Any, scale: Tensor, *, above_usable: bool = True) -> Any:
    """Return the gradients, in at least float32, times the reciprocal of `scale`.

    Args:
        grads: a Tensor or a tuple of Tensors.
        scale: float32 scalar. Above 2**126 its reciprocal is subnormal, which some CPU threads flush to zero, so
            there it is done in two steps.
        above_usable: False where `scale` is known to be at most 2**126, which saves the second step.
    """
    wide = cast_up(grads)
    if not above_usable:
        return unscale(wide, scale)
    usable = usable_scale(scale)
    return multiply(usable / scale, unscale(wide, usable))
