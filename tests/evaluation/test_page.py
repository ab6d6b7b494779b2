"""The page and the tables of one comparison, with errors over its data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from molaplace.evaluation import Evaluation, Lead, MethodResult, SetInfo
from molaplace.evaluation.comparison import AnswerResult, DecisionResult, SetResult
from molaplace.report.comparison_tables import detail_table, evaluation_tables
from molaplace.report.numbers import Quantity
from molaplace.report.tables import MISSING, Column, quantity_table
from molaplace.report.words import evaluation_findings
from molaplace.report.writing import evaluation_page
from tests.made_up_results import SPREAD, record
from tests.pages import Page


def texts(table):
    return dict(zip(table.texts.index, table.texts.to_numpy().tolist(), strict=True))


def one_run() -> Evaluation:
    """Three methods on a test set and a set of outliers with hostile names; MoLA leads clearly by log loss and one score."""
    test, outside = "<i>test</i>", "a/<q>&.npz"
    methods = {}
    for index, method in enumerate(("MAP", "DE", "MoLA")):
        result = record("", method, "main", 0, 2 * index, [0.0])
        errors = dict.fromkeys(("accuracy", "nll", "brier", "ece", "confidence"), 0.003)
        classes = {
            name: {"count": 20, "accuracy": 0.9 + index / 100, "confidence": 0.95} for name in ("cat", "<u>", "dog")
        }
        outliers = result.outliers["kmnist"]
        outlier = replace(
            outliers,
            scores={score: outliers.scores[score] for score in ("max probability", "entropy")},
            confidence_error=0.01,
            errors={score: {"auroc": 0.004, "fpr95": None} for score in ("max probability", "entropy")},
        )
        labelled = replace(result.labelled["test"], errors=errors, classes=classes)
        methods[method] = MethodResult({}, {test: labelled}, {outside: outlier})
    by_method = Lead(("MoLA",), 0.04, (), ("DE",), 0.02, 0.003, (("MoLA",),))
    by_score = Lead(("MoLA", "entropy"), 0.95, (), ("DE", "entropy"), 0.01, 0.002, (("MoLA", "entropy"),))
    chance = replace(by_method, clear=())
    return Evaluation(
        title="one",
        subject="MoLA",
        sets={
            test: SetInfo(test, test, "test", 8000),
            outside: SetInfo(outside, "<q>&.npz", "outlier", 10000),
        },
        methods=methods,
        leads={
            test: {"nll": by_method, "accuracy": chance, "brier": chance, "ece": chance},
            outside: {"confidence": chance, "auroc": by_score, "fpr95": chance, "max probability": chance},
        },
        differences={"MAP": {"nll": (0.04, 0.003)}, "DE": {"nll": (0.02, 0.003)}},
        notes=("<script>alert(1)</script>",),
        made={"by": "molaplace evaluate <p>", "seconds": 3.0, "versions": {"molaplace": "1.0"}},
    )


def test_a_column_of_zeros_is_shown_and_one_without_numbers_is_not():
    numbers = {"zeros": 0.0, "unknown": None}
    columns = [Column(name, quantity=Quantity(name, "nll")) for name in numbers]
    table = quantity_table("", "", lambda quantity, factor: {"MAP": numbers[quantity.sets]}, columns)
    assert [column.name for column in table.columns] == ["zeros"]
    assert texts(table) == {"MAP": ["0.0"]}


def test_in_one_run_errors_are_of_the_data_and_bold_is_what_leads_on_them():
    inside, apart, passing = evaluation_tables(one_run())
    nll = [column.name for column in inside.columns].index("NLL")
    assert texts(inside)["DE"][nll] == f"{0.08 + SPREAD[0]:.4f} ± 0.0030"
    assert inside.best == [("MoLA", nll)]
    assert [column.name for column in apart.columns] == ["MMC %", "max prob.", "entropy"]
    assert apart.best == [("MoLA", 2)]
    assert texts(apart)["MAP"][1] == f"{100 * (0.92 + SPREAD[0]):.1f} ± 0.4"
    assert texts(passing)["MAP"][0] == f"{100 * (0.08 - SPREAD[0]):.1f}", "no error is known"


def test_the_worst_classes_come_first():
    run = one_run()
    best = run.methods["MoLA"]
    ((name, result),) = best.labelled.items()
    accuracies = {"cat": (20, 0.9), "<u>": (30, 0.5), "dog": (40, 0.5)}
    classes = {label: {"count": count, "accuracy": accuracy} for label, (count, accuracy) in accuracies.items()}
    worse = replace(best, labelled={name: replace(result, classes=classes)})
    table = detail_table(replace(run, methods={**run.methods, "MoLA": worse}))
    assert list(texts(table)) == ["dog", "<u>", "cat"]


def test_decisions_stand_beside_their_rates_and_an_impossible_rate_beside_its_reason():
    answers = [
        AnswerResult(0.01, 0.95, None, why="no threshold guarantees 0.01: pass more data."),
        AnswerResult(0.05, 0.95, 0.8, answered=0.9, realised=0.0425),
    ]
    sets = SetResult(0.9, 0.93, 1.2, 0.0, {"cat": 0.96, "dog": 0.88})
    decisions = DecisionResult(0.05, 0.046, {}, answers, sets)
    evaluation = replace(one_run(), decisions=decisions)
    table, by_class = (
        table for table in evaluation_tables(evaluation) if "ecisions" in table.title or "sets" in table.title
    )
    assert texts(table) == {
        "false alarms": ["5.0", "4.60", MISSING],
        "wrong answers ≤ 1 %": ["1.0", MISSING, MISSING],
        "wrong answers ≤ 5 %": ["5.0", "4.25", "90.0"],
        "sets without the class ≤ 10 %": ["10.0", "7.00", MISSING],
    }
    for words in ("may exceed their bounds by chance", "above the outlier threshold", "No threshold guarantees 0.01"):
        assert words in table.caption
    assert texts(by_class) == {"dog": ["88.0"], "cat": ["96.0"]}


@pytest.mark.parametrize(
    ("area", "error", "words"),
    [(0.16, 0.004, "16.00 %, below"), (0.53, 0.02, "53.00 %, not clearly above"), (0.53, 0.01, "MoLA by entropy has")],
)
def test_no_method_wins_on_outliers_that_no_score_detects(area, error, words):
    run = one_run()
    (outside,) = [info.name for info in run.of_role("outlier")]
    scores = {"max probability": {"auroc": area - 0.1, "fpr95": 0.9}, "entropy": {"auroc": area, "fpr95": 0.9}}
    errors = {score: {"auroc": error} for score in scores}
    best = run.methods["MoLA"]
    outlier = replace(best.outliers[outside], scores=scores, errors=errors)
    lead = replace(run.leads[outside]["auroc"], value=area)
    run = replace(
        run,
        methods={**run.methods, "MoLA": replace(best, outliers={outside: outlier})},
        leads={**run.leads, outside: {**run.leads[outside], "auroc": lead}},
    )
    verdict = evaluation_findings(run)["Outliers: <q>&.npz"]
    detected = "MoLA" in words
    assert words in verdict
    assert verdict.startswith("No score detects this set") != detected
    assert evaluation_tables(run)[1].best == ([("MoLA", 2)] if detected else [])


def test_the_verdict_names_every_method_that_is_better():
    run = one_run()
    first = run.methods["MAP"]
    methods = dict.fromkeys(("MAP", "MAP-T", "DE", "DE-T", "DE-L", "LLLA", "own"), first) | {
        "MoLA": run.methods["MoLA"]
    }
    gaps = {"MAP": 0.04, "MAP-T": -0.02, "DE": 0.02, "DE-T": 0.01, "DE-L": -0.03, "LLLA": 0.03, "own": -0.001}
    differences = {method: {"nll": (gap, 0.003)} for method, gap in gaps.items()}
    verdict = evaluation_findings(replace(run, methods=methods, differences=differences))["Log loss"]
    lower, higher = verdict.split("; clearly higher than ")
    assert [method for method in gaps if f"({method}," in lower] == ["DE", "DE-T"]
    higher, unclear = higher.split("; not clearly higher than ")
    assert [method for method in gaps if f"({method}," in higher] == ["MAP-T", "DE-L"]
    assert unclear.startswith("own, by ")


def test_the_page_of_one_run_escapes_every_name():
    run = one_run()
    assert "in less than a second," in evaluation_page(replace(run, made={**run.made, "seconds": 0.4}), [])
    text = evaluation_page(run, [])
    assert "in 3 seconds," in text
    assert {"script", "i", "q", "u"}.isdisjoint(Page(text).tags)
    for words in ("&lt;i&gt;test", "Outliers: &lt;q&gt;&amp;.npz", "&lt;u&gt;</th>", "molaplace evaluate &lt;p&gt;"):
        assert words in text
