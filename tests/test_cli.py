"""The command line: options made from fields, help without torch, errors in one line."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from laplace_invariance import __version__, cli

ROOT = Path(__file__).parent.parent
RANGES = (
    "data size test-share transform method net samples average epochs train test search learn "
    "init draws lr-aug estimator curvature structure prior subset-of-weights correlated fixed "
    "strength lr-augerino device seed root download out resume quiet"
)
POSITIONAL = {"demo": "points", "reproduce": "input-mlp"}
OPTIONS = {
    "reproduce": "scale jobs root download out quiet",
    "learn": RANGES,
    "compare": f"{RANGES} jobs",
    "profile": f"{RANGES} range values steps repeats hold-others",
    "suggest": "data size test-share transform net weights epochs ranges samples steps repeats "
    "train test seed root download out resume quiet",
    "layers": "data transform task kind method width prior ranges samples per-slot epochs train "
    "test seed root download out resume quiet",
    "measure": "data shifted group method samples strength epochs train test seed root download "
    "out resume quiet",
    "pairs": "task code part networks features train test epochs seed width alpha lr out resume "
    "quiet",
    "variational": "data transform learn init fixed point features samples length-scale lr-hyper "
    "activation draws epochs train test seed root download out resume quiet",
    "plane": "labels method by train samples epochs seed out resume quiet",
    "demo": "out epochs samples seed quiet",
}


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Return a function that returns what the command line passes on to an experiment."""

    def parse(words):
        seen = {}

        def experiment(config, out, **options):
            seen.update(config=config, out=out, **options)
            tmp_path.joinpath(out).mkdir(parents=True, exist_ok=True)
            return "result"

        verb = words[0]
        module = importlib.import_module(f"laplace_invariance.experiments.{verb}")
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(module, verb, experiment)
            cli.main(words)
        return seen

    return parse


@pytest.mark.parametrize("verb", cli.VERBS)
def test_defaults_are_those_of_the_dataclass(configured, verb):
    words = [verb, POSITIONAL[verb]] if verb in POSITIONAL else [verb]
    seen = configured([*words, "--out", "run"])
    assert seen["config"] == cli.VERBS[verb].config()
    assert seen["out"] == Path("run")
    assert seen["progress_bar"] is True
    assert seen.get("resume", False) is False


