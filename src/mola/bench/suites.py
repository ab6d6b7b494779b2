"""All suites, by name."""

from __future__ import annotations

from mola.bench.cifar10_suite import CIFAR10
from mola.bench.digits_suite import DIGITS
from mola.bench.imagenet_suite import IMAGENET
from mola.bench.mnist_suite import MNIST
from mola.bench.suite import Suite
from mola.choices import one_of

__all__ = ["SUITES", "find_suite"]

SUITES: dict[str, Suite] = {suite.name: suite for suite in (DIGITS, MNIST, CIFAR10, IMAGENET)}


def find_suite(name: str) -> Suite:
    """The suite of that name; `OptionError` listing the known ones, if there is none."""
    return SUITES[one_of(name, tuple(SUITES), "suite")]
