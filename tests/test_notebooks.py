"""The notebooks run from top to bottom, in small form; skipped, saying so, where nbclient is not installed.

The quickest one always; the others, whose processes take half a minute to start on a busy machine, where LIPDP_NOTEBOOKS is set.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
QUICKEST = "a_private_median"
BOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    six = {"mnist_in_five_minutes", "a_table_from_a_csv", "a_private_median", "auditing_a_model", "images_of_your_own"}
    assert six | {"a_transformer_on_imdb"} == {book.stem for book in BOOKS}


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_notebook_runs(book, tmp_path, monkeypatch) -> None:
    if book.stem != QUICKEST and not os.environ.get("LIPDP_NOTEBOOKS"):
        pytest.skip("set LIPDP_NOTEBOOKS to run this notebook")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if "images" in book.stem:
        pytest.importorskip("PIL")
    if "csv" in book.stem:
        pytest.importorskip("pandas")
    monkeypatch.setenv("LIPDP_SMALL", "1")
    content = nbformat.read(book, as_version=4)
    assert all(cell.cell_type != "code" or not cell.outputs for cell in content.cells), "stored without outputs"
    nbclient.NotebookClient(content, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
