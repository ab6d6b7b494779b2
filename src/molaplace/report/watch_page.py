"""The page of `molaplace watch`: the course of the scores, of the evidence and of the expected accuracy, and the inputs to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from molaplace import __version__
from molaplace.report.style import COLOURS, INK, Figure, Planned, canvas, quiet_axes, render
from molaplace.report.writing import render_page

WIDTH = 4.8
"""Width of a figure in inches: all of it fits on a phone, because the latest inputs are on the right."""

HEIGHT = 2.1
LARGEST = 12.0
"""Power of ten at which the evidence is cut off in the figure."""

SCORES = (
    "Outlier scores of each run: the median, and the ranges of the middle 50 % and 90 % of its inputs. The dashed lines are the same "
    "quantiles of the validation data."
)
EVIDENCE = (
    "Capital of bets that the inputs have changed, which began at 1. If nothing changes, it falls, and the probability that it ever "
    "reaches the dashed line, where the alarm is raised, is at most alpha. After an alarm, it may fall again, because the ranks then "
    "include the new inputs. The figure ends at 1e12."
)
ACCURACY = (
    "Expected accuracy of the recent inputs, from their confidence, with a 95 % interval that counts the sampling error. The dashed line "
    "is the accuracy on the validation data. Where there is no line, the accuracy could not be estimated."
)


def watch_page(
    lines: Sequence[Mapping[str, Any]],
    quantiles: Sequence[float],
    accuracy: float | None,
    sentences: Sequence[str],
    title: str,
    pictures: Sequence[Mapping[str, Any]],
) -> str:
    """Return the page.

    Args:
        lines: the lines of the log.
        quantiles: quantiles of the scores of the validation data, at the levels 0.05, 0.25, 0.5, 0.75 and 0.95.
        accuracy: accuracy on the validation data, if known.
        sentences: the alarm, the accuracy and the inputs to look at, in words.
        title: what these inputs are.
        pictures: name, score and picture (a data URL, or None) of these inputs.
    """
    figures = {"evidence": Planned("Evidence of a change", EVIDENCE, partial(draw_evidence, lines))}
    if any(line["accuracy"] is not None for line in lines):
        figures["accuracy"] = Planned("Expected accuracy", ACCURACY, partial(draw_accuracy, lines, accuracy))
    figures["scores"] = Planned("Outlier scores", SCORES, partial(draw_scores, lines, quantiles))
    return render_page(
        "watch",
        lines=lines,
        sentences=sentences,
        title=title,
        pictures=pictures,
        figures=[render(name, planned) for name, planned in figures.items()],
        version=__version__,
    )


def _panel(lines: Sequence[Mapping[str, Any]], label: str) -> tuple[Figure, Any, np.ndarray[Any, Any]]:
    # A figure with one panel, and the number of inputs after each run. A single run is drawn as a dot.
    figure, (panel,) = canvas(1, 1, HEIGHT, WIDTH)
    quiet_axes(panel)
    inputs = np.array([line["inputs"] for line in lines], dtype=float)
    panel.set(xlabel="inputs", ylabel=label, xlim=(0, 1.02 * inputs.max(initial=1)))
    began = next((line["began"] for line in reversed(lines) if line["began"] is not None), None)
    if began is not None:
        panel.axvline(began, color="#d55e00", linewidth=1.0)
        panel.annotate(
            "change", (began, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
            color="#d55e00", fontsize=8, ha="center",
        )  # fmt: skip
    return figure, panel, inputs


def _line_style(count: int) -> dict[str, Any]:
    return {"color": COLOURS["MoLA"], "linewidth": 1.6, "marker": "o" if count < 30 else "", "markersize": 3}


def draw_scores(lines: Sequence[Mapping[str, Any]], quantiles: Sequence[float]) -> Figure:
    """Draw quantiles of the scores of each run, and those of the validation data."""
    figure, panel, inputs = _panel(lines, "outlier score")
    scores = np.array([line["scores"] for line in lines], dtype=float).reshape(-1, 5)
    for low, high, alpha in ((0, 4, 0.15), (1, 3, 0.3)):
        panel.fill_between(inputs, scores[:, low], scores[:, high], color=COLOURS["MoLA"], alpha=alpha, linewidth=0)
    panel.plot(inputs, scores[:, 2], **_line_style(len(lines)))
    for quantile in quantiles:
        panel.axhline(quantile, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
    return figure


def draw_evidence(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the capital as a power of ten, and the threshold of the alarm."""
    figure, panel, inputs = _panel(lines, "evidence")
    powers = np.array([line["evidence"] for line in lines], dtype=float) / np.log(10)
    panel.plot(inputs, np.minimum(powers, LARGEST), **_line_style(len(lines)))
    for line in lines[-1:]:
        threshold = line["threshold"] / np.log(10)
        panel.axhline(threshold, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        panel.annotate(
            "alarm", (0.01, threshold), xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points", fontsize=8
        )  # fmt: skip
    panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.yaxis.set_major_formatter(lambda power, _: f"1e{power:.0f}" if power else "1")
    return figure


def draw_accuracy(lines: Sequence[Mapping[str, Any]], accuracy: float | None) -> Figure:
    """Draw the expected accuracy with its band, with gaps where it could not be estimated."""
    figure, panel, inputs = _panel(lines, "expected accuracy, %")
    value, low, high = (
        100 * np.array([np.nan if line[name] is None else line[name] for line in lines], dtype=float)
        for name in ("accuracy", "low", "high")
    )
    panel.fill_between(inputs, low, high, color=COLOURS["MoLA"], alpha=0.2, linewidth=0)
    panel.plot(inputs, value, **_line_style(len(lines)))
    if accuracy is not None:
        panel.axhline(100 * accuracy, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
    return figure
