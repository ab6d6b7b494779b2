"""Sentences for reports: remarks, and findings derived from the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from molaplace.evaluation.demo_result import DemoResult
from molaplace.evaluation.leads import CLEAR, SAME, Lead
from molaplace.evaluation.record import Comparison
from molaplace.report.numbers import Numbers, On
from molaplace.report.single_run_tables import SCORE_NAMES, digits_of

METHODS = {
    "MAP": "the first network, unchanged",
    "MAP-T": "MAP with a temperature tuned on the validation data",
    "DE": "the plain deep ensemble: the mean of all networks' probabilities",
    "DE-T": "DE with a temperature tuned on the validation data",
    "DE-L": "the mean of all networks' logits, divided by a temperature tuned on the validation data",
    "LLLA": "the first network, with a Laplace approximation of its last layer",
    "MoLA (threshold)": "all networks, each with a Laplace approximation of its last layer, tuned by the paper's rule",
    "MoLA (calibrated)": "MoLA tuned for calibration by the default rule: temperature, pooling, prior precision and distance exponent",
    "MoLA": "all networks, each with a Laplace approximation of its last layer",
}
"""Descriptions of the methods in comparisons."""

REGRESSION_METHODS = {
    **METHODS,
    "MAP": "the first network, unchanged, with the noise estimated from the training data",
    "MAP-N": "MAP with its noise rescaled to fit the validation data",
    "DE": "the plain deep ensemble: a mixture of all networks, each with its own noise",
    "DE-N": "DE with its noise rescaled to fit the validation data",
}


@dataclass(frozen=True)
class Finding:
    """A finding: a title and a few sentences."""

    title: str
    text: str


# --- the demo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """A metric's values for MAP and for MoLA with the default rule, and a sentence that lists the values for the other methods."""

    title: str
    before: str
    after: str
    sentence: str


def demo_headlines(result: DemoResult) -> list[Headline]:
    """Return the headlines shown as cards at the top of the page and printed in the terminal."""
    comparison = result.comparison
    numbers, outliers = Numbers(comparison.runs), comparison.of_role("outlier")
    turned = next(one for one in comparison.of_role("shift") if one.level == 30)

    def headline(title: str, quantity: On, form: str) -> Headline:
        found = {
            name: f"{one.mean:{form}}".replace("%", " %") for name, one in numbers(quantity).items() if one is not None
        }
        before, *others, after = found
        return Headline(title, found[before], found[after], ", ".join(f"{one} {found[one]}" for one in others) + ".")

    return [
        headline("log loss, test digits", On(comparison.test.name, "nll"), ".3f"),
        headline(f"log loss, {turned.title}", On(turned.name, "nll"), ".2f"),
        *(
            headline(f"confidence in {one.title}", On(one.name, "confidence"), ".0%")
            for one in outliers
            if one.name != "noise"
        ),
    ]


def tuning_remarks(result: DemoResult) -> list[str]:
    """Return sentences about the tuned values, followed by notes from tuning."""
    chosen = [
        f"{name}: prior precision {record.chosen['prior_precision'][0]:.3g}, tuned by the rule {record.chosen['rule']}."
        for name, record in result.comparison.methods.items()
        if "prior_precision" in record.chosen
    ]
    return [*chosen, *result.comparison.notes]


def demo_remarks(result: DemoResult) -> list[str]:
    """Return the remarks shown at the end of the demo's page: data, networks, tuned values and limitations."""
    sizes = {one.role: one.count for one in result.comparison.sets.values()}
    return [
        f"The data are scikit-learn's 1797 handwritten digits of 8 by 8 pixels, split at random into {sizes['train']} for training, "
        f"{sizes['validation']} for tuning and {sizes['test']} for testing. The outliers are "
        f"patches of scikit-learn's two photographs, and uniform noise.",
        f"The networks have {result.comparison.made['parameters']} weights and two hidden layers without biases. They were "
        f"trained for {result.settings.epochs} epochs with little regularisation and are therefore overconfident. "
        f"With strong weight decay, MoLA performs much like the ensemble.",
        *tuning_remarks(result),
        "This is one run with one seed on a small data set, so small differences between methods may change sign with another seed.",
    ]


# --- molaplace evaluate ---------------------------------------------------------------------------------------------------


