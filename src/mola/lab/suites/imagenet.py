"""ImageNet and ImageNet-C: too large for memory, read batch by batch from folders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mola.compare.record import Role
from mola.errors import DataError, warn
from mola.lab.corruptions.catalogue import CORRUPTIONS
from mola.lab.data.catalogue import data_directory
from mola.lab.data.folder import ImageFolder, open_imagenet, open_imagenet_c
from mola.lab.data.images import normalisation
from mola.lab.models import build_network
from mola.lab.suite import Batches, DataOptions, Shift, Source, Suite, checksum, first_labels
from mola.training import RECIPES

__all__ = ["IMAGENET"]

SEVERITIES = (1, 2, 3, 4, 5)
SPLIT_SEED = 42
VALIDATION_SHARE = 0.2
"""Of the labelled images that are not for training: 2000 of 10,000 elsewhere, 10,000 of 50,000 here."""


def _source(options: DataOptions, name: str, title: str, role: Role, images: ImageFolder, level: float = 0.0) -> Source:
    chosen = options.normalisation or "imagenet"

    def show(count: int) -> Tensor:
        (pixels, _), *_ = images.part(torch.arange(min(count, len(images)))).batches(count)
        return pixels

    def batches() -> Batches:
        return images.batches(64, normalisation(chosen), workers=2)

    root = data_directory(options.directory)
    files = [(path.relative_to(root).as_posix(), path.stat()) for path in images.paths]
    listed = [[name, found.st_size, found.st_mtime_ns] for name, found in files]
    key = checksum(listed, images.labels.tolist(), repr(images.prepare), repr(normalisation(chosen)))
    return Source(name, title, role, len(images), key, batches, show, level, first_labels(role, images.labels))


def _limited(images: ImageFolder, count: int | None) -> ImageFolder:
    return images if count is None else images.evenly(count)


def _join(folders: list[ImageFolder]) -> ImageFolder:
    """Several folders of the same classes as one.

    Raises:
        DataError: if their classes differ.
    """
    first = folders[0]
    if any(folder.classes != first.classes for folder in folders):
        message = "the corruptions' folders do not have the same classes: complete them."
        raise DataError(message)
    paths = tuple(path for folder in folders for path in folder.paths)
    return ImageFolder(paths, torch.cat([folder.labels for folder in folders]), first.classes, first.prepare)


def _corruptions(directory: Path) -> list[str]:
    """The corruptions of ImageNet-C that are there with all severities; a note says which are not."""
    there = []
    for corruption in CORRUPTIONS:
        try:
            for severity in SEVERITIES:
                open_imagenet_c(corruption, severity, directory)
        except DataError:
            continue
        there.append(corruption)
    if len(there) < len(CORRUPTIONS):
        missing = ", ".join(corruption for corruption in CORRUPTIONS if corruption not in there)
        warn(f"ImageNet-C lacks {missing} in {directory}: {len(there)} of {len(CORRUPTIONS)} corruptions are pooled.")
    return there


def _sources(options: DataOptions) -> dict[str, Source]:
    directory = data_directory(options.directory)
    train = _limited(open_imagenet(directory, "train"), options.train)
    held_out = open_imagenet(directory, "val")
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(SPLIT_SEED))
    cut = max(1, round(VALIDATION_SHARE * len(held_out)))
    chosen = order[cut:].sort().values
    test = _limited(held_out.part(chosen), options.test)
    sources = {
        "train": _source(options, "train", "ImageNet train", "train", train),
        "validation": _source(
            options, "validation", "ImageNet validation", "validation", held_out.part(order[:cut].sort().values)
        ),
        "test": _source(options, "test", "ImageNet test", "test", test),
    }
    kept = {(path.parent.name, path.stem) for path in test.paths}
    corruptions = _corruptions(directory)
    for severity in SEVERITIES if corruptions else ():
        joined = _join([open_imagenet_c(corruption, severity, directory) for corruption in corruptions])
        # Validation images are left out here too: ImageNet-C keeps the names of the files.
        places = [index for index, path in enumerate(joined.paths) if (path.parent.name, path.stem) in kept]
        mine = torch.tensor(places, dtype=torch.int64)
        if len(mine) != len(kept) * len(corruptions):
            message = (
                f"ImageNet-C at severity {severity} has {len(mine)} images of the {len(kept)} in the test set under "
                f"{len(corruptions)} corruptions in {directory}: are all there, with the names of the originals?"
            )
            raise DataError(message)
        shifted = _limited(joined.part(mine), options.test)
        name = f"severity {severity}"
        title = f"ImageNet-C ({len(corruptions)} types) at severity {severity}"
        sources[name] = _source(options, name, title, "shift", shifted, severity)
    return sources


IMAGENET = Suite(
    name="imagenet",
    title="ImageNet",
    builders={
        name: (lambda name=name: build_network(name, 1000))  # type: ignore[misc]
        for name in ("wrn-50-2",)
    },
    classes=(),
    recipe=RECIPES["imagenet"],
    threshold=None,
    shift=Shift("severity", "ImageNet-C", "severity", (0.0, *(float(severity) for severity in SEVERITIES))),
    make_sources=_sources,
    components=3,
    notes=(
        "The paper's threshold for ImageNet is not known; 0.01 below the networks' accuracy is used.",
        "A fifth of ImageNet's validation images tune the prior precision, the others test; ImageNet-C is used where its images "
        "are of the latter.",
    ),
)
"""The paper's ImageNet-C, with trained networks that the user brings. All the corruptions that are there are pooled."""
