"""All suites, keyed by name."""

from __future__ import annotations

from molaplace.lab.suite import Suite
from molaplace.lab.suites.cifar10 import CIFAR10
from molaplace.lab.suites.clinc import CLINC
from molaplace.lab.suites.digits import DIGITS
from molaplace.lab.suites.imagenet import IMAGENET
from molaplace.lab.suites.mnist import MNIST
from molaplace.options import one_of

SUITES: dict[str, Suite] = {suite.name: suite for suite in (DIGITS, MNIST, CIFAR10, IMAGENET, CLINC)}


def find_suite(name: str) -> Suite:
    """Return the suite with the given name; raise `OptionError` if the name is unknown."""
    return SUITES[one_of(name, tuple(SUITES), "suite")]
