"""What an evaluation says, in sentences that a reader in a hurry can act on."""

from __future__ import annotations

from mola.compare.evaluation import Evaluation
from mola.compare.measured import CLEAR, Lead
from mola.compare.report.evaluation.tables import SCORE_NAMES, short, worst_classes

__all__ = ["CAPTIONS", "METHOD_WORDS", "SCORES_CAPTION", "SCORES_TITLE", "TITLES", "findings", "remarks"]

NAMED = 5
"""Classes that are named in a sentence."""

METHOD_WORDS = {
    "MAP": "the first network as it is",
    "MAP-T": "the same with a temperature, tuned on the validation data (dashed)",
    "DE": "the deep ensemble: the mean of all the networks' probabilities",
    "DE-T": "the same with a temperature, tuned on the validation data (dashed)",
    "LLLA": "the first network with a Laplace approximation on its last layer",
    "MoLA": "all the networks, each with a Laplace approximation on its last layer",
}

TITLES = {"reliability": "Is confidence earned?", "confidence": "How confidence is spread"}

CAPTIONS = {
    "reliability": (
        "Predictions are put into bins by confidence; a point on the dashed line is right as often as it says. Below it: "
        "overconfident. Larger points hold more predictions; bins of fewer than five are not drawn."
    ),
    "confidence": "Shares of inputs by confidence, on a square-root scale.",
}

SCORES_TITLE = "How outlier scores are spread: {}"
SCORES_CAPTION = (
    "Shares of inputs by each outlier score, on a square-root scale, higher scores to the right. The less the two overlap, the "
    "better the score tells outliers from the test data. The outermost bins hold all beyond."
)


def findings(result: Evaluation) -> list[tuple[str, str]]:
    """A title and a sentence each."""
    methods, own, baseline = result.methods, result.own, result.baseline
    plain, mine, best = methods["MAP"].scores, methods[own].scores, result.leads["nll"]
    found = [
        (
            "On the test data",
            f"{_said(best, 'the lowest log loss', 4)} (MAP: {plain['nll']:.4f}, {own}: {mine['nll']:.4f}). MAP is {_gap(plain)}; "
            f"{own} is {_gap(mine)}.",
        )
    ]
    if mine["nll"] > 1.05 * best.value and result.made["rule"] == "threshold":
        found.append(
            (
                "Log loss or caution",
                "The threshold rule gives up some log loss for caution outside the data; mola fit --rule nll does not.",
            )
        )
    for name in result.outside:
        outside = {method: one.outside[name] for method, one in methods.items()}
        each = "; ".join(_best_score(result, name, method) for method in dict.fromkeys(("MAP", baseline, own)))
        found.append(
            (
                f"Outliers: {short(name, result.outside)}",
                f"{_said(result.outside_leads[name]['auroc'], 'the highest AUROC of all scores', 2, 100, ' %')}. "
                f"The best score of each: {each}. Mean confidence in them: MAP {100 * outside['MAP'].confidence:.1f} %, {own} "
                f"{100 * outside[own].confidence:.1f} %.",
            )
        )
    return [*found, *_worst(result)]


def _named(one: tuple[str, ...]) -> str:
    """A method, or a method by a score."""
    return one[0] if len(one) == 1 else f"{one[0]} by {SCORE_NAMES[one[1]]}"


def _said(found: Lead, what: str, digits: int, factor: float = 1.0, unit: str = "") -> str:
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


def _best_score(result: Evaluation, name: str, method: str) -> str:
    scores = result.methods[method].outside[name].scores
    best = max(scores, key=lambda score: scores[score].auroc)
    return f"{method} {100 * scores[best].auroc:.2f} % by {SCORE_NAMES[best]}"


def _worst(result: Evaluation) -> list[tuple[str, str]]:
    classes = result.methods[result.own].classes
    if len(classes) < 3:
        return []
    worst = [
        f"{name} ({100 * classes[name].accuracy:.1f} % of {classes[name].count})"
        for name in worst_classes(result)[:NAMED]
        if classes[name].accuracy < 1
    ]
    told = f"{result.own} is least often right about {', '.join(worst)}." if worst else "No class has an error."
    return [("Worst classes", told)]


def _gap(scores: dict[str, float]) -> str:
    gap = 100 * (scores["confidence"] - scores["accuracy"])
    return f"{'over' if gap > 0 else 'under'}confident by {abs(gap):.2f} points on average"


def remarks(result: Evaluation) -> list[str]:
    """What was tuned, left out and noted."""
    lines = [f"{name[0].upper()}{name[1:]}: {value:.4g}." for name, value in result.chosen.items()]
    lines += list(result.notes)
    for entries, verb in ((result.left_out, "left out"), (result.noted, "noted")):
        for where, found in entries.items():
            some = "; ".join(f"{name}: {words}" for name, words in list(found.items())[:5])
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            lines.append(f"{where}: {len(found)} {verb} ({some}{more}).")
    return lines
