"""Check the built site: ``python docs/site/check.py site``.

Nothing is fetched from elsewhere to show a page, every link inside of the site leads to a page and
an anchor that exist, and the index of the search knows every page.
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page fetches, where it links to, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the address and the identifier of an element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag in FETCHED and FETCHED[tag] in values:
            self.fetched.append(values[FETCHED[tag]])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


def is_remote(address: str) -> bool:
    """Return whether an address is on the web."""
    return address.startswith(("http:", "https:", "//"))


def broken(site: Path, path: Path, pages: dict[Path, Page]) -> list[str]:
    """Return what is wrong with a page's links and with what it fetches."""
    found = []
    page = pages[path]
    for address in (*page.fetched, *page.links):
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        if not target.exists() or not target.is_relative_to(site):
            found.append(f"{address} leads nowhere")
            continue
        anchors = pages[target].anchors if target in pages else set()
        if target in pages and parts.fragment and unquote(parts.fragment) not in anchors:
            found.append(f"{address} has no such anchor")
    return found


def problems(site: Path) -> list[str]:
    """Return one line for everything that is wrong with a built site."""
    site = site.resolve()
    # 404.html has addresses of a site at the root of its host
    files = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    pages = {path: Page(path.read_text()) for path in files}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        remote = [address for address in page.fetched if is_remote(address)]
        found += [f"{name}: fetches {address}" for address in remote]
        found += [f"{name}: {problem}" for problem in broken(site, path, pages)]
    for style in sorted(site.rglob("*.css")):
        remote = re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", style.read_text())
        found += [f"{style.relative_to(site)}: fetches {address}" for address in remote]
    index = json.loads((site / "search" / "search_index.json").read_text())
    searchable = {urlsplit(entry["location"]).path or "index.html" for entry in index["docs"]}
    names = {path.relative_to(site).as_posix() for path in files}
    missing = {name for name in names - searchable if not name.startswith("files/")}
    return found + [f"{name}: the search does not know it" for name in sorted(missing)]


def main() -> None:
    """Print what is wrong, if anything, and end accordingly."""
    site = Path(sys.argv[1])
    found = problems(site)
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages, every link resolves")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
