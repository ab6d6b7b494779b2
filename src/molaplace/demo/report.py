"""The demo's page: headlines, tables and figures, made from its results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jinja2 import PackageLoader
from safetensors.torch import save_file

from molaplace.demo.run import DEMO_METHODS, PATCHES, DemoResult
from molaplace.evaluation import Evaluation
from molaplace.progress import Progress, no_progress
from molaplace.report.comparison_tables import BOLD, comparison_table, test_table
from molaplace.report.curves import Line, Panel, draw_against_level, draw_panels, draw_reliability
from molaplace.report.figures import EQUAL_ERRORS, RELIABILITY, SHARES, comparison_histograms
from molaplace.report.numbers import Numbers, Quantity
from molaplace.report.pictures import draw_examples, draw_maps, example_sets
from molaplace.report.style import DOTTED, LONG_DASHES, Drawn, Figure, Planned, colours, strokes
from molaplace.report.tables import Column, Table
from molaplace.report.words import evaluation_remarks
from molaplace.report.writing import (
    PAGE,
    as_json,
    draw_figures,
    page_environment,
    render_page,
    write_texts,
)
from molaplace.saving.files import replacing

ALONG_ROTATION = ("log_likelihood", "ece", "confidence")
"""Metrics plotted against the rotation."""

SCORES = {"max probability": "AUROC: conf.", "energy": "energy", "ood score": "ood_score"}
"""Headings of the AUROCs in the table of outliers, by outlier score."""

DEMO = "demo"
NETWORKS = "networks"
"""Folder of the trained networks beside the page."""


def write_demo(
    result: DemoResult, directory: Path, progress: Progress = no_progress, *, overwrite: bool = False
) -> Path:
    """Write the page, the numbers, the figures and the trained networks; return the path of the page.

    The files are `index.html`, `numbers.json`, `figures/<name>.svg` and `.png`, and `networks/digits-<k>.safetensors`.
    """
    with replacing(directory, DEMO, (PAGE,), overwrite=overwrite) as folder:
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
        described=DEMO_METHODS,
        headlines=demo_headlines(result.comparison),
        tables=[outlier_table(result.comparison), test_table(result.comparison)],
        sizes={info.role: info.count for info in result.comparison.sets.values()},
        figures=figures,
        remarks=demo_remarks(result),
    )


# --- words -----------------------------------------------------------------------------------------------------------


def demo_headlines(comparison: Evaluation) -> dict[str, dict[str, str]]:
    """Return the value of each method under each title: the cards at the top of the page, which the terminal also shows."""
    turned = next(info.name for info in comparison.of_role("shift") if info.level == 30)
    headlines: dict[str, dict[str, str]] = {}
    for method, result in comparison.methods.items():
        photographs = result.outliers[PATCHES]
        values = {
            "log loss, test digits": f"{result.labelled[comparison.test.name].metrics['nll']:.3f}",
            f"log loss, digits {turned}": f"{result.labelled[turned].metrics['nll']:.2f}",
            "confidence in photographs": f"{100 * (photographs.confidence or 0):.0f}\N{NO-BREAK SPACE}%",
            "photographs detected, AUROC": f"{100 * max(score['auroc'] for score in photographs.scores.values()):.0f}\N{NO-BREAK SPACE}%",
        }
        for title, value in values.items():
            headlines.setdefault(title, {})[method] = value
    return headlines


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


def outlier_table(comparison: Evaluation) -> Table:
    """Return the mean confidence, and the AUROC of three scores, on every outlier set."""
    columns = []
    for info in comparison.of_role("outlier"):
        columns.append(Column("conf. %", info.title, "low", 1, Quantity(info.name, "confidence"), 100))
        columns += [
            Column(heading, info.title, "high", 1, Quantity(info.name, "auroc", score), 100)
            for score, heading in SCORES.items()
        ]
    caption = (
        "The mean confidence, and three AUROCs, in %: how well the confidence, the energy and the OOD score tell these inputs from test "
        "digits, where 50 is guessing and 100 is perfect. "
        f"{BOLD.format(' and score')}."
    )
    return comparison_table(comparison, "Inputs that are not digits", caption, columns)


# --- figures ---------------------------------------------------------------------------------------------------------


def demo_figures(result: DemoResult) -> dict[str, Planned]:
    """Return the demo's figures, keyed by name, in page order."""
    comparison = result.comparison
    styles = strokes(DEMO_METHODS)
    examples = {method: results.examples for method, results in comparison.methods.items()}
    sets = example_sets(comparison.sets, comparison.pictures, examples)
    bins = {
        method: {name: results.labelled[name].reliability for name in comparison.pictures if name in results.labelled}
        for method, results in comparison.methods.items()
    }
    numbers = Numbers(comparison.methods)
    angles = {info.level: info.name for info in comparison.sets.values() if info.role in ("test", "shift")}
    against_rotation = (
        sorted(angles),
        ALONG_ROTATION,
        "rotation (degrees)",
        styles,
        lambda angle, metric: numbers(Quantity(angles[angle], metric)),
    )
    inputs = (
        "The first inputs of each kind, with each method's confidence. The patches have the same size and the same range of values as the "
        "digits."
    )
    plane = "The same methods on a problem with two inputs, in a window four times as wide as the data."
    rotation = (
        "Beyond 45°, every method is overconfident, but the log-likelihood falls further for some than for others."
    )
    distance = (
        "Inputs are multiplied by δ. A single network becomes certain, whereas MoLA approaches the dotted limits. With the paper's rule, "
        "the limit lies below the theorem's bound; with the default rule, it is a guess among ten classes."
    )
    title, caption = RELIABILITY
    return {
        "examples": Planned(
            "Confidence in digits and in photographs",
            inputs,
            partial(draw_examples, sets, comparison.pictures, examples, styles),
        ),
        "moons": Planned("Confidence around two moons", plane, partial(draw_moons, result)),
        "reliability": Planned(title, f"{caption} {EQUAL_ERRORS}", partial(draw_reliability, bins, styles)),
        "rotation": Planned("Rotated digits", rotation, partial(draw_against_level, *against_rotation)),
        "histograms": Planned("Confidence in outliers", SHARES, partial(comparison_histograms, comparison)),
        "distance": Planned("Far from the data", distance, partial(draw_distance, result)),
    }


