"""Anchored edits of a source tree: small pieces of text, each of which must be found once."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Edit", "Part", "apply_part"]


@dataclass(frozen=True)
class Edit:
    """Replacement of a piece of text.

    Attributes:
        path: File, relative to the source tree.
        old: Text that is replaced, as little as is needed to find the place.
        new: Text that replaces it.
    """

    path: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Edit a file of the tree.

        Raises:
            ValueError: The old text is not there exactly once.
        """
        file = tree / self.path
        text = file.read_text()
        n_found = text.count(self.old)
        if n_found != 1:
            raise ValueError(
                f"{self.path}: an anchor was found {n_found} times instead of once, so that the "
                f"source is not the one that the change was written for:\n{self.old}"
            )
        file.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Part:
    """One part of the change.

    Attributes:
        directory: Directory with the part's tests, its text and its new files.
        edits: Edits of files that are there.
        new_files: New files, by their path in the source tree.
    """

    directory: Path
    edits: tuple[Edit, ...]
    new_files: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the part."""
        return self.directory.name

    @property
    def tests(self) -> list[Path]:
        """New tests."""
        return sorted(self.directory.glob("test_*.py"))


def apply_part(part: Part, tree: Path) -> None:
    """Edit a source tree, and add the new files of a part.

    Raises:
        ValueError: An anchor is not there exactly once.
        FileExistsError: A new file is there already.
    """
    for edit in part.edits:
        edit.apply(tree)
    for path, name in part.new_files.items():
        if (tree / path).exists():
            raise FileExistsError(f"{path} is there already")
        shutil.copy(part.directory / name, tree / path)
