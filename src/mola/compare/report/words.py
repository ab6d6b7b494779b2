"""What the numbers say, in sentences made from them; and the titles and captions of figures.

Each sentence gives its numbers, with how sure they are, and leaves the verdict to the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mola.compare.demo_result import COOLED, DemoResult
from mola.compare.measured import CLEAR, Lead
from mola.compare.record import Comparison, OutlierResult, Record, SetInfo
from mola.compare.report import paper_numbers
from mola.compare.report.estimate import (
    On,
    Quantity,
    Ranking,
    are_rotations,
    estimate,
    levels_of,
    ranking,
    runs_counted,
    shifted,
)
from mola.compare.report.number_tables import digits_of
from mola.compare.report.reading import SuiteResults, known_scores, listed
from mola.compare.report.single_run_tables import SCORE_NAMES, worst_classes
from mola.compare.report.suite_tables import GROUP_TITLES, METRIC_NAMES, paper_network

METHODS = {
    "MAP": "the first network as it is",
    "MAP-T": "the same with a temperature, tuned on the validation data",
    "DE": "the deep ensemble: the mean of all networks' probabilities",
    "DE-T": "the same with a temperature, tuned on the validation data",
    "LLLA": "the first network with a Laplace approximation on its last layer",
    "MoLA": "all networks, each with a Laplace approximation on its last layer",
    "MoLA (NLL)": "the same, its prior tuned by validation log loss instead of the paper's rule",
    "MoLA (distance)": "MoLA, its logits cooled by the distance of the features from the training classes, at the paper's price",
    "LLLA (distance)": "the same for the first network alone",
    "MoLA (all layers)": "all networks, each with a Laplace approximation of all its weights (K-FAC), linearised",
    "MoLA (subnetwork)": "the same of the 1000 weights whose variance is largest, with all their covariances",
    "SWAG": "a Gaussian fitted to the last steps of training",
    "MultiSWAG": "a mixture of SWAGs",
    "MIMO": "one network that makes several predictions at once",
    "MIMO-MoLA": "MIMO, each of its outputs with a Laplace approximation",
}
"""What each method is."""

NUMBER_METHODS = {
    "MAP": "the first network as it is, with the noise that the training data show",
    "MAP-N": "the same, its noise scaled to do best on the validation data",
    "DE": "the deep ensemble: a mixture of all networks, each with its noise",
    "DE-N": "the same, the noise scaled to do best on the validation data",
    "LLLA": METHODS["LLLA"],
    "MoLA": METHODS["MoLA"],
}
"""What they are where outputs are numbers."""

RELIABILITY = (
    "Whether confidence can be taken at its word",
    "Predictions are put into bins by confidence; a point on the dashed line is right as often as it says. Below it a method is "
    "surer than it is right. Areas show how many predictions a point stands for; bins of fewer than five, or of less than a "
    "thousandth of all, are not drawn, but count in the ECE.",
)

DEMO_FIGURES = {
    "examples": (
        "What the networks were shown",
        "The first inputs of each kind, as they came. Patches and noise have the size and the value range of the digits, "
        "so neither gives them away.",
    ),
    "histograms": (
        "How sure they are of what is not a digit",
        "Share of inputs (square-root scale) by confidence. Confidence is useful where the filled histogram, of inputs "
        "that are not digits, stays left of the outline, the test digits. A thousandfold farther out, each network alone "
        "is certain, and the ensemble's confidence only counts its votes; cooled by distance, nobody is sure of anything there.",
    ),
    "reliability": RELIABILITY,
    "rotation": (
        "As the digits turn",
        "Accuracy is nearly the same for all methods, so only MoLA's is drawn. The last layer is the only one that "
        "is uncertain here: beyond 45° every method is surer than it is right, and what differs is by how much they "
        "pay for it in log loss.",
    ),
    "distance": (
        "Far away from the data",
        "First two panels: inputs multiplied by δ. The networks have no biases, so theory is "
        "exact: a single network becomes certain, while LLLA and MoLA by the paper's rule stop at the dotted limits. No curve "
        "crosses the Theorem's bound. Last panel: where that bound bites. It must hold for every input at once, and drops below 1 "
        "only at prior precisions at which the test digits, too, are no longer recognised with confidence. Scaling a "
        "digit leaves its direction as it was, so the covariance of the last layer cannot make these methods less sure of it. "
        "MoLA (distance) also divides logits by the square of how much longer than usual the features are: its limit is 1/C, "
        "guessing, for every network whose features grow.",
    ),
    "moons": (
        "Where a classifier should not be sure",
        "Confidence in a window six times wider than the data, on one scale. MAP is sure everywhere but on a thin line; "
        "the ensemble is unsure where its members disagree; LLLA is unsure in wide sectors around the boundary; MoLA is "
        "both; MoLA (distance) is sure near the data alone, at the same mean confidence on validation data as MoLA. These networks "
        "have biases.",
    ),
}
"""Title and caption of each figure."""

EVALUATION_FIGURES = {
    "reliability": RELIABILITY,
    "confidence": ("How confidence is spread", "Shares of inputs by confidence, on a square-root scale."),
    "decisions": (
        "Answer less, err less",
        "Error rate of the test data that are answered, if the surest are. Crosses: what would be answered so that the error rate is, "
        "with 95 % certainty, at most that of the dotted line; inputs that ring the alarm are not answered.",
    ),
    "coverage": (
        "Whether intervals can be taken at their word",
        "Share of the test targets that central intervals hold, against the probability that they are made for. On the dashed line "
        "they hold as many as they say; below it a method is surer than it is right. Bands: one standard error.",
    ),
    "spread": (
        "Whether the standard deviation says how large errors are",
        "Test data in groups of equal size by their predicted standard deviation: its root mean square, and the root mean squared "
        "error of the predictions. On the dashed line both are the same. A method that says the same of all data is a single cross.",
    ),
    "predicted": (
        "Predicted, against what was true",
        "Means and 90 % intervals for some of the test data. On the dashed line the prediction is right.",
    ),
    "scores": (
        "How outlier scores are spread: {}",
        "Shares of inputs by each outlier score, on a square-root scale, higher scores to the right. The less the two overlap, the "
        "better the score tells outliers from the test data. The outermost bins hold all beyond.",
    ),
}

BANDS = "Lines: means over runs. Bands: one standard error."

SUITE_FIGURES = {
    "histograms": (
        "How sure the methods are of outliers",
        "Share of the data (square-root scale) by confidence, all runs together. Confidence is useful where the filled "
        "histogram stays left of the outline.",
    ),
    "shift": ("As the data shift", BANDS),
    "types": (
        "Type by type, against the paper's rule",
        "Differences from MoLA tuned by the paper's rule, means over runs: blue where the other is better, orange where it is "
        "worse. Each row is of other test images.",
    ),
    "reliability": (RELIABILITY[0], f"{RELIABILITY[1]} All runs together."),
    "examples": (
        "Example images, with the confidence of each method",
        "The first images of each set, as they came; confidences are of the first run.",
    ),
    **{group: (title, BANDS) for group, title in GROUP_TITLES.items()},
    "components": (
        GROUP_TITLES["components"],
        f"{BANDS} Shifted: mean over all levels. Outliers: mean over all sets. Vertical axes are cut.",
    ),
}

FAR = 3.0
"""Points of % from which a difference from the paper is named."""

MOST_NAMED = 6

NAMED = 5
"""Classes that are named in a sentence."""


@dataclass(frozen=True)
class Finding:
    """A few sentences under a word or two."""

    title: str
    text: str


# --- the demo -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """One finding: the numbers of two methods, and a sentence with its circumstances."""

    title: str
    before: str
    after: str
    sentence: str
    methods: tuple[str, str] = ("MAP", "MoLA")


def demo_headlines(result: DemoResult) -> list[Headline]:
    """The findings that the page and the terminal open with: the cost first, then the gains."""
    comparison, angle, patches = result.comparison, 30, "natural patches"
    turned = next(one.name for one in comparison.of_role("shift") if one.level == angle)
    far, digits_far = (
        next(one.name for one in comparison.of_role("outlier") if one.name.startswith(kind))
        for kind in ("noise ", "digits ")
    )
    paper, cooled = "MoLA", COOLED

    def pair(
        name: str,
        metric: str,
        digits: int,
        factor: float = 1.0,
        unit: str = "",
        methods: tuple[str, str] = ("MAP", paper),
    ) -> tuple[str, str]:
        found = (estimate(comparison.runs[method], On(name, metric), factor) for method in methods)
        first, second = ("" if one is None else f"{one.mean:.{digits}f}{unit}" for one in found)
        return first, second

    def labelled(name: str, digits: int) -> str:
        accuracy, error = (" and ".join(pair(name, metric, digits, 100)) for metric in ("accuracy", "ece"))
        return f"Accuracy {accuracy}%, calibration error {error}%."

    best = " and ".join(_best_score_of(comparison.methods[method].outliers[patches]) for method in ("MAP", "MoLA"))
    by_confidence = " and ".join(pair(patches, "auroc", 0, 100))
    limit, bound = (given["noise"]["MoLA"] for given in (result.distance.limits, result.distance.bounds))
    told = f"MoLA's exact limit is {100 * limit:.1f}%. The Theorem's bound at the tuned prior precision is {near_one(bound)}."
    return [
        Headline("log loss, test digits", *pair(comparison.test.name, "nll", 3), labelled(comparison.test.name, 1)),
        Headline(f"log loss, rotated by {angle}°", *pair(turned, "nll", 2), labelled(turned, 0)),
        Headline(
            "confidence in natural patches",
            *pair(patches, "confidence", 0, 100, "%"),
            f"AUROC by confidence {by_confidence}%; by the best score of each {best}.",
        ),
        Headline("confidence in noise, far away", *pair(far, "confidence", 0, 100, "%"), told),
        Headline(
            f"confidence in {digits_far}",
            *pair(digits_far, "confidence", 1, 100, "%", (paper, cooled)),
            f"By the paper's rule, and with logits cooled by distance: guessing is {100 / len(comparison.classes):.0f}%. Log loss of "
            f"the test digits {' and '.join(pair(comparison.test.name, 'nll', 3, methods=(paper, cooled)))}.",
            (paper, cooled),
        ),
    ]


def _best_score_of(found: OutlierResult) -> str:
    best = max(found.scores, key=lambda score: found.scores[score]["auroc"])
    return f"{100 * found.scores[best]['auroc']:.0f}% ({best})"


def near_one(value: float) -> str:
    """A probability, telling 1 apart from what only rounds to it."""
    if value < 0.9995:
        return f"{value:.3f}"
    return f"1 - {1 - value:.0e}" if value < 1 else "1 to machine precision"


def tuning_remarks(result: DemoResult) -> list[str]:
    """How the prior precisions came about, and what tuning remarked."""
    chosen = [
        f"{name}: prior precision {record.chosen['prior_precision'][0]:.3g}, by {record.chosen['rule']}."
        for name, record in result.comparison.methods.items()
        if "prior_precision" in record.chosen
    ]
    return [*chosen, *result.comparison.notes, *[f"two moons, {note}" for note in result.moons.notes]]


def demo_remarks(result: DemoResult) -> list[str]:
    """The small print."""
    sizes = {one.role: one.count for one in result.comparison.sets.values()}
    return [
        f"Data: scikit-learn's 1797 handwritten digits, 8 by 8 pixels, split at random into {sizes['train']} for training, "
        f"{sizes['validation']} for tuning and {sizes['test']} for testing; patches of its two sample photographs; uniform noise.",
        f"Networks: two hidden layers, no biases, {result.comparison.made['parameters']} weights, {result.settings.epochs} epochs, "
        f"hardly regularised and so overconfident, as networks usually are. Strong weight decay makes them modest by itself: the "
        f"tuning rule then finds little to do, and MoLA comes close to the ensemble.",
        *tuning_remarks(result),
        "One run of one seed on a small data set: differences of a few tenths of a point between neighbouring methods "
        "may turn around with another seed.",
    ]


# --- mola evaluate ------------------------------------------------------------------------------------------------------


def evaluation_findings(comparison: Comparison) -> list[Finding]:
    """What a reader in a hurry can act on."""
    if comparison.regression:
        return [_on_numbers(comparison), *_outlier_findings(comparison)]
    methods, own, test = comparison.methods, comparison.own, comparison.test.name
    plain, mine = (methods[name].labelled[test].metrics for name in ("MAP", own))
    best = comparison.leads[test]["nll"]
    found = [
        Finding(
            "On the test data",
            f"{lead_sentence(best, 'the lowest log loss', 4)} (MAP: {plain['nll']:.4f}, {own}: {mine['nll']:.4f}). MAP is "
            f"{_gap(plain)}; {own} is {_gap(mine)}.",
        )
    ]
    if mine["nll"] > 1.05 * best.value and comparison.made["rule"] == "threshold":
        text = "The threshold rule gives up some log loss for caution outside the data; mola fit --rule nll does not."
        found.append(Finding("Log loss or caution", text))
    return [*found, *_outlier_findings(comparison), *_worst(comparison)]


def _outlier_findings(comparison: Comparison) -> list[Finding]:
    methods, own = comparison.methods, comparison.own
    found = []
    for one in comparison.of_role("outlier"):
        outside = {method: methods[method].outliers[one.name] for method in ("MAP", comparison.baseline, own)}
        best_scores = {method: max(given.scores.items(), key=_auroc) for method, given in outside.items()}
        each = "; ".join(
            f"{method} {100 * numbers['auroc']:.2f} % by {SCORE_NAMES[score]}"
            for method, (score, numbers) in best_scores.items()
        )
        text = (
            f"{lead_sentence(comparison.leads[one.name]['auroc'], 'the highest AUROC of all scores', 2, 100, ' %')}. "
            f"The best score of each: {each}. {_outside(comparison, outside)}"
        )
        found.append(Finding(f"Outliers: {one.title}", text))
    return found


def _outside(comparison: Comparison, found: Mapping[str, OutlierResult]) -> str:
    # How sure the first network and the posterior are of outliers; of numbers, how much wider the posterior is there.
    own, test = comparison.own, comparison.test.name
    if not comparison.regression:
        first, last = (100 * (found[name].confidence or 0.0) for name in ("MAP", own))
        return f"Mean confidence in them: MAP {first:.1f} %, {own} {last:.1f} %."
    usual = comparison.methods[own].labelled[test].metrics["std"]
    times = (found[own].std or 0.0) / usual
    return f"{own}'s standard deviations are {times:.2f} times as large there as on the test data, on average."


def _on_numbers(comparison: Comparison) -> Finding:
    own, test = comparison.own, comparison.test.name
    leads, methods = comparison.leads[test], comparison.methods
    digits = {name: digits_of(comparison, name) for name in ("rmse", "nll")}
    held = {name: 100 * methods[name].labelled[test].metrics["coverage_90"] for name in dict.fromkeys(("MAP", own))}
    told = ", ".join(f"{name} {value:.1f} %" for name, value in held.items())
    return Finding(
        "On the test data",
        f"{lead_sentence(leads['rmse'], 'the lowest root mean squared error', digits['rmse'])}. "
        f"{lead_sentence(leads['nll'], 'the lowest negative log-likelihood', digits['nll'])}. 90 % intervals hold the target: {told}.",
    )


def _auroc(scored: tuple[str, dict[str, float]]) -> float:
    return scored[1]["auroc"]


def _named(one: tuple[str, ...]) -> str:
    return one[0] if len(one) == 1 else f"{one[0]} by {SCORE_NAMES[one[1]]}"


def lead_sentence(found: Lead, what: str, digits: int, factor: float = 1.0, unit: str = "") -> str:
    """Such as: MoLA has the lowest log loss, 0.1832, clearly ahead of DE (by 0.0048 +- 0.0010)."""
    value = f"{what}, {factor * found.value:.{digits}f}{unit}"
    if found.rival is None or found.ahead is None:
        return f"All methods share {value}"
    names = _named(found.best)
    if found.level:
        names += f" (level with {', '.join(_named(one) for one in found.level)})"
    by = f"{factor * found.ahead:.{digits}f}"
    if found.error is not None:
        by += f" \N{PLUS-MINUS SIGN} {factor * found.error:.{digits}f}"
    if found.best in found.clear:
        return f"{names} has {value}, clearly ahead of {_named(found.rival)} (by {by})"
    why = f"within {CLEAR:g} standard errors" if found.error is not None else "of a single input"
    return f"{names} has {value}, but is not clearly ahead of {_named(found.rival)} (by {by}, {why})"


def _worst(comparison: Comparison) -> list[Finding]:
    classes = comparison.methods[comparison.own].labelled[comparison.test.name].classes
    if len(classes) < 3:
        return []
    worst = [
        f"{name} ({100 * classes[name].accuracy:.1f} % of {classes[name].count})"
        for name in worst_classes(comparison)[:NAMED]
        if classes[name].accuracy < 1
    ]
    many = "classes" if all(one.auroc is None for one in classes.values()) else "labels"
    told = (
        f"{comparison.own} is least often right about {', '.join(worst)}."
        if worst
        else f"None of the {many} has an error."
    )
    return [Finding(f"Worst {many}", told)]


def _gap(scores: dict[str, float]) -> str:
    gap = 100 * (scores["confidence"] - scores["accuracy"])
    return f"{'over' if gap > 0 else 'under'}confident by {abs(gap):.2f} points on average"


def evaluation_remarks(comparison: Comparison) -> list[str]:
    """What was tuned, left out and noted."""
    chosen = {method: record.chosen for method, record in comparison.methods.items()}
    lines = [
        f"Prior precision of {method}: {one['prior_precision'][0]:.4g}."
        for method, one in chosen.items()
        if "prior_precision" in one
    ]
    lines += [
        f"Noise of {method}: {', '.join(f'{value:.4g}' for value in one['noise'])}."
        for method, one in chosen.items()
        if "noise" in one
    ]
    lines += [
        f"Temperature of {method}: {one['temperature']:.4g}." for method, one in chosen.items() if "temperature" in one
    ]
    lines += comparison.notes
    for entries, verb in ((comparison.left_out, "left out"), (comparison.noted, "noted")):
        for where, found in entries.items():
            some = "; ".join(f"{name}: {words}" for name, words in list(found.items())[:5])
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            lines.append(f"{where}: {len(found)} {verb} ({some}{more}).")
    return lines


# --- suites -------------------------------------------------------------------------------------------------------------


def _ranked(
    suite: SuiteResults, quantity: Quantity, better: Literal["low", "high"], digits: int, factor: float = 1.0
) -> Ranking | None:
    found = {method: estimate(records, quantity, factor) for method, records in suite.runs.items()}
    return ranking(found, better, digits)


def _ranking_sentence(found: Ranking, digits: int) -> str:
    # Such as: MoLA 99.1 ± 0.1, ahead of DE by 0.2 ± 0.1 in 5 of 5 runs.
    names = found.best if not found.level else f"{found.best}, level with {', '.join(found.level)}:"
    words = f"{names} {found.value.text(digits)}"
    if found.second is None or found.ahead is None:
        return words
    runs = found.ahead.runs
    kind = "rotations" if found.ahead.overlap > 0 else "runs"
    count = "in the one run" if runs == 1 else f"in {found.wins} of {runs} {kind}"
    return f"{words}, ahead of {found.second} by {found.ahead.text(digits)} {count}"


def suite_findings(suite: SuiteResults) -> list[Finding]:
    """What can be said of the methods compared."""
    if not suite.runs:
        return []
    parts = [
        *_tuning(suite),
        _in_distribution(suite),
        _shifted(suite),
        *_outliers(suite),
        _paper(suite),
        _certainty(suite),
    ]
    return [finding for finding in parts if finding is not None]


def _tuning(suite: SuiteResults) -> list[Finding]:
    told = _main_remarks(suite)
    return [Finding("Remarks of tuning", " ".join(told))] if told else []


def _in_distribution(suite: SuiteResults) -> Finding | None:
    loss = _ranked(suite, On("test", "nll"), "low", 4)
    error = _ranked(suite, On("test", "ece"), "low", 2, 100)
    if loss is None:
        return None
    text = f"Lowest log loss: {_ranking_sentence(loss, 4)}. "
    if error is not None:
        text += f"Lowest calibration error, in %: {_ranking_sentence(error, 2)}. "
    known = {
        method: one
        for method, records in suite.runs.items()
        if (one := estimate(records, On("test", "accuracy"), 100)) is not None
    }
    if len(known) > 1:
        low, high = min(known, key=lambda one: known[one].mean), max(known, key=lambda one: known[one].mean)
        same = f"{known[low].mean:.2f}" == f"{known[high].mean:.2f}"
        text += (
            f"All accuracies are {known[low].mean:.2f}%."
            if same
            else f"Accuracies lie between {known[low].mean:.2f}% ({low}) and {known[high].mean:.2f}% ({high})."
        )
    return Finding("In distribution", text.strip())


SHIFTED: tuple[tuple[str, Literal["low", "high"], int, float], ...] = (
    ("log_likelihood", "high", 3, 1),
    ("ece", "low", 1, 100),
    ("accuracy", "high", 1, 100),
)
"""Metrics that are told under shift: which end is best, digits, and the factor to their unit."""


def _shifted(suite: SuiteResults) -> Finding | None:
    highest = levels_of(suite)[-1] if levels_of(suite) else 0
    parts = []
    for metric, better, digits, factor in SHIFTED:
        found = _ranked(suite, shifted(metric), better, digits, factor)
        if found is not None:
            unit = ", in %" if factor == 100 else ""
            end = "highest" if better == "high" else "lowest"
            parts.append(f"{end} {METRIC_NAMES[metric]}{unit}: {_ranking_sentence(found, digits)}")
    if not parts:
        return None
    return Finding("Under shift", f"{suite.shift_title}, mean over levels up to {highest:g}: {'; '.join(parts)}.")


def _outliers(suite: SuiteResults) -> list[Finding]:
    sets = suite.of_role("outlier")
    told: list[Finding] = []
    parts = _by_set(suite, sets, "auroc", "high")
    if parts:
        told.append(Finding("Outliers by confidence", f"Highest AUROC, in %: {'; '.join(parts)}."))
    parts = _by_set(suite, sets, "confidence", "low")
    if parts:
        told.append(Finding("Confidence in outliers", f"Lowest mean confidence, in %: {'; '.join(parts)}."))
    best = [text for one in sets if (text := _best_score(suite, one)) is not None]
    if best and len(known_scores(suite)) > 1:
        told.append(Finding("Outliers by any score", f"Highest AUROC, in %: {'; '.join(best)}."))
    return told


def _by_set(
    suite: SuiteResults,
    sets: Sequence[SetInfo],
    metric: str,
    better: Literal["low", "high"],
) -> list[str]:
    found = [(one, _ranked(suite, On(one.name, metric), better, 1, 100)) for one in sets]
    return [f"{one.title}: {_ranking_sentence(leads, 1)}" for one, leads in found if leads is not None]


def _best_score(suite: SuiteResults, one: SetInfo) -> str | None:
    best: tuple[float, str] | None = None
    for method, records in suite.runs.items():
        for score in known_scores(suite):
            found = estimate(records, On(one.name, "auroc", score), 100)
            if found is not None and (best is None or found.mean > best[0]):
                best = (found.mean, f"{one.title}: {method} by {score} {found.text(1)}")
    return best[1] if best else None


def _paper(suite: SuiteResults) -> Finding | None:
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    far: list[tuple[float, str]] = []
    count = 0
    for method, records in suite.runs.items():
        for one in suite.of_role("outlier"):
            for kind, quantity in (("MMC", On(one.name, "confidence")), ("AUROC", On(one.name, "auroc"))):
                mine, theirs = estimate(records, quantity, 100), paper.get(method, {}).get(f"{one.title} {kind}")
                if mine is not None and theirs is not None:
                    count += 1
                    gap = mine.mean - theirs.mean
                    if abs(gap) > FAR:
                        far.append(
                            (abs(gap), f"{method} on {one.title}, {kind} {mine.mean:.1f} (paper {theirs.mean:.1f})")
                        )
    if not count:
        return None
    text = f"Of {count} numbers that the paper gives too ({paper_network(suite)}), "
    named = f"none differs by more than {FAR:g} points."
    if far:
        largest = [words for _, words in sorted(far, key=lambda one: -one[0])[:MOST_NAMED]]
        more = f"; and {len(far) - len(largest)} more" if len(far) > len(largest) else ""
        named = f"{len(far)} differ by more than {FAR:g} points: {'; '.join(largest)}{more}."
    return Finding("Beside the paper", text + named)


def _certainty(suite: SuiteResults) -> Finding:
    if suite.run_count == 1:
        text = "One run: no spread is known, and small differences may turn around with other networks."
    elif are_rotations(suite.runs):
        text = (
            f"Errors are standard errors over {runs_counted(suite.runs)} of a cross-fit, enlarged for the data that these share: "
            f"every datum is fitted on, tuned on and tested in turn. Networks and outliers are the same in all of them, so errors say "
            f"how sure a mean is over data, not over networks. A lead that is smaller than three times its error may be chance."
        )
    else:
        text = (
            f"Errors are standard errors over {runs_counted(suite.runs)}, whose networks differ and whose test data do not: they "
            f"say how sure a mean is over networks, not over data. A lead in fewer than all runs, or smaller than twice its error, "
            f"may be chance."
        )
    return Finding("How sure this is", text)


ROUTINE = "went on to"
"""In remarks that a search left its first grid: it found what it sought, so they are small print."""


def suite_remarks(suite: SuiteResults) -> list[str]:
    """The small print: data, what tuning remarked, environments, time."""
    records = [record for methods in suite.groups.values() for found in methods.values() for record in found]
    sets = "; ".join(f"{one.title} {one.count}" for one in suite.sets.values() if one.role != "shift")
    remarks = [f"Data: {sets}.", *suite.notes, *_every_remark(records)]
    environments = {
        "Environment": _environment(record.environment for record in records),
        "Cost measured with": _environment([suite.cost_document["environment"]]),
    }
    remarks += [f"{what}: {words}." for what, words in environments.items() if words]
    seconds = sum(sum(record.seconds.values()) for record in records)
    remarks.append(
        f"{len(records)} records; {seconds:.0f} seconds to fit, tune and predict, "
        "without the forward passes of the networks that were given."
    )
    return remarks


def _environment(environments: Iterable[Mapping[str, Any]]) -> str:
    found: dict[str, list[str]] = {}
    for environment in environments:
        for key, value in environment.items():
            text = ", ".join(f"{one} {two}" for one, two in value.items()) if isinstance(value, dict) else str(value)
            if text not in found.setdefault(key, []):
                found[key].append(text)
    return "; ".join(f"{key} {' or '.join(values)}" for key, values in found.items())


def _every_remark(records: Iterable[Record]) -> list[str]:
    about: dict[str, list[str]] = {}
    for record in records:
        for note in _notes(record):
            methods = about.setdefault(note, [])
            if record.method not in methods:
                methods.append(record.method)
    return [f"{listed(methods)}: {note}" for note, methods in about.items()]


def _main_remarks(suite: SuiteResults) -> list[str]:
    # What a reader must know of the methods compared; remarks that differ in numbers alone are told once.
    told = []
    for method, records in suite.runs.items():
        same: dict[str, list[str]] = {}
        for record in records:
            kinds = {re.sub(r"\d[\d.]*(?:e[+-]?\d+)?", "#", note): note for note in _notes(record)}
            for kind, note in kinds.items():
                same.setdefault(kind, []).append(note)
        for notes in same.values():
            if ROUTINE not in notes[0]:
                told.append(f"{method}{_in_runs(notes, len(records))}: {notes[0]}")
    return told


def _in_runs(notes: Sequence[str], runs: int) -> str:
    count = "" if runs == 1 else f", in {len(notes)} of {runs} runs"
    return count + (" (numbers of the first)" if len(set(notes)) > 1 else "")


def _notes(record: Record) -> list[str]:
    notes = record.chosen.get("notes", [])
    return [str(note) for note in ([notes] if isinstance(notes, str) else notes)]
