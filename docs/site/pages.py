"""Hooks of mkdocs: pages from outside of ``docs``, and links as the site needs them.

Pages in the repository link to one another by relative paths, as GitHub shows them. The site has
``benchmarks/README.md`` and others as pages of its own, notebooks with their outputs, and scripts
as pages with their code, so links to them are rewritten. A link to any other file outside of
``docs`` ends the build.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads hooks from files
import notebooks

ROOT = Path(__file__).parents[2]
# pages of the site by their path in the repository; README.md is the front page of both
PAGES = {
    "README.md": "README.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "upstream/README.md": "upstream.md",
}
for _path in sorted(ROOT.glob("upstream/parts/*/pull_request.md")):
    PAGES[_path.relative_to(ROOT).as_posix()] = f"upstream/{_path.parent.name}.md"
CODE = (
    "CITATION.cff",
    "examples/*.py",
    "benchmarks/*.json",
    "benchmarks/results/*.json",
    "docs/make_picture.py",
    "laplace_invariance/curvature/__init__.py",
    "upstream/*.py",
)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
BLOCK = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)


def code_pages() -> dict[str, str]:
    """Return the pages that show a file, by the path of the file in the repository."""
    files = [path for pattern in CODE for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): f"files/{path.name}.md" for path in files}


def tutorials() -> dict[str, str]:
    """Return the pages of notebooks, by the path of the notebook in the repository."""
    stems = [path.stem for path in sorted(notebooks.TUTORIALS.glob("*.ipynb"))]
    return {f"docs/tutorials/{stem}.ipynb": f"tutorials/{stem}.md" for stem in stems}


def code_page(path: Path) -> str:
    """Return a page with the text of a file, which the search leaves out."""
    text = path.read_text()
    language = {".py": "python", ".json": "json", ".cff": "yaml"}[path.suffix]
    top = "---\nsearch: {exclude: true}\n---\n"
    return f"{top}\n# {path.name}\n\n````{language}\n{text}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add pages that are not in ``docs``."""
    for source, page in PAGES.items():
        if source != "README.md":
            text = (ROOT / source).read_text()
            files.append(File.generated(config, page, content=text))
    for source, page in tutorials().items():
        stem = Path(source).stem
        text, pictures = notebooks.as_markdown(notebooks.read(ROOT / source), stem)
        files.append(File.generated(config, page, content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    for source, page in code_pages().items():
        made = File.generated(config, page, content=code_page(ROOT / source))
        made.inclusion = made.inclusion.NOT_IN_NAV
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links of a page, but for those in blocks of code."""
    known = {**PAGES, **tutorials(), **code_pages()}
    homes = {target: source for source, target in known.items() if target != "README.md"}
    source = homes.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        opening, path, anchor, closing = match.groups()
        if ":" in path:  # on the web
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in known:
            target = known[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            raise PluginError(f"{source} links to {path}, which the site does not have")
        return f"{opening}{posixpath.relpath(target, here or '.')}{anchor or ''}{closing}"

    parts = BLOCK.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in parts)
