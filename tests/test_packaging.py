import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import cells
import lossscale

ROOT = Path(lossscale.__file__).parents[1]
PACKAGES = ("cells", "lossscale")
SOURCES = {".py", ".cc", ".h", ".typed"}
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
def source(tmp_path_factory):
    """A copy of what git would hold, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("source") / "lossscale"
    leave = shutil.ignore_patterns(
        "__pycache__", ".*", "build", "dist", "site", "*.so", "*.egg-info", "rank_0", "kernel_meta"
    )
    shutil.copytree(ROOT, folder, ignore=leave)
    return folder


def built_wheel(source, folder):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True, capture_output=True, timeout=300
    )
    (built,) = folder.glob("lossscale-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return built_wheel(source, tmp_path_factory.mktemp("wheel"))


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


@pytest.mark.slow
@pytest.mark.processes
def test_wheel_passes_the_smoke_test_of_a_release(wheel, tmp_path):
    """In an environment without the checkout; MindSpore, a gigabyte, is that of this one."""
    environment = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    there = environment / "bin" / "python"
    pip = [there, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
    subprocess.run([*pip, wheel], check=True, capture_output=True, timeout=120)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "mindspore.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    native = ["--native"] if shutil.which("g++") else []
    command = [there, ROOT / ".ci" / "smoke.py", *native]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"smoke test passed: {packages}/lossscale/" in done.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_source_distribution_holds_what_a_build_needs(source, tmp_path):
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("lossscale-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        tar.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    wanted = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in SOURCES]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names
    assert {"LICENSE", "README.md", "setup.py", "pyproject.toml", "CHANGELOG.md"} <= names
    unpacked = archive.name[: -len(".tar.gz")]
    names = zipfile.ZipFile(built_wheel(tmp_path / unpacked, tmp_path)).namelist()
    assert any(name.startswith("cells/_native.") for name in names) == bool(shutil.which("g++"))


@pytest.mark.slow
@pytest.mark.processes
def test_native_kernel_compiles_for_aarch64(tmp_path):
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no cross compiler: apt-get install g++-aarch64-linux-gnu")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    flags = re.findall(r'^ +"(-[^"]+)",', setup[setup.index("extra_compile_args") : setup.index("extra_link")], re.M)
    sources = sorted((ROOT / "cells" / "native").glob("*.cc"))
    command = [compiler, *flags, "-Wall", "-Werror", "-fPIC", "-shared", *sources, "-o", tmp_path / "native.so"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "native.so").read_bytes()[18:20] == b"\xb7\x00"  # ELF's number of the machine


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
    assert {
        "install",
        "train",
        "test",
        "test-all",
        "test-oldest",
        "check",
        "bench",
        "docs",
        "docs-serve",
        "clean",
    } <= targets


def test_ci_runs_the_same_targets():
    assert "make check test" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert re.search(r"make check|\.ci/run", workflow)
    assert "make docs" in (ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8")


def test_release_builds_for_both_machines_and_tries_what_it_built():
    release = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert {"ubuntu-latest", "ubuntu-24.04-arm"} <= set(re.findall(r"ubuntu-[\w.-]+", release))
    assert "cibuildwheel@" in release and "--sdist" in release
    assert release.count(".ci/smoke.py") == 2  # the wheel, and the source distribution
