"""Free memory, wherever the system tells it: machines, containers, nothing at all."""

from __future__ import annotations

import ctypes
import os
import types

import pytest
import torch
from torch import nn

import mola
from mola.errors import StructureTooLargeError
from mola.laplace.memory import free_memory
from tests.forked_python import run_python

GB = 10**9
UNLIMITED = 9223372036854771712


def tree(root, files):
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def machine(free):
    return {"proc/meminfo": f"MemTotal:  {99 * GB // 1024} kB\nMemAvailable:   {free // 1024} kB\nHugePages_Total: 0\n"}


def group(place, limit, used, stat="", old=False):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    base = f"sys/fs/cgroup/{place}".rstrip("/")
    return {f"{base}/{names[0]}": f"{limit}\n", f"{base}/{names[1]}": f"{used}\n", f"{base}/memory.stat": stat}


MACHINE = machine(64 * GB)
NEW = {"proc/self/cgroup": "0::/\n"}
NESTED = {"proc/self/cgroup": "0::/pods/one/job\n"}
OLD = {"proc/self/cgroup": "5:devices:/\n4:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/\n"}
CASES = {
    "a machine": (MACHINE, 64 * GB),
    "no limit": (MACHINE | NEW | group("", "max", 3 * GB), 64 * GB),
    "a container": (MACHINE | NEW | group("", 8 * GB, 3 * GB), 5 * GB),
    "files that are kept": (
        MACHINE | NEW | group("", 8 * GB, 3 * GB, f"active_file {GB}\ninactive_file {GB}\n"),
        7 * GB,
    ),
    "more kept than used": (MACHINE | NEW | group("", 8 * GB, GB, f"inactive_file {2 * GB}\n"), 8 * GB),
    "a full container": (MACHINE | NEW | group("", 8 * GB, 9 * GB), 0),
    "limits inside a limit": (
        MACHINE
        | NESTED
        | group("pods/one/job", 16 * GB, GB)
        | group("pods/one", 8 * GB, 6 * GB)
        | group("pods", "max", 40 * GB),
        2 * GB,
    ),
    "a limit of its own": (MACHINE | NESTED | group("pods/one/job", 4 * GB, GB) | group("pods", 32 * GB, GB), 3 * GB),
    "a path that is not seen": (MACHINE | NESTED | group("", 4 * GB, GB), 3 * GB),
    "a path that leads out": (MACHINE | {"proc/self/cgroup": "0::/../../x\n"} | group("", 4 * GB, GB), 3 * GB),
    "a path with colons": (MACHINE | {"proc/self/cgroup": "0::/a:b\n"} | group("a:b", 4 * GB, GB), 3 * GB),
    "both kinds": (MACHINE | OLD | group("unified", 4 * GB, GB), 3 * GB),
    "an old container": (MACHINE | OLD | group("memory/docker/abc", 8 * GB, GB, old=True), 7 * GB),
    "an old one inside": (MACHINE | OLD | group("memory", 8 * GB, GB, f"total_inactive_file {GB}\n", old=True), 8 * GB),
    "an old one without limit": (MACHINE | OLD | group("memory", UNLIMITED, GB, old=True), 64 * GB),
    "less on the machine": (machine(2 * GB) | NEW | group("", 8 * GB, GB), 2 * GB),
    "garbled": (MACHINE | {"proc/self/cgroup": "::\nx\n\n0\n"} | group("", "many", "-1"), 64 * GB),
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_what_is_free_is_the_least_of_all_limits(tmp_path, files, expected):
    assert free_memory(tree(tmp_path, files)) == pytest.approx(expected, abs=1024)


def test_without_procfs_the_whole_machine_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__, raising=False)
    assert free_memory(tmp_path) == 4096 * 1000
    assert free_memory(tree(tmp_path, NEW | group("", 1_000_000, 1))) == 999_999


@pytest.mark.parametrize("sysconf", [None, ValueError("unrecognized configuration name"), -1])
def test_where_nothing_is_told_nothing_is_known(tmp_path, monkeypatch, sysconf):
    without_sysconf(monkeypatch, sysconf)
    assert free_memory(tmp_path) is None


def without_sysconf(monkeypatch, answer=None):
    def told(name):
        if isinstance(answer, Exception):
            raise answer
        return answer

    if answer is None:
        monkeypatch.delattr(os, "sysconf")
    else:
        monkeypatch.setattr(os, "sysconf", told)


@pytest.mark.parametrize("works", [True, False])
def test_windows_is_asked_in_its_own_way(tmp_path, monkeypatch, works):
    def status(pointer):
        told = pointer._obj
        assert told.length == ctypes.sizeof(told) == 64
        told.free = 7 * GB
        return works

    kernel = types.SimpleNamespace(GlobalMemoryStatusEx=status)
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel), raising=False)
    without_sysconf(monkeypatch)
    assert free_memory(tmp_path) == (7 * GB if works else None)


@pytest.mark.parametrize("structure", ["kron", "kron-diag", "kron-exact", "diag", "full"])
def test_fitting_goes_on_where_nothing_is_known(monkeypatch, structure):
    for place in ("kron", "full"):
        monkeypatch.setattr(f"mola.laplace.{place}.free_memory", lambda: None)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batch = torch.randn(8, 3), torch.arange(8) % 2
    assert mola.fit([network], [batch], structure=structure, progress=False).predict(batch[0]).probs.isfinite().all()


def test_a_container_that_is_too_small_is_told_in_time(tmp_path, monkeypatch):
    free = free_memory(tree(tmp_path, MACHINE | NEW | group("", 600, 100)))
    monkeypatch.setattr("mola.laplace.kron.free_memory", lambda: free)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 12))
    with pytest.raises(StructureTooLargeError, match="are free"):
        mola.fit([network], [(torch.randn(8, 3), torch.arange(8))], progress=False)


WINDOWS_LIKE = """
import os, sys
for name in ("sysconf", "fork", "getuid", "kill", "mkfifo", "sched_getaffinity", "register_at_fork", "statvfs", "uname"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None  # cannot be imported
import torch
"""


def test_the_library_needs_nothing_that_windows_lacks(tmp_path):
    """Imports every room, then fits, saves and loads, in a Python without what POSIX adds to it."""
    script = f"""
import torch, typer, numpy, rich, safetensors.torch
{WINDOWS_LIKE}
import importlib, pkgutil
import mola, mola.laplace.memory
from pathlib import Path
mola.laplace.memory.free_memory.__defaults__ = (Path("/nowhere"),)
from mola.errors import MissingExtraError
for found in pkgutil.walk_packages(mola.__path__, "mola."):
    if not found.name.startswith(("mola.app.explore", "mola.__main__")):
        try:
            importlib.import_module(found.name)
        except MissingExtraError:
            pass
network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
batch = torch.randn(20, 3), torch.arange(20) % 2
posterior = mola.fit([network], [batch], progress=False)
assert mola.laplace.memory.free_memory() is None
posterior.save("saved")
mola.load("saved", [network]).predict(batch[0]).probs
print("done")
"""
    done = run_python("-c", script, cwd=tmp_path)
    assert done.stdout.strip() == "done", done.stderr
