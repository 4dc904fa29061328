"""The state of a GradScaler: the scale, its factors, the count of clean iterations, and how they are saved."""

import itertools
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore import dtype as mstype

from cells.checks import (
    LARGEST_FLOAT32,
    SMALLEST_NORMAL_FLOAT32,
    check_bool,
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

    def __init__(
        self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool
    ):
        if isinstance(init_scale, str):
            raise TypeError(
                f"'{_OWNER}' takes no device (got {init_scale!r}): MindSpore runs where mindspore.set_device() says. "
                "The first argument is the scale: GradScaler(init_scale=2.0**16)."
            )
        scale = check_loss_scale("init_scale", init_scale, _OWNER)
        self._growth_factor = checked_growth_factor(growth_factor)
        self._backoff_factor = checked_backoff_factor(backoff_factor)
        self._growth_interval = check_positive_int("growth_interval", growth_interval, _OWNER)
        self._enabled = check_bool("enabled", enabled, _OWNER)
        self._growth_tracker = 0
        self.consecutive_skips = 0
        self.total_skips = 0
        # Two Parameters of one name can't be in one graph.
        name = f"{_OWNER}_{next(_numbers)}.scale"
        self._scale = Parameter(Tensor(scale, mstype.float32), name=name, requires_grad=False)

    def is_enabled(self) -> bool:
        """Return whether this scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled. In Python it waits for the device; in compiled functions it does not."""
        if not self._enabled:
            return 1.0
        return float(self._scale)

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows, a number > 1."""
        self._growth_factor = checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by after an overflow."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after an overflow, a number between 0 and 1."""
        self._backoff_factor = checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """Return after how many clean iterations in a row the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many clean iterations in a row the scale grows, an int > 0.

        The count must hit it exactly, as in PyTorch: set below the current run of clean iterations, it takes effect
        after the next overflow.
        """
        self._growth_interval = check_positive_int("growth_interval", new_interval, _OWNER)

    def _adjust(self, overflow: bool) -> None:
        self._growth_tracker = 0 if overflow else self._growth_tracker + 1
        grows = self._growth_tracker == self._growth_interval
        if grows:
            self._growth_tracker = 0
        if not overflow and not grows:
            return
        scale = next_scale(
            self._scale,
            Tensor(overflow, mstype.bool_),
            Tensor(grows, mstype.bool_),
            Tensor(self._growth_factor, mstype.float64),
            Tensor(self._backoff_factor, mstype.float64),
        )
        ops.assign(self._scale, scale)

    def state_dict(self) -> dict:
        """Return the state under PyTorch's keys, empty if disabled. Waits for the device.

        Call it after `update`, between iterations. Keys: scale, growth_factor, backoff_factor, growth_interval and
        _growth_tracker.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over what `state_dict` returned, also that of PyTorch's scaler. Does nothing if disabled.

        Raises:
            RuntimeError: if the dict is empty, as a disabled scaler's is.
            TypeError: if it is not a dict, or a value has the wrong type.
            ValueError: if keys are missing or unknown, or a value is out of range. Nothing has changed then.
        """
        if not self._enabled:
            return
        if isinstance(state_dict, dict) and not state_dict:
            raise RuntimeError(
                "The state dict is empty: it was probably saved from a GradScaler with enabled=False. Leave the load "
                "out to start from init_scale."
            )
        check_keys(state_dict, self.state_dict(), _OWNER)
        scale = checked_scale("scale", state_dict["scale"])
        growth = checked_growth_factor(state_dict["growth_factor"])
        backoff = checked_backoff_factor(state_dict["backoff_factor"])
        interval = check_positive_int("growth_interval", state_dict["growth_interval"], _OWNER)
        tracker = check_count("_growth_tracker", state_dict["_growth_tracker"], _OWNER)
        ops.assign(self._scale, Tensor(scale, mstype.float32))
        self._growth_factor, self._backoff_factor = growth, backoff
        self._growth_interval, self._growth_tracker = interval, tracker


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
