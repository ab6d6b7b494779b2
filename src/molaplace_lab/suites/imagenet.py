"""The suite for ImageNet and ImageNet-C, which are read batch by batch from folders because they do not fit into memory.

With training images, the suite reproduces the paper's experiment. Without training images (`--cross-fit`), the validation images of
each class are divided into five parts: two for fitting, one for tuning and two for testing. The roles of the parts are rotated, which
gives five runs. ImageNet-C is read from the published folders if they exist, and generated from the published parameters otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from molaplace.errors import DataError, warn
from molaplace.evaluation import Role
from molaplace.images import ImageFolder, Images, Preparation, even_indices, normalisation
from molaplace.options import one_of
from molaplace_lab.checksums import checksum, data_checksum
from molaplace_lab.corruptions.catalogue import CORRUPTIONS, IMAGENET_CORRUPTIONS, SEVERITIES, corrupt
from molaplace_lab.data.catalogue import data_directory
from molaplace_lab.data.folder import CENTRE_224, CLASSES, imagenet_c_folder, open_imagenet
from molaplace_lab.data.transforms import in_colour
from molaplace_lab.models import build_network
from molaplace_lab.suite import Batches, DataOptions, Source, Suite
from molaplace_lab.suites.image_sources import load_outliers
from molaplace_lab.training import Recipe

SPLIT_SEED = 42
CORRUPTION_SEED = 0
VALIDATION_SHARE = 0.2
"""Fraction of the validation images used for tuning (10,000 of 50,000), the same as in other suites (2000 of 10,000)."""

FOLDS = 5
PARTS: dict[Role, tuple[str, tuple[int, ...]]] = {
    "train": ("ImageNet images for the sums", (0, 1)),
    "validation": ("ImageNet images to tune on", (2,)),
    "test": ("ImageNet test images", (3, 4)),
}
"""Title of each part, and the fifths of each class assigned to the part in the first rotation."""

GENERATED = ("gaussian_noise", "defocus_blur", "fog", "jpeg_compression")
"""Default corruptions if no published files exist: one from each family (noise, blur, weather, digital)."""

OUTLIERS = {"svhn": "SVHN", "notmnist": "notMNIST (letters)", "kmnist": "KMNIST (brush strokes)"}
"""Outlier sets: house numbers, letters and brush strokes, enlarged to the size of ImageNet's images."""

THUMBNAIL = 64
"""Side of example images in reports, in pixels."""

BATCH = 16
"""Number of images in a batch. Larger batches do not fit in the processor's cache and reduce the speed by a quarter."""


def _preparation(options: DataOptions) -> Preparation:
    if options.image_size is None:
        return CENTRE_224
    return Preparation(resize=options.image_size, crop=options.image_size)


def _source(
    options: DataOptions,
    name: str,
    title: str,
    role: Role,
    images: ImageFolder,
    *,
    kinds: Sequence[str] = (),
    types: tuple[str, ...] = (),
    level: int = 0,
) -> Source:
    # If `kinds` gives a corruption for each image, the images are corrupted when they are read. Image i has the type with index i
    # modulo the number of `types`.
    normalise = normalisation(options.normalisation or "imagenet")
    change = partial(corrupt, severity=level, seed=CORRUPTION_SEED, parameters="imagenet-c")

    def pictures(indices: Sequence[int]) -> Iterator[Images]:
        # The corruption of an image depends only on its index.
        for batch, (pixels, labels) in enumerate(images.part(indices).batches(BATCH, workers=2)):
            if kinds:
                pairs = zip(torch.split(pixels, 1), indices[batch * BATCH : batch * BATCH + len(labels)], strict=True)
                pixels = torch.cat([change(image, kinds[index], first=index) for image, index in pairs])
            yield Images(pixels, labels)

    def read(indices: Sequence[int]) -> Batches:
        return ((normalise(batch.pixels), batch.labels) for batch in pictures(indices))

    def show(indices: Sequence[int]) -> Images:
        pixels = torch.cat([in_colour(batch.pixels, THUMBNAIL) for batch in pictures(indices)])
        return Images(pixels, images.labels[list(indices)])

    root = data_directory(options.directory)
    files = [(path.relative_to(root).as_posix(), path.stat()) for path in images.paths]
    listed = [[file, status.st_size, status.st_mtime_ns] for file, status in files]
    made_by = [CORRUPTION_SEED, level, list(kinds)] if kinds else []
    content_checksum = checksum(listed, images.labels.tolist(), repr(images.prepare), *made_by)
    key = checksum(content_checksum, repr(normalise))
    return Source(name, title, role, len(images), key, read, show, level, types, large=True)


