"""The pages of docs/: their Python blocks run and print what they say, their links and anchors lead somewhere."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import lossscale
from examples import grad_scaler
from tests.distributed import launch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
UNDER_MSRUN = DOCS / "distributed.md"  # its blocks need several ranks
WITH_PYTHON = [
    page for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text("utf-8") and page != UNDER_MSRUN
]
MIGRATION = ROOT / "examples" / "migration" / "README.md"
LINKING = [*sorted(DOCS.rglob("*.md")), MIGRATION, *(ROOT / name for name in ("README.md", "README_CN.md"))]
SAID = r"^ *print\(.*\)  # (.*)$"
NOTEBOOK = DOCS / "notebooks" / "what_a_loss_scale_does.ipynb"


def blocks(page):
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S))


@pytest.mark.filterwarnings("ignore:imported before patch_mindspore")  # the tests subclass MindSpore's cells
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_blocks_run_as_one_script(tmp_path, capsys, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"  # MindSpore compiles from the source file
    script.write_text(blocks(page), encoding="utf-8")
    runpy.run_path(str(script))
    printed = capsys.readouterr().out.splitlines()
    rest = iter(printed)  # what a page says comes in the order in which it says so
    missing = [line for line in re.findall(SAID, blocks(page), re.M) if line not in rest]
    assert not missing, printed


def test_resume_page_resumes_a_run_that_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text(blocks(DOCS / "resume.md"), encoding="utf-8")
    unbroken = runpy.run_path(str(script))["unbroken"]
    assert len({loss for loss, _, _ in unbroken}) == 6
    assert len({scale for _, _, scale in unbroken[3:]}) > 1 and not all(overflow for _, overflow, _ in unbroken[3:])


def test_every_page_says_python_where_it_shows_python():
    unchecked = [page.name for page in DOCS.rglob("*.md") if re.search(r"^```py$", page.read_text("utf-8"), re.M)]
    assert not unchecked


@pytest.mark.slow
@pytest.mark.processes
def test_page_on_several_machines_runs_on_two_ranks(tmp_path):
    script = tmp_path / "page.py"
    script.write_text(blocks(UNDER_MSRUN), encoding="utf-8")
    job = launch.run(script, 2, tmp_path / "logs", timeout=240)
    assert job.code == 0, job.text[-3000:]
    assert all(f"trained to step 20 by rank {rank}" in job.text for rank in (0, 1))


def test_both_languages_of_start_show_the_same_code():
    english, chinese = (blocks(DOCS / name) for name in ("start.md", "start-cn.md"))
    assert english == chinese


def test_the_stages_of_the_train_step_are_methods():
    text = (DOCS / "train-step.md").read_text("utf-8")
    table = text[text.index("## Overriding a stage") : text.index("[examples/custom_train_step.py]")]
    names = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert len(names) >= 6
    assert all(callable(getattr(lossscale.TrainOneStepWithLossScaleCell, name)) for name in names)


def test_table_names_every_recipe():
    text = (DOCS / "coming-from-pytorch.md").read_text("utf-8")
    recipes = [recipe.__name__ for recipe in grad_scaler.RECIPES.values()]
    assert all(f"`{name}` |" in text for name in [*recipes, "several_losses_and_optimizers"])


# Links and anchors ---------------------------------------------------------------------------------------------------


def anchors(path):
    """The anchors of a page: its headings, as the site and GitHub name them, and the names of its API entries."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
    return slugs | set(re.findall(r"^::: (lossscale\.\w+)$", text, re.M))


