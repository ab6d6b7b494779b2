"""Sentences of reports: findings made from the numbers, remarks, and the titles and captions of figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mola.compare.demo_result import DemoResult
from mola.compare.measured import CLEAR, SAME, Lead
from mola.compare.record import Comparison, Record
from mola.compare.report import paper_numbers
from mola.compare.report.estimate import Estimate, is_clear, leaders
from mola.compare.report.numbers import (
    BY_CONFIDENCE,
    Numbers,
    On,
    are_rotations,
    runs_counted,
    shared_outliers,
)
from mola.compare.report.reading import SuiteResults, known_scores, listed
from mola.compare.report.single_run_tables import SCORE_NAMES, digits_of, worst_classes
from mola.compare.report.suite_tables import GROUP_TITLES, paper_network
from mola.compare.report.tables import Better

METHODS = {
    "MAP": "the first network as it is",
    "MAP-T": "MAP with a temperature, tuned on the validation data",
    "DE": "the deep ensemble: the mean of all networks' probabilities",
    "DE-T": "DE with a temperature, tuned on the validation data",
    "DE-L": "the mean of all networks' logits, with a temperature",
    "LLLA": "the first network with a Laplace approximation of its last layer",
    "MoLA": "all networks, each with a Laplace approximation of its last layer",
    "MoLA (NLL)": "MoLA, its prior precision tuned by validation log loss instead of the paper's rule",
    "MoLA (distance)": "MoLA, its logits divided by the distance of the features from the training classes",
    "LLLA (distance)": "MoLA (distance) of the first network alone",
    "MoLA (calibrated)": "MoLA, its temperature, pooling and prior precision tuned for calibration",
    "LLLA (calibrated)": "MoLA (calibrated) of the first network alone",
    "MoLA (all layers)": "all networks, each with a linearised Laplace approximation of all its weights (K-FAC)",
    "MoLA (subnetwork)": "all networks, each with a Laplace approximation of its 1000 weights of largest variance",
    "SWAG": "a Gaussian fitted to the last steps of training",
    "MultiSWAG": "a mixture of SWAGs",
    "MIMO": "one network that makes several predictions at once",
    "MIMO-MoLA": "MIMO, each of its outputs with a Laplace approximation",
}

REGRESSION_METHODS = {
    **METHODS,
    "MAP": "the first network as it is, with the noise of the training data",
    "MAP-N": "MAP, its noise scaled on the validation data",
    "DE": "the deep ensemble: a mixture of all networks, each with its noise",
    "DE-N": "DE, its noise scaled on the validation data",
}

RELIABILITY = (
    "Calibration",
    "Accuracy over confidence, in bins of confidence. Overconfident predictions are below the dashed line. Areas of points show "
    "the number of predictions; bins of fewer than five, or of less than a thousandth of all, are left out.",
)

DEMO_FIGURES = {
    "examples": (
        "The inputs",
        "The first inputs of each kind. Patches and noise have the size and the value range of the digits.",
    ),
    "histograms": (
        "Confidence in inputs that are not digits",
        "Share of inputs (square-root scale) by confidence. Confidence is useful where the filled histogram, of inputs that are "
        "not digits, stays left of the outline, of the test digits.",
    ),
    "reliability": RELIABILITY,
    "rotation": (
        "As the digits turn",
        "Accuracy is nearly the same for all methods, so only MoLA's is drawn. Beyond 45° every method is overconfident; the "
        "methods differ in the log loss that this costs.",
    ),
    "distance": (
        "Far away from the data",
        "First two panels: inputs multiplied by δ. The networks have no biases, so theory is exact: a single network becomes "
        "certain, and MoLA approaches the dotted limits; with a distance exponent, which the default rule may choose, the limit "
        "is 1/C. No curve crosses the Theorem's bound. Last panel, the paper's rule: the bound holds for every input at once, so "
        "it falls below 1 only at prior precisions at which MoLA is no longer confident in the test digits either.",
    ),
    "moons": (
        "Confidence over the plane",
        "Two moons, in a window six times wider than the data. MAP is certain everywhere but on a thin line, DE uncertain where "
        "its networks disagree, MoLA also in wide sectors around the boundary. These networks have biases.",
    ),
}
"""Title and caption of each figure."""

EVALUATION_FIGURES = {
    "reliability": RELIABILITY,
    "confidence": ("Distribution of confidence", "Share of inputs by confidence, on a square-root scale."),
    "decisions": (
        "Fewer answers, fewer errors",
        "Error rate of the most confident predictions, by coverage. Crosses: answers chosen on the validation data so that their "
        "error rate is, with 95 % certainty, at most that of the dotted line; inputs that raise the alarm are not answered.",
    ),
    "coverage": (
        "Coverage of intervals",
        "Share of the test targets in central intervals, by the intervals' probability. Calibrated intervals are on the dashed "
        "line, overconfident ones below it. Bands: one standard error.",
    ),
    "spread": (
        "Predicted standard deviation and error",
        "Test data in groups of equal size by predicted standard deviation: its root mean square, and the root mean squared "
        "error. Both are equal on the dashed line. A method with a constant standard deviation is a single cross.",
    ),
    "predicted": ("Predicted and true", "Means and 90 % intervals for some of the test data."),
    "scores": (
        "Distribution of outlier scores: {}",
        "Share of inputs by outlier score, on a square-root scale. Less overlap separates outliers better. The outermost bins "
        "include all values beyond.",
    ),
}

BANDS = "Lines: means over runs. Bands: one standard error."

SUITE_FIGURES = {
    "histograms": (
        "Confidence in outliers",
        "Share of the data (square-root scale) by confidence, all runs together. Confidence is useful where the filled histogram "
        "stays left of the outline.",
    ),
    "shift": ("Under shift", BANDS),
    "types": (
        "By type of shift, against the paper's rule",
        "Differences from MoLA tuned by the paper's rule, means over runs: blue where the other method is better, orange where "
        "it is worse. Each row has its own test images.",
    ),
    "reliability": (RELIABILITY[0], f"{RELIABILITY[1]} All runs together."),
    "examples": (
        "Example images",
        "The first images of each set, with the confidence of each method in the first run.",
    ),
    **{group: (title, BANDS) for group, title in GROUP_TITLES.items()},
    "components": (GROUP_TITLES["components"], f"{BANDS} Shifted: mean over levels. Outliers: mean over sets."),
}


@dataclass(frozen=True)
class Finding:
    """A few sentences under a title."""

    title: str
    text: str


# --- the demo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """A number of MAP and of MoLA by the default rule; the sentence has those of the methods between them."""

    title: str
    before: str
    after: str
    sentence: str


def demo_headlines(result: DemoResult) -> list[Headline]:
    """The findings at the top of the page and in the terminal."""
    comparison = result.comparison
    numbers, outliers = Numbers(comparison.runs), comparison.of_role("outlier")
    turned = next(one for one in comparison.of_role("shift") if one.level == 30)

    def headline(title: str, quantity: On, form: str) -> Headline:
        found = {name: f"{one.mean:{form}}" for name, one in numbers(quantity).items() if one is not None}
        before, *others, after = found
        return Headline(title, found[before], found[after], ", ".join(f"{one} {found[one]}" for one in others) + ".")

    return [
        headline("log loss, test digits", On(comparison.test.name, "nll"), ".3f"),
        headline(f"log loss, {turned.title}", On(turned.name, "nll"), ".2f"),
        *(headline(f"confidence in {one.title}", On(one.name, "confidence"), ".0%") for one in outliers),
    ]


def tuning_remarks(result: DemoResult) -> list[str]:
    """Tuned values, and remarks of tuning."""
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
        f"Networks: two hidden layers, no biases, {result.comparison.made['parameters']} weights, {result.settings.epochs} "
        f"epochs, hardly regularised and therefore overconfident. With strong weight decay MoLA comes close to the ensemble.",
        *tuning_remarks(result),
        "One run of one seed on a small data set: small differences between methods may change sign with another seed.",
    ]


# --- mola evaluate ---------------------------------------------------------------------------------------------------

NAMED = 5
"""Classes that a sentence names."""


def evaluation_findings(comparison: Comparison) -> list[Finding]:
    """Findings on the test data and on outliers."""
    own, base, test = comparison.own, comparison.baseline, comparison.test.name
    mine, plain = (comparison.methods[name].labelled[test].metrics for name in (own, base))
    metrics = ("rmse", "nll", "crps") if comparison.regression else ("accuracy", "nll", "brier", "ece")
    same = own != base and all(abs(mine[name] - plain[name]) < SAME for name in metrics)
    sentences = [f"{own} equals {base} to all digits."] if same else []
    leads = comparison.leads[test]
    if comparison.regression:
        sentences += [
            lead_sentence(leads["rmse"], "the lowest root mean squared error", digits_of(comparison, "rmse")),
            lead_sentence(leads["nll"], "the lowest negative log-likelihood", digits_of(comparison, "nll")),
            f"90 % intervals of {own} cover {100 * mine['coverage_90']:.1f} % of the targets.",
        ]
    else:
        gap = 100 * (mine["confidence"] - mine["accuracy"])
        sentences += [
            lead_sentence(leads["nll"], "the lowest log loss", 4),
            f"{own} is {'over' if gap > 0 else 'under'}confident by {abs(gap):.2f} points on average.",
        ]
    found = [Finding("On the test data", " ".join(sentences))]
    if comparison.made["rule"] == "threshold" and mine["nll"] > 1.05 * plain["nll"] and _more_cautious(comparison):
        text = (
            f"The log loss of {own} is {mine['nll']:.4f}, that of {base} {plain['nll']:.4f}: the threshold rule accepts a loss on "
            f"the data for less confidence outside them. `mola fit --rule nll` tunes for log loss."
        )
        found.append(Finding(f"{own} and {base}", text))
    return [*found, *_outlier_findings(comparison), *_worst(comparison)]


def _more_cautious(comparison: Comparison) -> bool:
    mine, plain = (comparison.methods[name].outliers.values() for name in (comparison.own, comparison.baseline))
    return all((one.confidence or 0.0) < (other.confidence or 0.0) for one, other in zip(mine, plain, strict=True))


def _outlier_findings(comparison: Comparison) -> list[Finding]:
    own, found = comparison.own, []
    for one in comparison.of_role("outlier"):
        results = {
            name: comparison.methods[name].outliers[one.name]
            for name in dict.fromkeys(("MAP", comparison.baseline, own))
        }
        sentences = [
            lead_sentence(comparison.leads[one.name]["auroc"], "the highest AUROC of all scores", 2, 100, " %")
        ]
        if comparison.regression:
            usual = comparison.methods[own].labelled[comparison.test.name].metrics["std"]
            times = (results[own].std or 0.0) / usual
            sentences.append(f"The standard deviations of {own} are {times:.2f} times those on the test data.")
        else:
            shown = ", ".join(f"{name} {100 * (result.confidence or 0.0):.1f} %" for name, result in results.items())
            sentences.append(f"Mean confidence: {shown}.")
        found.append(Finding(f"Outliers: {one.title}", " ".join(sentences)))
    return found


def _worst(comparison: Comparison) -> list[Finding]:
    classes = comparison.methods[comparison.own].labelled[comparison.test.name].classes
    worst = [
        f"{name} ({100 * classes[name].accuracy:.1f} % of {classes[name].count})"
        for name in worst_classes(comparison)[:NAMED]
        if classes[name].accuracy < 1
    ]
    if len(classes) < 3 or not worst:
        return []
    many = "classes" if all(one.auroc is None for one in classes.values()) else "labels"
    return [Finding(f"Worst {many}", f"The lowest accuracies of {comparison.own}: {', '.join(worst)}.")]


def lead_sentence(found: Lead, what: str, digits: int, factor: float = 1.0, unit: str = "") -> str:
    """Such as: MoLA has the lowest log loss, 0.1832, clearly ahead of DE (by 0.0048 +- 0.0010)."""

    def named(one: tuple[str, ...]) -> str:
        return one[0] if len(one) == 1 else f"{one[0]} by {SCORE_NAMES[one[1]]}"

    value = f"{what}, {factor * found.value:.{digits}f}{unit}"
    if found.rival is None or found.ahead is None:
        return f"All methods share {value}."
    names = named(found.best)
    if found.level:
        names += f" (level with {', '.join(named(one) for one in found.level)})"
    by = f"{factor * found.ahead:.{digits}f}"
    if found.error is not None:
        by += f" \N{PLUS-MINUS SIGN} {factor * found.error:.{digits}f}"
    if found.best in found.clear:
        return f"{names} has {value}, clearly ahead of {named(found.rival)} (by {by})."
    why = f"within {CLEAR:g} standard errors" if found.error is not None else "for a single input"
    return f"{names} has {value}, but is not clearly ahead of {named(found.rival)} (by {by}, {why})."


def evaluation_remarks(comparison: Comparison) -> list[str]:
    """Tuned values, notes, and inputs that were left out or noted."""
    lines = []
    for entry, title in (("prior_precision", "Prior precision"), ("noise", "Noise"), ("temperature", "Temperature")):
        for method, record in comparison.methods.items():
            if (value := record.chosen.get(entry)) is not None:
                numbers = value if entry == "noise" else value[:1] if isinstance(value, list) else [value]
                lines.append(f"{title} of {method}: {', '.join(f'{one:.4g}' for one in numbers)}.")
    lines += comparison.notes
    for entries, verb in ((comparison.left_out, "left out"), (comparison.noted, "noted")):
        for where, found in entries.items():
            some = "; ".join(f"{name}: {words}" for name, words in list(found.items())[:5])
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            lines.append(f"{where}: {len(found)} {verb} ({some}{more}).")
    return lines


# --- suites ----------------------------------------------------------------------------------------------------------

FAR, MOST_NAMED = 3.0, 6
"""Percentage points from which a difference from the paper is named, and the most that are named."""


def suite_findings(suite: SuiteResults) -> list[Finding]:
    """Findings about the methods compared."""
    if not suite.runs:
        return []
    numbers = Numbers(suite.runs)
    parts = [_against_ensemble(suite, numbers), _leads(suite, numbers), _paper(suite, numbers), _tuning(suite)]
    return [finding for finding in (*parts, _certainty(suite)) if finding is not None]


def _quantities(suite: SuiteResults, numbers: Numbers) -> list[tuple[str, On, Better, int, float]]:
    # Name, number, which end is best, digits, and the factor to its unit.
    outliers = tuple(one.name for one in shared_outliers(suite, suite.runs))
    return [
        ("log loss on test data", On("test", "nll"), "low", 4, 1),
        ("calibration error on test data (%)", On("test", "ece"), "low", 2, 100),
        ("log loss on shifted data", numbers.shifted("nll"), "low", 3, 1),
        ("calibration error on shifted data (%)", numbers.shifted("ece"), "low", 1, 100),
        ("mean confidence in outliers (%)", On(outliers, "confidence"), "low", 1, 100),
        ("AUROC of confidence (%)", On(outliers, "auroc", BY_CONFIDENCE), "high", 1, 100),
    ]


def _against_ensemble(suite: SuiteResults, numbers: Numbers) -> Finding | None:
    own, base = "MoLA", suite.baseline
    if own not in suite.runs or base not in suite.runs:
        return None
    better: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for name, quantity, end, digits, factor in _quantities(suite, numbers):
        found = numbers(quantity, factor)
        if (mine := found[own]) is None or (theirs := found[base]) is None:
            continue
        gap = mine.minus(theirs)
        words = f"{name} {mine.mean:.{digits}f} against {theirs.mean:.{digits}f}"
        if abs(gap.mean) < SAME:
            same.append(name)
        elif is_clear(gap):
            (better if (gap.mean < 0) == (end == "low") else worse).append(words)
    parts = [f"{own} equals {base} to all digits: {', '.join(same)}."] if same else []
    parts += [f"Clearly better than {base}: {'; '.join(better)}."] if better else []
    parts += [f"Clearly worse: {'; '.join(worse)}."] if worse else []
    if not parts:
        return None
    return Finding(f"{own} and {base}", " ".join(parts))


def _leads(suite: SuiteResults, numbers: Numbers) -> Finding | None:
    parts = []
    for name, quantity, end, digits, factor in _quantities(suite, numbers):
        found = numbers(quantity, factor)
        if best := leaders(found, end):
            parts.append(f"{name}: {', '.join(best)}, {_text(found, best[0], digits)}")
    for one in suite.of_role("outlier"):
        scored = {
            f"{method} by {score}": value
            for score in known_scores(suite)
            for method, value in numbers(On(one.name, "auroc", score), 100).items()
        }
        if best := leaders(scored, "high"):
            parts.append(f"AUROC of any score (%), {one.title}: {', '.join(best)}, {_text(scored, best[0], 1)}")
    return Finding("Clear leads", f"{'; '.join(parts)}.") if parts else None


def _text(found: Mapping[str, Estimate | None], name: str, digits: int) -> str:
    one = found[name]
    return "" if one is None else one.text(digits)


def _paper(suite: SuiteResults, numbers: Numbers) -> Finding | None:
    paper, far, count = paper_numbers.OUTLIERS.get(suite.name, {}), [], 0
    for one in suite.of_role("outlier"):
        for kind, quantity in (("MMC", On(one.name, "confidence")), ("AUROC", On(one.name, "auroc", BY_CONFIDENCE))):
            for method, mine in numbers(quantity, 100).items():
                theirs = paper.get(method, {}).get(f"{one.title} {kind}")
                if mine is not None and theirs is not None:
                    count += 1
                    words = f"{method} on {one.title}, {kind} {mine.mean:.1f} (paper {theirs.mean:.1f})"
                    far.append((abs(mine.mean - theirs.mean), words))
    if not count:
        return None
    named = [words for gap, words in sorted(far, key=lambda one: -one[0]) if gap > FAR]
    text = f"Of {count} numbers that the paper reports ({paper_network(suite)}), "
    if not named:
        return Finding("Beside the paper", f"{text}none differs by more than {FAR:g} points.")
    shown = "; ".join(named[:MOST_NAMED])
    more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return Finding("Beside the paper", f"{text}{len(named)} differ by more than {FAR:g} points: {shown}{more}.")


def _certainty(suite: SuiteResults) -> Finding:
    if suite.run_count == 1:
        text = "One run: the spread is unknown, and small differences may change sign with other networks."
    elif are_rotations(suite.runs):
        text = (
            f"Standard errors over {runs_counted(suite.runs)} of a cross-fit, corrected for shared data. Networks and outliers "
            f"are the same in all of them, so errors describe data, not networks."
        )
    else:
        text = (
            f"Standard errors over {runs_counted(suite.runs)}, whose networks differ and whose test data do not: errors describe "
            f"networks, not data."
        )
    return Finding("Uncertainty", text)


ROUTINE = "went on to"
"""Part of the remark that a search left its first grid, which is routine."""


def _tuning(suite: SuiteResults) -> Finding | None:
    # Remarks that differ in numbers alone are shown once.
    same: dict[str, tuple[str, list[str]]] = {}
    for method, records in suite.runs.items():
        for note in dict.fromkeys(note for record in records for note in _notes(record) if ROUTINE not in note):
            _, methods = same.setdefault(re.sub(r"\d[\d.]*(?:e[+-]?\d+)?", "#", note), (note, []))
            if method not in methods:
                methods.append(method)
    told = [f"{listed(methods)}: {note}" for note, methods in same.values()]
    return Finding("Remarks of tuning", " ".join(told)) if told else None


def _notes(record: Record) -> list[str]:
    notes = record.chosen.get("notes", [])
    return [str(note) for note in ([notes] if isinstance(notes, str) else notes)]


def suite_remarks(suite: SuiteResults) -> list[str]:
    """The small print: data, remarks of tuning, environments, time."""
    records = [record for methods in suite.groups.values() for found in methods.values() for record in found]
    sets = "; ".join(f"{one.title} {one.count}" for one in suite.sets.values() if one.role != "shift")
    about: dict[str, list[str]] = {}
    for record in records:
        for note in dict.fromkeys(_notes(record)):
            if record.method not in about.setdefault(note, []):
                about[note].append(record.method)
    environments = {
        "Environment": _environment(record.environment for record in records),
        "Environment of the cost": _environment([suite.cost_document["environment"]]),
    }
    seconds = sum(sum(record.seconds.values()) for record in records)
    return [
        f"Data: {sets}.",
        *suite.notes,
        *[f"{listed(methods)}: {note}" for note, methods in about.items()],
        *[f"{what}: {words}." for what, words in environments.items() if words],
        f"{len(records)} records; {seconds:.0f} seconds to fit, tune and predict, without the forward passes of given networks.",
    ]


def _environment(environments: Iterable[Mapping[str, Any]]) -> str:
    found: dict[str, list[str]] = {}
    for environment in environments:
        for key, value in environment.items():
            text = ", ".join(f"{one} {two}" for one, two in value.items()) if isinstance(value, dict) else str(value)
            if text not in found.setdefault(key, []):
                found[key].append(text)
    return "; ".join(f"{key} {' or '.join(values)}" for key, values in found.items())
