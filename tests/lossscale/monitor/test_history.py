"""The history file: the same values back, unfinished, empty and foreign files, going on in one, the summary."""

import json
import math
import re
from pathlib import Path

import pytest

from lossscale import LossScaleMonitor, plot_history, read_history
from lossscale.monitor import summarize

FIXTURES = Path(__file__).parents[2] / "fixtures"
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


HEADER = b'{"format": "lossscale history", "version": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"step,loss\n1,0.5\n", r"is not a history .*line 1"),
        (b'{"step": 1}\n', r"is not a history .*line 1"),
        (b"[1]\n", r"is not a history .*line 1"),
        (b"\x89PNG\xff\xfe\n", r"is not a history .*line 1"),
        (b"[" * 200_000 + b"\n", r"is not a history .*line 1"),
        (b'{"format": "lossscale history", "version": 9}\n', r"\(line 1\) has version 9"),
        (b'{"format": "lossscale history"}\n', r"\(line 1\) has version None"),
        (HEADER, "holds no step"),
        (HEADER + b'{"step": 1}\n', r"is not a history .*line 2"),
        (HEADER + b'x\n{"step": 1}\n', r"is not a history .*line 2"),
        (HEADER + b"[" * 200_000 + b"\n", r"is not a history .*line 2"),
    ],
)
def test_errors_name_the_file(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} .*{message}|{re.escape(str(path))} {message}"):
        read_history(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", "null"),
        ("loss", "[0.5]"),
        ("loss", "1" + "0" * 400),
        ("loss", '"big"'),
        ("loss", "true"),
        ("loss_scale", "{}"),
        ("next_loss_scale", "null"),
        ("grad_norm", "[]"),
        ("step", '"1"'),
        ("step", "1.5"),
        ("step", "true"),
        ("steps", "0"),
        ("steps", "null"),
        ("in_a_row", "-1"),
        ("new_overflows", "[]"),
        ("overflow", "1"),
        ("parameters", "3"),
        ("parameters", "[3]"),
    ],
)
def test_a_malformed_record_names_file_line_and_key(tmp_path, key, value):
    path = tmp_path / "run.jsonl"
    record = json.loads((FIXTURES / "0.1.0" / "run.jsonl").read_text().splitlines()[1])
    good = json.dumps(record)
    lines = HEADER.decode(), good, json.dumps({**record, key: "PLACE"}).replace('"PLACE"', value)
    path.write_text("\n".join(lines[:1]) + "\n".join(lines[1:]) + "\n")
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is not a history .*line 3: '{key}' must be"):
        read_history(path)
    with pytest.raises(ValueError, match=rf"'history' must hold records of LossScaleMonitor: '{key}' must be"):
        plot_history([{**record, key: json.loads(value)}], tmp_path / "run.png")


def test_a_history_of_0_1_0_is_read_and_gone_on_in(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes((FIXTURES / "0.1.0" / "run.jsonl").read_bytes())
    write(path, STEPS[:1], append=True)
    records = read_history(path)
    assert [(r["step"], r["overflow"], r["loss_scale"]) for r in records] == [
        (1, False, 8.0),
        (2, True, 8.0),
        (3, False, 4.0),
        (1, False, 1024.0),
    ]
    assert math.isnan(records[1]["loss"])


@pytest.mark.parametrize("left", [0, 1, 20, len(HEADER) - 1, len(HEADER)])
def test_append_goes_on_after_a_run_killed_before_its_first_step(tmp_path, left):
    path = tmp_path / "run.jsonl"
    path.write_bytes(HEADER[:left])
    write(path, append=True)
    assert [r["step"] for r in read_history(path)] == [1, 2, 3, 4]


def test_append_refuses_a_foreign_file_and_leaves_it(tmp_path):
    path = tmp_path / "notes.txt"
    for content in (b"my notes\nmore", b"my notes"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a history"):
            write(path, append=True)
        assert path.read_bytes() == content


def test_a_cut_last_line_is_cut_off_in_place(tmp_path, monkeypatch):
    """A crash while the file is rewritten would lose all of it."""
    path = tmp_path / "run.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-20])
    monkeypatch.setattr(type(path), "write_bytes", pytest.fail)
    with pytest.warns(UserWarning, match="cut off"):
        write(path, STEPS[:1], append=True)
    assert len(read_history(path)) == 4


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 0.0])
def test_a_scale_that_is_none_is_recorded_summed_up_and_drawn(tmp_path, scale, capsys):
    path = tmp_path / "run.jsonl"
    with LossScaleMonitor(path, progress=False).start() as monitor:
        monitor.step((0.5, False, 8.0))
        monitor.step((0.5, True, scale))
    assert f"scale 8 -> {scale:g}" in capsys.readouterr().out
    assert f"{scale:g}" in summarize(read_history(path))
    assert plot_history(path, tmp_path / "run.png").stat().st_size > 5000


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl is not a file"):
        read_history(tmp_path / "none.jsonl")


def test_summary():
    """The first step moves the scale, and one record stands for four steps with two overflows."""
    monitor = LossScaleMonitor(progress=False, verbose=False).start()
    for outputs in STEPS:
        monitor.step(outputs)
    first, *others, last = monitor.history
    records = [{**first, "loss_scale": 4096.0}, *others, {**last, "step": 7, "steps": 4, "new_overflows": 2}]
    assert summarize(records).splitlines() == [
        "steps       1 to 7 (7 recorded)",
        "overflows   4 (57.14% of the steps), longest run 2",
        "loss scale  4096 -> 256 (smallest 256, largest 4096)",
        "loss        0.5 -> 0.25 (smallest 0.25)",
        "            first overflow at step 2, last at step 3",
        "overflowed  unknown (2x)",
    ]
