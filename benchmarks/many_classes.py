"""Very many classes: what `kron-diag` costs where `kron` cannot be, and how far it is from `kron` where both can.

    python benchmarks/many_classes.py [--quick] [--data DIR --networks DIR]

Costs, at C = 32,000 and 128,000 with P = 512: CPU time over the bare forward passes, and the peak of resident memory beyond the
network (its C x P weights are in it already) while fitting, tuning and predicting, each size in a process of its own. The class
factor of `kron` alone would take 8 C^2 bytes: 8 GB and 131 GB.

Distance, at C = 10, 100 and 1000: networks trained on classes that fall into groups, whose members are confused with each other
and hardly with others (the hard case, see the module's docstring), on scikit-learn's digits, and with `--data` and `--networks`
(folders as in `cifar10.py`) on CIFAR-10 with ResNet-20. At the same prior precision: the variance of a logit under `kron` over
that under `kron-diag`, and the distance between their probabilities. Each with a prior precision of its own, by
validation log loss: log loss, calibration error, confidence.

Fails where a bar is missed.
"""

import argparse
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import torch
from fit_memory import MEGABYTE, resident
from pairing import Inside, now, since
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mola
from mola import metrics

FEATURES, INPUTS, BATCH = 512, 64, 64
COSTS = ((32_000, 1024), (128_000, 1024))
"""Classes and data."""

BARS = {
    "fit, over the bare passes": 2.5,
    "predict, over the bare passes": 2.0,
    "memory, in matrices of the network's last layer": 6.0,
    "mean distance of probabilities at the same prior precision": 0.02,
    "loss in log loss, each tuned": 0.02,
}
"""Of the costs, and of the distance (total variation) on real data; on made-up groups only of what is lost where each is tuned."""

PRIORS = (1e-6, 1e-4, 1e-2, 1.0, 100.0)


# --- costs --------------------------------------------------------------------------------------------------------------


def wide(classes: int, count: int) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes)).eval()
    inputs, labels = torch.randn(count, INPUTS), torch.randint(classes, (count,))
    return network, list(zip(inputs.split(BATCH), labels.split(BATCH), strict=True))


def cost(classes: int, count: int) -> dict[str, float]:
    """In this process: seconds and peaks."""
    torch.set_num_threads(1)
    network, batches = wide(classes, count)
    tiny, few = wide(3, 8)
    mola.fit(tiny, few, structure="kron-diag", progress=False)(few[0][0])  # code and libraries are loaded
    found: dict[str, float] = {"classes": classes, "features": FEATURES, "data": count}

    def measured(name: str, work: Any) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, start = resident("VmRSS"), now()
        with Inside([network]) as inside:
            result = work()
        seconds = since(start)[1]
        found[f"{name}_seconds"], found[f"{name}_inside_seconds"] = seconds, inside.total[1]
        found[f"{name}_peak"] = resident("VmHWM") - before
        return result

    def bare() -> None:
        with torch.no_grad():
            for inputs, _ in batches:
                network(inputs)

    bare()
    measured("bare", bare)
    posterior = measured("fit", lambda: mola.fit(network, batches, structure="kron-diag", progress=False))
    posterior.eval()
    rule = mola.ConfidenceThreshold(confidence=middle(posterior, batches[0][0]))
    posterior = measured("tune", lambda: posterior.tune(batches[:1], rule, progress=False))
    found["candidates"] = len(posterior.tuning.curve["prior_precision"])
    posterior(batches[0][0])
    measured("predict", lambda: [posterior(inputs) for inputs, _ in batches])
    cooled = posterior.with_distance_exponent(1.0)
    cooled(batches[0][0])
    measured("cooled", lambda: [cooled(inputs) for inputs, _ in batches])
    return found


def middle(posterior: mola.MoLA, inputs: Tensor) -> float:
    """A confidence that some candidate of the paper's grid meets and some does not."""
    ends = [posterior.with_prior_precision(value)(inputs).max(1).values.mean() for value in (1e-4, 1e3)]
    return float(sum(ends) / 2)


