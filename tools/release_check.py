"""Check that the package can be released: ``make release-check``.

The working tree is clean; version, CHANGELOG.md and CITATION.cff agree; source distribution and
wheel are built, have the files that they should have, and pass ``twine check``. Each is then
installed into a new virtual environment, where ``smoke.py`` runs, and tests of the unpacked source
distribution pass. Installation takes gigabytes and minutes; ``--no-install`` leaves it out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "laplace_invariance"
TESTS = ("tests/test_project.py", "tests/test_release.py", "tests/augmentations")


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command that must succeed, outside of what PYTHONPATH names."""
    print("$", *(Path(part).name for part in command[:1]), *command[1:], flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=True)


# Versions.


def disagreements(version: str, changelog: str, citation: str) -> list[str]:
    """Return where a version, the text of CHANGELOG.md and that of CITATION.cff disagree.

    A development version has its changes under "Unreleased"; a release has a heading with its
    version and date, e.g. "1.2.0 - 2030-01-31", and its date in CITATION.cff.
    """
    found = []
    cited = re.search(r"^version: (\S+)$", citation, re.MULTILINE)
    if cited is None or cited[1] != version:
        found.append(f"CITATION.cff has not the version {version}")
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    first = headings[0] if headings else "no section"
    released = re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)
    if ".dev" in version:
        if first != "Unreleased":
            found.append(f"{version} is not released, but CHANGELOG.md begins with {first}")
        if released is not None:
            found.append(f"{version} is not released, but CITATION.cff has a date")
        return found
    dated = re.fullmatch(rf"{re.escape(version)} - (\d{{4}}-\d\d-\d\d)", first)
    if dated is None:
        found.append(f"CHANGELOG.md begins with {first}, not with {version} and a date")
    elif released is None or released[1] != dated[1]:
        found.append(f"CITATION.cff has not the date {dated[1]}")
    return found


def version() -> str:
    """Return the version of the package, without importing it."""
    text = (ROOT / PACKAGE / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


# Files.


def tracked() -> set[str]:
    """Return the files of the repository, without those whose names begin with a dot."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if not name.startswith(".")}


def misplaced(sdist: set[str], wheel: set[str], files: set[str]) -> list[str]:
    """Return what distributions lack, or have too much, given the files of the repository.

    Args:
        sdist: Files of the source distribution, relative to its one directory.
        wheel: Files of the wheel.
        files: Files of the repository.
    """
    of_package = {name for name in files if name.startswith(f"{PACKAGE}/")}
    installed = {name for name in wheel if ".dist-info/" not in name}
    ours = {name for name in sdist if ".egg-info" not in name} - {"PKG-INFO", "setup.cfg"}
    return [
        *(f"the source distribution lacks {name}" for name in sorted(files - ours)),
        *(f"the source distribution has {name}" for name in sorted(ours - files)),
        *(f"the wheel lacks {name}" for name in sorted(of_package - installed)),
        *(f"the wheel has {name}" for name in sorted(installed - of_package)),
    ]


def build(out: Path) -> tuple[Path, Path]:
    """Build both distributions and check their metadata and files; return their paths."""
    run(sys.executable, "-m", "build", "--outdir", out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tarfile.open(sdist) as archive:
        members = [one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()]
    problems = misplaced(set(members), set(zipfile.ZipFile(wheel).namelist()), tracked())
    if problems:
        raise SystemExit("\n".join(problems))
    return sdist, wheel


# Installation.


def install_and_try(sdist: Path, wheel: Path, place: Path) -> None:
    """Install both distributions, one after the other, and try what was installed."""
    venv.create(place / "venv", with_pip=True)
    python = place / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet")
    smoke = (python, "-I", ROOT / "tools" / "smoke.py")
    run(*pip, f"{wheel}[demo]")
    (place / "wheel").mkdir()
    run(*smoke, cwd=place / "wheel")
    run(*pip, "--force-reinstall", "--no-deps", sdist)
    (place / "sdist").mkdir()
    run(*smoke, cwd=place / "sdist")
    run(*pip, f"{sdist}[test]")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (unpacked,) = place.glob(f"{PACKAGE}-*/")
    run(python, "-m", "pytest", "-p", "no:cacheprovider", *TESTS, cwd=unpacked)


def main() -> None:
    """Check everything; exit with what does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-install", action="store_true", help="build and check files alone")
    arguments = parser.parse_args()
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        raise SystemExit(f"the working tree is not clean:\n{changed}")
    texts = [(ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")]
    problems = disagreements(version(), *texts)
    if problems:
        raise SystemExit("\n".join(problems))
    run(Path(sys.executable).with_name("cffconvert"), "--validate")
    with tempfile.TemporaryDirectory() as directory:
        sdist, wheel = build(Path(directory) / "dist")
        if not arguments.no_install:
            install_and_try(sdist, wheel, Path(directory))
    print(f"{version()} passes all checks that ran")


if __name__ == "__main__":
    main()
