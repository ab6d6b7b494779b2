"""Sentences for the report of a comparison: descriptions of methods, the verdict, and remarks on settings."""

from __future__ import annotations

import math
from typing import Any

from molaplace.evaluation import CLEAR, TIE, Estimate, Evaluation, LabelledResult, Lead
from molaplace.evaluation.leads import Name
from molaplace.report.comparison_tables import SCORE_HEADINGS, above_chance
from molaplace.report.numbers import Quantity

DESCRIPTIONS = {
    "MAP": "the first network, unchanged",
    "MAP-T": "MAP with a temperature tuned on the validation data",
    "DE": "the plain deep ensemble: the mean of all networks' probabilities",
    "DE-T": "DE with a temperature tuned on the validation data",
    "DE-L": "the mean of all networks' logits, divided by a temperature tuned on the validation data",
    "LLLA": "the first network, with a Laplace approximation of its last layer",
    "MoLA": "all networks, each with a Laplace approximation of its last layer",
    "LLLA (paper)": "LLLA, tuned by the rule of the paper",
    "MoLA (paper)": "MoLA, tuned by the rule of the paper",
}
"""Descriptions of the methods in evaluations."""

REGRESSION_DESCRIPTIONS = {
    **DESCRIPTIONS,
    "MAP": "the first network, unchanged, with the noise estimated from the training data",
    "MAP-N": "MAP with its noise rescaled to fit the validation data",
    "DE": "the plain deep ensemble: a mixture of all networks, each with its own noise",
    "DE-N": "DE with its noise rescaled to fit the validation data",
}

MOST_LEFT_OUT = 5
"""Maximum number of inputs left out of a set that the remarks name."""


def evaluation_findings(evaluation: Evaluation) -> dict[str, str]:
    """Return the verdict in a few lines, by title: the loss, the confidence or the intervals, and each outlier set."""
    loss = "Negative log-likelihood" if evaluation.regression else "Log loss"
    findings = {loss: _loss_sentence(evaluation)}
    on_test = evaluation.on_test[evaluation.subject]
    if evaluation.regression:
        findings["Intervals"] = (
            f"The 90 % intervals of {evaluation.subject} contain {_percent(on_test, 'coverage_90')} of the targets."
        )
    else:
        accuracy, confidence = (100 * on_test.metrics[name] for name in ("accuracy", "confidence"))
        findings["Confidence"] = (
            f"{confidence:.1f} % on average with {evaluation.subject}, for an accuracy of {accuracy:.1f} %. The calibration error (ECE) is "
            f"{_percent(on_test, 'ece')}."
        )
    outliers = evaluation.of_role("outlier")
    for info in outliers:
        findings[f"Outliers: {info.title}"] = _outlier_sentence(evaluation, info.name)
    return (
        findings
        if outliers
        else findings | {"Outliers": "Not measured: add outliers (`ood` in Python, `--ood DATA` in the command)."}
    )


def _outlier_sentence(evaluation: Evaluation, name: str) -> str:
    # Name the best method, unless even its AUROC could be that of random guessing.
    lead = evaluation.leads[name]["auroc"]
    method, score = lead.best
    if above_chance(evaluation, Quantity(name, "auroc", score), method):
        return lead_sentence(lead, "the highest AUROC")
    relation = "below" if lead.value < 0.5 else "not clearly above"
    return f"No score detects this set. The highest AUROC is {100 * lead.value:.2f} %, {relation} the 50 % of random guessing."


def _percent(result: LabelledResult, metric: str) -> str:
    return f"{Estimate.of(result.metrics[metric], result.errors.get(metric)).scaled(100).text(1)} %"


IN_WORDS = {
    "MAP": "one network",
    "MAP-T": "one scaled network",
    "MAP-N": "one scaled network",
    "DE": "the ensemble",
    "DE-T": "the scaled ensemble",
    "DE-N": "the scaled ensemble",
    "DE-L": "the scaled mean of logits",
    "LLLA": "one network with a posterior",
    "LLLA (paper)": "the paper's rule",
    "MoLA (paper)": "the paper's rule",
}
"""Methods with which the verdict compares, in words."""


