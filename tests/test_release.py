"""The package as it is released: versions that agree, files, and which versions are promised."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import laplace_invariance as li

ROOT = Path(__file__).parent.parent


def tool(name):
    specification = spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


release_check, matrix = tool("release_check"), tool("matrix")


# Versions.


def test_version_changelog_and_citation_agree():
    assert release_check.version() == li.__version__
    texts = [(ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")]
    assert release_check.disagreements(li.__version__, *texts) == []


def citation(version, date=None):
    return f"cff-version: 1.2.0\nversion: {version}\n" + (
        f"date-released: {date}\n" if date else ""
    )


@pytest.mark.parametrize(
    ("version", "heading", "cited", "problem"),
    [
        ("1.2.0", "1.2.0 - 2030-01-31", citation("1.2.0", "2030-01-31"), None),
        ("1.2.0", "1.2.0 - 2030-01-31", citation("1.1.0", "2030-01-31"), "not the version 1.2.0"),
        ("1.2.0", "1.2.0 - 2030-01-31", citation("1.2.0", "2030-01-30"), "not the date 2030-01-31"),
        ("1.2.0", "1.2.0 - 2030-01-31", citation("1.2.0"), "not the date 2030-01-31"),
        ("1.2.0", "Unreleased", citation("1.2.0", "2030-01-31"), "begins with Unreleased"),
        ("1.2.0", "102.0 - 2030-01-31", citation("1.2.0", "2030-01-31"), "begins with 102.0"),
        ("1.2.0.dev0", "Unreleased", citation("1.2.0.dev0"), None),
        ("1.2.0.dev0", "1.1.0 - 2030-01-31", citation("1.2.0.dev0"), "begins with 1.1.0"),
        ("1.2.0.dev0", "Unreleased", citation("1.2.0.dev0", "2030-01-31"), "has a date"),
    ],
)
def test_disagreements_are_found(version, heading, cited, problem):
    changelog = f"# Changelog\n\n## {heading}\n\n### Added\n\n## 0.9.0 - 2029-01-01\n"
    found = release_check.disagreements(version, changelog, cited)
    if problem is None:
        assert found == []
    else:
        (only,) = found
        assert problem in only


# Files.


def test_files_that_distributions_lack_or_have_too_much_are_found():
    files = {"laplace_invariance/a.py", "laplace_invariance/py.typed", "tests/b.py", "Makefile"}
    wheel = {"laplace_invariance/a.py", "laplace_invariance/py.typed", "x.dist-info/METADATA"}
    sdist = files | {"PKG-INFO", "setup.cfg", "laplace_invariance.egg-info/SOURCES.txt"}
    assert release_check.misplaced(sdist, wheel, files) == []
    found = release_check.misplaced(
        sdist - {"tests/b.py"} | {"old.py"},
        wheel - {"laplace_invariance/py.typed"} | {"tests/b.py"},
        files,
    )
    assert found == [
        "the source distribution lacks tests/b.py",
        "the source distribution has old.py",
        "the wheel lacks laplace_invariance/py.typed",
        "the wheel has tests/b.py",
    ]


# Papers.


def test_the_citation_has_the_papers_of_the_readme():
    papers = (ROOT / "README.md").read_text().partition("## Papers")[2].partition("\n## ")[0]
    titles = [" ".join(title.split()) for title in re.findall(r"\*([^*]+)\*", papers)]
    cited = re.findall(r"^    title: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert len(titles) == 5
    assert sorted(cited) == sorted(titles)


# Versions that are promised.


def promises():
    """Return the versions of Python that pyproject.toml names, its least Python and least torch."""
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    (least,) = re.findall(r'^requires-python = ">=(.*)"$', text, re.MULTILINE)
    (torch,) = re.findall(r'^  "torch>=(.*)",$', text, re.MULTILINE)
    return named, least, torch


def test_what_is_promised_has_passed():
    named, least, torch = promises()
    found = [json.loads(path.read_text()) for path in matrix.RESULTS.glob("*.json")]
    assert all(one["failed"] == [] and one["tests"] > 100 for one in found)
    assert {numbers(version) for version in named} == {numbers(one["python"])[:2] for one in found}
    assert least == named[0]
    assert (*numbers(torch), 0) == min(numbers(one["torch"]) for one in found)


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_the_page_has_the_results_of_all_versions():
    assert matrix.PAGE.read_text() == matrix.page_with(matrix.table())


def test_tests_that_ran_elsewhere_exist():
    assert all((ROOT / name).exists() for name in matrix.TESTS)


def test_reports_of_pytest_are_counted(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a" name="one"/>'
        '<testcase classname="tests.a" name="two"><failure message=""/></testcase>'
        '<testcase classname="tests.b" name="three"><error message=""/></testcase>'
        '<testcase classname="tests.b" name="four"><skipped message=""/></testcase>'
        "</testsuite></testsuites>"
    )
    expected = {"tests": 3, "skipped": 1, "failed": ["tests.a::two", "tests.b::three"]}
    assert matrix.outcome(path) == expected
