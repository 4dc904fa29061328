"""Argument checks that tell the caller what came, what was expected and what to write instead."""

import math
import numbers
import warnings
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_NORMAL_FLOAT32 = float(np.finfo(np.float32).tiny)


def check_number(name: str, value: Any, owner: str, *, hint: str = "") -> float:
    """Return `value` as a float if it is a finite real number; TypeError or ValueError otherwise."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"For '{owner}', '{name}' must be a number, but got {value!r} of type {type(value).__name__}.{hint}"
        )
    try:
        number = float(value)
    except OverflowError:  # an int of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"For '{owner}', '{name}' must be a finite number, but got {number}.{hint}")
    return number


def check_number_at_least(name: str, value: Any, minimum: float, owner: str, *, hint: str = "") -> float:
    """Return `value` as a float if it is a finite number >= `minimum`."""
    number = check_number(name, value, owner, hint=hint)
    if number < minimum:
        raise ValueError(f"For '{owner}', '{name}' must be >= {minimum:g}, but got {value}.{hint}")
    return number


def check_positive_number(name: str, value: Any, owner: str, *, hint: str = "") -> float:
    """Return `value` as a float if it is a finite number > 0."""
    number = check_number(name, value, owner, hint=hint)
    if number <= 0:
        raise ValueError(f"For '{owner}', '{name}' must be > 0, but got {value}.{hint}")
    return number


def check_loss_scale(name: str, value: Any, owner: str) -> float:
    """Return `value` as a float if it can serve as a loss scale: > 0, and finite once it is a float32."""
    number = check_positive_number(name, value, owner)
    if not SMALLEST_NORMAL_FLOAT32 <= number <= LARGEST_FLOAT32:
        raise ValueError(
            f"For '{owner}', '{name}' must be a float32 between {SMALLEST_NORMAL_FLOAT32:g} and "
            f"{LARGEST_FLOAT32:g}, but got {value}. A usual start is 2**16 or 2**24."
        )
    return number


def check_positive_int(name: str, value: Any, owner: str) -> int:
    """Return `value` as an int if it is an integer > 0."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"For '{owner}', '{name}' must be an int, but got {value!r} of type {type(value).__name__}.")
    if value <= 0:
        raise ValueError(f"For '{owner}', '{name}' must be > 0, but got {value}.")
    return int(value)


def check_bool(name: str, value: Any, owner: str) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"For '{owner}', '{name}' must be True or False, but got {value!r}.")
    return bool(value)


def scale_tensor(name: str, value: Any, owner: str) -> Tensor:
    """Return the loss scale `value`, a Tensor of shape () or (1,) and any real dtype, as float32 in its shape."""
    if not isinstance(value, Tensor):
        raise TypeError(f"For '{owner}', '{name}' must be a Tensor, but got {value!r} of type {type(value).__name__}.")
    if value.dtype == mstype.bool_ or value.dtype in mstype.complex_type:
        raise TypeError(f"For '{owner}', '{name}' must hold a real number, but its dtype is {value.dtype}.")
    if value.shape not in ((), (1,)):
        raise ValueError(f"For '{owner}', the shape of '{name}' must be () or (1,), but got {value.shape}.")
    numpy_value = value.float().asnumpy()
    check_loss_scale(name, float(numpy_value.reshape(())), owner)
    return Tensor(numpy_value, mstype.float32)


def warn_of_divisor(optimizer: Any, owner: str) -> None:
    """Warn if an optimizer divides gradients that the train step has divided already."""
    for one in optimizer if isinstance(optimizer, (tuple, list)) else (optimizer,):
        divisor = getattr(one, "loss_scale", 1.0)
        if isinstance(divisor, numbers.Real) and divisor != 1:
            warnings.warn(
                f"The optimizer was built with loss_scale={divisor:g}, and '{owner}' unscales the gradients itself: "
                "they are divided twice. Build the optimizer without loss_scale, unless this cell leaves the division "
                "to it.",
                stacklevel=3,
            )
