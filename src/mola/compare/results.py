"""Tallies in, results out: the numbers of a method on each set, their errors over data, and who leads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from mola import metrics
from mola.compare.measured import Lead, Measurement, area_between, lead, mean_of, pass_rate
from mola.compare.record import (
    CONFIDENCE_BINS,
    ClassResult,
    Examples,
    LabelledResult,
    OutlierResult,
    ScoreHistogram,
    SetResult,
)
from mola.compare.tally import Tally

METRICS = (
    "accuracy",
    "log_likelihood",
    "nll",
    "brier",
    "ece",
    "ece100",
    "ece_legacy",
    "mce",
    "mce_legacy",
    "confidence",
    "aurc",
)
"""Of labelled data, as `mola.metrics` defines them."""

LABEL_METRICS = ("auroc", "average_precision", "miou")
"""Besides: of data with several labels; the last of positions, the mean over classes of intersection over union."""

EXAMPLES = 8
"""Inputs of each set that a report shows."""

SCORE_BINS = 25
"""Equal-width bins of the histograms of outlier scores."""

CURVE_POINTS = 100
"""Of a curve of risk against coverage."""

LARGE_SET = 4
"""Classes from which on sets are counted together."""

TAIL = 0.005
"""Share of the inputs at each end that the outermost bins of these take in, however far away."""

HIGH: Literal["high"] = "high"

BETTER: dict[str, Literal["low", "high"]] = {"accuracy": "high", "nll": "low", "brier": "low", "ece": "low"}


def labelled_result(
    tally: Tally,
    level: float = 0.0,
    *,
    detail: bool = True,
    errors: bool = False,
    classes: Sequence[str] = (),
    types: Sequence[str] = (),
) -> LabelledResult:
    """Every metric of a method on labelled data; one that is not defined there is left out.

    Args:
        tally: what the method said.
        level: how far the data are shifted.
        detail: whether to keep what reliability diagrams and histograms are drawn from.
        errors: whether to estimate standard errors over data.
        classes: names of the classes, for results by class.
        types: of shift, dealt over the data in turn, for results by type: datum i is of type i modulo their number.

    Returns:
        The numbers.
    """
    found = _metrics(tally)
    if classes and tally.groups is not None and "question" not in tally.columns:
        found["miou"] = _mean_of_known(tally.overlaps(len(classes)))
    return LabelledResult(
        level=level,
        count=tally.count,
        # The legacy errors count nothing where every prediction is sure.
        metrics={name: found[name] for name in (*METRICS, *LABEL_METRICS) if not math.isnan(found.get(name, math.nan))},
        reliability=tally.bins.tolist() if detail else [],
        histogram=_histogram(tally) if detail else [],
        errors={name: one.error for name, one in tally.measured().items()} if errors else {},
        classes=_by_class(tally, classes) if classes else {},
        types=_by_type(tally, types),
    )


def _metrics(tally: Tally) -> dict[str, float]:
    confidence, correct, bins = tally["confidence"], tally["correct"], tally.bins
    nll = float(tally["nll"].mean())
    several = {}
    if "question" in tally.columns:  # of inputs with several labels, the means over labels
        by_label = tally.by_label()
        several = {name: _mean_of_known(by_label[name]) for name in ("auroc", "average_precision")}
    legacy = metrics.bin_sums_legacy(confidence, correct, 100)
    counted = bool(legacy[:, 0].sum() > 0)
    return {
        "accuracy": float(correct.mean()),
        "log_likelihood": -nll,
        "nll": nll,
        "brier": float(tally["brier"].mean()),
        "ece": metrics.calibration_gap(bins),
        "ece100": metrics.calibration_gap(metrics.bin_sums(confidence, correct, 100)),
        "ece_legacy": metrics.calibration_gap(legacy) if counted else math.nan,
        "mce": metrics.largest_gap(bins),
        "mce_legacy": metrics.largest_gap(legacy) if counted else math.nan,
        "confidence": float(confidence.mean()),
        "aurc": metrics.area_under_risk_coverage(1 - confidence if several else tally["max probability"], correct),
        **several,
    }


def _mean_of_known(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def outlier_result(inside: Tally, outside: Tally, *, detail: bool = True, errors: bool = False) -> OutlierResult:
    """How sure a method is of outliers, and how well each score tells them from the test set.

    Args:
        inside: what the method said of the test set.
        outside: what it said of the outliers.
        detail: whether to keep the histogram of confidence.
        errors: whether to estimate standard errors over data, and to keep histograms of the scores.

    Returns:
        The numbers.
    """
    groups = (inside.groups, outside.groups)
    sure = mean_of(outside["confidence"], outside.groups) if "confidence" in outside.columns else None
    wide = mean_of(outside["std[all]"], outside.groups) if "std[all]" in outside.columns else None
    scores, spread, histograms = {}, {}, {}
    for name, far in outside.scores.items():
        near = inside[name]
        scores[name] = {
            "auroc": metrics.auroc(near, far),
            "aupr_in": metrics.aupr_in(near, far),
            "aupr_out": metrics.aupr_out(near, far),
            "fpr95": metrics.fpr_at_tpr(near, far),
            "fpr95_out": metrics.fpr_at_tpr_out(near, far),
        }
        if errors:
            area, rate = area_between(near, far, groups), pass_rate(near, far, groups=groups)
            scores[name]["auroc"] = area.value
            spread[name] = {"auroc": area.error, "fpr95": rate.error}
            edges = _edges(near, far)
            histograms[name] = ScoreHistogram(edges.tolist(), _binned(near, edges), _binned(far, edges))
    return OutlierResult(
        count=outside.count,
        confidence=None if sure is None else sure.value,
        scores=scores,
        histogram=_histogram(outside) if detail and sure is not None else [],
        confidence_error=sure.error if errors and sure is not None else None,
        errors=spread,
        score_histograms=histograms,
        std=None if wide is None else wide.value,
        std_error=None if wide is None else wide.error,
    )


def risk_curve(tally: Tally) -> list[list[float]]:
    """Pairs of a share of the data, the surest of them by confidence, and its error rate: at most `CURVE_POINTS`, the last is all."""
    coverage, risk = metrics.risk_coverage_curve(1 - tally["confidence"], tally["correct"])
    places = torch.linspace(0, len(risk), min(len(risk), CURVE_POINTS) + 1)[1:].round().long() - 1
    return [[float(x), float(y)] for x, y in zip(coverage[places], risk[places], strict=True)]


def set_result(tally: Tally, promised: float, classes: Sequence[str]) -> SetResult:
    """Coverage and size of prediction sets.

    Args:
        tally: of labelled data, with sets.
        promised: coverage.
        classes: their names.

    Returns:
        The numbers.
    """
    sizes, held, labels = tally["set size"], tally["held"], tally["label"].long()
    counts = torch.bincount(labels, minlength=len(classes))
    inside = torch.bincount(labels, held, len(classes))
    few = {str(size): float((sizes == size).double().mean()) for size in range(LARGE_SET)}
    return SetResult(
        promised=promised,
        realised=float(held.mean()),
        size=float(sizes.mean()),
        sizes={**few, "more": float((sizes >= LARGE_SET).double().mean())},
        classes={
            name: float(inside[place] / counts[place]) for place, name in enumerate(classes) if int(counts[place]) > 0
        },
    )


def examples_of(tally: Tally) -> Examples:
    """Confidence and class of the first few predictions."""
    return Examples(
        tally["confidence"][:EXAMPLES].tolist(), [int(label) for label in tally["predicted"][:EXAMPLES].tolist()]
    )


def labelled_leads(tallies: Mapping[str, Tally]) -> dict[str, Lead]:
    """Which of several methods leads on the same labelled data: by accuracy, nll, brier and ece, of several labels by auroc, too."""
    measured = {method: tally.measured() for method, tally in tallies.items()}
    better = {**BETTER, **({"auroc": HIGH} if all("auroc" in one for one in measured.values()) else {})}
    return {
        name: lead({(method,): numbers[name] for method, numbers in measured.items()}, end)
        for name, end in better.items()
    }


def outlier_leads(inside: Mapping[str, Tally], outside: Mapping[str, Tally]) -> dict[str, Lead]:
    """Which method, by whichever score, leads on the same outliers; see `Comparison.leads`. Of numbers, by scores alone."""
    areas: dict[tuple[str, ...], Measurement] = {}
    rates: dict[tuple[str, ...], Measurement] = {}
    for method, tally in outside.items():
        groups = (inside[method].groups, tally.groups)
        for score, far in tally.scores.items():
            near = inside[method][score]
            areas[method, score] = area_between(near, far, groups)
            rates[method, score] = pass_rate(near, far, groups=groups)
    found = {"auroc": lead(areas, "high"), "fpr95": lead(rates, "low")}
    if not all("confidence" in tally.columns for tally in outside.values()):
        return found
    sure: dict[tuple[str, ...], Measurement] = {
        (method,): mean_of(tally["confidence"], tally.groups) for method, tally in outside.items()
    }
    least: dict[tuple[str, ...], Measurement] = {(method,): areas[method, "max probability"] for method in outside}
    return {"confidence": lead(sure, "low"), "max probability": lead(least, "high"), **found}


def _by_class(tally: Tally, classes: Sequence[str]) -> dict[str, ClassResult]:
    rows = zip(classes, *tally.by_class(len(classes)), strict=True)
    found = {name: ClassResult(count, right / count, sure / count) for name, count, right, sure in rows if count}
    if "question" not in tally.columns:
        if tally.groups is None:
            return found
        shared = dict(zip(classes, tally.overlaps(len(classes)), strict=True))
        return {name: replace(one, iou=shared[name]) for name, one in found.items()}
    measured = tally.by_label()

    def value(measure: str, place: int) -> float | None:
        found = measured[measure][place]
        return None if math.isnan(found) else found

    return {
        name: replace(
            one,
            auroc=value("auroc", place),
            average_precision=value("average_precision", place),
            ece=value("ece", place),
        )
        for place, (name, one) in enumerate(found.items())
    }


BY_TYPE = ("accuracy", "nll", "ece")


def _by_type(tally: Tally, types: Sequence[str]) -> dict[str, dict[str, float]]:
    found = {}
    for place, name in enumerate(types[: tally.count]):
        numbers = tally.dealt(place, len(types)).labelled()
        # A type has a few hundred data: six digits are more than they can tell, and keep files small.
        found[name] = {metric: float(f"{numbers[metric]:.6g}") for metric in BY_TYPE}
    return found


def _histogram(tally: Tally) -> list[int]:
    counts: list[float] = torch.histc(tally["confidence"], CONFIDENCE_BINS, 0, 1).tolist()
    return [int(count) for count in counts]


def _edges(inside: Tensor, outside: Tensor) -> Tensor:
    # Bins that both fill: the outermost hundredth of either does not stretch them.
    ends = [
        one.sort().values[[int(TAIL * (len(one) - 1)), -1 - int(TAIL * (len(one) - 1))]] for one in (inside, outside)
    ]
    low, high = min(float(ends[0][0]), float(ends[1][0])), max(float(ends[0][1]), float(ends[1][1]))
    return torch.linspace(low, high if high > low else low + 1, SCORE_BINS + 1, dtype=torch.float64)


def _binned(scores: Tensor, edges: Tensor) -> list[float]:
    index = torch.bucketize(scores, edges[1:-1])
    shares: list[float] = (torch.bincount(index, minlength=SCORE_BINS) / len(scores)).tolist()
    return shares
