"""Memory that fitting takes beyond the network and a batch, and how it grows.

    python benchmarks/fit_memory.py

Each case runs in a process of its own: the bare pass over all batches first, then the peak of resident memory during `fit`
over what was resident before (Linux's own counter, reset in between). Fails where a case is above its bar.
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import record
import torch
from torch import nn

import mola
from mola.laplace.symmetric import packed_size

INPUTS = 784
MEGABYTE = 1e6

CASES: tuple[tuple[str, int, int, int, int, float | None], ...] = (
    ("kron", 256, 10, 512, 1, None),
    ("kron", 512, 100, 512, 1, None),
    ("kron", 1024, 1000, 512, 1, None),
    ("kron", 2048, 1000, 512, 1, 40),
    ("kron", 2048, 1000, 8192, 1, 40),
    ("kron", 2048, 1000, 512, 5, None),
    ("kron-diag", 2048, 1000, 512, 1, 40),
    ("diag", 2048, 1000, 512, 1, None),
    ("diag", 2048, 1000, 8192, 1, None),
)
"""Structure, P, C, N, K, and the bar in MB."""


def resident(field: str) -> int:
    """Bytes that the process has in memory now ("VmRSS"), or had at most since the last reset ("VmHWM")."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    message = f"{field} is not known here: this benchmark needs Linux."
    raise RuntimeError(message)


def measure(structure: str, features: int, classes: int, count: int, members: int) -> int:
    torch.set_num_threads(1)
    networks = [
        nn.Sequential(nn.Linear(INPUTS, features), nn.ReLU(), nn.Linear(features, classes)).eval()
        for _ in range(members)
    ]
    inputs, labels = torch.randn(count, INPUTS), torch.randint(classes, (count,))
    batches = list(zip(inputs.split(256), labels.split(256), strict=True))
    tiny = nn.Sequential(nn.Linear(INPUTS, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    mola.fit(tiny, [(inputs[:8], labels[:8] % 3)], structure=structure, progress=False)  # code and libraries are loaded
    with torch.no_grad():
        for some, _ in batches:
            for network in networks:
                network(some)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    posterior = mola.fit(networks, batches, structure=structure, progress=False)
    peak = resident("VmHWM") - before
    assert posterior.structure == structure
    return peak


def fit_bytes(structure: str, features: int, classes: int) -> int:
    """Bytes of the sums of one network: halves of symmetric matrices in float64."""
    if structure == "diag":
        return 8 * features * classes
    return 8 * (packed_size(features) + (packed_size(classes) if structure == "kron" else classes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first three cases; writes no file")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = options.case
    if case is not None:
        print(measure(*case))
        return 0
    rows: list[dict[str, Any]] = []
    print(f"{'structure':10} {'P':>5} {'C':>5} {'N':>6} {'K':>2} {'peak':>9} {'sums':>9}   bar")
    for *case, bar in CASES[:3] if options.quick else CASES:
        structure, features, classes, count, members = case
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        sums = members * fit_bytes(structure, features + 1, classes)
        row = {"structure": structure, "features": features, "classes": classes, "data": count, "networks": members}
        rows.append(row | {"peak": peak, "sums": sums, "bar": bar})
        print(
            f"{structure:10} {features:5} {classes:5} {count:6} {members:2} {peak / MEGABYTE:6.1f} MB {sums / MEGABYTE:6.1f} MB   "
            f"{'' if bar is None else f'{bar:g} MB'}",
            flush=True,
        )
    if not options.quick:
        record.write("fit_memory", {"rows": rows, "environment": record.environment("mola-torch")})
    return int(any(row["bar"] is not None and row["peak"] > row["bar"] * MEGABYTE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
