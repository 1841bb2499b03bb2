"""README, docs and examples: programs run, links resolve, and what is printed is as written."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms.functional import to_pil_image

import laplace_invariance as li
import laplace_invariance.layers  # (registers its rules before a page runs)
from laplace_invariance import cli
from laplace_invariance.curvature import check_model, rules
from laplace_invariance.datasets import load

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FIRST = DOCS / "getting-started.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PAGES += [ROOT / name / "README.md" for name in ("benchmarks", "upstream")]


def name_of(path):
    return str(path.relative_to(ROOT))


def pages(*selected):
    """Parametrise a test over pages, by name."""
    return pytest.mark.parametrize("page", selected or PAGES, ids=name_of)


# Programs.


class Program(NamedTuple):
    text: str
    line: int  # of the page, before its first


def programs(page):
    """Return the Python blocks of a page, in order."""
    text = page.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [Program(block[1], text.count("\n", 0, block.start(1))) for block in blocks]


def run(page, shorter=()):
    """Run the blocks of a page one after the other, and return the names that they leave.

    Pairs of ``shorter`` are texts and what to run in their place.
    """
    names = {"__name__": page.stem}
    for program in programs(page):
        for text, instead in shorter:
            assert program.text.count(text) == 1
            program = program._replace(text=program.text.replace(text, instead))
        # empty lines in front, so that a traceback has the line of the page
        exec(compile("\n" * program.line + program.text, str(page), "exec"), names)
    return names


@pytest.fixture
def _as_a_user(monkeypatch, tmp_path):
    """Run in single precision, in an empty directory, and forget rules that a page registers."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rules, "_rules", rules.rules())


FEWER = [
    ('load("digits")', 'load("digits", n_train=400)'),
    ("search=True", "search=li.marglik.Search(n_steps=10, keep=1)"),
    ("n_epochs=60", "n_epochs=4"),
]


@pytest.mark.parametrize(
    "shorter", [FEWER, pytest.param([], marks=pytest.mark.slow)], ids=["shorter", "as it is"]
)
@pytest.mark.usefixtures("_as_a_user")
def test_the_program_of_the_readme_learns(capsys, shorter):
    (program,) = programs(README)
    assert len([line for line in program.text.splitlines() if line.strip()]) < 30
    run(README, shorter)
    degrees = float(re.search(r"±([\d.]+) degrees", capsys.readouterr().out)[1])
    assert degrees > 160


@pages(*(page for page in PAGES if page not in (README, FIRST) and programs(page)))
@pytest.mark.usefixtures("_as_a_user")
def test_the_programs_of_a_page_run(page):
    run(page)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_a_user")
def test_getting_started_gets_from_a_file_to_a_transform(capsys):
    """Its programs and its command, in the order of the page."""
    first, last = programs(FIRST)
    (command,) = commands(FIRST)
    torch.manual_seed(0)
    names = {"__name__": FIRST.stem}
    exec(first.text, names)
    assert cli.main([*command, "--quiet"]) in (0, None)
    capsys.readouterr()
    exec(last.text, names)
    degrees = float(re.search(r"±([\d.]+) degrees", capsys.readouterr().out)[1])
    assert 20 < degrees < 110  # 45 in truth
    assert names["probabilities"].shape == (len(names["x_test"]), 10)


def test_pages_with_programs_are_found():
    assert sum(bool(programs(page)) for page in PAGES) >= 8


@pytest.mark.usefixtures("_as_a_user")
def test_the_page_on_stock_laplace_learns_the_range():
    names = run(DOCS / "laplace.md")
    history = names["learner"].history["augmentation.eta"]
    assert len(history) > 2
    assert not torch.equal(history[0], history[-1])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner, self.head = nn.LSTM(4, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.inner(self.scale * x)[0].mean(1))


def test_the_table_of_check_model_is_what_it_prints():
    torch.set_default_dtype(torch.float32)
    table = str(check_model(Recurrent(), torch.randn(2, 5, 4)))
    assert table in (DOCS / "own-networks.md").read_text()


# Commands.


def commands(page):
    """Return the command lines of a page, as lists of words; a backslash joins lines."""
    text = page.read_text().replace("\\\n", " ")
    return [line.split()[1:] for line in re.findall(r"^laplace-invariance .*$", text, re.MULTILINE)]


WITH_COMMANDS = [page for page in PAGES if commands(page)]
# What makes a run short. The last value of an option counts.
SHORT = {
    "--epochs": "2",
    "--search": "off",
    "--train": "100",
    "--test": "30",
    "--steps": "4",
    "--repeats": "2",
    "--width": "2",
    "--samples": "2",
}


def test_pages_with_commands_are_found():
    found = {page.name for page in WITH_COMMANDS}
    assert {"command-line.md", "own-images.md", "other-methods.md"} <= found


def options_of(verb, capsys):
    """Return the options that the help of a verb names."""
    with pytest.raises(SystemExit, match="0"):
        cli.main([verb, "--help"])
    return set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))


@pages(*WITH_COMMANDS)
def test_commands_have_known_verbs_and_options(page, capsys):
    for verb, *words in commands(page):
        used = {word for word in words if word.startswith("--")}
        known = options_of(verb, capsys)
        assert used <= known, f"{verb} has no {used - known}"


