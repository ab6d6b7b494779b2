"""How much memory there is, for structures that may not fit."""

from __future__ import annotations

import os

__all__ = ["free_memory"]


def free_memory() -> int:
    """Bytes of main memory that are free now."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: all that the machine has, which errs on the side of trying.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
