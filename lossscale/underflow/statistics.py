"""What a scale does to gradients in float16, counted."""

import math
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

LARGEST_EXPONENT = 32


@dataclass
class GradientStatistics:
    """What happened to the gradient of one parameter, or of all, over the scales.

    Attributes:
        name: the parameter's name.
        values: number of gradient values that are not zero at the best scale, over all batches.
        zeros: for each exponent of the scale, how many of these were zero there.
        overflows: for each exponent of the scale, whether inf or nan came up.
        exponents: number of values by floor(log2(abs(value))), of the true gradient.
    """

    name: str
    values: int = 0
    zeros: np.ndarray = field(default_factory=lambda: np.zeros(LARGEST_EXPONENT + 1, np.int64))
    overflows: np.ndarray = field(default_factory=lambda: np.zeros(LARGEST_EXPONENT + 1, bool))
    exponents: dict = field(default_factory=dict)

    def flushed(self, scale: float) -> float:
        """Return the share of values that flush to zero at `scale`, a power of two that was tried; nan on overflow."""
        place = exponent_of(scale)
        if self.overflows[place]:
            return math.nan
        return float(self.zeros[place] / self.values) if self.values else 0.0

    def first_overflow(self) -> Optional[float]:
        """Return the smallest scale at which inf or nan came up, or None."""
        return 2.0 ** int(np.argmax(self.overflows)) if self.overflows.any() else None

    def add(self, truth: np.ndarray) -> None:
        """Count the values of a true gradient."""
        magnitudes = np.abs(truth[truth != 0].astype(np.float64))
        self.values += magnitudes.size
        for exponent, count in zip(*np.unique(np.frexp(magnitudes)[1] - 1, return_counts=True)):
            self.exponents[int(exponent)] = self.exponents.get(int(exponent), 0) + int(count)


def exponent_of(scale: float) -> int:
    """Return log2 of a scale that was tried; ValueError for another."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5 or not 0 <= exponent - 1 <= LARGEST_EXPONENT:
        raise ValueError(f"The scales that were tried are 2**0, 2**1, ... 2**{LARGEST_EXPONENT}, but got {scale}.")
    return exponent - 1


def power(scale: float) -> str:
    """Return a power of two as text."""
    return f"2^{exponent_of(scale)}"


def shortened(names: list) -> str:
    """Return the first two names, and how many more there are."""
    more = f" (+{len(names) - 2} more)" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
