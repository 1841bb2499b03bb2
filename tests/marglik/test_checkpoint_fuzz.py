"""Checkpoints that were damaged, changed or forged: refused without a trace, or no difference."""

import copy
import errno
import io
import os
import pickle
import random
import sys
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from builders import labelled_points, plain_network, without_times
from torch.utils.data import DataLoader

import laplace_invariance as li
from laplace_invariance.marglik import checkpoints

N_FUZZED = 1000
MADE = []  # optimisers of runs


class Recorded(torch.optim.Adam):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        MADE.append(self)


def run(path, n_epochs=2, resume=True, **options):
    """Make a short run, or resume it."""
    torch.manual_seed(3)
    loader = DataLoader(labelled_points(12), 6, shuffle=True)
    model = options.pop("model", None) or plain_network()
    return li.marglik_training(
        model,
        loader,
        n_epochs=n_epochs,
        n_hypersteps=1,
        optimizer_cls=Recorded,
        checkpoint=path,
        resume=resume,
        **options,
    )


class Whole(NamedTuple):
    """A checkpoint of the first of two epochs, and the result of a run that was not interrupted."""

    content: bytes
    result: li.marglik.Result


def make_whole(directory):
    run(directory / "run.pt", n_epochs=1)
    content = (directory / "run.pt").read_bytes()
    return Whole(content, run(directory / "uninterrupted.pt"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # which is set for tests only
    found = make_whole(tmp_path_factory.mktemp("whole"))
    torch.set_default_dtype(before)
    return found


def assert_bit_equal(one, other):
    assert without_times(one.history) == without_times(other.history)
    assert (one.losses, one.margliks) == (other.losses, other.margliks)
    assert one.evidence == other.evidence
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


# Bytes of the file.


def flipped(content, source):
    damaged = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 8))):
        damaged[source.randrange(len(content))] ^= 1 << source.randrange(8)
    return bytes(damaged)


def truncated(content, source):
    return content[: source.randrange(len(content))]


def shortened(content, source):
    start = source.randrange(len(content))
    return content[:start] + content[start + source.randint(1, 500) :]


def lengthened(content, source):
    place = source.randrange(len(content) + 1)
    return content[:place] + source.randbytes(source.randint(1, 500)) + content[place:]


def blanked(content, source):
    start, n = source.randrange(len(content)), source.choice((1, 16, 512, 4096))
    zeros = bytes(len(content[start : start + n]))
    return content[:start] + zeros + content[start + n :]


