"""Run a notebook from top to bottom and write its outputs into it: `make docs-notebook`."""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "what_a_loss_scale_does.ipynb"


def run(path, seconds=300):
    """Return the notebook with the outputs of a fresh run; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of a run are of no use to a reader
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    nbformat.write(run(path), path)
