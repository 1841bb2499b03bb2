import pytest
import torch
from laplace import Laplace, marglik_training
from laplace.curvature import CurvlinopsGGN
from laplace.utils import Kron, KronDecomposed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

structures = ["kron", "diag", "full"]


class MyKron(Kron):
    def decompose(self, damping=False):
        decomposed = super().decompose(damping)
        return MyKronDecomposed(decomposed.eigenvectors, decomposed.eigenvalues)


class MyKronDecomposed(KronDecomposed):
    pass


class ScaledGGN(CurvlinopsGGN):
    """Loss and curvature, each multiplied by a hyperparameter that has a gradient."""

    eta = None

    def full(self, x, y, **kwargs):
        return self._scaled(*super().full(x, y, **kwargs))

    def diag(self, x, y, **kwargs):
        return self._scaled(*super().diag(x, y, **kwargs))

    def kron(self, x, y, N, **kwargs):
        loss, kron = super().kron(x, y, N, **kwargs)
        kfacs = [[F[0] * self.eta[1].square(), *F[1:]] for F in kron.kfacs]
        return loss * self.eta[0].exp(), MyKron(kfacs)

    def _scaled(self, loss, H):
        return loss * self.eta[0].exp(), H * self.eta[1].square()


@pytest.fixture
def eta(monkeypatch):
    eta = torch.tensor([0.3, 1.7]).double().requires_grad_()
    monkeypatch.setattr(ScaledGGN, "eta", eta)
    return eta


@pytest.fixture
def model():
    torch.manual_seed(711)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.fixture
def loader():
    torch.manual_seed(711)
    X, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    return DataLoader(TensorDataset(X, y), batch_size=7)


def fitted(model, loader, structure):
    la = Laplace(model, "regression", "all", structure, backend=ScaledGGN)
    la.fit(loader)
    return la


@pytest.mark.parametrize("structure", structures)
def test_gradient_in_hyperparameters_of_the_backend(eta, model, loader, structure):
    fitted(model, loader, structure).log_marginal_likelihood().backward()
    step = 1e-5
    for i in range(len(eta)):
        evidences = []
        for sign in (1, -1):
            eta.data[i] += sign * step
            evidences.append(fitted(model, loader, structure).log_marginal_likelihood())
            eta.data[i] -= sign * step
        expected = (evidences[0] - evidences[1]).detach() / (2 * step)
        torch.testing.assert_close(eta.grad[i], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("structure", structures)
def test_priors_can_be_optimized_after_the_gradient_was_taken(eta, model, loader, structure):
    la = fitted(model, loader, structure)
    (-la.log_marginal_likelihood()).backward()
    before = eta.grad.clone()
    la.optimize_prior_precision(pred_type="glm", n_steps=3, prior_structure="scalar")
    assert la.prior_precision.item() != 1
    torch.testing.assert_close(eta.grad, before)


@pytest.mark.parametrize("structure", structures)
def test_marglik_training_takes_several_steps(eta, model, loader, structure):
    _, _, margliks, _ = marglik_training(
        model,
        loader,
        "regression",
        structure,
        backend=ScaledGGN,
        n_epochs=2,
        n_hypersteps=3,
        marglik_frequency=1,
    )
    assert len(margliks) == 6
    assert eta.grad.ne(0).all()


def test_a_fit_keeps_the_matrix_of_the_backend(eta, model, loader):
    la = fitted(model, loader, "kron")
    assert type(la.H_facs) is MyKron
    assert type(la.H) is MyKronDecomposed
    la.fit(loader, override=False)
    assert type(la.H_facs) is MyKron


def test_a_subclass_may_have_a_sum_of_its_own(model):
    class Diagonals(MyKron):
        def __add__(self, other):
            if not isinstance(other, Diagonals):  # the zeros of a fit
                return self
            return super().__add__(other)

    zeros = Kron.init_from_model(model, "cpu", torch.float64)
    factors = Diagonals([[torch.ones(len(F)).double() for F in own] for own in zeros.kfacs])
    total = zeros + factors + factors
    assert type(total) is Diagonals
    for own in total.kfacs:
        for F in own:
            torch.testing.assert_close(F, torch.full((len(F),), 2.0).double())
