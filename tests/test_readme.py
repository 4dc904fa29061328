"""README.md and README_CN.md show the same code, it runs, and the files they name exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README_CN.md")


def blocks(name, language=r"\w*"):
    return re.findall(rf"^```({language})\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)


def test_code_blocks_of_both_languages_are_identical():
    english, chinese = map(blocks, READMES)
    assert len(english) > 5
    assert english == chinese


@pytest.mark.parametrize("name", READMES)
def test_headings_and_tables_have_the_same_shape(name):
    text, reference = ((ROOT / each).read_text(encoding="utf-8") for each in (name, READMES[0]))
    for pattern in (r"^#+ ", r"^\|"):
        assert len(re.findall(pattern, text, re.M)) == len(re.findall(pattern, reference, re.M))


@pytest.mark.parametrize("name", [*READMES, "docs/troubleshooting.md"])
def test_links_lead_to_files(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    missing = [t for t in targets if "://" not in t and not (ROOT / name).parent.joinpath(t).exists()]
    assert not missing


@pytest.mark.processes
def test_python_blocks_run_from_top_to_bottom_as_one_script(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("\n".join(code for _, code in blocks("README.md", "python")), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "lossscale" in script.read_text(encoding="utf-8")
