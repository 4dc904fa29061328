import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cells
import lossscale

ROOT = Path(lossscale.__file__).parents[1]
PACKAGES = ("cells", "lossscale")
PUBLIC_CELLS = sorted(set(cells.__all__))

STEP = """\
import json
import mindspore as ms
before = [ms.get_context(key) for key in ("mode", "device_target", "save_graphs", "max_call_depth")]
import cells
import lossscale
after = [ms.get_context(key) for key in ("mode", "device_target", "save_graphs", "max_call_depth")]
assert before == after, (before, after)
import numpy as np
from mindspore import Tensor, nn
net = nn.Dense(4, 1)
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
step = lossscale.build_train_network(net, optimizer, nn.MSELoss(), level="O2")
loss, overflow, scale = step(Tensor(np.ones((8, 4), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
print(json.dumps([lossscale.__file__, cells.__file__, float(scale)]))
"""


def python(code, cwd, *paths):
    """Run code in a new process that finds only `paths`, beside what is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what git would hold, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    leave = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info", "rank_0", "kernel_meta")
    shutil.copytree(ROOT, source, ignore=leave)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True, capture_output=True, timeout=300
    )
    (built,) = folder.glob("lossscale-*.whl")
    return built


@pytest.mark.processes
def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    kept = [name for name in names if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in kept} == set(PACKAGES)
    expected = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in expected} <= set(kept)
    assert {"cells/py.typed", "lossscale/py.typed"} <= set(kept)
    assert any(name.endswith("LICENSE") for name in names)
    if shutil.which("g++"):
        assert any(name.startswith("cells/_native.") and name.endswith(".so") for name in names)


@pytest.mark.processes
def test_installed_wheel_trains_from_another_folder(wheel, tmp_path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", target, wheel], check=True, capture_output=True, timeout=300
    )
    script = tmp_path / "script.py"
    script.write_text(STEP, encoding="utf-8")
    done = python(f"import runpy; runpy.run_path({str(script)!r})", tmp_path, target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(target)) == 2, done.stdout


@pytest.mark.processes
def test_import_changes_nothing_in_mindspores_context(tmp_path):
    done = python(STEP.split("import numpy")[0], tmp_path, ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_import_builds_no_native_op(tmp_path):
    """On Ascend and GPU there is none, and the device is often chosen after the import."""
    refuse = (
        "from mindspore import ops\ndef refuse(*args, **kwargs):\n    raise RuntimeError\nops.Custom.__init__ = refuse"
    )
    done = python(f"{refuse}\nimport lossscale", tmp_path, ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("as_module", [True, False])
def test_another_cells_package_is_named(tmp_path, as_module):
    foreign = tmp_path / ("cells.py" if as_module else "cells/__init__.py")
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("ANSWER = 42\n", encoding="utf-8")
    done = python("import lossscale", tmp_path, tmp_path, ROOT)
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: lossscale needs its own package 'cells'")
    assert str(foreign) in message


def test_every_public_cell_is_reexported():
    assert set(PUBLIC_CELLS) <= set(lossscale.__all__)
    assert all(getattr(lossscale, name) is getattr(cells, name) for name in PUBLIC_CELLS)


@pytest.mark.parametrize("package", [cells, lossscale])
def test_public_names_exist(package):
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def imported_by(path):
    """The top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("relative import" if node.level else node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("folder", "never"),
    [
        ("cells", {"lossscale", "examples", "benchmarks", "tests"}),
        ("lossscale", {"examples", "benchmarks", "tests"}),
        ("examples", {"cells", "benchmarks", "tests"}),
    ],
)
def test_imports_point_one_way(folder, never):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        assert not imported_by(path) & {*never, "relative import"}, path


def test_nothing_but_mindspore_and_numpy_is_needed():
    allowed = {*sys.stdlib_module_names, "mindspore", "numpy", *PACKAGES}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert imported_by(path) <= allowed, path


def test_make_has_every_target():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"install", "train", "test", "test-all", "test-oldest", "check", "bench", "clean"} <= targets


def test_ci_runs_the_same_targets():
    assert "make check test" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    (workflow,) = (ROOT / ".github/workflows").glob("*.yml")
    assert re.search(r"make check|\.ci/run", workflow.read_text(encoding="utf-8"))
