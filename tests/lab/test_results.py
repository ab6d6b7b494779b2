"""Published numbers: the results page agrees with the committed records, and today's code still gives the records' numbers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from mola.app.jobs.evaluate import run_evaluate
from mola.app.jobs.fit import run_fit
from mola.app.jobs.folder import open_posterior
from mola.app.jobs.job import Job
from mola.compare.results import METRICS
from mola.compare.store import Store
from mola.errors import MolaWarning
from mola.lab.activations import open_networks
from mola.lab.comparisons import COMPARISONS
from mola.lab.networks import find_networks
from mola.lab.suites.registry import find_suite
from tests.conftest import require_shared

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "results"


def _filler():
    found = importlib.util.spec_from_file_location("tables_of_docs", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_those_of_the_records():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- table:") >= 6
    assert _filler().fill(page, RESULTS) == page, "run: python docs/tables.py docs/results.md results"


def test_the_regression_pages_tables_are_those_of_the_records():
    page = (ROOT / "docs" / "regression.md").read_text(encoding="utf-8")
    assert _filler().fill(page, RESULTS) == page, "run: python docs/tables.py docs/regression.md results"


def test_the_tables_of_the_page_on_text_are_those_of_the_records():
    page = (ROOT / "docs" / "clinc.md").read_text(encoding="utf-8")
    assert page.count("<!-- table:") >= 3
    assert _filler().fill(page, RESULTS) == page, "run: python docs/tables.py docs/clinc.md results"


def test_a_number_that_is_not_a_records_is_noticed():
    page = PAGE.read_text(encoding="utf-8")
    number = re.search(r"\| MoLA \|.*?(\d\d\.\d)", page)
    forged = page[: number.start(1)] + "12.3" + page[number.end(1) :]
    assert _filler().fill(forged, RESULTS) == page


def test_a_place_for_a_table_that_there_is_not_is_an_error():
    with pytest.raises(KeyError, match="has no table 'nothing'"):
        _filler().fill("<!-- table: mnist nothing -->\n<!-- end -->", RESULTS)


RUNS = {"mnist": 5, "cifar10": 4}
"""Of each suite, as many times as five networks."""

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
    declared = {one.name: one for make in COMPARISONS.values() for one in make(find_suite(suite).budget)}
    budgets = ("SWAG", "MultiSWAG", "MIMO", "MIMO-MoLA")  # the records name the budget that was asked for
    common = {"components", "threshold", "network", "protocol", "metrics"}
    records = [one for one in Store(RESULTS).records(suite) if one.method not in budgets]
    assert len(records) > 100
    for record in records:
        own = {name: value for name, value in record.settings.items() if name not in common}
        assert own == json.loads(json.dumps(declared[record.method].settings())), record.method
        assert record.settings["metrics"] == list(METRICS)
    assert declared["MoLA (distance)"].settings() == {**declared["MoLA"].settings(), "rule": "distance"}


def test_the_networks_of_the_mnist_records_are_those_of_the_repository():
    """Trained anew on another processor they differ in their last bits, and so does every number: they are kept."""
    suite = find_suite("mnist")
    name, build = suite.builder(None)
    kept = open_networks(find_networks(ROOT / "networks" / "mnist"), build, name)
    runs = {record.run: record.networks for record in Store(RESULTS).records("mnist") if record.method == "DE"}
    assert [network.checksum for network in kept] == [name for run in sorted(runs) for name in runs[run]]


def test_the_page_claims_a_lead_in_every_run_only_where_the_records_have_it():
    """Documentation against records: what the page says in words is read off the files that it is filled from."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    found = {
        (record.method, record.run): record for record in Store(RESULTS).records("cifar10") if record.group == "main"
    }

    def leads(name, rivals, quantity):
        runs = sorted({run for method, run in found if method == "MoLA"})
        return [all(quantity("MoLA", run, name) > quantity(other, run, name) for other in rivals) for run in runs]

    def area(method, run, name):
        return found[method, run].outliers[name].scores["max probability"]["auroc"]

    def doubt(method, run, name):
        return -found[method, run].outliers[name].confidence

    rivals = ("MAP", "DE", "LLLA", "MAP-T", "DE-T")
    always = all(all(leads(name, rivals, area)) for name in ("svhn", "cifar100"))
    claim = "**holds**, in every run, against MAP, DE and LLLA, and against their temperature-scaled forms"
    assert (f"MoLA has the best AUROC on SVHN and CIFAR-100 | {claim}" in text) is always
    assert leads("svhn", ("MAP", "DE", "LLLA"), doubt) == [False, True, True, True], "in the first run LLLA is lower"
    gap = 100 * (doubt("LLLA", 0, "svhn") - doubt("MoLA", 0, "svhn"))
    assert f"in the first run LLLA is {gap:.1f} points lower on SVHN" in text


