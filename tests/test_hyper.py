"""What DESIGN says of hyperparameters: buffers that require grad, and stay what they are."""

import copy
import io

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.hyper import differentiable


class Scaled(li.Hyperparameterised):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(2))
        self.register_hyperparameter("scale", torch.tensor([2.0, 3.0]))
        self.register_buffer("after", torch.zeros(2))

    def forward(self, x):
        return x * self.hyperparameter("scale")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), Scaled())


def is_intact(tensor, original):
    return tensor is original and tensor.is_leaf and tensor.requires_grad and tensor.grad_fn is None


def test_is_not_a_parameter_but_in_the_state(model):
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert "1.scale" in model.state_dict()
    assert [name for name, _ in li.named_hyperparameters(model)] == ["1.scale"]
    assert next(li.hyperparameters(model)) is model[1].scale


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to(torch.float32), lambda m: m.float(), lambda m: m.half(), lambda m: m.double()],
)
def test_keeps_identity_through_casts(model, move):
    scale, order = model[1].scale, list(model.state_dict())
    dtype = next(move(model).parameters()).dtype
    assert is_intact(model[1].scale, scale)
    assert scale.dtype == dtype
    assert list(model.state_dict()) == order


def test_moves_its_gradient_along(model):
    model[1].scale.grad = torch.ones(2)
    model.float()
    assert model[1].scale.grad.dtype == torch.float32


def test_survives_deepcopy(model):
    twin = copy.deepcopy(model)
    assert twin[1].scale is not model[1].scale
    assert twin[1].scale.is_leaf
    assert twin[1].scale.requires_grad
    assert [name for name, _ in li.named_hyperparameters(twin)] == ["1.scale"]


@pytest.mark.parametrize("assign", [False, True])
def test_loads_in_place(model, assign):
    scale, state = model[1].scale, copy.deepcopy(model.state_dict())
    state["1.scale"] += 1
    model.load_state_dict(state, assign=assign)
    assert is_intact(model[1].scale, scale)
    torch.testing.assert_close(scale.detach(), torch.tensor([3.0, 4.0]))


def test_survives_save_and_load(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    assert twin[1].scale.is_leaf
    assert twin[1].scale.requires_grad
    assert [name for name, _ in li.named_hyperparameters(twin)] == ["1.scale"]


def test_training_loss_never_reaches_it(model):
    model(torch.randn(5, 2)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].scale.grad is None
    with differentiable():
        model(torch.randn(5, 2)).sum().backward()
    assert model[1].scale.grad is not None


def test_frozen_stays_frozen(model):
    model[1].scale.requires_grad_(False)
    model.float().double()
    assert not model[1].scale.requires_grad
    with pytest.raises(ValueError, match="nothing to learn"):
        li.learning(model)


def test_laplace_puts_no_prior_and_no_curvature_on_it(model):
    loader = DataLoader(TensorDataset(torch.randn(6, 2), torch.randn(6, 2)), batch_size=3)
    la = Laplace(
        model, "regression", subset_of_weights="all", hessian_structure="kron", backend=AugmentedGGN
    )
    la.fit(loader)
    assert la.n_params == 6
    assert len(la.H) == 2
    la.log_marginal_likelihood().backward()  # not an augmentation, yet differentiated
    assert model[1].scale.grad.abs().min() > 0


def test_each_shared_hyperparameter_is_listed_once():
    scaled = Scaled()
    assert len(list(li.named_hyperparameters(nn.Sequential(scaled, nn.Linear(2, 2), scaled)))) == 1


def test_integers_are_refused():
    with pytest.raises(TypeError, match="floating-point"):
        li.Hyperparameterised().register_hyperparameter("n", torch.tensor([1]))


def test_learning_steps_and_clears(model):
    scale = model[1].scale
    with li.learning(model, lr=0.1, optimizer=torch.optim.SGD) as learner:
        for _ in range(2):
            with differentiable():
                (model[1].hyperparameter("scale") ** 2).sum().backward()
        assert scale.grad is None
    torch.testing.assert_close(scale.detach(), torch.tensor([2.0, 3.0]) * 0.8**2)
    assert learner.steps == {"1.scale": 2}
    assert len(learner.history["1.scale"]) == 3
    with differentiable():
        model[1].hyperparameter("scale").sum().backward()
    assert scale.grad is not None  # outside: delivered, not stepped
    torch.testing.assert_close(scale.detach(), torch.tensor([2.0, 3.0]) * 0.8**2)


def test_learning_skips_what_is_not_finite(model, caplog):
    scale = model[1].scale
    with li.learning(model) as learner, differentiable():
        (model[1].hyperparameter("scale") * float("nan")).sum().backward()
    assert learner.skipped == {"1.scale": 1}
    assert learner.steps == {"1.scale": 0}
    assert "1.scale" in caplog.text
    torch.testing.assert_close(scale.detach(), torch.tensor([2.0, 3.0]))


def test_learning_is_not_nested(model):
    with (
        li.learning(model),
        pytest.raises(RuntimeError, match="being learnt already"),
        li.learning(model),
    ):
        pass
    with li.learning(model):  # and the failed attempt left nothing behind
        pass


def test_learning_projects():
    augmentation = li.AffineImage(init={"rotation": 3.1})
    with li.learning(augmentation, lr=1.0, optimizer=torch.optim.SGD), differentiable():
        (-augmentation.hyperparameter("eta")).sum().backward()
    assert augmentation.eta[2].item() == pytest.approx(torch.pi)
    assert augmentation.eta[0].item() == pytest.approx(1.0)