@pytest.fixture
def _images(_as_a_user, tmp_path):
    """Put images where commands look for them: scikit-learn's digits, under all names."""
    split = load("digits", n_train=200, n_test=100)
    large = [F.interpolate(x, size=(16, 16)) for x in (split.x_train, split.x_test)]
    (tmp_path / "data").mkdir()
    for name in ("my", "data/mnist", "data/fashion_mnist"):
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=large[0].numpy(),
            y_train=split.y_train.numpy(),
            x_test=large[1].numpy(),
            y_test=split.y_test.numpy(),
        )
    for i, (image, label) in enumerate(zip(large[0], split.y_train.tolist(), strict=True)):
        folder = tmp_path / "photos" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(folder / f"{i}.png")


@pytest.mark.slow
@pages(*WITH_COMMANDS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_images")
def test_commands_run(page, capsys, tmp_path):
    """As they are on the page, but short, and with images of scikit-learn."""
    for i, (verb, *words) in enumerate(commands(page)):
        shorter = [f"--out={i}", "--quiet"]
        known = options_of(verb, capsys)
        shorter += [f"{option}={value}" for option, value in SHORT.items() if option in known]
        assert cli.main([verb, *words, *shorter]) in (0, None)
        assert capsys.readouterr().out.strip()
        assert list((tmp_path / str(i)).iterdir())


# Links.


def without_blocks(page):
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page):
    """Return the targets of a page's links and pictures, without those on the web."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not target.startswith(("http://", "https://"))]


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return [heading.replace(" ", "-") for heading in words]


@pages()
def test_links_resolve(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT)
        if anchor:
            assert anchor in anchors(target), f"{link}: {name_of(target)} has no such heading"


@pages()
def test_no_two_headings_of_a_page_are_the_same(page):
    assert len(anchors(page)) == len(set(anchors(page)))


def navigation():
    """Return the pages in the navigation of the site."""
    return re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


@pages(*(page for page in PAGES if page.parent == DOCS and page.name != "README.md"))
def test_every_page_is_in_both_indices(page):
    assert page.name in links(DOCS / "README.md")
    assert page.name in navigation()


def test_the_front_page_leads_to_every_guide():
    """Guides are the pages of the first table of the index."""
    index = (DOCS / "README.md").read_text()
    guides = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\)", index.split("\n## ")[1], re.MULTILINE)
    assert len(guides) > 10
    assert {f"docs/{guide}" for guide in guides} <= {link.split("#")[0] for link in links(README)}
    assert "docs/README.md" in links(README)


# The front page.


def test_the_readme_is_short():
    assert len(README.read_text().split()) < 900


def test_the_picture_is_small():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text())
    content = (ROOT / picture).read_bytes()
    assert content.startswith(b"GIF89a")
    assert len(content) < 400_000


@pytest.mark.slow
def test_the_picture_is_drawn_by_its_script(tmp_path):
    picture = tmp_path / "learnt.gif"
    command = [sys.executable, "-W", "ignore", str(DOCS / "make_picture.py"), "--out", str(picture)]
    subprocess.run(command, check=True)
    assert picture.read_bytes().startswith(b"GIF89a")


@pages()
def test_lines_of_prose_are_at_most_100_characters_wide(page):
    prose = without_blocks(page).splitlines()
    assert not [line for line in prose if len(line) > 100 and not line.startswith(("|", "!["))]


# The reference.


def test_the_reference_has_every_public_name():
    index = (DOCS / "api" / "index.md").read_text()
    listed = set(re.findall(r"^\| \[`li\.(\w+)`\]", index, re.MULTILINE))
    assert listed == {*li.__all__, *li._SUBMODULES}
    rendered = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for module in li._SUBMODULES:
        assert f"::: laplace_invariance.{module}\n" in rendered


# Examples.


def predicted_lines():
    """Return the last line that each example should print, by name of the file."""
    row = r"^\| \[(\d\d_\w+\.py)\]\(\.\./examples/\1\) \|[^|]*\| `([^`]*)` \|$"
    return dict(re.findall(row, (DOCS / "examples.md").read_text(), re.MULTILINE))


def example(name):
    """Return a parameter of a test; all examples but the fourth are slow."""
    return pytest.param(name, marks=() if name.startswith("04") else pytest.mark.slow)


def numbers(line):
    return [float(number) for number in re.findall(r"[\d.]+", line)]


def words(line):
    return re.sub(r"[-+\d.]+", "", line)


def test_every_example_is_in_the_table():
    files = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert sorted(predicted_lines()) == sorted(files)


@pytest.mark.parametrize("name", [example(name) for name in sorted(predicted_lines())])
def test_an_example_ends_as_predicted(name, tmp_path):
    """The same words, and numbers within a tenth, since threads change the order of sums."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    line, predicted = done.stdout.splitlines()[-1], predicted_lines()[name]
    assert words(line) == words(predicted)
    assert numbers(line) == pytest.approx(numbers(predicted), rel=0.1, abs=0.05)
