"""How a fit gets faster with processes, and what it takes to foretell larger ones.

    python benchmarks/scale_out.py [--quick] [--images 20000] [--repeats 5] [--processes 2]

Speed-up: so many processes with one thread each fit the same networks on the same images as one process with one thread does,
in turns of the same run, the others waiting meanwhile. Random images: the arithmetic is the same as with real ones.

Constants, at ImageNet's size (P = 2048, C = 1000): arithmetic of the sums for each datum, time of the eigenproblems, bytes that
are added up over processes and the time that takes here. `docs/scale.md` counts with them.

Wall time is what users wait for; on a machine that is busy with other work it says little. So the ratio in CPU time stands beside
it: that of one process alone over that of the busiest process of the team, what the speed-up is where every process has a core
of its own. Arithmetic is timed in CPU time. The load of the machine is written beside the figures.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record
import torch
from pairing import now, since, timed
from torch import nn

import mola
from mola.distributed import Team
from mola.lab.models import lenet
from mola.laplace import Kron
from mola.likelihood import CATEGORICAL

BATCH = 256
FEATURES, CLASSES, ROWS = 2049, 1000, 512


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [lenet().eval(), lenet().eval()]


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches that take little memory: the same one again and again."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(BATCH, 1, 28, 28, generator=generator), torch.randint(10, (BATCH,), generator=generator)
    return [batch] * (count // BATCH)


def cpu(work: Any) -> float:
    """CPU seconds, of one thread."""
    return timed(work)[1]


def speed_up(team: Team, count: int, repeats: int) -> list[dict[str, float]]:
    """Together and alone in turns; on rank 0, which is the last to be done."""
    models, whole = networks(), images(count)
    part = team.shard(whole)
    rows = []
    for repeat in range(repeats + 1):
        together = timed(lambda: mola.fit(models, part, progress=False, team=team))
        alone = timed(lambda: mola.fit(models, whole, progress=False)) if team.first else (0.0, 0.0)
        with team.work("a turn"):  # the others wait here until rank 0 has done all of it alone
            everyone = team.collect(together[1])
        if repeat > 0 and everyone is not None:  # the first is warming up
            row = {"alone_seconds": alone[0], "together_seconds": together[0]}
            row |= {"alone_cpu_seconds": alone[1], "busiest_cpu_seconds": max(everyone)}
            rows.append(row | {"speed_up": alone[0] / together[0], "speed_up_cpu": alone[1] / max(everyone)})
    return rows


def sums_at_scale(team: Team, quick: bool) -> dict[str, float]:
    """Bytes of the sums of one network, and seconds that adding them up over the processes takes."""
    structure, size = Kron(), (200, 100) if quick else (FEATURES, CLASSES)
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in structure.empty(*size).items()}
    tensors = list(structure.restore(0, 0.0, zeros).tensors().values())
    times = []
    for _ in range(5):
        with team.work("adding up"):
            team.share(None)
            times.append(timed(lambda: team.sum(tensors))[0])
    return {
        "sum_bytes": float(sum(one.numel() * one.element_size() for one in tensors)),
        "all_reduce_seconds": statistics.median(times),
    }


def arithmetic(quick: bool) -> dict[str, float]:
    """Seconds for each datum of making the sums, and once for the eigenproblems, with one thread."""
    features, classes = (200, 100) if quick else (FEATURES, CLASSES)
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, features, dtype=torch.float64)
    logits = torch.randn(ROWS, classes, dtype=torch.float64)
    structure, total, times = Kron(), None, []
    for _ in range(4 if quick else 8):
        start = now()
        total = structure.absorb(total, inputs, CATEGORICAL.curvature(logits), 0.0)
        times.append(since(start)[1])
    # One multiplication and one addition for each entry of the lower halves.
    operations = float(features**2 + classes**2)
    each = statistics.median(times[1:]) / ROWS
    matrix = torch.randn(1000, 1000, dtype=torch.float64)
    product = statistics.median([cpu(lambda: matrix @ matrix) for _ in range(5)])
    return {
        "features": features,
        "classes": classes,
        "seconds_for_each_datum": each,
        "operations_for_each_datum": operations,
        "operations_a_second": operations / each,
        "float64_product_operations_a_second": 2e9 / product,
        "eigenproblem_seconds": cpu(lambda: structure.spectrum(total)),
    }


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with mola.join() as team:
        found: dict[str, Any] = {
            "rows": speed_up(team, options.images, options.repeats),
            "sums": sums_at_scale(team, options.quick),
        }
        if team.first:
            found["arithmetic"] = arithmetic(options.quick)
            Path(options.output).write_text(json.dumps(found))


def start_all(options: argparse.Namespace, output: str) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(options.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--output", output], env=environment | {"RANK": str(rank)}
        )
        for rank in range(options.processes)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small matrices, few images; writes no file")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.images, options.repeats = 2048, 1
    if options.output is not None:
        worker(options)
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        start_all(options, f"{folder}/found.json")
        found = json.loads(Path(f"{folder}/found.json").read_text())
    ratios, exact = ([row[name] for row in found["rows"]] for name in ("speed_up", "speed_up_cpu"))
    document = {
        "processes": options.processes,
        "images": options.images,
        "networks": 2,
        "speed_up": statistics.median(ratios),
        "speed_up_least": min(ratios),
        "speed_up_most": max(ratios),
        "speed_up_cpu": statistics.median(exact),
        "speed_up_cpu_least": min(exact),
        "speed_up_cpu_most": max(exact),
        "load_before": before,
        "load_after": os.getloadavg()[0],
        "arithmetic": found["arithmetic"],
        "sums": found["sums"],
        "environment": record.environment("mola-torch"),
        "rows": found["rows"],
    }
    for name, value in document.items():
        if name not in ("rows", "environment"):
            print(f"{name}: {value}")
    if not options.quick:
        record.write("scale_out", document)


if __name__ == "__main__":
    main()
