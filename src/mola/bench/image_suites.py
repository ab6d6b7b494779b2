"""The suites whose images fit in memory: embedded digits, MNIST, CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mola.bench.digits import ANGLES, build_network
from mola.bench.suite import DataOptions, Role, Shift, Source, Suite, TrainingData, from_memory
from mola.choices import one_of
from mola.data.augment import flip_and_crop
from mola.data.catalogue import DATASETS, has_images, load_images, split_validation
from mola.data.cifar10_c import has_cifar10_c, load_cifar10_c
from mola.data.corruptions import CORRUPTIONS, PAPER_CORRUPTIONS, corrupt
from mola.data.digits import SIDE, load_digits
from mola.data.images import Images
from mola.data.labelled import Labelled
from mola.data.normalisation import normalisation
from mola.data.outliers import natural_patches, uniform_noise
from mola.data.rotation import rotate
from mola.errors import DataError, warn
from mola.models.registry import build_network as build_registered
from mola.training import RECIPES, Recipe

__all__ = ["CIFAR10", "DIGITS", "MNIST"]

Change = Callable[[Images], Images]

CORRUPTION_SETS = {"paper": PAPER_CORRUPTIONS, "all": CORRUPTIONS}

CORRUPTION_SEED = 0


def _limited(images: Images, count: int | None) -> Images:
    return images if count is None else images.evenly(count)


def _source(
    options: DataOptions,
    default: str,
    name: str,
    title: str,
    role: Role,
    images: Images,
    *,
    change: Change = lambda images: images,
    changed_by: tuple[object, ...] = (),
    level: float = 0.0,
) -> Source:
    chosen = options.normalisation or default
    made_by = ("normalisation", chosen, *changed_by)
    # Small colour batches stay in the processor's cache: measured, a tenth faster than larger ones.
    size = 32 if images.pixels.shape[1] > 1 else 128
    return from_memory(
        name, title, role, images, normalisation(chosen), made_by=made_by, change=change, level=level, batch_size=size
    )


def _rotated(degrees: float, interpolation: str) -> Change:
    def change(images: Images) -> Images:
        turned = rotate(images.pixels.float(), degrees, interpolation=interpolation)
        return Images(turned.round().to(torch.uint8), images.labels)

    return change


def corrupted(images: Images, severity: int, types: tuple[str, ...]) -> Images:
    """Every image corrupted once, the types dealt in turn: image i gets type i modulo their number."""

    def generate(corruption: str, rows: slice) -> Images:
        chosen = images.part(rows)
        return Images(corrupt(chosen.pixels, corruption, severity, seed=CORRUPTION_SEED), chosen.labels)

    return _dealt(images, types, generate)


def _published(images: Images, severity: int, types: tuple[str, ...], options: DataOptions) -> Images:
    """The same, from the published files; `images` are the first of the test set."""

    def read(corruption: str, rows: slice) -> Images:
        _, test = split_validation(load_cifar10_c(corruption, severity, options.directory))
        return _limited(test, options.test).part(slice(0, len(images))).part(rows)

    return _dealt(images, types, read)


def _dealt(images: Images, types: tuple[str, ...], make: Callable[[str, slice], Images]) -> Images:
    pixels = images.pixels.clone()
    for index, corruption in enumerate(types[: len(images)]):
        rows = slice(index, None, len(types))
        made = make(corruption, rows)
        if not torch.equal(made.labels, images.labels[rows]):
            message = (
                f"the labels of CIFAR-10-C's {corruption} are not those of the CIFAR-10 test set: fetch both again."
            )
            raise DataError(message)
        pixels[rows] = made.pixels
    return Images(pixels, images.labels)


def _outlier(options: DataOptions, name: str) -> Images | None:
    """A set of outliers; one that is not in the data directory is left out, and said so."""
    if not options.download and not has_images(name, "test", options.directory):
        warn(f"{DATASETS[name].title} is not in the data directory and is left out of the comparison.")
        return None
    return _limited(load_images(name, "test", options.directory, download=options.download), options.outliers)


def _in_distribution(name: str, title: str, normal: str, options: DataOptions) -> dict[str, Source]:
    directory, download = options.directory, options.download
    train = _limited(load_images(name, "train", directory, download=download), options.train)
    validation, test = split_validation(load_images(name, "test", directory, download=download))
    parts: dict[Role, Images] = {"train": train, "validation": validation, "test": _limited(test, options.test)}
    return {role: _source(options, normal, role, f"{title} {role}", role, images) for role, images in parts.items()}


def _test_images(name: str, options: DataOptions) -> Images:
    _, test = split_validation(load_images(name, "test", options.directory, download=options.download))
    return _limited(test, options.test)


def _outliers(options: DataOptions, normal: str, titles: dict[str, str]) -> dict[str, Source]:
    found = {name: _outlier(options, name) for name in titles}
    return {
        name: _source(options, normal, name, titles[name], "outlier", images)
        for name, images in found.items()
        if images is not None
    }


MNIST_OUTLIERS = {"fashion-mnist": "FMNIST", "emnist-letters": "EMNIST", "kmnist": "KMNIST", "notmnist": "notMNIST"}


def _mnist_sources(options: DataOptions) -> dict[str, Source]:
    test = _test_images("mnist", options)
    rotations = {
        f"rotation {angle}": _source(
            options,
            "none",
            f"rotation {angle}",
            f"MNIST turned by {angle}°",
            "shift",
            test,
            change=_rotated(angle, "nearest"),
            changed_by=("rotation", angle, "nearest"),
            level=angle,
        )
        for angle in ANGLES[1:]
    }
    return {
        **_in_distribution("mnist", "MNIST", "none", options),
        **rotations,
        **_outliers(options, "none", MNIST_OUTLIERS),
    }


def _training(name: str, normal: str, *, augment: bool) -> Callable[[DataOptions], TrainingData]:
    def read(options: DataOptions) -> TrainingData:
        images = _limited(load_images(name, "train", options.directory, download=options.download), options.train)
        normalise = normalisation(options.normalisation or normal)

        def prepare(pixels: Tensor) -> Tensor:
            # The training loop seeds torch's own generator, and keeps its state in checkpoints.
            return normalise(flip_and_crop(pixels, torch.default_generator) if augment else pixels)

        return TrainingData(Labelled(images.pixels, images.labels), prepare)

    return read


MNIST = Suite(
    name="mnist",
    title="MNIST",
    builders={"lenet": lambda: build_registered("lenet", 10)},
    classes=tuple("0123456789"),
    recipe=RECIPES["mnist"],
    threshold=0.98,
    shift=Shift("rotation", "Rotated MNIST", "angle in degrees", tuple(float(angle) for angle in ANGLES)),
    make_sources=_mnist_sources,
    training_data=_training("mnist", "none", augment=False),
)
"""The paper's MNIST-R and MNIST against outliers. 0.98 is the paper's threshold for networks of 99.2 %."""

SEVERITIES = (1, 2, 3, 4, 5)

CIFAR10_OUTLIERS = {"svhn": "SVHN", "lsun": "LSUN", "cifar100": "CIFAR-100"}


def _cifar10_sources(options: DataOptions) -> dict[str, Source]:
    types = CORRUPTION_SETS[one_of(options.corruptions, tuple(CORRUPTION_SETS), "corruptions")]
    test = _test_images("cifar10", options)

    published = has_cifar10_c(types, options.directory)
    origin = "CIFAR-10-C" if published else "CIFAR-10-C, generated,"
    made_by = ("published",) if published else (CORRUPTION_SEED,)

    def change(severity: int) -> Change:
        if published:
            return lambda images: _published(images, severity, types, options)
        return lambda images: corrupted(images, severity, types)

    severities = {
        f"severity {severity}": _source(
            options,
            "cifar10",
            f"severity {severity}",
            f"{origin} at severity {severity}",
            "shift",
            test,
            change=change(severity),
            changed_by=("corruption", severity, list(types), *made_by),
            level=severity,
        )
        for severity in SEVERITIES
    }
    return {
        **_in_distribution("cifar10", "CIFAR-10", "cifar10", options),
        **severities,
        **_outliers(options, "cifar10", CIFAR10_OUTLIERS),
    }


CIFAR10_NETWORKS = ("wrn-16-4", "resnet-20", "resnet-32", "resnet-44", "resnet-56", "resnet-110")

CIFAR10 = Suite(
    name="cifar10",
    title="CIFAR-10",
    builders={name: (lambda name=name: build_registered(name, 10)) for name in CIFAR10_NETWORKS},  # type: ignore[misc]
    classes=("aeroplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "lorry"),
    recipe=RECIPES["cifar10"],
    threshold=None,
    shift=Shift("severity", "CIFAR-10-C", "severity", (0.0, *(float(severity) for severity in SEVERITIES))),
    make_sources=_cifar10_sources,
    training_data=_training("cifar10", "cifar10", augment=True),
    notes=(
        "At each severity every test image is corrupted once, the types dealt in turn. Without the published files in the data "
        "directory the images are generated from the published parameters, frost with a synthetic texture.",
    ),
)
"""The paper's CIFAR-10-C and CIFAR-10 against outliers. Its threshold of 0.94 is for networks of 94.8 %."""


