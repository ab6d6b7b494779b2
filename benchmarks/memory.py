"""Measure the peak memory of fitting, tuning and predicting as the data grow, and the speed of a fit with two processes.

    python benchmarks/memory.py [--quick]

Each case runs in a separate process. The result is the peak resident memory during the call minus the resident memory before
it. The peak comes from Linux's peak-memory counter, which is reset before each call. The memory needed for fitting must not
grow with the data. Tuning stores O(n (P + C)) numbers, and predictions are made in chunks.

To measure scale-out, the same networks are fitted to the same images, alternately by two single-threaded processes and by one.
If each process has its own core, the speed-up is the CPU time of the single process divided by that of the busier of the two.
Wall time also depends on the load of the machine. The scale-out record also contains the constants used in docs/scale.md.

The exit status is 1 if a limit is exceeded. Writes benchmarks/results/memory.json and scale_out.json.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.likelihoods import Categorical
from molaplace.structures import Kron, as_structure
from molaplace.sums import Sums

INPUTS = 784
BATCH = 256
CASES: tuple[tuple[str, str, int, int, int, bool], ...] = (
    ("fit", "kron", 256, 10, 2048, False),
    ("fit", "kron", 2048, 1000, 512, True),
    ("fit", "kron", 2048, 1000, 8192, True),
    ("fit", "kron-diag", 2048, 1000, 2048, True),
    ("fit", "diag", 2048, 1000, 2048, False),
    ("tune", "kron", 512, 100, 2048, False),
    ("tune", "kron", 512, 100, 16_384, False),
    ("predict", "kron", 512, 100, 2048, False),
    ("predict", "kron", 512, 100, 16_384, False),
)
"""Task, structure, P, C, N, and whether the memory limit (a peak of at most 3 times the size of the result) applies."""
BAR = 3.0
QUICK = (0, 5, 7)


def resident(name: str) -> int:
    """Return the resident memory of the process in bytes: its current value ("VmRSS") or its peak since the last reset ("VmHWM")."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{name} is not available. This benchmark needs Linux.")


