"""Tables of the documentation, made from stored records; `docs/values.py` puts them into pages.

A page names a table as `cifar10 outliers`: a suite of `results/` and one of its tables, perhaps with a choice of rows and columns
under other names (`cifar10 ablation rules; MoLA by nll = log loss | MoLA by threshold; test NLL | outliers AUROC`), or a source of
`SOURCES` and a name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mola.compare.record import Record
from mola.compare.report.reading import read_suites
from mola.compare.report.suite_tables import suite_tables
from mola.compare.report.tables import ARROWS, Column, Table, as_markdown
from mola.compare.store import Store
from mola.lab.uci import (
    METHODS,
    as_good,
    estimates,
    gap_findings,
    gap_table,
    published_table,
    read_records,
    score_table,
)

ROOT = Path(__file__).resolve().parent.parent
MISSING = "\N{EN DASH}"
RESULTS, BENCHMARKS = ROOT / "results", ROOT / "benchmarks" / "results"


def table(place: str) -> str:
    """The table that a page names, as Markdown."""
    name, *selection = [part.strip() for part in place.split(";")]
    source, _, rest = name.partition(" ")
    if source in SOURCES:
        return SOURCES[source](rest)
    if not selection:
        heading, text = as_markdown(suite_table(name)).strip().split("\n", 1)
        return f"**{heading.removeprefix('### ')}**\n{text}"  # no heading: it would fill the table of contents
    found, rows, columns = suite_table(name), _names(selection[0]), _names(selection[1])
    better = {_column_name(column): ARROWS.get(column.better or "", "") for column in found.columns}
    header = ["", *[f"{shown} {better.get(column, '')}".strip() for column, shown in columns.items()]]
    return markdown(header, [[shown, *cells(found, row, list(columns))] for row, shown in rows.items()])


@cache
def _suite(name: str) -> dict[str, Table]:
    (found,) = read_suites(RESULTS, [name])
    return suite_tables(found)


def suite_table(name: str) -> Table:
    """A table of a suite, by the suite's name and its own."""
    suite, _, rest = name.partition(" ")
    if rest not in (known := _suite(suite)):
        raise KeyError(f"{suite} has no table {rest!r}; it has {', '.join(known)}.")
    return known[rest]


def cells(found: Table, row: str, columns: Sequence[str]) -> list[str]:
    """Texts of some columns of a row."""
    rows = {one.name: one for one in found.rows}
    places = {_column_name(column): index for index, column in enumerate(found.columns)}
    if missing := [*({row} - set(rows)), *(name for name in columns if name not in places)]:
        raise KeyError(f"{found.title}: no {missing}. Rows: {', '.join(rows)}. Columns: {', '.join(places)}.")
    return [rows[row].cells[places[name]].text for name in columns]


def _column_name(column: Column) -> str:
    return f"{column.group} {column.name}".strip()


def _names(listed: str) -> dict[str, str]:
    pairs = [part.partition(" = ") for part in listed.split("|")]
    return {name.strip(): (other or name).strip() for name, _, other in pairs}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Rows of text as a Markdown table: the first columns aligned left, the others right."""
    aligned = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, aligned, *rows])


@cache
def record(name: str) -> Any:
    """A record of a benchmark."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))


def _percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def _uci(name: str) -> str:
    records = read_records(RESULTS)
    if name in ("rmse", "nll"):
        return score_table(records, name)
    if name == "findings":
        scores = (("rmse", "root mean squared error"), ("nll", "negative log-likelihood"))
        found = {words: estimates(records, score) for score, words in scores}
        rows = [[words, *[str(len(as_good(one, method))) for method in METHODS]] for words, one in found.items()]
        return markdown(
            [f"best, or within a standard error of the best, of {len(one_set(found))} sets", *METHODS], rows
        )
    others = {"gaps": gap_table, "gap findings": gap_findings}
    return others[name](records) if name in others else published_table(list(estimates(records, "rmse")))


