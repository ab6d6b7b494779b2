"""The demo, run for real at a reduced size: what it finds, and what it leaves on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from mola.app.cli import app
from mola.compare.demo_result import DEFAULT, METHODS, DemoSettings
from mola.compare.report.style import Drawn
from mola.compare.report.writing import write_demo
from mola.lab.demo import run_demo
from tests.pages import Page

SMALL = DemoSettings(seed=0, members=3, epochs=60, outliers=200, moons_epochs=80, map_size=25)
TINY = DemoSettings(seed=1, members=2, epochs=2, outliers=20, moons_epochs=2, map_size=5)
FIGURES = ("examples", "histograms", "reliability", "rotation", "distance", "moons")
NEAR = ("natural patches", "noise")
FAR, FAR_DIGITS = "noise \N{MULTIPLICATION SIGN}1000", "digits \N{MULTIPLICATION SIGN}1000"


@pytest.fixture(scope="module")
def runs():
    """A demo that shows something, and a tiny one twice."""
    # All here, because only here do they see the same default precision: other tests run in float64.
    with pytest.MonkeyPatch.context() as patch:  # most of the time goes by on the way
        patch.setattr("mola.lab.demo.SCALES", np.logspace(0, 6, 7))
        patch.setattr("mola.lab.demo.PRECISIONS", np.logspace(-16, 4, 11))
        result = run_demo(SMALL)
        patch.setattr("mola.lab.demo.SCALES", np.array([1.0, 1e3, 1e6]))
        patch.setattr("mola.lab.demo.PRECISIONS", np.array([1e-8, 1.0]))
        return result, run_demo(TINY), run_demo(TINY)


@pytest.fixture(scope="module")
def result(runs):
    return runs[0]


@pytest.fixture(scope="module")
def written(result, tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    assert write_demo(result, directory) == directory / "index.html"
    return directory


# --- what it finds --------------------------------------------------------------------------------------------------


def labelled(result, angle=0):
    """Metrics by method on the digits turned by an angle."""
    (name,) = (
        one.name for one in result.comparison.sets.values() if one.role in ("test", "shift") and one.level == angle
    )
    return {method: record.labelled[name].metrics for method, record in result.comparison.methods.items()}


def outliers(result, kind):
    return {method: record.outliers[kind] for method, record in result.comparison.methods.items()}


def auroc(found, score="max probability"):
    return found.scores[score]["auroc"]


def test_every_method_recognises_digits(result):
    assert list(labelled(result)) == list(METHODS)
    assert all(scores["accuracy"] > 0.93 for scores in labelled(result).values())


def test_laplace_costs_nothing_in_distribution(result):
    clean = labelled(result)
    assert clean["MoLA"]["nll"] < clean["MAP"]["nll"]
    assert clean["MoLA"]["accuracy"] > clean["MAP"]["accuracy"] - 0.01
    assert clean["MoLA"]["ece"] < clean["MAP"]["ece"] + 0.02


@pytest.mark.parametrize("kind", [*NEAR, FAR])
def test_mola_is_less_sure_of_outliers_than_map_and_tells_them_apart_better(result, kind):
    found = outliers(result, kind)
    assert found["MoLA"].confidence < found["MAP"].confidence - 0.1
    assert auroc(found["MoLA"]) > auroc(found["MAP"]) + 0.05
    assert found["MoLA"].confidence < found["DE"].confidence


def test_rotation_hurts_mola_less(result):
    assert [one.level for one in result.comparison.of_role("shift")] == list(range(15, 181, 15))
    for angle in range(30, 181, 15):
        turned = labelled(result, angle)
        assert turned["MoLA"]["nll"] < turned["MAP"]["nll"]
        assert turned["MoLA"]["confidence"] < turned["MAP"]["confidence"]
    accuracies = [labelled(result, angle)["MAP"]["accuracy"] for angle in (45, 15, 0)]
    assert accuracies == sorted(accuracies)
    assert accuracies[0] < accuracies[1] < accuracies[2]


@pytest.mark.parametrize("kind", ["noise", "test digits"])
def test_far_away_confidence_meets_its_limit_and_stays_below_the_bound(result, kind):
    distance = result.distance
    assert distance.scales[0] == 1
    assert distance.scales[-1] == pytest.approx(1e6)
    curve, limit, bound = (one[kind]["MoLA"] for one in (distance.curves, distance.limits, distance.bounds))
    assert curve[-1] == pytest.approx(limit, abs=1e-5)
    assert abs(curve[0] - limit) > 1e-4
    assert (curve <= bound + 1e-6).all()
    assert limit < 0.999
    assert distance.curves[kind]["MAP"][-1] > 0.9999


@pytest.mark.parametrize("kind", ["noise", "test digits"])
def test_by_the_default_rule_far_away_is_a_guess(result, kind):
    distance = result.distance
    assert distance.limits[kind][DEFAULT] == pytest.approx(0.1, abs=1e-6)  # ten classes
    assert distance.curves[kind][DEFAULT][-1] == pytest.approx(0.1, abs=1e-3)
    assert outliers(result, FAR_DIGITS)[DEFAULT].confidence < 0.15 < outliers(result, FAR_DIGITS)["MoLA"].confidence
    assert DEFAULT not in distance.bounds[kind], "the Theorem's bound is for logits without a distance exponent"


def test_the_default_rule_is_calibrated_in_distribution_and_cautious_outside(result):
    clean = labelled(result)
    assert clean[DEFAULT]["nll"] < clean["DE-T"]["nll"] + 0.005
    for angle in range(60, 121, 15):
        assert labelled(result, angle)[DEFAULT]["nll"] < labelled(result, angle)["DE-T"]["nll"]
    for kind in NEAR:
        assert outliers(result, kind)[DEFAULT].confidence < outliers(result, kind)["DE-T"].confidence


def test_the_bound_bites_at_small_prior_precisions_and_is_never_crossed(result):
    distance = result.distance
    assert (distance.limit <= distance.bound + 1e-12).all()
    assert (np.diff(distance.bound) >= -1e-12).all()
    assert distance.bound[0] < 0.2
    assert distance.bound[-1] > 0.999
    assert distance.limit[0] == pytest.approx(0.1, abs=0.01)  # ten classes, and nothing known


def test_on_two_moons_map_is_sure_nearly_everywhere_and_mola_is_not(result):
    maps = result.moons.maps
    assert all(confidence.shape == (25, 25) for confidence in maps.values())
    assert all(confidence.min() >= 0.5 for confidence in maps.values())
    assert maps["MAP"].mean() > 0.97
    assert maps["MoLA"].mean() < maps["DE"].mean() < maps["MAP"].mean()


def test_the_same_seed_gives_the_same_numbers(runs):
    _, tiny, again = runs
    assert tiny.comparison.records == again.comparison.records
    for method in METHODS:
        np.testing.assert_array_equal(tiny.moons.maps[method], again.moons.maps[method])
    np.testing.assert_array_equal(tiny.distance.bound, again.distance.bound)


# --- what it leaves on disk -----------------------------------------------------------------------------------------


def test_the_page_holds_every_figure_and_loads_nothing(written, result):
    page = Page((written / "index.html").read_text(encoding="utf-8"))
    for name in FIGURES:
        assert any(one.startswith(f"{name}-") for one in page.ids), name
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert page.tags.count("svg") == len(FIGURES)
    stored = json.loads((written / "numbers.json").read_text(encoding="utf-8"))
    assert stored["methods"]["DE"]["labelled"]["rotated by 45°"]["metrics"]["nll"] == labelled(result, 45)["DE"]["nll"]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _drawn_elsewhere(monkeypatch, result):
    """The command's own work, without another run and another drawing of what the tests above look at."""
    monkeypatch.setattr("mola.app.cli.demo.run_demo", lambda settings, *_: replace(result, settings=settings))
    monkeypatch.setattr("mola.compare.report.writing.render", lambda name, _: Drawn(name, "", "", "<svg ></svg>", b""))


@pytest.mark.usefixtures("_drawn_elsewhere")
def test_the_command_prints_the_tables_and_writes_the_page(result, tmp_path):
    outcome = CliRunner().invoke(app, ["demo", "--seed", "7", "--output", str(tmp_path / "deep" / "out")])
    assert outcome.exit_code == 0, outcome.output
    for method in METHODS:
        assert f"{100 * auroc(outliers(result, 'noise')[method]):.1f}" in outcome.stdout
    assert "ood_score" in outcome.stdout
    assert "drawing moons" in outcome.stderr
    stored = json.loads((tmp_path / "deep" / "out" / "numbers.json").read_text(encoding="utf-8"))
    assert stored["settings"] == asdict(DemoSettings(seed=7))
    assert "mola demo --seed 7" in (tmp_path / "deep" / "out" / "index.html").read_text(encoding="utf-8")
