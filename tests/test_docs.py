"""The Python blocks of the documents run and print what they say, and their links lead to files."""

import re
import runpy
from pathlib import Path

import pytest

from examples import grad_scaler
from lossscale import TrainOneStepWithLossScaleCell

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coming-from-pytorch.md"
TRAIN_STEP = ROOT / "docs" / "train-step.md"
MONITORING = ROOT / "docs" / "monitoring.md"
MIGRATION = ROOT / "examples" / "migration" / "README.md"


@pytest.mark.parametrize("page", [PAGE, TRAIN_STEP, MONITORING], ids=lambda page: page.stem)
def test_python_blocks_run_as_one_script(tmp_path, capsys, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    script = tmp_path / "page.py"  # MindSpore compiles from the source file
    script.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert page != PAGE or "'scale_value': 65536.0" in printed
    assert all(f"{line}\n" in printed for line in re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), re.M))


def test_the_stages_of_the_train_step_are_methods():
    text = TRAIN_STEP.read_text(encoding="utf-8")
    table = text[text.index("## Overriding a stage") : text.index("[examples/custom_train_step.py]")]
    names = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert len(names) == 6
    assert all(callable(getattr(TrainOneStepWithLossScaleCell, name)) for name in names)


def test_table_names_every_recipe():
    text = PAGE.read_text(encoding="utf-8")
    recipes = [recipe.__name__ for recipe in grad_scaler.RECIPES.values()]
    assert all(f"`{name}` |" in text for name in [*recipes, "several_losses_and_optimizers"])


@pytest.mark.parametrize("page", sorted([*(ROOT / "docs").glob("*.md"), MIGRATION]), ids=lambda page: page.stem)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert page.parent.joinpath(target).exists()