def test_the_page_on_distance_says_in_every_run_only_where_the_records_have_it():
    """What its sentences say of runs is counted in the records: where the rule is better than the paper's, and where worse."""
    text = " ".join((ROOT / "docs" / "distance.md").read_text(encoding="utf-8").split())
    found = {
        (suite, record.method, record.run): record
        for suite in ("mnist", "cifar10")
        for record in Store(RESULTS).records(suite)
        if record.group == "main"
    }
    runs = {suite: sorted(run for one, method, run in found if (one, method) == (suite, "MoLA")) for suite in RUNS}
    assert {suite: len(some) for suite, some in runs.items()} == RUNS
    five, one = ("MoLA (distance)", "MoLA"), ("LLLA (distance)", "LLLA")

    def worse(suite, name, metric, pair):
        """In how many runs the loss is not smaller than by the paper's rule."""
        losses = [[found[suite, method, run].labelled[name].metrics[metric] for method in pair] for run in runs[suite]]
        return sum(ours >= paper for ours, paper in losses)

    def turned(metric, pair, *angles):
        return [worse("mnist", f"rotation {angle}", metric, pair) for angle in angles]

    assert "Under corruption of CIFAR-10 from severity 3 on, in every run, in log-likelihood and in calibration" in text
    assert (
        "On every set of outliers of both suites, in every run, by confidence alone: their mean confidence falls"
        in text
    )
    assert "All this for one network as for five." in text
    for ours, paper in (five, one):
        for metric in ("nll", "ece"):
            assert [worse("cifar10", f"severity {level}", metric, (ours, paper)) for level in (3, 4, 5)] == [0, 0, 0]
        for suite in RUNS:
            for run in runs[suite]:
                for name, before in found[suite, paper, run].outliers.items():
                    after = found[suite, ours, run].outliers[name]
                    assert after.confidence < before.confidence, (suite, ours, run, name)
                    area, other = (each.scores["max probability"]["auroc"] for each in (after, before))
                    assert area > other, (suite, ours, run, name)

    assert "rotated by 45 to 135 degrees, with five networks in every run, in log-likelihood and in calibration" in text
    middle = range(45, 136, 15)
    assert not any(turned("nll", five, *middle) + turned("ece", five, *middle))
    assert "with one network in calibration in every run, in log-likelihood in every run up to 75 degrees." in text
    assert not any(turned("ece", one, *middle) + turned("nll", one, 45, 60, 75))

    assert "than the paper's rule at the same mean confidence, in every run" in text
    assert worse("cifar10", "test", "nll", five) == RUNS["cifar10"]
    assert "On MNIST's test data it is better in both" in text
    assert [worse("mnist", "test", metric, five) for metric in ("nll", "ece")] == [0, 0]
    assert "On MNIST at 15 and 30 degrees, which the networks cope with, it doubts too early" in text
    assert turned("nll", five, 15, 30) == [5, 5]
    assert "calibration is better there in every run" in text
    assert turned("ece", five, 150, 165, 180) == [0, 0, 0]
    assert "the log-likelihood worse, at 150 degrees in three runs of five and from 165 on in all" in text
    assert turned("nll", five, 150, 165, 180) == [3, 5, 5]
    assert (
        "in one run of five at 90 and 105 degrees, in two at 120 and 135, in three at 150, and from 165 degrees on in all"
        in text
    )
    assert turned("nll", one, 90, 105, 120, 135, 150, 165, 180) == [1, 1, 2, 2, 3, 5, 5]
    assert "from 165 degrees on in all, where in one run calibration is worse, too" in text
    assert turned("ece", one, 165, 180) == [1, 1]