def costs(sizes: tuple[tuple[int, int], ...]) -> Iterator[dict[str, Any]]:
    for classes, count in sizes:
        command = [sys.executable, __file__, "--cost", json.dumps([classes, count])]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        head = 4 * classes * (FEATURES + 1)
        yield row | {
            "fit_ratio": row["fit_seconds"] / row["fit_inside_seconds"],
            "predict_ratio": row["predict_seconds"] / row["predict_inside_seconds"],
            "cooled_ratio": row["cooled_seconds"] / row["cooled_inside_seconds"],
            "peak_in_heads": max(row["fit_peak"], row["predict_peak"]) / head,
            "head_bytes": head,
            "class_factor_of_kron_bytes": 8 * classes**2,
        }


# --- distance -----------------------------------------------------------------------------------------------------------

Split = tuple[Tensor, Tensor]


def groups(classes: int, count: int) -> Split:
    """Classes in groups of five: those of a group are near each other, groups are far apart."""
    generator = torch.Generator().manual_seed(classes)
    far = torch.randn(classes // 5, 32, generator=generator) * 2
    centres = far.repeat_interleave(5, 0) + 0.6 * torch.randn(classes, 32, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + torch.randn(count, 32, generator=generator), labels


def digits() -> Split:
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(found.data, dtype=torch.float32)[order] / 16
    return inputs + 0.3 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1)), torch.tensor(
        found.target
    )[order]


def trained(inputs: Tensor, labels: Tensor, classes: int, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, classes))
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(inputs)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(inputs[part]), labels[part]).backward()
            optimiser.step()
    return network.eval()


def scenes(
    quick: bool, data: Path | None, networks: Path | None
) -> Iterator[tuple[str, nn.Module, Split, Split, Split]]:
    """Name, a network, and training, validation and test data."""
    inputs, labels = digits()
    parts = [(inputs[part], labels[part]) for part in (slice(0, 1000), slice(1000, 1300), slice(1300, None))]
    yield "digits with noise", trained(*parts[0], 10, 20), *parts
    for classes in (10, 100) if quick else (10, 100, 1000):
        train, held, test = (len_of * classes for len_of in (20, 4, 8))
        inputs, labels = groups(classes, train + held + test)
        cuts = (slice(0, train), slice(train, train + held), slice(train + held, None))
        parts = [(inputs[part], labels[part]) for part in cuts]
        yield f"groups of 5, {classes} classes", trained(*parts[0], classes, 40 if classes < 1000 else 15), *parts
    if data is not None and networks is not None:
        from cifar10 import load  # its own needs

        heads, sets = load(data, networks, count=1, train=10_000, outliers=500)
        parts = [(sets[name].inputs, sets[name].labels) for name in ("train", "validation", "test")]
        yield "CIFAR-10, ResNet-20", heads[0], *parts


def distance(name: str, network: nn.Module, train: Split, held: Split, test: Split) -> dict[str, Any]:
    def batches(split: Split) -> list[Split]:
        return list(zip(split[0].split(500), split[1].split(500), strict=True))

    fits = {
        structure: mola.fit(network, batches(train), structure=structure, progress=False)
        for structure in ("kron", "kron-diag")
    }
    whole, diagonal = fits.values()
    a = whole.components[0].curvature.factors.output / len(train[1])
    scaled = a.diagonal().clamp_min(1e-300).rsqrt()
    values = torch.linalg.eigvalsh(scaled[:, None] * a * scaled)
    row: dict[str, Any] = {
        "scene": name,
        "classes": a.shape[0],
        "second_eigenvalue": float(values[1]),
        "largest_eigenvalue": float(values[-1]),
        "largest_node": float(diagonal.components[0].curvature.spectrum.nodes.max()),
        "at_one_prior": [],
    }
    for prior in PRIORS:
        one, other = (fits[key].with_prior_precision(prior).predict(test[0]) for key in fits)
        ratio = (one.logit_variance / other.logit_variance).flatten()
        gap = (one.probs - other.probs).abs()
        row["at_one_prior"].append(
            {
                "prior_precision": prior,
                "variance_least": float(ratio.min()),
                "variance_most": float(ratio.max()),
                "mean_total_variation": float(gap.sum(1).mean() / 2),
                "largest_difference": float(gap.max()),
            }
        )
    row["tuned"] = {}
    for key, posterior in fits.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mola.MolaWarning)
            chosen = posterior.tune(batches(held), mola.ValidationScore("nll"), progress=False)
        probs = torch.cat([chosen(inputs) for inputs, _ in batches(test)])
        row["tuned"][key] = {
            "prior_precision": chosen.prior_precision[0],
            "accuracy": metrics.accuracy(probs, test[1]),
            "nll": metrics.negative_log_likelihood(probs, test[1]),
            "ece": metrics.expected_calibration_error(probs, test[1]),
            "confidence": metrics.mean_confidence(probs),
        }
    return row


