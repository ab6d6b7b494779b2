"""Sources of images that fit in memory: read, limited, normalised, and rotated or corrupted when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mola.compare.record import Role
from mola.errors import DataError, warn
from mola.lab.data.catalogue import DATASETS, check_original, has_images, load_images
from mola.lab.data.images import Images, normalisation, split_validation
from mola.lab.data.transforms import flip_and_crop, rotate
from mola.lab.suite import DataOptions, Source, TrainingData, from_memory
from mola.lab.training import Labelled, Recipe

Change = Callable[[Images], Images]


def limited(images: Images, count: int | None) -> Images:
    """At most so many, evenly spaced; None is all of them."""
    return images if count is None else images.evenly(count)


def _load(name: str, split: str, options: DataOptions) -> Images:
    images = load_images(name, split, options.directory, download=options.download)
    check_original(name, split, images, options.directory)
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
    """A source of images in memory.

    Args:
        options: what the user chose.
        normalised: the normalisation, unless the user chose another.
        name: of the set.
        title: for readers.
        role: what it is for.
        images: as they lie on disk.
        change: what is done to them.
        changed_by: plain values that name it.
        level: how far they are shifted.
        types: kinds of shift that are dealt over them in turn.

    Returns:
        The source.
    """
    chosen = options.normalisation or normalised
    # Small colour batches stay in the processor's cache: measured, a tenth faster than larger ones.
    size = 32 if images.pixels.shape[1] > 1 else 128
    return from_memory(
        name,
        title,
        role,
        images,
        normalisation(chosen),
        made_by=("normalisation", chosen, *changed_by),
        change=change,
        level=level,
        batch_size=size,
        types=types,
    )


def rotated(degrees: float, interpolation: str) -> Change:
    """Turned counter-clockwise."""

    def change(images: Images) -> Images:
        turned = rotate(images.pixels.float(), degrees, interpolation=interpolation)
        return Images(turned.round().to(torch.uint8), images.labels)

    return change


def test_images(name: str, options: DataOptions) -> Images:
    """The part of a test set that is for testing."""
    _, test = split_validation(_load(name, "test", options))
    return limited(test, options.test)


def in_distribution(name: str, title: str, normalised: str, options: DataOptions) -> dict[str, Source]:
    """Training, validation and test set: the published test set is divided into the last two."""
    validation, test = split_validation(_load(name, "test", options))
    parts: dict[Role, Images] = {
        "train": limited(_load(name, "train", options), options.train),
        "validation": validation,
        "test": limited(test, options.test),
    }
    return {
        role: image_source(options, normalised, role, f"{title} {role}", role, images) for role, images in parts.items()
    }


def outlier_sources(
    options: DataOptions,
    normalised: str,
    titles: Mapping[str, str],
    authors: Mapping[str, str],
    change: Change = lambda images: images,
) -> dict[str, Source]:
    """Sets of outliers; one that is not in the data directory is left out, and said so.

    Args:
        options: what the user chose.
        normalised: the normalisation of the data in distribution.
        titles: of the sets, by name.
        authors: the normalisations that the paper's scripts give some of them.
        change: makes images of other sizes what the networks take.

    Returns:
        The sources, by name.
    """
    sources = {}
    for name, title in titles.items():
        images = _outliers(name, options)
        if images is not None:
            own = authors.get(name, normalised) if options.conventions == "authors" else normalised
            sources[name] = image_source(options, own, name, title, "outlier", change(images))
    return sources


def _outliers(name: str, options: DataOptions) -> Images | None:
    if not has_images(name, "test", options.directory):
        reason = "is not in the data directory"
        if options.download:
            try:
                return limited(_load(name, "test", options), options.outliers)
            except DataError as error:
                reason = f"cannot be fetched ({error})"
        warn(f"{DATASETS[name].title} {reason} and is left out of the comparison.")
        return None
    return limited(_load(name, "test", options), options.outliers)


def training(name: str, normalised: str) -> Callable[[DataOptions, Recipe], TrainingData]:
    """What networks of a suite are trained on, augmented if the recipe says so."""

    def read(options: DataOptions, recipe: Recipe) -> TrainingData:
        images = limited(_load(name, "train", options), options.train)
        normalise = normalisation(options.normalisation or normalised)

        def prepare(pixels: Tensor) -> Tensor:
            # The training loop seeds torch's own generator, and keeps its state in checkpoints.
            augmented = flip_and_crop(pixels, torch.default_generator) if recipe.augment else pixels
            return normalise(augmented)

        return TrainingData(Labelled(images.pixels, images.labels), prepare)

    return read
