"""The command line, in processes of its own: what it prints, writes and returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lossscale
from lossscale import LossScaleMonitor

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "lossscale", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def write(path):
    with LossScaleMonitor(path, progress=False, verbose=False).start() as monitor:
        for step in range(9):
            monitor.step((1.0 / (step + 1), step == 3, 512.0 if step < 3 else 256.0))


def test_doctor():
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        lossscale.__version__,
        "MindSpore   2",
        "device      CPU",
        "check  ",
        "self-test   passed",
        "all is well",
    ):
        assert part in done.stdout


def test_doctor_tells_what_is_wrong():
    done = run("doctor", LOSSSCALE_BACKEND="wrong")
    assert done.returncode == 1
    assert "problem     ValueError: The environment variable LOSSSCALE_BACKEND must be" in done.stdout
    assert "Traceback" not in done.stderr


def test_report_prints_and_draws(tmp_path):
    write(tmp_path / "run.jsonl")
    done = run("report", tmp_path / "run.jsonl")
    assert done.returncode == 0, done.stderr
    assert "overflows   1 (11.11% of the steps)" in done.stdout
    assert f"picture     {tmp_path / 'run.png'}" in done.stdout
    assert (tmp_path / "run.png").stat().st_size > 5000


def test_report_of_a_cut_file_without_a_picture(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-9])
    done = run("report", path, "--no-plot")
    assert done.returncode == 0
    assert "line 10, the last, is cut off" in done.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("content", "word"), [(None, "not a file"), (b"", "empty"), (b"step,loss\n", "not a history")])
def test_report_names_a_wrong_file(tmp_path, content, word):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = run("report", path)
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_wrong_usage():
    done = run("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "report" in done.stdout
    assert run().returncode == run("nonsense").returncode == 2
