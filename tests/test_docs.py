"""The Python blocks of docs/coming-from-pytorch.md run, and its links lead to files."""

import re
import runpy
from pathlib import Path

from examples import grad_scaler

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-pytorch.md"


def test_python_blocks_run_as_one_script(tmp_path, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    script = tmp_path / "page.py"  # MindSpore compiles from the source file
    script.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(script))
    assert "'scale_value': 65536.0" in capsys.readouterr().out


def test_table_names_every_recipe():
    text = PAGE.read_text(encoding="utf-8")
    recipes = [recipe.__name__ for recipe in grad_scaler.RECIPES.values()]
    assert all(f"`{name}` |" in text for name in [*recipes, "several_losses_and_optimizers"])


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert PAGE.parent.joinpath(target).exists()