def draw_distance(result: DemoResult) -> Figure:
    """Plot the confidence, its limit and its bound against the scale of the input."""
    distance = result.distance
    styles = strokes(DEMO_METHODS)
    common = {"xscale": "log", "ylim": (0, 1.04), "ylabel": "mean confidence"}
    panels = []
    for kind, curves in distance.curves.items():
        lines = [Line(distance.scales, curves[method], method, styles[method]) for method in DEMO_METHODS]
        ends = distance.scales[[0, -1]]
        for words, values, dashes in (("limit", distance.limits, DOTTED), ("bound", distance.bounds, LONG_DASHES)):
            for method, value in values[kind].items():
                style = {**styles[method], "linestyle": dashes}
                lines.append(Line(ends, [value] * 2, f"{words}, {method}", style))
        panels.append(Panel(f"{kind}, scaled away", lines, {**common, "xlabel": "scale δ of the input"}))
    return draw_panels(panels, 3.0)


def draw_moons(result: DemoResult) -> Figure:
    """Draw a map of each method's confidence around the two moons."""
    moons = result.moons
    titles = {method: f"{method}\nmean {100 * values.mean():.0f} %" for method, values in moons.maps.items()}
    maps = {titles[method]: values for method, values in moons.maps.items()}
    title_colours = {titles[method]: colour for method, colour in colours(DEMO_METHODS).items()}
    return draw_maps(maps, moons.points, moons.labels, moons.reach, title_colours, columns=2, size=2.2)
