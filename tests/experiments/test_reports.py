"""Reports: pages that need no other file, made from what a directory has."""

import base64
import re
import shlex
from html.parser import HTMLParser

import pytest

from laplace_invariance import cli
from laplace_invariance.experiments.compare import compare
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.learn import learn
from laplace_invariance.experiments.options import (
    CompareConfig,
    LayersConfig,
    LearnConfig,
    ProfileConfig,
    SuggestConfig,
)
from laplace_invariance.experiments.reports import (
    facts,
    learn_report,
    page,
    profile_report,
    suggest_report,
)
from laplace_invariance.experiments.reports.command import command
from laplace_invariance.experiments.suggest import SuggestResult
from laplace_invariance.marglik import Profile, Suggestions
from laplace_invariance.marglik.suggestions import Suggestion

SMALL = {"n_train": 100, "n_test": 50, "n_epochs": 2, "n_samples": 2, "search": "off"}
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Reads a page, and refuses elements that are not closed or reach out of it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.images, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object")
        values = dict(attributes)
        if tag == "img":
            assert values["alt"]
            kind, _, data = values["src"].partition(",")
            assert kind == "data:image/png;base64"
            self.images.append(base64.b64decode(data))
        if tag == "a":
            self.links.append(values["href"])
        assert not any(name.startswith("on") for name in values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def read(directory):
    text = (directory / "report.html").read_text()
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    return Reader(text)


@pytest.fixture(scope="module")
def finished(run_once):
    config = LearnConfig(transform="fully_rotated", **SMALL)
    return run_once(learn, config)


def test_report_of_a_run_has_words_pictures_command_and_lines(finished):
    config, out, result = finished
    found = read(out)
    for name in ("samples", "flow", "ranges", "evidence"):
        assert (out / f"{name}.png").read_bytes() in found.images
    assert len(found.images) == 4
    for words in (
        "What was learnt from digits, fully rotated",
        f"{result.accuracy:.1%}",
        f"{result.evidence:.3f} nats",
        "true: ±180.0 degrees",
        "seed 0",
        command("learn", config, out),
    ):
        assert words in found.words


def test_report_is_made_again_from_what_was_saved(finished):
    config, out, _ = finished
    before = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    learn(config, out, resume=True)
    assert (out / "report.html").read_bytes() == before


def test_without_pictures_the_report_is_words_alone(finished, tmp_path):
    _, _, result = finished
    learn_report(RunDirectory(tmp_path), result)
    found = read(tmp_path)
    assert not found.images
    assert "Pictures" not in found.words
    learn_report(RunDirectory(None), result)  # where nothing is kept, nothing is written


def test_what_is_not_known_is_not_called_true(finished, tmp_path):
    from dataclasses import replace

    _, _, result = finished
    search = {
        "best": trial(),
        "trials": [trial(), trial(loss=0.5)],
        "chance": 0.0,
        "comparison": {"epoch": 3, "held": -0.5, "learnt": -0.7, "keeps_learning": False},
    }
    learn_report(
        RunDirectory(tmp_path),
        replace(result, truth=dict.fromkeys(result.truth, 0.0), search=search),
    )
    words = read(tmp_path).words
    assert "true:" not in words
    assert "2 candidates were trained" in words
    assert "rotation ±57° 40 -1.500 0.500" in words
    assert "No candidate of the search was better than guessing" in words
    assert "gradient steps: -0.200 nats at epoch 3, so ranges stay as found" in words


def trial(loss=0.0):
    return {"ranges": {"rotation": 1.0}, "n_steps": 40, "evidence": -1 - loss, "loss": loss}


def test_text_of_the_user_is_escaped(tmp_path, finished):
    from dataclasses import replace

    _, _, result = finished
    config = LearnConfig(data="<b>&'\".npz", **SMALL)
    learn_report(RunDirectory(tmp_path), replace(result, config=config))
    text = (tmp_path / "report.html").read_text()
    assert "<b>&" not in text
    assert "<b>&'\"" in read(tmp_path).words


def test_pieces_of_pages_escape_everything():
    evil = '<script>alert("x")</script>'
    pieces = [
        page.paragraph(evil),
        page.note(evil),
        page.code(evil),
        page.cards([(evil, evil, evil)]),
        page.table([evil], [[evil]]),
        page.section(evil, page.link(evil, evil)),
        page.details(evil, page.paragraph(evil)),
    ]
    text = page.page(evil, evil, [evil], pieces, evil)
    assert "<script" not in text
    Reader(text)


def test_export_lines_make_the_transform():
    names = {"rotation": 3.14159265, "x_scale": 0.123456, "shear": 1e-7}
    lines = facts.export_lines(names)
    assert len(lines.splitlines()) == 3
    scope = {}
    exec(lines, scope)
    assert scope["augmentation"].magnitudes()["rotation"] == pytest.approx(3.1415, abs=1e-4)
    assert scope["augmentation"].magnitudes()["x_scale"] == pytest.approx(0.1234, abs=1e-4)
    assert callable(scope["transform"])


CONFIGS = {
    "learn": LearnConfig(
        data="my file.npz",
        method="fixed",
        fixed={"rotation": 0.1 + 0.2, "shear": 1.0},
        subset_of_weights="last_layer",
        correlated=True,
        **SMALL,
    ),
    "compare": CompareConfig(methods=("none", "evidence"), transforms=("scaled",), seeds=(3, 4)),
    "suggest": SuggestConfig(ranges={"rotation": 1.0}, weights="w.pt", n_steps=10),
    "profile": ProfileConfig(name="shear", values=(0.1, 0.25), n_repeats=3),
    "layers": LayersConfig(task="both", seed=5),
}


@pytest.mark.parametrize("verb", CONFIGS)
def test_the_command_makes_the_same_configuration(verb, tmp_path):
    """Whatever the command line does with options: its parser reads them back."""
    config = CONFIGS[verb]
    words = shlex.split(command(verb, config, tmp_path / "a b"))
    assert words[0] == "laplace-invariance"
    arguments = cli._parser().parse_args(words[1:])
    assert cli._config(cli.VERBS[verb].config, arguments) == config
    assert arguments.out == tmp_path / "a b"


def test_report_of_a_comparison_has_its_tables_and_links(tmp_path):
    config = CompareConfig(
        methods=("none", "fixed"), transforms=("original",), seeds=(0, 1), **SMALL
    )
    found = compare(config, tmp_path / "out")
    shown = read(tmp_path / "out")
    for link in shown.links:
        assert (tmp_path / "out" / link).exists()
    assert len(shown.links) == 4
    assert len(shown.images) == 1
    assert "test accuracy" in shown.words
    cells = re.findall(r"\| ([^|]+?) (?=\|)", found.markdown())
    assert all(cell in shown.words for cell in cells if "---" not in cell)


def suggested(gain):
    row = Suggestion({"rotation": 1.0}, "rotation ±57.3 degrees", [gain, gain], gain, 0.003)
    suggestions = Suggestions([row], -1.0, -2.3, 8, 10, 2)
    return SuggestResult(SuggestConfig(), 0.75, "mlp", suggestions)


def test_report_of_suggestions_exports_the_best_if_there_is_one(tmp_path):
    suggest_report(RunDirectory(tmp_path), suggested(0.5))
    words = read(tmp_path).words
    assert "Rotation ±57.3 degrees: +0.500 ± 0.000 nats per example." in words
    assert "li.AffineImage(init={'rotation': 1.0})" in words
    suggest_report(RunDirectory(tmp_path), suggested(-0.5))
    words = read(tmp_path).words
    assert "No augmentation is clearly better than none." in words
    assert "li.AffineImage" not in words


def test_report_of_a_profile_marks_what_was_learnt(tmp_path, finished):
    from laplace_invariance.experiments.profile import ProfileResult

    found = Profile("rotation", (0.0, 1.0, 2.0), ((-1.0, -0.5, -0.75),), 1.0)
    profile_report(RunDirectory(tmp_path), ProfileResult(ProfileConfig(), found, 0.0, finished[2]))
    shown = read(tmp_path)
    assert found.conclusion() in shown.words
    marked = re.findall('<tr class="marked"><td>(.*?)</td>', (tmp_path / "report.html").read_text())
    assert marked == ["±1.000"]


def test_the_style_is_for_light_and_dark_and_narrow_screens():
    text = page.page("title", "", [], [], "")
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 46rem" in text
    assert 'name="viewport"' in text
