"""The number of threads of the commands: one for each processor that the process may use, and one in all for the demo's perceptrons.

PyTorch starts a thread for each processor of the machine that it may run on. In a container with a quota of a few processors, these
threads take turns and wait for each other, and a small job can take ten times as long.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")

QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files with the time that a container may compute in each period, in both versions of Linux's control groups."""

CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which users, and torchrun, choose the number of threads themselves."""


def processors(cgroups: Path = CGROUPS) -> int:
    """Return the number of processors that this process may use: those it may run on, but at most the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in QUOTAS:
        try:
            quota, period = (int(number) for name in names for number in (cgroups / name).read_text().split())
        except (OSError, ValueError):  # there is no such file, or the quota is "max"
            continue
        if quota > 0:
            return max(1, min(count, math.ceil(quota / period)))
    return count


def limit_threads(most: int) -> None:
    """Use at most the given number of threads, unless the environment sets the number."""
    import torch  # only commands that run need it, not their help

    if not any(name in os.environ for name in CHOICES):
        torch.set_num_threads(min(torch.get_num_threads(), most))
