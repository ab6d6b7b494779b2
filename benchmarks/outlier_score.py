"""Which sum of closed-form scores is the best outlier score: chosen on half of the networks, confirmed on the other half.

    python benchmarks/outlier_score.py CACHE

CACHE is the folder of activations that `mola bench mnist` and `mola bench cifar10` leave (their flag --cache): features and logits of
every network on every set. Runs of five networks with even numbers choose, those with odd numbers confirm. Terms are standardised on
the validation data: F far field, E energy, D logarithm of the distance, H entropy of the tuned mixture; `r` is max(0, .). `mola`'s
`ood_score` is F + E + r(D - 1): by mean rank over sets and runs second to F + E + r(D), by 0.05, on the half that chooses, and level
with it on the half that confirms. It was preferred because usual inputs are then ranked by F and E alone.
"""

import argparse
import warnings
from collections import defaultdict
from pathlib import Path

import record
import torch
from safetensors import safe_open
from torch import Tensor, nn

import mola
from mola.metrics import auroc
from mola.posterior import MoLA
from mola.tuning.candidates import HeldOut
from mola.uncertainty import energy_score, entropy

SUITES = {
    "mnist": (84, ("fashion-mnist", "emnist-letters", "kmnist", "notmnist")),
    "cifar10": (64, ("svhn", "cifar100", "tinyimagenet", "mnist")),
}
"""Width of the features, and outliers."""

COMPONENTS = 5


def catalogue(folder: Path) -> dict[tuple[str, str, int], Path]:
    """Files by set, network and width of the features."""
    found = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            found[about.get("set", ""), about.get("network", ""), file.get_slice("features").get_shape()[1]] = path
    return found


def read(paths: list[Path]) -> list[dict[str, Tensor]]:
    every = []
    for path in paths:
        with safe_open(path, "pt") as file:
            every.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (no mapping)
    return every


def held_out(parts: list[dict[str, Tensor]], *, labelled: bool) -> HeldOut:
    features = [torch.cat([one["features"], torch.ones(len(one["features"]), 1)], 1) for one in parts]
    return HeldOut(features, [one["logits"] for one in parts], parts[0]["labels"] if labelled else None)


def fitted(parts: list[dict[str, Tensor]]) -> MoLA:
    """A mixture over heads alone: features are their inputs."""
    components = []
    for one in parts:
        classes, width = one["weight"].shape
        head = nn.Linear(width, classes)
        head.load_state_dict({"weight": one["weight"], "bias": one["bias"]})
        components += mola.fit(head, [(one["features"], one["labels"])], progress=False).components
    return MoLA(components)


def terms(posterior: MoLA, data: HeldOut) -> dict[str, Tensor]:
    logits, probs, _ = posterior.of_held_out(data, slice(0, len(data)))
    plain = posterior._with(cooling=None)  # without validation data: the far field alone
    _, _, far_field = plain.of_held_out(data, slice(0, len(data)))
    distance, length = data.measured(posterior._geometries() or ())
    excess = posterior.cooling._log_excess(length).exp()
    return {
        "F": far_field.double(),
        "E": energy_score(logits.double() / excess.square()[..., None]).mean(0),
        "D": distance.mean(0),
        "H": entropy(probs.double()),
    }


def candidates(z: dict[str, Tensor]) -> dict[str, Tensor]:
    far, energy, distance, doubt = z["F"], z["E"], z["D"], z["H"]

    def beyond(level: float) -> Tensor:
        return (distance - level).clamp_min(0)

    return {
        "F": far,
        "E": energy,
        "D": distance,
        "H": doubt,
        "F + E": far + energy,
        "F + D": far + distance,
        "F + D/2": far + distance / 2,
        "F + r(D)": far + beyond(0),
        "F + r(D - 1)": far + beyond(1),
        "F + r(D - 2)": far + beyond(2),
        "max(F, D)": torch.maximum(far, distance),
        "F + H + r(D - 1)": far + doubt + beyond(1),
        "F + E + D": far + energy + distance,
        "F + E + r(D)": far + energy + beyond(0),
        "F + E + r(D - 1)": far + energy + beyond(1),
        "2F + E + r(D - 1)": 2 * far + energy + beyond(1),
    }


def measured(files: dict[tuple[str, str, int], Path], suite: str, run: int) -> dict[str, dict[str, float]]:
    """AUROC of every candidate on every set of outliers that is there."""
    width, outliers = SUITES[suite]
    names = [f"{COMPONENTS * run + index:02d}.safetensors" for index in range(COMPONENTS)]

    def stored(name: str) -> list[dict[str, Tensor]] | None:
        paths = [files.get((name, network, width)) for network in names]
        return None if any(path is None for path in paths) else read([path for path in paths if path is not None])

    train, validation, test = (stored(name) for name in ("train", "validation", "test"))
    if train is None or validation is None or test is None:
        return {}
    posterior = fitted(train).tune(held_out(validation, labelled=True), "nll", progress=False)
    inside = terms(posterior, held_out(validation, labelled=False))
    usual = {name: (values.mean(), values.std()) for name, values in inside.items()}

    def scored(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found = terms(posterior, held_out(parts, labelled=False))
        return candidates({name: (found[name] - mean) / spread for name, (mean, spread) in usual.items()})

    known, result = scored(test), {}
    for name in outliers:
        parts = stored(name)
        if parts is not None:
            strange = scored(parts)
            result[name] = {each: float(auroc(known[each], strange[each])) for each in known}
    return result


def mean_ranks(rows: list[dict[str, float]]) -> dict[str, float]:
    ranks = defaultdict(list)
    for row in rows:
        for place, name in enumerate(sorted(row, key=lambda name: -row[name])):
            ranks[name].append(place + 1)
    return {name: sum(places) / len(places) for name, places in ranks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cache", type=Path)
    files = catalogue(parser.parse_args().cache)
    warnings.simplefilter("ignore", mola.MolaWarning)
    rows = []
    for suite in SUITES:
        for run in range(10):
            found = measured(files, suite, run)
            rows += [{"suite": suite, "run": run, "set": name, "auroc": values} for name, values in found.items()]
            if found:
                print(f"{suite}, run {run}: {', '.join(found)}", flush=True)
    halves = {
        half: mean_ranks([row["auroc"] for row in rows if row["run"] % 2 == odd])
        for odd, half in enumerate(("chosen on", "confirmed on"))
    }
    print(f"\n{'':20} {'chosen on':>10} {'confirmed on':>12}   mean rank of {len(halves['chosen on'])}")
    for name in sorted(halves["chosen on"], key=halves["chosen on"].get):  # type: ignore[arg-type]
        print(f"{name:20} {halves['chosen on'][name]:10.2f} {halves['confirmed on'].get(name, float('nan')):12.2f}")
    record.write(
        "outlier_score",
        {
            "environment": record.environment("mola-torch"),
            "candidates": len(halves["chosen on"]),
            "mean_rank": halves,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
