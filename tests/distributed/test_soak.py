"""10,000 steps: the scale is the rule's at each of them, memory is flat, and the step is compiled once."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.distributed import launch, soak
from tests.oracles import DynamicScale

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def judge(path):
    found = np.load(path)
    rule = DynamicScale(1024.0, window=soak.WINDOW)
    assert found["scales"].tolist() == [rule.step(bad >= 0) for bad in soak.overflowing_rank()]
    early, late = found["memory"]
    assert abs(late - early) <= 0.02 * early
    assert found["compiled"] == 1


def test_one_process(tmp_path):
    command = [sys.executable, "-m", "tests.distributed.soak", str(tmp_path), "alone"]
    environment = {**os.environ, "PYTHONPATH": str(launch.ROOT)}
    subprocess.run(command, cwd=launch.ROOT, env=environment, check=True, timeout=900)
    judge(tmp_path / "soak_alone.npz")


def test_two_ranks(tmp_path):
    launch.run("tests.distributed.soak", 2, tmp_path / "logs", tmp_path, timeout=1800)
    judge(tmp_path / "soak_0.npz")
    judge(tmp_path / "soak_1.npz")
