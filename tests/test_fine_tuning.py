"""The example that fine-tunes a network that was trained before."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
METHODS = ["none", "trivial", "all", "last_layer"]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "10_fine_tuning.py"))


@pytest.fixture(autouse=True)
def _single_precision(_double_precision):
    torch.set_default_dtype(torch.float32)


def results(out):
    found = json.loads((out / "results.json").read_text())
    return {result["method"]: result for result in found["results"]}


def test_weights_are_loaded_and_the_head_is_new(example, tmp_path):
    before = example["build"]("small", 4)
    torch.save(before.state_dict(), tmp_path / "weights.pt")
    net = example["pretrained"]("small", tmp_path / "weights.pt", 7)[1].net
    assert net.fc.weight.shape == (7, before.fc.in_features)
    kept = {name: value for name, value in before.state_dict().items() if "fc." not in name}
    found = {name: value for name, value in net.state_dict().items() if "fc." not in name}
    torch.testing.assert_close(found, kept, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of weights that were hardly trained
def test_the_example_runs_on_files_of_ones_own(example, tmp_path, capsys):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 40), ("test", 20)):
        arrays[f"x_{part}"] = rng.integers(0, 255, (n, 9, 9), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(n) % 2
    np.savez(tmp_path / "own.npz", **arrays)
    torch.save(example["build"]("small", 3).state_dict(), tmp_path / "weights.pt")
    words = f"--data {tmp_path}/own.npz --weights {tmp_path}/weights.pt --out {tmp_path}/out"
    size = "--size 8 --epochs 2 --samples 2 --search-steps 1 --degrees 0"
    example["main"]([*words.split(), *size.split()])
    found = results(tmp_path / "out")
    assert list(found) == METHODS
    for result in found.values():
        assert math.isfinite(result["evidence_all"])
        assert math.isfinite(result["evidence_last_layer"])
    assert (tmp_path / "out" / "fine_tuning.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "pretrained.pt").exists()
    assert "| learnt, last layer |" in capsys.readouterr().out


@pytest.mark.slow
def test_ranges_are_learnt_and_help(example, tmp_path):
    example["main"](["--out", str(tmp_path)])
    found = results(tmp_path)
    assert math.degrees(found["all"]["magnitudes"]["rotation"]) > 20
    assert math.degrees(found["last_layer"]["magnitudes"]["rotation"]) > 5
    for name in ("all", "last_layer"):
        assert found[name]["accuracy"] > found["none"]["accuracy"] + 0.01
        others = [found[other][f"evidence_{name}"] for other in ("none", "trivial")]
        assert found[name][f"evidence_{name}"] > max(others) + 0.01


def test_the_tables_of_the_page_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_fine_tuning

    tables = bench_fine_tuning.tables()
    assert tables
    assert tables in (ROOT / "docs" / "fine-tuning.md").read_text()
