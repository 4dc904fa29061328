"""The picture of a run: its loss, and its loss scale with the overflows."""

from pathlib import Path
from typing import Any, Union

import numpy as np

from lossscale.figures import BLUE, RED, checked_picture, figure_of, save, tidy
from lossscale.monitor.history import checked_record, read_history


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
    owner = "plot_history"
    picture = checked_picture(path, owner, Path(history) if isinstance(history, (str, Path)) else None)
    if isinstance(history, (str, Path)):
        history = read_history(history)
    elif not isinstance(history, list):
        raise TypeError(f"For '{owner}', 'history' must be a list of records or a path, but got {history!r:.80}.")
    else:
        try:
            history = [checked_record(record) for record in history]
        except ValueError as error:
            raise ValueError(f"For '{owner}', 'history' must hold records of LossScaleMonitor: {error}.") from None
    return save(history_figure(history), picture)


def history_figure(history: list) -> Any:
    """Return the figure that `plot_history` writes."""
    if not history:
        raise ValueError("The history holds no record: nothing was trained yet.")
    figure = figure_of(7.2, 4.6)
    top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    steps = np.array([record["step"] for record in history])
    losses = np.array([record["loss"] for record in history])
    bad = np.array([record["overflow"] for record in history], bool)
    total = sum(record["new_overflows"] for record in history)
    figure.suptitle(f"Loss and loss scale: {total} overflow{'s' if total != 1 else ''} in {steps[-1]} steps")

    clean = np.isfinite(losses)
    top.plot(steps[clean], losses[clean], color=BLUE, linewidth=1, label="loss")
    if clean.any() and losses[clean].min() > 0 and losses[clean].max() > 100 * losses[clean].min():
        top.set_yscale("log")
    top.set_ylabel("loss")

    # Each record says the scale of its step; the last also what comes after.
    before = np.array([record["loss_scale"] for record in history])
    after = np.array([record["next_loss_scale"] for record in history])
    edges = np.append(steps, steps[-1] + 1)
    bottom.plot(edges, np.append(before, after[-1]), color=BLUE, linewidth=1.5, drawstyle="steps-post", label="scale")
    bottom.plot(
        steps[bad], before[bad], "x", color=RED, markersize=7, markeredgewidth=1.8, clip_on=False, label="overflow"
    )
    bottom.set_yscale("log", base=2)
    bottom.set_ylabel("loss scale (log2)")
    bottom.set_xlabel("step")
    scales = np.concatenate([before, after])
    drawn = scales[np.isfinite(scales) & (scales > 0)]
    if drawn.size:
        bottom.set_ylim(drawn.min() / 2, drawn.max() * 2)
    bottom.legend(loc="upper right", frameon=False)
    for step in steps[bad] if bad.sum() <= 200 else []:
        top.axvline(step, color=RED, linewidth=0.6, linestyle=":", alpha=0.7)
    tidy(top, bottom)
    return figure
