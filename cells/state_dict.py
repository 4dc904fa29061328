"""Checks of a state dict before anything of it is loaded."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cells.checks import check_number


def check_keys(state_dict: Any, expected: Iterable[str], owner: str) -> None:
    """Raise TypeError or ValueError, naming the keys, unless `state_dict` has exactly the expected ones."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"For '{owner}', 'state_dict' must be a dict as state_dict() returns it, but got "
            f"{type(state_dict).__name__}."
        )
    expected = list(expected)
    missing = [key for key in expected if key not in state_dict]
    unknown = [key for key in state_dict if key not in expected]
    if missing or unknown:
        raise ValueError(
            f"For '{owner}', the state dict lacks the keys {missing} and has the unknown keys {unknown}; expected are "
            f"{expected}. Nothing was loaded. Was it saved from another kind of scaler?"
        )


def check_count(name: str, value: Any, owner: str, largest: float = math.inf) -> int:
    """Return `value` as an int if it is a whole number from 0 to `largest`."""
    number = check_number(name, value, owner)
    if not 0 <= number <= largest or number != int(number):
        limit = "" if largest == math.inf else f" and <= {largest}"
        raise ValueError(f"For '{owner}', '{name}' must be an int >= 0{limit}, but got {value}.")
    return int(value)
