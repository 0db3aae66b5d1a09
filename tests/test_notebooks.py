"""The notebooks run from top to bottom with the real parts, and show what their prose says."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_is_committed_without_outputs(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    assert all(cell.execution_count is None and not cell.outputs for cell in cells if cell.cell_type == "code")


def test_one_episode_goes_from_prompt_to_gradient():
    notebook = nbformat.read(ROOT / "notebooks/01_one_episode.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if output.output_type in ("display_data", "execute_result")]
    assert any("image/png" in data for data in shown), "the packed row is shown as a picture"
    changes = ast.literal_eval(shown[-1]["text/plain"])
    assert changes["rewarded"] > changes["not rewarded"]