# --- the numbers themselves, made again -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made_again(tmp_path_factory):
    """The first run of the MNIST suite with two networks, by the commands: other code than `mola bench`, the same images."""
    root = tmp_path_factory.mktemp("again")
    for name, folder in (("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")):
        shutil.copytree(require_shared(name), root / folder / "raw")
    job = Job(
        network=("lenet",),
        weights=tuple(str(ROOT / "networks" / "mnist" / f"{index:02d}.safetensors") for index in range(2)),
        train="mnist:train",
        val="mnist:val",
        directory=str(root),
        threshold=find_suite("mnist").threshold,
    )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings():
            # The search leaves its grid here, as it did for the record, and says so.
            warnings.simplefilter("ignore", MolaWarning)
            run_fit(job, root / "posterior")
            return run_evaluate(open_posterior(root / "posterior"), "mnist:report", ["fashion-mnist:test"])
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("method", "kept_as"),
    [*((name, name) for name in ("MAP", "MAP-T", "LLLA")), *((name, f"{name} K=2") for name in ("DE", "DE-T", "MoLA"))],
)
def test_todays_code_gives_the_recorded_numbers(made_again, method, kept_as):
    record = Store(RESULTS).read("mnist", kept_as, 0)
    found = made_again.methods[method].labelled["mnist:report"]
    out = made_again.methods[method].outliers["fashion-mnist:test"]
    kept, kept_out = record.labelled["test"], record.outliers["fashion-mnist"]
    assert (found.count, out.count) == (kept.count, kept_out.count)
    # Another processor rounds otherwise: a prediction or two of 8000 may fall on the other side of an edge.
    for name in ("accuracy", "nll", "brier", "ece", "confidence"):
        assert found.metrics[name] == pytest.approx(kept.metrics[name], abs=3e-4), name
    assert out.confidence == pytest.approx(kept_out.confidence, abs=1e-3)
    shared = {name: each for name, each in kept_out.scores.items() if name in out.scores}
    expected = {"MAP": {"max probability", "entropy", "energy", "maximum logit"}, "LLLA": {"entropy", "ood score"}}
    assert set(shared) >= expected.get(method, {"max probability"})
    for name, each in shared.items():
        assert out.scores[name]["auroc"] == pytest.approx(each["auroc"], abs=1e-4), name
        assert out.scores[name]["fpr95"] == pytest.approx(each["fpr95"], abs=2e-3), name


@pytest.mark.real_data
def test_mola_tells_outliers_apart_better_than_what_it_is_made_of(made_again):
    """The paper's claim, on numbers that this code has just computed: by the same score for all."""
    out = {method: one.outliers["fashion-mnist:test"] for method, one in made_again.methods.items()}
    for score in ("max probability", "entropy"):
        for other in ("MAP", "DE", "LLLA"):
            best, rival = (out[method].scores[score] for method in ("MoLA", other))
            assert best["auroc"] > rival["auroc"], (score, other)
    assert made_again.leads["fashion-mnist:test"]["confidence"].clear == (("MoLA",),)
    # The free score of the plain ensemble beats MoLA's confidence: it is shown, and so is who leads over all.
    assert out["DE"].scores["energy"]["auroc"] > out["MoLA"].scores["max probability"]["auroc"]
    assert made_again.leads["fashion-mnist:test"]["auroc"].best == ("MoLA", "ood score")


def test_the_ratios_of_cost_in_words_are_those_of_the_records():
    def ratio(suite, key, method, over):
        rows = {row["method"]: row for row in json.loads((RESULTS / suite / "cost.json").read_text())["rows"]}
        return rows[method][key] / rows[over][key]

    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    cifar10, mnist = (ratio(suite, "fit_seconds", "MultiSWAG", "MoLA") for suite in ("cifar10", "mnist"))
    assert (
        f"MultiSWAG takes {cifar10:.0f} times as long to fit as MoLA on CIFAR-10 and {mnist:.0f} times on MNIST" in text
    )
    predict, memory = (
        sorted(ratio(suite, key, "MultiSWAG", "MoLA") for suite in ("cifar10", "mnist"))
        for key in ("predict_seconds", "bytes")
    )
    assert f"It takes {predict[0]:.0f} to {predict[1]:.0f} times as long to predict" in text
    assert f"and {memory[0]:.0f} to {memory[1]:.0f} times the memory" in text
    cifar10, mnist = (ratio(suite, "predict_seconds", "MoLA", "DE") for suite in ("cifar10", "mnist"))
    assert f"({cifar10:.2f} and {mnist:.2f} of it; 1.06 in the paper)" in text
