"""The demo: small networks on scikit-learn's handwritten digits, compared far beyond the data. Needs no download.

`molaplace demo` runs it and writes a page. The data serve examples and tests.
"""

from molaplace.data.digits import Digits, LabelledData, digits_network, load_digits
from molaplace.demo.data import (
    natural_patches,
    rotate,
    train_digits,
    two_moons,
    uniform_noise,
)
from molaplace.demo.run import DemoResult, DemoSettings, run_demo

__all__ = [
    "DemoResult",
    "DemoSettings",
    "Digits",
    "LabelledData",
    "digits_network",
    "load_digits",
    "natural_patches",
    "rotate",
    "run_demo",
    "train_digits",
    "two_moons",
    "uniform_noise",
]
