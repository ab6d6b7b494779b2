"""Outliers told apart by every score, not by confidence alone."""

from __future__ import annotations

from functools import partial

from mola.compare.report.suites.quantities import estimate, outlier_mean, outlier_score
from mola.compare.report.suites.reading import SuiteResults
from mola.compare.report.suites.tables import runs_words
from mola.compare.report.tables import Column, Number, Table, make_table

__all__ = ["known_scores", "score_digest", "score_table"]

SCORE_ORDER = (
    "max probability",
    "entropy",
    "mutual information",
    "ood score",
    "energy",
    "maximum logit",
    "Mahalanobis",
    "relative Mahalanobis",
    "nearest neighbours",
)


def known_scores(suite: SuiteResults) -> list[str]:
    """The scores that records hold: the known ones in their order, others after them."""
    found = {
        score
        for records in suite.main.values()
        for record in records
        for result in record.outliers.values()
        for score in result.scores
    }
    return [score for score in SCORE_ORDER if score in found] + sorted(found - set(SCORE_ORDER))


def score_digest(suite: SuiteResults) -> Table | None:
    """AUROC by score and method, the mean over all sets of outliers."""
    sets, scores = suite.of_role("outlier"), known_scores(suite)
    if not sets or not scores:
        return None
    names = [one.name for one in sets]
    values: dict[str, list[Number]] = {
        score: [
            estimate(records, outlier_mean(partial(outlier_score, metric="auroc", score=score), names), 100)
            for records in suite.main.values()
        ]
        for score in scores
    }
    caption = (
        f"AUROC in %, mean over {', '.join(one.title for one in sets)}. {runs_words(suite.main)} The scores of "
        f"a method compete with each other. Higher scores mean more outlying; the sign of confidence and of logits is turned."
    )
    columns = [Column(method, better="high") for method in suite.main]
    return make_table(f"{suite.title}: outliers by every score", caption, columns, values)


def score_table(suite: SuiteResults, name: str) -> Table | None:
    """One set of outliers: every method by every score that it has."""
    columns = [
        Column("AUROC", better="high"),
        Column("AUPR in", better="high"),
        Column("AUPR out", better="high"),
        Column("FPR95", better="low"),
    ]
    values: dict[str, list[Number]] = {}
    for method, records in suite.main.items():
        for score in known_scores(suite):
            row: list[Number] = [
                estimate(records, outlier_score(name, metric, score), 100)
                for metric in ("auroc", "aupr_in", "aupr_out", "fpr95")
            ]
            if any(number is not None for number in row):
                values[f"{method}, {score}"] = row
    if not values:
        return None
    caption = (
        f"In %. {runs_words(suite.main)} AUPR in, out: area under precision and recall with test data, or outliers, as the "
        f"positive class. FPR95: share of outliers taken for test data where 95% of the test data are."
    )
    return make_table(f"{suite.sets[name].title}: every method by every score", caption, columns, values)
