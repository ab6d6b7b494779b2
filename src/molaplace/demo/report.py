"""The demo's page: headlines, tables and figures, made from its results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import PackageLoader
from safetensors.torch import save_file

from molaplace.demo.run import DEMO_METHODS, DemoResult
from molaplace.evaluation import Comparison
from molaplace.evaluation.catalogue import with_digits
from molaplace.progress import Progress, no_progress
from molaplace.report.comparison_tables import comparison_table, outlier_tables, test_table
from molaplace.report.curves import DOTTED, LONG_DASHES, Line, Panel, draw_against_level, draw_panels, draw_reliability
from molaplace.report.figures import RELIABILITY, SHARES, comparison_histograms
from molaplace.report.numbers import Numbers, Quantity
from molaplace.report.pictures import draw_examples, example_sets
from molaplace.report.style import Drawn, Figure, Planned, canvas, colours, strokes
from molaplace.report.tables import Table, columns_on
from molaplace.report.words import evaluation_remarks
from molaplace.report.writing import (
    PAGE,
    as_json,
    draw_figures,
    page_environment,
    render_page,
    replacing_report,
    write_texts,
)

ROTATED = with_digits({"accuracy": 1, "nll": 2, "ece": 1})
"""Metrics in the table of rotated digits."""

TABLE_ANGLES = (15, 30, 45)

ALONG_ROTATION = ("log_likelihood", "ece", "confidence")
"""Metrics plotted against the rotation."""

NETWORKS = "networks"
"""Folder of the trained networks beside the page."""


def write_demo(result: DemoResult, directory: Path, progress: Progress = no_progress) -> Path:
    """Write the page, the numbers, the figures and the trained networks; return the path of the page.

    The files are `index.html`, `numbers.json`, `figures/<name>.svg` and `.png`, and `networks/digits-<k>.safetensors`.
    """
    with replacing_report(directory) as folder:
        figures = draw_figures(demo_figures(result), folder, progress)
        (folder / NETWORKS).mkdir()
        for index, network in enumerate(result.networks):
            save_file(network.state_dict(), folder / NETWORKS / f"digits-{index}.safetensors")
        texts = {"numbers.json": as_json(result.numbers()), PAGE: demo_page(result, list(figures.values()))}
        write_texts(texts, folder)
    return directory / PAGE


def demo_page(result: DemoResult, figures: Sequence[Drawn]) -> str:
    """Return the HTML page for the demo."""
    return render_page(
        "demo",
        page_environment(PackageLoader("molaplace.demo")),
        result=result,
        headlines=demo_headlines(result.comparison),
        tables=demo_tables(result.comparison),
        sizes={info.role: info.count for info in result.comparison.sets.values()},
        figures=figures,
        remarks=demo_remarks(result),
    )


# --- words -----------------------------------------------------------------------------------------------------------


def demo_headlines(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Return the value of each method under each title: the cards at the top of the page, which the terminal also shows."""
    numbers = Numbers(comparison.methods)
    turned = next(info for info in comparison.of_role("shift") if info.level == 30)
    headlines = {
        "log loss, test digits": (Quantity(comparison.test.name, "nll"), ".3f"),
        f"log loss, {turned.title}": (Quantity(turned.name, "nll"), ".2f"),
    }
    for info in comparison.of_role("outlier"):
        if info.name != "noise":
            headlines[f"confidence in {info.title}"] = (Quantity(info.name, "confidence"), ".0%")
    return {
        title: {
            method: f"{estimate.value:{form}}".replace("%", " %")
            for method, estimate in numbers(quantity).items()
            if estimate is not None
        }
        for title, (quantity, form) in headlines.items()
    }


def demo_remarks(result: DemoResult) -> list[str]:
    """Return the remarks shown at the end of the demo's page: data, networks, tuned values and limitations."""
    sizes = {info.role: info.count for info in result.comparison.sets.values()}
    return [
        f"The data are scikit-learn's 1797 handwritten digits of 8 by 8 pixels, split at random into {sizes['train']} for training, "
        f"{sizes['validation']} for tuning and {sizes['test']} for testing. The outliers are "
        f"patches of scikit-learn's two photographs, and uniform noise.",
        f"The networks have {result.comparison.made['parameters']} weights and two hidden layers without biases. They were "
        f"trained for {result.settings.epochs} epochs with little regularisation and are therefore overconfident. "
        f"With strong weight decay, MoLA performs much like the ensemble.",
        *evaluation_remarks(result.comparison),
        "This is one run with one seed on a small data set, so small differences between methods may change sign with another seed.",
    ]