def one_set(found: dict[str, Any]) -> Any:
    """The sets of the first score: all scores have the same."""
    return next(iter(found.values()))


def _closed_forms(likelihood: str) -> str:
    """Closed forms against Monte Carlo: the worst over structures, inputs and outputs."""
    rows = [row for row in record("closed_forms")["rows"] if row["likelihood"] == likelihood]
    lines = []
    for name in dict.fromkeys(row["quantity"] for row in rows):
        same = [row for row in rows if row["quantity"] == name]
        worst, most = max(same, key=lambda row: row["error"]), max(row["standard_errors"] for row in same)
        note = "" if worst["exact"] else " (an approximation)"
        lines.append([name, f"{worst['error']:.1e}", f"{worst['standard_error']:.1e}", f"{most:.1f}{note}"])
    return markdown(["closed form", "largest error", "standard error there", "largest error in standard errors"], lines)


def _links(name: str) -> str:
    """Links against the integral: scores, variances, or errors by the rule that chose the prior precision."""
    document = record("links_against_monte_carlo")
    if name == "scores":
        lines = [
            [
                row["structure"],
                row["link"],
                "" if row["prior_precision"] is None else f"{row['prior_precision']:.2g}",
                f"{row['nll']:.4f}",
                _percent(row["ece"], 2),
                _percent(row["svhn_auroc"], 2),
            ]
            for row in document["tuned"]
        ]
        return markdown(["structure", "link", "λ", "test NLL", "ECE %", "SVHN AUROC %"], lines, 2)
    if name == "variances":
        names = ("prior_precision", "common_test", "common_svhn", "contrast_test", "contrast_svhn")
        lines = [[f"`{row['structure']}`", *[f"{row[one]:.2g}" for one in names]] for row in document["variances"]]
        return markdown(["structure", "λ", "common mode: test", "SVHN", "contrasts: test", "SVHN"], lines)
    rows = {(one["data"], one["structure"], one["link"]): one for one in document["rows"] if one["rule"] == name}
    lines = []
    for (data, structure, link), test in rows.items():
        if data == "test":
            svhn = rows["svhn", structure, link]
            lines.append(
                [
                    f"`{structure}`, λ = {test['prior_precision']:.2g}",
                    link,
                    _percent(test["mean_tv"], 2),
                    _percent(test["max_tv"]),
                    f"{100 * test['confidence_error']:+.2f}",
                    f"{test['nll_difference']:+.4f}",
                    _percent(svhn["mean_tv"], 2),
                    _percent(svhn["max_tv"]),
                    f"{100 * svhn['confidence_error']:+.2f}",
                ]
            )
    header = ["structure", "link", "test: TV mean", "max", "confidence", "NLL", "SVHN: TV mean", "max", "confidence"]
    return markdown(header, lines, 2)


def _labels(data: str) -> str:
    """Multi-label digits: test digits, turned digits, or photographs."""
    scores = {"confidence": "mean conf. %", "auroc": "AUROC %"}
    if data != "photographs":
        scores = {"nll": "log loss", "ece": "ECE %", **scores, "average_precision": "AP %"}
    rows = []
    for method, found in record("labels")["methods"].items():
        pairs = [(found[data][name], (1, 3) if name == "nll" else (100, 1)) for name in scores]
        texts = [f"{factor * one['mean']:.{n}f} ± {factor * one['error']:.{n}f}" for one, (factor, n) in pairs]
        rows.append([method, *texts])
    return markdown(["", *scores.values()], rows)


CASES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "clinc150": "CLINC150"}


