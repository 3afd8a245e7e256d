"""The notebooks among the examples run from the first cell to the last, and show what they should.

This needs nbclient and ipykernel, which are in the extra `dev`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import ebbtide
from test_docs import ROOT

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
REASON = 'needs nbclient and ipykernel: pip install "ebbtide[dev]"'
SHOWN = {
    "handle.stats": "saved_bytes",
    "handle.inspect()": "decision",
    "handle.trace": "<img",
    "handle.plan": "budget",
    "schedule": "order:",
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each notebook, with the outputs of its cells."""
    nbformat = pytest.importorskip("nbformat", reason=REASON)
    nbclient = pytest.importorskip("nbclient", reason=REASON)
    pytest.importorskip("ipykernel", reason=REASON)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # The kernel runs in another directory, and finds the package that is tested here.
        package = str(Path(ebbtide.__file__).parents[1])
        patch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_WAIT_POLICY", "passive")  # the tests share their cores
        for path in NOTEBOOKS:
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
            place = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
            client = nbclient.NotebookClient(
                notebook, timeout=200, kernel_name="python3", resources=place
            )
            found[path.name] = client.execute()  # an error of a cell is an error here
    return found


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


def test_every_cell_ran_without_warnings(executed: dict[str, Any]) -> None:
    for name, notebook in executed.items():
        for cell in code_cells(notebook):
            assert cell.execution_count is not None, name
            streams = [out for out in cell.outputs if out.output_type == "stream"]
            assert [out.text for out in streams if out.name == "stderr"] == [], cell.source


def test_objects_show_themselves_as_html(executed: dict[str, Any]) -> None:
    seen = set()
    for cell in code_cells(executed["offload_in_a_notebook.ipynb"]):
        last = cell.source.splitlines()[-1]
        for output in cell.outputs:
            if output.output_type == "execute_result" and last in SHOWN:
                assert SHOWN[last] in output.data["text/html"], last
                assert output.data["text/plain"], "a console has a text, too"
                seen.add(last)
    assert seen == SHOWN.keys()


def test_what_is_shown_loads_nothing(executed: dict[str, Any]) -> None:
    for notebook in executed.values():
        for cell in code_cells(notebook):
            for output in cell.outputs:
                text = output.get("data", {}).get("text/html", "")
                text = re.sub(r'src="data:image/png;base64,[^"]*"', "", text)
                for sign in ("http", "src=", "<script", "url(", "@import", "<link"):
                    assert sign not in text


def test_notebooks_are_stored_without_outputs() -> None:
    """Outputs would change with every run, and would tell of the machine."""
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path.name
            assert cell.get("execution_count") is None, path.name


def test_the_guide_names_the_notebook() -> None:
    guide = (ROOT / "docs" / "guides" / "notebook.md").read_text()
    for path in NOTEBOOKS:
        assert f"../../examples/{path.name}" in guide
