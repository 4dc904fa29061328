"""The state of a GradScaler: the scale, its factors, the count of clean iterations, and how they are saved."""

import itertools
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from cells.checks import (
    LARGEST_FLOAT32,
    SMALLEST_NORMAL_FLOAT32,
    check_loss_scale,
    check_number,
    check_positive_int,
)
from cells.scale_rule import next_loss_scale
from cells.state_dict import check_count, check_keys

_OWNER = "GradScaler"
_numbers = itertools.count(1)


class ScaleState:
    """What a GradScaler keeps from one iteration to the next; see there for the arguments and the rule."""

    def __init__(self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int):
        if isinstance(init_scale, str):
            raise TypeError(
                f"'{_OWNER}' takes no device (got {init_scale!r}): MindSpore runs where mindspore.set_device() says. "
                "The first argument is the scale: GradScaler(init_scale=2.0**16)."
            )
        scale = check_loss_scale("init_scale", init_scale, _OWNER)
        self.growth_factor = checked_growth_factor(growth_factor)
        self.backoff_factor = checked_backoff_factor(backoff_factor)
        self.growth_interval = check_positive_int("growth_interval", growth_interval, _OWNER)
        self.growth_tracker = 0
        # Two Parameters of one name can't be in one graph.
        name = f"{_OWNER}_{next(_numbers)}.scale"
        self.scale = Parameter(Tensor(scale, mstype.float32), name=name, requires_grad=False)

    def adjust(self, overflow: bool) -> None:
        """Take note of one iteration."""
        self.growth_tracker = 0 if overflow else self.growth_tracker + 1
        grows = self.growth_tracker == self.growth_interval
        if grows:
            self.growth_tracker = 0
        if not overflow and not grows:
            return
        scale = next_scale(
            self.scale,
            Tensor(overflow, mstype.bool_),
            Tensor(grows, mstype.bool_),
            Tensor(self.growth_factor, mstype.float64),
            Tensor(self.backoff_factor, mstype.float64),
        )
        ops.assign(self.scale, scale)

    def state_dict(self) -> dict:
        """Return the state under PyTorch's keys."""
        return {
            "scale": float(self.scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_tracker,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over such a state, all of it or nothing."""
        check_keys(state_dict, self.state_dict(), _OWNER)
        scale = checked_scale("scale", state_dict["scale"])
        growth = checked_growth_factor(state_dict["growth_factor"])
        backoff = checked_backoff_factor(state_dict["backoff_factor"])
        interval = check_positive_int("growth_interval", state_dict["growth_interval"], _OWNER)
        tracker = check_count("_growth_tracker", state_dict["_growth_tracker"], _OWNER)
        ops.assign(self.scale, Tensor(scale, mstype.float32))
        self.growth_factor, self.backoff_factor = growth, backoff
        self.growth_interval, self.growth_tracker = interval, tracker


def next_scale(scale: Tensor, overflow: Tensor, grows: Tensor, growth_factor: Tensor, backoff_factor: Tensor) -> Tensor:
    """Return the next scale by PyTorch's arithmetic: float64 factors, a float32 result, no limits but float32's.

    ::

        if overflow:  scale = max(scale * backoff_factor, 2**-126)
        elif grows:   scale = scale * growth_factor, if finite
    """
    smallest = Tensor(SMALLEST_NORMAL_FLOAT32, mstype.float32)
    largest = Tensor(LARGEST_FLOAT32, mstype.float32)
    return next_loss_scale(scale, overflow, grows, growth_factor, backoff_factor, smallest, largest)


def checked_growth_factor(value: Any) -> float:
    """Return the factor as a float, or raise TypeError or ValueError."""
    factor = check_number("growth_factor", value, _OWNER)
    if factor <= 1:
        raise ValueError(f"For '{_OWNER}', 'growth_factor' must be > 1, but got {value}; use 2.0.")
    return factor


def checked_backoff_factor(value: Any) -> float:
    """Return the factor as a float, or raise TypeError or ValueError."""
    factor = check_number("backoff_factor", value, _OWNER)
    if not 0 < factor < 1:
        raise ValueError(f"For '{_OWNER}', 'backoff_factor' must be between 0 and 1, but got {value}; use 0.5.")
    return factor


def checked_scale(name: str, value: Any) -> float:
    """Return a scale given as a number or as a Tensor of one value."""
    if isinstance(value, Tensor):
        if value.size != 1:
            raise ValueError(f"For '{_OWNER}', '{name}' must hold one value, but its shape is {value.shape}.")
        value = value.asnumpy().item()
    return check_loss_scale(name, value, _OWNER)