def _decisions(name: str) -> str:
    """Whether guarantees are kept, or what is left of them under shift in one of `CASES`."""
    cases = record("decisions")["cases"]
    if name != "kept":
        fields = ("alarms", "answered", "error", "answered_gated", "error_gated", "coverage", "coverage_gated")
        rows = [
            [row["set"], *[MISSING if row.get(field) is None else _percent(row[field]) for field in fields]]
            for row in cases[name]["shift"]
        ]
        header = [
            "% of",
            "alarms",
            "answered",
            "errors",
            "answered, no alarm",
            "errors",
            "coverage",
            "coverage, no alarm",
        ]
        return markdown(header, rows)
    rows = []
    for case, shown in CASES.items():
        for row in cases[case]["answers"]:
            if (row["method"], row["score"]) == ("MoLA", "confidence"):
                promised = f"at most {100 * row['promised']:g} % errors"
                detail = f"{_percent(row['violations'])} % of draws above; answers {_percent(row['answered'][0])} %"
                rows.append([shown, promised, _mean(row["realised"]), detail])
        for row in cases[case]["sets"]:
            if (row["method"], row["kind"], row["by"]) == ("MoLA", "lac", "all"):
                promised = f"{100 * row['promised']:g} % coverage"
                rows.append([shown, promised, _mean(row["realised"]), f"{row['size'][0]:.2f} classes per set"])
        rows += [
            [shown, f"at most {100 * row['promised']:g} % false alarms", _mean(row["realised"]), ""]
            for row in cases[case]["alarms"]
        ]
    return markdown(["data", "guarantee", "realised %", ""], rows, 2)


def _mean(pair: Sequence[float]) -> str:
    return f"{100 * pair[0]:.2f} ± {100 * pair[1]:.2f}"


def _saturated(name: str) -> str:
    """AUROC in % of far inputs by features, outputs and score."""
    scores = ("ood_score", "distance", "confidence, DE")
    rows: dict[str, dict[str, str]] = {}
    for row in record("saturated_features")["rows"]:
        key = f"{row['activation']}, {row['likelihood']}, {row['far']}"
        text = f"{_percent(row['auroc'], 0)} ± {_percent(row['standard_error'], 0)}"
        rows.setdefault(key, {})[row["score"]] = text
    return markdown(
        ["features, likelihood, far inputs", *scores], [[key, *map(one.get, scores)] for key, one in rows.items()]
    )


def _ranks(name: str) -> str:
    """Mean ranks of sums of outlier scores: F the far field, E the energy, D the distance, H the entropy, r(x) = max(0, x)."""
    chosen, confirmed = (record("outlier_score")["mean_rank"][half] for half in ("chosen on", "confirmed on"))
    rows = [
        [f"`{one}`", f"{rank:.2f}", f"{confirmed[one]:.2f}"] for one, rank in sorted(chosen.items(), key=lambda i: i[1])
    ]
    return markdown(["score", "mean rank, choosing half", "confirming half"], rows)


def _segmentation(name: str) -> str:
    """Pixels of test pictures and of their shifted twins, and rings found by the outlier score."""
    rows = []
    for method, found in record("segmentation").items():
        texts = []
        for data in ("test", "shifted"):
            one = found[data]
            texts += [_percent(one["accuracy"]), _percent(one["confidence"]), f"{one['nll']:.3f}", _percent(one["ece"])]
        rows.append([method, *texts, _percent(found["with rings"]["rings"])])
    header = ["accuracy %", "conf. %", "NLL", "ECE %"]
    return markdown(["", *header, *(f"shifted: {one}" for one in header), "rings, AUROC %"], rows)


def _nodes(name: str) -> str:
    """Largest differences from one process."""
    rows = {row["layout"]: row["difference"] for row in record("two_nodes")["rows"]}
    layouts = {"2": "2 processes", "4": "4 processes", "2x2": "2 nodes of 2"}
    lines = [[command, *[f"{rows[one][command]:.0e}" for one in layouts]] for command in rows["1"]]
    return markdown(["", *layouts.values()], lines)


