"""The rule of dynamic loss scaling, written once: how the scale answers an overflow and a run of clean steps."""

import warnings
from dataclasses import dataclass
from typing import Optional

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from cells.checks import (
    LARGEST_FLOAT32,
    check_loss_scale,
    check_number_at_least,
    check_positive_int,
    check_positive_number,
)


@dataclass(frozen=True)
class LossScaleRule:
    """The numbers of the rule, checked; build it by `checked`.

    Attributes:
        scale_factor: what the scale is multiplied by after a window of clean steps, >= 1.
        backoff_factor: what it is multiplied by after an overflow, 0 < backoff_factor <= 1.
        scale_window: clean steps in a row that make a window.
        min_loss_scale: backing off stops here.
        max_loss_scale: growing stops here.
        hysteresis: the overflow in a row that backs off first; each further one backs off at once, and a clean
            step refills it. (Megatron and DeepSpeed refill only when the scale grows; fairseq counts a share of
            steps instead. This is Apex's meaning.)
    """

    scale_factor: float
    backoff_factor: float
    scale_window: int
    min_loss_scale: float
    max_loss_scale: float
    hysteresis: int

    @classmethod
    def checked(
        cls,
        owner: str,
        scale_factor: float,
        scale_window: int,
        min_loss_scale: float = 1.0,
        max_loss_scale: Optional[float] = None,
        backoff_factor: Optional[float] = None,
        hysteresis: int = 1,
    ) -> "LossScaleRule":
        """Return the rule, or raise TypeError or ValueError in the name of `owner`.

        `max_loss_scale` None means no limit but float32's; `backoff_factor` None means 1 / `scale_factor`.
        """
        growth = check_number_at_least(
            "scale_factor",
            scale_factor,
            1,
            owner,
            hint=" The scale is divided by it on an overflow, so a factor below 1 would enlarge it; use 2.",
        )
        if backoff_factor is None:
            backoff = float(np.float32(1) / np.float32(growth))
        else:
            backoff = check_positive_number("backoff_factor", backoff_factor, owner)
            if backoff > 1:
                raise ValueError(f"For '{owner}', 'backoff_factor' must be <= 1, but got {backoff_factor}; use 0.5.")
        smallest = check_loss_scale("min_loss_scale", min_loss_scale, owner)
        largest = LARGEST_FLOAT32
        if max_loss_scale is not None:
            largest = check_loss_scale("max_loss_scale", max_loss_scale, owner)
        if largest < smallest:
            raise ValueError(
                f"For '{owner}', 'max_loss_scale' must be >= 'min_loss_scale', but got {largest:g} < {smallest:g}."
            )
        window = check_positive_int("scale_window", scale_window, owner)
        return cls(growth, backoff, window, smallest, largest, check_positive_int("hysteresis", hysteresis, owner))

    def clamp(self, name: str, loss_scale: float, owner: str) -> float:
        """Return a starting scale moved into the limits, with a warning if it had to be moved."""
        clamped = min(max(loss_scale, self.min_loss_scale), self.max_loss_scale)
        if clamped != loss_scale:
            warnings.warn(
                f"For '{owner}', {name}={loss_scale:g} is outside the limits min_loss_scale="
                f"{self.min_loss_scale:g} and max_loss_scale={self.max_loss_scale:g}; it starts at {clamped:g}.",
                UserWarning,
                stacklevel=3,
            )
        return clamped


def next_loss_scale(
    loss_scale: Tensor,
    backs_off: Tensor,
    window_is_full: Tensor,
    scale_factor: Tensor,
    backoff_factor: Tensor,
    min_loss_scale: Tensor,
    max_loss_scale: Tensor,
) -> Tensor:
    """Return the loss scale of the next step, a pure function of seven scalars.

    ::

        if backs_off:         scale = min(scale, max(scale * backoff_factor, min_loss_scale))
        elif window_is_full and isfinite(scale * scale_factor):
                              scale = max(scale, min(scale * scale_factor, max_loss_scale))
        (else the scale stays)

    The outer ``min`` and ``max`` keep a scale that was set outside the limits from moving the wrong way. The
    finite guard is in float32: a scale that reached inf would stay there for ever, since inf times any factor is
    inf. Products are computed in the factors' dtype, float32 or float64, and rounded to float32 once.

    Args:
        loss_scale: float32, the scale of this step.
        backs_off: bool, whether this step's overflow makes the scale smaller.
        window_is_full: bool, whether enough clean steps have passed for the scale to grow.
        scale_factor: >= 1.
        backoff_factor: same dtype, 0 < backoff_factor <= 1.
        min_loss_scale: float32.
        max_loss_scale: float32.
    """
    wide = loss_scale.astype(scale_factor.dtype)
    smaller = (wide * backoff_factor).astype(mstype.float32)
    smaller = ops.minimum(loss_scale, ops.maximum(smaller, min_loss_scale))
    larger = (wide * scale_factor).astype(mstype.float32)
    grows = ops.logical_and(window_is_full, ops.isfinite(larger))
    larger = ops.maximum(loss_scale, ops.minimum(larger, max_loss_scale))
    return ops.select(backs_off, smaller, ops.select(grows, larger, loss_scale))
