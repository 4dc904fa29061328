"""Stand-ins, built once a test run, and cases compiled on them, each set in one process."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices import compiling, stand_ins

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def stand_in_folder(tmp_path_factory, worker_id="master"):
    """Return the folder of the stand-ins. Where they can't be built: skip, or fail in CI."""
    reason = stand_ins.why_not()
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" and "not found" in reason else pytest.skip)(reason)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "stand_ins"
    with open(shared / "stand_ins.lock", "w", encoding="utf-8") as lock:  # test processes share one folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            stand_ins.build(folder)
            (folder / "built").touch()
    return folder


@pytest.fixture
def run_on(stand_in_folder, tmp_path):
    """Return a function that runs Python with some arguments for a device."""

    def run(device, *arguments):
        environment = {**stand_ins.environment(stand_in_folder, device), "GLOG_v": "4"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def compile_cases(stand_in_folder, tmp_path_factory):
    """Return a function that compiles cases, in one process, to a `compiling.Compiled` each, and remembers them."""
    done = {}

    def compile_all(names, device="Ascend", ranks=1, **options):
        key = (device, ranks, *sorted(options.items()))
        kept = done.setdefault(key, {})
        todo = [name for name in names if name not in kept]
        if todo:
            kept.update(
                compiling.compile_in_process(
                    stand_in_folder, tmp_path_factory.mktemp("graphs"), todo, device, ranks, options
                )
            )
        return {name: kept[name] for name in names}

    return compile_all
