"""What does the scale do? A callback that shows, records and, where it must, stops a run with loss scaling."""

import math
from pathlib import Path
from typing import Any, Optional, Union

from mindspore import nn
from mindspore.communication import GlobalComm, get_rank
from mindspore.train import Callback

from cells.checks import check_bool, check_positive_int
from cells.state_dict import check_count
from lossscale.files import checked_path
from lossscale.monitor.history import HistoryFile
from lossscale.monitor.records import StepRecorder
from lossscale.monitor.texts import explain_overflows, overflow_line, scale_text
from lossscale.optional import require


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
        self._path = None if history_file is None else checked_path("history_file", history_file, owner)
        self.history: list[dict] = []
        self._file: Optional[HistoryFile] = None
        self._bar: Any = None
        self._depth = 0
        self._reset(None, 0)

    def _reset(self, network: Optional[nn.Cell], first_step: int) -> None:
        self._recorder = StepRecorder(network, first_step)
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
        owner = f"{type(self).__name__}.start"
        if train_cell is not None and not isinstance(train_cell, nn.Cell):
            raise TypeError(f"For '{owner}', 'train_cell' must be a Cell or None, but got {train_cell!r}.")
        if total_steps is not None:
            check_count("total_steps", total_steps, owner)
        check_count("first_step", first_step, owner)
        self.close()
        self._reset(train_cell, first_step)
        self.history = []
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
        number = None if step is None else check_positive_int("step", step, f"{type(self).__name__}.step")
        record = self._recorder.record(outputs, number)
        self._keep(record)
        self._show(record)
        self._check(record)
        return record

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
        if self._recorder.in_window():
            # The end of the window tells whether it is skipped whole.
            self._bad_loss_in_window = self._bad_loss_in_window or not finite
            return
        bad_loss = self._bad_loss_in_window or not finite
        self._bad_loss_in_window = False
        in_a_row = self._recorder.in_a_row
        if self._stop_after is not None and in_a_row >= self._stop_after:
            raise RuntimeError(explain_overflows(self.history, in_a_row))
        if bad_loss and not record["skipped"] and "loss" in self._recorder.outputs:
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
        if self._recorder.cell is None:
            self._recorder.watch(params.train_network)
        self.step(params.net_outputs, params.cur_step_num)

    def on_train_end(self, run_context: Any) -> None:
        """End a run of `Model`."""
        self.close()


def _is_first_process() -> bool:
    return not GlobalComm.INITED or get_rank() == 0
