"""The history file: the same values back, unfinished, empty and foreign files, going on in one, the summary."""

import json
import math
import re

import pytest

from lossscale import LossScaleMonitor, read_history
from lossscale.monitor import summarize

STEPS = [(0.5, False, 1024.0), (math.nan, True, 512.0), (math.inf, True, 256.0), (0.25, False, 256.0)]


def write(path, steps=STEPS, **options):
    with LossScaleMonitor(path, progress=False, verbose=False, **options).start() as monitor:
        for outputs in steps:
            monitor.step(outputs)
    return monitor.history


def test_values_come_back_inf_and_nan_too(tmp_path):
    history = write(tmp_path / "run.jsonl")
    records = read_history(tmp_path / "run.jsonl")
    assert repr(records) == repr(history)
    assert [type(r["loss"]) for r in records] == [float] * 4
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN, no Infinity


def test_pandas_takes_the_list(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(write(tmp_path / "run.jsonl"))
    assert list(frame["loss_scale"]) == [1024.0, 1024.0, 512.0, 256.0]


def test_a_cut_last_line_is_skipped_with_a_word(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=r"run\.jsonl: line 5, the last, is cut off"):
        assert len(read_history(path)) == 3


def test_append_goes_on_behind_the_last_whole_line(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path)
    write(path, STEPS[:1], append=True)
    assert len(read_history(path)) == 5
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="cut off"):
        write(path, STEPS[:2], append=True)
    assert [r["loss"] for r in read_history(path)][-3:-1] == [0.25, 0.5]
    write(path, STEPS[:2])
    assert len(read_history(path)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"step,loss\n1,0.5\n", r"is not a history .*line 1"),
        (b'{"step": 1}\n', r"is not a history .*line 1"),
        (b"[1]\n", r"is not a history .*line 1"),
        (b"\x89PNG\xff\xfe\n", r"is not a history .*line 1"),
        (b'{"format": "lossscale history", "version": 9}\n', "version 9"),
        (b'{"format": "lossscale history", "version": 1}\n', "holds no step"),
        (b'{"format": "lossscale history", "version": 1}\n{"step": 1}\n', r"is not a history .*line 2"),
        (b'{"format": "lossscale history", "version": 1}\nx\n{"step": 1}\n', r"is not a history .*line 2"),
    ],
)
def test_errors_name_the_file(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} .*{message}|{re.escape(str(path))} {message}"):
        read_history(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl is not a file"):
        read_history(tmp_path / "none.jsonl")


def test_summary():
    history = LossScaleMonitor(progress=False, verbose=False).start()
    for outputs in STEPS:
        history.step(outputs)
    assert summarize(history.history).splitlines() == [
        "steps       1 to 4 (4 recorded)",
        "overflows   2 (50.00% of the steps), longest run 2",
        "loss scale  1024 -> 256 (smallest 256, largest 1024)",
        "loss        0.5 -> 0.25 (smallest 0.25)",
        "            first overflow at step 2, last at step 3",
        "overflowed  unknown (2x)",
    ]
