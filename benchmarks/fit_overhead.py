"""What mola adds to the forward passes it cannot do without, as ratios in one run.

    python benchmarks/fit_overhead.py [--quick] [--threads 1]
    python benchmarks/fit_overhead.py --bars distance --data DIR --networks DIR

`fit` and `tune` against the bare passes of the networks over the same batches, `predict` against the same passes and against
the deep ensemble (`mola.ensemble`). Two ratios stand side by side:

* added: 1 + time outside the networks / time inside them, in CPU time of one and the same run. This is the figure to judge by;
* bare: mola's work on some batches against the bare passes over them, in wall time, in short turns. It knows nothing of
  mola's insides, but on a busy machine it varies by more than what it is to show.

Posteriors know distances from the training classes, predictions are cooled by them, and tuning is by `mola.Distance`: the dearest
there is. Heads behind almost no network are measured without distances, too (`distances=False`, rule "nll"): the bars on them are
for that.

What fitting costs once (the first turn, the eigenproblem at the end) is told apart and spread over a training set of
real size. Every setting has its bars; the script fails where a row misses one. Some work has none: the CP x CP Hessian of
`full` in float64 is more arithmetic than a LeNet's whole forward pass.

With `--bars distance`, the bars on cooling by distance alone, with trained networks on real data (`distance_bars.py`), in less than
four minutes: `DIR/mnist/00.safetensors` and `DIR/resnet20/00.safetensors` are the networks.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import distance_bars
import numpy as np
import record
import torch
from pairing import Inside, PairedBatches, now, since, timed
from torch import Tensor, nn

import mola
from mola.lab.models import lenet, resnet20
from mola.tuning.rules import PAPER_GRID

STRUCTURES = ("kron", "kron-exact", "diag", "full")
KRONECKER = STRUCTURES[:2]
VALIDATION_SIZE = 2000
TURN_SECONDS = 0.1


@dataclass(frozen=True)
class Setting:
    """A network at the size of a well-known data set, or a bare head behind a tiny network."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    training_size: int
    classes: int = 10
    structures: tuple[str, ...] = STRUCTURES
    batches: tuple[int, ...] = (128, 500)
    distances: bool = True
    """Whether posteriors know distances from the training classes; predictions are cooled by them, and tuning chooses how much."""
    bars: dict[str, dict[str, float]] = field(default_factory=dict)
    """By work ("fit", "predict over DE", "predict", "tune") and structure."""
    judged_at: int | None = None
    """Batch size that the bars are for; None: all."""


def head(features: int, classes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(784, features), nn.ReLU(), nn.Linear(features, classes))


def same(bar: float, structures: tuple[str, ...]) -> dict[str, float]:
    return dict.fromkeys(structures, bar)


SETTINGS = (
    Setting(
        "LeNet / MNIST",
        lenet,
        (1, 28, 28),
        60_000,
        bars={"fit": same(1.06, STRUCTURES[:3]), "predict over DE": same(1.06, ("kron",))},
        judged_at=500,  # beside a pass of 4 ms, small operations weigh more
    ),
    Setting(
        "ResNet-20 / CIFAR-10",
        resnet20,
        (3, 32, 32),
        50_000,
        bars={
            "fit": same(1.03, STRUCTURES[:3]) | {"full": 1.3},
            "predict over DE": same(1.03, ("kron",)),
            "tune": same(1.1, ("kron",)),
        },
    ),
    *(
        Setting(
            f"{name}{'' if distances else ', no distances'}",
            head(features, classes),
            (784,),
            60_000,
            classes,
            structures,
            (256,),
            distances,
            {} if distances else bars,
        )
        for name, features, classes, structures, bars in (
            ("MLP 784-256-10", 256, 10, STRUCTURES[:3], {"fit": {"kron": 2.1, "diag": 1.6}}),
            ("MLP 784-512-100", 512, 100, STRUCTURES[:3], {}),
            ("MLP 784-2048-1000", 2048, 1000, ("kron", "diag"), {"predict": {"kron": 2.2}}),
        )
        for distances in (True, False)
    ),
)


@dataclass(frozen=True)
class Case:
    """K networks and one batch, which is read again and again."""

    setting: Setting
    networks: list[nn.Module]
    inputs: Tensor
    labels: Tensor

    def bare(self) -> None:
        """The passes of the networks, and nothing else."""
        with torch.no_grad():
            for network in self.networks:
                network(self.inputs)

    def ensemble(self) -> Tensor:
        """The plain deep ensemble."""
        with torch.no_grad():
            return torch.stack([network(self.inputs).softmax(1) for network in self.networks]).mean(0)

    def pairs(self, batch: Any, bare: Callable[[], Any], inside: Inside, seconds: float) -> PairedBatches:
        """Turns of about a tenth of a second for as long as told, at least eight."""
        bare()
        turn = max(1, round(TURN_SECONDS / timed(bare)[0]))
        return PairedBatches(batch, bare, inside, turn, seconds, 8, 1000)


