"""Tutorial notebooks: run them and keep their outputs, or show them as Markdown.

``python docs/site/notebooks.py`` runs all of ``docs/tutorials`` and writes what they print and draw
into them. Cells are executed as Jupyter would, in one namespace, without needing Jupyter.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parents[1] / "tutorials"
Notebook = dict[str, Any]
Output = dict[str, Any]


def read(path: Path) -> Notebook:
    """Return a notebook."""
    return json.loads(path.read_text())


def write(notebook: Notebook, path: Path) -> None:
    """Write a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def lines(text: str) -> list[str]:
    """Return text as notebooks have it, a list of lines."""
    return text.splitlines(keepends=True)


def shown(value: Any, count: int) -> list[Output]:
    """Return the output of a cell that ends with a value: a picture of a figure, else text."""
    if value is None:
        return []
    if not hasattr(value, "savefig"):
        data = {"text/plain": lines(repr(value))}
        kind = {"output_type": "execute_result", "execution_count": count}
        return [{**kind, "data": data, "metadata": {}}]
    picture = io.BytesIO()
    value.savefig(picture, format="png", dpi=100, bbox_inches="tight")
    data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
    return [{"output_type": "display_data", "data": data, "metadata": {}}]


def execute(source: str, names: dict[str, Any], count: int) -> list[Output]:
    """Run a cell, and return its outputs."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    where = f"<cell {count}>"
    with redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        value = None
        if last is not None:
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    stream = {"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())}
    return [*([stream] if printed.getvalue() else []), *shown(value, count)]


def run(notebook: Notebook) -> dict[str, Any]:
    """Run all cells, put their outputs into the notebook, and return the names that they leave."""
    import matplotlib as mpl

    mpl.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, start=1):
        cell["outputs"] = execute("".join(cell["source"]), names, count)
        cell["execution_count"] = count
    return names


def as_markdown(notebook: Notebook, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by file name.

    Args:
        notebook: The notebook, with its outputs.
        name: Stem of the names of pictures.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                file = f"{name}_{len(pictures)}.png"
                pictures[file] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell above draws]({file})")
            else:
                text = "".join(data["text/plain"]).rstrip("\n")
                parts.append(f"```{{.text .output}}\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures


def main() -> None:
    """Run the notebooks whose names are given, or all."""
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(TUTORIALS.glob("*.ipynb"))
    warnings.simplefilter("ignore")
    for path in chosen:
        notebook = read(path)
        run(notebook)
        write(notebook, path)
        print(path.name, re.findall(r"^# (.*)", "".join(notebook["cells"][0]["source"])))


if __name__ == "__main__":
    main()
