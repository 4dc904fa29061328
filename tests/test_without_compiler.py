"""A wheel built without a compiler: it installs, and the suite passes by plain ops."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.test_packaging import ROOT

SUITE = ["test_backends.py", "test_train_step.py", "test_scale_update.py"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which a wheel is installed that was built where every compiler fails."""
    folder = tmp_path_factory.mktemp("without_compiler")
    leave = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info", "rank_0", "*.so")
    shutil.copytree(ROOT, folder / "source", ignore=leave)
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"]
    subprocess.run(wheel, check=True, capture_output=True, timeout=300, env=environment)
    (built,) = folder.glob("lossscale-*.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    install = [*pip, "install", "--no-deps", "--target", folder / "site", built]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    shutil.copytree(ROOT / "tests", folder / "run/tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder / "run")
    return folder


@pytest.mark.slow
@pytest.mark.processes
def test_the_suite_passes_by_plain_ops(installed):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (installed / "site", installed / "run")))}
    environment.pop("LOSSSCALE_BACKEND", None)
    code = "import lossscale; assert lossscale.backend() == 'plain', lossscale.__file__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=installed / "run", env=environment, timeout=120)
    suite = [f"tests/cells/{name}" for name in SUITE]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not processes",
        "-p",
        "no:cacheprovider",
        *suite,
    ]
    result = subprocess.run(
        command, cwd=installed / "run", env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout[-3000:]
