"""Let glibc keep freed memory, for programs that allocate the same large tensors again and again.

By default glibc returns large blocks to the system as soon as they are freed. The next batch of
training, or of curvature, gets them anew, zeroed page by page: page faults take about 15 % of the
time of ``make demo``. The command line, a process of its own, keeps up to a gigabyte instead. The
library never does so when it is imported, for a process belongs to its user.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# Numbers of parameters, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEPT = 2**30  # bytes at the top of the heap that are not returned
IN_HEAP = 2**25  # bytes up to which a block is part of the heap, the most that glibc allows


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed, and return whether it was told.

    Elsewhere, or with another C library, nothing happens.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT) and mallopt(M_MMAP_THRESHOLD, IN_HEAP))
