"""How invariant a network really is: against slow twins, and where the answer is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from builders import averaged_cnn, bright_or_dark, images, quarter_turned, small_cnn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences

import laplace_invariance as li
from laplace_invariance.layers import (
    GroupConv2d,
    GroupPool,
    LiftingConv2d,
)
from laplace_invariance.marglik import MAP, Evidence, Regularised
from laplace_invariance.metrics import (
    Invariance,
    InvarianceError,
    InvarianceReport,
    SpectrumRecorder,
    invariance_report,
    jacobian_spectrum,
    logit_invariance,
    predictive_invariance,
    saliency_invariance,
)

ROTATIONS = {"init": {"rotation": math.pi}, "draws": "sobol"}
MEASURES = [predictive_invariance, logit_invariance, saliency_invariance]


def group_convolutions():
    features = (LiftingConv2d(2, 3, 3, padding=1), nn.Tanh(), GroupConv2d(3, 4, 3))
    return nn.Sequential(*features, GroupPool(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_predictive_is_the_mean_divergence():
    model, x = small_cnn(), 2 * images()
    kl, js = [], []
    for image in x:
        p = model(image[None]).softmax(-1)[0]
        for other in quarter_turned(image[None]):
            q = model(other).softmax(-1)[0]
            kl.append(sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)))
            middle = (p + q) / 2
            js += [F.kl_div(middle.log(), one, reduction="sum").item() / 2 for one in (p, q)]
    assert predictive_invariance(model, x, "p4") == pytest.approx(sum(js) / len(kl), rel=1e-10)
    assert predictive_invariance(model, x, "p4", divergence="kl") == pytest.approx(
        sum(kl) / len(kl), rel=1e-10
    )


def test_divergence_of_saturated_networks_is_finite_and_bounded():
    model, x = small_cnn(), 1e3 * images()
    model[-1].weight.data *= 1e4
    assert 0.1 < predictive_invariance(model, x, "p4") <= math.log(2) + 1e-12
    assert math.isfinite(predictive_invariance(model, x, "p4", divergence="kl"))


def test_logit_is_the_distance_along_the_orbit_over_that_of_other_inputs():
    model, x = small_cnn(), images()
    f = model(x).detach()
    change = torch.stack([((model(y) - f) ** 2).sum(-1) for y in quarter_turned(x)]).mean()
    pairs = [((a - b) ** 2).sum() for i, a in enumerate(f) for j, b in enumerate(f) if i != j]
    expected = (change / torch.stack(pairs).mean()).item()
    assert logit_invariance(model, x, "p4") == pytest.approx(expected, rel=1e-10)


def test_logit_measure_knows_neither_scale_nor_offset():
    model, x = small_cnn(), images()
    before = logit_invariance(model, x, "p4")
    model[-1].weight.data *= 50
    model[-1].bias.data += 8
    assert logit_invariance(model, x, "p4") == pytest.approx(before, rel=1e-10)


def test_unrelated_outputs_have_a_logit_measure_of_one():
    class Hash(nn.Module):
        def forward(self, x):
            return (
                (1e4 * x.flatten(1) * torch.arange(1, 1 + x[0].numel())).sum(-1, keepdim=True)
                * torch.arange(1, 4)
            ).sin()

    assert logit_invariance(Hash(), images(500), "p4") == pytest.approx(1, abs=0.1)


def test_saliency_is_rotated_back():
    model, x = small_cnn(), images()
    cosines = []
    for image in x:
        image = image[None].requires_grad_()
        outputs = model(image)
        best = outputs.argmax()
        (own,) = torch.autograd.grad(outputs[0, best], image)
        for k in (1, 2, 3):
            other = image.detach().rot90(k, (-2, -1)).requires_grad_()
            (there,) = torch.autograd.grad(model(other)[0, best], other)
            cosines.append(
                F.cosine_similarity(own.flatten(), there.rot90(-k, (-2, -1)).flatten(), dim=0)
            )
    expected = torch.stack(cosines).mean().item()
    assert saliency_invariance(model, x, "p4") == pytest.approx(expected, rel=1e-10)
    assert saliency_invariance(model, x, li.FiniteGroup("quarter_turns")) == pytest.approx(
        expected, rel=1e-10
    )
    assert abs(expected) < 0.5


def test_saliency_under_interpolation_is_transformed_back_by_the_transpose():
    model, x, group = small_cnn(9), images(3, 9), li.AffineImage(**ROTATIONS)
    units = torch.eye(81).view(81, 1, 9, 9)
    matrices = group.transform(units, group.fixed(4)).flatten(
        2
    )  # [pixel before, draw, pixel after]
    cosines = []
    for image in x:
        image = image[None].requires_grad_()
        outputs = model(image)
        best = outputs.argmax()
        (own,) = torch.autograd.grad(outputs[0, best], image)
        for matrix in matrices.unbind(1):
            other = (image.detach().flatten(2) @ matrix).view_as(image).requires_grad_()
            (there,) = torch.autograd.grad(model(other)[0, best], other)
            back = there.flatten(2) @ matrix.mT
            kept = (matrix != 0).any(1)
            cosines.append(
                F.cosine_similarity(
                    own.flatten(2)[..., kept].flatten(), back[..., kept].flatten(), dim=0
                )
            )
    expected = torch.stack(cosines).mean().item()
    assert saliency_invariance(model, x, group, n_samples=4) == pytest.approx(expected, rel=1e-8)
    assert not all(
        (matrix != 0).any(1).all() for matrix in matrices.unbind(1)
    )  # some pixels do leave


@pytest.mark.parametrize("model", [averaged_cnn, group_convolutions])
@pytest.mark.parametrize("group", ["p4", "p2", "finite"])
def test_invariant_by_construction_is_zero_zero_one_on_any_input(model, group):
    model, x = model(), images()
    group = li.FiniteGroup("quarter_turns") if group == "finite" else group
    for data in (x, 10 * x.abs()):
        assert 0 <= predictive_invariance(model, data, group) < 1e-14
        assert logit_invariance(model, data, group) < 1e-20
        assert saliency_invariance(model, data, group) == pytest.approx(1, abs=1e-10)
    assert logit_invariance(model, x, "pm") > 1e-4  # flips are another matter
    assert saliency_invariance(model, x, "pm") < 0.999


def test_a_network_of_its_own_is_not_invariant():
    model, x = small_cnn(), images()
    assert predictive_invariance(model, x, "p4") > 1e-3
    assert logit_invariance(model, x, "p4") > 0.1


def test_averaging_over_rotations_helps_and_is_not_exact():
    torch.manual_seed(1)
    net, x, group = small_cnn(9), F.avg_pool2d(images(20, 13), 5, 1), li.AffineImage(**ROTATIONS)
    model = li.InvariantModel(net, group, n_samples=16)
    assert 1e-8 < logit_invariance(model, x, group) < 0.3 * logit_invariance(net, x, group)
    assert saliency_invariance(model, x, group) > saliency_invariance(net, x, group) + 0.2


def test_a_grid_of_all_rotations_is_exact_for_quarter_turns():
    whole = li.AffineImage(init={"rotation": math.pi}, learn="rotation", draws="grid")
    model = li.InvariantModel(small_cnn(), whole, n_samples=8)
    assert logit_invariance(model, images(), "p4") < 1e-20
    assert saliency_invariance(model, images(), "p4") == pytest.approx(1, abs=1e-10)


def test_constants_are_invariant():
    model = small_cnn()
    model[-1].weight.data.zero_()
    found = invariance_report({"constant": model}, {"noise": images()}, "p4").rows["constant"][
        "noise"
    ]
    assert found == Invariance(0.0, 0.0, 1.0)
    assert jacobian_spectrum(model, images(), "p4").relative == 0


def test_measures_of_points():
    radius = nn.Sequential(Square(), nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 3))
    group = li.AffinePoints(**ROTATIONS)
    x = torch.randn(6, 2)
    assert logit_invariance(radius, x, group) < 1e-20
    assert saliency_invariance(radius, x, group) == pytest.approx(1, abs=1e-10)
    assert saliency_invariance(nn.Linear(2, 3), x, group) < 0.9


class Square(nn.Module):
    def forward(self, x):
        return x.square().sum(-1, keepdim=True)


def test_weights_of_a_finite_group_do_not_matter():
    model, x = small_cnn(), images()
    values = {
        logit_invariance(model, x, li.FiniteGroup("quarter_turns", init=init))
        for init in (0.0, 0.5, 1.0)
    }
    assert len(values) == 1
    assert values.pop() == pytest.approx(logit_invariance(model, x, "p4"))


@pytest.mark.parametrize("measure", MEASURES)
def test_loaders_and_batches_give_the_same(measure):
    model, x = small_cnn(), images()
    whole = measure(model, x, "p4")
    loader = DataLoader(TensorDataset(x, torch.zeros(7)), batch_size=4)
    assert measure(model, loader, "p4") == pytest.approx(whole)
    assert measure(model, [x[:3], x[3:]], "p4") == pytest.approx(whole)
    assert measure(model, x, "p4", batch_size=2) == pytest.approx(whole)


def test_nothing_is_left_behind():
    sampled = li.InvariantModel(
        small_cnn(), li.AffineImage(**ROTATIONS), n_samples=4
    )  # draws afresh where gradients are enabled
    model, x = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5), sampled), images()
    model[1].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    with torch.no_grad():
        first = invariance_report({"model": model}, {"noise": x}, "p4")
        spectrum = jacobian_spectrum(model, x, "p4")
    assert invariance_report({"model": model}, {"noise": x}, "p4") == first
    assert jacobian_spectrum(model, x, "p4") == spectrum
    assert [part.training for part in model] == [True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not x.requires_grad
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_report_is_a_table():
    models = {"plain": small_cnn(), "averaged": averaged_cnn()}
    report = invariance_report(models, {"in": images(), "out": images().abs()}, "p4")
    assert report.rows["plain"]["out"].saliency < 1
    lines = str(report).splitlines()
    assert lines[0].split() == ["network", "data", "predictive", "logit", "saliency"]
    assert [line.split()[0] for line in lines[1:]] == ["plain", "out", "averaged", "out"]
    assert lines[3].split()[-1] == "1.000"
    assert len({len(line) for line in lines}) == 1
    assert str(InvarianceReport({"a": {"b": Invariance(0.5, 0.25, 0.125)}})).split()[-3:] == [
        "5.0e-01",
        "2.5e-01",
        "0.125",
    ]


def test_error_is_half_the_mean_squared_distance():
    model, x = small_cnn(), images()
    all_of_them = torch.stack(
        [((model(y) - model(x)) ** 2).sum(-1) / 2 for y in quarter_turned(x)], 1
    )
    errors = torch.stack(
        [InvarianceError("p4", n_samples=3)(model, x).detach() for _ in range(400)]
    )
    torch.testing.assert_close(errors.mean(), all_of_them.mean().detach(), rtol=0.05, atol=0)
    assert InvarianceError("p4")(averaged_cnn(), x).item() < 1e-25


def test_error_has_the_gradient_of_finite_differences():
    model, x = small_cnn(), images(3)

    def error():
        return InvarianceError("p4", 2, torch.Generator().manual_seed(0))(model, x)

    weight = model[0].weight
    (gradient,) = torch.autograd.grad(error(), weight)
    torch.testing.assert_close(gradient, central_differences(error, weight), rtol=1e-6, atol=1e-8)


def test_saliency_maps_should_move_with_the_image():
    model, x = small_cnn(), images(3)
    classes = model(x).argmax(-1)

    def saliency(y):
        y = y.detach().requires_grad_()
        logits = model(y)[torch.arange(len(y)), classes]
        return torch.autograd.grad(logits.sum(), y)[0]

    all_of_them = torch.stack(
        [
            (saliency(y) - moved).square().flatten(1).sum(1)
            for y, moved in zip(quarter_turned(x), quarter_turned(saliency(x)), strict=True)
        ],
        1,
    )
    errors = []
    for seed in range(300):
        source = [torch.Generator().manual_seed(seed) for _ in range(2)]
        both = InvarianceError("p4", 3, source[0], saliency=2.0)(model, x)
        errors.append((both - InvarianceError("p4", 3, source[1])(model, x)).detach() / 2)
    torch.testing.assert_close(torch.stack(errors).mean(), all_of_them.mean(), rtol=0.05, atol=0)
    assert InvarianceError("p4", saliency=1.0)(averaged_cnn(), x).item() < 1e-20


def test_error_of_saliency_has_the_gradient_of_finite_differences():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
    x = torch.rand(3, 1, 5, 5)

    def error():
        return InvarianceError("p4", 2, torch.Generator().manual_seed(0), 0.5)(model, x)

    weight = model[0].weight
    (gradient,) = torch.autograd.grad(error(), weight)
    torch.testing.assert_close(gradient, central_differences(error, weight), rtol=1e-5, atol=1e-8)


def test_saliency_is_that_of_images():
    with pytest.raises(ValueError, match=r"like images .* got inputs of shape \[3, 4\]"):
        InvarianceError("p4", saliency=1.0)(nn.Linear(4, 2), torch.rand(3, 4))
    with pytest.raises(ValueError, match="saliency must be finite and not negative, got -1"):
        InvarianceError("p4", saliency=-1)
    assert repr(InvarianceError("p4", saliency=0.5)).endswith("n_samples=1, saliency=0.5)")


FEW = {
    "n_epochs": 20,
    "n_epochs_burnin": 10,
    "marglik_frequency": 10,
    "optimizer_kwargs": {"lr": 1e-2},
}


@pytest.mark.parametrize("objective", [MAP(), Evidence()], ids=["MAP", "evidence"])
def test_penalty_makes_a_network_more_invariant(objective):
    loader, x = bright_or_dark()
    found = {}
    for strength in (0.0, 3.0):
        torch.manual_seed(0)
        model = small_cnn(n_out=2)
        regularised = Regularised(InvarianceError("p4"), strength, objective)
        result = li.marglik_training(model, loader, objective=regularised, **FEW)
        found[strength] = logit_invariance(model, x, "p4")
        assert (result.history[-1]["evidence"] is not None) == objective.estimates
    assert found[3.0] < 0.6 * found[0.0]


def test_penalised_training_can_be_resumed(tmp_path):
    loader, _ = bright_or_dark()
    runs = []
    for epochs in ((4,), (2, 4)):
        torch.manual_seed(0)
        checkpoint = tmp_path / f"{len(runs)}.pt"
        for n_epochs in epochs:
            torch.manual_seed(0)
            model = small_cnn(n_out=2)
            objective = Regularised(InvarianceError(li.FiniteGroup("quarter_turns")), 2.0, MAP())
            options = {
                "objective": objective,
                "checkpoint": checkpoint,
                "resume": True,
                "n_epochs": n_epochs,
            }
            runs.append(li.marglik_training(model, loader, **options).losses)
    assert runs[0] == runs[2]
    with pytest.raises(ValueError, match="its objective"):
        li.marglik_training(
            small_cnn(n_out=2),
            loader,
            **options | {"objective": Regularised(InvarianceError("p4"), 2.0, MAP())},
        )


def test_objectives_without_a_penalty_stay_as_they_were():
    model, (loader, x) = small_cnn(n_out=2), bright_or_dark()
    y = loader.dataset.tensors[1]
    criterion = nn.CrossEntropyLoss()
    regularised = Regularised(lambda model, x: model(x).sum(), 3.0)
    expected = criterion(model(x), y) + 3 * model(x).sum()
    torch.testing.assert_close(regularised.training_loss(model, criterion, x, y), expected)
    assert regularised.estimates
    assert not regularised.steps_in_training


BAD_INPUT = {
    "no such group": (images(), "p5", ValueError, "there is no group 'p5'; choose from p1, p2, p4"),
    "no group": (images(), 4, TypeError, "a layers.Group or an Augmentation, got int"),
    "the identity": (images(), "p1", ValueError, "transforms nothing"),
    "no range": (images(), li.AffineImage(), ValueError, "transforms nothing.*give it a range"),
    "no batch": (images()[0], "p4", ValueError, "got shape"),
    "empty": (images(0), "p4", ValueError, "no inputs to measure on"),
    "empty loader": ([], "p4", ValueError, "no inputs to measure on"),
    "integers": ((255 * images()).long(), "p4", TypeError, "floating-point .* got torch.int64"),
    "no tensors": (["a"], "p4", TypeError, "floating-point tensors, or a loader of them, got str"),
    "not finite": (images() * math.nan, "p4", ValueError, "inputs hold NaN or infinite values"),
}


@pytest.mark.parametrize(("x", "group", "error", "match"), BAD_INPUT.values(), ids=BAD_INPUT)
@pytest.mark.parametrize("measure", [*MEASURES, jacobian_spectrum])
def test_bad_input_is_explained(measure, x, group, error, match):
    with pytest.raises(error, match=match):
        measure(small_cnn(), x, group)


@pytest.mark.parametrize("measure", [*MEASURES, jacobian_spectrum])
def test_outputs_of_another_shape_are_explained(measure):
    with pytest.raises(ValueError, match=r"\[n, outputs\] for n = 7 inputs, got shape \[7, 3"):
        measure(nn.Conv2d(2, 3, 3), images(), "p4")


def test_more_bad_input_is_explained():
    model, x = small_cnn(), images()
    with pytest.raises(ValueError, match="unknown divergence 'tv'; choose from js, kl"):
        predictive_invariance(model, x, "p4", divergence="tv")
    with pytest.raises(ValueError, match="two logits or more"):
        predictive_invariance(small_cnn(n_out=1), x, "p4")
    with pytest.raises(ValueError, match="needs two or more, got 1"):
        logit_invariance(model, x[:1], "p4")
    with pytest.raises(ValueError, match="n_samples must be a positive integer"):
        saliency_invariance(model, x, li.AffineImage(**ROTATIONS), n_samples=0)
    model[-1].bias.data.fill_(math.inf)
    with pytest.raises(ValueError, match="outputs of the model hold NaN"):
        logit_invariance(model, x, "p4")
    with pytest.raises(ValueError, match="height and width must agree"):
        logit_invariance(model, torch.randn(3, 2, 5, 7), "p4")
    with pytest.raises(ValueError, match="every must be positive, got 0"):
        SpectrumRecorder(x, "p4", every=0)
    with pytest.raises(ValueError, match="there is no group 'p3'"):
        InvarianceError("p3")
    with pytest.raises(TypeError, match="a tensor, got dict"):
        InvarianceError("p4")(model, {})
    with pytest.raises(ValueError, match="n_samples must be a positive integer, got 0"):
        InvarianceError("p4", 0)
    for strength in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="strength must be finite and not negative"):
            Regularised(InvarianceError("p4"), strength)
    with pytest.raises(TypeError, match="penalty must be callable"):
        Regularised(3.0)
    with pytest.raises(TypeError, match="objective must be an instance"):
        Regularised(InvarianceError("p4"), 1.0, MAP)


def test_a_constant_is_invariant():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.bias.expand(len(x), -1)

    x = images()
    assert saliency_invariance(Constant(), x, "p4") == 1
    assert jacobian_spectrum(Constant(), x, "p4").relative == 0


def test_a_penalty_is_known_by_what_is_not_learnt():
    augmentation = li.AffineImage(init={"rotation": 0.3}, learn="rotation")
    penalty = InvarianceError(augmentation)
    before = repr(penalty)
    augmentation.eta.data.mul_(2)
    assert repr(penalty) == before


@pytest.mark.parametrize(
    ("model", "x"), [(small_cnn(), images(0)), (nn.Flatten(0), images())], ids=["no inputs", "flat"]
)
def test_penalty_refuses_what_it_cannot_compare(model, x):
    with pytest.raises((TypeError, ValueError), match=r"no inputs|must return \[n, outputs\]"):
        InvarianceError("p4")(model, x)