def broken_links(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    broken = []
    for target in (target for target in targets if "://" not in target):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_resolve(page):
    assert not broken_links(page)


def test_a_broken_anchor_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](page.md#two) [c](other.md)\n", encoding="utf-8")
    assert broken_links(page) == ["page.md#two", "other.md"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_pictures_have_alt_texts(page):
    text = page.read_text("utf-8")
    assert all(len(alt) > 10 for alt in re.findall(r"!\[([^\]]*)\]\(", text))
    assert all(re.search(r'alt="[^"]{10,}"', tag) for tag in re.findall(r"<img[^>]*>", text))


# The API reference ---------------------------------------------------------------------------------------------------


def test_every_public_name_has_one_entry():
    entries = [
        name
        for page in (DOCS / "api").glob("*.md")
        for name in re.findall(r"^::: lossscale\.(\w+)$", page.read_text("utf-8"), re.M)
    ]
    assert sorted(entries) == sorted(lossscale.__all__)


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert not [page for page in pages if not re.search(rf" {re.escape(page)}$", config, re.M)]


# Texts of errors, pictures, glossary ---------------------------------------------------------------------------------


def test_messages_of_the_library_that_troubleshooting_quotes_exist():
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    table = text[
        text.index("## What the errors of lossscale mean") : text.index("## What the errors of MindSpore mean")
    ]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.M)
    sources = [path.read_text("utf-8") for package in ("cells", "lossscale") for path in (ROOT / package).rglob("*.py")]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # one literal out of several lines
    joined = re.sub(r"\{[^{}]*\}", "…", joined)
    assert len(quoted) > 8
    for message in quoted:
        # A number or a name in the message may be a value that the source puts in.
        pieces = [
            piece.strip() for piece in re.split(r"…|\b[A-Z_]{6,}|\b\d+\b|'\w+'", message) if len(piece.strip()) > 8
        ]
        assert pieces and all(piece in joined for piece in pieces), message


def test_glossary_has_fifteen_words():
    text = (DOCS / "glossary.md").read_text("utf-8")
    assert len(re.findall(r"^\| \*\*", text, re.M)) == 15


def test_diagram_is_what_the_script_draws_and_has_a_dark_twin():
    draw = runpy.run_path(str(DOCS / "draw.py"))
    light = (DOCS / "images" / "data-flow.svg").read_text("utf-8")
    assert draw["data_flow"]() == light
    assert draw["dark"](light) == (DOCS / "images" / "data-flow-dark.svg").read_text("utf-8") != light
    for picture in (DOCS / "images").glob("*.svg"):
        twin = picture.stem.removesuffix("-dark") + ("" if picture.stem.endswith("-dark") else "-dark")
        assert picture.with_stem(twin).exists()


# The notebook --------------------------------------------------------------------------------------------------------


def shown(notebook):
    """The lines that the cells of a notebook print, and how many pictures they show."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return (
        [line for output in outputs for line in "".join(output.get("text", "")).splitlines()],
        sum("image/png" in output.get("data", {}) for output in outputs),
    )


def test_notebook_shows_its_outputs():
    lines, pictures = shown(json.loads(NOTEBOOK.read_text("utf-8")))
    assert pictures == 3
    losses = {line[:27].strip(): float(re.search(r"loss=([\d.]+)", line).group(1)) for line in lines if "loss=" in line}
    plain, bare, scaled = losses.values()
    assert bare > 1.5 * plain and scaled < 1.5 * plain  # what its text says
    assert all(
        cell["metadata"].get("alt")
        for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
        if any("image/png" in out.get("data", {}) for out in cell.get("outputs", []))
    )


@pytest.mark.slow
@pytest.mark.processes
def test_notebook_runs_from_top_to_bottom():
    pytest.importorskip("nbclient", reason='the notebook needs nbclient: pip install ".[notebook]"')
    sys.path.insert(0, str(DOCS))
    try:
        fresh = importlib.import_module("run_notebook").run(NOTEBOOK)
    finally:
        sys.path.remove(str(DOCS))
    lines, pictures = shown(json.loads(NOTEBOOK.read_text("utf-8")))
    new_lines, new_pictures = shown(fresh)
    assert new_pictures == pictures
    assert [re.sub(r"[\d.]+", "", line) for line in new_lines] == [re.sub(r"[\d.]+", "", line) for line in lines]
