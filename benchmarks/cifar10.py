"""Five pretrained CIFAR-10 ResNet-20s: calibration and outlier detection of MAP, deep ensemble, LLLA and MoLA.

    python benchmarks/cifar10.py --data DIR --networks DIR [--cache DIR]

The data folder holds `cifar-10-batches-bin` (the official binary files), `cifar-100-binary/test.bin` and
`svhn/test_32x32.npz` (arrays `images` and `labels`); the network folder `00.safetensors`, `01.safetensors`, ... Every image
is normalised like the networks' training data, the outliers too, as a deployed network would see them. Every method shares one pass
over the images, which takes most of ten minutes on two cores. Writes benchmarks/results/real_cifar10.json.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import mola
from mola import metrics
from mola.lab.models import resnet20
from mola.likelihoods import CATEGORICAL
from mola.network import evaluating, find_heads, stream
from mola.outliers import max_probability_score

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
VALIDATION = 2000


@dataclass(frozen=True)
class Examples:
    """Inputs in batches, with labels where there are any: a loader that can be read again and again."""

    inputs: Tensor
    labels: Tensor | None = None
    batch: int = 500

    def __len__(self) -> int:
        return -(-len(self.inputs) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(self.inputs), self.batch):
            rows = slice(start, start + self.batch)
            inputs = self.inputs[rows]
            if inputs.dtype == torch.uint8:
                inputs = (inputs.float() / 255 - MEAN) / STD
            yield (inputs,) if self.labels is None else (inputs, self.labels[rows])

    def part(self, index: Sequence[int] | slice) -> Examples:
        """Some of them."""
        return Examples(self.inputs[index], None if self.labels is None else self.labels[index], self.batch)


def read_binary(paths: Sequence[Path], label_bytes: int) -> Examples:
    """CIFAR's binary files: label bytes, the last of which is the finest, then the red, green and blue planes."""
    rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, label_bytes + 3072) for path in paths])
    images = torch.from_numpy(rows[:, label_bytes:].reshape(-1, 3, 32, 32))
    return Examples(images, torch.from_numpy(rows[:, label_bytes - 1].astype(np.int64)))


def read_data(folder: Path, *, train: int = 50_000, test: int = 8_000, outliers: int = 10_000) -> dict[str, Examples]:
    """Training images, the test set split into validation (2000) and test (at most 8000), and two sets of outliers."""
    cifar = folder / "cifar-10-batches-bin"
    training = read_binary([cifar / f"data_batch_{index}.bin" for index in range(1, 6)], 1).part(slice(train))
    held_out = read_binary([cifar / "test_batch.bin"], 1)
    sizes = [VALIDATION, len(held_out.inputs) - VALIDATION]
    generator = torch.Generator().manual_seed(42)
    split = torch.utils.data.random_split(range(len(held_out.inputs)), sizes, generator=generator)
    svhn = torch.from_numpy(np.load(folder / "svhn" / "test_32x32.npz")["images"]).permute(0, 3, 1, 2)
    cifar100 = read_binary([folder / "cifar-100-binary" / "test.bin"], 2).inputs
    return {
        "train": training,
        "validation": held_out.part(split[0].indices),
        "test": held_out.part(split[1].indices[:test]),
        "SVHN": Examples(evenly(svhn, outliers)),
        "CIFAR-100": Examples(evenly(cifar100, outliers)),
    }


def evenly(images: Tensor, count: int) -> Tensor:
    """At most `count` images, evenly spaced: the files may be in order of classes."""
    return images if len(images) <= count else images[torch.linspace(0, len(images) - 1, count).long()]


def read_networks(folder: Path, count: int) -> list[nn.Module]:
    """The first `count` networks of the folder, laid out for speed."""
    networks = []
    for index in range(count):
        network = resnet20()
        network.load_state_dict(load_file(folder / f"{index:02d}.safetensors"))
        # Colours beside each other in memory: the same numbers, half as fast again.
        networks.append(network.eval().to(memory_format=torch.channels_last))
    return networks


class HeadOnly(nn.Module):
    """A network's last layer over features (n, K, P) that are known: every method shares one pass over the images."""

    def __init__(self, network: nn.Module, index: int) -> None:
        super().__init__()
        self.linear, self.index = network.linear, index

    def forward(self, features: Tensor) -> Tensor:
        """Logits of this network."""
        return self.linear(features[:, self.index])


