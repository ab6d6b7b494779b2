"""What figures show, read from matplotlib's objects: bands, intervals, shares, wrong classes, and the course of a watch."""

import numpy as np
import pytest

from molaplace.evaluation import SetInfo
from molaplace.report.curves import Line, Panel, draw_panels, draw_reliability
from molaplace.report.pictures import draw_histograms
from molaplace.report.style import COLOURS, strokes
from molaplace.report.watch_page import draw_evidence, draw_scores
from molaplace_lab.examples import Examples, Pictures
from molaplace_lab.report.examples import draw_examples

STYLES = strokes(["MAP", "MoLA"])


def test_a_method_has_one_style_whatever_stands_beside_it():
    several = strokes(["another", "DE", "DE-T", "MoLA"])
    assert several["MoLA"] == STYLES["MoLA"] == {"color": COLOURS["MoLA"], "linestyle": "-"}
    assert len({str(style) for style in several.values()}) == 4


def test_a_band_is_one_error_above_and_below_its_line():
    line = Line([0.0, 1.0], [2.0, 3.0], "MAP", STYLES["MAP"], error=[0.5, 0.25])
    (axis,) = draw_panels([Panel("", [line])]).axes
    (band,) = axis.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners >= {(0.0, 1.5), (0.0, 2.5), (1.0, 2.75), (1.0, 3.25)}


def test_bars_of_a_reliability_diagram_are_wilsons_intervals():
    """At both ends p, the observed accuracy is 1.96 standard deviations away from p. Tiny bins are left out."""
    bins = [[50, 40.0, 42], [2, 1.5, 1], [30, 29.0, 30]]
    (axis,) = draw_reliability({"MAP": {"test": bins}}, {"MAP": STYLES["MAP"]}).axes
    (bars,) = axis.collections
    points = axis.lines[1].get_xydata()
    np.testing.assert_allclose(points, [[0.8, 0.84], [29 / 30, 1.0]])
    for count, (_, accuracy), ends in zip((50, 30), points, bars.get_segments(), strict=True):
        for p in ends[:, 1]:
            assert abs(accuracy - p) == pytest.approx(1.96 * np.sqrt(p * (1 - p) / count), abs=1e-9)


def test_histograms_show_shares():
    test = SetInfo("test", "test", "test", 10)
    outliers = SetInfo("far", "far", "outlier", 5)
    histograms = {"MAP": {"test": [1, 9], "far": [4, 1]}}
    figure = draw_histograms(lambda quantity: {}, test, [outliers], histograms, STYLES)
    shares = {tuple(patch.get_data().values.tolist()) for patch in figure.axes[0].patches}
    assert shares == {(0.1, 0.9), (0.8, 0.2)}


def test_bars_of_wrong_classes_are_hollow():
    info = SetInfo("test", "test", "test", 2)
    pictures = {"test": Pictures(np.zeros((2, 4, 4, 1), dtype=np.uint8), (3, 5))}
    examples = {"MAP": {"test": Examples([0.5, 1.0], [3, 4])}}
    (axis,) = draw_examples([info], pictures, examples, {"MAP": STYLES["MAP"]}).axes
    right, wrong = axis.patches[1::2]  # each behind the background of its bar
    assert (right.get_facecolor()[3], wrong.get_facecolor()[3]) == (1, 0)
    assert wrong.get_width() == pytest.approx(2 * right.get_width())


def test_a_watch_shows_medians_and_powers_of_ten():
    lines = [
        {"inputs": 40, "began": None, "scores": [0, 1, 2, 3, 4], "evidence": 0.0, "threshold": np.log(100)},
        {"inputs": 80, "began": 30, "scores": [1, 2, 3.5, 4, 5], "evidence": np.log(1000), "threshold": np.log(100)},
        {"inputs": 120, "began": 50, "scores": [1, 2, 3.5, 4, 5], "evidence": 99.0, "threshold": np.log(100)},
    ]
    change, scores, *validation = draw_scores(lines, [0.5, 1.5]).axes[0].lines
    np.testing.assert_allclose(scores.get_xydata(), [[40, 2], [80, 3.5], [120, 3.5]])
    assert [line.get_ydata()[0] for line in validation] == [0.5, 1.5]
    assert change.get_xdata()[0] == 50, "the date of the last line"
    _, evidence, threshold = draw_evidence(lines).axes[0].lines
    np.testing.assert_allclose(evidence.get_ydata(), [0, 3, 12], atol=1e-12)
    assert threshold.get_ydata()[0] == pytest.approx(2)
