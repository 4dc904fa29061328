"""Independent oracles: the rule in plain Python, and MindSpore's own train step made to run on CPU."""

from dataclasses import dataclass

import numpy as np
from mindspore import nn, ops


@dataclass
class DynamicScale:
    """The rule of dynamic loss scaling in plain Python, float32 products."""

    scale: float
    factor: float = 2.0
    window: int = 2000
    floor: float = 1.0
    ceiling: float = float(np.finfo(np.float32).max)
    backoff: float = 0.0
    hysteresis: int = 1
    current: int = 1
    last: int = 0
    in_a_row: int = 0
    total: int = 0

    def step(self, overflow):
        """Take one step and return the scale after it."""
        scale = np.float32(self.scale)
        if overflow:
            self.in_a_row += 1
            self.total += 1
            self.last, full = self.current, False
            if self.in_a_row >= self.hysteresis:
                backoff = np.float32(self.backoff) or np.float32(1) / np.float32(self.factor)
                scale = min(scale, max(scale * backoff, np.float32(self.floor)))
        else:
            self.in_a_row = 0
            full = self.current - self.last >= self.window
            if full:
                self.last = self.current
                with np.errstate(over="ignore"):
                    grown = scale * np.float32(self.factor)
                if np.isfinite(grown):
                    scale = max(scale, min(grown, np.float32(self.ceiling)))
        self.current += 1
        self.scale = float(scale)
        return self.scale


class StockTrainStep(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's cell with nothing changed but the overflow check, which has no CPU kernel."""

    def get_overflow_status(self, status, compute_output):
        overflow = ops.isfinite(compute_output[0]).all()
        for grad in compute_output:
            overflow = ops.logical_and(overflow, ops.isfinite(grad).all())
        return ops.logical_not(overflow)


def same_bits(a, b):
    """Whether two arrays are equal to the last bit, nan included."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def parameters(cell):
    """Values of all parameters of a cell by name."""
    return {p.name: p.asnumpy().copy() for p in cell.get_parameters()}