def measure_fit(case: Case, structure: str, seconds: float) -> tuple[mola.MoLA, dict[str, Any]]:
    with Inside(case.networks) as inside:
        pairs = case.pairs((case.inputs, case.labels), case.bare, inside, seconds)
        start = now()
        posterior = mola.fit(
            case.networks, pairs, structure=structure, progress=False, distances=case.setting.distances
        )
        total = np.array(since(start))
    ready = np.array(timed(posterior.eval))
    bare, tested, networks = (np.array(times) for times in (pairs.bare_times, pairs.tested_times, pairs.inside_times))
    one_pass = networks.sum(0) / pairs.batches
    # The first turn holds what is done once; the sums of the last batches come after the last turn.
    outside, first = total - bare.sum(0) - networks.sum(0), tested[0] - networks[0]
    added = (outside - first) / (pairs.batches - pairs.turn)
    once = first - added * pairs.turn + ready
    whole = 1 + added / one_pass + once / (one_pass * case.setting.training_size / len(case.inputs))
    return posterior, {
        "whole": float(whole[1]),
        "whole_wall": float(whole[0]),
        "added_batch_seconds": float(added[1]),
        "network_batch_seconds": float(one_pass[1]),
        "once_seconds": float(once[1]),
        "against_bare": pairs.spread_against_bare(),
    }


def measure_predict(case: Case, posterior: mola.MoLA, seconds: float) -> dict[str, Any]:
    ensemble = mola.ensemble(case.networks)
    both = []
    for predictor in (posterior, ensemble):
        predictor(case.inputs)
        with Inside(case.networks) as inside:
            pairs = case.pairs(case.inputs, case.ensemble, inside, seconds / 2)
            for inputs in pairs:
                predictor(inputs)
        both.append((np.sum(pairs.tested_times, axis=0) / np.sum(pairs.inside_times, axis=0), pairs))
    (mine, pairs), (plain, _) = both
    return {
        "whole": float(mine[1]),
        "whole_wall": float(mine[0]),
        "over_ensemble": float(mine[1] / plain[1]),
        "against_bare": pairs.spread_against_bare(),
    }


def measure_tune(case: Case, posterior: mola.MoLA) -> dict[str, Any]:
    # With distances the dearest: prior precisions first, then exponents.
    rule = mola.Distance(price=0.1) if case.setting.distances else "nll"
    batches = VALIDATION_SIZE // len(case.inputs)
    with Inside(case.networks) as inside:
        pairs = PairedBatches((case.inputs, case.labels), case.bare, inside, batches, 0, 1, 1)
        start = now()
        tuned = posterior.tune(pairs, rule=rule, progress=False)
        total = np.array(since(start))
    search = total - np.sum(pairs.bare_times, axis=0) - np.sum(pairs.tested_times, axis=0)
    ratio = (np.sum(pairs.tested_times, axis=0) + search) / np.sum(pairs.inside_times, axis=0)
    return {
        "whole": float(ratio[1]),
        "whole_wall": float(ratio[0]),
        "search_seconds": float(search[1]),
        "candidates": len(PAPER_GRID) + len(tuned.tuning.curve.get("distance_exponent", ())),
    }


def middle_threshold(posterior: mola.MoLA, inputs: Tensor) -> mola.ConfidenceThreshold:
    """A threshold that some candidate of the paper's grid meets and some does not: the grid stays at its 100 values."""
    ends = [posterior.with_prior_precision(value)(inputs).max(1).values.mean() for value in (1e-4, 1e3)]
    return mola.ConfidenceThreshold(confidence=float(sum(ends) / 2))


