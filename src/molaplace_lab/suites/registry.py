"""All suites, keyed by name."""

from __future__ import annotations

from molaplace.options import one_of
from molaplace_lab.suite import Suite
from molaplace_lab.suites.cifar10 import CIFAR10
from molaplace_lab.suites.clinc import CLINC, CLINC_LORA
from molaplace_lab.suites.digits import DIGITS
from molaplace_lab.suites.imagenet import IMAGENET
from molaplace_lab.suites.mnist import MNIST
from molaplace_lab.suites.questions import QUESTIONS_LORA

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (DIGITS, MNIST, CIFAR10, IMAGENET, CLINC, CLINC_LORA, QUESTIONS_LORA)
}


def find_suite(name: str) -> Suite:
    """Return the suite with the given name; raise `OptionError` if the name is unknown."""
    return SUITES[one_of(name, tuple(SUITES), "suite")]
