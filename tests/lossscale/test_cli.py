"""The command line, in processes of its own: what it prints, writes and returns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lossscale
from lossscale import LossScaleMonitor
from lossscale.cli import main
from tests.pictures import assert_picture

ROOT = Path(__file__).parents[2]


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


@pytest.mark.processes
def test_doctor():
    done = run("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        lossscale.__version__,
        "MindSpore   2",
        "device      CPU",
        "check  ",
        "self-test   passed",
        "convolution ",
        "all is well",
    ):
        assert part in done.stdout


@pytest.mark.processes
def test_doctor_tells_what_is_wrong():
    done = run("doctor", LOSSSCALE_BACKEND="wrong")
    assert done.returncode == 1
    assert "problem     ValueError: The environment variable LOSSSCALE_BACKEND must be" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_report_prints_and_draws(tmp_path):
    write(tmp_path / "run.jsonl")
    done = run("report", tmp_path / "run.jsonl")
    assert done.returncode == 0, done.stderr
    assert "overflows   1 (11.11% of the steps)" in done.stdout
    assert f"picture     {tmp_path / 'run.png'}" in done.stdout
    assert_picture(tmp_path / "run.png")


@pytest.mark.processes
def test_report_of_a_cut_file_without_a_picture(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-9])
    done = run("report", path, "--no-plot")
    assert done.returncode == 0
    assert "line 10, the last, is cut off" in done.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.processes
@pytest.mark.parametrize(("content", "word"), [(None, "not a file"), (b"", "empty"), (b"step,loss\n", "not a history")])
@pytest.mark.processes
def test_report_names_a_wrong_file(tmp_path, content, word):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    done = run("report", path)
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.processes
def test_help_and_wrong_usage():
    done = run("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "report" in done.stdout
    assert run().returncode == run("nonsense").returncode == 2


def test_report_writes_where_it_says_and_not_over_the_history(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.png")
    content = (tmp_path / "run.png").read_bytes()
    assert main(["report", "run.png"]) == main(["report", "run.png", "-o", "run.png"]) == 1
    assert capsys.readouterr().err.count("would replace the history that it shows: name another one") == 2
    assert main(["report", "run.png", "-o", "."]) == 1
    assert "is a folder: name a picture in it" in capsys.readouterr().err
    assert (tmp_path / "run.png").read_bytes() == content
    assert main(["report", "run.png", "-o", "drawn"]) == 0
    assert "picture     drawn.png" in capsys.readouterr().out
    assert_picture(tmp_path / "drawn.png")
    assert {path.name for path in tmp_path.iterdir()} == {"run.png", "drawn.png"}


@pytest.mark.parametrize("line", ["null", '{"step": "1"}', "[" * 200_000])
def test_report_of_a_malformed_record_names_its_line(tmp_path, capsys, line):
    path = tmp_path / "run.jsonl"
    write(path)
    with path.open("a") as stream:
        stream.write(line + "\n")
    assert main(["report", str(path)]) == 1
    assert f"{path} is not a history of LossScaleMonitor (line 11" in capsys.readouterr().err
