"""The package as a whole, and the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laplace_invariance import __version__, cli, datasets
from laplace_invariance.experiments import demo as demos

ROOT = Path(__file__).parent.parent


def test_works_without_optional_packages():
    code = """
import sys
import laplace  # torchmetrics, below it, takes matplotlib if it is installed
for name in [m for m in sys.modules if m.split(".")[0] in ("matplotlib", "sklearn")]:
    del sys.modules[name]
sys.modules["matplotlib"] = sys.modules["sklearn"] = None
import laplace_invariance.cli, laplace_invariance.experiments.demo
laplace_invariance.cli.main(["demo", "points"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'laplace-invariance[plots]'" in done.stderr


def test_shapes_are_labelled_by_how_far_they_are_turned():
    x, y = datasets.rotated_shapes(500, 1.0, n_shapes=3, noise=0.0).tensors
    assert x.shape == (500, 6, 2)
    assert set(y.tolist()) == {0, 1, 2, 3}
    assert (y == 0).double().mean().item() == pytest.approx(1 - 1 / torch.pi, abs=0.07)
    upright, labels = datasets.rotated_shapes(
        500, 1.0, n_shapes=3, noise=0.0, angles=torch.zeros(500)
    ).tensors
    assert labels.min() == 1
    first = upright[labels == 1]
    torch.testing.assert_close(first, first[:1].expand_as(first))
    with pytest.raises(ValueError, match="max_angle"):
        datasets.rotated_shapes(5, 4.0)


def test_demo_writes_its_figure_and_prints_its_result(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    state = torch.get_rng_state()
    cli.main(
        [
            "demo",
            "points",
            "--out",
            str(tmp_path / "new"),
            "--epochs",
            "14",
            "--samples",
            "2",
            "--quiet",
        ]
    )
    assert torch.equal(torch.get_rng_state(), state)
    figure = tmp_path / "new" / "points.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for word in (
        "true range      ±120.0 degrees",
        "learnt range",
        "with the learnt invariance",
        str(figure),
    ):
        assert word in printed


def test_demo_is_repeatable():
    torch.set_default_dtype(torch.float32)
    results = [
        demos.points(None, n_epochs=14, n_samples=2, progress_bar=False, say=lambda _: None)
        for _ in range(2)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["demo", "points", "--help"], ["learn", "--help"]]
)
def test_program_and_module_are_the_same(arguments):
    command = [sys.executable, "-m", "laplace_invariance", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    expected = {
        "--version": __version__,
        "--help": "compare",
        "demo": "--samples",
        "learn": "--resume",
    }[arguments[0]]
    assert expected in done.stdout


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["demo", "points", "--epochs", "3"], "--epochs must be at least 12"),
        (["demo", "points", "--samples", "0", "--quiet"], "n_samples must be a positive integer"),
    ],
)
def test_bad_arguments_are_explained(arguments, match):
    torch.set_default_dtype(torch.float32)
    with pytest.raises(SystemExit, match=match):
        cli.main(arguments)


def test_the_version_stands_in_one_place():
    assert "version =" not in (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
