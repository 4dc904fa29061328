"""Compile cases for a device, in a process of their own, on stand-ins for its libraries."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.devices import graphs, stand_ins

ROOT = Path(__file__).parents[2]


class Compiled(NamedTuple):
    """What came of a case: the error's text, empty if none, and where the graph was dumped."""

    error: str
    dump: Path

    @property
    def graph(self) -> graphs.Graph:
        """The graph of a case that compiled."""
        assert not self.error, self.error
        return graphs.read(self.dump)


def compile_in_process(stand_in_folder, folder, names, device, ranks, options):
    """Return a `Compiled` for each name; graphs are dumped into `folder`."""
    command = [sys.executable, "-m", "tests.devices.cases", str(folder), *names, "--device", device]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", *([value] if value is not True else [])]
    environment = {**stand_ins.environment(stand_in_folder, device, ranks), "GLOG_v": "4"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    results = {}
    for line in run.stdout.splitlines():
        if line.startswith('{"case"'):
            result = json.loads(line)
            results[result["case"]] = Compiled(result["error"], Path(result["dump"]))
    ended = f"the process ended with {run.returncode}: {run.stderr[-2000:]}"
    return {name: results.get(name, Compiled(ended, folder)) for name in names}