def demo_tables(comparison: Comparison) -> list[Table]:
    """Return the tables for the test digits, the rotated digits and each outlier set, with all scores."""
    turned = [info for info in comparison.of_role("shift") if info.level in TABLE_ANGLES]
    columns = [column for info in turned for column in columns_on(info.name, ROTATED, f"{info.level:g}°")]
    caption = "Test digits rotated counter-clockwise by the given angle."
    return [
        test_table(comparison),
        comparison_table(comparison, "Under rotation", caption, columns),
        *(outlier_tables(comparison, info)[0] for info in comparison.of_role("outlier")),
    ]


# --- figures ---------------------------------------------------------------------------------------------------------


def demo_figures(result: DemoResult) -> dict[str, Planned]:
    """Return the demo's figures, keyed by name, in page order."""
    comparison = result.comparison
    examples = {method: results.examples for method, results in comparison.methods.items()}
    sets = example_sets(comparison.sets, comparison.pictures, examples)
    bins = {
        name: {method: results.labelled[name].reliability for method, results in comparison.methods.items()}
        for name in ("test digits", "rotated by 15°", "rotated by 30°")
    }
    numbers = Numbers(comparison.methods)
    angles = {info.level: info.name for info in comparison.sets.values() if info.role in ("test", "shift")}
    against_rotation = (
        sorted(angles),
        ALONG_ROTATION,
        "rotation (degrees)",
        DEMO_METHODS,
        lambda angle, metric: numbers(Quantity(angles[angle], metric)),
    )
    inputs = "The first inputs of each kind. Patches and noise have the same size and value range as the digits."
    rotation = (
        "Beyond 45°, every method is overconfident, but the log-likelihood falls further for some than for others."
    )
    distance = (
        "Inputs are multiplied by δ. A single network becomes certain, whereas MoLA approaches the dotted limits, which lie below "
        "the theorem's bound."
    )
    plane = "Confidence around the two moons, in a window six times as wide as the data."
    return {
        "examples": Planned("The inputs", inputs, partial(draw_examples, sets, comparison.pictures, examples)),
        "histograms": Planned("Confidence in outliers", SHARES, partial(comparison_histograms, comparison, 3)),
        "reliability": Planned(*RELIABILITY, partial(draw_reliability, bins)),
        "rotation": Planned("Rotated digits", rotation, partial(draw_against_level, *against_rotation)),
        "distance": Planned("Far from the data", distance, partial(draw_distance, result)),
        "moons": Planned("Confidence over the plane", plane, partial(draw_moons, result)),
    }


def draw_distance(result: DemoResult) -> Figure:
    """Plot the confidence, its limit and its bound against the scale of the input."""
    distance = result.distance
    drawn = strokes(DEMO_METHODS)
    common = {"xscale": "log", "ylim": (0, 1.04), "ylabel": "mean confidence"}
    panels = []
    for kind, curves in distance.curves.items():
        lines = [Line(distance.scales, curves[method], method, drawn[method]) for method in DEMO_METHODS]
        ends = distance.scales[[0, -1]]
        for words, values, dashes in (("limit", distance.limits, DOTTED), ("bound", distance.bounds, LONG_DASHES)):
            for method, value in values[kind].items():
                style = {**drawn[method], "linestyle": dashes}
                lines.append(Line(ends, [value] * 2, f"{words}, {method}", style))
        panels.append(Panel(f"{kind}, scaled away", lines, {**common, "xlabel": "scale δ of the input"}))
    return draw_panels(panels, 3.0)


def draw_moons(result: DemoResult) -> Figure:
    """Draw a map of each method's confidence around the two moons, with a common colour scale."""
    moons = result.moons
    drawn = colours(DEMO_METHODS)
    figure, panels = canvas(-(-len(DEMO_METHODS) // 3), 3, 2.6)
    extent = (-moons.reach, moons.reach, -moons.reach, moons.reach)
    scale: dict[str, Any] = {"cmap": "viridis", "vmin": 0.5, "vmax": 1.0, "interpolation": "bilinear"}
    for panel in panels[len(DEMO_METHODS) :]:
        panel.set_visible(False)
    for panel, method in zip(panels, DEMO_METHODS, strict=False):
        image = panel.imshow(moons.maps[method], extent=extent, origin="lower", **scale)
        panel.scatter(moons.points[:, 0], moons.points[:, 1], s=3, c=moons.labels, cmap="gray", linewidths=0)
        panel.set(xticks=[], yticks=[])
        panel.set_title(f"{method}\n{moons.maps[method].mean():.2f} on average", color=drawn[method], fontsize=8.5)
    figure.colorbar(image, ax=panels, fraction=0.04, pad=0.015, aspect=22, label="confidence")
    return figure
