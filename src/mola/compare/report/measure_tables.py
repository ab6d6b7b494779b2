"""Tables of what suites ask beyond the metrics: agreement with people's labels, and rejection of what is out of scope."""

from __future__ import annotations

from mola.compare.record import Record
from mola.compare.report.estimate import Estimate, Quantity, estimate, runs_words
from mola.compare.report.reading import SuiteResults, known_scores
from mola.compare.report.tables import Column, Number, Shown, Table, make_table, records_table


def _number(measure: str, name: str) -> Quantity:
    def read(record: Record) -> Estimate | None:
        value = record.measures.get(measure, {}).get(name)
        return None if value is None else Estimate(value, None, 1)

    return read


def people_table(suite: SuiteResults) -> Table | None:
    """Whether methods doubt where people disagree."""
    methods = {
        method: records
        for method, records in suite.runs.items()
        if any("people" in record.measures for record in records)
    }
    if not methods:
        return None
    shown = [
        Shown(
            Column("NLL", "test", "low", 4), lambda record: Estimate(record.labelled["test"].metrics["nll"], None, 1)
        ),
        Shown(Column("cross-entropy", "people", "low", 4), _number("people", "cross-entropy")),
        Shown(Column("divergence", "people", "low", 4), _number("people", "divergence")),
    ]
    shown += [
        Shown(Column(score, "rank correlation %", "high", 1), _number("people", f"correlation, {score}"), 100)
        for score in known_scores(suite)
    ]
    caption = (
        f"{runs_words(methods)} NLL: log loss on the published labels. Cross-entropy: log loss on the labels that about 50 people "
        f"gave each image (CIFAR-10H, Peterson et al., 2019). Divergence: that, less the people's own entropy; 0 would be their "
        f"shares. Rank correlation (Spearman): of a score with the entropy of the people's labels."
    )
    return records_table(f"{suite.title}: people's doubt", caption, methods, shown)


def rejection_table(suite: SuiteResults) -> Table | None:
    """In-scope accuracy and out-of-scope recall by every method and score."""
    values: dict[str, list[Number]] = {}
    for method, records in suite.runs.items():
        for score in known_scores(suite):
            row: list[Number] = [
                estimate(records, _number("rejection", f"{name}, {score}"), 100)
                for name in ("in-scope accuracy", "out-of-scope recall")
            ]
            if any(number is not None for number in row):
                values[f"{method}, {score}"] = row
    if not values:
        return None
    caption = (
        f"In %. {runs_words(suite.runs)} A request is rejected if its score is above a threshold: the one that treats most "
        f"validation requests rightly, 3000 in scope and 100 out of it. In-scope accuracy counts requests that are rejected as "
        f"wrong. Larson et al. (EMNLP 2019, arXiv 1909.02027) report the same two numbers, with other features and networks."
    )
    columns = [Column("in-scope accuracy", better="high"), Column("out-of-scope recall", better="high")]
    return make_table(f"{suite.title}: requests out of scope, rejected", caption, columns, values)
