"""Which loss scale does a network need? A float16 backward pass at every power of two, compared with the best one."""

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops

from cells.backward import gradient_seed, loss_of
from cells.checks import check_number
from lossscale.optional import require

_LARGEST_EXPONENT = 32
_HEADROOM = 2  # gradients of later batches may be larger: leave two powers of two below the first overflow


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
    zeros: np.ndarray = field(default_factory=lambda: np.zeros(_LARGEST_EXPONENT + 1, np.int64))
    overflows: np.ndarray = field(default_factory=lambda: np.zeros(_LARGEST_EXPONENT + 1, bool))
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
        return [2.0**exponent for exponent in range(_LARGEST_EXPONENT + 1)]

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
            lines.append(f"| {power(scale)} | {_percent(self.total.flushed(scale))} | {_names(names)} |")
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
        from lossscale.plot import plot_gradients

        return plot_gradients(self, path)


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
        raise TypeError(f"For '{owner}', 'network' must be a Cell, but got {network!r}.")
    if amp_level not in (None, "O0", "O1", "O2", "O3", "auto"):
        raise ValueError(f"For '{owner}', 'amp_level' must be 'O1', 'O2', 'O3', 'auto' or None, but got {amp_level!r}.")
    if not 0 <= check_number("tolerance", tolerance, owner) < 1:
        raise ValueError(f"For '{owner}', 'tolerance' must be >= 0 and < 1, but got {tolerance}; use 0.001.")
    batches = _batches(batch)
    bar = _bar(len(batches) * (_LARGEST_EXPONENT + 1)) if progress else contextlib.nullcontext()
    with _undisturbed(), bar as shown:
        runs = _Runs(network, loss_fn, amp_level, seed)
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


class _ScaledGradients(nn.Cell):
    """The loss, and the gradients of scale * loss as the backward pass gives them."""

    def __init__(self, network: nn.Cell, weights: ms.ParameterTuple):
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.weights = weights
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)

    def construct(self, scale, *inputs):
        output = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, gradient_seed(output, scale))
        return loss_of(output), grads


class _Runs:
    """Runs a copy of the network at any scale, each run from the same seed."""

    def __init__(self, network: nn.Cell, loss_fn: Optional[nn.Cell], amp_level: Optional[str], seed: int):
        self.network, self.loss_fn, self.amp_level, self.seed = network, loss_fn, amp_level, seed
        self.fresh = False  # whether each run takes a new copy, whose dropout starts anew
        self.cell = self.build()
        self.names = [weight.name for weight in self.cell.weights]

    def build(self) -> _ScaledGradients:
        """Return a cell that gives the gradients of a new copy."""
        copied, loss_fn = copy.deepcopy((self.network, self.loss_fn))
        weights = copied.trainable_params()
        if self.amp_level is None:
            with_loss = copied if loss_fn is None else nn.WithLossCell(copied, loss_fn)
        else:
            # MindSpore's own way to cast a network and to put the loss behind it, in float32.
            optimizer = nn.SGD(weights, learning_rate=1.0)
            train_cell = amp.build_train_network(copied, optimizer, loss_fn, self.amp_level, loss_scale_manager=None)
            with_loss = train_cell.network
        return _ScaledGradients(with_loss, ms.ParameterTuple(weights)).set_train()

    def __call__(self, scale: float, inputs: tuple) -> tuple:
        """Return the loss, and the gradients at `scale` as numpy arrays."""
        if self.fresh:
            ms.set_seed(self.seed)
            self.cell = self.build()
        ms.set_seed(self.seed)
        loss, grads = self.cell(Tensor(scale, ms.float32), *inputs)
        return float(loss.asnumpy()), [grad.float().asnumpy() for grad in grads]

    def settle(self, inputs: tuple) -> None:
        """Choose a mode in which runs repeat, and refuse what can't be measured."""
        loss, first = self(1.0, inputs)
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss of the first batch is {loss}: no loss scale can help; look at the forward pass."
            )
        bad = [name for name, grad in zip(self.names, first) if not np.isfinite(grad).all()]
        if bad:
            raise ValueError(f"The gradients of {_names(bad)} are inf or nan at scale 1: no larger scale can help.")
        if not _equal(first, self(1.0, inputs)[1]):
            self.fresh = True
            first = self(1.0, inputs)[1]
            if not _equal(first, self(1.0, inputs)[1]):
                raise ValueError(
                    "The network's gradients differ from run to run with the same seed: nothing to compare."
                )
        if all(_equal([g * np.float32(s) for g in first], self(s, inputs)[1]) for s in (2.0**16, 2.0**32)):
            raise ValueError(
                "Nothing of this backward pass is in float16: its gradients are exact multiples at scales 1, 2**16 "
                "and 2**32. Float32 and bfloat16 need no loss scaling. Try a level on a copy by amp_level='O2', or "
                "cast the network first, for example network.to_float(mindspore.float16)."
            )


def _measure(runs: _Runs, inputs: tuple, statistics: list, bar: Any) -> None:
    """Add one batch to the statistics."""
    truth: Optional[list] = None
    for exponent in range(_LARGEST_EXPONENT, -1, -1):
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


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put the random states back at the end."""
    seed, numpy_state, state = ms.get_seed(), np.random.get_state(), ms.get_rng_state()
    try:
        yield
    finally:
        if seed is not None:
            ms.set_seed(seed)
        np.random.set_state(numpy_state)
        ms.set_rng_state(state)


def _bar(total: int) -> Any:
    tqdm = require("tqdm", "progress", "The progress bar", ", or find_loss_scale(..., progress=False)").tqdm
    return tqdm(total=total, desc="find_loss_scale", unit="run", dynamic_ncols=True, leave=False)


def _equal(a: list, b: list) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b))


def exponent_of(scale: float) -> int:
    """Return log2 of a scale that was tried; ValueError for another."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5 or not 0 <= exponent - 1 <= _LARGEST_EXPONENT:
        raise ValueError(f"The scales that were tried are 2**0, 2**1, ... 2**{_LARGEST_EXPONENT}, but got {scale}.")
    return exponent - 1


def power(scale: float) -> str:
    """Return a power of two as text."""
    return f"2^{exponent_of(scale)}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"


def _names(names: list) -> str:
    more = f" (+{len(names) - 2} more)" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
