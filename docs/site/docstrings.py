"""An extension of griffe: docstrings as Markdown.

Docstrings of the package have roles, ``:func:`name``` and the like, for those who read them in an
editor. Here they become links, where the site has the object, and code elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`]+)`")
LITERAL = re.compile(r" ?::\n(?=\n? +\S)")  # what introduces a block of code


def resolved(obj: griffe.Object, name: str) -> str:
    """Return the full name of what a docstring calls by a short one."""
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        owner = obj.parent if obj.parent is not None else obj
        return f"{owner.path}.{name}"


def as_markdown(text: str, obj: griffe.Object) -> str:
    """Return a docstring with links instead of roles."""

    def link(match: re.Match[str]) -> str:
        short, name = match.groups()
        shown = name.rpartition(".")[2] if short else name.lstrip(".")
        identifier = resolved(obj, name)
        return f'<autoref optional identifier="{identifier}"><code>{shown}</code></autoref>'

    return LITERAL.sub(":\n", ROLE.sub(link, text))


class Roles(griffe.Extension):
    """Rewrite every docstring as it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Visit all objects, once names can be resolved."""
        self.visit(pkg)

    def visit(self, obj: griffe.Object) -> None:
        """Rewrite the docstrings of an object and of its members."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, obj)
        for member in obj.members.values():
            if not member.is_alias:
                self.visit(member)
