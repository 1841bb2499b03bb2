"""Parts of a page in HTML: escaped text, tables, code and pictures that are in the page itself."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

__all__ = [
    "Html",
    "cards",
    "code",
    "details",
    "link",
    "note",
    "page",
    "paragraph",
    "picture",
    "pictures",
    "section",
    "table",
]


class Html(str):
    """Text that is HTML already; any other is escaped."""


def _html(text: str) -> str:
    if isinstance(text, Html):
        return text
    return escape(text)


def page(title: str, kicker: str, lead: Sequence[str], parts: Iterable[Html], foot: str) -> str:
    """Return a page that needs no other file.

    Args:
        title: Title of the page.
        kicker: A few words above the title.
        lead: Paragraphs that say what was found.
        parts: Sections.
        foot: Last line.
    """
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_html(title)}</title>",
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        "<header>",
        f'<p class="kicker">{_html(kicker)}</p>',
        f"<h1>{_html(title)}</h1>",
        *(f'<p class="lead">{_html(text)}</p>' for text in lead),
        "</header>",
        "<main>",
        *parts,
        "</main>",
        f"<footer><p>{_html(foot)}</p></footer>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines)


def section(title: str, *parts: Html) -> Html:
    """Return a section with its heading; nothing if it has no part.

    Args:
        title: Heading.
        *parts: What it has; empty parts are left out.
    """
    filled = [part for part in parts if part]
    if not filled:
        return Html("")
    body = "\n".join(filled)
    return Html(f"<section>\n<h2>{_html(title)}</h2>\n{body}\n</section>")


def paragraph(text: str) -> Html:
    """Return a paragraph."""
    return Html(f"<p>{_html(text)}</p>")


def note(text: str) -> Html:
    """Return a paragraph that should not be missed."""
    return Html(f'<p class="note">{_html(text)}</p>')


def link(text: str, target: str) -> Html:
    """Return a link to another file."""
    return Html(f'<a href="{escape(target)}">{_html(text)}</a>')


def details(summary: str, body: Html) -> Html:
    """Return what is shown once its summary is clicked at."""
    return Html(f"<details>\n<summary>{_html(summary)}</summary>\n{body}\n</details>")


def code(text: str, *, wide: bool = False) -> Html:
    """Return program text, or the words of a command.

    Args:
        text: The text.
        wide: Whether lines scroll instead of being broken, as for a table in plain text.
    """
    kind = ' class="wide"' if wide else ""
    return Html(f"<pre{kind}><code>{_html(text)}</code></pre>")


def cards(entries: Iterable[tuple[str, str, str]]) -> Html:
    """Return cards: a name, the value in large, and a remark that may be empty.

    Args:
        entries: Name, value and remark of each.
    """
    made = []
    for name, value, remark in entries:
        text = f"<span>{_html(name)}</span><b>{_html(value)}</b>"
        if remark:
            text += f"<span>{_html(remark)}</span>"
        made.append(f'<div class="card">{text}</div>')
    return Html('<div class="cards">\n' + "\n".join(made) + "\n</div>")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int] = (),
    marked: Collection[int] = (),
) -> Html:
    """Return a table that scrolls on a narrow screen.

    Args:
        head: Heads of the columns.
        rows: Cells, as many in every row.
        numbers: Indices of columns of numbers.
        marked: Indices of rows that stand out.
    """

    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="number"' if index in numbers else ""
        return f"<{tag}{kind}>{_html(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", i, text) for i, text in enumerate(head)) + "</tr>"]
    for place, row in enumerate(rows):
        kind = ' class="marked"' if place in marked else ""
        cells = "".join(cell("td", i, text) for i, text in enumerate(row))
        lines.append(f"<tr{kind}>{cells}</tr>")
    body = "\n".join(lines)
    return Html(f'<div class="scroll"><table>\n{body}\n</table></div>')


def picture(path: Path | None, caption: str, *, half: bool = False) -> Html:
    """Return a PNG file as a part of the page; nothing if there is no such file.

    Args:
        path: The file.
        caption: What it shows.
        half: Whether it takes half of a wide page.
    """
    if path is None or not path.exists():
        return Html("")
    data = base64.b64encode(path.read_bytes()).decode()
    kind = ' class="half"' if half else ""
    image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
    words = f"<figcaption>{_html(caption)}</figcaption>"
    return Html(f'<figure{kind}><div class="frame">{image}</div>{words}</figure>')


def pictures(directory: Path, captions: Mapping[str, str], halves: Collection[str] = ()) -> Html:
    """Return the pictures that a directory has.

    Args:
        directory: Directory of the files.
        captions: What files show, by name, in their order.
        halves: Names of files that take half of a wide page.
    """
    found = [picture(directory / name, captions[name], half=name in halves) for name in captions]
    found = [one for one in found if one]
    if not found:
        return Html("")
    return Html('<div class="pictures">\n' + "\n".join(found) + "\n</div>")
