"""``demo``: its figure, its words, and that it repeats."""

import pytest
import torch
from builders import assert_drawn

from laplace_invariance.experiments.demo import DemoConfig, demo


def test_demo_draws_its_figure_and_prints_its_result(tmp_path, capfd, run_cli):
    state = torch.get_rng_state()
    run_cli("demo points --epochs 14 --samples 2 --quiet --out", tmp_path / "new")
    assert torch.equal(torch.get_rng_state(), state)
    figure = tmp_path / "new" / "points.png"
    assert_drawn(figure)
    out, err = capfd.readouterr()
    for word in ("true range      ±120.0 degrees", "learnt range", "with the learnt invariance"):
        assert word in out
    assert str(figure) in out
    assert err == ""


def test_demo_repeats_and_may_be_run_again(tmp_path):
    config = DemoConfig(n_epochs=14, n_samples=2)
    first, second = (demo(config, tmp_path) for _ in range(2))
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["points.png"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--epochs 3", "n_epochs must be at least 12, got 3"),
        ("--samples 0", "n_samples must be positive"),
    ],
)
def test_demo_explains_bad_arguments(tmp_path, run_cli, arguments, match):
    with pytest.raises(SystemExit, match=match):
        run_cli(f"demo points {arguments} --quiet --out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
