"""What did a step do? Records of steps, from what the train cell returned and what can be read from it.

Nothing else in this package looks into a train cell.
"""

import math
from typing import Any, Optional

import numpy as np
from mindspore import nn

from lossscale.monitor.texts import UNKNOWN


class StepRecorder:
    """Makes one record of each step of a train cell; see `LossScaleMonitor` for its keys.

    Args:
        network: the train cell, also in a wrapper; None if there is none.
        first_step: steps that were done before.
    """

    def __init__(self, network: Optional[nn.Cell], first_step: int = 0):
        self.watch(network)
        self.step = first_step
        self.in_a_row = counter_of(self.cell, "consecutive_overflows") or 0
        self._scale = scale_of(self.cell)
        self._counted = counter_of(self.cell, "total_overflows")
        self._overflows = 0

    def watch(self, network: Optional[nn.Cell]) -> None:
        """Read from this train cell from now on."""
        self.cell = find_train_cell(network)
        self.outputs = output_names(self.cell)

    def record(self, outputs: Any, step: Optional[int] = None) -> dict:
        """Return the record of the step, or the steps, up to number `step`; None: the next one."""
        number = self.step + 1 if step is None else step
        steps = max(number - self.step, 1)
        self.step = number
        values = self._values(outputs)
        new = self._count_overflows(values, steps)
        scale_after = values["loss_scale"] if "loss_scale" in values else scale_of(self.cell)
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
            "in_a_row": self.in_a_row,
            "new_overflows": new,
            "overflows": self._overflows,
            "parameters": nonfinite_parameters(self.cell) if new else [],
            "grad_norm": values.get("grad_norm"),
            "learning_rate": values.get("learning_rate"),
        }

    def in_window(self) -> bool:
        """Return whether the last step was a micro-step that ended no window of accumulation."""
        tell = getattr(getattr(self.cell, "accumulator", None), "in_window", None)
        return tell is not None and tell()

    def _values(self, outputs: Any) -> dict:
        """Return the values that a step returned, by name."""
        if isinstance(outputs, dict):
            outputs = outputs.get("loss", math.nan)
        values = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return {name: _number(value) for name, value in zip(self.outputs, values)}

    def _count_overflows(self, values: dict, steps: int) -> int:
        """Return the overflows in the last `steps`; by the train cell's counters where the values don't tell."""
        total = counter_of(self.cell, "total_overflows") if steps > 1 or "overflow" not in values else None
        if total is not None and self._counted is not None:
            new = total - self._counted
            self.in_a_row = counter_of(self.cell, "consecutive_overflows") or 0
        else:
            new = int(bool(values.get("overflow", 0)))
            if new or not self.in_window():
                self.in_a_row = self.in_a_row + 1 if new else 0
        self._overflows += new
        self._counted = None if self._counted is None else self._counted + new
        return new

    def _skipped(self, values: dict, overflow: bool) -> bool:
        if "updated" in values and not self.in_window():
            return not values["updated"]
        return overflow and getattr(self.cell, "drop_overflow_update", True)


def find_train_cell(network: Optional[nn.Cell]) -> Optional[nn.Cell]:
    """Return the train cell, which is wrapped in sink mode, or None."""
    while network is not None and not isinstance(network, nn.TrainOneStepCell):
        network = getattr(network, "network", None)
    return network


def output_names(cell: Optional[nn.Cell]) -> tuple:
    """Return what the first values that a train cell returns are; cells that do not scale return the loss first."""
    scales = cell is None or hasattr(cell, "scale_sense")
    return getattr(cell, "outputs", ("loss", "overflow", "loss_scale") if scales else ("loss",))


def scale_of(cell: Optional[nn.Cell]) -> Optional[float]:
    """Return the live scale of a train cell; None where it has none, or each call brings its own."""
    scale = getattr(cell, "scale_sense", None)
    return None if scale is None or getattr(cell, "scale_every_call", False) else _number(scale)


def counter_of(cell: Optional[nn.Cell], name: str) -> Optional[int]:
    """Return a counter of a train cell's update cell, or None."""
    counter = getattr(getattr(cell, "loss_scaling_manager", None), name, None)
    return None if counter is None else int(counter.asnumpy())


def nonfinite_parameters(cell: Optional[nn.Cell]) -> list:
    """Return which parameters' gradients held inf or nan at the last overflow; ["unknown"] where it can't be told."""
    tell = getattr(cell, "nonfinite_parameters", None)
    return (tell() if tell is not None else []) or list(UNKNOWN)


def _number(value: Any) -> float:
    """Return a step's output, a Tensor or a number, as a float."""
    array = value.asnumpy() if hasattr(value, "asnumpy") else value
    return float(np.mean(np.asarray(array, np.float64)))
