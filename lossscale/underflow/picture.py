"""The picture of gradients against float16's range."""

from typing import Any

import numpy as np

from lossscale.figures import BLUE, GREY, ORANGE, RED, figure_of, tidy
from lossscale.underflow.statistics import GradientStatistics, exponent_of, power

_SMALLEST, _SMALLEST_NORMAL, _LARGEST = -24, -14, 16  # float16: 2^-24 subnormal, 2^-14 normal, below 2^16


def gradients_figure(total: GradientStatistics, best: float) -> Any:
    """Return the figure of gradient magnitudes against float16's range, at scale 1 and at the `best` one."""
    figure = figure_of(7.2, 5.4)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    exponents = np.array(sorted(total.exponents))
    shares = np.array([total.exponents[e] for e in exponents]) / total.values * 100
    shifts = [0, exponent_of(best)]
    low = min(exponents.min(), _SMALLEST) - 3
    high = max(exponents.max() + max(shifts), _LARGEST) + 3
    figure.suptitle("Gradients of the loss, as float16 sees them")
    for panel, shift in zip(panels, shifts):
        scaled = exponents + shift
        lost = scaled < _SMALLEST
        panel.axvspan(low, _SMALLEST, facecolor=GREY, alpha=0.16, linewidth=0)
        panel.axvspan(_SMALLEST, _SMALLEST_NORMAL, facecolor=ORANGE, alpha=0.16, linewidth=0)
        panel.axvspan(_LARGEST, high, facecolor=RED, alpha=0.2, linewidth=0)
        panel.bar(scaled[~lost] + 0.5, shares[~lost], 0.9, color=BLUE, edgecolor="white", linewidth=0.3)
        panel.bar(scaled[lost] + 0.5, shares[lost], 0.9, color="white", edgecolor=RED, hatch="////", linewidth=0.8)
        for edge in (_SMALLEST, _SMALLEST_NORMAL, _LARGEST):
            panel.axvline(edge, color=GREY, linewidth=0.8, linestyle="--")
        flushed = total.flushed(2.0**shift)
        name = "loss scale 1 (no scaling)" if shift == 0 else f"loss scale {power(best)} (recommended)"
        panel.set_title(f"{name}: {flushed:.2%} of the values flush to zero", fontsize=10, loc="left")
        panel.set_ylabel("share of values (%)")
        panel.set_xlim(low, high)
    top = float(shares.max()) * 1.3
    panels[0].set_ylim(0, top)
    labels = [
        ((low + _SMALLEST) / 2, "becomes 0"),
        ((_SMALLEST + _SMALLEST_NORMAL) / 2, "subnormal:\nfewer bits"),
        ((_SMALLEST_NORMAL + _LARGEST) / 2, "float16's full precision"),
        ((_LARGEST + high) / 2, "inf"),
    ]
    for panel in panels:
        for place, text in labels:
            panel.text(place, top * 0.97, text, ha="center", va="top", fontsize=8, color="#333333")
    panels[1].set_xlabel("magnitude of gradient × loss scale (exponent of 2)")
    tidy(*panels)
    return figure
