"""What `fit` adds to the passes of a network with outputs at every pixel: time and memory.

    python benchmarks/dense_overhead.py [--quick] [--images 64] [--threads 1]

64 images of 256 x 256, 21 classes, and a U-Net with 64 features before its 1x1 convolution, as the published one has, but with three
levels instead of five: a lighter network makes the same work of `fit` weigh more. The bare pass over a batch and the fit's work on it
take turns, so that both see the same machine; CPU times are compared, of all batches and by the median of the ratios of each. On a
busy machine two passes of the same network differ by more than what `fit` adds to one. So that is measured alone, too: the CPU time
of the fit's work on a batch that is not spent inside the network, relative to what is. Memory is measured in a process of its own:
the peak of resident memory during `fit` over that of the bare pass (Linux's own counters).

Bars: `fit` with all positions takes at most 1.2 bare passes, and 300 MB over them.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import torch
from fit_memory import resident
from pairing import Inside, now, since, timed
from torch import Tensor, nn
from torch.nn import functional

import mola

SIZE, CLASSES, FEATURES = 256, 21, 64
BATCH = 4
TIME_BAR, MEMORY_BAR = 1.2, 300.0
MEGABYTE = 1e6

POSITIONS: tuple[str | int, ...] = ("all", "average", 1024)


def block(given: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(given, made, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(made, made, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Three levels with 64, 128 and 256 channels, and a 1x1 convolution on 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 64), block(64, 128), block(128, 256)])
        self.up = nn.ModuleList([block(256 + 128, 128), block(128 + 64, FEATURES)])
        self.head = nn.Conv2d(FEATURES, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, C, H, W)."""
        kept = []
        for level in self.down:
            images = level(functional.max_pool2d(images, 2) if kept else images)
            kept.append(images)
        for level, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            images = level(torch.cat([functional.interpolate(images, scale_factor=2.0), beside], dim=1))
        return self.head(images)


def made(images: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    network = UNet().eval()
    inputs, labels = torch.randn(images, 3, SIZE, SIZE), torch.randint(CLASSES, (images, SIZE, SIZE))
    return network, list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))


def bare(network: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for inputs, _ in batches:
            network(inputs)


def measure_time(images: int, positions: str | int) -> dict[str, Any]:
    network, batches = made(images)
    bare(network, batches[:1])
    passes, works, added = [], [], []

    def turns() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            passes.append(timed(lambda batch=batch: bare(network, [batch]))[1])
            start, before = now(), inside.total[1]
            yield batch
            works.append(since(start)[1])
            within = inside.total[1] - before
            added.append((works[-1] - within) / within)

    with Inside([network]) as inside:
        total = timed(lambda: mola.fit(network, turns(), positions=positions, progress=False))[1]
    # The first batch finds the head, too, and what follows the last turn is in the total alone.
    ratios = [work / one for work, one in zip(works, passes, strict=True)]
    return {
        "images": images,
        "positions": positions,
        "ratio": (total - sum(passes)) / sum(passes),
        "median": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "added": statistics.median(added),
        "added_quartiles": statistics.quantiles(added, n=4)[::2],
        "bare_seconds": sum(passes),
        "fit_seconds": total - sum(passes),
    }


def measure_memory(images: int, positions: str | int) -> dict[str, float]:
    network, batches = made(images)
    small = nn.Conv2d(3, 4, 1)
    mola.fit(small, [(torch.randn(2, 3, 8, 8), torch.randint(4, (2, 8, 8)))], progress=False)  # code is loaded
    peaks = []
    for work in (
        lambda: bare(network, batches),
        lambda: mola.fit(network, batches, positions=positions, progress=False),
    ):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = resident("VmRSS")
        work()
        peaks.append((before, resident("VmHWM")))
    (_, bare_peak), (_, fit_peak) = peaks
    return {"bare_peak": bare_peak, "fit_peak": fit_peak, "over": fit_peak - bare_peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all positions only; writes no file")
    parser.add_argument("--images", type=int, default=64, help="so many of them (default 64)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1: steadier ratios)")
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory is not None:
        print(json.dumps(measure_memory(*options.memory)))
        return 0
    images = options.images
    rows = []
    print(
        f"{'positions':>9} {'images':>6} {'bare pass':>10} {'fit / bare':>10} {'median [quartiles]':>22} "
        f"{'added alone [quartiles]':>24} {'memory over it':>15}"
    )
    for positions in POSITIONS[:1] if options.quick else POSITIONS:
        # The bar is for all positions; the others are shown beside it, on fewer images.
        count = images if positions == "all" else 16
        row = measure_time(count, positions)
        command = [
            sys.executable,
            __file__,
            "--threads",
            str(options.threads),
            "--memory",
            json.dumps([count, positions]),
        ]
        row |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
        (low, high), (least, most) = row["quartiles"], row["added_quartiles"]
        print(
            f"{positions:>9} {count:6} {row['bare_seconds']:8.1f} s {row['ratio']:10.3f} {row['median']:7.3f} [{low:.3f}, {high:.3f}] "
            f"{row['added']:9.3f} [{least:.3f}, {most:.3f}] {row['over'] / MEGABYTE:12.0f} MB",
            flush=True,
        )
        if not options.quick:
            document = {"threads": options.threads, "environment": record.environment("mola-torch"), "rows": rows}
            record.write("dense_overhead", document)
    judged = rows[0]
    return int(judged["median"] > TIME_BAR or judged["over"] > MEMORY_BAR * MEGABYTE)


if __name__ == "__main__":
    sys.exit(main())
