"""What mola adds to the forward passes it cannot do without, as ratios in one run.

    python benchmarks/fit_overhead.py [--quick] [--threads 1]

`fit` and `tune` against the bare passes of the networks over the same batches, `predict` against the plain deep ensemble
(the mean of the softmaxes). Two ratios stand side by side:

* added: 1 + time outside the networks / time inside them, in CPU time of one and the same run. This is the figure to judge by;
* bare: mola's work on some batches against the bare passes over them, in wall time, in short turns. It knows nothing of
  mola's insides, but on a busy machine it varies by more than what it is to show.

What fitting costs once (the first turn, the eigenproblem at the end) is told apart and spread over a training set of
real size. The bar for `fit` is 1.05. The script fails where a row misses it, except with the
structure `full`: its CP x CP Hessian in float64 is more arithmetic than a LeNet's whole forward pass.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import record
import torch
from pairing import Inside, PairedBatches, now, since, timed
from torch import Tensor, nn

import mola
from mola.models.lenet import lenet
from mola.models.resnet import resnet20

BAR = 1.05
STRUCTURES = ("kron", "kron-exact", "diag", "full")
VALIDATION_SIZE = 2000
TURN_SECONDS = 0.1


@dataclass(frozen=True)
class Setting:
    """A network at the size of a well-known data set."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    training_size: int


SETTINGS = (
    Setting("LeNet / MNIST", lenet, (1, 28, 28), 60_000),
    Setting("ResNet-20 / CIFAR-10", resnet20, (3, 32, 32), 50_000),
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
        posterior = mola.fit(case.networks, pairs, structure=structure, progress=False)
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
    posterior(case.inputs)
    with Inside(case.networks) as inside:
        pairs = case.pairs(case.inputs, case.ensemble, inside, seconds)
        for inputs in pairs:
            posterior(inputs)
    ratio = np.sum(pairs.tested_times, axis=0) / np.sum(pairs.inside_times, axis=0)
    return {"whole": float(ratio[1]), "whole_wall": float(ratio[0]), "against_bare": pairs.spread_against_bare()}


def measure_tune(case: Case, posterior: mola.MoLA) -> dict[str, Any]:
    rule = middle_threshold(posterior, case.inputs)
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
        "candidates": len(tuned.tuning.curve["prior_precision"]),
    }


def middle_threshold(posterior: mola.MoLA, inputs: Tensor) -> mola.ConfidenceThreshold:
    """A threshold that some candidate of the paper's grid meets and some does not: the grid stays at its 100 values."""
    ends = [posterior.with_prior_precision(value)(inputs).max(1).values.mean() for value in (1e-4, 1e3)]
    return mola.ConfidenceThreshold(confidence=float(sum(ends) / 2))


def rows(quick: bool, seconds: float) -> Iterator[dict[str, Any]]:
    for setting in SETTINGS:
        for count in (1,) if quick else (1, 5):
            networks = [setting.network().eval() for _ in range(count)]
            for size in (128,) if quick else (128, 500):
                case = Case(setting, networks, torch.randn(size, *setting.shape), torch.randint(10, (size,)))
                for structure in STRUCTURES:
                    posterior, fit = measure_fit(case, structure, seconds)
                    yield {
                        "setting": setting.name,
                        "networks": count,
                        "batch": size,
                        "structure": structure,
                        "fit": fit,
                        "predict": measure_predict(case, posterior, seconds / 2),
                        "tune": measure_tune(case, posterior) if size == 500 or quick else None,
                    }


HEADER = (
    f"{'':43} | {'fit':51} | {'predict':31} | tune\n"
    f"{'setting':21}  K batch {'structure':11} |  added {'ms a batch':>12} {'once':>7}   bare {'[quartiles]':14} "
    f"|  added   bare {'[quartiles]':16} |  added {'search':>8}"
)


def line(row: dict[str, Any]) -> str:
    def bare(part: dict[str, Any]) -> str:
        values = part["against_bare"]
        return f"{values['median']:6.3f} [{values['quartile_1']:.3f}, {values['quartile_3']:.3f}]"

    fit, predict, tune = row["fit"], row["predict"], row["tune"]
    batch = f"{1e3 * fit['added_batch_seconds']:.2f}/{1e3 * fit['network_batch_seconds']:.1f}"
    text = (
        f"{row['setting']:21} {row['networks']:2} {row['batch']:5} {row['structure']:11} | {fit['whole']:6.3f} {batch:>12} "
        f"{1e3 * fit['once_seconds']:4.0f} ms {bare(fit)} | {predict['whole']:6.3f} {bare(predict)}  |"
    )
    return text if tune is None else f"{text} {tune['whole']:6.3f} {1e3 * tune['search_seconds']:5.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, one batch size, few pairs; writes no file")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1: steadier ratios)")
    parser.add_argument("--seconds", type=float, default=10, help="time for each figure (default 10)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(HEADER, flush=True)
    document = {"bar": BAR, "threads": options.threads, "environment": record.environment("mola-torch")}
    measured = []
    for row in rows(options.quick, 2 if options.quick else options.seconds):
        measured.append(row)
        print(line(row), flush=True)
        if not options.quick:
            record.write("fit_overhead", document | {"rows": measured})
    missed = [row for row in measured if row["fit"]["whole"] > BAR]
    for row in missed:
        print(f"above {BAR}: {row['setting']}, K={row['networks']}, batch {row['batch']}, {row['structure']}")
    return int(any(row["structure"] != "full" for row in missed))


if __name__ == "__main__":
    sys.exit(main())