def features_of(networks: Sequence[nn.Module], images: Examples, name: str) -> Examples:
    """What each network's head sees, (n, K, P), by mola's own reading of the networks."""
    options = {"where": f"{name} images", "likelihood": CATEGORICAL, "progress": True, "total": len(images)}
    with evaluating(*networks):
        heads = find_heads(networks, [None] * len(networks), next(iter(images))[0], CATEGORICAL)
        # Features come in float64 with a one for the bias at their end.
        seen = [
            torch.stack([phi[:, : head.inputs].float() for phi, head in zip(rows.phi, heads, strict=True)], dim=1)
            for batch in stream(networks, heads, images, **options)
            for rows in batch.chunks()
        ]
    return Examples(torch.cat(seen), images.labels)


def load(
    data: Path,
    networks: Path,
    *,
    count: int,
    train: int = 50_000,
    test: int = 8_000,
    outliers: int = 10_000,
    cache: Path | None = None,
) -> tuple[list[HeadOnly], dict[str, Examples]]:
    """The networks' heads, and what they see of each set; features are kept in `cache`, if given, and taken from there."""
    trained = read_networks(networks, count)
    examples = read_data(data, train=train, test=test, outliers=outliers)
    for name, images in examples.items():
        stored = None if cache is None else cache / f"{name}-{count}-{len(images.inputs)}.npy"
        if stored is not None and stored.exists():
            examples[name] = Examples(torch.from_numpy(np.load(stored)), images.labels)
            continue
        examples[name] = features_of(trained, images, name)
        if stored is not None:
            stored.parent.mkdir(parents=True, exist_ok=True)
            np.save(stored, examples[name].inputs.numpy())
    return [HeadOnly(network, index) for index, network in enumerate(trained)], examples


# --- figures ------------------------------------------------------------------------------------------------------------

EVALUATED = ("test", "SVHN", "CIFAR-100")
STRUCTURES = ("kron", "kron-exact", "diag", "full")
RULES = {"threshold": mola.rules.Threshold(), "NLL": mola.rules.Score("nll"), "distance": mola.rules.Distance()}


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
    for name in EVALUATED[1:]:
        inside, outside = (max_probability_score(one, CATEGORICAL) for one in (test, probs[name]))
        result[f"{name} auroc"] = metrics.auroc(inside, outside)
        result[f"{name} confidence"] = metrics.mean_confidence(probs[name])
    return result


def predicted(posterior: mola.MoLA, data: dict[str, Examples]) -> dict[str, float]:
    """The figures of a posterior, those of its outlier score included."""
    predictions = {name: posterior.predict(data[name]) for name in EVALUATED}
    row = figures({name: one.probs for name, one in predictions.items()}, data["test"].labels)
    if posterior.structure is not None:
        for name in EVALUATED[1:]:
            inside, outside = predictions["test"], predictions[name]
            row[f"{name} auroc, entropy"] = metrics.auroc(inside.entropy, outside.entropy)
            row[f"{name} auroc, ood_score"] = metrics.auroc(inside.ood_score, outside.ood_score)
            row[f"{name} auroc, far field"] = metrics.auroc(inside.far_field, outside.far_field)
    return row


def evaluate(
    heads: Sequence[nn.Module], data: dict[str, Examples], structures: Sequence[str] = STRUCTURES
) -> dict[str, dict[str, float]]:
    """Every method's figures: one network (MAP, LLLA) and all of them (DE, MoLA)."""
    rows: dict[str, dict[str, float]] = {}
    for single, several, members in (("MAP", "LLLA", heads[:1]), ("DE", "MoLA", heads)):
        rows[single] = predicted(mola.ensemble(members), data)
        scaled = mola.baselines.temperature_scaled(members, data["validation"], progress=False)
        probs = {name: scaled.predict(data[name]).probs for name in EVALUATED}
        rows[f"{single}, temperature"] = figures(probs, data["test"].labels)
        for structure in structures:
            posterior = mola.fit(members, data["train"], structure=structure, progress=False)
            for name, rule in RULES.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", mola.errors.MolaWarning)  # that the grid grew shows in the result
                    tuned = posterior.tune(data["validation"], rule=rule)
                precision = {"prior_precision": tuned.prior_precision[0]}
                rows[f"{several} {structure}, {name}"] = predicted(tuned, data) | precision
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--networks", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder to keep the networks' features in")
    parser.add_argument("--count", type=int, default=5, help="number of networks")
    parser.add_argument("--train", type=int, default=50_000, help="training images to fit on")
    parser.add_argument("--outliers", type=int, default=10_000, help="images of each outlier set at most")
    options = parser.parse_args()
    sizes = {"count": options.count, "train": options.train, "outliers": options.outliers}
    rows = evaluate(*load(options.data, options.networks, **sizes, cache=options.cache))
    record.write("real_cifar10", {"settings": sizes, "environment": record.environment("mola-torch"), "rows": rows})


if __name__ == "__main__":
    main()
