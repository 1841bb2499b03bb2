import pytest
import torch
from laplace import Laplace
from laplace.utils import Kron
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture
def model():
    torch.manual_seed(711)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.fixture
def loader():
    torch.manual_seed(711)
    X, y = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    return DataLoader(TensorDataset(X, y), batch_size=7)


@pytest.fixture
def kron():
    torch.manual_seed(711)
    roots = [[torch.randn(4, 3).double(), torch.randn(3, 2).double()], [torch.randn(4, 3).double()]]
    return Kron([[root.T @ root for root in own] for own in roots])


@pytest.mark.parametrize("subset_of_weights", ["all", "last_layer"])
@pytest.mark.parametrize("hessian_structure", ["kron", "diag", "full"])
def test_gradient_of_evidence_in_sigma_noise(model, loader, subset_of_weights, hessian_structure):
    la = Laplace(model, "regression", subset_of_weights, hessian_structure)
    la.fit(loader)

    def evidence(log_sigma):
        return la.log_marginal_likelihood(sigma_noise=log_sigma.exp())

    log_sigma = torch.tensor(-0.7).double().requires_grad_()
    evidence(log_sigma).backward()
    step = 1e-5
    with torch.no_grad():
        expected = (evidence(log_sigma + step) - evidence(log_sigma - step)) / (2 * step)
    torch.testing.assert_close(log_sigma.grad, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_multiplication_keeps_the_graph_of_the_scalar(kron, decomposed, shape):
    matrix = kron.decompose() if decomposed else kron
    scalar = torch.full(shape, 2.5).double().requires_grad_()
    product = matrix * scalar
    (gradient,) = torch.autograd.grad(product.diag().sum(), scalar)
    torch.testing.assert_close(product.to_matrix(), 2.5 * kron.to_matrix())
    torch.testing.assert_close(gradient.sum(), kron.diag().sum())


@pytest.mark.parametrize("scalar", [2, 2.5, torch.tensor(2.5)])
def test_multiplication_by_numbers_is_as_before(kron, scalar):
    expected = float(scalar) * kron.to_matrix()
    torch.testing.assert_close((kron * scalar).to_matrix(), expected)
    torch.testing.assert_close((scalar * kron.decompose()).to_matrix(), expected)