def rows(quick: bool, seconds: float, only: str) -> Iterator[dict[str, Any]]:
    for setting in SETTINGS:
        if only not in setting.name:
            continue
        for count in (1,) if quick else (1, 5):
            networks = [setting.network().eval() for _ in range(count)]
            for size in setting.batches[:1] if quick else setting.batches:
                inputs = torch.randn(size, *setting.shape)
                case = Case(setting, networks, inputs, torch.randint(setting.classes, (size,)))
                for structure in setting.structures:
                    posterior, fit = measure_fit(case, structure, seconds)
                    cooled = posterior.with_distance_exponent(1.5) if setting.distances else posterior
                    found = {
                        "setting": setting.name,
                        "networks": count,
                        "batch": size,
                        "structure": structure,
                        "fit": fit,
                        "predict": measure_predict(case, cooled, seconds / 2),
                        "tune": measure_tune(case, posterior) if size == setting.batches[-1] or quick else None,
                    }
                    bars = setting.bars if setting.judged_at in (None, size) else {}
                    judged = {work: some[structure] for work, some in bars.items() if structure in some}
                    yield found | {"bars": judged, "missed": missed(judged, found)}


def missed(bars: dict[str, float], row: dict[str, Any]) -> list[str]:
    """The bars that a row is above, in words."""
    found = {
        "fit": row["fit"]["whole"],
        "predict": row["predict"]["whole"],
        "predict over DE": row["predict"]["over_ensemble"],
        "tune": None if row["tune"] is None else row["tune"]["whole"],
    }
    return [
        f"{work} {found[work]:.3f}, bar {bar:g}"
        for work, bar in bars.items()
        if found[work] is not None and found[work] > bar
    ]


HEADER = (
    f"{'':54} | {'fit':51} | {'predict':38} | tune\n"
    f"{'setting':32}  K batch {'structure':11} |  added {'ms a batch':>12} {'once':>7}   bare {'[quartiles]':14} "
    f"|  added   / DE   bare {'[quartiles]':16} |  added {'search':>8}"
)


def line(row: dict[str, Any]) -> str:
    def bare(part: dict[str, Any]) -> str:
        values = part["against_bare"]
        return f"{values['median']:6.3f} [{values['quartile_1']:.3f}, {values['quartile_3']:.3f}]"

    fit, predict, tune = row["fit"], row["predict"], row["tune"]
    batch = f"{1e3 * fit['added_batch_seconds']:.2f}/{1e3 * fit['network_batch_seconds']:.1f}"
    text = (
        f"{row['setting']:32} {row['networks']:2} {row['batch']:5} {row['structure']:11} | {fit['whole']:6.3f} {batch:>12} "
        f"{1e3 * fit['once_seconds']:4.0f} ms {bare(fit)} | {predict['whole']:6.3f} {predict['over_ensemble']:6.3f} {bare(predict)}  |"
    )
    return text if tune is None else f"{text} {tune['whole']:6.3f} {1e3 * tune['search_seconds']:5.0f} ms"


def merged(kept: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were there, with those in their places that were measured again: each is a ratio by itself."""

    def name(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("setting", "networks", "batch", "structure"))

    new = {name(row): row for row in measured}
    return [new.pop(name(row), row) for row in kept] + list(new.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, one batch size, few pairs; writes no file")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1: steadier ratios)")
    parser.add_argument("--seconds", type=float, default=10, help="time for each figure (default 10)")
    parser.add_argument(
        "--only", default="", help="settings whose name holds this; the rows of others stay as they were"
    )
    parser.add_argument("--bars", choices=["distance"], help="only the bars on cooling by distance, on real data")
    parser.add_argument("--data", type=Path, help="data folder, for --bars (otherwise MOLA_DATA names it)")
    parser.add_argument("--networks", type=Path, help="folder of trained networks, for --bars")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if options.bars is not None:
        if options.networks is None:
            parser.error("--bars needs --networks DIR, with mnist/00.safetensors and resnet20/00.safetensors in it")
        judged = distance_bars.measure(options.data, options.networks, options.only, quick=options.quick)
        document = {"threads": options.threads, "environment": record.environment("mola-torch")}
        if not (options.only or options.quick):
            record.write("distance_bars", document | {"rows": judged})
        return int(not all(row["met"] for row in judged))
    print(HEADER, flush=True)
    document = {"threads": options.threads, "environment": record.environment("mola-torch")}
    measured: list[dict[str, Any]] = []
    kept = record.read("fit_overhead")["rows"] if options.only else []
    for row in rows(options.quick, 2 if options.quick else options.seconds, options.only):
        measured.append(row)
        print(line(row), flush=True)
        if not options.quick:
            record.write("fit_overhead", document | {"rows": merged(kept, measured)})
    for row in measured:
        for words in row["missed"]:
            print(f"above: {row['setting']}, K={row['networks']}, batch {row['batch']}, {row['structure']}: {words}")
    return int(any(row["missed"] for row in measured))


if __name__ == "__main__":
    sys.exit(main())