def _export(name: str) -> str:
    """Largest differences between exported files and `predict`."""
    outputs = ("probabilities", "confidence", "entropy", "mutual_information", "ood_score")
    rows = [
        [
            precision,
            f"{row['tolerance']:g}",
            *[f"{row[one]:.1e}" for one in outputs],
            f"{row['labels']} of {row['rows']}",
        ]
        for precision, row in record("export_agreement")["summary"].items()
    ]
    names = {"probabilities": "probs", "mutual_information": "epistemic"}  # as exported files name them
    return markdown(["", "allowed", *[names.get(one, one) for one in outputs], "labels that differ"], rows)


def _crash(name: str) -> str:
    """Kills, by what was killed."""
    fields = ("kills", "lost", "half-written", "differs")
    return markdown(
        ["killed", *fields], [[row["kind"], *[str(row[one]) for one in fields]] for row in record("crash")["rows"]]
    )


def _many_classes(name: str) -> str:
    """`kron-diag` beside `kron`."""
    rows = []
    for row in record("many_classes")["distances"]:
        each, tuned = row["at_one_prior"], row["tuned"]
        least, most = min(one["variance_least"] for one in each), max(one["variance_most"] for one in each)
        farthest = max(one["mean_total_variation"] for one in each)
        losses = ", ".join(f"{tuned[one]['nll']:.4f}" for one in ("kron", "kron-diag"))
        eigenvalues = f"{row['second_eigenvalue']:.2f}, {row['largest_eigenvalue']:.2f}"
        rows.append([row["scene"], eigenvalues, f"{least:.2f} to {most:.2f}", f"{farthest:.4f}", losses])
    header = [
        "data",
        "ν₂, νₘₐₓ",
        "variance of kron / kron-diag",
        "largest mean distance",
        "log loss of kron, kron-diag",
    ]
    return markdown(header, rows)


