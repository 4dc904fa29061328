"""`lossscale run`: scripts of users, as `python` runs them, with this library's train step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lossscale
from lossscale.cli import main

_TRAIN = """
import sys
import numpy as np
import mindspore as ms
from mindspore import nn
from mindspore.nn import TrainOneStepWithLossScaleCell, DynamicLossScaleUpdateCell

ms.set_context(device_target="Ascend", mode=ms.PYNATIVE_MODE)
ms.set_device("Ascend")
print("ARGV", sys.argv[1:], __name__, sys.path[0] == __file__.rsplit("/", 1)[0])
import helper

class Step(TrainOneStepWithLossScaleCell):
    def construct(self, x, y):
        return super().construct(x, y)

net = nn.Dense(3, 1)
step = Step(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.01, 0.9),
            DynamicLossScaleUpdateCell(1024.0, 2, 100))
good, bad, y = np.ones((4, 3), np.float32), np.full((4, 3), np.inf, np.float32), np.zeros((4, 1), np.float32)
data = ms.dataset.GeneratorDataset([(good, y), (bad, y), (good, y)], ["x", "y"], shuffle=False)
ms.Model(step).train(2, data)
print("SCALE", float(step.scale_sense.asnumpy()), ms.get_context("mode") == ms.GRAPH_MODE)
sys.exit(7)
"""


def _run(folder, *arguments):
    root = str(Path(lossscale.__file__).parent.parent)
    command = [sys.executable, "-m", "lossscale", "run", *arguments]
    environment = {**os.environ, "PYTHONPATH": root, "GLOG_v": "3"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_an_unmodified_script_trains_on_this_device_and_is_recorded(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(_TRAIN, encoding="utf-8")
    (scripts / "helper.py").write_text("", encoding="utf-8")
    options = ("--device", "CPU", "--mode", "graph", "--monitor", "run.jsonl")
    done = _run(tmp_path, *options, str(scripts / "train.py"), "--device", "7")
    assert done.returncode == 7, done.stderr
    assert "ARGV ['--device', '7'] __main__ True" in done.stdout
    assert "SCALE 256.0 True" in done.stdout
    assert "set_context(device_target='Ascend') of the script is overridden: 'CPU'" in done.stderr
    assert "set_device('Ascend') of the script is overridden: 'CPU'" in done.stderr
    records = lossscale.read_history(tmp_path / "run.jsonl")
    assert [record["overflow"] for record in records] == [False, True, False] * 2
    assert (tmp_path / "run.png").is_file()


def test_a_script_that_fails_shows_only_its_own_frames(tmp_path):
    (tmp_path / "bad.py").write_text("def f():\n    raise KeyError('mine')\n\nf()\n", encoding="utf-8")
    done = _run(tmp_path, "bad.py")
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr
    assert [frame.split('"')[1].split("/")[-1] for frame in frames] == ["bad.py", "bad.py"]


def test_a_module_runs_as_main(tmp_path):
    (tmp_path / "tool.py").write_text("import sys\nprint('TOOL', __name__, sys.argv[1:])\n", encoding="utf-8")
    done = _run(tmp_path, "-m", "tool", "-x")
    assert done.returncode == 0, done.stderr
    assert "TOOL __main__ ['-x']" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.py"], "there is no script none.py"),
        (["-m", "none"], "there is no module none"),
        (["own.py"], "a module 'cells' of its own"),
    ],
)
def test_what_cannot_start_says_why(tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import cells\n", encoding="utf-8")
    if arguments == ["own.py"]:
        (tmp_path / "cells.py").write_text("", encoding="utf-8")
    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err
