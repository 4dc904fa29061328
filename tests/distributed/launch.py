"""Start a worker module on several ranks by MindSpore's own launcher; bounded in time, nothing left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """A job that has ended: `code` is msrun's return code, None if its time was up; `text` all that was logged."""

    code: object
    text: str


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(module, ranks, logs, *arguments, **environment):
    """Start a module, or the script at a path, on `ranks` ranks; return the process of msrun, leader of their group."""
    logs.mkdir(parents=True, exist_ok=True)
    msrun = Path(sys.executable).parent / "msrun"
    script = module if isinstance(module, Path) else ROOT / (module.replace(".", "/") + ".py")
    command = [str(msrun), f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={free_port()}"]
    command += ["--join=True", f"--log_dir={logs}", str(script), *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    settings = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "MS_NODE_TIMEOUT": "20", **environment}
    with open(logs / "msrun.log", "w") as log:
        return subprocess.Popen(
            command, cwd=logs, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def end(process, logs, timeout):
    """Wait for a job that was started; kill all that is left of it."""
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(process)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(logs.glob("*.log")))
    return Job(code, text)


def kill_group(process):
    """Kill msrun, its scheduler and its workers at once, as a crash of the machine would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(module, ranks, logs, *arguments, timeout=180, **environment):
    """Run a worker module to its end, which must be a good one."""
    job = end(start(module, ranks, logs, *arguments, **environment), logs, timeout)
    assert job.code == 0, f"{module} ended with {job.code}:\n{job.text[-6000:]}"
    return job
