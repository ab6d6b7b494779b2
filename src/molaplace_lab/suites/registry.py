"""All suites, keyed by name."""

from __future__ import annotations

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
