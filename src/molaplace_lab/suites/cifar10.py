"""The CIFAR-10 suite: corrupted images, and outliers from other sets of 32 x 32 colour images."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from molaplace.errors import DataError, warn
from molaplace.images import Images
from molaplace_lab.corruptions.catalogue import PAPER_CORRUPTIONS, SEVERITIES, corrupt
from molaplace_lab.data.catalogue import data_directory, load_images
from molaplace_lab.data.cifar10_c import ARCHIVE, find_cifar10_c, load_cifar10_c, load_cifar10h
from molaplace_lab.data.download import fetch
from molaplace_lab.data.transforms import in_colour
from molaplace_lab.measures import Measure, human_labels
from molaplace_lab.models import build_network
from molaplace_lab.suite import Budget, DataOptions, Source, Suite, SwagBudget
from molaplace_lab.suites.image_sources import (
    image_source,
    in_distribution,
    load,
    outlier_sources,
    split_validation,
    test_images,
    training,
)
from molaplace_lab.training import RECIPES

CORRUPTION_SEED = 0
SIDE = 32
NETWORKS = ("wrn-16-4", "resnet-20", "resnet-32", "resnet-44", "resnet-56", "resnet-110")

OUTLIERS = {
    "svhn": "SVHN",
    "lsun": "LSUN",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
    "mnist": "MNIST",
}
"""The paper's three outlier sets, and two more from OpenOOD."""


def _corrupted(images: Images, severity: int, options: DataOptions, published: Path | None) -> Images:
    # Each image is corrupted once: image i gets the corruption with index i modulo the number of types. `images` are the first images
    # of the shifted set.
    pixels = images.pixels.clone()
    for index, corruption in enumerate(PAPER_CORRUPTIONS[: len(images)]):
        rows = slice(index, None, len(PAPER_CORRUPTIONS))
        if published is None:
            pixels[rows] = corrupt(pixels[rows], corruption, severity, seed=CORRUPTION_SEED)
            continue
        _, test = split_validation(load_cifar10_c(published, corruption, severity))
        made = test.evenly(options.test).evenly(options.shifted).part(slice(0, len(images))).part(rows)
        if not torch.equal(made.labels, images.labels[rows]):
            raise DataError(
                f"the labels of {corruption} in CIFAR-10-C differ from the labels of the CIFAR-10 test set. Download both sets again."
            )
        pixels[rows] = made.pixels
    return Images(pixels, images.labels)


def _sources(options: DataOptions) -> dict[str, Source]:
    root = data_directory(options.directory)
    images = test_images("cifar10", options).evenly(options.shifted)
    published = find_cifar10_c(PAPER_CORRUPTIONS, root)
    if published is None and options.download:
        try:
            fetch(ARCHIVE, root)
        except DataError as error:
            warn(f"CIFAR-10-C is generated, because it could not be downloaded: {error}")
        published = find_cifar10_c(PAPER_CORRUPTIONS, root)
    severities = {
        f"severity {severity}": image_source(
            options,
            "cifar10",
            f"severity {severity}",
            f"CIFAR-10-C{', generated,' if published is None else ''} at severity {severity}",
            "shift",
            images,
            change=partial(_corrupted, severity=severity, options=options, published=published),
            changed_by=("corruption", severity, list(PAPER_CORRUPTIONS), "published" if published else CORRUPTION_SEED),
            level=severity,
            types=PAPER_CORRUPTIONS,
        )
        for severity in SEVERITIES
    }
    return {
        **in_distribution("cifar10", "CIFAR-10", "cifar10", options),
        **severities,
        **outlier_sources(
            options, "cifar10", OUTLIERS, lambda images: Images(in_colour(images.pixels, SIDE), images.labels)
        ),
    }


def _measures(options: DataOptions) -> dict[str, Measure]:
    # Compute the agreement with human labels if CIFAR-10H is in the data directory.
    images = load_images("cifar10", "test", options.directory)
    counts = load_cifar10h(images.labels, options.directory)
    # Split the indices in the same way as the images, to find the human labels of the test images.
    _, test = split_validation(Images(images.pixels, torch.arange(len(images))))
    return {} if counts is None else {"people": partial(human_labels, counts[test.evenly(options.test).labels])}


CIFAR10 = Suite(
    name="cifar10",
    title="CIFAR-10",
    builders={name: partial(build_network, name, 10) for name in NETWORKS},
    classes=("aeroplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry"),
    recipe=RECIPES["cifar10"],
    threshold=None,
    shift={"title": "CIFAR-10-C", "axis": "severity"},
    make_sources=_sources,
    options=frozenset({"train", "test", "shifted", "outliers", "normalisation"}),
    training_data=training(partial(load, "cifar10", "train"), "cifar10"),
    measures=_measures,
    budget=Budget(SwagBudget(learning_rate=2e-3)),
    notes=(
        "At each severity every test image is corrupted once, the types dealt in turn. Without the published files in the data "
        "directory the images are generated from the published parameters, frost with a synthetic texture.",
        "MNIST as outliers: enlarged to 32 x 32 pixels (bilinear) and repeated in three colours, as OpenOOD does.",
    ),
)
"""The paper's experiments with CIFAR-10-C and with outliers. The paper's threshold of 0.94 applies to networks with an accuracy of
94.8 %."""
