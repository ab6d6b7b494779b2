"""Near and far outliers as OpenOOD shows them, and what differs from its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mola.compare.record import SetInfo
from mola.compare.report.estimate import Estimate, estimate, mean_over, runs_words
from mola.compare.report.reading import SuiteResults, known_scores
from mola.compare.report.tables import Column, Number, Table, make_table

NEAR_AND_FAR: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cifar10": {"near": ("cifar100", "tinyimagenet"), "far": ("mnist", "svhn")}
}
"""By suite: the sets of its benchmark that can be among ours, by name."""

TITLES = {"cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet", "mnist": "MNIST", "svhn": "SVHN"}

ABSENT = ("Textures", "Places365")
"""Far sets of the benchmark that no suite reads."""

METRICS: Mapping[str, tuple[str, Literal["low", "high"]]] = {
    "auroc": ("AUROC", "high"),
    "fpr95_out": ("FPR95", "low"),
    "aupr_in": ("AUPR in", "high"),
    "aupr_out": ("AUPR out", "high"),
}


def openood_table(suite: SuiteResults) -> Table | None:
    """Every method by every score that it has: means over the near and over the far sets.

    Args:
        suite: what is known.

    Returns:
        The table; None if the benchmark has no such suite, or records know none of its sets.
    """
    groups = {
        kind: [suite.sets[name] for name in names if name in suite.sets]
        for kind, names in NEAR_AND_FAR.get(suite.name, {}).items()
    }
    asked = [(kind, metric) for kind, sets in groups.items() if sets for metric in METRICS]
    found: dict[str, list[Estimate | None]] = {
        f"{method}, {score}": [
            estimate(records, mean_over([one.name for one in groups[kind]], metric, score), 100)
            for kind, metric in asked
        ]
        for method, records in suite.runs.items()
        for score in known_scores(suite)
    }
    known = [place for place in range(len(asked)) if any(row[place] is not None for row in found.values())]
    if not known:
        return None
    columns = [_column(groups, *asked[place]) for place in known]
    values: dict[str, list[Number]] = {
        name: [row[place] for place in known] for name, row in found.items() if any(one is not None for one in row)
    }
    rates = any(asked[place][1] == "fpr95_out" for place in known)
    caption = (
        f"In %. {runs_words(suite.runs)} Means over sets, as in OpenOOD (Zhang et al., 2023). "
        f"{'FPR95: share of test data taken for outliers where 95 % of the outliers are found. ' if rates else ''}"
        f"AUPR in, out: test data, or outliers, as the positive class. Scores of features and logits stand with MAP and DE, which "
        f"they are made from. {_differences(suite, groups)}"
    )
    return make_table(f"{suite.title}: near and far outliers, as OpenOOD shows them", caption, columns, values)


def _column(groups: Mapping[str, list[SetInfo]], kind: str, metric: str) -> Column:
    name, better = METRICS[metric]
    return Column(name, f"{kind}: {', '.join(one.title for one in groups[kind])}", better)


def _differences(suite: SuiteResults, groups: Mapping[str, list[SetInfo]]) -> str:
    shown = {one.name: one for sets in groups.values() for one in sets}
    absent = [title for name, title in TITLES.items() if name not in shown]
    counts = ", ".join(f"{one.count:,} of {one.title}" for one in shown.values())
    words = [
        f"networks are {suite.network}, not ResNet-18, and DE and MoLA use {suite.components} of them",
        f"{suite.test.count:,} test images, and as outliers {counts}, not all that it takes",
        "no outliers were used to choose a score's settings",
        f"{', '.join((*absent, *ABSENT))} are not here",
        "AUPR is the average precision, without interpolation",
    ]
    if "tinyimagenet" in shown:
        words.insert(2, "classes of TinyImageNet that CIFAR-10 knows were left out by a list of our own")
    return (
        f"What differs from its protocol: {'; '.join(words)}. These numbers are not to be ranked among published ones."
    )
