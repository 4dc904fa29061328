"""What does the scale do? A callback that shows, records and, where it must, stops a run with loss scaling."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
from mindspore import nn
from mindspore.communication import GlobalComm, get_rank
from mindspore.train import Callback

from cells.checks import check_bool, check_positive_int
from lossscale.history import HistoryFile, scale_text
from lossscale.optional import require

_DEFAULT_OUTPUTS = ("loss", "overflow", "loss_scale")
_UNKNOWN = ["unknown"]


class LossScaleMonitor(Callback):
    """Shows and records loss, loss scale and overflows of a run, and stops one that has gone wrong.

    ::

        each step:      one record; the progress bar shows loss, scale, overflows
        overflow:       one line: "step 812: overflow in fc3.weight (+2 more), scale 65536 -> 32768, 3rd in a row"
        loss not finite and the step not skipped:   ValueError, as MindSpore's `LossMonitor` for a bare loss
        stop_after overflows in a row:              RuntimeError that explains

    A callback for this library's `Model` and MindSpore's. In a loop of one's own call `start` once and `step` with
    the outputs of each step. Values are found by the train cell's `outputs`, or as (loss, overflow, loss_scale), or
    as a bare loss. Where the outputs lack the scale or the overflow they are read from the train cell, the overflow
    by its counter `total_overflows` (only a dynamic scale has it). Reading them makes the host wait for each step.

    Where callbacks come once for many steps (dataset sink mode) one record sums them up, by the same counter. Under
    data parallel all processes watch and stop, and the first shows and writes.

    Each record is a dict with the same keys:

    =================== ==================================================================================
    step                number of the step, from 1
    steps               how many steps the record stands for, 1 but in sink mode
    loss                as the network gave it
    overflow            whether the gradients overflowed (in any of `steps`)
    skipped             whether the optimizer was not run because of that, or of a spike of the norm
    loss_scale          the scale of the step (in sink mode, before the first of `steps`)
    next_loss_scale     the scale after it
    in_a_row            overflows in a row up to here
    new_overflows       overflows in `steps`
    overflows           overflows since the start
    parameters          names of those with inf or nan in their gradients; ["unknown"] where the device does not
                        tell, as in Ascend's saturation mode
    grad_norm           where the train cell's `outputs` name it, else None
    learning_rate       likewise
    =================== ==================================================================================

    Args:
        history_file: a JSON Lines file to write every record to, at once; `read_history` and the command
            ``lossscale report`` read it. Default: None.
        append: whether to go on in a file that exists, as after a resume. Default: False.
        every: keep each n-th record only; overflows, changes of the scale and the last step are always kept.
            Default: 1.
        stop_after: overflows in a row that end the run. Default: None, never.
        progress: whether to show a progress bar (needs tqdm: ``pip install "lossscale[progress]"``). Default: True.
        verbose: whether to print a line on overflow. Default: True.

    Attributes:
        history: the list of records; ``pandas.DataFrame(monitor.history)`` takes it.

    Raises:
        TypeError, ValueError: if an argument is of the wrong type or out of range.
        ImportError: at the start of a run, if `progress` is asked for and tqdm is not installed.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from lossscale import DynamicLossScaleManager, LossScaleMonitor, build_train_network
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9)
        >>> train_cell = build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=DynamicLossScaleManager())
        >>> inf, target = Tensor(np.full((8, 4), np.inf, np.float32)), Tensor(np.zeros((8, 1), np.float32))
        >>> with LossScaleMonitor(progress=False).start(train_cell) as monitor:
        ...     record = monitor.step(train_cell(inf, target))
        step 1: overflow in weight (+1 more), scale 16777216 -> 8388608
        >>> record["parameters"]
        ['weight', 'bias']
        >>> # With Model: model.train(epochs, data, callbacks=[LossScaleMonitor(history_file="out/run.jsonl")])
    """

    def __init__(
        self,
        history_file: Optional[Union[str, Path]] = None,
        *,
        append: bool = False,
        every: int = 1,
        stop_after: Optional[int] = None,
        progress: bool = True,
        verbose: bool = True,
    ):
        super().__init__()
        owner = type(self).__name__
        self._every = check_positive_int("every", every, owner)
        self._stop_after = None if stop_after is None else check_positive_int("stop_after", stop_after, owner)
        self._append = check_bool("append", append, owner)
        self._shows_bar = check_bool("progress", progress, owner)
        self._verbose = check_bool("verbose", verbose, owner)
        self._path = history_file
        self.history: list[dict] = []
        self._file: Optional[HistoryFile] = None
        self._bar: Any = None
        self._depth = 0
        self._reset(None, 0)

    def _reset(self, train_cell: Optional[nn.Cell], first_step: int) -> None:
        self._cell = train_cell
        self._step = first_step
        self._scale = _scale_of(train_cell)
        self._counted = _counter_of(train_cell, "total_overflows")
        self._overflows = 0
        self._in_a_row = _counter_of(train_cell, "consecutive_overflows") or 0
        self._bad_loss_in_window = False
        self._unwritten: Optional[dict] = None

    def start(
        self, train_cell: Optional[nn.Cell] = None, total_steps: Optional[int] = None, first_step: int = 0
    ) -> "LossScaleMonitor":
        """Begin a run: open the bar and the file, take note of the scale. For loops of one's own.

        Args:
            train_cell: the cell whose outputs `step` will get; None if there is none.
            total_steps: the length of the progress bar.
            first_step: steps that were done before, as in a resumed run.
        """
        self._reset(find_train_cell(train_cell), first_step)
        self.history = []
        self.close()
        if _is_first_process():
            if self._shows_bar:
                tqdm = require("tqdm", "progress", "The progress bar", ", or LossScaleMonitor(progress=False)").tqdm
                self._bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)
            if self._path is not None:
                self._file = HistoryFile(self._path, self._append)
        return self

    def step(self, outputs: Any, step: Optional[int] = None) -> dict:
        """Take note of one step by what the train cell returned; return its record.

        Args:
            outputs: what the step returned.
            step: its number, where that is not one more than the last; steps in between are summed up.

        Raises:
            ValueError: if the loss is inf or nan and the step was not skipped.
            RuntimeError: after `stop_after` overflows in a row.
        """
        number = self._step + 1 if step is None else step
        steps = max(number - self._step, 1)
        self._step = number
        record = self._record(self._values(outputs), number, steps)
        self._keep(record)
        self._show(record)
        self._check(record)
        return record

    def _values(self, outputs: Any) -> dict:
        """Return the values that a step returned, by name."""
        names = getattr(self._cell, "outputs", _DEFAULT_OUTPUTS)
        values = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return {name: _number(value) for name, value in zip(names, values)}

    def _record(self, values: dict, number: int, steps: int) -> dict:
        cell = self._cell
        total = _counter_of(cell, "total_overflows") if steps > 1 or "overflow" not in values else None
        if total is not None and self._counted is not None:
            new = total - self._counted
            self._in_a_row = _counter_of(cell, "consecutive_overflows") or 0
        else:
            new = int(bool(values.get("overflow", 0)))
            if new or not self._in_window():
                self._in_a_row = self._in_a_row + 1 if new else 0
        self._overflows += new
        self._counted = None if self._counted is None else self._counted + new
        scale_after = values["loss_scale"] if "loss_scale" in values else _scale_of(cell)
        scale_after = 1.0 if scale_after is None else scale_after
        scale = scale_after if self._scale is None else self._scale
        self._scale = scale_after
        return {
            "step": number,
            "steps": steps,
            "loss": values.get("loss", math.nan),
            "overflow": new > 0,
            "skipped": self._skipped(values, new > 0),
            "loss_scale": scale,
            "next_loss_scale": scale_after,
            "in_a_row": self._in_a_row,
            "new_overflows": new,
            "overflows": self._overflows,
            "parameters": self._nonfinite_parameters() if new else [],
            "grad_norm": values.get("grad_norm"),
            "learning_rate": values.get("learning_rate"),
        }

    def _in_window(self) -> bool:
        """Whether the last step was a micro-step that ended no window of accumulation."""
        accumulator = getattr(self._cell, "accumulator", None)
        return accumulator is not None and accumulator.in_window()

    def _skipped(self, values: dict, overflow: bool) -> bool:
        if "updated" in values and not self._in_window():
            return not values["updated"]
        return overflow and getattr(self._cell, "drop_overflow_update", True)

    def _nonfinite_parameters(self) -> list:
        tell = getattr(self._cell, "nonfinite_parameters", None)
        return (tell() if tell is not None else []) or list(_UNKNOWN)

    def _keep(self, record: dict) -> None:
        is_event = record["overflow"] or record["loss_scale"] != record["next_loss_scale"]
        self._unwritten = record
        if is_event or record["steps"] > 1 or record["step"] % self._every == 0 or not math.isfinite(record["loss"]):
            self._write_last()

    def _write_last(self) -> None:
        """Write the last record, if it was not kept yet."""
        if self._unwritten is not None:
            self.history.append(self._unwritten)
            if self._file is not None:
                self._file.write(self._unwritten)
        self._unwritten = None

    def _show(self, record: dict) -> None:
        if self._bar is not None:
            scale = scale_text(record["next_loss_scale"])
            self._bar.set_postfix_str(
                f"loss={record['loss']:.4g}, scale={scale}, overflows={record['overflows']}", False
            )
            self._bar.update(record["steps"])
        if record["overflow"] and self._verbose and _is_first_process():
            write = print if self._bar is None else self._bar.write
            write(overflow_line(record))

    def _check(self, record: dict) -> None:
        """Raise where the run should end."""
        finite = math.isfinite(record["loss"])
        if self._in_window():
            # The end of the window tells whether it is skipped whole.
            self._bad_loss_in_window = self._bad_loss_in_window or not finite
            return
        bad_loss = self._bad_loss_in_window or not finite
        self._bad_loss_in_window = False
        if self._stop_after is not None and self._in_a_row >= self._stop_after:
            raise RuntimeError(_explain_overflows(self.history, self._in_a_row))
        if bad_loss and not record["skipped"] and "loss" in getattr(self._cell, "outputs", _DEFAULT_OUTPUTS):
            reason = "the overflow was not dropped" if record["overflow"] else "no gradient overflowed"
            raise ValueError(
                f"The loss of step {record['step']} is {record['loss']} and the step was not skipped ({reason}), so "
                "the weights may be lost. Look for inf or nan in the data, lower the learning rate, or let overflowing "
                "steps be skipped (drop_overflow_update=True)."
            )

    def close(self) -> None:
        """End the run: write the last record, close the bar and the file. `history` stays."""
        self._write_last()
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()
        self._bar = self._file = None

    def write(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if _is_first_process():
            (print if self._bar is None else self._bar.write)(text)

    def __enter__(self) -> "LossScaleMonitor":
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        # Model.fit enters its callbacks again for each evaluation.
        self._depth -= 1
        if self._depth == 0:
            self.close()

    def on_train_begin(self, run_context: Any) -> None:
        """Begin a run of `Model`."""
        params = run_context.original_args()
        first = params.cur_step_num
        self.start(params.train_network, first + params.epoch_num * params.batch_num, first)

    def on_train_step_end(self, run_context: Any) -> None:
        """Take note of a step, or in sink mode of an epoch."""
        params = run_context.original_args()
        if self._cell is None:
            self._cell = find_train_cell(params.train_network)
        self.step(params.net_outputs, params.cur_step_num)

    def on_train_end(self, run_context: Any) -> None:
        """End a run of `Model`."""
        self.close()


def overflow_line(record: dict) -> str:
    """Return the line that reports a record with an overflow."""
    names = record["parameters"]
    where = names[0] if names != _UNKNOWN else "an unknown parameter"
    more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
    before, after = scale_text(record["loss_scale"]), scale_text(record["next_loss_scale"])
    scale = f"scale {before} -> {after}" if before != after else f"scale stays {before}"
    row = f", {_ordinal(record['in_a_row'])} in a row" if record["in_a_row"] > 1 else ""
    if record["steps"] == 1:
        return f"step {record['step']}: overflow in {where}{more}, {scale}{row}"
    first = record["step"] - record["steps"] + 1
    count = record["new_overflows"]
    return (
        f"steps {first} to {record['step']}: {count} overflow{'s' if count > 1 else ''}, "
        f"the last in {where}{more}, {scale}{row}"
    )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def _explain_overflows(history: list, in_a_row: int) -> str:
    """Return the error text of `stop_after`."""
    streak = [record for record in history if record["overflow"]][-in_a_row:]
    scales = [streak[0]["loss_scale"], *(record["next_loss_scale"] for record in streak)]
    shown = [scale_text(scale) for scale in scales]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-3:]]
    counts = Counter(name for record in streak for name in record["parameters"])
    names = ", ".join(f"{name} ({times}x)" for name, times in counts.most_common(5))
    if len(counts) > 5:
        names += f" and {len(counts) - 5} more"
    finite = sum(math.isfinite(record["loss"]) for record in streak)
    if finite == len(streak):
        forward = "finite every time: only the backward pass overflows"
        advice = (
            "start from a smaller scale (find_loss_scale recommends one), lower min_loss_scale, clip or lower the "
            "learning rate, or keep the layers named above in float32"
        )
    else:
        forward = f"inf or nan in {len(streak) - finite} of {len(streak)}: no loss scale can help there"
        advice = (
            "look for inf or nan in the data and in the weights, lower the learning rate, or keep the layer that "
            "overflows in the forward pass in float32"
        )
    return (
        f"{in_a_row} overflows in a row, up to step {streak[-1]['step']}; no weight has moved since unless "
        "drop_overflow_update=False.\n"
        f"  loss scale:   {' -> '.join(shown)}\n"
        f"  overflow in:  {names}\n"
        f"  forward loss: {forward}\n"
        f"  what to try:  {advice}.\n"
        "The train cell is intact: mindspore.save_checkpoint(train_cell, path) saves it."
    )


def find_train_cell(network: Optional[nn.Cell]) -> Optional[nn.Cell]:
    """Return the train cell, which is wrapped in sink mode, or None."""
    while network is not None and not isinstance(network, nn.TrainOneStepCell):
        network = getattr(network, "network", None)
    return network


def _scale_of(cell: Optional[nn.Cell]) -> Optional[float]:
    """Return the live scale of a train cell, or None."""
    scale = getattr(cell, "scale_sense", None)
    if scale is None or getattr(cell, "scale_every_call", False):
        return None
    return _number(scale)


def _counter_of(cell: Optional[nn.Cell], name: str) -> Optional[int]:
    """Return a counter of a train cell's update cell, or None."""
    counter = getattr(getattr(cell, "loss_scaling_manager", None), name, None)
    return None if counter is None else int(counter.asnumpy())


def _number(value: Any) -> float:
    """Return a step's output, a Tensor or a number, as a float."""
    array = value.asnumpy() if hasattr(value, "asnumpy") else value
    return float(np.mean(np.asarray(array, np.float64)))


def _is_first_process() -> bool:
    return not GlobalComm.INITED or get_rank() == 0
