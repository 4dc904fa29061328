"""What mkdocs does to the pages beside rendering them.

- Files of the repository that pages link to (examples, results, the changelog) become pages or pictures of the site,
  and the links are led there. So one link is right on the site and in the checkout.
- A picture with a twin `<name>-dark` is shown by its twin in dark mode.
- The notebook becomes a page, with the outputs that it was saved with.
- The list of all public names is written from the docstrings.
- The first line of reStructuredText's literal blocks (`::`), which docstrings use, is dropped.
"""

import ast
import base64
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
MIRRORED = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py") if path.name != "__init__.py"),
    "examples/migration/README.md",
    "benchmarks/RESULTS.md",
    "benchmarks/results.png",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "tests/test_batchnorm.py",
    "tests/test_migration.py",
)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)\)")
EVERY_NAME = "<!-- every public name -->"


def site_path(path):
    """Return where a file of the repository is on the site, as mkdocs names its sources; None if it is nowhere."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if path in MIRRORED:
        return f"repository/{path}" if path.endswith((".md", ".png")) else f"repository/{path}.md"
    return None


def repository_path(source):
    """Return where a page of the site is in the repository: the inverse of `site_path`."""
    inverse = {site_path(path): path for path in MIRRORED}
    return inverse.get(source, f"docs/{source}")


def outside_code(text, change):
    """Apply `change` to what is not in a fenced block."""
    parts = re.split(r"(^`{3,}.*?^`{3,}$)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def lead_links(markdown, source):
    """Lead relative links of the page `source`, which are right in the repository, to where their targets are here."""
    folder = posixpath.dirname(repository_path(source))

    def led(match):
        target, anchor = match.group(1), match.group(2) or ""
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        found = site_path(posixpath.normpath(posixpath.join(folder, target)))
        return posixpath.relpath(found, posixpath.dirname(source) or ".") + anchor if found else match.group(0)

    return outside_code(markdown, lambda text: LINK.sub(led, text))


def with_dark_twins(markdown, source, uris):
    """Show the twin `<name>-dark` of a picture in dark mode, where there is one."""

    def pair(match):
        name, dot, ending = match.group(2).rpartition(".")
        twin = f"{name}-dark.{ending}"
        if not dot or posixpath.normpath(posixpath.join(posixpath.dirname(source), twin)) not in uris:
            return match.group(0)
        alt = match.group(1)
        return f"![{alt}]({match.group(2)}#only-light) ![{alt}]({twin}#only-dark)"

    return outside_code(markdown, lambda text: PICTURE.sub(pair, text))


def notebook_page(path):
    """Return a notebook as Markdown, and its pictures as a dict from name to bytes."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts, pictures = [], {}
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}_{number}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![{cell['metadata'].get('alt', '')}]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
                parts.append(f'```text title="output"\n{text}\n```')
    return "\n\n".join(parts) + "\n", pictures


def names_table():
    """Return a table of all names on the pages of docs/api, with the first sentence of their docstrings."""
    first = {}
    for module in [*(ROOT / "cells").rglob("*.py"), *(ROOT / "lossscale").rglob("*.py")]:
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                first[node.name] = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    rows = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: lossscale\.(\w+)$", page.read_text(encoding="utf-8"), re.M):
            rows[name] = f"| [`{name}`]({page.name}#lossscale.{name}) | {first.get(name, '')} |"
    return "\n".join(["| name | what it is |", "| --- | --- |", *(rows[name] for name in sorted(rows, key=str.lower))])


def on_files(files, config):
    """Add what is not in docs/."""
    for path in MIRRORED:
        if path.endswith((".md", ".png")):
            content = (ROOT / path).read_bytes()
        else:
            code = (ROOT / path).read_text(encoding="utf-8")
            language = "python" if path.endswith(".py") else "text"
            content = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{code}````\n"
        files.append(File.generated(config, site_path(path), content=content))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page, pictures = notebook_page(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links, and pair pictures."""
    source = page.file.src_uri
    markdown = markdown.replace(EVERY_NAME, names_table() if EVERY_NAME in markdown else "")
    return with_dark_twins(lead_links(markdown, source), source, {file.src_uri for file in files})


def on_page_content(html, page, config, files):
    """Drop the `::` in front of literal blocks."""
    return re.sub(r"::</p>", ":</p>", re.sub(r"<p>::</p>\n?", "", html))
