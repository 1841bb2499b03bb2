"""Chunks are a matter of memory: evidence, gradient and draws do not depend on them."""

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.curvature.trace.chunks import are_finite, part_of, split
from laplace_invariance.draws import common_draws

INIT = [0.1, -0.2, 0.3, 0.15, 0.25, 0.05]
SAMPLES, CLASSES = 4, 3


def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, CLASSES))


def averaged(augmentation):
    return li.InvariantModel(net(), augmentation, SAMPLES)


MODELS = {
    "independent": lambda: averaged(li.AffineImage(init=INIT, draws="independent")),
    "sobol": lambda: averaged(li.AffineImage(init=INIT, draws="sobol")),
    "compose": lambda: averaged(
        li.Compose(
            li.AffineImage(init=INIT),
            li.AffineImage(init={"rotation": 0.4}, learn="rotation"),
        )
    ),
    "nested": lambda: li.InvariantModel(
        averaged(li.AffineImage(init=INIT)), li.AffineImage(INIT), 2
    ),
    "group": lambda: averaged(li.FiniteGroup("flips", init=0.3)),
}
OPTIONS = {"exact": {}, "stochastic": {"stochastic": True, "num_samples": 2}}


def evidence_and_gradients(model, loader, structure="kron", **options):
    torch.manual_seed(5)
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=AugmentedGGN,
        backend_kwargs=options,
    )
    la.fit(loader)
    evidence = la.log_marginal_likelihood()
    etas = list(li.hyperparameters(model))
    return [evidence.detach(), *torch.autograd.grad(evidence, etas)]


def images(n=11, batch_size=7):
    data = TensorDataset(torch.randn(n, 1, 5, 5), torch.randint(CLASSES, (n,)))
    return DataLoader(data, batch_size=batch_size)


@pytest.mark.parametrize(("size", "sizes"), [(0, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_batches_are_cut_into_chunks_of_the_size_asked_for(size, sizes):
    x = torch.randn(5, 2)
    chunks = split(x, size, "input_ids", 5)
    assert [len(chunk.x) for chunk in chunks] == sizes
    torch.testing.assert_close(torch.cat([chunk.x for chunk in chunks]), x)
    torch.testing.assert_close(torch.cat([x[chunk.rows] for chunk in chunks]), x)
    assert [chunk.x for chunk in split("graphs", size, "input_ids", 5)] == ["graphs"]


def test_inputs_on_a_device_are_looked_at_once():
    x = torch.empty(3, device="meta")  # which has no values to look at
    assert are_finite(x, first=False)
    with pytest.raises(RuntimeError):
        are_finite(x, first=True)
    assert not are_finite(torch.tensor([1.0, torch.inf]), first=False)


def test_only_what_belongs_to_inputs_is_cut():
    x = {"input_ids": torch.arange(5), "rows": torch.rand(5, 2), "table": torch.rand(5, 3)}
    x |= {"other": torch.rand(7), "number": torch.tensor(1.0), "words": list("abcde")}
    part = part_of(x, slice(1, 3), "input_ids", shared=["table"])
    assert {name for name in x if part[name] is x[name]} == {"table", "other", "number"}
    assert part["words"] == ["b", "c"]
    torch.testing.assert_close(part["rows"], x["rows"][1:3])
    assert part_of(x, slice(0, 5), "input_ids") is x


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_chunks_change_neither_evidence_nor_gradient(make, options):
    """One seed, one result: chunks of the batch, of three inputs, of one, and of some samples."""
    model, loader = make(), images()
    expected = evidence_and_gradients(model, loader, **options)
    assert expected[1].abs().min() > 0
    for chunk_size in (3 * SAMPLES, SAMPLES, SAMPLES - 1):
        actual = evidence_and_gradients(model, loader, chunk_size=chunk_size, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_chunks_change_no_structure(structure):
    model, loader = MODELS["sobol"](), images()
    expected = evidence_and_gradients(model, loader, structure)
    for chunk_size in (3 * SAMPLES, SAMPLES - 1):
        actual = evidence_and_gradients(model, loader, structure, chunk_size=chunk_size)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["independent", "sobol"])
def test_batches_change_neither_evidence_nor_gradient(name):
    model, loader = MODELS[name](), images()
    expected = evidence_and_gradients(model, loader)
    for batch_size in (1, 3, 11):
        other = DataLoader(loader.dataset, batch_size=batch_size)
        actual = evidence_and_gradients(model, other)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_sampled_estimates_see_the_common_draws_of_the_exact_one():
    """The losses, which depend on draws and not on directions, are the same."""
    model, (x, y) = MODELS["sobol"](), next(iter(images()))

    def loss(seed, **options):
        with common_draws(seed):
            return AugmentedGGN(model, "classification", **options).kron(x, y, N=7)[0].detach()

    expected = loss(1)
    for options in ({"stochastic": True}, {"output_rank": 1}, {"chunk_size": 3}):
        torch.testing.assert_close(loss(1, **options), expected, rtol=1e-12, atol=0)
    assert not torch.allclose(loss(2), expected)


def test_gradients_of_losses_do_not_depend_on_chunks():
    model, (x, y) = MODELS["sobol"](), next(iter(images()))

    def gradients(**options):
        torch.manual_seed(5)
        return AugmentedGGN(model, "classification", **options).gradients(x, y)

    torch.testing.assert_close(gradients(chunk_size=2 * SAMPLES), gradients())
