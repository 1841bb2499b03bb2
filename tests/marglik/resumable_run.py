"""Run or resume a noisy run, to be killed: python resumable_run.py DIRECTORY N_EPOCHS OUT"""

import sys
from pathlib import Path

import torch
from builders import noisy_run

if __name__ == "__main__":
    directory, n_epochs, out = sys.argv[1:]
    torch.set_default_dtype(torch.float64)
    result = noisy_run(Path(directory), n_epochs=int(n_epochs), resume=True)
    found = dict(result.model.state_dict())
    found["prior_precision"] = result.prior_precision
    found["losses"] = torch.tensor(result.losses)
    found["margliks"] = torch.tensor(result.margliks)
    torch.save(found, out)
