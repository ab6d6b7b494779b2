"""How time and memory grow with the data N, the features P, the classes C and the networks K: fitted exponents.

    python benchmarks/growth.py [--quick] [--repeats 5]

What is timed is what mola adds: CPU time outside the networks, one thread. One of N, P, C, K doubles, the others stay. An
exponent is the slope of a straight line through the logarithms, fitted to each repeat by itself: median and quartiles over the
repeats. `end` is the slope between the two largest sizes alone, where what does not grow weighs least. Memory is the peak of
resident memory beyond the network and a batch (`fit_memory.py`), measured once for each size.

An exponent that is above its bar fails: nothing may grow faster than the arithmetic says.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fit_memory
import numpy as np
import record
import torch
from fit_overhead import middle_threshold
from pairing import Inside, now, since
from torch import nn

import mola

INPUTS, BATCH, ASKED = 32, 256, 256
BASE = {"N": 4096, "P": 256, "C": 10, "K": 1}
SIZES: dict[str, tuple[int, ...]] = {
    "N": (4096, 8192, 16384, 32768),
    "P": (256, 512, 1024, 2048),
    "C": (125, 250, 500, 1000),
    "K": (1, 2, 4, 8),
}
BARS: dict[str, dict[str, float]] = {
    "fit kron": {"N": 1.1, "P": 2.1, "C": 2.1, "K": 1.1},
    "fit kron-diag": {"N": 1.1, "P": 2.1, "C": 1.2, "K": 1.1},
    "fit diag": {"N": 1.1, "P": 1.2, "C": 1.2, "K": 1.1},
    "get ready": {"P": 3.3, "C": 3.3, "K": 1.2},
    "tune, 100 values": {"P": 2.1, "C": 1.2, "K": 1.2},
    "predict": {"P": 2.1, "C": 1.2, "K": 1.2},
    "memory of fit kron": {"N": 0.1, "P": 2.1, "C": 2.1, "K": 1.1},
    "memory of fit kron-diag": {"N": 0.1, "P": 2.1, "C": 1.1, "K": 1.1},
}
"""Work, what grows, and the largest exponent it may have."""


def case(sizes: dict[str, int]) -> tuple[list[nn.Module], list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    networks = [
        nn.Sequential(nn.Linear(INPUTS, sizes["P"]), nn.ReLU(), nn.Linear(sizes["P"], sizes["C"])).eval()
        for _ in range(sizes["K"])
    ]
    batch = torch.randn(BATCH, INPUTS), torch.randint(sizes["C"], (BATCH,))
    return networks, [batch] * (sizes["N"] // BATCH)


def outside(networks: list[nn.Module], work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds outside the networks, and the result."""
    with Inside(networks) as inside:
        start = now()
        result = work()
        seconds = since(start)[1]
    return seconds - inside.total[1], result


def times(sizes: dict[str, int], wanted: set[str]) -> dict[str, float]:
    """Seconds of each kind of work that is wanted, at one size."""
    networks, batches = case(sizes)
    found = {}
    for structure in ("kron-diag", "diag", "kron"):
        if f"fit {structure}" in wanted or structure == "kron":
            found[f"fit {structure}"], posterior = outside(
                networks, lambda name=structure: mola.fit(networks, batches, structure=name, progress=False)
            )
    found["get ready"] = outside(networks, posterior.eval)[0]
    inputs = batches[0][0]
    if "tune, 100 values" in wanted:
        rule = middle_threshold(posterior, inputs)
        found["tune, 100 values"] = outside(networks, lambda: posterior.tune(batches[:1], rule, progress=False))[0]
    posterior(inputs)
    found["predict"] = outside(networks, lambda: [posterior(inputs) for _ in range(20)])[0] / 20
    return found


def memory(structure: str, sizes: dict[str, int]) -> int:
    """Bytes, in a process of its own."""
    command = [sys.executable, fit_memory.__file__, "--case"]
    command.append(json.dumps([structure, sizes["P"], sizes["C"], sizes["N"], sizes["K"]]))
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def slope(sizes: tuple[int, ...], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def row(work: str, axis: str, sizes: tuple[int, ...], repeats: list[list[float]]) -> dict[str, Any]:
    """The exponents of one kind of work along one axis."""
    low, middle, high = np.quantile([slope(sizes, one) for one in repeats], [0.25, 0.5, 0.75])
    medians = np.median(repeats, axis=0).tolist()
    return {
        "work": work,
        "axis": axis,
        "sizes": list(sizes),
        "medians": medians,
        "exponent": float(middle),
        "quartile_1": float(low),
        "quartile_3": float(high),
        "end": slope(sizes[-2:], medians[-2:]),
        "bar": BARS[work][axis],
    }


def rows(repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    for axis, every in SIZES.items():
        sizes = every[:3] if quick else every
        wanted = {work for work, bars in BARS.items() if axis in bars}
        timed = [work for work in wanted if not work.startswith("memory")]
        # C x C in `kron` needs many classes to show; elsewhere few keep the rest small.
        measured = [[times(BASE | {axis: size}, wanted) for size in sizes] for _ in range(repeats)]
        for work in BARS:
            if work in timed:
                yield row(work, axis, sizes, [[one[work] for one in turn] for turn in measured])
            elif work in wanted:
                structure = work.removeprefix("memory of fit ")
                peaks = [float(memory(structure, BASE | {"P": 512} | {axis: size})) for size in sizes]
                yield row(work, axis, sizes, [peaks])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three sizes, two repeats; writes no file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = []
    print(f"{'work':26} {'grows with':10} exponent [quartiles]     end    bar   from, to")
    for one in rows(2 if options.quick else options.repeats, options.quick):
        measured.append(one)
        form = (lambda v: f"{v / 1e6:.1f} MB") if one["work"].startswith("memory") else (lambda v: f"{1e3 * v:.2f} ms")
        print(
            f"{one['work']:26} {one['axis']:10} {one['exponent']:6.2f} [{one['quartile_1']:.2f}, {one['quartile_3']:.2f}] "
            f"{one['end']:6.2f} {one['bar']:6.1f}   {form(one['medians'][0])} at {one['sizes'][0]}, "
            f"{form(one['medians'][-1])} at {one['sizes'][-1]}",
            flush=True,
        )
    if not options.quick:
        record.write("growth", {"base": BASE, "environment": record.environment("mola-torch"), "rows": measured})
    above = [one for one in measured if one["exponent"] > one["bar"]]
    for one in above:
        print(f"above: {one['work']} with {one['axis']}: {one['exponent']:.2f}, bar {one['bar']:g}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