def _outliers(options: DataOptions) -> dict[str, Source]:
    outliers = load_outliers(options, OUTLIERS)
    return {name: _enlarged(options, name, images) for name, images in outliers.items()}


def _enlarged(options: DataOptions, name: str, images: Images) -> Source:
    normalise = normalisation(options.normalisation or "imagenet")
    side = _preparation(options).crop or 224

    def read(indices: Sequence[int]) -> Batches:
        chosen = images.part(indices)
        for pixels, labels in zip(
            *(torch.split(tensor, BATCH) for tensor in (chosen.pixels, chosen.labels)), strict=True
        ):
            yield normalise(in_colour(pixels, side)), labels

    def show(indices: Sequence[int]) -> Images:
        chosen = images.part(indices)
        return Images(in_colour(chosen.pixels, THUMBNAIL), chosen.labels)

    key = checksum(data_checksum(images.pixels, images.labels), side, repr(normalise))
    return Source(name, OUTLIERS[name], "outlier", len(images), key, read, show, large=True)


# --- ImageNet-C


def _types(options: DataOptions) -> tuple[tuple[str, ...], bool]:
    # Return the corruptions, and whether they are read from published files, which must include all severities.
    for name in options.types:
        one_of(name, CORRUPTIONS, "types")
    directory = data_directory(options.directory)
    wanted = options.types or CORRUPTIONS
    published = tuple(
        name for name in wanted if all(imagenet_c_folder(name, severity, directory) for severity in SEVERITIES)
    )
    if not published:
        for name in options.types:
            one_of(name, IMAGENET_CORRUPTIONS, "types that can be generated")
        return options.types or GENERATED, False
    if len(published) < len(wanted):
        missing = ", ".join(name for name in wanted if name not in published)
        warn(
            f"ImageNet-C lacks {missing} in {directory}, so only {len(published)} of {len(wanted)} corruptions are used."
        )
    return published, True


def _shifted(
    options: DataOptions, images: ImageFolder, types: tuple[str, ...], published: bool, kinds: list[str]
) -> list[Source]:
    # Return the shifted sets; `kinds` contains the corruption of each image.
    sources = []
    for severity in SEVERITIES:
        name = f"severity {severity}"
        about = "" if published else ", generated,"
        title = f"ImageNet-C{about} ({len(types)} types) at severity {severity}"
        if published:
            pairs = zip(kinds, images.paths, strict=True)
            paths = tuple(_published_file(options, kind, severity, path) for kind, path in pairs)
            made = replace(images, paths=paths)
            dealt = []
        else:
            made = images
            dealt = kinds
        sources.append(_source(options, name, title, "shift", made, kinds=dealt, types=types, level=severity))
    return sources


def _published_file(options: DataOptions, kind: str, severity: int, path: Path) -> Path:
    # ImageNet-C uses the same file names as ImageNet.
    directory = data_directory(options.directory)
    folder = imagenet_c_folder(kind, severity, directory) or directory
    for name in (path.name, f"{path.stem}.JPEG"):
        if (folder / path.parent.name / name).is_file():
            return folder / path.parent.name / name
    raise DataError(
        f"ImageNet-C's {kind} at severity {severity} lacks {path.parent.name}/{path.name} in {directory}. Add the missing file."
    )


# --- with training images


def _sources(options: DataOptions) -> dict[str, Source]:
    directory = data_directory(options.directory)
    prepare = _preparation(options)
    train = open_imagenet(directory, "train", prepare=prepare).evenly(options.train)
    held_out = open_imagenet(directory, "val", prepare=prepare)
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(SPLIT_SEED))
    cut = max(1, round(VALIDATION_SHARE * len(held_out)))
    test = held_out.part(order[cut:].sort().values).evenly(options.test)
    validation = held_out.part(order[:cut].sort().values)
    types, published = _types(options)
    images = test.evenly(options.shifted if options.shifted is not None else options.test)
    kinds = [types[index % len(types)] for index in range(len(images))]
    parts: dict[Role, ImageFolder] = {"train": train, "validation": validation, "test": test}
    return {
        **{role: _source(options, role, f"ImageNet {role}", role, part) for role, part in parts.items()},
        **{source.name: source for source in _shifted(options, images, types, published, kinds)},
        **_outliers(options),
    }


