"""The history of a run: a list of flat records, and the same as a JSON Lines file that survives a killed process."""

import json
import math
import warnings
from pathlib import Path
from typing import Any, Union

from lossscale.files import checked_path

HEADER = {"format": "lossscale history", "version": 1}
_NUMBERS = ("loss", "loss_scale", "next_loss_scale", "grad_norm", "learning_rate")
_COUNTS = {"step": 1, "steps": 1, "in_a_row": 0, "new_overflows": 0, "overflows": 0}  # and their smallest values


class HistoryFile:
    """A JSON Lines file: one line that says what it is, then one record a line, each written out at once.

    Args:
        path: the file; folders are made as needed.
        append: whether to go on in a file that exists, as after a resume, instead of writing it anew.
    """

    def __init__(self, path: Union[str, Path], append: bool = False):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = append and _end_last_line(self.path)
        self._stream = self.path.open("a" if goes_on else "w", encoding="utf-8", buffering=1)
        if not goes_on:
            self.write(HEADER)

    def write(self, record: dict) -> None:
        """Write one record; inf and nan, which JSON lacks, as strings."""
        plain = {key: value if _is_json(value) else str(value) for key, value in record.items()}
        self._stream.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _end_last_line(path: Path) -> bool:
    """Return whether `path` holds a history; cut off its last line if a killed process left that unfinished."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole == 0 and json.dumps(HEADER).encode().startswith(content):
        return False  # killed before or in its first line
    _read(path)
    if whole < len(content):
        with path.open("rb+") as stream:
            stream.truncate(whole)
    return True


def read_history(path: Union[str, Path]) -> list:
    """Return the records of a file that `LossScaleMonitor` wrote.

    Each is a flat dict (see `LossScaleMonitor`), so that ``pandas.DataFrame(read_history(path))`` works. A last line
    cut off by a killed process is left out, with a warning.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is empty, or is not such a history.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import os, tempfile
        >>> from lossscale import LossScaleMonitor, read_history
        >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
        >>> with LossScaleMonitor(history_file=path, progress=False) as monitor:
        ...     _ = monitor.start().step((0.5, False, 1024.0))
        >>> read_history(path)[0]["loss_scale"]
        1024.0
    """
    path = checked_path("path", path, "read_history")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Write one by LossScaleMonitor(history_file={str(path)!r}).")
    records = _read(path)
    if not records:
        raise ValueError(f"{path} holds no step: the run ended before its first one.")
    return records


def _read(path: Path) -> list:
    """Return the records of a file, maybe none."""
    try:
        lines = path.read_bytes().decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise _foreign(path, 1) from error
    if not lines:
        raise ValueError(f"{path} is empty: no history of LossScaleMonitor was written to it.")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1 and not line.endswith("\n"):
                warnings.warn(f"{path}: line {number}, the last, is cut off and was skipped.", stacklevel=3)
                break
            raise _foreign(path, number) from error
        if number > 1:
            try:
                records.append(checked_record(value))
            except ValueError as error:
                raise _foreign(path, number, f": {error}") from None
        elif not isinstance(value, dict) or value.get("format") != HEADER["format"]:
            raise _foreign(path, 1)
        elif value.get("version") != HEADER["version"]:
            raise ValueError(
                f"{path} (line 1) has version {value.get('version')!r:.40} of the format; this lossscale reads "
                f"version {HEADER['version']}."
            )
    return records


def checked_record(record: Any) -> dict:
    """Return a record with its numbers as floats, as `LossScaleMonitor` makes them; ValueError says what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a dict, but got {record!r:.40}")
    for key, smallest in _COUNTS.items():
        value = record.get(key)
        if type(value) is not int or value < smallest:
            raise ValueError(f"'{key}' must be an int >= {smallest}, but got {value!r:.40}")
    if type(record.get("overflow")) is not bool:
        raise ValueError(f"'overflow' must be true or false, but got {record.get('overflow')!r:.40}")
    names = record.get("parameters")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"'parameters' must be a list of names, but got {names!r:.40}")
    numbers = {key: _as_float(key, record.get(key)) for key in _NUMBERS}
    return {**record, **numbers}


def _as_float(key: str, value: Any) -> Any:
    """Return a number, which may be written as "nan" or "inf", as a float; None where the record may lack it."""
    if value is None and key in ("grad_norm", "learning_rate"):
        return None
    try:
        if type(value) in (int, float, str):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"'{key}' must be a number, but got {value!r:.40}")


def _foreign(path: Path, line: int, reason: str = "") -> ValueError:
    return ValueError(
        f"{path} is not a history of LossScaleMonitor (line {line}{reason}). Expected are JSON Lines that begin with "
        f"{json.dumps(HEADER)}."
    )
