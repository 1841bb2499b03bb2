"""What li.plan says is what a fit takes."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils.matrix import Kron
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN
from laplace_invariance.draws import _sobol_parts, _sobol_ranks

ONE_RANDOM = {"stochastic": True, "num_samples": 1}


def loader_of(shape, n=30, batch_size=10, n_classes=7):
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(n, *shape), torch.randint(n_classes, (n,)))
    return DataLoader(data, batch_size)


def small(n_samples=3):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 7)
    )
    return li.InvariantModel(net, li.AffineImage(init=0.1), n_samples)


def fitted(model, loader, options, **arguments):
    la = Laplace(
        model,
        "classification",
        backend=AugmentedGGN,
        backend_kwargs=options,
        **{"subset_of_weights": "all", "hessian_structure": "kron"} | arguments,
    )
    la.fit(loader)
    return la


def bytes_of(la):
    if not hasattr(la, "H_facs"):
        return la.H.nbytes
    return sum(factor.nbytes for factors in la.H_facs.kfacs for factor in factors)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_memory_of_factors_is_that_of_a_fit(structure, subset):
    model, loader = small(), loader_of((1, 8, 8))
    plan = li.plan(model, loader, hessian_structure=structure, subset_of_weights=subset)
    la = fitted(model, loader, {}, hessian_structure=structure, subset_of_weights=subset)
    assert plan.default.footprint.factors == bytes_of(la)


def test_factors_of_embeddings_and_groups_are_counted_as_they_are():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.mix = nn.Conv1d(6, 4, 2, groups=2)
            self.last = nn.Linear(4, 7)

        def forward(self, x):
            return self.last(self.mix(self.embedding(x).mT).mean(-1))

    torch.manual_seed(0)
    model = Tokens()
    data = TensorDataset(torch.randint(11, (12, 5)), torch.randint(7, (12,)))
    loader = DataLoader(data, 6)
    plan = li.plan(model, loader, hessian_structure="kron", subset_of_weights="all")
    assert plan.default.footprint.factors == bytes_of(fitted(model, loader, ONE_RANDOM))


def test_nothing_of_the_model_or_of_random_states_changes():
    model, loader = small().train(), loader_of((1, 8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    li.plan(model, loader, hessian_structure="kron", subset_of_weights="all")
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(model.state_dict()), before)


@pytest.mark.slow
@pytest.mark.parametrize("n_samples", [3, 4])
def test_later_fits_are_as_if_nothing_had_been_planned(n_samples):
    def evidence(planned):
        _sobol_parts.cache_clear()
        _sobol_ranks.cache_clear()
        augmentation = li.AffineImage(init=0.1, draws="sobol")
        lifting = li.layers.LiftingConv2d(1, 2, 3)
        net = nn.Sequential(lifting, nn.Tanh(), nn.Flatten(), nn.Linear(288, 7))
        torch.manual_seed(2)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        model, loader = li.InvariantModel(net, augmentation, n_samples), loader_of((1, 8, 8))
        if planned:
            li.plan(model, loader, hessian_structure="kron")
        torch.manual_seed(3)
        return fitted(model, loader, ONE_RANDOM).log_marginal_likelihood()

    torch.testing.assert_close(evidence(planned=True), evidence(planned=False), rtol=0, atol=0)


def test_more_columns_take_more_memory_and_work():
    plan = li.plan(small(), loader_of((1, 8, 8)))
    names = ("one random column", "two leading and a random column", "all columns")
    one, some, every = (plan[f"kron, {name}"] for name in names)
    assert plan.default is one
    assert one.footprint.values < some.footprint.values < every.footprint.values
    assert one.work < some.work < every.work
    assert str(plan).count("\n") == len(plan.choices) + 2
    assert one.peak <= one.peak_of_fit
    assert plan.summary().startswith("kron, one random column: ")
    with pytest.raises(KeyError, match="one random column"):
        plan["diagonal"]


@pytest.mark.slow
def test_extrapolated_columns_are_those_that_run(monkeypatch):
    model, loader = small(), loader_of((1, 8, 8))
    arguments = {"hessian_structure": "kron", "subset_of_weights": "all"}
    guessed = li.plan(model, loader, **arguments)["kron, all columns"]
    monkeypatch.setattr("laplace_invariance.marglik.plans.simulate.MOST_COLUMNS", 6)
    exact = li.plan(model, loader, **arguments)["kron, all columns"]
    assert guessed.peak == pytest.approx(exact.peak, rel=0.1)
    assert guessed.work == pytest.approx(exact.work, rel=0.1)


def test_what_laplace_starts_from_is_counted():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.rand(1, 30, 20))
            self.last = nn.Linear(20, 7)

        def forward(self, x):
            return self.last((x + self.shift).mean(1))

    model, loader = Shifted(), loader_of((30, 20))
    plan = li.plan(model, loader, hessian_structure="kron", subset_of_weights="all")
    zeros = Kron.init_from_model(model, "cpu", torch.get_default_dtype())
    assert plan.default.peak_of_fit > sum(f.nbytes for own in zeros.kfacs for f in own)
    assert "Laplace.fit alone, with kron, one random column, would take" in str(plan)


def test_the_recommendation_follows_the_budget():
    model, loader = small(), loader_of((1, 8, 8))
    arguments = {
        "hessian_structure": "kron",
        "subset_of_weights": "all",
        "backend_kwargs": ONE_RANDOM,
    }
    plan = li.plan(model, loader, memory=10**12, **arguments)
    assert plan.recommended is plan.default
    assert "backend_kwargs={'stochastic': True, 'num_samples': 1}" in plan.recommendation
    tight = li.plan(model, loader, memory=plan.default.peak - 1, **arguments)
    assert tight.recommended.backend_kwargs["chunk_size"] < 30
    assert tight.recommended.peak < plan.default.peak
    assert "chunk_size" in tight.recommendation
    assert li.plan(model, loader, memory=plan.default.peak - 1, **arguments) == tight
    nothing = li.plan(model, loader, memory=1000, **arguments)
    assert nothing.recommended is None
    assert "nothing fits into 1 kB" in nothing.recommendation


def test_it_warns_before_a_decomposition_that_takes_minutes():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 20_000), nn.ReLU())
    model.append(nn.Linear(20_000, 5))
    arguments = {"hessian_structure": "kron", "subset_of_weights": "all"}
    with pytest.warns(UserWarning, match=r"min on one core.*20000 rows"):
        plan = li.plan(model, loader_of((3,), n_classes=5), backend_kwargs=ONE_RANDOM, **arguments)
    assert plan.default.footprint.factors > 3 * 20_000**2 * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        li.plan(small(), loader_of((1, 8, 8)), **arguments)


def test_models_that_are_not_covered_are_refused_as_in_a_fit():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.Bilinear(3, 3, 7)

        def forward(self, x):
            return self.odd(x, x)

    model = Odd()
    with pytest.raises(NotImplementedError, match=r"odd\.weight .*Bilinear has no rule"):
        li.plan(model, loader_of((3,)))
    diagonal = {"on_unsupported": "diag"}
    plan = li.plan(model, loader_of((3,)), hessian_structure="kron", backend_kwargs=diagonal)
    assert plan.default.footprint.factors == sum(p.nbytes for p in model.parameters())


def test_wrong_arguments_are_refused():
    model, loader = small(), loader_of((1, 8, 8))
    with pytest.raises(ValueError, match="hessian_structure must be"):
        li.plan(model, loader, hessian_structure="lowrank")
    with pytest.raises(ValueError, match="subset_of_weights must be"):
        li.plan(model, loader, subset_of_weights="first_layer")
    with pytest.raises(ValueError, match="memory must be a positive number of bytes, got 0"):
        li.plan(model, loader, memory=0)
    with pytest.raises(TypeError, match="backends such as AugmentedGGN can be planned"):
        li.plan(model, loader, backend=CurvlinopsGGN)
    with pytest.raises(ValueError, match="there is no backend 'AugmentedGGN'; known names are"):
        li.plan(model, loader, backend="AugmentedGGN")
    with pytest.raises(ValueError, match="the loader has no batch"):
        li.plan(model, DataLoader(TensorDataset(torch.rand(0, 1, 8, 8), torch.zeros(0))))


def test_regression_and_the_empirical_fisher_have_their_own_columns():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    loader = DataLoader(TensorDataset(torch.rand(12, 3), torch.rand(12, 2)), 4)
    plan = li.plan(model, loader, "regression")
    assert "kron, two leading and a random column" not in str(plan)
    fisher = li.plan(small(), loader_of((1, 8, 8)), backend=AugmentedEF)
    assert [choice.name for choice in fisher.choices] == [
        "kron",
        "diag",
        "full",
        "last layer, kron",
    ]


# Measured in a process of its own.


def mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 1500),
        nn.Tanh(),
        nn.Linear(1500, 1200),
        nn.ReLU(),
        nn.Linear(1200, 7),
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(7),
        nn.Flatten(),
        nn.Linear(256, 7),
    )


def resnet():
    from torchvision.models.resnet import BasicBlock

    def shorter(n_in, n_out):
        return nn.Sequential(nn.Conv2d(n_in, n_out, 1, 2, bias=False), nn.BatchNorm2d(n_out))

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        BasicBlock(32, 32),
        BasicBlock(32, 64, 2, shorter(32, 64)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 7),
    )


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 2500), nn.ReLU(), nn.Linear(2500, 7))


def transformer():
    from torchvision.models import VisionTransformer

    class OfGrey(VisionTransformer):
        def forward(self, x):
            return super().forward(x.expand(-1, 3, -1, -1))

    return OfGrey(28, 4, num_layers=3, num_heads=4, hidden_dim=160, mlp_dim=320, num_classes=7)


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "wide": wide, "transformer": transformer}


def memory_of_process(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def measure(name):
    """Print the planned peak of a fit with its gradient, and the measured one."""
    torch.set_num_threads(1)
    warm = fitted(small(), loader_of((1, 8, 8)), ONE_RANDOM)  # loads what is loaded when used
    warm.log_marginal_likelihood().backward()
    model = li.InvariantModel(NETWORKS[name](), li.AffineImage(init=0.1), 2)
    loader = loader_of((1, 28, 28), n=128, batch_size=64)
    plan = li.plan(model, loader, hessian_structure="kron", subset_of_weights="all")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory_of_process("VmRSS")
    fitted(model, loader, ONE_RANDOM).log_marginal_likelihood().backward()
    print(json.dumps([plan.default.peak_of_fit, memory_of_process("VmHWM") - before]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_is_that_of_a_fit_with_its_gradient(name):
    # what is freed is returned, so that what the process holds is what is alive
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    code += f"; import test_plan; test_plan.measure({name!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=500
    )
    planned, measured = json.loads(found.stdout.splitlines()[-1])
    assert measured > 100e6
    assert planned == pytest.approx(measured, rel=0.2)
