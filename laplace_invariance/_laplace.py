"""Import laplace-torch without a dozen warnings of ``torch.jit`` about its own deprecation."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import laplace  # noqa: F401
