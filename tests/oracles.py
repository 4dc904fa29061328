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


class TorchScale:
    """The rule of PyTorch's GradScaler: products in float64, rounded to float32 once; stopped at 2**-126 as ours is."""

    def __init__(self, scale, growth, backoff, interval):
        self.scale, self.growth, self.backoff, self.interval = np.float32(scale), growth, backoff, interval
        self.tracker = 0

    def update(self, overflow):
        """Take note of one iteration."""
        if overflow:
            smaller = np.float32(float(self.scale) * self.backoff)
            self.scale = min(self.scale, max(smaller, np.finfo(np.float32).tiny))
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            with np.errstate(over="ignore"):
                larger = np.float32(float(self.scale) * self.growth)
            self.scale = larger if np.isfinite(larger) else self.scale
            self.tracker = 0


class WholeStep:
    """The whole train step in numpy: plain gradient descent on weights whose gradients are given."""

    def __init__(self, weights, scale, rate, steps=1, clip=None, decay=None, drop=True):
        self.weights = [w.copy() for w in weights]
        self.shadows = [w.copy() for w in weights]
        self.totals = [np.zeros_like(w) for w in weights]
        self.scale, self.rate, self.steps = scale, rate, steps
        self.clip, self.decay, self.drop = clip, decay, drop
        self.micro = 0

    def step(self, grads):
        """Take one micro-step; return (overflow, scale, norm, updated)."""
        with np.errstate(all="ignore"):
            used = np.float32(self.scale.scale)
            self.totals = [t + g * used for t, g in zip(self.totals, grads)]
            self.micro = (self.micro + 1) % self.steps
            if self.micro:
                return False, self.scale.scale, 0.0, False
            true = [t * (np.float32(1) / (used * np.float32(self.steps))) for t in self.totals]
            self.totals = [np.zeros_like(t) for t in self.totals]
            overflow = not all(np.isfinite(t).all() for t in true)
            norm = float(np.sqrt(sum((t.astype(np.float64) ** 2).sum() for t in true)))
            scale = self.scale.step(overflow)
            spike = False
            if self.clip is not None:
                kind, limit, skip_above = self.clip
                spike = skip_above is not None and norm > skip_above
                true = clip_in_numpy(kind, limit, true, norm)
            updated = not spike and not (overflow and self.drop)
            if updated:
                self.weights = [w - np.float32(self.rate) * g for w, g in zip(self.weights, true)]
                if self.decay is not None:
                    self.shadows = [
                        s + (w - s) * (1 - np.float32(self.decay)) for s, w in zip(self.shadows, self.weights)
                    ]
            return overflow, scale, norm, updated


def clip_in_numpy(kind, limit, grads, norm):
    """Clip by "global_norm", "norm" or "value"."""
    if kind == "global_norm":
        return [(g * (limit / max(norm, limit))).astype(g.dtype) for g in grads]
    if kind == "norm":
        norms = [float(np.sqrt((g.astype(np.float64) ** 2).sum())) for g in grads]
        return [(g * (limit / max(n, limit))).astype(g.dtype) for g, n in zip(grads, norms)]
    return [np.clip(g, -np.float32(limit), np.float32(limit)) for g in grads]
