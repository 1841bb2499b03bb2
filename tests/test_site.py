"""The documentation site: tutorials run and are shown, and broken pages are found."""

import base64
import json
from pathlib import Path

import check
import notebooks
import pytest
import torch

PAGE = "<html><body><h1 id='top'>A page</h1>{}</body></html>"
PATHS = sorted(notebooks.TUTORIALS.glob("*.ipynb"))


def each_tutorial(function):
    return pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)(function)


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds_of_outputs(notebook):
    """Return the kinds of what each cell shows; numbers vary from one machine to another."""
    return [
        [sorted(output.get("data", ["text"])) for output in cell["outputs"]]
        for cell in code_of(notebook)
    ]


def test_there_are_tutorials():
    assert len(PATHS) >= 3


@each_tutorial
def test_a_tutorial_was_run_from_its_first_cell_to_its_last(path):
    code = code_of(notebooks.read(path))
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= 3


@pytest.mark.slow
@each_tutorial
def test_a_tutorial_runs_and_shows_what_it_showed(path):
    torch.set_default_dtype(torch.float32)
    notebook = notebooks.read(path)
    before = kinds_of_outputs(notebook)
    notebooks.run(notebook)
    assert kinds_of_outputs(notebook) == before


def cell(kind, source):
    made = {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True)}
    return made if kind == "markdown" else {**made, "outputs": [], "execution_count": None}


def test_cells_share_names_and_show_what_they_print_return_and_draw():
    figure = "from matplotlib.figure import Figure\nFigure((1, 1))"
    sources = ["a = 2", "print(a)\na + 1", figure]
    notebook = {"cells": [cell("markdown", "# Title"), *(cell("code", s) for s in sources)]}
    assert notebooks.run(notebook)["a"] == 2
    assert kinds_of_outputs(notebook) == [[], [["text"], ["text/plain"]], [["image/png"]]]

    text, pictures = notebooks.as_markdown(notebook, "name")
    assert text.startswith("# Title\n\n```python\na = 2\n```\n")
    assert "output}\n2\n```" in text
    assert "output}\n3\n```" in text
    assert "](name_0.png)" in text
    assert pictures["name_0.png"].startswith(b"\x89PNG")
    json.dumps(notebook)


def test_an_error_in_a_cell_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        notebooks.run({"cells": [cell("code", "1 / 0")]})


@pytest.fixture
def site(tmp_path):
    """A small site without problems."""
    (tmp_path / "index.html").write_text(PAGE.format("<a href='other.html#here'>other</a>"))
    (tmp_path / "other.html").write_text(PAGE.format("<p id='here'></p><img src='a.png'>"))
    (tmp_path / "a.png").write_bytes(base64.b64decode("iVBORw0KGgo="))
    (tmp_path / "search").mkdir()
    docs = [{"location": ""}, {"location": "other.html#here"}]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": docs}))
    return tmp_path


def test_a_site_without_problems(site):
    assert check.problems(site) == []


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("index.html", "<a href='gone.html'>", "gone.html leads nowhere"),
        ("index.html", "<a href='other.html#gone'>", "has no such anchor"),
        ("index.html", "<a href='#gone'>", "has no such anchor"),
        ("index.html", "<a href='../outside.html'>", "leads nowhere"),
        ("index.html", "<img src='gone.png'>", "gone.png leads nowhere"),
        ("index.html", "<script src='https://cdn.example/a.js'></script>", "fetches https://cdn"),
        ("index.html", "<link href='//fonts.example/a.css'>", "fetches //fonts"),
        ("style.css", "@font-face {src: url(https://fonts.example/a)}", "fetches https://fonts"),
        ("new.html", "", "new.html: the search does not know it"),
    ],
)
def test_a_problem_is_found(site: Path, name, content, problem):
    (site / name).write_text(content if name.endswith(".css") else PAGE.format(content))
    (found,) = check.problems(site)
    assert problem in found
