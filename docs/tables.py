"""Tables in the documentation, generated from stored records; `docs/values.py` inserts them into pages.

The name of a table, such as `cifar10 outliers`, consists of the names of a suite in `results/` and of one of its tables. It may also
select and rename rows and columns: `cifar10 ablation rules; MoLA by nll = log loss | MoLA by threshold; test NLL | outliers AUROC`.
All other names consist of a source in `SOURCES` and its argument.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from molaplace.report.numbers import BY_CONFIDENCE, Quantity
from molaplace.report.tables import ARROWS, Column, Table, as_markdown, markdown_rows
from molaplace_lab.report.reading import SuiteResults, read_suites
from molaplace_lab.report.runs import Numbers
from molaplace_lab.report.tables import suite_tables
from molaplace_lab.uci.comparison import UCI_METHODS, read_records
from molaplace_lab.uci.tables import as_good, gap_table, score_table

ROOT = Path(__file__).resolve().parent.parent
MISSING = "\N{EN DASH}"
RESULTS = ROOT / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"


def table(text: str) -> str:
    """Return the table of the given name as Markdown."""
    name, *selection = [part.strip() for part in text.split(";")]
    source, _, rest = name.partition(" ")
    if source in SOURCES:
        return SOURCES[source](rest)
    if not selection:
        heading, text = as_markdown(suite_table(name)).strip().split("\n", 1)
        return f"**{heading.removeprefix('### ')}**\n{text}"  # a real heading would appear in the table of contents
    selected = suite_table(name)
    rows = _names(selection[0])
    columns = _names(selection[1])
    better = {_column_name(column): ARROWS.get(column.better or "", "") for column in selected.columns}
    header = ["", *[f"{title} {better.get(column, '')}".strip() for column, title in columns.items()]]
    return markdown_rows(header, [[title, *cells(selected, row, list(columns))] for row, title in rows.items()])


@cache
def _suite(name: str) -> SuiteResults:
    (results,) = read_suites(RESULTS, [name])
    return results


@cache
def _suite_tables(name: str) -> dict[str, Table]:
    return suite_tables(_suite(name))


def suite_table(name: str) -> Table:
    """Return one of the tables of a suite; `name` consists of the names of the suite and the table, as in "cifar10 outliers"."""
    suite, _, rest = name.partition(" ")
    if rest not in (known := _suite_tables(suite)):
        raise KeyError(f"{suite} has no table {rest!r}. Choose one of {', '.join(known)}.")
    return known[rest]


def cells(printed_table: Table, row: str, columns: Sequence[str]) -> list[str]:
    """Return the text of the cells in the given row and columns of a table."""
    texts = printed_table.texts.set_axis([_column_name(column) for column in printed_table.columns], axis=1)
    if missing := [*({row} - set(texts.index)), *(name for name in columns if name not in texts)]:
        raise KeyError(
            f"{printed_table.title} has no {missing}. Its rows are {', '.join(texts.index)}. Its columns are {', '.join(texts)}."
        )
    return list(texts.loc[row, list(columns)])


def _column_name(column: Column) -> str:
    return f"{column.group} {column.name}".strip()


def _names(listed: str) -> dict[str, str]:
    pairs = [part.partition(" = ") for part in listed.split("|")]
    return {name.strip(): (other or name).strip() for name, _, other in pairs}


@cache
def record(name: str) -> Any:
    """Read the stored record of a benchmark."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))


class Cells(string.Formatter):
    """Formatter for table cells: `{ece:* 100 .1f}` multiplies the entry `ece` by 100, and None becomes a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a value as text."""
        if value is None:
            return MISSING
        if not format_spec.startswith("* "):
            return format(value, format_spec)
        factor, form = format_spec.removeprefix("* ").split(" ")
        return format(value * float(factor), form)


def listed(rows: Iterable[Mapping[str, Any]], columns: Sequence[tuple[str, str]], left: int = 1) -> str:
    """Return the rows of a record as a Markdown table; each column consists of a heading and a template for its cells."""
    write = Cells().vformat
    return markdown_rows(
        [head for head, _ in columns], [[write(template, (), row) for _, template in columns] for row in rows], left
    )


