"""The demo, run for real at a reduced size: what it finds, and what it leaves on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from molaplace.cli import app
from molaplace.demo.report import write_demo
from molaplace.demo.run import (
    DEFAULT,
    DEMO_METHODS,
    ENSEMBLE,
    NOISE,
    PAPER,
    PATCHES,
    SINGLE,
    TEST,
    DemoSettings,
    map_moons,
    run_demo,
)
from tests.pages import Page

SMALL = DemoSettings(seed=0, members=3, epochs=60, outliers=200, moons_epochs=80, map_size=25)
TINY = DemoSettings(seed=1, members=2, epochs=2, outliers=20, moons_epochs=2, map_size=5)
FIGURES = ("examples", "moons", "reliability", "rotation", "histograms", "distance")


@pytest.fixture(scope="module")
def runs():
    """A demo that shows something, and a tiny demo twice."""
    # All here, because only here do they see the same default precision: other tests run in float64.
    with pytest.MonkeyPatch.context() as patch:  # fewer points: they take most of the time
        patch.setattr("molaplace.demo.run.SCALES", np.logspace(0, 6, 7))
        result = run_demo(SMALL)
        patch.setattr("molaplace.demo.run.SCALES", np.array([1.0, 1e3, 1e6]))
        return result, run_demo(TINY), run_demo(TINY)


@pytest.fixture(scope="module")
def result(runs):
    return runs[0]


def test_maps_run_from_left_to_right_and_from_bottom_to_top(monkeypatch):
    def half(axis):
        def probabilities(plane):
            probs = 0.5 + 0.5 * (plane[:, axis] > 0)
            return torch.stack([probs, 1 - probs], 1)

        return probabilities

    monkeypatch.setattr("molaplace.demo.run.demo_methods", lambda *data: {"right": half(0), "top": half(1)})
    maps = map_moons(replace(TINY, map_size=4), lambda epoch: None).maps
    assert maps["right"].tolist() == [[0.5, 0.5, 1.0, 1.0]] * 4
    assert maps["top"].tolist() == [[0.5] * 4] * 2 + [[1.0] * 4] * 2


# --- what it finds --------------------------------------------------------------------------------------------------


def labelled(result, angle, metric):
    """A metric by method on the digits turned by an angle."""
    sets = result.comparison.sets.values()
    (name,) = (info.name for info in sets if info.role in ("test", "shift") and info.level == angle)
    return {method: record.labelled[name].metrics[metric] for method, record in result.comparison.methods.items()}


def outliers(result, kind):
    """Mean confidence and AUROC by method."""
    results = {method: record.outliers[kind] for method, record in result.comparison.methods.items()}
    areas = {method: on_set.scores["max probability"]["auroc"] for method, on_set in results.items()}
    return {method: on_set.confidence for method, on_set in results.items()}, areas


def test_on_digits_laplace_costs_nothing(result):
    accuracy, nll, ece = (labelled(result, 0, metric) for metric in ("accuracy", "nll", "ece"))
    assert list(accuracy) == list(DEMO_METHODS)
    assert min(accuracy.values()) > 0.93
    assert accuracy[PAPER] > accuracy[SINGLE] - 0.01
    assert nll[PAPER] < nll[SINGLE]
    assert nll[DEFAULT] < nll[ENSEMBLE] + 0.005
    assert ece[PAPER] < ece[SINGLE] + 0.02


@pytest.mark.parametrize("kind", [PATCHES, NOISE])
def test_mola_is_less_sure_of_outliers_and_tells_them_apart_better(result, kind):
    confidence, area = outliers(result, kind)
    assert confidence[PAPER] < confidence[SINGLE] - 0.1
    assert area[PAPER] > area[SINGLE] + 0.05
    assert confidence[DEFAULT] < confidence[PAPER] < confidence[ENSEMBLE]


def test_rotation_hurts_mola_less(result):
    assert [info.level for info in result.comparison.of_role("shift")] == list(range(15, 181, 15))
    for angle in range(30, 181, 15):
        nll, confidence = (labelled(result, angle, metric) for metric in ("nll", "confidence"))
        assert nll[PAPER] < nll[SINGLE]
        assert confidence[PAPER] < confidence[SINGLE]
        if 60 <= angle <= 120:
            assert nll[DEFAULT] < nll[ENSEMBLE]
    assert labelled(result, 45, "accuracy")[SINGLE] < labelled(result, 15, "accuracy")[SINGLE] < 0.96


@pytest.mark.parametrize("kind", [NOISE, TEST])
def test_far_away_confidence_meets_its_limit_and_stays_below_the_bound(result, kind):
    distance = result.distance
    curves, limits, bounds = (by_kind[kind] for by_kind in (distance.curves, distance.limits, distance.bounds))
    assert curves[PAPER][-1] == pytest.approx(limits[PAPER], abs=1e-5)
    assert abs(curves[PAPER][0] - limits[PAPER]) > 1e-4
    assert (curves[PAPER] <= bounds[PAPER] + 1e-6).all()
    assert limits[PAPER] < 0.999
    assert curves[SINGLE][-1] > 0.9999
    # The default rule guesses among ten classes; the Theorem's bound is for logits without a distance exponent.
    assert limits[DEFAULT] == pytest.approx(0.1, abs=1e-6)
    assert curves[DEFAULT][-1] == pytest.approx(0.1, abs=1e-3)
    assert DEFAULT not in bounds


def test_on_two_moons_map_is_sure_nearly_everywhere_and_mola_is_not(result):
    maps = result.moons.maps
    assert all(confidence.shape == (25, 25) and confidence.min() >= 0.5 for confidence in maps.values())
    assert maps[SINGLE].mean() > 0.97
    assert maps[DEFAULT].mean() < maps[PAPER].mean() < maps[ENSEMBLE].mean() < maps[SINGLE].mean()


def test_the_same_seed_gives_the_same_numbers(runs):
    _, tiny, again = runs
    assert tiny.comparison.methods == again.comparison.methods
    for method in DEMO_METHODS:
        np.testing.assert_array_equal(tiny.moons.maps[method], again.moons.maps[method])
    assert tiny.distance.bounds == again.distance.bounds


# --- what it leaves on disk -----------------------------------------------------------------------------------------


def test_the_page_holds_every_figure_and_loads_nothing(result, tmp_path):
    assert write_demo(result, tmp_path) == tmp_path / "index.html"
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert page.tags.count("svg") == len(FIGURES)
    for name in FIGURES:
        assert any(identifier.startswith(f"{name}-") for identifier in page.ids), name
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_blank_figures")
def test_the_command_prints_the_main_numbers_and_writes_the_page(result, tmp_path, monkeypatch):
    monkeypatch.setattr("molaplace.cli.demo.run_demo", lambda settings, *_: replace(result, settings=settings))
    outcome = CliRunner().invoke(app, ["demo", "--seed", "7", "--output", str(tmp_path / "deep" / "out")])
    assert outcome.exit_code == 0, outcome.output
    for accuracy in labelled(result, 0, "accuracy").values():
        assert f"{100 * accuracy:.2f}" in outcome.stdout
    for confidence in outliers(result, PATCHES)[0].values():
        assert f"{100 * confidence:.0f}\N{NO-BREAK SPACE}%" in outcome.stdout
    assert "drawing moons" in outcome.stderr
    stored = json.loads((tmp_path / "deep" / "out" / "numbers.json").read_text(encoding="utf-8"))
    assert stored["settings"] == asdict(DemoSettings(seed=7))
    assert (
        stored["methods"][ENSEMBLE]["labelled"]["rotated by 45°"]["metrics"]["nll"]
        == labelled(result, 45, "nll")[ENSEMBLE]
    )
    assert "molaplace demo --seed 7" in (tmp_path / "deep" / "out" / "index.html").read_text(encoding="utf-8")
