"""What an evaluation says, in sentences that a reader in a hurry can act on."""

from __future__ import annotations

from mola.jobs.evaluation import Evaluation
from mola.report.evaluation.tables import short

__all__ = ["CAPTIONS", "METHOD_WORDS", "TITLES", "findings", "remarks"]

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


def findings(result: Evaluation) -> list[tuple[str, str]]:
    """A title and a sentence each."""
    methods = result.methods
    best = min(methods, key=lambda name: methods[name].scores["nll"])
    own = "MoLA" if "MoLA" in methods else "LLLA"
    plain = methods["MAP"].scores
    found = [
        (
            "On the test data",
            f"{best} has the lowest log loss, {methods[best].scores['nll']:.4f} (MAP {plain['nll']:.4f}, {own} "
            f"{methods[own].scores['nll']:.4f}). MAP is {_gap(plain)}; {own} is {_gap(methods[own].scores)}.",
        )
    ]
    if methods[own].scores["nll"] > 1.05 * methods[best].scores["nll"] and result.made["rule"] == "threshold":
        found.append(
            (
                "Log loss or caution",
                "The threshold rule gives up some log loss for caution outside the data; mola fit --rule nll does not.",
            )
        )
    for name in result.outside:
        by_confidence = max(methods, key=lambda method: methods[method].outside[name].auroc)
        one, first = methods[own].outside[name], methods["MAP"].outside[name]
        if one.ood_auroc is None:
            continue
        found.append(
            (
                f"Outliers: {short(name, result.outside)}",
                f"{by_confidence} tells them apart best by confidence, with an AUROC of {_best(result, name):.1f} % (MAP "
                f"{100 * first.auroc:.1f} %); {own}'s ood_score reaches {100 * one.ood_auroc:.1f} %. Mean confidence in them: "
                f"MAP {100 * first.confidence:.1f} %, {own} {100 * one.confidence:.1f} %.",
            )
        )
    return found


def _best(result: Evaluation, name: str) -> float:
    return 100 * max(one.outside[name].auroc for one in result.methods.values())


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
