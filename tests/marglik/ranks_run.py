"""What one of several processes does: train, case by case, and write what must be equal."""

import resource
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from builders import invariant_network, labelled_points, plain_network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import laplace_invariance as li
from laplace_invariance.marglik import Augerino, Refit, Running, Search

N = 25  # with batches of 8, the last one has one row, of which the second of two ranks has none
RUNNING = {"estimator": Running(every=2, settle=0.0)}
CASES = {
    "running": RUNNING | {"marglik_frequency": 2},
    "refit": {"estimator": Refit(n_hyper_batches=2)},
    "diag": {"hessian_structure": "diag"},
    "full": {"hessian_structure": "full", "estimator": Refit()},
    "last-layer": RUNNING | {"subset_of_weights": "last_layer"},
    "tolerance": {"estimator": Running(every=1, tolerance=0.3)},
    "regression": RUNNING | {"likelihood": "regression"},
    "augerino": {"objective": Augerino(0.1), "lr_aug": 0.02},
    "search": RUNNING | {"search": Search(n_steps=2, keep=2, n_examples=20), "n_epochs": 1},
    "sampler": RUNNING,
    "wrapped": RUNNING,
    "resumed": RUNNING,
    "damaged": RUNNING,
    "full-disk": RUNNING,
    "dropout": RUNNING,
    "batch-norm": RUNNING,
    "other-data": RUNNING,
    "killed": RUNNING | {"n_epochs": 10_000},
}
WITH_FILES = ("resumed", "killed", "damaged", "full-disk")
DIFFERENT = {"dropout": lambda: nn.Dropout(0.5), "batch-norm": lambda: nn.BatchNorm1d(5)}


def fill_disk():
    """Let no file grow any more; a full disk fails alike."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def loader_of(case, data, ranks):
    """The loader of a user: the same on all ranks, or each with its part."""
    if case != "sampler":
        return DataLoader(data, 8, shuffle=True)
    # one process has the batches of two together
    sampler = DistributedSampler(data, ranks.size, ranks.rank, seed=3)
    return DataLoader(data, 8 // ranks.size, sampler=sampler)


def model_of(case, ranks):
    torch.manual_seed(ranks.rank)  # the first rank decides
    if case in DIFFERENT:
        net = nn.Sequential(nn.Linear(2, 5), DIFFERENT[case](), nn.Linear(5, 3))
        return li.InvariantModel(net, li.AffinePoints(init={"rotation": 0.2}), n_samples=3)
    if case == "search":
        return li.InvariantModel(plain_network(), li.AffinePoints(), n_samples=2)
    model = invariant_network(1 if case == "regression" else 3)
    if case == "wrapped" and ranks.size > 1:
        return DistributedDataParallel(model)
    return model


def run(case, directory, ranks):
    """Train, and keep everything that must be equal."""
    torch.manual_seed(ranks.rank if case == "other-data" else 0)
    data = labelled_points(N, classes=0 if case == "regression" else 3)
    arguments = {"n_epochs": 3, "valid_loader": DataLoader(labelled_points(9), 4)} | CASES[case]
    loader = loader_of(case, data, ranks)
    model = model_of(case, ranks)
    if case == "regression":
        del arguments["valid_loader"]
    if case in WITH_FILES:
        files = {"checkpoint": directory / f"{case}.pt", "history": directory / f"{case}.jsonl"}
        arguments |= files
    if case in ("resumed", "damaged"):
        files = arguments | {"n_epochs": 2}
        li.marglik_training(model_of(case, ranks), loader, **files)
    if case in WITH_FILES:
        arguments["resume"] = True
    if case == "damaged" and ranks.is_first:
        arguments["checkpoint"].write_bytes(b"no checkpoint")
    if case == "full-disk" and ranks.is_first:
        arguments["callbacks"] = [lambda record, model: fill_disk()]
    result = li.marglik_training(model, loader, **arguments)
    found = {f"model.{name}": value for name, value in result.model.state_dict().items()}
    hessian = result.la.H_facs.kfacs if arguments.get("hessian_structure") is None else result.la.H
    return found | {
        "evidence": torch.tensor(result.evidence),
        "precision": result.prior_precision,
        "noise": result.sigma_noise,
        "curvature": hessian,
        "losses": torch.tensor(result.losses),
        "margliks": torch.tensor(result.margliks),
        "decrement": torch.tensor(result.newton_decrement),
        "valid": [record["valid"] for record in result.history],
        "prediction": result.la(torch.ones(4, 2)),
    }


def main(rank, size, directory, *cases):
    """Write the results of each case to ``directory/case-rank.pt``."""
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory / 'meeting'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
    ranks = li.marglik.ranks.Ranks(rank, size)
    for case in cases:
        try:
            found = run(case, directory, ranks)
        except (ValueError, OSError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        torch.save(found, directory / f"{case}-{rank}.pt")
    if size > 1:
        dist.destroy_process_group()
