"""The patches of the kernel still fit its source, and `tests_of.py` names what is there."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutations.tests_of import ALSO, NATIVE, first_tests

ROOT = Path(__file__).parents[2]
PATCHES = sorted((Path(__file__).parent / "native").glob("*.patch"))


def test_there_are_a_dozen():
    assert len(PATCHES) >= 12


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_fits(patch):
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)


def test_the_modules_and_tests_that_are_named_exist():
    named = [*ALSO, *NATIVE, *(f"tests/{Path(module).parts[0]}/{t}.py" for module in ALSO for t in ALSO[module])]
    assert not [name for name in named if not (ROOT / name).is_file()]
    modules = [path for package in ("cells", "lossscale") for path in (ROOT / package).rglob("*.py")]
    for module in modules:
        assert all((ROOT / test).exists() for test in first_tests(str(module.relative_to(ROOT))))
