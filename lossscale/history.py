"""The history of a run: a list of flat records, and the same as a JSON Lines file that survives a killed process."""

import json
import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Union

HEADER = {"format": "lossscale history", "version": 1}
_NUMBERS = ("loss", "loss_scale", "next_loss_scale", "grad_norm", "learning_rate")
_REQUIRED = ("step", "loss", "loss_scale", "overflow", "overflows")


class HistoryFile:
    """A JSON Lines file: one line that says what it is, then one record a line, each written out at once.

    Args:
        path: the file; folders are made as needed.
        append: whether to go on in a file that exists, as after a resume, instead of writing it anew.
    """

    def __init__(self, path: Union[str, Path], append: bool = False):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = append and self.path.exists() and self.path.stat().st_size > 0
        if goes_on:
            read_history(self.path)
            _end_last_line(self.path)
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


def _end_last_line(path: Path) -> None:
    """Cut off a last line that a killed process left unfinished."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])


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
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Write one by LossScaleMonitor(history_file={str(path)!r}).")
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
        except ValueError as error:
            if number == len(lines) > 1 and not line.endswith("\n"):
                warnings.warn(f"{path}: line {number}, the last, is cut off and was skipped.", stacklevel=2)
                break
            raise _foreign(path, number) from error
        if number == 1:
            if not isinstance(value, dict) or value.get("format") != HEADER["format"]:
                raise _foreign(path, 1)
            if value["version"] != HEADER["version"]:
                raise ValueError(
                    f"{path} has version {value['version']} of the format; this lossscale reads version 1."
                )
        elif not isinstance(value, dict) or any(key not in value for key in _REQUIRED):
            raise _foreign(path, number)
        else:
            records.append({key: float(v) if key in _NUMBERS and v is not None else v for key, v in value.items()})
    if not records:
        raise ValueError(f"{path} holds no step: the run ended before its first one.")
    return records


def _foreign(path: Path, line: int) -> ValueError:
    return ValueError(
        f"{path} is not a history of LossScaleMonitor (line {line}). Expected are JSON Lines that begin with "
        f"{json.dumps(HEADER)}."
    )


def scale_text(scale: float) -> str:
    """Return a loss scale as it is read best: whole numbers without a point."""
    return f"{scale:.0f}" if scale == int(scale) and scale < 1e15 else f"{scale:g}"


def summarize(history: list) -> str:
    """Return a few lines about a history: steps, overflows, the scale, the loss, and which parameters overflowed."""
    overflows = [record for record in history if record["overflow"]]
    scales = [history[0]["loss_scale"], *(record["next_loss_scale"] for record in history)]
    losses = [record["loss"] for record in history if math.isfinite(record["loss"])]
    steps = sum(record["steps"] for record in history)
    count = sum(record["new_overflows"] for record in history)
    lines = [
        f"steps       {history[0]['step'] - history[0]['steps'] + 1} to {history[-1]['step']} ({steps} recorded)",
        f"overflows   {count} ({count / steps:.2%} of the steps), "
        f"longest run {max(record['in_a_row'] for record in history)}",
        f"loss scale  {scale_text(scales[0])} -> {scale_text(scales[-1])} "
        f"(smallest {scale_text(min(scales))}, largest {scale_text(max(scales))})",
    ]
    if losses:
        lines.append(f"loss        {losses[0]:.4g} -> {losses[-1]:.4g} (smallest {min(losses):.4g})")
    else:
        lines.append("loss        never finite")
    if overflows:
        first, last = overflows[0], overflows[-1]
        lines.append(f"            first overflow at step {first['step']}, last at step {last['step']}")
        names = Counter(name for record in overflows for name in record["parameters"])
        lines.append("overflowed  " + ", ".join(f"{name} ({times}x)" for name, times in names.most_common(5)))
    return "\n".join(lines)