def with_blocks_swapped(content, source):
    n = source.choice((16, 512))
    i, j = sorted(source.sample(range(len(content) // n), 2))
    blocks = [content[k : k + n] for k in range(0, len(content), n)]
    blocks[i], blocks[j] = blocks[j], blocks[i]
    return b"".join(blocks)


# Entries of the archive.


def entries_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def archive_of(entries, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, entry in entries:
            archive.writestr(name, entry)
    return file.getvalue()


def without_an_entry(content, source):
    entries = entries_of(content)
    del entries[source.randrange(len(entries))]
    return archive_of(entries)


def with_entries_swapped(content, source):
    entries = entries_of(content)
    i, j = source.sample(range(len(entries)), 2)
    (one, a), (other, b) = entries[i], entries[j]
    entries[i], entries[j] = (one, b), (other, a)
    return archive_of(entries)


def with_an_entry_renamed(content, source):
    entries = entries_of(content)
    i = source.randrange(len(entries))
    name = source.choice((entries[i][0] + "x", "../" + entries[i][0], "data/0", "other"))
    entries[i] = (name, entries[i][1])
    return archive_of(entries)


def with_an_entry_damaged(content, source):
    entries = entries_of(content)
    i = source.choice([i for i, (_, entry) in enumerate(entries) if entry])
    damage = source.choice((flipped, truncated, blanked))
    entries[i] = (entries[i][0], damage(entries[i][1], source))
    return archive_of(entries)


def compressed(content, source):
    return archive_of(entries_of(content), zipfile.ZIP_DEFLATED)


# What is in it.


def loaded(content):
    return torch.load(io.BytesIO(content), weights_only=True)


def saved(state, **options):
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def signed(state):
    """Return a file whose checksum is right, as no accident makes it."""
    content = {key: item for key, item in state.items() if key not in ("format", "checksum")}
    return saved(state | {"checksum": checkpoints._checksum(content)})


def places_in(container):
    """Return where all values are, as containers and keys."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    found = []
    for key, item in list(items):
        if isinstance(item, dict | list):
            found += places_in(item)
        if not isinstance(container, tuple):
            found.append((container, key))
    return found


def another(value, source):
    """Return another value of about the same kind."""
    if isinstance(value, torch.Tensor):
        if not value.numel() or source.random() < 0.2:
            return source.choice((value.float(), value.unsqueeze(0), torch.zeros(3, 5)))
        entries = value.clone().flatten()
        i = source.randrange(len(entries))
        entries[i] = entries[i] == 0
        return entries.view(value.shape)
    if isinstance(value, bool | None):
        return "other"
    if isinstance(value, int | float):
        return source.choice((value + 1, -1 - value, float("nan"), 10**20, "other"))
    if isinstance(value, str):
        return source.choice((value + "x", "", 3))
    return source.choice((None, 3, "other"))


def with_another_value(content, source):
    state = loaded(content)
    container, key = source.choice(places_in(state))
    container[key] = another(container[key], source)
    return saved(state)


def without_a_value(content, source):
    state = loaded(content)
    container, key = source.choice(places_in(state))
    del container[key]
    return saved(state)


def with_one_more(content, source):
    state = loaded(content)
    container = source.choice([one for one, _ in places_in(state) if isinstance(one, dict)])
    container["other"] = source.choice((None, 1.0, torch.zeros(2)))
    return saved(state)


def of_another_format(content, source):
    return saved(loaded(content) | {"format": source.choice((0, 1, 2, 4, -1, "3", None, 3.5))})


def lacking_a_part(content, source):
    state = loaded(content)
    part = source.choice(("run", "random", None))
    of = state if part is None else state[part]
    del of[source.choice([key for key in of if key not in ("format", "checksum")])]
    return signed(state)


def of_another_shape(content, source):
    state = loaded(content)
    model = state["run"]["model"]
    name = source.choice(list(model))
    model[name] = torch.zeros(source.choice(((2, 2), (1,), (7, 5, 3))))
    return signed(state)


def of_another_run(content, source):
    state = loaded(content)
    signature = state["run"]["signature"]
    key = source.choice(list(signature))
    signature[key] = another(signature[key], source)
    return signed(state)


def ahead(content, source):
    state = loaded(content)
    state["run"]["epoch"] = source.randint(3, 1000)
    return signed(state)


def in_the_old_layout(content, source):
    return saved(loaded(content), _use_new_zipfile_serialization=False)


def saved_again(content, source):
    return saved(loaded(content))


def of_another_torch(content, source):
    """As versions before 2.1 wrote it, whose archives say less about themselves."""
    names = ("byteorder", ".format_version", ".storage_alignment", "serialization_id")
    return archive_of([entry for entry in entries_of(content) if not entry[0].endswith(names)])


def in_another_protocol(content, source):
    return saved(loaded(content), pickle_protocol=source.choice((3, 4, 5)))


# Code in its place.


class Command:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self._marker = marker

    def __reduce__(self):
        return (os.mkdir, (self._marker,))


def executing(content, source, marker):
    command = Command(marker)
    state = loaded(content)
    kind = source.randrange(4)
    if kind == 0:
        return pickle.dumps(command)
    if kind == 1:
        return saved(command)
    container, key = source.choice(places_in(state))
    container[key] = command
    return saved(state, _use_new_zipfile_serialization=kind == 2)


def of_another_kind(content, source):
    other = (b"", b"hello", b"PK\x05\x06" + bytes(18), b"\x80\x02.", b"\x80\x05N.", saved(3))
    return source.choice(other)


HARMLESS = (compressed, in_the_old_layout, saved_again, of_another_torch)
MUTATIONS = (
    flipped,
    truncated,
    shortened,
    lengthened,
    blanked,
    with_blocks_swapped,
    without_an_entry,
    with_entries_swapped,
    with_an_entry_renamed,
    with_an_entry_damaged,
    with_another_value,
    without_a_value,
    with_one_more,
    of_another_format,
    lacking_a_part,
    of_another_shape,
    of_another_run,
    ahead,
    in_another_protocol,
    executing,
    of_another_kind,
    *HARMLESS,
)


def outcome_of(content, directory, whole):
    """Resume from a file with this content; return what came of it, and raise if that is wrong."""
    path = directory / "run.pt"
    path.write_bytes(content)
    model = plain_network()
    before = copy.deepcopy(model.state_dict())
    MADE.clear()
    try:
        result = run(path, model=model)
    except (ValueError, OSError) as error:
        refusal = error
    else:
        assert_bit_equal(result, whole.result)
        return "equal"
    assert str(path) in str(refusal)
    assert isinstance(refusal, OSError) or "nothing was changed" in str(refusal)
    assert path.read_bytes() == content
    assert os.listdir(directory) == ["run.pt"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not any(optimizer.state for optimizer in MADE)
    return type(refusal).__name__


def fuzzed(mutation, seed, directory, whole):
    source = random.Random(f"{mutation.__name__} {seed}")
    marker = directory.parent / "executed"
    if mutation is executing:
        mutation = partial(executing, marker=str(marker))
    outcome = outcome_of(mutation(whole.content, source), directory, whole)
    assert not marker.exists()
    return outcome


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_changed_checkpoint_is_refused_or_makes_no_difference(mutation, directory, whole):
    outcomes = {fuzzed(mutation, seed, directory, whole) for seed in range(2)}
    if mutation in HARMLESS:
        assert outcomes == {"equal"}


def fuzz(numbers, directory, whole):
    """Return how often each mutation ended in what, and the mutations that ended wrongly."""
    outcomes = Counter()
    failures = []
    for i in numbers:
        mutation = MUTATIONS[i % len(MUTATIONS)]
        try:
            outcome = fuzzed(mutation, 100 + i, directory, whole)
        except Exception as error:
            failures.append(f"{mutation.__name__} {100 + i}: {type(error).__name__}: {error}")
            outcome = "wrong"
        outcomes[mutation.__name__, outcome] += 1
    return outcomes, failures


@pytest.mark.slow
def test_many_changed_checkpoints(directory, whole):
    outcomes, failures = fuzz(range(N_FUZZED), directory, whole)
    print(*(f"{n:4} {' '.join(key)}" for key, n in sorted(outcomes.items())), sep="\n")
    assert not failures, "\n".join(failures)
    assert outcomes.total() == N_FUZZED


# Around the file.


def test_a_directory_in_place_of_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "run.pt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"run\.pt"):
        run(tmp_path / "run.pt")
    assert not list((tmp_path / "run.pt").iterdir())


@pytest.mark.parametrize("seconds", [0, 2**40], ids=["1970", "far ahead"])
def test_the_clock_makes_no_difference(tmp_path, whole, seconds):
    path = tmp_path / "run.pt"
    path.write_bytes(whole.content)
    os.utime(path, (seconds, seconds))
    assert_bit_equal(run(path), whole.result)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, whole):
    path = tmp_path / "run.pt"
    path.write_bytes(whole.content)

    def fill(record, model):
        (tmp_path / ".run.pt.tmp").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left on device"):
        run(path, callbacks=[fill])
    assert path.read_bytes() == whole.content
    assert os.listdir(tmp_path) == ["run.pt"]
    assert_bit_equal(run(path), whole.result)


@pytest.mark.skipif(sys.platform == "win32", reason="lock files of open runs cannot be removed")
@pytest.mark.parametrize("what", ["lock", "tmp"])
def test_files_that_cannot_be_written_are_said_to_be(tmp_path, whole, monkeypatch, what):
    """A file system may become read-only at any time, such as after an error of the disk."""
    path = tmp_path / "run.pt"
    path.write_bytes(whole.content)
    opened = {"lock": os.open, "tmp": Path.open}[what]

    def refuse(name, *args, **kwargs):
        if str(name).endswith(f".run.pt.{what}"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return opened(name, *args, **kwargs)

    monkeypatch.setattr(*{"lock": (os, "open"), "tmp": (Path, "open")}[what], refuse)
    with pytest.raises(OSError, match=rf"Read-only file system: .*run\.pt\.{what}"):
        run(path)
    monkeypatch.undo()
    assert path.read_bytes() == whole.content
    assert os.listdir(tmp_path) == ["run.pt"]
    assert_bit_equal(run(path), whole.result)
