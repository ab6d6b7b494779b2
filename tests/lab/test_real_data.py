"""Real networks on real images: three pretrained CIFAR-10 ResNet-20s, as in the README's table but on fewer images."""

import pytest
import torch
from benchmarks.cifar10 import evaluate, load

from tests.conftest import require_shared


@pytest.fixture(scope="module")
def rows(unpacked):
    networks = require_shared("networks/resnet20")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # Passes through the networks take all the time: 25,500 images in all, where the record has 350,000.
        heads, data = load(unpacked, networks, count=3, train=2_500, test=2_000, outliers=1_000)
        return evaluate(heads, data, structures=("kron", "kron-exact"))
    finally:
        torch.set_default_dtype(dtype)


pytestmark = pytest.mark.real_data
OUTLIERS = ("SVHN", "CIFAR-100")


@pytest.mark.parametrize("name", OUTLIERS)
def test_mola_detects_outliers_better_than_the_ensemble(rows, name):
    column = f"{name} auroc"
    for rule in ("threshold", "NLL"):
        assert rows[f"MoLA kron, {rule}"][column] > rows["DE"][column]
    assert rows["MoLA kron, threshold"][column] > rows["DE, temperature"][column]
    assert rows["LLLA kron, threshold"][column] > rows["MAP"][column]


def test_the_outlier_score_meets_its_mark(rows):
    assert rows["MoLA kron, threshold"]["SVHN auroc, ood_score"] > 0.975
    # With five networks on all the images 0.9115 (benchmarks/results); on these 0.9017, of 1,000 outliers.
    assert rows["MoLA kron, threshold"]["CIFAR-100 auroc, ood_score"] > 0.895


def test_in_distribution_nothing_is_lost(rows):
    for rule in ("threshold", "NLL"):
        row = rows[f"MoLA kron, {rule}"]
        assert row["nll"] < rows["DE"]["nll"]
        assert row["accuracy"] > rows["DE"]["accuracy"] - 0.003
    assert rows["DE"]["accuracy"] > 0.925
    assert rows["LLLA kron, NLL"]["nll"] < rows["MAP"]["nll"] - 0.1


@pytest.mark.parametrize("name", OUTLIERS)
def test_confidence_falls_outside(rows, name):
    column = f"{name} confidence"
    assert rows["MoLA kron, threshold"][column] < rows["LLLA kron, threshold"][column] < rows["MAP"][column]
    assert rows["MoLA kron, threshold"][column] < rows["DE"][column] - 0.05


def test_algorithm_1_detects_outliers_better_than_the_exact_form(rows):
    """At the confidence that both are tuned to: the reason why `kron` is the default."""
    exact, damped = rows["MoLA kron-exact, threshold"], rows["MoLA kron, threshold"]
    assert abs(exact["confidence"] - damped["confidence"]) < 0.01
    assert damped["SVHN auroc"] > exact["SVHN auroc"] + 0.01