@pytest.mark.parametrize("verb", cli.VERBS)
def test_options_keep_their_names_and_every_field_has_one(capsys, verb):
    with pytest.raises(SystemExit) as error:
        cli.main([verb, "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    found = set(re.findall(r"^  --([\w-]+)", text, re.MULTILINE))
    assert set(OPTIONS[verb].split()) <= found
    n_fields = len(dataclasses.fields(cli.VERBS[verb].config))
    positional, shared = int(verb in POSITIONAL), 2 + cli.VERBS[verb].resumes
    assert len(found) == n_fields - positional + shared
    assert "default: None" not in text


def test_options_become_fields(configured):
    seen = configured(
        shlex.split(
            "learn --transform partially-rotated --method trivial-augment --train 5 --correlated "
            "--fixed rotation=1.5 shear=0.2 --strength 0.5 --out a --resume --quiet"
        )
    )
    config = seen["config"]
    assert (config.transform, config.method) == ("partially_rotated", "trivial-augment")
    assert (config.n_train, config.correlated, config.strength) == (5, True, 0.5)
    assert config.fixed == {"rotation": 1.5, "shear": 0.2}
    assert (seen["resume"], seen["progress_bar"]) == (True, False)


def test_options_may_take_several_values(configured):
    words = "compare --transform fully_rotated original --method none --seed 3 4 --out a"
    config = configured(words.split())["config"]
    assert config.transforms == ("fully_rotated", "original")
    assert (config.methods, config.seeds) == (("none",), (3, 4))
    words = "variational --init --fixed 0 90.5 --out a"
    config = configured(words.split())["config"]
    assert (config.learnt, config.fixed) == ((), (0.0, 90.5))
    words = "pairs --networks rich-2 --lr 0.1 --out a"
    config = configured(words.split())["config"]
    assert (config.networks, config.lr) == (("rich-2",), 0.1)


def documented():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "Makefile"]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    return sorted(set(re.findall(r"^(?:\t\S*/)?laplace-invariance (\w.*?)(?:  #.*)?$", text, re.M)))


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_understood(configured, command):
    words = shlex.split(command, comments=True)
    assert type(configured(words)["config"]) is cli.VERBS[words[0]].config


def test_commands_are_documented():
    assert {command.split()[0] for command in documented()} >= {"learn", "compare", "layers"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["learn", "--help"], ["--version"]], ids=" ".join
)
def test_help_does_not_import_torch(arguments):
    code = """
import sys
from laplace_invariance import cli
try:
    cli.main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "laplace", "matplotlib"} & set(sys.modules)
    print("heavy:", *heavy, file=sys.stderr)
"""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "heavy:\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], __version__),
        (["--help"], "compare"),
        (["demo", "points", "--help"], "--samples"),
        (["learn", "--help"], "--resume"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_program_and_module_are_the_same(arguments, expected, capsys):
    command = [sys.executable, "-m", "laplace_invariance", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert expected in done.stdout
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().out.split() == done.stdout.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("layers --task place --out a", "invalid choice: 'place'"),
        ("learn --estimator fast --out a", "invalid choice: 'fast' (choose from"),
        ("compare --subset-of-weights first --out a", "invalid choice: 'first' (choose from"),
        ("learn --epochs many --out a", "invalid int value: 'many'"),
        ("learn", "the following arguments are required: --out"),
        ("learn --fixed rotation=nan --out a", "the range of rotation must be finite"),
        ("learn --fixed rotation --out a", "'rotation' is not of the form rotation=3.14"),
        ("demo cubes", "invalid choice: 'cubes'"),
    ],
    ids=["choice", "estimator", "weights", "integer", "out", "nan", "form", "demo"],
)
def test_what_cannot_be_parsed_is_refused(capsys, words, message):
    with pytest.raises(SystemExit) as error:
        cli.main(words.split())
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_impossible_configuration_is_refused_without_torch(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "laplace_invariance", "learn"]
    command += ["--epochs", "0", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    line = "laplace-invariance: n_epochs must be positive and finite, got 0"
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert " torch\n" not in done.stderr


@pytest.mark.parametrize("context", [None, KeyboardInterrupt()], ids=["plain", "while-saving"])
def test_interrupt_ends_in_one_line(monkeypatch, tmp_path, context):
    from laplace_invariance.experiments import learn

    def interrupted(*_, **__):
        if context is None:
            raise KeyboardInterrupt
        error = RuntimeError("unexpected pos 103360 vs 103252")
        error.__context__ = context
        raise error

    monkeypatch.setattr(learn, "learn", interrupted)
    message = "interrupted; the same command with --resume continues"
    with pytest.raises(SystemExit, match=message):
        cli.main(["learn", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 582. TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA out of memory. Tried to"),
    ],
    ids=["numpy", "torch", "cuda"],
)
def test_too_little_memory_ends_in_one_line(monkeypatch, tmp_path, error):
    from laplace_invariance.experiments import learn

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(learn, "learn", fails)
    with pytest.raises(SystemExit, match=f"not enough memory; fewer samples.*{error}"):
        cli.main(["learn", "--out", str(tmp_path)])


def test_a_file_in_place_of_the_directory_is_refused(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(SystemExit) as error:
        cli.main(["learn", "--out", str(path), "--quiet"])
    assert error.value.code == 2
    assert "is a file; choose a directory" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_other_errors_keep_their_traceback(monkeypatch, tmp_path):
    from laplace_invariance.experiments import learn

    def fails(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(learn, "learn", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["learn", "--out", str(tmp_path)])


def test_what_is_for_one_process_is_refused_by_several(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["compare", "--out", str(tmp_path / "run")])
    assert exit_.value.code == 2
    assert "compare runs in one process, but torchrun started 3" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
