"""Pictures: a run's loss and scale with its overflows, and gradients against float16's range."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from lossscale.history import read_history
from lossscale.optional import require

if TYPE_CHECKING:
    from lossscale.find_loss_scale import LossScaleReport

# Okabe and Ito's colours, which the colour-blind tell apart; markers and hatches differ too, for grey print.
_BLUE, _ORANGE, _RED, _GREY = "#0072B2", "#E69F00", "#D55E00", "#666666"
_SMALLEST, _SMALLEST_NORMAL, _LARGEST = -24, -14, 16  # float16: 2^-24 subnormal, 2^-14 normal, below 2^16


def plot_history(history: Union[list, str, Path], path: Union[str, Path]) -> Path:
    """Draw loss, loss scale (log2) and overflows over the steps of a run; return the path.

    Args:
        history: what `LossScaleMonitor` recorded: its `history`, or the file it wrote.
        path: the picture to write, .png, .svg or .pdf; folders are made as needed.

    Raises:
        ValueError: if there is no record, or the file is no history.
        ImportError: without matplotlib, ``pip install "lossscale[plot]"``.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import os, tempfile
        >>> from lossscale import LossScaleMonitor, plot_history
        >>> with LossScaleMonitor(progress=False, verbose=False).start() as monitor:
        ...     for loss, overflow, scale in [(0.9, True, 512.0), (0.9, False, 512.0), (0.5, False, 1024.0)]:
        ...         _ = monitor.step((loss, overflow, scale))
        >>> plot_history(monitor.history, os.path.join(tempfile.mkdtemp(), "run.png")).name
        'run.png'
    """
    figure = history_figure(read_history(history) if isinstance(history, (str, Path)) else history)
    return _save(figure, path)


def history_figure(history: list) -> Any:
    """Return the figure that `plot_history` writes."""
    if not history:
        raise ValueError("The history holds no record: nothing was trained yet.")
    figure = _figure(7.2, 4.6)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    steps = np.array([record["step"] for record in history])
    losses = np.array([record["loss"] for record in history])
    bad = np.array([record["overflow"] for record in history], bool)
    total = sum(record["new_overflows"] for record in history)
    figure.suptitle(f"Loss and loss scale: {total} overflow{'s' if total != 1 else ''} in {steps[-1]} steps")

    clean = np.isfinite(losses)
    top.plot(steps[clean], losses[clean], color=_BLUE, linewidth=1, label="loss")
    if clean.any() and losses[clean].min() > 0 and losses[clean].max() > 100 * losses[clean].min():
        top.set_yscale("log")
    top.set_ylabel("loss")

    # Each record says the scale of its step; the last also what comes after.
    before = np.array([record["loss_scale"] for record in history])
    after = np.array([record["next_loss_scale"] for record in history])
    edges = np.append(steps, steps[-1] + 1)
    bottom.plot(edges, np.append(before, after[-1]), color=_BLUE, linewidth=1.5, drawstyle="steps-post", label="scale")
    bottom.plot(
        steps[bad], before[bad], "x", color=_RED, markersize=7, markeredgewidth=1.8, clip_on=False, label="overflow"
    )
    bottom.set_yscale("log", base=2)
    bottom.set_ylabel("loss scale (log2)")
    bottom.set_xlabel("step")
    low, high = min(before.min(), after.min()), max(before.max(), after.max())
    bottom.set_ylim(low / 2, high * 2)
    bottom.legend(loc="upper right", frameon=False)
    for step in steps[bad] if bad.sum() <= 200 else []:
        top.axvline(step, color=_RED, linewidth=0.6, linestyle=":", alpha=0.7)
    _tidy(top, bottom)
    return figure


def plot_gradients(report: "LossScaleReport", path: Union[str, Path]) -> Path:
    """Draw what `LossScaleReport.plot` says."""
    return _save(gradients_figure(report), path)


def gradients_figure(report: "LossScaleReport") -> Any:
    """Return the figure of gradient magnitudes against float16's range, at scale 1 and the recommended scale."""
    from lossscale.find_loss_scale import exponent_of, power

    figure = _figure(7.2, 5.4)
    best = report.recommended
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    exponents = np.array(sorted(report.total.exponents))
    shares = np.array([report.total.exponents[e] for e in exponents]) / report.total.values * 100
    shifts = [0, exponent_of(best)]
    low = min(exponents.min(), _SMALLEST) - 3
    high = max(exponents.max() + max(shifts), _LARGEST) + 3
    figure.suptitle("Gradients of the loss, as float16 sees them")
    for panel, shift in zip(panels, shifts):
        scaled = exponents + shift
        lost = scaled < _SMALLEST
        panel.axvspan(low, _SMALLEST, facecolor=_GREY, alpha=0.16, linewidth=0)
        panel.axvspan(_SMALLEST, _SMALLEST_NORMAL, facecolor=_ORANGE, alpha=0.16, linewidth=0)
        panel.axvspan(_LARGEST, high, facecolor=_RED, alpha=0.2, linewidth=0)
        panel.bar(scaled[~lost] + 0.5, shares[~lost], 0.9, color=_BLUE, edgecolor="white", linewidth=0.3)
        panel.bar(scaled[lost] + 0.5, shares[lost], 0.9, color="white", edgecolor=_RED, hatch="////", linewidth=0.8)
        for edge in (_SMALLEST, _SMALLEST_NORMAL, _LARGEST):
            panel.axvline(edge, color=_GREY, linewidth=0.8, linestyle="--")
        flushed = report.total.flushed(2.0**shift)
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
    _tidy(*panels)
    return figure


def _figure(width: float, height: float) -> Any:
    """Return an empty figure that needs no display and leaves pyplot's state alone."""
    figure = require("matplotlib.figure", "plot", "A picture").Figure(figsize=(width, height), layout="constrained")
    require("matplotlib.backends.backend_agg", "plot", "A picture").FigureCanvasAgg(figure)
    return figure


def _tidy(*panels: Any) -> None:
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)


def _save(figure: Any, path: Union[str, Path]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
