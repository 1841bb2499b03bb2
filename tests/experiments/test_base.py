"""What experiments share: the run directory, the recipe, the seed, accuracy."""

import json
import sys
import warnings

import processes
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from laplace_invariance import plots
from laplace_invariance.experiments.base import (
    RunDirectory,
    accuracy,
    cosine_recipe,
    draw_evidence,
    seeded,
    with_error,
)
from laplace_invariance.experiments.options import (
    LayersConfig,
    LearnConfig,
    MeasureConfig,
    PairsConfig,
)
from laplace_invariance.marglik import KernelBound, Refit, Running

CONFIG = LearnConfig()


def begin(out, config=CONFIG, resume=False):
    with RunDirectory(out, config, resume) as directory:
        directory.begin()
    return directory


def test_without_a_directory_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory(None, CONFIG, resume=True) as directory:
        directory.begin()
        directory.save("summary.json", {})
        assert directory.finished() is None
        assert directory.path("checkpoint.pt") is None
        assert directory.figure("figure.png", (1, 1), lambda figure: 1 / 0) is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_before_it_begins(tmp_path):
    with RunDirectory(tmp_path / "new" / "run", CONFIG) as directory:
        assert not (tmp_path / "new").exists()
        directory.begin()
        directory.save("report.txt", "words")
        directory.save("summary.json", [1])
        assert directory.finished() == [1]
    names = {path.name for path in (tmp_path / "new" / "run").iterdir()}
    assert names == {"experiment.json", "report.txt", "summary.json"}
    assert directory.path("report.txt").read_text() == "words\n"


def test_directory_of_a_run_is_only_resumed(tmp_path):
    begin(tmp_path)
    with pytest.raises(FileExistsError, match=r"pass --resume \(resume=True\) to continue"):
        RunDirectory(tmp_path, CONFIG)
    begin(tmp_path, LearnConfig(root="elsewhere", download=True), resume=True)
    with pytest.raises(ValueError, match="another experiment: it differs in seed; nothing"):
        RunDirectory(tmp_path, LearnConfig(seed=1), resume=True)
    with pytest.raises(ValueError, match="is of another kind of experiment; nothing was changed"):
        RunDirectory(tmp_path, LayersConfig(), resume=True)


def test_run_of_an_earlier_format_is_refused(tmp_path):
    begin(tmp_path)
    path = tmp_path / "experiment.json"
    saved = json.loads(path.read_text())
    assert saved.pop("format") == CONFIG.format == 5
    before = json.dumps(saved)  # without a number, as the first format was
    path.write_text(before)
    with pytest.raises(ValueError, match="has format 1 and this version writes format 5: it was"):
        RunDirectory(tmp_path, CONFIG, resume=True)
    with pytest.raises(FileExistsError, match="--resume"):
        RunDirectory(tmp_path, CONFIG)
    assert path.read_text() == before


def test_first_format_has_no_number(tmp_path):
    config = PairsConfig()
    begin(tmp_path, config)
    path = tmp_path / "experiment.json"
    saved = json.loads(path.read_text())
    assert saved.pop("format") == 1
    path.write_text(json.dumps(saved))
    begin(tmp_path, config, resume=True)


def test_layers_of_the_first_format_are_refused_as_such(tmp_path):
    begin(tmp_path, LayersConfig())
    path = tmp_path / "experiment.json"
    saved = json.loads(path.read_text()) | {"output_rank": 3}
    del saved["format"]
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="has format 1"):
        RunDirectory(tmp_path, LayersConfig(), resume=True)


@pytest.mark.parametrize(
    ("estimator", "label"),
    [
        (Running(), "log evidence (running estimate)"),
        (KernelBound(), "lower bound of the log evidence"),
        (Refit(), "log evidence"),
    ],
    ids=["running", "kernel", "refit"],
)
def test_figure_of_the_evidence_says_what_was_estimated(tmp_path, monkeypatch, estimator, label):
    terms = {"evidence": -6.0, "log_likelihood": -2.0, "log_det_ratio": 6.0, "scatter": 2.0}
    history = [{"epoch": 1, "evidence": None}, {"epoch": 2, **terms}]
    seen = {}

    def spy(epochs, values, ax, **marks):
        seen.update(values, epochs=epochs)
        return ax

    monkeypatch.setattr(plots, "evidence_terms", spy)
    draw_evidence(RunDirectory(tmp_path), history, 2, "title", estimator)
    assert seen[label] == [-3.0]
    assert seen["epochs"] == [2]


def test_numbers_have_their_error_unless_they_are_exact():
    assert with_error(-1.2345, 0.0) == "-1.234"
    assert with_error(-1.2345, 0.0123) == "-1.234 ± 0.012"


