"""All suites, keyed by name."""

from __future__ import annotations

from mola.lab.suite import Suite
from mola.lab.suites.cifar10 import CIFAR10
from mola.lab.suites.clinc import CLINC
from mola.lab.suites.digits import DIGITS
from mola.lab.suites.imagenet import IMAGENET
from mola.lab.suites.mnist import MNIST
from mola.options import one_of

SUITES: dict[str, Suite] = {suite.name: suite for suite in (DIGITS, MNIST, CIFAR10, IMAGENET, CLINC)}


def find_suite(name: str) -> Suite:
    """Return the suite with the given name; raise `OptionError` if the name is unknown."""
    return SUITES[one_of(name, tuple(SUITES), "suite")]
