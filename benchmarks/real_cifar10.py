"""Five pretrained CIFAR-10 ResNet-20s: calibration and outlier detection of MAP, deep ensemble, LLLA and MoLA.

    python benchmarks/real_cifar10.py --data DIR --networks DIR

`--data` holds `cifar-10-batches-bin`, `cifar-100-binary/test.bin` and `svhn/test_32x32.npz` (arrays `images` and
`labels`); `--networks` holds `00.safetensors` ... `04.safetensors`. Outliers are normalised like CIFAR-10. Writes one
JSON with every figure and prints a table. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import mola
from mola import metrics
from mola.models.resnet import resnet20
from mola.uncertainty import max_probability_score

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Images:
    """Batches of normalised images, with labels where there are any. A loader that can be read again and again."""

    def __init__(self, images: Tensor, labels: Tensor | None = None, batch: int = 500) -> None:
        self.images, self.labels, self.batch = images, labels, batch

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(self.images), self.batch):
            rows = slice(start, start + self.batch)
            images = (self.images[rows].float() / 255 - MEAN) / STD
            yield (images,) if self.labels is None else (images, self.labels[rows])

    def part(self, index: Sequence[int] | slice) -> Images:
        return Images(self.images[index], None if self.labels is None else self.labels[index], self.batch)


def read_binary(paths: Sequence[Path], label_bytes: int) -> Images:
    """CIFAR's binary files: label bytes, then the red, green and blue planes."""
    rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, label_bytes + 3072) for path in paths])
    images = torch.from_numpy(rows[:, label_bytes:].reshape(-1, 3, 32, 32))
    return Images(images, torch.from_numpy(rows[:, label_bytes - 1].astype(np.int64)))


def read_data(folder: Path, train: int, outliers: int) -> dict[str, Images]:
    """Training, validation and test images (2000 / 8000 of the test set) and two sets of outliers."""
    cifar = folder / "cifar-10-batches-bin"
    training = read_binary([cifar / f"data_batch_{index}.bin" for index in range(1, 6)], 1).part(slice(train))
    test = read_binary([cifar / "test_batch.bin"], 1)
    split = torch.Generator().manual_seed(42)
    validation, rest = torch.utils.data.random_split(range(len(test.images)), [2000, 8000], generator=split)
    svhn = torch.from_numpy(np.load(folder / "svhn" / "test_32x32.npz")["images"][:outliers]).permute(0, 3, 1, 2)
    cifar100 = read_binary([folder / "cifar-100-binary" / "test.bin"], 2).images[:outliers]
    return {
        "train": training,
        "validation": test.part(validation.indices),
        "test": test.part(rest.indices),
        "SVHN": Images(svhn),
        "CIFAR-100": Images(cifar100),
    }


def read_networks(folder: Path, count: int) -> list[nn.Module]:
    networks = []
    for index in range(count):
        network = resnet20()
        network.load_state_dict(load_file(folder / f"{index:02d}.safetensors"))
        networks.append(network.eval())
    return networks


class HeadOnly(nn.Module):
    """A network's last layer over features that are known: every method shares one pass over the images."""

    def __init__(self, network: nn.Module, index: int) -> None:
        super().__init__()
        self.linear, self.index = network.linear, index

    def forward(self, features: Tensor) -> Tensor:
        return self.linear(features[:, self.index])


def features_of(networks: Sequence[nn.Module], images: Images) -> Images:
    """(n, K, P): what each network's head sees, from mola's own reading of the networks."""
    from mola.features import find_heads, stream
    from mola.networks import undisturbed

    with undisturbed(*networks):
        heads = find_heads(networks, [None] * len(networks), next(iter(images))[0])
        seen = [
            torch.stack([one.features for one in batch], dim=1)
            for batch, _ in stream(networks, heads, images, where="images", progress=True, total=len(images))
        ]
    features = Images(torch.cat(seen), images.labels)
    features.__class__ = Features
    return features