def _uci(name: str) -> str:
    records = read_records(RESULTS)
    if name == "gaps":
        return gap_table(records)
    if name != "findings":
        return score_table(records, name)
    scores = (("rmse", "root mean squared error"), ("nll", "negative log-likelihood"))
    best_by_score = {words: as_good(records, score) for score, words in scores}
    rows = [[words, *[str(best[method].sum()) for method in UCI_METHODS]] for words, best in best_by_score.items()]
    count = len(best_by_score["negative log-likelihood"])
    return markdown_rows([f"best, or within a standard error of the best, of {count} sets", *UCI_METHODS], rows)


def _closed_forms(likelihood: str) -> str:
    """Return the largest deviations of closed forms from Monte Carlo estimates over all structures, inputs and outputs."""
    rows = [row for row in record("closed_forms")["rows"] if row["likelihood"] == likelihood]
    lines = []
    for name in dict.fromkeys(row["quantity"] for row in rows):
        same = [row for row in rows if row["quantity"] == name]
        worst = max(same, key=lambda row: row["error"])
        most = max(row["standard_errors"] for row in same)
        note = "" if worst["exact"] else " (an approximation)"
        lines.append([name, f"{worst['error']:.1e}", f"{worst['standard_error']:.1e}", f"{most:.1f}{note}"])
    return markdown_rows(
        ["closed form", "largest error", "standard error there", "largest error in standard errors"], lines
    )


def _links(name: str) -> str:
    """Return a table of scores of the links, of variances, or of errors of the links at the prior precision chosen by a rule."""
    document = record("links_against_monte_carlo")
    if name == "scores":
        columns = [("structure", "{structure}"), ("link", "{link}"), ("λ", "{prior_precision:.2g}")]
        columns += [("test NLL", "{nll:.4f}"), ("ECE %", "{ece:* 100 .2f}"), ("SVHN AUROC %", "{svhn_auroc:* 100 .2f}")]
        return listed(document["tuned"], columns, 2)
    if name == "variances":
        columns = [("structure", "`{structure}`"), ("λ", "{prior_precision:.2g}")]
        columns += [("common mode: test", "{common_test:.2g}"), ("SVHN", "{common_svhn:.2g}")]
        columns += [("contrasts: test", "{contrast_test:.2g}"), ("SVHN", "{contrast_svhn:.2g}")]
        return listed(document["variances"], columns)
    rows = {(row["data"], row["structure"], row["link"]): row for row in document["rows"] if row["rule"] == name}
    pairs = [{"test": row, "svhn": rows["svhn", *key[1:]]} for key, row in rows.items() if key[0] == "test"]
    columns = [("structure", "`{test[structure]}`, λ = {test[prior_precision]:.2g}"), ("link", "{test[link]}")]
    for data, title in (("test", "test: "), ("svhn", "SVHN: ")):
        columns += [(f"{title}TV mean", f"{{{data}[mean_tv]:* 100 .2f}}"), ("max", f"{{{data}[max_tv]:* 100 .1f}}")]
        columns += [("confidence", f"{{{data}[confidence_error]:* 100 +.2f}}")]
        columns += [("NLL", "{test[nll_difference]:+.4f}")] if data == "test" else []
    return listed(pairs, columns, 2)


def _labels(data: str) -> str:
    """Return multi-label results on test digits, rotated digits or photographs."""
    scores = {"confidence": "mean conf. %", "auroc": "AUROC %"}
    if data != "photographs":
        scores = {"nll": "log loss", "ece": "ECE %", **scores, "average_precision": "AP %"}
    columns = [("", "{method}")]
    for name, title in scores.items():
        form = ".3f" if name == "nll" else "* 100 .1f"
        columns.append((title, f"{{{name}[mean]:{form}}} ± {{{name}[error]:{form}}}"))
    return listed(
        [{"method": method, **results[data]} for method, results in record("labels")["methods"].items()], columns
    )


CASES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "clinc150": "CLINC150"}