# --- judged -------------------------------------------------------------------------------------------------------------


def judged(rows: list[dict[str, Any]], distances: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bar with what was found."""
    found = []
    for row in rows:
        where = f"C = {row['classes']:,}"
        found.append((where, "fit, over the bare passes", row["fit_ratio"]))
        found.append((where, "predict, over the bare passes", row["predict_ratio"]))
        found.append((where, "memory, in matrices of the network's last layer", row["peak_in_heads"]))
    for row in distances:
        worst = max(one["mean_total_variation"] for one in row["at_one_prior"])
        if "groups" not in row["scene"]:
            found.append((row["scene"], "mean distance of probabilities at the same prior precision", worst))
        losses = [one["nll"] for one in row["tuned"].values()]
        found.append((row["scene"], "loss in log loss, each tuned", losses[1] - losses[0]))
    return [{"where": where, "what": what, "value": value, "bar": BARS[what]} for where, what, value in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer classes; writes no file")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10, as in cifar10.py")
    parser.add_argument("--networks", type=Path, help="folder of ResNet-20s, as in cifar10.py")
    parser.add_argument("--cost", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost is not None:
        print(json.dumps(cost(*options.cost)))
        return 0
    rows = []
    print(
        f"{'C':>7} {'N':>5}   fit/bare  predict/bare  cooled/bare   peak of fit, tune, predict   last layer   class factor of kron"
    )
    for row in costs(((8_000, 256),) if options.quick else COSTS):
        rows.append(row)
        peaks = " ".join(f"{row[f'{work}_peak'] / MEGABYTE:6.0f}" for work in ("fit", "tune", "predict"))
        print(
            f"{row['classes']:7} {row['data']:5} {row['fit_ratio']:10.3f} {row['predict_ratio']:13.3f} {row['cooled_ratio']:12.3f}   "
            f"{peaks} MB       "
            f"{row['head_bytes'] / MEGABYTE:5.0f} MB   {row['class_factor_of_kron_bytes'] / 1e9:6.1f} GB",
            flush=True,
        )
    distances = []
    for scene in scenes(options.quick, options.data, options.networks):
        row = distance(*scene)
        distances.append(row)
        print(
            f"{row['scene']}: normalised eigenvalues from {row['second_eigenvalue']:.2f} to {row['largest_eigenvalue']:.2f}"
        )
        for one in row["at_one_prior"]:
            print(
                f"  lambda {one['prior_precision']:g}: variance of kron over kron-diag {one['variance_least']:.2f} to "
                f"{one['variance_most']:.2f}; probabilities differ by {one['mean_total_variation']:.4f} (mean total variation), "
                f"at most {one['largest_difference']:.3f}"
            )
        for key, one in row["tuned"].items():
            print(f"  {key}, tuned: " + ", ".join(f"{name} {value:.4g}" for name, value in one.items()), flush=True)
    bars = judged(rows, distances)
    if not options.quick:
        parts = {"environment": record.environment("mola-torch"), "rows": rows, "distances": distances}
        record.write("many_classes", {"judged": bars, **parts})
    above = [bar for bar in bars if bar["value"] > bar["bar"]]
    for bar in above:
        print(f"above: {bar['where']}: {bar['what']} {bar['value']:.3f}, bar {bar['bar']:g}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
