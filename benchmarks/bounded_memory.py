"""Peak memory of a comparison on stored activations that are larger than the memory it may take.

Writes what two networks of 2048 features would see of 200,000 training images and of smaller sets, runs methods of the main
comparison on it, and prints the peak memory of the process. The features are random numbers around class means: what is measured
is memory, and the numbers of the records mean nothing. 100 classes instead of ImageNet's 1000 save time; with C classes, the
logits of the validation set take 8 K n C bytes more.

    python benchmarks/bounded_memory.py
    python benchmarks/bounded_memory.py --rows 20000 --methods all
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mola.compare.activations_file import written_rows
from mola.compare.store import Store
from mola.lab.activations import Activations, Network
from mola.lab.plan import Plan
from mola.lab.runner import run_suite
from mola.lab.suite import Shift, Source, Suite
from mola.lab.training import Recipe

WIDTH, CLASSES, PIECE = 2048, 100, 4096
LIMIT = 2e9
"""Bytes that the process may take."""


@dataclass(frozen=True)
class Part(Plan):
    """A plan of some methods."""

    names: tuple[str, ...] = ()

    def methods(self, group):
        """The methods asked for."""
        return [one for one in super().methods(group) if one.name in self.names or "all" in self.names]


def peak() -> float:
    """Largest resident memory of this process so far, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def write(path: Path, source: Source, network: int, seed: int) -> None:
    """What a network sees of a set, written in pieces."""
    generator = torch.Generator().manual_seed(network)
    means = torch.randn(CLASSES, WIDTH, generator=generator)
    weight, bias = means / WIDTH, torch.zeros(CLASSES)
    with written_rows(path, source.count, {"weight": weight, "bias": bias}, {"set": source.name}) as writer:
        for start in range(0, source.count, PIECE):
            size = min(PIECE, source.count - start)
            # The labels are those of the set, the same for every network.
            labels = torch.randint(CLASSES, (size,), generator=torch.Generator().manual_seed(seed + start))
            noise = torch.randn(size, WIDTH, generator=generator)
            features = (noise if source.role == "outlier" else means[labels] / 10 + noise).relu()
            writer.add({"features": features, "logits": features @ weight.T + bias, "labels": labels})


def main() -> None:
    """Write, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="training images")
    parser.add_argument("--networks", type=int, default=2)
    parser.add_argument("--methods", default="DE,MoLA", help="names of the main comparison, or all")
    options = parser.parse_args()
    counts = {"train": options.rows, "validation": 5000, "test": 10_000, "strange": 5000}
    sources = {
        name: Source(
            name,
            name,
            "outlier" if name == "strange" else name,  # type: ignore[arg-type]
            count,
            f"{index:016x}",
            open=lambda: (),
            show=lambda count: torch.zeros(count, 1, 1, 1, dtype=torch.uint8),
        )
        for index, (name, count) in enumerate(counts.items())
    }
    suite = Suite(
        name="synthetic",
        title="Synthetic",
        builders={},
        classes=(),
        recipe=Recipe(epochs=1),
        threshold=None,
        shift=Shift("none", "none", "none", (0.0,)),
        make_sources=lambda _: sources,
    )
    with tempfile.TemporaryDirectory() as folder:
        activations = Activations(Path(folder) / "activations")
        networks = [Network(Path(f"{index}"), torch.nn.Identity, f"{index:016x}") for index in range(options.networks)]
        for place, source in enumerate(sources.values()):
            for index, network in enumerate(networks):
                write(activations.path(network, source), source, index, 10**6 * place)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
        print(f"activations on disk {size / 1e9:.2f} GB, peak memory so far {peak() / 1e9:.2f} GB", flush=True)
        names = tuple(options.methods.split(","))
        plan = Part(suite, "synthetic", networks, sources, 1, options.networks, names=names)
        start = time.perf_counter()

        def progress(doing: str, done: float) -> None:
            print(f"{time.perf_counter() - start:7.0f} s  {peak() / 1e9:.2f} GB  {doing}", flush=True)

        run_suite(plan, activations, Store(Path(folder) / "results"), progress)
    print(f"peak memory {peak() / 1e9:.2f} GB of {LIMIT / 1e9:.0f} GB allowed")
    raise SystemExit(peak() > LIMIT)


if __name__ == "__main__":
    main()
