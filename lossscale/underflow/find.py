"""Which loss scale does a network need? A float16 backward pass at every power of two, compared with the best one."""

import contextlib
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
from mindspore import Tensor, nn

from cells.checks import check_bool, check_number
from cells.state_dict import check_count
from lossscale.optional import require
from lossscale.train_network import check_loss_fn
from lossscale.underflow.report import LossScaleReport
from lossscale.underflow.runs import Runs, undisturbed
from lossscale.underflow.statistics import LARGEST_EXPONENT, GradientStatistics

_LARGEST_SEED = 2**32 - 1  # numpy's


def find_loss_scale(
    network: nn.Cell,
    loss_fn: Optional[nn.Cell],
    *batch: Any,
    amp_level: Optional[str] = None,
    tolerance: float = 0.001,
    seed: int = 1,
    progress: bool = True,
) -> LossScaleReport:
    """Measure which gradients flush to zero and which overflow in float16, and recommend an initial loss scale.

    ::

        for scale in 2**32, 2**31, ..., 2**0:
            grads[scale] = gradients of scale * loss, same seeds
        truth   = the largest scale at which all are finite
        flushed = share of values that are zero at a scale, of those that are not in truth

    Zeros that ReLU, pooling and dropout make are zero in `truth` too and don't count. What flushes even there can't
    be seen. The gradients are those of one step in training mode, before anything is divided by the scale.

    Everything is done on a copy of the network: weights, statistics and random state stay. Dropout gives other zeros
    on each run of the same cell; where two runs differ, each takes a new copy (slower: it is compiled anew).

    Args:
        network: the network, as it is trained.
        loss_fn: the loss function, or None if the network returns its loss.
        *batch: the Tensors of one batch, or one iterable (a list, or a MindSpore dataset) of such tuples.
        amp_level: "O1", "O2", "O3" or "auto", tried on the copy. Default: None, the network as it is.
        tolerance: the share of values that may flush to zero at a usable scale, 0 <= tolerance < 1. Default: 0.001.
        seed: set before each run. Default: 1.
        progress: whether to show a progress bar (needs tqdm: ``pip install "lossscale[progress]"``). Default: True.

    Returns:
        `LossScaleReport`: `needs_scaling`, `smallest`, `largest`, `recommended`, statistics by parameter,
        `to_markdown()` and `plot(path)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if there is no batch, the loss or the gradients at scale 1 are not finite, nothing of the
            backward pass is in float16, or runs from the same seed differ.
        ImportError: if `progress` is asked for and tqdm is not installed.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from lossscale import find_loss_scale
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 1))
        >>> x, y = Tensor(np.ones((16, 4), np.float32)), Tensor(np.ones((16, 1), np.float32))
        >>> report = find_loss_scale(net, nn.MSELoss(), x, y, amp_level="O3", progress=False)
        >>> report.smallest <= report.recommended <= report.largest
        True
    """
    owner = "find_loss_scale"
    if not isinstance(network, nn.Cell):
        raise TypeError(f"For '{owner}', 'network' must be a Cell, but got {network!r:.80}.")
    check_loss_fn(loss_fn, owner)
    if amp_level is not None and (not isinstance(amp_level, str) or amp_level not in ("O0", "O1", "O2", "O3", "auto")):
        raise ValueError(
            f"For '{owner}', 'amp_level' must be 'O1', 'O2', 'O3', 'auto' or None, but got {amp_level!r:.80}."
        )
    if not 0 <= check_number("tolerance", tolerance, owner) < 1:
        raise ValueError(f"For '{owner}', 'tolerance' must be >= 0 and < 1, but got {tolerance}; use 0.001.")
    if check_count("seed", seed, owner) > _LARGEST_SEED:
        raise ValueError(f"For '{owner}', 'seed' must be at most {_LARGEST_SEED}, but got {seed!r:.80}.")
    check_bool("progress", progress, owner)
    batches = _batches(batch)
    bar = _bar(len(batches) * (LARGEST_EXPONENT + 1)) if progress else contextlib.nullcontext()
    with undisturbed(), bar as shown:
        runs = Runs(network, loss_fn, amp_level, int(seed))
        runs.settle(batches[0])
        statistics = [GradientStatistics(name) for name in runs.names]
        for inputs in batches:
            _measure(runs, inputs, statistics, shown)
    total = GradientStatistics("all")
    for one in statistics:
        total.values += one.values
        total.zeros += one.zeros
        total.overflows |= one.overflows
        for exponent, count in one.exponents.items():
            total.exponents[exponent] = total.exponents.get(exponent, 0) + count
    return LossScaleReport(statistics, total, float(tolerance))


def _measure(runs: Runs, inputs: tuple, statistics: list, bar: Any) -> None:
    """Add one batch to the statistics."""
    truth: Optional[list] = None
    for exponent in range(LARGEST_EXPONENT, -1, -1):
        grads = runs(2.0**exponent, inputs)[1]
        finite = [bool(np.isfinite(grad).all()) for grad in grads]
        if truth is None and all(finite):
            truth = [grad != 0 for grad in grads]
            for one, grad in zip(statistics, grads):
                one.add(np.ldexp(grad.astype(np.float64), -exponent))
        for place, (one, grad) in enumerate(zip(statistics, grads)):
            one.overflows[exponent] |= not finite[place]
            if truth is not None and finite[place]:
                one.zeros[exponent] += int(np.count_nonzero(truth[place] & (grad == 0)))
        if bar is not None:
            bar.update()
    if truth is None:
        raise ValueError("The gradients of a batch are inf or nan at every scale from 1 on.")


def _batches(batch: tuple) -> list:
    """Return the batches as a list of tuples of Tensors."""
    if batch and all(isinstance(value, Tensor) for value in batch):
        return [batch]
    if len(batch) == 1 and hasattr(batch[0], "create_tuple_iterator"):
        batch = (batch[0].create_tuple_iterator(num_epochs=1),)
    if len(batch) == 1 and isinstance(batch[0], Iterable):
        batches = [tuple(one) if isinstance(one, (tuple, list)) else (one,) for one in batch[0]]
        if batches and all(isinstance(value, Tensor) for one in batches for value in one):
            return batches
    raise TypeError(
        "find_loss_scale needs the Tensors of one batch, find_loss_scale(network, loss_fn, x, y), or one iterable of "
        f"such tuples, find_loss_scale(network, loss_fn, [(x1, y1), (x2, y2)]), but got "
        f"{[type(value).__name__ for value in batch]}."
    )


def _bar(total: int) -> Any:
    tqdm = require("tqdm", "progress", "The progress bar", ", or find_loss_scale(..., progress=False)").tqdm
    return tqdm(total=total, desc="find_loss_scale", unit="run", dynamic_ncols=True, leave=False)
