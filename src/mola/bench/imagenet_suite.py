"""ImageNet and ImageNet-C: too large for memory, read batch by batch from folders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mola.bench.suite import Batches, DataOptions, Role, Shift, Source, Suite, checksum, first_labels
from mola.data.catalogue import data_directory
from mola.data.folder import ImageFolder
from mola.data.imagenet import open_imagenet, open_imagenet_c
from mola.data.normalisation import normalisation
from mola.errors import DataError
from mola.models.registry import build_network
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

    listed = [[str(Path(*path.parts[-2:])), path.stat().st_size, label] for path, label in
              zip(images.paths, images.labels.tolist(), strict=True)]  # fmt: skip
    key = checksum(listed, repr(images.prepare), chosen)
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
    """The corruptions of ImageNet-C that are there, each with all severities."""
    folders = {
        path.parent.name
        for root in directory.iterdir()
        if root.is_dir() and root.name.lower().replace("_", "-") == "imagenet-c"
        for path in (*root.glob("*/1"), *root.glob("*/*/1"))
        if path.is_dir()
    }
    return sorted(folders)


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
    kept = {path.stem for path in test.paths}
    corruptions = _corruptions(directory)
    for severity in SEVERITIES if corruptions else ():
        joined = _join([open_imagenet_c(corruption, severity, directory) for corruption in corruptions])
        # Validation images are left out here too: ImageNet-C keeps the names of the files.
        mine = torch.tensor([index for index, path in enumerate(joined.paths) if path.stem in kept], dtype=torch.int64)
        if not len(mine):
            message = f"ImageNet-C at severity {severity} has no image of the test set in {directory}: are the names the originals'?"
            raise DataError(message)
        shifted = _limited(joined.part(mine), options.test)
        name = f"severity {severity}"
        sources[name] = _source(options, name, f"ImageNet-C at severity {severity}", "shift", shifted, severity)
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
    notes=("The paper's threshold for ImageNet is not known; 0.01 below the networks' accuracy is used.",),
)
"""The paper's ImageNet-C, with trained networks that the user brings. All the corruptions that are there are pooled."""
