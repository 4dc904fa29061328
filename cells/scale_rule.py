"""The rule of dynamic loss scaling, written once: how the scale answers an overflow and a run of clean steps.

Update cells, scalers and managers go through `advance`; `cells/native/update_scale.cc` is its twin in C++. GradScaler
keeps PyTorch's count and shares `next_loss_scale`.
"""

import warnings
from dataclasses import dataclass
from typing import Optional

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from cells.checks import (
    LARGEST_FLOAT32,
    SMALLEST_NORMAL_FLOAT32,
    check_loss_scale,
    check_number_at_least,
    check_positive_int,
    check_positive_number,
)

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class LossScaleRule:
    """The numbers of the rule, checked; build it by `checked`.

    Attributes:
        scale_factor: what the scale is multiplied by after a window of clean steps, >= 1.
        backoff_factor: what it is multiplied by after an overflow, 0 < backoff_factor <= 1.
        scale_window: clean steps in a row that make a window; from 2**31 - 1 on, which counters never reach: never.
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
        if growth > 1 / SMALLEST_NORMAL_FLOAT32:
            raise ValueError(
                f"For '{owner}', 'scale_factor' must be at most 2**126, whose reciprocal is a float32 > 0, but got "
                f"{scale_factor}; use 2."
            )
        if backoff_factor is None:
            backoff = float(np.float32(1) / np.float32(growth))
        else:
            backoff = check_positive_number("backoff_factor", backoff_factor, owner)
            if not SMALLEST_NORMAL_FLOAT32 <= backoff <= 1:
                raise ValueError(
                    f"For '{owner}', 'backoff_factor' must be > 0 as a float32 and <= 1, but got "
                    f"{backoff_factor}; use 0.5."
                )
        smallest = check_loss_scale("min_loss_scale", min_loss_scale, owner)
        largest = LARGEST_FLOAT32
        if max_loss_scale is not None:
            largest = check_loss_scale("max_loss_scale", max_loss_scale, owner)
        if largest < smallest:
            raise ValueError(
                f"For '{owner}', 'max_loss_scale' must be >= 'min_loss_scale', but got {largest:g} < {smallest:g}."
            )
        window = check_positive_int("scale_window", scale_window, owner)
        overflows = check_positive_int("hysteresis", hysteresis, owner)
        if overflows > LARGEST_INT32:
            raise ValueError(f"For '{owner}', 'hysteresis' must be at most 2**31 - 1, but got {hysteresis}; use 2.")
        return cls(growth, backoff, window, smallest, largest, overflows)

    def tensors(self) -> tuple:
        """Return the numbers as `advance` takes them: factors, window, limits and hysteresis, float32 and int32."""
        floats = (self.scale_factor, self.backoff_factor, self.min_loss_scale, self.max_loss_scale)
        counts = (min(self.scale_window, LARGEST_INT32), self.hysteresis)
        return (*[Tensor(x, mstype.float32) for x in floats], *[Tensor(n, mstype.int32) for n in counts])

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


def advance(rule: tuple, scale: Tensor, clean_steps: Tensor, in_a_row: Tensor, overflow: Tensor) -> tuple:
    """Return (scale, clean_steps, in_a_row) after one step: the rule, in float32 and int32, a pure function.

    ::

        if overflow:  in_a_row += 1
                      clean_steps = 0
                      if in_a_row >= hysteresis:
                          scale = min(scale, max(scale * backoff_factor, min_loss_scale))
        else:         in_a_row = 0
                      clean_steps += 1
                      if clean_steps >= scale_window:
                          clean_steps = 0
                          if isfinite(scale * scale_factor):
                              scale = max(scale, min(scale * scale_factor, max_loss_scale))

    The outer ``min`` and ``max`` keep a scale that was set outside the limits from moving the wrong way. The finite
    guard keeps it from inf, where it would stay, since inf times any factor is inf. Counters stop at the end of int32:
    `in_a_row` at 2**31 - 1, and `clean_steps` one before it, so that a window of 2**31 - 1 means never.

    Args:
        rule: what `LossScaleRule.tensors` returns.
        scale: the scale of this step.
        clean_steps: steps without overflow since the last overflow or full window.
        in_a_row: overflows in a row up to the step before.
        overflow: bool, whether this step overflowed.
    """
    scale_factor, backoff_factor, min_loss_scale, max_loss_scale, scale_window, hysteresis = rule
    zero = ops.zeros_like(in_a_row)
    in_a_row = ops.select(overflow, next_count(in_a_row), zero)
    clean_steps = ops.select(overflow, zero, next_count(clean_steps, LARGEST_INT32 - 1))
    window_is_full = clean_steps >= scale_window
    scale = next_loss_scale(
        scale, in_a_row >= hysteresis, window_is_full, scale_factor, backoff_factor, min_loss_scale, max_loss_scale
    )
    return scale, ops.select(window_is_full, zero, clean_steps), in_a_row


def next_count(count: Tensor, end: int = LARGEST_INT32) -> Tensor:
    """Return count + 1, or `end` once it is there: int32 would wrap."""
    return ops.minimum(count, Tensor(end - 1, mstype.int32)) + 1


def next_loss_scale(
    loss_scale: Tensor,
    backs_off: Tensor,
    window_is_full: Tensor,
    scale_factor: Tensor,
    backoff_factor: Tensor,
    min_loss_scale: Tensor,
    max_loss_scale: Tensor,
) -> Tensor:
    """Return the scale of the next step, as `advance` says, by someone else's count.

    Products are computed in the factors' dtype, float32 or float64, and rounded to float32 once.

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