def _size(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if value < 1e9 else f"{value / 1e9:.1f} GB"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def verdict(row: dict[str, Any], bar: str) -> list[str]:
    """The bar of a measurement, and whether it was met."""
    return [bar, ("**missed**" if row["missed"] else "met") if bar else ""]


def _speed(name: str) -> str:
    """What mola adds to the networks: time by setting, memory, time beside laplace-torch, and the machines."""
    if name == "summary":
        defaults = {"fit": ("kron", "dense"), "tune": ("calibrated",), "call": ("by distance",)}
        rows = []
        for setting in ("ResNet-20 / CIFAR-10", "LeNet / MNIST", "U-Net, 16 images of 256 x 256"):
            found = {
                row["work"]: f"{row['added']:.2f}"
                for row in record("speed")["rows"]
                if row["setting"] == setting and row["kind"] in defaults[row["work"]]
            }
            rows.append([setting, *(found.get(work, MISSING) for work in defaults)])
        return markdown(["network", "`fit`", "`tune`", "`posterior(x)`"], rows)
    if name == "overhead":
        rows = []
        for row in record("speed")["rows"]:
            bar = f"at most {row['bar']:g}" if row["bar"] else f"at most {row['limit']:g} s" if row["limit"] else ""
            if "over" in row:
                bar += f", {_size(row['over'])} (at most 300 MB)"
            ratios = ["", ""] if row["ratio"] is None else [f"{row['added']:.3f}", f"{row['ratio']:.3f}"]
            rows.append(
                [row["setting"], row["work"], row["kind"], *ratios, _seconds(row["seconds"]), *verdict(row, bar)]
            )
        return markdown(["network", "work", "", "added", "ratio", "CPU time", "bar", ""], rows, 3)
    if name == "memory":
        rows = []
        for row in record("memory")["rows"]:
            sizes = [row["work"], row["structure"], *(f"{row[one]:,}" for one in ("features", "classes", "data"))]
            bar = "" if row["bar"] is None else f"at most {row['bar']:.0f} MB"
            rows.append([*sizes, _size(row["peak"]), _size(row["needed"]), *verdict(row, bar)])
        return markdown(["work", "structure", "P", "C", "N", "peak", "the result itself", "bar", ""], rows, 2)
    if name.startswith("laplace-torch"):
        measured, rows = record("speed_against_laplace_torch")["rows"], []
        if name.endswith("summary"):  # the fastest backend of each work
            fastest = {(row["work"], row["features"]): row for row in sorted(measured, key=lambda row: -row["ratio"])}
            measured = [row for row in measured if row in fastest.values()]
        for row in measured:
            times = [_seconds(row[f"{who}seconds"]) for who in ("bare_", "", "peer_")]
            ratio = f"{row['ratio']:.1f} [{row['quartile_1']:.1f}, {row['quartile_3']:.1f}]"
            rows.append([row["work"], f"P={row['features']}, C={row['classes']}", row["peer"], *times, ratio])
        return markdown(
            ["work", "size", "backend", "bare passes", "mola", "laplace-torch", "times [quartiles]"], rows, 3
        )
    rows = []
    for one in ("speed", "memory", "speed_against_laplace_torch"):
        found = record(one)["environment"]
        load = "unknown" if found.get("load") is None else f"{found['load']:.1f} on {found['cores']} cores"
        rows.append([one, f"{found['system']}, {found['machine']}, torch {found['packages']['torch']}", load])
    return markdown(["record", "machine", "load at the start"], rows, 2)


DEFAULT, RIVALS = "MoLA (calibrated)", ("DE-T", "DE-L")


def _default(name: str) -> str:
    """`summary`, or `cifar10` and `labelled`, `outliers` or `accuracy`: the default rule beside temperature-scaled ensembles."""
    if name == "summary":
        return _default_summary()
    suite, kind = name.split()
    runs = _runs(suite)
    if kind == "accuracy":
        return _accuracy_estimates(runs)
    first = runs[DEFAULT][0]
    if kind == "outliers":
        header = ["AUROC by confidence", *RIVALS, "default", "default less DE-T", "runs ahead"]
        rows = [[place, *_compared(runs, partial(_auroc, place), 100, 2, higher=True)] for place in first.outliers]
        return markdown(header, rows)
    columns = {"NLL": ("nll", 1, 4), "ECE %": ("ece", 100, 2), "AURC x 1000": ("aurc", 1000, 2)}
    header = ["", *(f"{title} {word}" for title in columns for word in (*RIVALS, "default", "difference"))]
    rows = []
    for place in first.labelled:
        row = [place]
        for metric, factor, digits in columns.values():
            row += _compared(runs, partial(_metric, place, metric), factor, digits, higher=False)[:-1]
        rows.append(row)
    return markdown(header, rows)


def _default_summary() -> str:
    """Means over runs and sets of every suite."""
    rows = []
    for suite, title in (("cifar10", "CIFAR-10"), ("mnist", "MNIST"), ("clinc", "CLINC150"), ("imagenet", "ImageNet")):
        runs = _runs(suite)
        first = runs[DEFAULT][0]
        shifted = [place for place in first.labelled if place != "test"]
        for name, quantities, factor, digits in (
            ("test NLL", [partial(_metric, "test", "nll")], 1, 3),
            ("shifted NLL", [partial(_metric, place, "nll") for place in shifted], 1, 2),
            ("OOD AUROC %", [partial(_auroc, place) for place in first.outliers], 100, 1),
        ):
            means = [
                np.mean([factor * one(run) for one in quantities for run in runs[method]])
                for method in (*RIVALS, DEFAULT)
                if quantities
            ]
            if means:
                rows.append([f"{title}, {name}", *(f"{mean:.{digits}f}" for mean in means)])
    return markdown(["", *RIVALS, "default"], rows)


def _runs(suite: str) -> dict[str, list[Record]]:
    records = sorted((one for one in Store(RESULTS).records(suite) if one.group == "main"), key=lambda one: one.run)
    return {method: [one for one in records if one.method == method] for method in (DEFAULT, *RIVALS, "DE")}


def _metric(place: str, metric: str, record: Record) -> float:
    return record.labelled[place].metrics[metric]


def _auroc(place: str, record: Record) -> float:
    return record.outliers[place].scores["max probability"]["auroc"]


def _compared(
    runs: dict[str, list[Record]], quantity: Callable[[Record], float], factor: float, digits: int, *, higher: bool
) -> list[str]:
    """Means of both rivals and of the default, its difference from the first with a standard error, and the runs that it leads."""
    values = {method: factor * np.array([quantity(one) for one in runs[method]]) for method in (*RIVALS, DEFAULT)}
    gap, overlap = values[DEFAULT] - values[RIVALS[0]], runs[DEFAULT][0].overlap
    error = gap.std(ddof=1) * np.sqrt(1 / len(gap) + overlap) if len(gap) > 1 else np.nan
    ahead = int(((gap if higher else -gap) >= 0).sum())
    means = [f"{one.mean():.{digits}f}" for one in values.values()]
    return [*means, f"{gap.mean():+.{digits}f} ± {error:.{digits}f}", f"{ahead} of {len(gap)}"]


def _accuracy_estimates(runs: dict[str, list[Record]]) -> str:
    """Mean absolute error, in points, of accuracies estimated without labels."""
    methods = {"DE": "ensemble", "DE-T": "DE-T", "DE-L": "DE-L", DEFAULT: "default"}
    found = {method: [one.measures["estimated accuracy"] for one in runs[method]] for method in methods}
    sets = list(dict.fromkeys(key.partition(", ")[0] for key in found[DEFAULT][0]))
    estimators = {
        "confidence": "mean confidence",
        "DoC": "DoC",
        "ATC, confidence": "ATC",
        "ATC, negative entropy": "ATC, entropy",
    }
    rows = []
    for method, shown in methods.items():
        for estimator, title in estimators.items():
            cells = [100 * np.mean([one[f"{place}, {estimator}"] for one in found[method]]) for place in sets]
            rows.append([f"{title} of {shown}", *(f"{cell:.1f}" for cell in (*cells, np.mean(cells)))])
    return markdown(["estimate", *sets, "mean"], rows)


def _default_rule(_: str) -> str:
    frame = pd.DataFrame(record("default_rule")["rows"])
    keys = ["suite", "half", "networks", "validation"]
    means = frame.groupby([*keys, "method"], sort=False)[["test_nll", "test_ece", "shifted_nll", "auroc"]].mean()
    rows = []
    for key in means.index.droplevel("method").unique():
        ours, theirs = means.loc[(*key, "default")], means.loc[(*key, "DE-T")]
        gap = ours - theirs
        numbers = f"{ours.test_nll:.4f} ({gap.test_nll:+.4f})", f"{100 * ours.test_ece:.2f} ({100 * gap.test_ece:+.2f})"
        rest = f"{ours.shifted_nll:.3f} ({gap.shifted_nll:+.3f})", f"{100 * ours.auroc:.1f} ({100 * gap.auroc:+.1f})"
        rows.append([*(str(one) for one in key), *numbers, *rest])
    header = [*keys, "test NLL", "test ECE %", "mean shifted NLL", "mean AUROC"]
    return markdown(header, rows, left=2)


SOURCES: dict[str, Callable[[str], str]] = {
    "closed-forms": _closed_forms,
    "crash": _crash,
    "decisions": _decisions,
    "default": _default,
    "default-rule": _default_rule,
    "export": _export,
    "labels": _labels,
    "links": _links,
    "many-classes": _many_classes,
    "ranks": _ranks,
    "saturated": _saturated,
    "segmentation": _segmentation,
    "speed": _speed,
    "two-nodes": _nodes,
    "uci": _uci,
}
"""Records that are not those of a suite, by the first word of a table's name."""