def peak_of(work: Callable[[], Any], above: int | None = None) -> int:
    """Return the peak resident memory during the work, in bytes, relative to a baseline (by default, the memory in use beforehand)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS") if above is None else above
    work()
    return resident("VmHWM") - before


class Stream:
    """Batches generated as they are read, so that the data set is never held in memory."""

    def __init__(self, count: int, classes: int) -> None:
        self.count = count
        self.classes = classes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count // BATCH):
            labels = torch.randint(self.classes, (BATCH,), generator=generator)
            yield torch.randn(BATCH, INPUTS, generator=generator), labels


def measure(work: str, structure: str, features: int, classes: int, count: int) -> int:
    torch.set_num_threads(1)
    network = nn.Sequential(nn.Linear(INPUTS, features), nn.ReLU(), nn.Linear(features, classes)).eval()
    tiny = nn.Sequential(nn.Linear(INPUTS, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    few = [(torch.randn(8, INPUTS), torch.randint(3, (8,)))]
    # Run the code once first, so that the memory used to load it is not counted.
    mola.fit(tiny, few, few, rule="nll", structure=structure, progress=False).predict(few)
    data = Stream(count, classes)
    with torch.no_grad():
        for inputs, _ in Stream(BATCH, classes):
            network(inputs)
    if work == "fit":
        return peak_of(lambda: mola.fit(network, data, structure=structure, progress=False))
    posterior = mola.fit(network, Stream(512, classes), structure=structure, progress=False)
    if work == "tune":
        return peak_of(lambda: posterior.tune(data, rule="nll", progress=False))
    return peak_of(lambda: posterior.predict(inputs for inputs, _ in data))


def floor(work: str, structure: str, features: int, classes: int, count: int) -> int:
    """Return the number of bytes required: sums (fit), features and outputs (tune), or probabilities and variances (predict)."""
    if work == "fit":
        return as_structure(structure).bytes(features + 1, classes)
    return 8 * count * (features + 1 + classes) if work == "tune" else 4 * count * 3 * classes


# --- two processes ----------------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall time and the CPU time of the work, in seconds."""
    wall = time.perf_counter()
    cpu = time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def speed_up(team: mola.distributed.Team, count: int, repeats: int) -> list[dict[str, float]]:
    """Alternate between fits by both processes and fits by rank 0 alone, during which the other process waits."""
    from molaplace_lab.models import lenet

    torch.manual_seed(0)
    networks = [lenet().eval(), lenet().eval()]
    whole = [(torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,)))] * (count // BATCH)
    part = team.shard(whole)
    rows = []
    for repeat in range(repeats + 1):
        together = timed(lambda: mola.fit(networks, part, progress=False, team=team))
        alone = timed(lambda: mola.fit(networks, whole, progress=False)) if team.first else (0.0, 0.0)
        busiest = max(team.collect(together[1]))
        if repeat > 0:  # the first round is a warm-up
            row = {"alone_seconds": alone[0], "together_seconds": together[0]}
            row |= {"alone_cpu_seconds": alone[1], "busiest_cpu_seconds": busiest}
            rows.append(row | {"speed_up": alone[0] / together[0], "speed_up_cpu": alone[1] / busiest})
    return rows


def constants(team: mola.distributed.Team, quick: bool) -> dict[str, dict[str, float]]:
    """Measure the cost of the sums and the eigenproblems, and the number of bytes summed across processes."""
    features, classes, rows = (200, 100, 512) if quick else (2049, 1000, 512)
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    curvature = Categorical().curvature(torch.randn(rows, classes, generator=generator, dtype=torch.float64))
    structure = Kron()
    sums = {}
    for _ in range(3):
        seconds_of_repeats = [timed(lambda: sums.update(structure.sums(phi, curvature)))[1] for _ in range(3)]
    tensors = list(sums.values())
    meetings = [timed(lambda: team.sum(tensors))[0] for _ in range(3)]
    matrix = torch.randn(1000, 1000, dtype=torch.float64)
    product = statistics.median(timed(lambda: matrix @ matrix)[1] for _ in range(5))
    seconds = statistics.median(seconds_of_repeats) / rows
    operations = float(features**2 + classes**2)
    total = Sums(sums, rows)
    return {
        "arithmetic": {
            "features": features,
            "classes": classes,
            "seconds_for_each_datum": seconds,
            "operations_for_each_datum": operations,
            "operations_a_second": operations / seconds,
            "float64_product_operations_a_second": 2e9 / product,
            "eigenproblem_seconds": timed(lambda: structure.solve(total))[1] if team.first else 0.0,
        },
        "sums": {
            "sum_bytes": float(sum(tensor.numel() * tensor.element_size() for tensor in tensors)),
            "all_reduce_seconds": statistics.median(meetings),
        },
    }


def worker(output: str, quick: bool) -> None:
    torch.set_num_threads(1)
    with mola.distributed.join() as team:
        results: dict[str, Any] = {"rows": speed_up(team, 2048 if quick else 20_000, 1 if quick else 5)}
        results |= constants(team, quick)
        if team.first:
            Path(output).write_text(json.dumps(results))


def scale_out(quick: bool) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", f"{folder}/results.json", *(["--quick"] if quick else [])]
        started = [subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}) for rank in range(2)]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a process failed")
        results = json.loads(Path(f"{folder}/results.json").read_text())
    summary: dict[str, Any] = {"processes": 2, "images": 2048 if quick else 20_000, "networks": 2}
    for name in ("speed_up", "speed_up_cpu"):
        values = [row[name] for row in results["rows"]]
        summary |= {name: statistics.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}
    return summary | {"arithmetic": results["arithmetic"], "sums": results["sums"], "rows": results["rows"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run three small cases with fewer images; write no file")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", mola.errors.MolaWarning)  # warnings are expected, because the labels are random
    if options.case is not None:
        print(measure(*options.case))
        return 0
    if options.worker is not None:
        worker(options.worker, options.quick)
        return 0
    environment = record.environment("molaplace")
    rows = []
    print(f"{'work':8} {'structure':10} {'P':>5} {'C':>5} {'N':>6} {'peak':>9} {'result':>9}   bar")
    for case in [CASES[index] for index in QUICK] if options.quick else CASES:
        *arguments, judged = case
        work, structure, features, classes, count = arguments
        command = [sys.executable, __file__, "--case", json.dumps(arguments)]
        peak = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        needed = floor(work, structure, features, classes, count)
        row = {"work": work, "structure": structure, "features": features, "classes": classes, "data": count}
        bar = BAR * needed / 1e6 if judged else None
        rows.append(row | {"peak": peak, "needed": needed, "bar": bar, "missed": bar is not None and peak > bar * 1e6})
        limit = "" if bar is None else f"{bar:.0f} MB {'MISSED' if rows[-1]['missed'] else 'met'}"
        sizes = f"{peak / 1e6:6.1f} MB {needed / 1e6:6.1f} MB"
        print(f"{work:8} {structure:10} {features:5} {classes:5} {count:6} {sizes}   {limit}", flush=True)
    results = scale_out(options.quick)
    low = results["speed_up_cpu_least"]
    high = results["speed_up_cpu_most"]
    print(f"two processes: {results['speed_up_cpu']:.2f} times as fast in CPU time ({low:.2f} to {high:.2f})")
    if not options.quick:
        record.write("memory", {"environment": environment, "rows": rows})
        record.write("scale_out", {"environment": environment} | results)
    return int(any(row["missed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