def test_fields_without_identity_may_differ(tmp_path):
    begin(tmp_path, MeasureConfig(methods=("plain",)))
    begin(tmp_path, MeasureConfig(methods=("tied",)), resume=True)


def test_directory_in_use_is_refused(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as directory:
        directory.begin()
        with pytest.raises(BlockingIOError, match=f"{tmp_path} is in use by another run"):
            begin(tmp_path, resume=True)
    begin(tmp_path, resume=True)


def test_directory_that_stays_empty_is_removed_if_it_is_new(tmp_path):
    for out in (tmp_path, tmp_path / "new"):
        with RunDirectory(out, CONFIG) as directory:
            directory.lock()
            assert out.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_before_it_writes_leaves_no_trace(tmp_path):
    def fail(out, name=None, resume=False):
        with RunDirectory(out, CONFIG, resume) as directory:
            directory.begin()
            assert (out / "experiment.json").exists()
            if name is not None:
                directory.save(name, "text")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no"):
        fail(tmp_path, "history.jsonl")  # which a resumed run may need
    with pytest.raises(ValueError, match="no"):
        fail(tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experiment.json", "history.jsonl"]


def test_run_that_began_meanwhile_is_noticed(tmp_path):
    with RunDirectory(tmp_path, CONFIG) as late:
        begin(tmp_path)
        with pytest.raises(FileExistsError, match="--resume"):
            late.begin()
    begin(tmp_path, resume=True)  # and the lock is released


def run_without_matplotlib(commands):
    """Run commands, in a process in which matplotlib cannot be imported."""
    warnings.simplefilter("ignore")
    import laplace  # noqa: F401  (torchmetrics, below it, imports matplotlib if it is installed)

    processes.forget("matplotlib", "laplace_invariance")
    sys.modules["matplotlib"] = None
    torch.set_default_dtype(torch.float32)
    from laplace_invariance import cli

    for command in commands:
        cli.main(command.split())


def test_without_matplotlib_all_but_figures_is_written(tmp_path):
    small = "--samples 2 --train 60 --test 30 --epochs 1 --quiet --out"
    commands = [
        f"learn --search off {small} {tmp_path}/learn",
        f"compare --transform original --method none fixed {small} {tmp_path}/compare",
        f"measure --method plain {small} {tmp_path}/measure",
        f"demo points --samples 2 --epochs 12 --quiet --out {tmp_path}/demo",
    ]
    log = tmp_path / "log"
    process = processes.start(run_without_matplotlib, commands, log=log)
    process.join()
    said = log.read_text()
    assert process.exitcode == 0, said
    assert said.count("pip install 'laplace-invariance[plots]'") == 1

    def files(name):
        return {path.name for path in (tmp_path / name).iterdir() if path.is_file()}

    whole = {"experiment.json", "summary.json"}
    assert files("learn") == whole | {"checkpoint.pt", "history.jsonl", "model.pt", "report.html"}
    assert files("compare") == whole | {"comparison.md", "report.html"}
    assert files("measure") == whole | {"report.txt"}
    assert not (tmp_path / "demo").exists()  # it has nothing but a figure
    assert "learnt range" in said


def test_recipe_never_waits_longer_than_training():
    recipe = cosine_recipe(3, 5)
    assert recipe["scheduler_kwargs"] == {"T_max": 15, "eta_min": 5e-5}
    assert (recipe["n_epochs_burnin"], recipe["marglik_frequency"]) == (1, 2)
    assert cosine_recipe(1, 5)["marglik_frequency"] == 1
    assert cosine_recipe(9, 5)["n_epochs_burnin"] == 4
    assert cosine_recipe(9, 5)["backend_kwargs"] == {"stochastic": True}
    assert cosine_recipe(9, 5, backend_kwargs={"per_slot": True})["backend_kwargs"] == {
        "stochastic": True,
        "per_slot": True,
    }


def test_seed_is_local():
    state = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with seeded(3):
            drawn.append(torch.rand(2))
    with pytest.raises(ZeroDivisionError), seeded(3):
        raise ZeroDivisionError
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_accuracy_is_the_share_of_correct_examples_in_evaluation_mode():
    class Shifted(nn.Module):
        def forward(self, x):
            return x.roll(1, -1) if self.training else x

    model = Shifted().train()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 1])
    inputs = nn.functional.one_hot(torch.tensor([0, 1, 2, 0, 1, 2, 2])).float()
    assert accuracy(model, TensorDataset(inputs, labels), batch_size=3) == 6 / 7
    assert model.training
