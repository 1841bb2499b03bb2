"""The averaged network, and where its draws come from."""

import copy

import pytest
import torch
from torch import nn
from twins import central_differences, relative_error

import laplace_invariance as li
from laplace_invariance.draws import fixed_draws, recording, replaying


def make(n_samples=4, **kwargs):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    return li.InvariantModel(net, li.AffinePoints(init=0.5), n_samples, **kwargs)


def test_is_the_mean_over_samples():
    model, x = make(), torch.randn(7, 2)
    tape = []
    with recording(tape):
        outputs = model(x)
    samples = model.augmentation.transform(x, tape[0])
    expected = torch.stack([model.net(samples[:, s]) for s in range(4)]).mean(0)
    torch.testing.assert_close(outputs, expected)


def test_is_the_weighted_mean_over_a_group():
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 3))
    model, x = li.InvariantModel(net, li.FiniteGroup("flips", init=0.5)), torch.randn(2, 1, 5, 5)
    flips = [net(x), net(x.flip(3)), net(x.flip(2)), net(x.flip(2, 3))]
    torch.testing.assert_close(model(x), (flips[0] + 0.5 * sum(flips[1:])) / 2.5)


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_draws_are_fresh_where_gradients_flow_and_fixed_elsewhere(mode):
    model, x = make().train(mode), torch.randn(7, 2)
    assert not torch.equal(model(x), model(x))
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
        assert torch.equal(model(x)[:3], model(x[:3]))  # not a matter of the batch
    with fixed_draws():
        torch.testing.assert_close(model(x).detach(), torch.no_grad()(model)(x))


def test_tape_replays_several_draws_in_order():
    model, x, tape = nn.Sequential(make(), make()), torch.randn(7, 2), []
    model[0].net[2] = nn.Linear(5, 2)
    with recording(tape):
        first = model(x)
    assert len(tape) == 2
    with replaying(tape):
        assert torch.equal(model(x), first)


def test_generator_makes_draws_repeatable():
    model, x = make(generator=torch.Generator().manual_seed(1)), torch.randn(7, 2)
    first = model(x)
    torch.manual_seed(5)
    model.generator.manual_seed(1)
    assert torch.equal(model(x), first)


def test_can_be_copied_with_a_generator():
    model = make(generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    assert twin.generator is not model.generator
    x = torch.randn(7, 2)
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize("n_samples", [0, -1, 2.5, True])
def test_number_of_samples_is_checked(n_samples):
    with pytest.raises(ValueError, match="positive integer"):
        make(n_samples)


def test_augmentation_type_is_checked():
    with pytest.raises(TypeError, match="Augmentation"):
        li.InvariantModel(nn.Linear(2, 2), nn.Identity())


def test_functions_can_be_applied_to_all_modules():
    model = nn.Sequential(
        li.InvariantModel(nn.Linear(2, 3), li.Compose(li.AffinePoints(), li.AffinePoints()))
    )
    seen = []
    assert model.apply(seen.append) is model
    assert set(seen) == set(model.modules())
    assert seen.index(model[0].net) < seen.index(model[0]) < seen.index(model)


def test_augmentations_are_modules_like_any_other():
    seen = []
    augmentation = li.AffinePoints()
    nn.Sequential(augmentation, nn.Linear(2, 3)).apply(seen.append)
    assert [type(module) for module in seen] == [li.AffinePoints, nn.Linear, nn.Sequential]
    assert augmentation.apply(fn=seen.append) is augmentation


def test_the_old_name_of_transform_still_works():
    augmentation = li.AffinePoints(init=0.5)
    x, draws = torch.randn(3, 2), augmentation.sample(3, 4)
    with pytest.warns(DeprecationWarning, match="now called transform"):
        samples = augmentation.apply(x, draws)
    torch.testing.assert_close(samples, augmentation.transform(x, draws), rtol=0, atol=0)


class Shifted(li.Augmentation):
    """An augmentation as they were written when ``transform`` was called ``apply``."""

    def sample(self, n, n_samples, generator=None):
        return torch.rand(n, n_samples, 1, generator=generator)

    def fixed(self, n_samples):
        return torch.zeros(1, n_samples, 1)

    def apply(self, x, draws):
        return x.unsqueeze(1) + draws


def test_augmentations_with_the_old_name_of_transform_still_work():
    x = torch.randn(3, 2)
    with pytest.warns(DeprecationWarning, match="Shifted.apply"):
        outputs = li.InvariantModel(nn.Identity(), Shifted(), n_samples=4).eval()(x)
    assert outputs.shape == (3, 2)
    assert ((outputs > x) & (outputs < x + 1)).all()
    with pytest.raises(NotImplementedError, match="Augmentation has no transform"):
        li.Augmentation().transform(x, x)


# Inputs in a mapping.


class OfMapping(nn.Module):
    """Takes a mapping, and weighs its images by a mask."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(25, 3))

    def forward(self, x):
        return self.net(x["pixel_values"] * x["mask"][:, None, None, None] + x["offset"])


def mapping(n=4):
    return {
        "pixel_values": torch.randn(n, 1, 5, 5),
        "mask": torch.rand(n),
        "offset": torch.ones(()),
    }


def test_a_mapping_is_averaged_as_its_tensors_are():
    net, x = OfMapping(), mapping()
    augmentation = li.AffineImage(init={"rotation": 1.0})
    model = li.InvariantModel(net, augmentation, n_samples=3, dict_key_x="pixel_values")
    draws = augmentation.sample(4, 3)
    samples = augmentation.transform(x["pixel_values"], draws)
    parts = [net(x | {"pixel_values": samples[:, s]}) for s in range(3)]
    torch.testing.assert_close(model.average(x, draws), torch.stack(parts).mean(0))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_evidence_of_a_mapping_has_the_gradient_of_differences(chunk_size):
    x, y = mapping(), torch.tensor([0, 1, 2, 1])
    augmentation = li.AffineImage(init=0.3)
    model = li.InvariantModel(OfMapping(), augmentation, n_samples=3, dict_key_x="pixel_values")

    def total():
        torch.manual_seed(0)
        backend = li.curvature.AugmentedGGN(
            model, "classification", dict_key_x="pixel_values", chunk_size=chunk_size
        )
        loss, kron = backend.kron(x, y, N=4)
        return loss + sum(f.diagonal().sum() for own in kron.kfacs for f in own)

    total().backward()
    eta = augmentation.eta
    expected = central_differences(lambda: total().detach(), eta, 1e-7)
    assert relative_error(eta.grad, expected) < 1e-4


def test_a_key_that_is_not_there_is_named():
    model = li.InvariantModel(OfMapping(), li.AffineImage(), n_samples=2)
    with pytest.raises(KeyError, match="inputs have no 'input_ids', only 'pixel_values', 'mask'"):
        model(mapping())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_outputs_only(dtype):
    class Moment(nn.Module):  # exact for half precision, unlike products of matrices
        def forward(self, x):
            return x.double().square().to(x.dtype)

    group = li.InvariantModel(Moment(), li.FiniteGroup("all", init=0.3)).to(dtype)
    x = torch.rand(3, 1, 5, 5).to(dtype)
    expected = group.double()(x.double())
    outputs = group.to(dtype)(x)
    assert outputs.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(outputs.double(), expected, rtol=eps, atol=0)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(group.float()(x.float()).double(), expected)