def _decisions(name: str) -> str:
    """Return the guarantees and realised rates for all `CASES`, or the rates under shift for one of them."""
    cases = record("decisions")["cases"]
    if name != "kept":
        fields = {"alarms": "alarms", "answered": "answered", "error": "errors", "answered_gated": "answered, no alarm"}
        fields |= {"error_gated": "errors", "coverage": "coverage", "coverage_gated": "coverage, no alarm"}
        columns = [("% of", "{set}"), *((title, f"{{{field}:* 100 .1f}}") for field, title in fields.items())]
        return listed([dict.fromkeys(fields) | row for row in cases[name]["shift"]], columns)
    rows = []
    for case, title in CASES.items():
        for row in cases[case]["answers"]:
            if (row["method"], row["score"]) == ("MoLA", "confidence"):
                words = "at most {promised:* 100 g} % errors"
                detail = "{violations:* 100 .1f} % of draws above; answers {answered[0]:* 100 .1f} %"
                rows.append((title, words, detail, row))
        for row in cases[case]["sets"]:
            if (row["method"], row["kind"], row["by"]) == ("MoLA", "lac", "all"):
                rows.append((title, "{promised:* 100 g} % coverage", "{size[0]:.2f} classes per set", row))
        rows += [(title, "at most {promised:* 100 g} % false alarms", "", row) for row in cases[case]["alarms"]]
    realised = "{realised[0]:* 100 .2f} ± {realised[1]:* 100 .2f}"
    write = Cells().vformat
    texts = [
        [title, *(write(template, (), row) for template in (words, realised, detail))]
        for title, words, detail, row in rows
    ]
    return markdown_rows(["data", "guarantee", "realised %", ""], texts, 2)