class Features(Images):
    """Batches of features."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(self.images), self.batch):
            rows = slice(start, start + self.batch)
            yield (self.images[rows],) if self.labels is None else (self.images[rows], self.labels[rows])


def tempered(heads: Sequence[nn.Module], validation: Images) -> Probabilities:
    """The deep ensemble with one temperature for all members, chosen by validation log-loss."""

    def loss(log_temperature: float) -> float:
        probs = Probabilities(heads, float(np.exp(log_temperature))).all(validation)
        return metrics.negative_log_likelihood(probs, validation.labels)

    best = minimize_scalar(loss, bounds=(-2, 2), method="bounded")
    return Probabilities(heads, float(np.exp(best.x)))


class Probabilities:
    """Plain averages of softmaxes at a temperature: written apart from mola, as the reference for its ensembles."""

    def __init__(self, heads: Sequence[nn.Module], temperature: float) -> None:
        self.heads, self.temperature = heads, temperature

    def all(self, data: Images) -> Tensor:
        with torch.no_grad():
            return torch.cat(
                [
                    sum(torch.softmax(head(batch[0]) / self.temperature, 1) for head in self.heads) / len(self.heads)
                    for batch in data
                ]
            )


def figures(probs: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Accuracy, log-loss, Brier score, ECE and mean confidence in distribution; AUROC and mean confidence outside."""
    test = probs["test"]
    result = {
        "accuracy": metrics.accuracy(test, labels),
        "nll": metrics.negative_log_likelihood(test, labels),
        "brier": metrics.brier(test, labels),
        "ece": metrics.expected_calibration_error(test, labels),
        "confidence": metrics.mean_confidence(test),
    }
    for name in ("SVHN", "CIFAR-100"):
        scores = max_probability_score(test), max_probability_score(probs[name])
        result[f"{name} auroc"] = metrics.auroc(*scores)
        result[f"{name} confidence"] = metrics.mean_confidence(probs[name])
    return result


def evaluate(
    data_folder: Path, network_folder: Path, *, count: int, train: int, outliers: int
) -> dict[str, dict[str, float]]:
    """Every method's figures, from one pass of the networks over the images."""
    networks = read_networks(network_folder, count)
    data = {name: features_of(networks, images) for name, images in read_data(data_folder, train, outliers).items()}
    heads = [HeadOnly(network, index) for index, network in enumerate(networks)]
    labels = data["test"].labels
    evaluated = ("test", "SVHN", "CIFAR-100")
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, predictor: mola.MoLA | Probabilities, **more: float) -> None:
        if isinstance(predictor, Probabilities):
            probs = {part: predictor.all(data[part]) for part in evaluated}
            rows[name] = figures(probs, labels) | more
            return
        predictions = {part: predictor.predict(data[part]) for part in evaluated}
        rows[name] = figures({part: predictions[part].probs for part in evaluated}, labels) | more
        if predictor.structure is not None:
            for part in evaluated[1:]:
                rows[name][f"{part} auroc, ood_score"] = metrics.auroc(
                    predictions["test"].ood_score, predictions[part].ood_score
                )

    add("MAP", mola.ensemble(heads[0]))
    scaled = tempered(heads[:1], data["validation"])
    add("MAP, temperature", scaled, temperature=scaled.temperature)
    add("DE", mola.ensemble(heads))
    scaled = tempered(heads, data["validation"])
    add("DE, temperature", scaled, temperature=scaled.temperature)
    rules = {"threshold": mola.ConfidenceThreshold(), "NLL": mola.ValidationScore("nll")}
    for structure in ("kron", "kron-exact", "diag", "full"):
        for method, members in (("LLLA", heads[:1]), ("MoLA", heads)):
            posterior = mola.fit(members, data["train"], structure=structure)
            for rule_name, rule in rules.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", mola.MolaWarning)  # that the grid grew is in the result
                    tuned = posterior.tune(data["validation"], rule)
                add(f"{method} {structure}, {rule_name}", tuned, prior_precision=tuned.prior_precision[0])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--count", type=int, default=5, help="number of networks")
    parser.add_argument("--train", type=int, default=50_000, help="training images to fit on")
    parser.add_argument("--outliers", type=int, default=10_000, help="images of each outlier set at most")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/real_cifar10.json"))
    options = parser.parse_args()
    rows = evaluate(options.data, options.networks, count=options.count, train=options.train, outliers=options.outliers)
    environment = {"mola": mola.__version__, "torch": torch.__version__, "python": platform.python_version()}
    settings = {"networks": options.count, "train": options.train, "outliers": options.outliers}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"settings": settings, "environment": environment, "rows": rows}, indent=1) + "\n"
    )
    columns = ["nll", "ece", "SVHN auroc", "CIFAR-100 auroc", "SVHN auroc, ood_score", "CIFAR-100 auroc, ood_score"]
    print("| method | lambda | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 2))
    for name, row in rows.items():
        cells = [f"{row[column]:.4f}" if column in row else "" for column in columns]
        print(f"| {name} | {row.get('prior_precision', float('nan')):.3g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
