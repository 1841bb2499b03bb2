"""Double precision and a fixed seed for every test; fixtures that run one on all backends."""

import os

import pytest
import torch

from laplace_invariance import curvature

if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core: more threads would only compete
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start

ENGINES = ("", "Asdl", "BackPack")


@pytest.fixture(autouse=True)
def _double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=[f"{engine}AugmentedGGN" for engine in ENGINES])
def ggn_backend(request):
    return getattr(curvature, request.param)


@pytest.fixture(params=[f"{engine}Augmented{kind}" for kind in ("GGN", "EF") for engine in ENGINES])
def backend(request):
    return getattr(curvature, request.param)