def _guarantees(name: str) -> str:
    """Return the simulated guarantees by decision and method: how far the cells are from their guarantees and exact rates."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record("guarantees")["rows"]:
        rows.setdefault((row["decision"], row["method"]), []).append(row)
    lines = []
    for (decision, method), cells_of in rows.items():
        shortfalls = [100 * (row["guarantee"] - row["rate"]) for row in cells_of]
        exact = [row["off"] for row in cells_of if row["off"] is not None]
        lines.append(
            [
                f"{decision}, {method}" if method else decision,
                str(len(cells_of)),
                f"{max(0.0, *shortfalls):.2f}",
                f"{max(row['short'] for row in cells_of):.1f}",
                f"{max(exact):.1f}" if exact else MISSING,
            ]
        )
    header = [
        "decision",
        "cells",
        "largest shortfall, points",
        "in standard errors",
        "from the exact rate, standard errors",
    ]
    return markdown_rows(header, lines)


def _saturated(name: str) -> str:
    """Return the AUROC (in %) on inputs far from the data, by activation, likelihood and score."""
    scores = ("ood_score", "distance", "confidence, DE")
    rows: dict[str, dict[str, Any]] = {}
    for row in record("saturated_features")["rows"]:
        key = f"{row['activation']}, {row['likelihood']}, {row['far']}"
        rows.setdefault(key, {"key": key})[row["score"]] = row
    form = "{{{0}[auroc]:* 100 .0f}} ± {{{0}[standard_error]:* 100 .0f}}"
    columns = [("features, likelihood, far inputs", "{key}"), *((score, form.format(score)) for score in scores)]
    return listed(rows.values(), columns)


def _ranks(name: str) -> str:
    """Return the mean ranks of scores that are sums of the far field F, energy E, distance D and entropy H; r(x) is max(0, x)."""
    chosen, confirmed = (record("outlier_score")["mean_rank"][half] for half in ("chosen on", "confirmed on"))
    rows = [
        {"score": score, "chosen": chosen[score], "confirmed": confirmed[score]}
        for score in sorted(chosen, key=chosen.__getitem__)
    ]
    columns = [
        ("score", "`{score}`"),
        ("mean rank, choosing half", "{chosen:.2f}"),
        ("confirming half", "{confirmed:.2f}"),
    ]
    return listed(rows, columns)


SHORT = {
    "HistGradientBoosting": "gradient boosting",
    "CalibratedClassifierCV(HistGradientBoosting)": "boosting, calibrated",
}


def _estimators(name: str) -> str:
    """Return the log loss of each classifier on each table, or the means of all metrics, or of prediction sets, over the tables."""
    by_method: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record("tables")["rows"]:
        by_method.setdefault(SHORT.get(row["method"], row["method"]), {})[row["table"]] = row
    if name == "losses":
        columns = [("log loss", "{title}")]
        form = "{{{0}[log_loss][mean]:.3f}} ± {{{0}[log_loss][error]:.3f}}"
        classifiers = [method for method, rows in by_method.items() if "log_loss" in next(iter(rows.values()))]
        titles = list(by_method[classifiers[0]])
        columns += [(method, form.format(f"m{index}")) for index, method in enumerate(classifiers)]
        return listed(
            [
                {"title": title, **{f"m{index}": by_method[method][title] for index, method in enumerate(classifiers)}}
                for title in titles
            ],
            columns,
        )
    forms = {"coverage": ("coverage %", "* 100 .1f"), "size": ("classes in a set", ".2f")}
    if name == "means":
        forms = {
            "log_loss": ("log loss ↓", ".3f"),
            "accuracy": ("accuracy % ↑", "* 100 .1f"),
            "seconds": ("CPU seconds", ".2f"),
        }
        forms |= {kind: (f"AUROC %, {kind} ↑", "* 100 .1f") for kind in ("shuffled", "wrong unit", "far")}
    lines = []
    for method, rows in by_method.items():
        means: dict[str, Any] = {"method": method, **dict.fromkeys(forms)}
        for field in forms.keys() & next(iter(rows.values())).keys():
            error = sum(row[field]["error"] ** 2 for row in rows.values()) ** 0.5
            means[field] = (sum(row[field]["mean"] for row in rows.values()) / len(rows), error / len(rows))
        if any(means[field] is not None for field in forms):
            lines.append(means)
    write = Cells().format_field
    texts = [
        [
            row["method"],
            *(
                MISSING if row[field] is None else f"{write(row[field][0], form)} ± {write(row[field][1], form)}"
                for field, (_, form) in forms.items()
            ),
        ]
        for row in lines
    ]
    return markdown_rows(["mean over the tables", *(title for title, _ in forms.values())], texts)


def _wrong_units(name: str) -> str:
    """Return the rates of alarms and the mean AUROC of `ood_score` for each suite and each weight of the excess norms."""
    rows = record("wrong_units")["rows"]
    columns = [
        ("% of", "{suite}"),
        ("weight of excess norms", "{weight:.0f}"),
        ("AUROC, outliers", "{mean_auroc:* 100 .3f}"),
    ]
    columns += [("false alarms", "{false_alarms:* 100 .1f}")]
    for index, factor in enumerate(rows[0]["alarms"]):
        columns.append((f"alarms, inputs x {float(factor):g}", f"{{rates[{index}]:* 100 .1f}}"))
    extended = []
    for row in rows:
        areas = row["auroc"].values()
        extended.append(row | {"mean_auroc": sum(areas) / len(areas), "rates": list(row["alarms"].values())})
    return listed(extended, columns, 2)


def _small_validation(name: str) -> str:
    """Return the log loss of the default rule relative to the temperature-scaled ensemble, with and without the prior on pooling."""
    cases: dict[tuple[str, int], dict[str, Any]] = {}
    for row in record("small_validation")["rows"]:
        cases.setdefault((row["data"], row["validation"]), {})["with" if row["prior"] == "prior" else "without"] = row
    columns = [("data", "{with[data]}"), ("validation data", "{with[validation]}")]
    for prior in ("without", "with"):
        columns += [
            (f"{prior}: {title}", f"{{{prior}[{field}]:{form}}}")
            for title, field, form in (
                ("mean %", "mean", "+.2f"),
                ("95 % quantile", "quantile_95", "+.1f"),
                ("worst", "worst", "+.1f"),
                ("pooled %", "pooled", "* 100 .0f"),
            )
        ]
    return listed(cases.values(), columns, 2)


def _segmentation(name: str) -> str:
    """Return per-pixel metrics on test images and shifted images, and the AUROC for detecting rings."""
    columns = [("", "{method}")]
    for data, title in (("test", ""), ("shifted", "shifted: ")):
        fields = {"accuracy": "accuracy %", "confidence": "conf. %", "nll": "NLL", "ece": "ECE %"}
        forms = {field: ".3f" if field == "nll" else "* 100 .1f" for field in fields}
        columns += [(f"{title}{heading}", f"{{{data}[{field}]:{forms[field]}}}") for field, heading in fields.items()]
    columns.append(("rings, AUROC %", "{with rings[rings]:* 100 .1f}"))
    return listed([{"method": method, **results} for method, results in record("segmentation").items()], columns)


def _nodes(name: str) -> str:
    """Return the largest differences between the results of several processes and those of a single process."""
    rows = {row["layout"]: row["difference"] for row in record("two_nodes")["rows"]}
    layouts = {"2": "2 processes", "4": "4 processes", "2x2": "2 nodes of 2"}
    lines = [[command, *[f"{rows[layout][command]:.0e}" for layout in layouts]] for command in rows["1"]]
    return markdown_rows(["", *layouts.values()], lines)


def _export(name: str) -> str:
    """Return the largest differences between the outputs of exported files and those of `predict`."""
    names = {"probabilities": "probs", "confidence": "confidence", "entropy": "entropy"}  # names in exported files
    names |= {"mutual_information": "epistemic", "ood_score": "ood_score"}
    columns = [("", "{precision}"), ("allowed", "{tolerance:g}")]
    columns += [(title, f"{{{field}:.1e}}") for field, title in names.items()]
    columns.append(("labels that differ", "{labels} of {rows}"))
    summary = record("export_agreement")["summary"]
    return listed([{"precision": precision, **row} for precision, row in summary.items()], columns)


def _crash(name: str) -> str:
    """Return the number of killed processes and the number of damaged results, by type of process."""
    columns = [
        ("killed", "{kind}"),
        *((count, f"{{{count}}}") for count in ("kills", "lost", "half-written", "differs")),
    ]
    return listed(record("crash")["rows"], columns)


def _many_classes(name: str) -> str:
    """Return a table that compares `kron-diag` with `kron`."""
    rows = []
    for row in record("many_classes")["distances"]:
        rows_at_prior = row["at_one_prior"]
        tuned = row["tuned"]
        least = min(measured["variance_least"] for measured in rows_at_prior)
        most = max(measured["variance_most"] for measured in rows_at_prior)
        farthest = max(measured["mean_total_variation"] for measured in rows_at_prior)
        losses = ", ".join(f"{tuned[structure]['nll']:.4f}" for structure in ("kron", "kron-diag"))
        eigenvalues = f"{row['second_eigenvalue']:.2f}, {row['largest_eigenvalue']:.2f}"
        rows.append([row["scene"], eigenvalues, f"{least:.2f} to {most:.2f}", f"{farthest:.4f}", losses])
    header = [
        "data",
        "ν₂, νₘₐₓ",
        "variance of kron / kron-diag",
        "largest mean distance",
        "log loss of kron, kron-diag",
    ]
    return markdown_rows(header, rows)


def _size(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if value < 1e9 else f"{value / 1e9:.1f} GB"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def verdict(row: dict[str, Any], bar: str) -> list[str]:
    """Return the limit on a measurement and, if there is a limit, the word "met" or "missed"."""
    return [bar, ("**missed**" if row["missed"] else "met") if bar else ""]


def _speed(name: str) -> str:
    """Return a table of overheads in time or memory, of times in comparison with laplace-torch, or of the machines used."""
    if name == "summary":
        defaults = {"fit": ("kron", "dense"), "tune": ("calibrated",), "call": ("by distance",)}
        rows = []
        for setting in ("ResNet-20 / CIFAR-10", "LeNet / MNIST", "U-Net, 16 images of 256 x 256"):
            added = {
                row["work"]: f"{row['added']:.2f}"
                for row in record("speed")["rows"]
                if row["setting"] == setting and row["kind"] in defaults[row["work"]]
            }
            rows.append([setting, *(added.get(work, MISSING) for work in defaults)])
        return markdown_rows(["network", "`fit`", "`tune`", "`posterior(x)`"], rows)
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
        return markdown_rows(["network", "work", "", "added", "ratio", "CPU time", "bar", ""], rows, 3)
    if name == "memory":
        rows = []
        for row in record("memory")["rows"]:
            sizes = [row["work"], row["structure"], *(f"{row[size]:,}" for size in ("features", "classes", "data"))]
            bar = "" if row["bar"] is None else f"at most {row['bar']:.0f} MB"
            rows.append([*sizes, _size(row["peak"]), _size(row["needed"]), *verdict(row, bar)])
        return markdown_rows(["work", "structure", "P", "C", "N", "peak", "the result itself", "bar", ""], rows, 2)
    if name.startswith("laplace-torch"):
        measured = record("speed_against_laplace_torch")["rows"]
        rows = []
        if name.endswith("summary"):  # the fastest backend for each task
            fastest = {(row["work"], row["features"]): row for row in sorted(measured, key=lambda row: -row["ratio"])}
            measured = [row for row in measured if row in fastest.values()]
        for row in measured:
            times = [_seconds(row[f"{who}seconds"]) for who in ("bare_", "", "peer_")]
            ratio = f"{row['ratio']:.1f} [{row['quartile_1']:.1f}, {row['quartile_3']:.1f}]"
            rows.append([row["work"], f"P={row['features']}, C={row['classes']}", row["peer"], *times, ratio])
        return markdown_rows(
            ["work", "size", "backend", "bare passes", "molaplace", "laplace-torch", "times [quartiles]"], rows, 3
        )
    rows = []
    for name in ("speed", "memory", "speed_against_laplace_torch"):
        environment = record(name)["environment"]
        load = (
            "unknown"
            if environment.get("load") is None
            else f"{environment['load']:.1f} on {environment['cores']} cores"
        )
        rows.append(
            [name, f"{environment['system']}, {environment['machine']}, torch {environment['packages']['torch']}", load]
        )
    return markdown_rows(["record", "machine", "load at the start"], rows, 2)


DEFAULT = "MoLA (calibrated)"
RIVALS = ("DE-T", "DE-L")


def _default(name: str) -> str:
    """Compare the default rule with temperature-scaled ensembles; `name` is `summary` or, for example, `cifar10 outliers`."""
    if name == "summary":
        return _default_summary()
    suite, kind = name.split()
    results = _suite(suite)
    numbers = Numbers({method: results.runs[method] for method in (*RIVALS, DEFAULT)}, results.overlap)
    if kind == "outliers":
        header = ["AUROC by confidence", *RIVALS, "default", "default less DE-T", "runs ahead"]
        quantities = {info.name: Quantity(info.name, "auroc", BY_CONFIDENCE) for info in results.of_role("outlier")}
        return markdown_rows(
            header, [[name, *_compared(numbers, quantity, 100, 2, sign=1)] for name, quantity in quantities.items()]
        )
    columns = {"NLL": ("nll", 1, 4), "ECE %": ("ece", 100, 2), "AURC x 1000": ("aurc", 1000, 2)}
    header = ["", *(f"{title} {word}" for title in columns for word in (*RIVALS, "default", "difference"))]
    header = [heading.replace("-", "\N{NON-BREAKING HYPHEN}") for heading in header]
    rows = []
    for info in (*results.of_role("test"), *results.of_role("shift")):
        row = [info.name]
        for metric, factor, digits in columns.values():
            row += _compared(numbers, Quantity(info.name, metric), factor, digits, sign=-1)[:-1]
        rows.append(row)
    return markdown_rows(header, rows)


def _compared(numbers: Numbers, quantity: Quantity, factor: float, digits: int, *, sign: int) -> list[str]:
    """Return the mean for each method, the default minus DE-T, and the number of runs in which the default is at least as good."""
    estimates = [mean for mean in numbers(quantity, factor).values() if mean is not None]
    gap = estimates[-1].minus(estimates[0])
    ahead = sum(sign * value >= 0 for value in gap.by_run.values())
    means = [f"{mean.value:.{digits}f}" for mean in estimates]
    return [*means, f"{gap.value:+.{digits}f} ± {gap.error:.{digits}f}", f"{ahead} of {gap.runs}"]


def _default_summary() -> str:
    """Return the results for each suite, averaged over runs and sets."""
    rows = []
    for suite, title in (("cifar10", "CIFAR-10"), ("mnist", "MNIST"), ("clinc", "CLINC150"), ("imagenet", "ImageNet")):
        results = _suite(suite)
        numbers = Numbers({method: results.runs[method] for method in (*RIVALS, DEFAULT)}, results.overlap)
        outliers = tuple(info.name for info in results.of_role("outlier"))
        for name, quantity, factor, digits in (
            ("test NLL", Quantity("test", "nll"), 1, 3),
            ("shifted NLL", numbers.shifted("nll"), 1, 2),
            ("OOD AUROC %", Quantity(outliers, "auroc", BY_CONFIDENCE), 100, 1),
        ):
            means = [f"{mean.value:.{digits}f}" for mean in numbers(quantity, factor).values() if mean is not None]
            rows += [[f"{title}, {name}", *means]] if means else []
    return markdown_rows(["", *RIVALS, "default"], rows)


def _default_rule(_: str) -> str:
    frame = pd.DataFrame(record("default_rule")["rows"])
    keys = ["suite", "half", "networks", "validation"]
    means = frame.groupby([*keys, "method"], sort=False)[["test_nll", "test_ece", "shifted_nll", "auroc"]].mean()
    rows = []
    for key in means.index.droplevel("method").unique():
        default = means.loc[(*key, "default")]
        rival = means.loc[(*key, "DE-T")]
        gap = default - rival
        numbers = (
            f"{default.test_nll:.4f} ({gap.test_nll:+.4f})",
            f"{100 * default.test_ece:.2f} ({100 * gap.test_ece:+.2f})",
        )
        rest = (
            f"{default.shifted_nll:.3f} ({gap.shifted_nll:+.3f})",
            f"{100 * default.auroc:.1f} ({100 * gap.auroc:+.1f})",
        )
        rows.append([*(str(part) for part in key), *numbers, *rest])
    header = [*keys, "test NLL", "test ECE %", "mean shifted NLL", "mean AUROC"]
    return markdown_rows(header, rows, left=2)


def _bayesian_optimisation(function: str) -> str:
    rows = [row for row in record("bayesian_optimisation")["summary"] if row["function"] == function]
    columns = (
        ("method", "{method}"),
        ("last regret", "{last_regret:.4f} ± {last_regret_error:.4f}"),
        ("median", "{median_last_regret:.4f}"),
        ("fit, CPU s per step", "{fit_seconds:.2f}"),
        ("search, CPU s per step", "{search_seconds:.2f}"),
    )
    return listed(rows, columns)


def _late_data(kind: str) -> str:
    rows = [row for row in record("late_data")["summary"] if row["case"].startswith(kind)]
    columns = (
        ("late data", "{case}"),
        ("head", "{head}"),
        ("old classes or inputs, %", "{old_accuracy:* 100 .1f}"),
        ("late, %", "{late_accuracy:* 100 .1f}"),
        ("all, %", "{all_accuracy:* 100 .1f}"),
        ("all, log loss", "{all_nll:.2f}"),
    )
    return listed(rows, columns, left=2)


def _watch(name: str) -> str:
    rows = record("watch")
    if name == "false alarms":
        columns = [
            ("validation data", "{validation:,}"),
            ("alpha", "{alpha:.0%}"),
            ("`mola.watch`", "{watch:* 100 .1f} %"),
            ("ranks in the validation set", "{fixed:* 100 .1f} %"),
            ("MAPIE's jumper", "{mapie:* 100 .1f} %"),
            ("test every day", "{daily:* 100 .1f} %"),
        ]
        return listed(rows["false_alarms"], columns, 0)
    if name == "delays":
        columns = [
            ("data", "{suite}"),
            ("change", "{change}"),
            *[
                (head, f"{{{test}:,.0f}} ({{{test}_seen:.0%}})")
                for head, test in (("`mola.watch`", "watch"), ("MAPIE's jumper", "mapie"), ("test every day", "daily"))
            ],
        ]
        return listed([row | {"suite": TITLES[row["suite"]]} for row in rows["delays"]], columns, 2)
    if name == "cost":
        columns = [
            ("inputs in a batch", "{batch:,}"),
            ("predict, ms", "{predict:* 1000 .0f}"),
            ("update, ms", "{update:* 1000 .2f}"),
            ("share", "{share:.2%}"),
        ]
        return listed(rows["cost"]["times"], columns, 0)
    chosen = name == "accuracy chosen"
    methods = ("mean confidence, DE-T", "DoC, DE-T", "agreement (GDE)", "COT", "ATC, DE-T", "ATC")
    columns = [
        ("data", "{suite}"),
        ("sets", "{kind} ({sets})"),
        *[(method, f"{{{method}:.1f}}") for method in methods],
        ("withheld", "{refused:.0%}"),
        ("error of the others", "{answered error:.1f}"),
        ("of the withheld", "{withheld error:.1f}"),
        ("covered", "{covered:.0%}"),
    ]
    selected = [row | {"suite": TITLES[row["suite"]]} for row in rows["accuracy_summary"] if row["chosen"] == chosen]
    return listed(selected, columns, 2)


TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "clinc150": "CLINC150", "imagenet": "ImageNet"}


def _questions(_: str) -> str:
    """Return what a language model answers to questions with four choices, before and after its adapters were trained."""
    columns = [
        ("", "{network}"),
        ("accuracy %", "{accuracy:* 100 .1f} ± {accuracy_error:* 100 .1f}"),
        ("log loss", "{nll:.3f}"),
    ]
    columns += [(f"answers {letter}", f"{{answers[{index}]}}") for index, letter in enumerate("ABCD")]
    return listed(record("questions")["rows"], columns)


RUN_METRICS = {
    "nll": ("log loss", ".4f", 1.0),
    "ece": ("ECE %", ".2f", 100.0),
    "accuracy": ("accuracy %", ".2f", 100.0),
}
"""Heading, format and factor of the metrics in tables of single runs and of single sets."""


def _runs(name: str) -> str:
    """Return a metric in every run of a suite, as in "clinc-lora test nll": runs, their mean, and the difference from DE-L.

    Methods with a single run are left out, because they have no standard errors.
    """
    suite, set_name, metric = name.split(" ")
    title, form, factor = RUN_METRICS[metric]
    means = _suite(suite).numbers()(Quantity(set_name, metric), factor)
    runs = sorted({run for mean in means.values() if mean is not None for run in mean.by_run})
    rows = []
    for method, mean in means.items():
        if mean is not None and len(mean.by_run) > 1:
            gap = mean.minus(means["DE-L"])
            difference = MISSING if method == "DE-L" else f"{gap.value:+{form}} ± {gap.error:{form}}"
            values = [format(mean.by_run[run], form) if run in mean.by_run else MISSING for run in runs]
            rows.append([method, *values, f"{mean.value:{form}} ± {mean.error:{form}}", difference])
    return markdown_rows([title, *(f"run {run + 1}" for run in runs), "mean", "minus DE-L"], rows)


SOURCES: dict[str, Callable[[str], str]] = {
    "bayesian-optimisation": _bayesian_optimisation,
    "closed-forms": _closed_forms,
    "crash": _crash,
    "decisions": _decisions,
    "guarantees": _guarantees,
    "default": _default,
    "default-rule": _default_rule,
    "estimators": _estimators,
    "export": _export,
    "labels": _labels,
    "late-data": _late_data,
    "links": _links,
    "many-classes": _many_classes,
    "questions": _questions,
    "ranks": _ranks,
    "runs": _runs,
    "saturated": _saturated,
    "segmentation": _segmentation,
    "small-validation": _small_validation,
    "speed": _speed,
    "two-nodes": _nodes,
    "uci": _uci,
    "watch": _watch,
    "wrong-units": _wrong_units,
}
"""Functions that return the tables that do not come from a suite, by the first word of the table's name."""