@cache
def _digits(train: int | None) -> tuple[Images, Images, Images]:
    digits = load_digits(0)

    def images(data: Labelled) -> Images:
        return Images((255 * data.inputs).round().to(torch.uint8), data.labels)

    return _limited(images(digits.train), train), images(digits.val), images(digits.test)


def _digits_sources(options: DataOptions) -> dict[str, Source]:
    train, validation, test = _digits(options.train)
    test = _limited(test, options.test)
    count = options.outliers or 500
    parts: dict[Role, Images] = {"train": train, "validation": validation, "test": test}
    sources: dict[str, Source] = {}
    for role, images in parts.items():
        sources[role] = _source(options, "none", role, f"digits {role}", role, images)
    for angle in ANGLES[1:]:
        name = f"rotation {angle}"
        sources[name] = _source(
            options,
            "none",
            name,
            f"digits turned by {angle}°",
            "shift",
            test,
            change=_rotated(angle, "bilinear"),
            changed_by=("rotation", angle, "bilinear"),
            level=angle,
        )
    outliers = {"natural patches": natural_patches(count, SIDE), "noise": uniform_noise(count, SIDE)}
    for name, pixels in outliers.items():
        images = Images((255 * pixels).round().to(torch.uint8), torch.zeros(len(pixels), dtype=torch.int64))
        sources[name] = _source(options, "none", name, name, "outlier", images)
    return sources


def _digits_training(options: DataOptions) -> TrainingData:
    train, _, _ = _digits(options.train)
    return TrainingData(Labelled(train.pixels, train.labels), normalisation("none"))


DIGITS = Suite(
    name="digits",
    title="Handwritten digits",
    builders={"mlp": build_network},
    classes=tuple("0123456789"),
    recipe=Recipe(epochs=60),
    threshold=None,
    shift=Shift("rotation", "Rotated digits", "angle in degrees", tuple(float(angle) for angle in ANGLES)),
    make_sources=_digits_sources,
    training_data=_digits_training,
)
"""Everything in a minute, with data that come with scikit-learn."""
