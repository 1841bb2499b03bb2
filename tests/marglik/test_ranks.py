"""Several processes: the same result as one, to round-off; what they share out; what is refused."""

import re
import time
from functools import partial

import laplace
import processes
import pytest
import ranks_run
import torch
import torch.distributed as dist
from builders import invariant_network, labelled_points
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, eigen
from laplace_invariance.draws import Share, common_draws, sharing
from laplace_invariance.marglik.ranks import ALONE, Ranks, _shared_out, whole_loader

pytestmark = pytest.mark.xdist_group("ranks")  # one worker runs the processes, for all tests

EQUAL = ("running", "refit", "regression", "search", "sampler", "resumed")
FURTHER = ("diag", "full", "last-layer", "tolerance", "augerino", "wrapped")  # in the slow tests
DIFFERENT = ("dropout", "batch-norm")  # masks and statistics are those of a rank's rows
REFUSED = ("damaged", "full-disk", "other-data")
CASES = (*EQUAL, *DIFFERENT, *REFUSED)


def start(rank, size, directory, *cases):
    """Start one process, with all that it prints in a file."""
    log = directory / f"log-{rank}"
    return processes.start(ranks_run.main, rank, size, directory, *cases, log=log)


def finish(running, directory, seconds=240):
    """Wait for processes, and fail with what they printed if one hangs or fails."""
    for process in running:
        process.join(seconds)
    codes = [process.exitcode for process in running]  # None if it hangs
    for process in running:
        process.kill()
    texts = "".join(path.read_text()[-3000:] for path in directory.glob("log-*"))
    assert codes == [0] * len(running), texts


def results_of(cases, tmp_path_factory):
    """Return results by number of processes, case and rank."""
    found = {}
    started = []
    for size in (1, 2):
        directory = tmp_path_factory.mktemp(f"ranks-{size}")
        running = [start(rank, size, directory, *cases) for rank in range(size)]
        started.append((size, running, directory))
    for size, running, directory in started:
        finish(running, directory)
        for case in cases:
            for rank in range(size):
                path = directory / f"{case}-{rank}.pt"
                found[size, case, rank] = torch.load(path, weights_only=True)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of(CASES, tmp_path_factory)


@pytest.fixture(scope="module")
def further_results(tmp_path_factory):
    return results_of(FURTHER, tmp_path_factory)


@pytest.mark.parametrize("case", EQUAL)
def test_two_ranks_are_one_process_to_round_off(results, case):
    """With batches of odd length, of which the last has no row for the second rank."""
    assert_equal(results[2, case, 0], results[1, case, 0], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER)
def test_two_ranks_are_one_process_with_any_option(further_results, case):
    assert_equal(further_results[2, case, 0], further_results[1, case, 0], rtol=1e-9, atol=1e-11)
    assert_equal(further_results[2, case, 1], further_results[2, case, 0], rtol=0, atol=0)


@pytest.mark.parametrize("case", [*EQUAL, *DIFFERENT])
def test_ranks_stay_equal_bit_for_bit(results, case):
    assert_equal(results[2, case, 1], results[2, case, 0], rtol=0, atol=0)


def assert_equal(found, wanted, **tolerances):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert_close(found[name], value, **tolerances, msg=partial("{}: {}".format, name))


def test_a_rank_that_dies_ends_the_run_which_resumes(tmp_path):
    running = [start(rank, 2, tmp_path, "killed") for rank in range(2)]
    checkpoint = tmp_path / "killed.pt"
    waited_until = time.monotonic() + 60
    while not checkpoint.exists() and time.monotonic() < waited_until:
        time.sleep(0.05)
    time.sleep(0.1)
    running[1].kill()
    running[0].join(60)
    assert running[0].exitcode, (tmp_path / "log-0").read_text()
    before = torch.load(checkpoint, weights_only=True)["run"]["epoch"]
    (tmp_path / "meeting").unlink(missing_ok=True)
    running = [start(rank, 2, tmp_path, "killed") for rank in range(2)]
    while time.monotonic() < waited_until + 60:
        time.sleep(0.1)
        if torch.load(checkpoint, weights_only=True)["run"]["epoch"] > before + 2:
            break
    for process in running:
        process.kill()
        process.join()
    assert torch.load(checkpoint, weights_only=True)["run"]["epoch"] > before + 2


# What they share out.


@pytest.mark.parametrize(("n", "size"), [(7, 2), (7, 3), (2, 3)])
def test_draws_of_all_shares_are_those_of_the_batch(n, size):
    model = invariant_network()
    x = torch.randn(n, 2)
    with common_draws(5):
        together = model(x)
    for rank in range(size):
        share = Share(rank, size, n)
        with common_draws(5), sharing(share):
            own = model(x[share.rows])
        assert_close(own, together[share.rows])
    assert sum(Share(rank, size, n).n_counted for rank in range(size)) == n


def test_work_is_shared_out_evenly():
    owners = _shared_out([1.0, 8.0, 4.0, 3.0, 2.0], 2)
    loads = [0.0, 0.0]
    for owner, work in zip(owners, [1.0, 8.0, 4.0, 3.0, 2.0], strict=True):
        loads[owner] += work
    assert loads == [9.0, 9.0]


def test_all_ranks_decompose_before_one_waits_for_another(monkeypatch):
    """Also the last one, which gets the results of others first."""
    events = []
    decompose = eigen.decompose
    monkeypatch.setattr(
        eigen, "decompose", lambda *args: events.append("decompose") or decompose(*args)
    )
    monkeypatch.setattr(dist, "broadcast", lambda flat, src: events.append(f"from {src}"))
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value])
    factors = [torch.eye(n) for n in (2, 3, 5)]
    Ranks(1, 2).decompose([*factors, factors[0]])
    assert events == ["decompose", "from 0", "from 1"]


