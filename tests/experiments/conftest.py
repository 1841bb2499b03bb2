"""Single precision, as the command line has it, for tests of experiments."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _single_precision(_double_precision):
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Return a function that runs an experiment in a new directory."""

    def run(experiment, config, dtype=torch.float32):
        before, state = torch.get_default_dtype(), torch.get_rng_state()
        torch.set_default_dtype(dtype)
        out = tmp_path_factory.mktemp("run") / "new"
        result = experiment(config, out)
        assert torch.equal(torch.get_rng_state(), state)
        torch.set_default_dtype(before)
        return config, out, result

    return run


@pytest.fixture
def run_cli():
    """Return a function that runs the command line with words and further arguments."""
    from laplace_invariance import cli

    def run(words, *more):
        cli.main([*words.split(), *(str(one) for one in more)])

    return run