def evaluation_findings(comparison: Comparison) -> list[Finding]:
    """Return one finding for the test data and one for each outlier set."""
    own, test, leads = comparison.own, comparison.test.name, comparison.leads[comparison.test.name]
    mine, names = comparison.methods[own].labelled[test].metrics, method_words(comparison)
    loss, digits = (
        ("negative log-likelihood", digits_of(comparison, "nll")) if comparison.regression else ("log loss", 4)
    )
    sentences = [_own_sentence(comparison, loss, digits)]
    if leads["nll"].best == (own,):
        sentences.append(f"No other method has a lower {loss}.")
    else:
        sentences.append(lead_sentence(leads["nll"], f"the lowest {loss}", digits, names))
    if comparison.regression:
        what = "the lowest root mean squared error"
        sentences.append(lead_sentence(leads["rmse"], what, digits_of(comparison, "rmse"), names))
        sentences.append(f"The 90 % intervals of {own} cover {100 * mine['coverage_90']:.1f} % of the targets.")
    else:
        gap = 100 * (mine["confidence"] - mine["accuracy"])
        # Standard error of the accuracy if the true accuracy equals the mean confidence.
        chance = 100 * math.sqrt(max(0.0, mine["confidence"] * (1 - mine["confidence"])) / comparison.test.count)
        if abs(gap) > chance:
            sentences.append(
                f"{own} is {'over' if gap > 0 else 'under'}confident by {abs(gap):.2f} percentage points on average."
            )
        else:
            sentences.append(
                f"The mean confidence of {own} differs from its accuracy by no more than chance would explain."
            )
    outliers, what = comparison.of_role("outlier"), "the highest AUROC of all scores"
    if not outliers:
        sentences.append("Add `--ood DATA` to measure OOD detection.")
    return [
        Finding("On the test data", " ".join(sentences)),
        *(
            Finding(
                f"Outliers: {one.title}", lead_sentence(comparison.leads[one.name]["auroc"], what, 2, names, 100, " %")
            )
            for one in outliers
        ),
    ]


def method_words(comparison: Comparison) -> dict[str, str]:
    """Return the names by which sentences refer to the methods. The posterior keeps the short name that the tables use."""
    network = "network" if comparison.baseline == "MAP" else "first network"
    return {
        "MAP": f"the plain {network}",
        "MAP-T": f"the temperature-scaled {network}",
        "MAP-N": f"the {network} with rescaled noise",
        "DE": "the plain ensemble",
        "DE-T": "the temperature-scaled ensemble",
        "DE-N": "the ensemble with rescaled noise",
        "DE-L": "the temperature-scaled mean of the logits",
        "LLLA": "the Laplace approximation of the first network",
        comparison.own: comparison.own,
    }


def _own_sentence(comparison: Comparison, loss: str, digits: int) -> str:
    # Compare the posterior with the plain networks and, given validation data, with their rescaled versions ("-T" or "-N").
    own, base, names = comparison.own, comparison.baseline, method_words(comparison)

    def against(other: str) -> str:
        gap, error = comparison.differences[other]["nll"]
        if max(abs(gap), error or 0.0) < SAME:
            return f"equal to that of {names[other]}"
        size, way = f"{abs(gap):.{digits}f}", "lower" if gap > 0 else "higher"
        if error is None:
            return f"{way} than that of {names[other]} (by {size}, for a single input)"
        size += f" \N{PLUS-MINUS SIGN} {error:.{digits}f}"
        if abs(gap) > CLEAR * error:
            return f"clearly {way} than that of {names[other]} (by {size})"
        return f"not clearly different from that of {names[other]} ({size} {way})"

    value = comparison.methods[own].labelled[comparison.test.name].metrics["nll"]
    compared = [against(one) for one in (base, f"{base}-T", f"{base}-N") if one in comparison.methods]
    return f"The {loss} of the posterior ({own}), {value:.{digits}f}, is {' and '.join(compared)}."


def lead_sentence(
    found: Lead, what: str, digits: int, names: Mapping[str, str], factor: float = 1.0, unit: str = ""
) -> str:
    """Return a sentence such as "MoLA has the lowest log loss, 0.1832, clearly ahead of the plain ensemble (by 0.0048 ± 0.0010)."."""

    def named(one: tuple[str, ...]) -> str:
        return names[one[0]] if len(one) == 1 else f"{names[one[0]]} by {SCORE_NAMES[one[1]]}"

    value = f"{what}, {factor * found.value:.{digits}f}{unit}"
    if found.rival is None or found.ahead is None:
        return f"All methods share {value}."
    best = named(found.best)
    best = f"{best[:1].upper()}{best[1:]}"
    if found.level:
        level = [named(one) for one in found.level]
        best += f" (tied with {', '.join(level) if len(level) < 4 else f'{len(level)} other results'})"
    by = f"{factor * found.ahead:.{digits}f}"
    if found.error is not None:
        by += f" \N{PLUS-MINUS SIGN} {factor * found.error:.{digits}f}"
    if found.best in found.clear:
        return f"{best} has {value}, clearly ahead of {named(found.rival)} (by {by})."
    why = f"within {CLEAR:g} standard errors" if found.error is not None else "for a single input"
    return f"{best} has {value}, but is not clearly ahead of {named(found.rival)} (by {by}, {why})."


def evaluation_remarks(comparison: Comparison) -> list[str]:
    """Return sentences about tuned values and omitted inputs, followed by the notes."""
    lines = []
    for entry, title in (("prior_precision", "Prior precision"), ("noise", "Noise"), ("temperature", "Temperature")):
        for method, record in comparison.methods.items():
            if (value := record.chosen.get(entry)) is not None:
                numbers = value if entry == "noise" else value[:1] if isinstance(value, list) else [value]
                lines.append(f"{title} of {method}: {', '.join(f'{one:.4g}' for one in numbers)}.")
    lines += comparison.notes
    for where, found in comparison.left_out.items():
        some = "; ".join(f"{name}: {words}" for name, words in list(found.items())[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        lines.append(f"Inputs left out of {where}: {len(found)} ({some}{more}).")
    return lines
