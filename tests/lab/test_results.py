"""The committed records: complete, comparable, and today's code still gives their numbers."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from molaplace.cli.folder import open_posterior
from molaplace.cli.job import Job
from molaplace.errors import MolaWarning
from molaplace.evaluation import METRICS
from molaplace_lab.activations import open_networks
from molaplace_lab.comparisons import COMPARISONS, methods_of
from molaplace_lab.data.catalogue import load_images
from molaplace_lab.networks import find_networks
from molaplace_lab.records import Store
from molaplace_lab.suites.image_sources import split_validation
from molaplace_lab.suites.registry import SUITES
from tests.conftest import require_shared
from tests.workspace import evaluated, run_fit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


TRAINED = {"SWAG", "MultiSWAG", "MIMO", "MIMO-MoLA"}
WHOLE = {"MoLA (all layers)", "MoLA (subnetwork)"}


@pytest.mark.parametrize(
    ("suite", "runs", "others"),
    [
        ("mnist", 5, dict.fromkeys(TRAINED, 5) | dict.fromkeys(WHOLE, 1)),
        ("cifar10", 4, dict.fromkeys(TRAINED, 1)),
    ],
)
def test_every_run_of_the_main_methods_is_there_and_comparable(suite, runs, others):
    records = [record for record in Store(RESULTS).records(suite) if record.group == "main"]
    methods = {record.method for record in records}
    assert methods >= {"MAP", "MAP-T", "DE", "DE-T", "LLLA", "MoLA", *others}
    assert {(record.method, record.run) for record in records} == {
        (name, run) for name in methods for run in range(others.get(name, runs))
    }
    # Sets of outliers may come later: what several have is the same, and all have what any did at first.
    shared = set.intersection(*(set(record.data) for record in records))
    assert shared >= {"train", "validation", "test"}
    for name in {name for record in records for name in record.data}:
        assert len({record.data[name] for record in records if name in record.data}) == 1, name
    assert len({name for record in records if record.method == "DE" for name in record.networks}) == 5 * runs


@pytest.mark.parametrize("suite", ["mnist", "cifar10"])
def test_declared_methods_have_the_settings_of_their_records(suite):
    """So that records count: a new rule or option must leave the settings of all other methods as they were."""
    definition = SUITES[suite]
    every = [methods_of(name, definition.budget, definition.sweep) for name in COMPARISONS]
    declared = {method.name: method for methods in every for method in methods}
    budgets = ("SWAG", "MultiSWAG", "MIMO", "MIMO-MoLA")  # the records name the budget that was asked for
    common = {"components", "threshold", "network", "protocol", "metrics"}
    records = [record for record in Store(RESULTS).records(suite) if record.method not in budgets]
    assert len(records) > 100
    for record in records:
        settings = {name: value for name, value in record.settings.items() if name not in common}
        assert settings == json.loads(json.dumps(declared[record.method].settings())), record.method
        assert record.settings["metrics"] == list(METRICS)
    assert declared["MoLA (distance)"].settings() == {**declared["MoLA"].settings(), "rule": "distance"}


def test_the_networks_of_the_mnist_records_are_those_of_the_repository():
    """Trained anew on another processor they differ in their last bits, and so does every number: they are kept."""
    suite = SUITES["mnist"]
    name, build = suite.builder(None)
    networks = open_networks(find_networks(ROOT / "networks" / "mnist"), build, name)
    runs = {record.run: record.networks for record in Store(RESULTS).records("mnist") if record.method == "DE"}
    assert [network.checksum for network in networks] == [name for run in sorted(runs) for name in runs[run]]


# --- the numbers themselves, made again -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_again(tmp_path_factory):
    """The first run of the MNIST suite with two networks, by the commands: other code than `bench`, the same images."""
    root = tmp_path_factory.mktemp("again")
    for name, folder in (("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")):
        shutil.copytree(require_shared(name), root / folder / "raw")
    test = load_images("mnist", "test", root)
    val, report = split_validation(test)
    splits = {"train": load_images("mnist", "train", root), "val": val, "report": report}
    splits["fashion"] = load_images("fashion-mnist", "test", root)
    for name, images in splits.items():
        np.savez(root / f"{name}.npz", x=images.pixels.numpy(), y=images.labels.numpy())
    job = Job(
        network=("molaplace_lab.models:lenet",),
        weights=tuple(str(ROOT / "networks" / "mnist" / f"{index:02d}.safetensors") for index in range(2)),
        train=str(root / "train.npz"),
        val=str(root / "val.npz"),
        rule="threshold",
        threshold=SUITES["mnist"].threshold,
    )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings():
            # The search leaves its grid here, as it did for the record, and warns.
            warnings.simplefilter("ignore", MolaWarning)
            run_fit(job, root / "posterior")
            fitted = open_posterior(root / "posterior", trust=True)
            return evaluated(fitted, str(root / "report.npz"), str(root / "fashion.npz"))
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("method", "kept_as"),
    [*((name, name) for name in ("MAP", "MAP-T", "LLLA")), *((name, f"{name} K=2") for name in ("DE", "DE-T", "MoLA"))],
)
def test_todays_code_gives_the_recorded_numbers(made_again, method, kept_as):
    record = Store(RESULTS).read("mnist", kept_as, 0)
    (result,) = made_again.methods[method].labelled.values()
    (outlying,) = made_again.methods[method].outliers.values()
    stored = record.labelled["test"]
    stored_outlying = record.outliers["fashion-mnist"]
    assert (result.count, outlying.count) == (stored.count, stored_outlying.count)
    # Another processor rounds otherwise: a prediction or two of 8000 may fall on the other side of an edge.
    for name in ("accuracy", "nll", "brier", "ece", "confidence"):
        assert result.metrics[name] == pytest.approx(stored.metrics[name], abs=3e-4), name
    assert outlying.confidence == pytest.approx(stored_outlying.confidence, abs=1e-3)
    shared = {name: metrics for name, metrics in stored_outlying.scores.items() if name in outlying.scores}
    expected = {"MAP": {"max probability", "entropy", "energy", "maximum logit"}, "LLLA": {"entropy", "ood score"}}
    assert set(shared) >= expected.get(method, {"max probability"})
    for name, metrics in shared.items():
        assert outlying.scores[name]["auroc"] == pytest.approx(metrics["auroc"], abs=1e-4), name
        assert outlying.scores[name]["fpr95"] == pytest.approx(metrics["fpr95"], abs=2e-3), name
