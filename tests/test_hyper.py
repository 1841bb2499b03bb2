"""Hyperparameters: buffers that require grad, keep their identity, and are stepped with care."""

import copy
import io

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.hyper import StepGuard, differentiable


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
    "cast",
    [lambda m: m.to(torch.float32), lambda m: m.float(), lambda m: m.half(), lambda m: m.double()],
    ids=["to(float32)", "float", "half", "double"],
)
def test_keeps_identity_through_casts(model, cast):
    scale, order = model[1].scale, list(model.state_dict())
    dtype = next(cast(model).parameters()).dtype
    assert is_intact(model[1].scale, scale)
    assert scale.dtype == dtype
    assert list(model.state_dict()) == order


def test_casts_its_gradient_along(model):
    model[1].scale.grad = torch.ones(2)
    model.float()
    assert model[1].scale.grad.dtype == torch.float32


def test_survives_deepcopy(model):
    twin = copy.deepcopy(model)
    assert twin[1].scale is not model[1].scale
    assert twin[1].scale.is_leaf
    assert twin[1].scale.requires_grad
    assert [name for name, _ in li.named_hyperparameters(twin)] == ["1.scale"]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
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


# Steps that are not finite.


def weight_with(gradient):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = None if gradient is None else torch.tensor(gradient)
    return weight


@pytest.mark.parametrize(
    ("gradient", "objective", "allowed"),
    [
        ([1.0, 2.0], 3.0, True),
        ([1.0, 2.0], None, True),
        (None, 3.0, True),
        ([1.0, float("nan")], 3.0, False),
        ([1.0, float("inf")], None, False),
        (None, float("inf"), False),
        ([1e308, 1e308], 3.0, True),
        ([float("inf"), -float("inf")], 3.0, False),
    ],
    ids=[
        *["finite", "unknown objective", "no gradient", "nan", "infinite", "infinite objective"],
        *["sum overflows", "infinities that cancel"],
    ],
)
def test_guard_allows_what_is_finite(gradient, objective, allowed):
    guard = StepGuard(["weights", "priors"])
    value = None if objective is None else torch.tensor(objective)
    learnt = [weight_with([0.0, 0.0]), weight_with(gradient)]
    assert guard.allows("weights", learnt, value) == allowed
    assert guard.skipped == {"weights": int(not allowed), "priors": 0}


def test_guard_gives_up_after_too_many_bad_steps_of_one_kind_in_a_row(caplog):
    guard = StepGuard(["weights", "priors"], max_bad_steps=2)
    good, bad = [weight_with([1.0, 1.0])], [weight_with([1.0, float("nan")])]
    for learnt in (bad, good, bad):  # a good step in between starts the count from scratch
        guard.allows("weights", learnt)
    guard.allows("priors", bad)  # and kinds are counted separately
    assert "step of weights skipped: a gradient is not finite (2 so far)" in caplog.text
    resumed = StepGuard(["weights", "priors"], max_bad_steps=2)
    resumed.load_state_dict(guard.state_dict())
    for same in (guard, resumed):
        with pytest.raises(FloatingPointError, match="2 steps of weights in a row were skipped"):
            same.skip("weights", "anything")
        assert same.skipped == {"weights": 3, "priors": 1}
