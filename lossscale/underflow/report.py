"""What `find_loss_scale` found: the scales to use, as numbers, text and picture."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from lossscale.figures import checked_picture, save
from lossscale.underflow.picture import gradients_figure
from lossscale.underflow.statistics import LARGEST_EXPONENT, GradientStatistics, exponent_of, power, shortened

_HEADROOM = 2  # gradients of later batches may be larger: leave two powers of two below the first overflow


@dataclass
class LossScaleReport:
    """What `find_loss_scale` found.

    Attributes:
        parameters: statistics for each trained parameter, in order: `name`, `values` (number of those not zero),
            `flushed(scale)` (share, nan on overflow), `first_overflow()` (scale or None), `exponents` (number of
            values by floor(log2(abs(value)))).
        total: the same over all of them.
        tolerance: the share of values that may flush to zero.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from lossscale import find_loss_scale
        >>> x, y = Tensor(np.ones((16, 4), np.float32)), Tensor(np.ones((16, 1), np.float32))
        >>> report = find_loss_scale(nn.Dense(4, 1), nn.MSELoss(), x, y, amp_level="O3", progress=False)
        >>> report.total.flushed(report.recommended)
        0.0
    """

    parameters: list
    total: GradientStatistics
    tolerance: float

    @property
    def scales(self) -> list:
        """The scales that were tried, 2**0 to 2**32."""
        return [2.0**exponent for exponent in range(LARGEST_EXPONENT + 1)]

    @property
    def largest(self) -> float:
        """The largest scale below the first overflow."""
        first = self.total.first_overflow()
        return self.scales[-1] if first is None else first / 2

    @property
    def smallest(self) -> float:
        """The smallest scale at which no more than `tolerance` of the values flush to zero; at most `largest`."""
        enough = [s for s in self.scales if s <= self.largest and self.total.flushed(s) <= self.tolerance]
        return min(enough, default=self.largest)

    @property
    def recommended(self) -> float:
        """The initial loss scale to take: a quarter of `largest`, but not below `smallest`."""
        return max(self.largest / 2**_HEADROOM, self.smallest)

    @property
    def needs_scaling(self) -> bool:
        """Whether more than `tolerance` of the values flush to zero at scale 1."""
        return self.smallest > 1

    def to_markdown(self) -> str:
        """Return the result as text: what to do, a table by scale and one by parameter."""
        lost = self.total.flushed(1.0)
        need = "needs" if self.needs_scaling else "does not need"
        lines = [
            f"This network {need} loss scaling: at scale 1, {_percent(lost)} of its {self.total.values} gradient "
            "values flush to zero in float16.",
            "",
            f"- usable scales: {power(self.smallest)} to {power(self.largest)} (no overflow; at the smallest "
            f"{_percent(self.total.flushed(self.smallest))} flushed)",
            f"- recommended initial scale: {power(self.recommended)} = {self.recommended:.0f}",
            "",
            "| scale | flushed to zero | overflow in |",
            "| ---: | ---: | :--- |",
        ]
        for scale in self.scales:
            names = [s.name for s in self.parameters if s.overflows[exponent_of(scale)]]
            lines.append(f"| {power(scale)} | {_percent(self.total.flushed(scale))} | {shortened(names)} |")
            if len(names) == len(self.parameters):
                break
        best = power(self.recommended)
        lines += [
            "",
            f"| parameter | values | magnitude | flushed at 1 | flushed at {best} | overflows from |",
            "| :--- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for s in self.parameters:
            size = f"2^{min(s.exponents)} to 2^{max(s.exponents)}" if s.exponents else "all zero"
            first = s.first_overflow()
            lines.append(
                f"| {s.name} | {s.values} | {size} | {_percent(s.flushed(1.0))} | "
                f"{_percent(s.flushed(self.recommended))} | {'-' if first is None else power(first)} |"
            )
        return "\n".join(lines) + "\n"

    def plot(self, path: Union[str, Path]) -> Path:
        """Draw the gradients' magnitudes against float16's range, at scale 1 and at the recommended scale.

        Args:
            path: the picture to write, .png, .svg or .pdf.

        Raises:
            ImportError: without matplotlib, ``pip install "lossscale[plot]"``.
        """
        picture = checked_picture(path, f"{type(self).__name__}.plot")
        return save(gradients_figure(self.total, self.recommended), picture)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"