def _loss_sentence(evaluation: Evaluation) -> str:
    # Compare the posterior with the plain networks, with their rescaled versions ("-T", "-N" or "-L"), and then with any other method
    # that is better.
    gaps = {method: Estimate.of(*gaps["nll"]) for method, gaps in evaluation.differences.items()}
    compared_methods = [method for method in gaps if method.split("-")[0] == evaluation.baseline]
    compared_methods += [method for method in gaps if method not in compared_methods and gaps[method].value < 0]
    verdicts: dict[str, list[str]] = {}
    for method in compared_methods:
        verdict, size = _against(gaps[method])
        named = f"{IN_WORDS[method]} ({method}{size})" if method in IN_WORDS else f"{method}{size}"
        verdicts.setdefault(verdict, []).append(named)
    value = evaluation.on_test[evaluation.subject].metrics["nll"]
    compared = "; ".join(f"{verdict} {' and '.join(methods)}" for verdict, methods in verdicts.items())
    return f"{evaluation.subject}: {value:.4g}{', ' if compared else ''}{compared}."


def _against(gap: Estimate) -> tuple[str, str]:
    # Return a verdict, such as "clearly lower than", and the size of the gap.
    if abs(gap.value) < TIE and not gap.error >= TIE:
        return "equal to", ""
    size = f", by {Estimate(abs(gap.value), gap.error)}"
    direction = f"{'lower' if gap.value > 0 else 'higher'} than"
    if math.isnan(gap.error):
        return f"for a single input, {direction}", size
    return f"{'clearly' if abs(gap.value) > CLEAR * gap.error else 'not clearly'} {direction}", size


def lead_sentence(lead: Lead, what: str) -> str:
    """Return a sentence such as "MoLA by entropy has the highest AUROC, 98.30 %, clearly ahead of DE by energy (...)."."""

    def words(name: Name) -> str:
        method, *score = name
        return f"{method} by {SCORE_HEADINGS[score[0]]}" if score else method

    value = f"{what}, {100 * lead.value:.2f} %"
    best = words(lead.best)
    if lead.rival is None or lead.ahead is None:
        return f"All methods share {value}." if lead.level else f"{best} has {value}."
    if lead.level:
        tied = [words(name) for name in lead.level]
        best += f" (tied with {', '.join(tied) if len(tied) < 4 else f'{len(tied)} other results'})"
    gap = f"{100 * lead.ahead:.2f}"
    if lead.error is not None:
        gap += f" \N{PLUS-MINUS SIGN} {100 * lead.error:.2f}"
    if lead.best in lead.clear:
        return f"{best} has {value}, clearly ahead of {words(lead.rival)} (by {gap})."
    reason = "for a single input" if lead.error is None else f"within {CLEAR:g} standard errors"
    return f"{best} has {value}, but is not clearly ahead of {words(lead.rival)} (by {gap}, {reason})."


def evaluation_remarks(evaluation: Evaluation) -> list[str]:
    """Return sentences about tuned values and omitted inputs, and the notes."""
    lines = []
    for name in dict.fromkeys(name for result in evaluation.methods.values() for name in result.chosen):
        title = name.replace("_", " ").capitalize()
        tuned = {method: result.chosen[name] for method, result in evaluation.methods.items() if name in result.chosen}
        lines += [f"{title} of {method}: {_listed(value)}." for method, value in tuned.items()]
    lines += evaluation.notes
    for name, reasons in evaluation.left_out.items():
        listed = "; ".join(f"{entry}: {reason}" for entry, reason in list(reasons.items())[:MOST_LEFT_OUT])
        more = f"; and {len(reasons) - MOST_LEFT_OUT} more" if len(reasons) > MOST_LEFT_OUT else ""
        lines.append(f"Inputs left out of {name}: {len(reasons)} ({listed}{more}).")
    return lines


def _listed(value: Any) -> str:
    if isinstance(value, str):
        return value
    texts = [f"{number:.4g}" for number in (value if isinstance(value, list) else [value])]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)  # networks usually share a value