def test_a_decomposition_that_fails_on_one_rank_fails_on_all(monkeypatch):
    theirs = torch.linalg.LinAlgError("no convergence")
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, theirs])
    with pytest.raises(torch.linalg.LinAlgError, match="no convergence"):
        Ranks(0, 2).decompose([torch.eye(3), torch.eye(2)])


def test_work_of_a_decomposition_grows_with_the_cube():
    assert eigen.work(torch.zeros(6, 6)) == 8 * eigen.work(torch.zeros(3, 3))
    assert eigen.work(torch.zeros(5, 3, 3)) == 5 * eigen.work(torch.zeros(3, 3))
    assert eigen.work(torch.zeros(7)) == 7


def test_a_distributed_sampler_is_made_whole_without_repeats():
    data = labelled_points(25)
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, seed=4)
        loader = DataLoader(data, 3, sampler=sampler)
        assert sum(len(y) for _, y in loader) == 13  # one example is repeated
        parts.append(whole_loader(loader, Ranks(rank, 2)))
    batches = [[x for x, _ in part] for part in parts]
    assert [len(x) for x in batches[0]] == [6, 6, 6, 6, 1]
    for one, other in zip(*batches, strict=True):
        assert_close(one, other, rtol=0, atol=0)
    rows = torch.cat(batches[0])
    assert len(rows.unique(dim=0)) == 25


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_load_rows_of_their_own_only(num_workers):
    class Counted(torch.utils.data.Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, i):
            return torch.tensor([float(i)]), i

    loader = DataLoader(Counted(), 4, num_workers=num_workers)
    seen = [
        [(data[1].tolist(), share.n_counted) for data, share in Ranks(rank, 3).batches(loader, "y")]
        for rank in range(3)
    ]
    assert seen == [[([0, 3], 2), ([4], 1)], [([1], 1), ([5], 1)], [([2], 1), ([6], 1)]]


def test_batches_without_an_index_are_cut():
    x, y = torch.arange(5.0), torch.arange(5)
    ((data, _),) = Ranks(1, 2).batches([(x, y)], "labels")
    assert_close(data, [x[1::2], y[1::2]])
    mapping = {"input_ids": x, "labels": y, "scale": torch.ones(2)}
    ((cut, share),) = Ranks(0, 2).batches([mapping], "labels")
    assert_close(cut, {"input_ids": x[::2], "labels": y[::2], "scale": torch.ones(2)})
    assert (share.n, share.n_counted) == (5, 3)


def test_one_process_is_alone():
    tensors = [torch.ones(2)]
    assert ALONE.sum(tensors)[0] is tensors[0]
    assert ALONE.gather(3) == [3]
    assert li.marglik.ranks.present_ranks() is ALONE


# What is refused.


def test_laplace_does_not_fit_to_a_part_of_the_data():
    data = labelled_points(25)
    loader = DataLoader(data, 5, sampler=DistributedSampler(data, 2, 0))
    la = laplace.Laplace(invariant_network(), "classification", "all", "kron", backend=AugmentedGGN)
    with pytest.raises(ValueError, match=r"this rank sees one of 2 parts, but Laplace\.fit"):
        la.fit(loader)


def test_a_sampler_of_more_ranks_than_there_are_is_refused():
    data = labelled_points(25)
    loader = DataLoader(data, 5, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(ValueError, match="num_replicas=2, but there are 1 processes; start them"):
        li.marglik_training(invariant_network(), loader, n_epochs=1)


def test_a_sampler_of_another_kind_is_refused():
    class Weighted(DistributedSampler):
        pass

    data = labelled_points(25)
    loader = DataLoader(data, 5, sampler=Weighted(data, 2, 0))
    with pytest.raises(TypeError, match="Weighted in a BatchSampler may leave out or repeat"):
        whole_loader(loader, Ranks(0, 2))


def test_ranks_with_different_data_are_refused(results):
    assert "ranks have different data" in results[2, "other-data", 0]["error"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("damaged", r"ValueError: .*damaged\.pt is not a readable checkpoint"),
        ("full-disk", "OSError: .*File too large"),
    ],
)
def test_what_fails_on_the_first_rank_fails_on_all(results, case, message):
    """So that none of them waits for it."""
    for rank in range(2):
        assert re.match(message, results[2, case, rank]["error"])


def test_a_refusal_of_any_rank_reaches_the_others(monkeypatch):
    theirs = ValueError("no")
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, theirs])
    with pytest.raises(ValueError, match="no"), Ranks(0, 2).agreeing():
        pass
    with pytest.raises(FileExistsError, match="own"), Ranks(0, 2).agreeing():
        raise FileExistsError("own")


def test_a_model_that_is_split_over_ranks_is_refused():
    class FSDPModule:
        __module__ = "torch.distributed.fsdp._fully_shard"

    class Split(FSDPModule, nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 5), Split(5, 3))
    with pytest.raises(
        TypeError, match=r"under FSDP are split over ranks.*DistributedDataParallel"
    ):
        li.marglik_training(model, DataLoader(labelled_points()), n_epochs=1)


def test_the_kernel_bound_is_for_one_process(monkeypatch):
    monkeypatch.setattr(li.marglik.training, "present_ranks", lambda: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "equal", lambda self, tensors: None)
    with pytest.raises(ValueError, match="kernel bound is that of whole minibatches"):
        li.marglik_training(
            invariant_network(), DataLoader(labelled_points(), 5), estimator="kernel"
        )
