"""Sources of images that fit in memory. Images are normalised and, if necessary, rotated or corrupted when they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from molaplace.demo import LabelledData
from molaplace.errors import DataError, warn
from molaplace.evaluation import Role
from molaplace.images import Images, normalisation
from molaplace_lab.checksums import checksum, data_checksum
from molaplace_lab.data.catalogue import DATASETS, has_images, load_images
from molaplace_lab.data.transforms import ANGLES, flip_and_crop, rotate
from molaplace_lab.suite import Batches, DataOptions, Source, TrainingData
from molaplace_lab.training import Recipe

Change = Callable[[Images], Images]

SAMPLE = 64
"""Number of images per set that are included in the checksum; large enough to cover every type of corruption."""


def load(name: str, split: str, options: DataOptions) -> Images:
    """Read a published set; issue a warning if it is incomplete."""
    images = load_images(name, split, options.directory, download=options.download)
    published = DATASETS[name].splits[split].count
    if published is not None and len(images) != published:
        warn(f"{DATASETS[name].title} ({split}) contains {len(images):,} images, but {published:,} were published.")
    return images


def image_source(
    options: DataOptions,
    normalised: str,
    name: str,
    title: str,
    role: Role,
    images: Images,
    *,
    change: Change = lambda images: images,
    changed_by: tuple[Any, ...] = (),
    level: float = 0.0,
    types: tuple[str, ...] = (),
) -> Source:
    """Create a source of images held in memory; any change (rotation or corruption) is applied when they are read.

    `normalised` is the name of the normalisation to use unless the user chose a different one. `changed_by` contains JSON values
    that identify `change`. The checksum includes these values and the first inputs.
    """
    chosen = options.normalisation or normalised
    normalise = normalisation(chosen)
    # Small batches of colour images stay in the processor's cache; in measurements, they were 10 % faster than larger batches.
    batch_size = 32 if images.pixels.shape[1] > 1 else 128

    def read(indices: Sequence[int]) -> Batches:
        changed = change(images).part(indices)
        pixels, labels = (torch.split(part, batch_size) for part in (changed.pixels, changed.labels))
        return ((normalise(part), some_labels) for part, some_labels in zip(pixels, labels, strict=True))

    def show(indices: Sequence[int]) -> Images:
        return change(images.part(slice(0, max(indices) + 1))).part(indices)

    sample = show(range(min(SAMPLE, len(images)))).pixels
    first_inputs = hashlib.sha256(normalise(sample).contiguous().numpy().tobytes()).hexdigest()
    made_by = ("normalisation", chosen, *changed_by)
    key = checksum(data_checksum(images.pixels, images.labels), *made_by, first_inputs)
    return Source(name, title, role, len(images), key, read, show, level, types)


def rotations(options: DataOptions, title: str, test: Images, interpolation: str) -> dict[str, Source]:
    """Create sources of test images rotated counter-clockwise, one for each of `ANGLES` except 0."""
    images = test.evenly(options.shifted)

    def rotated(images: Images, degrees: float) -> Images:
        turned = rotate(images.pixels.float(), degrees, interpolation=interpolation)
        return Images(turned.round().to(torch.uint8), images.labels)

    return {
        f"rotation {angle}": image_source(
            options,
            "none",
            f"rotation {angle}",
            f"{title} turned by {angle}°",
            "shift",
            images,
            change=partial(rotated, degrees=angle),
            changed_by=("rotation", angle, interpolation),
            level=angle,
        )
        for angle in ANGLES[1:]
    }


def split_validation(images: Images, validation: int = 2000, seed: int = 42) -> tuple[Images, Images]:
    """Split a test set at random into `validation` images for tuning and the remaining images for testing, as in the paper."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).tolist()
    return images.part(order[:validation]), images.part(order[validation:])


def test_images(name: str, options: DataOptions) -> Images:
    """Return the part of a published test set that is used for testing, not for validation."""
    _, test = split_validation(load(name, "test", options))
    return test.evenly(options.test)


def in_distribution(name: str, title: str, normalised: str, options: DataOptions) -> dict[str, Source]:
    """Create sources of training, validation and test images. The published test set is split into validation and test images."""
    validation, test = split_validation(load(name, "test", options))
    train = load(name, "train", options).evenly(options.train)
    parts: dict[Role, Images] = {"train": train, "validation": validation, "test": test.evenly(options.test)}
    return {
        role: image_source(options, normalised, role, f"{title} {role}", role, images) for role, images in parts.items()
    }


def load_outliers(options: DataOptions, names: Iterable[str]) -> dict[str, Images]:
    """Read the outlier sets. A set that is neither in the data directory nor downloaded is omitted with a warning."""
    outliers = {}
    for name in names:
        reason = "is not in the data directory"
        if has_images(name, "test", options.directory) or options.download:
            try:
                outliers[name] = load(name, "test", options).evenly(options.outliers)
                continue
            except DataError as error:
                if has_images(name, "test", options.directory):
                    raise
                reason = f"could not be downloaded ({error})"
        warn(f"{DATASETS[name].title} {reason} and is left out of the comparison.")
    return outliers


def outlier_sources(
    options: DataOptions,
    normalised: str,
    titles: Mapping[str, str],
    change: Change = lambda images: images,
) -> dict[str, Source]:
    """Create sources for the sets in `titles`, normalised like the training data."""
    return {
        name: image_source(options, normalised, name, titles[name], "outlier", change(images))
        for name, images in load_outliers(options, titles).items()
    }


def training(
    read_images: Callable[[DataOptions], Images], normalised: str
) -> Callable[[DataOptions, Recipe], TrainingData]:
    """Return a function that reads a suite's training data, which are augmented if the recipe requires it."""

    def read(options: DataOptions, recipe: Recipe) -> TrainingData:
        images = read_images(options).evenly(options.train)
        normalise = normalisation(options.normalisation or normalised)

        def prepare(pixels: Tensor) -> Tensor:
            # The training loop seeds torch's generator and stores its state in checkpoints.
            return normalise(flip_and_crop(pixels, torch.default_generator) if recipe.augment else pixels)

        return TrainingData(LabelledData(images.pixels, images.labels), prepare)

    return read
