"""Paths that users give."""

import os
from pathlib import Path
from typing import Any


def checked_path(name: str, value: Any, owner: str) -> Path:
    """Return `value` as a Path; TypeError or ValueError if it can't be one."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"For '{owner}', '{name}' must be a path, a str or a Path, but got {value!r:.80}.")
    if not str(value) or "\0" in str(value):
        raise ValueError(f"For '{owner}', '{name}' must be a path, but got {str(value)!r:.80}.")
    return Path(value)
