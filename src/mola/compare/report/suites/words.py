"""What a suite's numbers say, in sentences made from them: who leads where, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mola.compare.record import Record
from mola.compare.report import paper_numbers
from mola.compare.report.estimate import Estimate
from mola.compare.report.suites.quantities import Quantity, estimate, labelled, mmc, outlier_score, shifted
from mola.compare.report.suites.reading import SetInfo, SuiteResults
from mola.compare.report.suites.remarks import main_remarks
from mola.compare.report.suites.score_tables import known_scores
from mola.compare.report.suites.tables import METRIC_NAMES, paper_network, runs_counted

__all__ = ["FAR", "FIGURE_WORDS", "METHOD_WORDS", "Finding", "findings", "lead"]

METHOD_WORDS = {
    "MAP": "one trained network as it is",
    "MAP-T": "the same, its temperature scaled on validation data",
    "DE": "deep ensemble: the mean of all networks' probabilities",
    "DE-T": "the same, its temperature scaled on validation data",
    "LLLA": "one network with a Laplace approximation on its last layer",
    "MoLA": "all networks, each with a Laplace approximation on its last layer; the paper's rule for the prior",
    "MoLA (NLL)": "the same, the prior tuned by validation log loss instead",
    "MoLA (all layers)": "all networks, each with a Laplace approximation of all its weights (K-FAC), linearised",
    "MoLA (subnetwork)": "the same of the 1000 weights whose variance is largest, with all their covariances",
    "SWAG": "a Gaussian fitted to the last steps of training",
    "MultiSWAG": "a mixture of SWAGs",
    "MIMO": "one network that makes several predictions at once",
    "MIMO-MoLA": "MIMO, each of its outputs with a Laplace approximation",
}

FIGURE_WORDS = {
    "histograms": (
        "How sure the methods are of outliers",
        "Share of the data (square-root scale) by confidence, all runs together. Confidence is useful where the filled "
        "histogram stays left of the outline.",
    ),
    "shift": ("As the data shift", "Lines: means over runs. Bands: one standard error."),
    "reliability": (
        "Whether confidence can be taken at its word",
        "Below the dashed line a method is surer than it is right. Areas show how many predictions a point stands for, all "
        "runs together; bins of fewer than five, or of less than a thousandth of them, are not drawn, but count in the ECE.",
    ),
    "examples": (
        "Example images, with the confidence of each method",
        "The first images of each set, as they came; confidences are of the first run.",
    ),
    "variants": ("LLLA: structure and link", "Lines: means over runs. Bands: one standard error."),
    "structures": ("MoLA: structure and rule", "Lines: means over runs. Bands: one standard error."),
    "components": (
        "Number of components",
        "Lines: means over runs. Bands: one standard error. Shifted: mean over all levels. Outliers: mean over all sets. "
        "Vertical axes are cut.",
    ),
    "rules": ("Rules for the prior precision", "Lines: means over runs. Bands: one standard error."),
    "weights": ("Weights of the mixture", "Lines: means over runs. Bands: one standard error."),
}
"""Title and caption of each figure."""

FAR = 3.0
"""Points of % from which a difference from the paper is named."""

MOST_NAMED = 6


@dataclass(frozen=True)
class Finding:
    """A few sentences under a word or two."""

    title: str
    text: str


@dataclass(frozen=True)
class Lead:
    """The best method of a quantity, and the next."""

    leader: str
    best: Estimate
    tied: tuple[str, ...]
    """Others whose mean rounds to the same."""
    second: str | None
    """The best of the rest."""
    ahead: Estimate | None
    """By how much: the mean over the runs that both have."""
    wins: int


def lead(
    methods: Mapping[str, Sequence[Record]],
    quantity: Quantity,
    better: Literal["low", "high"],
    digits: int,
    factor: float = 1.0,
) -> Lead | None:
    """Who leads, by how much, and in how many of the runs.

    Args:
        methods: records by method.
        quantity: what is compared.
        better: which end is best.
        digits: to which means are rounded.
        factor: unit of the quantity.

    Returns:
        The lead; None if no method knows the quantity.
    """
    found = {method: estimate(records, quantity, factor) for method, records in methods.items()}
    known = {method: one for method, one in found.items() if one is not None}
    if not known:
        return None
    sign = 1 if better == "high" else -1
    order = sorted(known, key=lambda method: -sign * known[method].mean)
    leader = order[0]
    text = f"{known[leader].mean:.{digits}f}"
    tied = [method for method in order[1:] if f"{known[method].mean:.{digits}f}" == text]
    rest = [method for method in order[1:] if method not in tied]
    second = rest[0] if rest else None
    gaps = _gaps(methods[leader], methods[second], quantity, sign * factor) if second else []
    return Lead(leader, known[leader], tuple(tied), second, Estimate.of(gaps), sum(gap > 0 for gap in gaps))


def _gaps(first: Sequence[Record], other: Sequence[Record], quantity: Quantity, factor: float) -> list[float]:
    values = {record.run: quantity(record) for record in other}
    gaps = []
    for record in first:
        mine, theirs = quantity(record), values.get(record.run)
        if mine is not None and theirs is not None:
            gaps.append(factor * (mine - theirs))
    return gaps


def _said(found: Lead, digits: int) -> str:
    """Such as: MoLA 99.1 ± 0.1, ahead of DE by 0.2 ± 0.1 in 5 of 5 runs."""
    names = found.leader if not found.tied else f"{found.leader}, level with {', '.join(found.tied)}:"
    words = f"{names} {found.best.text(digits)}"
    if found.second is None or found.ahead is None:
        return words
    runs = found.ahead.runs
    count = "in the one run" if runs == 1 else f"in {found.wins} of {runs} runs"
    return f"{words}, ahead of {found.second} by {found.ahead.text(digits)} {count}"


def findings(suite: SuiteResults) -> list[Finding]:
    """What can be said of the methods compared."""
    if not suite.main:
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
    told = main_remarks(suite)
    return [Finding("Remarks of tuning", " ".join(told))] if told else []


def _in_distribution(suite: SuiteResults) -> Finding | None:
    loss = lead(suite.main, labelled("test", "nll"), "low", 4)
    error = lead(suite.main, labelled("test", "ece"), "low", 2, 100)
    if loss is None:
        return None
    text = f"Lowest log loss: {_said(loss, 4)}. "
    if error is not None:
        text += f"Lowest calibration error, in %: {_said(error, 2)}. "
    known = {
        method: one
        for method, records in suite.main.items()
        if (one := estimate(records, labelled("test", "accuracy"), 100)) is not None
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


def _shifted(suite: SuiteResults) -> Finding | None:
    highest = suite.levels()[-1] if suite.levels() else 0
    parts = []
    for metric, better, digits, factor in (
        ("log_likelihood", "high", 3, 1),
        ("ece", "low", 1, 100),
        ("accuracy", "high", 1, 100),
    ):
        found = lead(suite.main, shifted(metric), better, digits, factor)  # type: ignore[arg-type]
        if found is not None:
            unit = ", in %" if factor == 100 else ""
            end = "highest" if better == "high" else "lowest"
            parts.append(f"{end} {METRIC_NAMES[metric]}{unit}: {_said(found, digits)}")
    if not parts:
        return None
    return Finding("Under shift", f"{suite.shift_title}, mean over levels up to {highest:g}: {'; '.join(parts)}.")


def _outliers(suite: SuiteResults) -> list[Finding]:
    sets = suite.of_role("outlier")
    told: list[Finding] = []
    parts = _by_set(suite, sets, outlier_score, "high")
    if parts:
        told.append(Finding("Outliers by confidence", f"Highest AUROC, in %: {'; '.join(parts)}."))
    parts = _by_set(suite, sets, mmc, "low")
    if parts:
        told.append(Finding("Confidence in outliers", f"Lowest mean confidence, in %: {'; '.join(parts)}."))
    best = [text for one in sets if (text := _best_score(suite, one)) is not None]
    if best and len(known_scores(suite)) > 1:
        told.append(Finding("Outliers by any score", f"Highest AUROC, in %: {'; '.join(best)}."))
    return told


def _by_set(
    suite: SuiteResults,
    sets: Sequence[SetInfo],
    quantity: Callable[[str], Quantity],
    better: Literal["low", "high"],
) -> list[str]:
    found = [(one, lead(suite.main, quantity(one.name), better, 1, 100)) for one in sets]
    return [f"{one.title}: {_said(leads, 1)}" for one, leads in found if leads is not None]


def _best_score(suite: SuiteResults, one: SetInfo) -> str | None:
    best: tuple[float, str] | None = None
    for method, records in suite.main.items():
        for score in known_scores(suite):
            found = estimate(records, outlier_score(one.name, "auroc", score), 100)
            if found is not None and (best is None or found.mean > best[0]):
                best = (found.mean, f"{one.title}: {method} by {score} {found.text(1)}")
    return best[1] if best else None


def _paper(suite: SuiteResults) -> Finding | None:
    paper = paper_numbers.OUTLIERS.get(suite.name, {})
    far: list[tuple[float, str]] = []
    count = 0
    for method, records in suite.main.items():
        for one in suite.of_role("outlier"):
            for kind, quantity in (("MMC", mmc(one.name)), ("AUROC", outlier_score(one.name))):
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
    if suite.runs == 1:
        text = "One run: no spread is known, and small differences may turn around with other networks."
    else:
        text = (
            f"Errors are standard errors over {runs_counted(suite.main)}, whose networks differ and whose test data do not: they "
            f"say how sure a mean is over networks, not over data. A lead in fewer than all runs, or smaller than twice its error, "
            f"may be chance."
        )
    return Finding("How sure this is", text)
