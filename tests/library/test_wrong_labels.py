"""Labels and outputs that do not fit together are named, whatever the likelihood."""

import re

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.likelihoods import Gaussian

COUNT = 60
RANDOM = torch.Generator().manual_seed(0)
ROWS = torch.randn(COUNT, 4, generator=RANDOM)
PICTURES = torch.randn(COUNT, 1, 5, 7, generator=RANDOM)
INDICES = torch.randint(3, (COUNT,), generator=RANDOM)


def rows(outputs):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


def maps(height, width):
    return torch.randint(3, (COUNT, height, width), generator=RANDOM)


PIXELS = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))

CASES = {
    # name: network, inputs, labels, likelihood, words
    "numbers for softmax": (rows(3), ROWS, ROWS[:, 0], "categorical", "likelihood='gaussian'"),
    "indices for bernoulli": (rows(3), ROWS, INDICES, "bernoulli", "use likelihood='categorical'"),
    "indices for one logit": (rows(1), ROWS, INDICES, "bernoulli", "must be 0 or 1, got"),
    "a label for too few outputs": (rows(3), ROWS, (ROWS[:, :2] > 0).double(), "bernoulli", "shape (60, 3)"),
    "indices for numbers": (rows(3), ROWS, INDICES, "gaussian", "use likelihood='categorical'"),
    "one output where two are needed": (
        rows(1), ROWS, ROWS[:, :1], Gaussian(heteroscedastic=True), "two outputs for each target"),
    "two outputs where one is needed": (rows(2), ROWS, ROWS[:, :1], "gaussian", "heteroscedastic=True"),
    "label maps of another size": (PIXELS, PICTURES, maps(10, 14), "categorical", "nearest-neighbour"),
    "label maps for bernoulli": (PIXELS, PICTURES, maps(5, 7), "bernoulli", "likelihood='categorical'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_labels_that_do_not_fit_the_outputs_are_named(case):
    network, inputs, labels, likelihood, words = CASES[case]
    with pytest.raises(mola.errors.MolaError, match=re.escape(words)):
        mola.fit(network, [(inputs, labels)], likelihood=likelihood, progress=False)
