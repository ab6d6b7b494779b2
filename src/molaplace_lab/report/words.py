"""Sentences for the reports of suites: findings derived from the numbers, and remarks."""

from __future__ import annotations

from molaplace.evaluation import TIE
from molaplace.report.numbers import BY_CONFIDENCE, Quantity
from molaplace.report.words import DESCRIPTIONS, Finding
from molaplace_lab.report.reading import SuiteResults
from molaplace_lab.report.runs import Numbers, is_clear, shared_outliers

SUITE_DESCRIPTIONS = {
    **DESCRIPTIONS,
    "MoLA": DESCRIPTIONS["MoLA (threshold)"],
    "SWAG": "a Gaussian fitted to the weights from the last training steps",
    "MultiSWAG": "a mixture of SWAGs",
    "MIMO": "one network that makes several predictions in one forward pass",
    "LLLA (distance)": "MoLA (distance) with the first network only",
    "LLLA (calibrated)": "MoLA (calibrated) with the first network only",
    "MIMO-MoLA": "MIMO with a Laplace approximation of each head",
    "MoLA (NLL)": "MoLA tuned by validation log loss",
    "MoLA (distance)": "MoLA with logits divided by the distance of the features from the training classes",
    "MoLA (all layers)": "all networks, each with a linearised Laplace approximation of all its weights (K-FAC)",
    "MoLA (subnetwork)": "all networks, each with a Laplace approximation of the 1000 weights with the largest variance",
}
"""Descriptions of the methods of suites, whose MoLA is tuned by the paper's rule."""

COMPARED = (("MoLA", "DE"), ("MoLA (calibrated)", "DE-T"))
"""Pairs of a method and the ensemble with which it is compared."""


def suite_findings(suite: SuiteResults) -> list[Finding]:
    """Return findings about clear differences between MoLA and the ensembles."""
    if not suite.runs:
        return []
    numbers = Numbers(suite.runs)
    findings = [
        _comparison(suite, numbers, method, base) for method, base in COMPARED if {method, base} <= suite.runs.keys()
    ]
    return [finding for finding in findings if finding is not None]


def _comparison(suite: SuiteResults, numbers: Numbers, method: str, base: str) -> Finding | None:
    outliers = tuple(info.name for info in shared_outliers(suite.sets, suite.runs))
    # Each entry consists of a name, a quantity, a sign (1 if higher is better), the number of decimals and a unit factor.
    quantities = (
        ("log loss on test data", Quantity("test", "nll"), -1, 4, 1),
        ("calibration error on test data (%)", Quantity("test", "ece"), -1, 2, 100),
        ("log loss on shifted data", numbers.shifted("nll"), -1, 3, 1),
        ("calibration error on shifted data (%)", numbers.shifted("ece"), -1, 1, 100),
        ("mean confidence in outliers (%)", Quantity(outliers, "confidence"), -1, 1, 100),
        ("AUROC of confidence (%)", Quantity(outliers, "auroc", BY_CONFIDENCE), 1, 1, 100),
    )
    equal: list[str] = []
    better: list[str] = []
    worse: list[str] = []
    for name, quantity, sign, digits, factor in quantities:
        means = numbers(quantity, factor)
        mean = means[method]
        base_mean = means[base]
        if mean is None or base_mean is None:
            continue
        gap = mean.minus(base_mean)
        if abs(gap.value) < TIE:
            equal.append(name)
        elif is_clear(gap):
            words = f"{name} {mean.value:.{digits}f} against {base_mean.value:.{digits}f}"
            (better if sign * gap.value > 0 else worse).append(words)
    parts = [f"{method} equals {base} in {', '.join(equal)}."] if equal else []
    parts += [f"Clearly better than {base}: {'; '.join(better)}."] if better else []
    parts += [f"Clearly worse: {'; '.join(worse)}."] if worse else []
    return Finding(f"{method} and {base}", " ".join(parts)) if parts else None


def suite_remarks(suite: SuiteResults) -> list[str]:
    """Return the remarks shown below the results of a suite: data, tuning and computing time."""
    records = [record for methods in suite.groups.values() for runs in methods.values() for record in runs]
    sets = "; ".join(f"{info.title} {info.count}" for info in suite.sets.values() if info.role != "shift")
    notes = dict.fromkeys(str(note) for record in records for note in record.chosen.get("notes", []))
    seconds = sum(sum(record.seconds.values()) for record in records)
    return [
        f"Data: {sets}.",
        *suite.notes,
        *notes,
        f"Fitting, tuning and prediction for {len(records)} records took {seconds:.0f} seconds, excluding the networks' "
        f"forward passes.",
    ]