# --- without training images: cross-fitting


def _folds(options: DataOptions) -> list[dict[str, Source]]:
    images = open_imagenet(data_directory(options.directory), "val", prepare=_preparation(options))
    ranks = _ranks(images.labels)
    counts = torch.bincount(images.labels)
    fewest = int(counts[counts > 0].min())
    if fewest < FOLDS:
        raise DataError(f"a cross-fit requires at least {FOLDS} images of each class, but one class has only {fewest}.")
    whole = _source(options, "images", "ImageNet validation images", "test", images)
    types, published = _types(options)
    indices = _chosen(images, ranks, options.shifted or options.test, fewest, len(types))
    shifted = images.part(indices)
    present = torch.unique(shifted.labels)
    kinds = [types[int(torch.searchsorted(present, label)) % len(types)] for label in shifted.labels]
    shifts = _shifted(options, shifted, types, published, kinds)
    outliers = _outliers(options)
    folds: list[dict[str, Source]] = []
    for turn in range(FOLDS):
        fold: dict[str, Source] = {
            role: whole.part(_indices(ranks, fifths, turn).tolist(), name=role, title=title, role=role)
            for role, (title, fifths) in PARTS.items()
        }
        # The images are sorted by their index within the class and then by class, so that the types alternate.
        tested = _indices(ranks[indices], PARTS["test"][1], turn)
        order = tested[torch.argsort(ranks[indices][tested], stable=True)].tolist()
        folds.append({**fold, **{source.name: source.part(order) for source in shifts}, **outliers})
    return folds


def _ranks(labels: Tensor) -> Tensor:
    # Return the index of each image among the images in its class, counting from 0.
    ranks = torch.zeros_like(labels)
    counts = dict[int, int]()
    for index, label in enumerate(labels.tolist()):
        ranks[index] = counts.get(label, 0)
        counts[label] = int(ranks[index]) + 1
    return ranks


def _indices(ranks: Tensor, wanted: Sequence[int], turn: int) -> Tensor:
    # Return the indices of the images in the requested fifths of each class.
    fifths = torch.tensor([(fifth + turn) % FOLDS for fifth in wanted])
    return torch.nonzero(torch.isin(ranks % FOLDS, fifths)).flatten()


def _chosen(images: ImageFolder, ranks: Tensor, limit: int | None, fewest: int, types: int) -> Tensor:
    # Return the images to shift: the same number from each chosen class, with the same number of classes for each type of corruption.
    classes = torch.unique(images.labels)
    wanted = len(classes) if limit is None else min(len(classes), limit // fewest)
    count = max(types, wanted // types * types)
    if count > len(classes):
        raise DataError(
            f"{len(classes)} classes are too few for {types} types of corruption. Choose fewer types with --types."
        )
    chosen = classes[even_indices(len(classes), count)]
    return torch.nonzero(torch.isin(images.labels, chosen) & (ranks < fewest)).flatten()


IMAGENET = Suite(
    name="imagenet",
    title="ImageNet",
    builders={"wrn-50-2": partial(build_network, "wrn-50-2", CLASSES)},
    classes=(),
    recipe=Recipe(epochs=90, batch_size=256, learning_rate=0.1, weight_decay=1e-4, optimiser="sgd", augment=True),
    threshold=None,
    shift={"title": "ImageNet-C", "axis": "severity"},
    make_sources=_sources,
    options=frozenset({"train", "test", "shifted", "outliers", "normalisation", "image_size", "types", "cross_fit"}),
    make_folds=_folds,
    components=3,
    cost_images=128,
    cost_of_training=False,
    notes=(
        "The paper's threshold for ImageNet is not known; 0.01 below the networks' accuracy is used.",
        "With training images, a fifth of ImageNet's validation images are used to tune the prior precision, and the others for "
        "testing; each test image is corrupted once at each severity, with the types assigned in turn.",
    ),
    fold_notes=(
        "The training images are not available. Of every five validation images, two are used for fitting, one for tuning and "
        "two for testing, in five rotations. Every image is used for testing in two rotations. All rotations use the same "
        "networks and outliers.",
        "All images of a class have the same type of corruption, so types are compared on different classes.",
    ),
)
"""The paper's experiment with ImageNet-C, using trained networks that the user provides."""
