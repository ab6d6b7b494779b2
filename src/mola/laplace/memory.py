"""How much memory there is, for structures that may not fit."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that are free now, for this process and the container that it may run in.

    Args:
        root: of the file system, where Linux tells it.

    Returns:
        The number; None where the system does not tell, so that nothing can be refused for want of memory.
    """
    machine = next((free for free in (_of_linux(root), _of_windows(), _of_posix()) if free is not None), None)
    known = [free for free in (machine, *_of_groups(root)) if free is not None]
    return min(known, default=None)


def _of_linux(root: Path) -> int | None:
    found = _table(root / "proc" / "meminfo")
    return 1024 * found["MemAvailable"] if "MemAvailable" in found else None


def _of_posix() -> int | None:
    # All that the machine has, which errs on the side of trying.
    try:
        sizes = [os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, and some systems not these names
        return None
    return sizes[0] * sizes[1] if min(sizes) > 0 else None


class _Status(ctypes.Structure):
    # What Windows tells: MEMORYSTATUSEX.

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("physical", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("page", "free_page", "virtual", "free_virtual", "free_extended")),
    )


def _of_windows() -> int | None:
    windows = getattr(ctypes, "windll", None)
    if windows is None:
        return None
    status = _Status(length=ctypes.sizeof(_Status))
    return int(status.free) if windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def _of_groups(root: Path) -> list[int]:
    # What is left in each of the control groups that this process is in: in its own, and in those around it.
    left = []
    for line in _lines(root / "proc" / "self" / "cgroup"):
        number, kinds, path = (*line.split(":", 2), "", "")[:3]
        mounts = root / "sys" / "fs" / "cgroup"
        if number == "0":
            places, limit, used, prefix = [mounts, mounts / "unified"], "memory.max", "memory.current", ""
        elif "memory" in kinds.split(","):
            places, limit, used, prefix = (
                [mounts / "memory"],
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        # A container may see its own group as the root, whatever the path says.
        parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]
        for group in (place.joinpath(*parts[:depth]) for place in places for depth in range(len(parts) + 1)):
            most, taken = _number(group / limit), _number(group / used)
            if most is not None and taken is not None:
                # Files that were read are kept in memory until it is needed.
                kept = _table(group / "memory.stat")
                kept_files = sum(kept.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
                left.append(max(0, most - max(0, taken - kept_files)))
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    # The whole number in a file; None if there is none, as where it says "max".
    words = " ".join(_lines(path)).split()
    return int(words[0]) if words and words[0].isascii() and words[0].isdigit() else None


def _table(path: Path) -> dict[str, int]:
    pairs = [line.replace(":", " ").split() for line in _lines(path)]
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isascii() and words[1].isdigit()}
