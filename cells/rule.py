"""The rule of dynamic loss scaling, written once: how the scale answers an overflow and a run of clean steps."""

from mindspore import Tensor, ops
from mindspore import dtype as mstype


def next_loss_scale(
    loss_scale: Tensor,
    overflow: Tensor,
    window_is_full: Tensor,
    growth_factor: Tensor,
    backoff_factor: Tensor,
    min_loss_scale: Tensor,
) -> Tensor:
    """Return the loss scale for the next step, a pure function of five scalars.

    ::

        if overflow:        scale = min(scale, max(scale * backoff_factor, min_loss_scale))
        elif window_is_full and isfinite(scale * growth_factor):
                            scale = scale * growth_factor
        (else the scale stays)

    The outer ``min`` keeps a scale that was already below the floor from *growing* on an overflow. The
    finite guard is in float32: a scale that reached inf would stay there for ever, since inf times any
    factor is inf. Products are rounded to float32 once, from the factors' own dtype.

    Args:
        loss_scale: float32 scalar, the scale of this step.
        overflow: bool scalar, whether this step's gradients overflowed.
        window_is_full: bool scalar, whether enough clean steps have passed for the scale to grow.
        growth_factor: scalar >= 1.
        backoff_factor: scalar, 0 < backoff_factor <= 1.
        min_loss_scale: float32 scalar, the floor that backing off respects.
    """
    dtype = growth_factor.dtype
    backed_off = (loss_scale.astype(dtype) * backoff_factor).astype(mstype.float32)
    backed_off = ops.minimum(loss_scale, ops.maximum(backed_off, min_loss_scale))
    grown = (loss_scale.astype(dtype) * growth_factor).astype(mstype.float32)
    grows = ops.logical_and(window_is_full, ops.isfinite(grown))
    return ops.select(overflow, backed_off, ops.select(grows, grown, loss_scale))
