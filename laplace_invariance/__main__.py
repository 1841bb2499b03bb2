"""``python -m laplace_invariance``: the same program as ``laplace-invariance``."""

from laplace_invariance.cli import main

if __name__ == "__main__":
    main()
