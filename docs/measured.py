"""Fill the tables of docs/speed.md from what the benchmarks wrote: `python docs/measured.py`.

A page holds places such as

    <!-- measured: growth -->
    <!-- end -->

and what stands between the two lines is replaced by that table, made from `benchmarks/results`. The tests do the same and
compare, so that every number in a table is one of a measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mola.compare.report.tables import markdown_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "speed.md", ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- measured: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


class MissingError(Exception):
    """A benchmark has not been run."""


class Results:
    """The documents that the benchmarks wrote, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.exists():
            message = f"not measured yet: `python benchmarks/{name}.py`"
            raise MissingError(message)
        return json.loads(path.read_text(encoding="utf-8"))


def spread(values: list[float], form: str = ".3f") -> str:
    """One number, or the least and the most of several."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def size(value: float) -> str:
    """Bytes in MB or GB."""
    return f"{value / 1e6:.1f} MB" if value < 1e9 else f"{value / 1e9:.1f} GB"


def seconds(value: float) -> str:
    """In a unit that suits."""
    return f"{value:.1f} s" if value >= 10 else f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


# --- the tables ---------------------------------------------------------------------------------------------------------

OVERHEAD = {
    "fit": lambda row: row["fit"]["whole"],
    "predict": lambda row: row["predict"]["whole"],
    "predict over DE": lambda row: row["predict"]["over_ensemble"],
    "tune": lambda row: None if row["tune"] is None else row["tune"]["whole"],
}
AGAINST = {
    "fit": "over the bare passes",
    "predict": "over the bare passes",
    "predict over DE": "MoLA over the deep ensemble",
    "tune": "over one validation pass",
}


def bars(results: Results) -> str:
    """Every bar, what was measured, and whether it is met."""
    rows: list[list[str]] = []
    parts = {
        "what mola adds": _overhead_bars,
        "memory": _memory_bars,
        "against laplace-torch": _peer_bars,
        "float32": _precision_bars,
        "growth": _growth_bars,
        "very many classes": _many_bars,
    }
    for name, part in parts.items():
        try:
            rows += part(results)
        except MissingError as missing:
            rows.append([name, "", str(missing), "**open**"])
    return markdown_rows(["work", "bar", "measured", ""], rows, 2)


def _overhead_bars(results: Results) -> list[list[str]]:
    """Over the bare passes and the deep ensemble."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in results["fit_overhead"]["rows"]:
        for work, bar in row["bars"].items():
            value = OVERHEAD[work](row)
            if value is not None:
                name = "predict" if work.startswith("predict") else work
                key = (f"`{name}`, {row['structure']}, {row['setting']}", AGAINST[work], bar)
                found.setdefault(key, []).append(value)
    return [
        [work, f"at most {bar:g}, {against}", spread(values), _met(max(values) <= bar)]
        for (work, against, bar), values in found.items()
    ]


def _memory_bars(results: Results) -> list[list[str]]:
    """Peaks while fitting."""
    rows = []
    for row in results["fit_memory"]["rows"]:
        if row["bar"] is not None:
            at = f"P={row['features']}, C={row['classes']}, N={row['data']}"
            work = f"memory of `fit`, {row['structure']}, {at}"
            rows.append([work, f"under {row['bar']:g} MB", size(row["peak"]), _met(row["peak"] <= row["bar"] * 1e6)])
    return rows


def _peer_bars(results: Results) -> list[list[str]]:
    """Times as fast as laplace-torch."""
    return [
        [
            f"{bar['work']}, P={bar['features']}",
            f"at least {bar['bar']:g} times as fast as laplace-torch ({bar['against']})",
            f"{bar['ratio']:.1f}",
            _met(bar["ratio"] >= bar["bar"]),
        ]
        for bar in results["speed_against_laplace_torch"]["bars"]
    ]


def _precision_bars(results: Results) -> list[list[str]]:
    """Float32 against float64."""
    found = results["precision"]
    worst = max(row["largest"] for row in found["rows"])
    bar = f"at most {found['bar']:g} in probabilities"
    return [["float32 against float64", bar, f"{worst:.1e}", _met(worst <= found["bar"])]]


def _growth_bars(results: Results) -> list[list[str]]:
    """All exponents together."""
    rows = results["growth"]["rows"]
    kept = sum(row["exponent"] <= row["bar"] for row in rows)
    bar = f"{len(rows)} exponents, each at most what the arithmetic says"
    return [["growth with N, P, C, K", bar, f"{kept} of {len(rows)}", _met(kept == len(rows))]]


def _many_bars(results: Results) -> list[list[str]]:
    """Of kron-diag."""
    rows = []
    for bar in results["many_classes"]["judged"]:
        work = f"`kron-diag`, {bar['where']}"
        value = f"{bar['value']:.3f}"
        rows.append([work, f"{bar['what']}: at most {bar['bar']:g}", value, _met(bar["value"] <= bar["bar"])])
    return rows


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def overhead(results: Results) -> str:
    """What mola adds, for every setting."""
    rows = []
    for row in results["fit_overhead"]["rows"]:
        tune = row["tune"]
        rows.append(
            [
                row["setting"],
                row["structure"],
                str(row["networks"]),
                str(row["batch"]),
                f"{row['fit']['whole']:.3f}",
                seconds(row["fit"]["once_seconds"]),
                f"{row['predict']['whole']:.3f}",
                f"{row['predict']['over_ensemble']:.3f}",
                "" if tune is None else f"{tune['whole']:.3f}",
                "" if tune is None else seconds(tune["search_seconds"]),
            ]
        )
    names = ["network", "structure", "K", "batch", "fit", "once", "predict", "over DE", "tune", "search"]
    return markdown_rows(names, rows, 2)


def peer(results: Results) -> str:
    """Side by side with laplace-torch."""
    rows = [
        [
            row["work"],
            f"P={row['features']}, C={row['classes']}",
            row["peer"],
            seconds(row["bare_seconds"]),
            seconds(row["seconds"]),
            seconds(row["peer_seconds"]),
            f"{row['ratio']:.1f} [{row['quartile_1']:.1f}, {row['quartile_3']:.1f}]",
        ]
        for row in results["speed_against_laplace_torch"]["rows"]
    ]
    return markdown_rows(
        ["work", "size", "laplace-torch's backend", "bare passes", "mola", "laplace-torch", "times [quartiles]"],
        rows,
        3,
    )


def memory(results: Results) -> str:
    """Peaks beside the sums themselves."""
    rows = [
        [
            row["structure"],
            *(str(row[name]) for name in ("features", "classes", "data", "networks")),
            size(row["peak"]),
            size(row["sums"]),
        ]
        for row in results["fit_memory"]["rows"]
    ]
    return markdown_rows(["structure", "P", "C", "N", "K", "peak", "the sums themselves"], rows)


def growth(results: Results) -> str:
    """Exponents."""
    rows = []
    for row in results["growth"]["rows"]:
        form = size if row["work"].startswith("memory") else seconds
        ends = f"{form(row['medians'][0])} at {row['sizes'][0]}, {form(row['medians'][-1])} at {row['sizes'][-1]}"
        rows.append(
            [
                row["work"],
                row["axis"],
                f"{row['exponent']:.2f} [{row['quartile_1']:.2f}, {row['quartile_3']:.2f}]",
                f"{row['end']:.2f}",
                f"{row['bar']:g}",
                ends,
            ]
        )
    return markdown_rows(["work", "with", "exponent [quartiles]", "last doubling", "at most", "from, to"], rows, 2)


def many_costs(results: Results) -> str:
    """Costs where C x C cannot be."""
    rows = [
        [
            f"{row['classes']:,}",
            f"{row['fit_ratio']:.2f}",
            f"{row['predict_ratio']:.2f}",
            *(size(row[f"{work}_peak"]) for work in ("fit", "tune", "predict")),
            size(row["head_bytes"]),
            size(row["class_factor_of_kron_bytes"]),
        ]
        for row in results["many_classes"]["rows"]
    ]
    names = [
        "C",
        "fit / bare",
        "predict / bare",
        "memory: fit",
        "tune",
        "predict",
        "last layer itself",
        "class factor of `kron`",
    ]
    return markdown_rows(names, rows)


def many_distances(results: Results) -> str:
    """How far kron-diag is from kron."""
    rows = []
    for row in results["many_classes"]["distances"]:
        apart = max(row["at_one_prior"], key=lambda one: one["mean_total_variation"])
        whole, diagonal = row["tuned"]["kron"], row["tuned"]["kron-diag"]
        rows.append(
            [
                row["scene"],
                f"{row['second_eigenvalue']:.2f}, {row['largest_eigenvalue']:.2f}",
                f"{min(one['variance_least'] for one in row['at_one_prior']):.2f} to "
                f"{max(one['variance_most'] for one in row['at_one_prior']):.2f}",
                f"{apart['mean_total_variation']:.4f} (λ = {apart['prior_precision']:g})",
                f"{whole['nll']:.4f}, {diagonal['nll']:.4f}",
                f"{100 * whole['ece']:.1f}, {100 * diagonal['ece']:.1f}",
            ]
        )
    names = [
        "data",
        "ν₂, νₘₐₓ",
        "variance of kron / kron-diag",
        "largest mean distance",
        "log loss, each tuned",
        "ECE %",
    ]
    return markdown_rows(names, rows)


def precision(results: Results) -> str:
    """Largest differences by structure and kind of features."""
    rows = results["precision"]["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        lines.setdefault((row["structure"], row["features"], row["classes"]), {})[row["kind"]] = row["largest"]
    return markdown_rows(
        ["structure", "P", "C", *kinds],
        ([name, str(p), str(c), *(f"{found[kind]:.0e}" for kind in kinds)] for (name, p, c), found in lines.items()),
    )


MEASURED = ("fit_overhead", "fit_memory", "speed_against_laplace_torch", "precision", "growth", "many_classes")


def surroundings(results: Results) -> str:
    """On what each was measured, and how busy that was: ratios of a busy machine are not the last word."""
    rows = []
    for name in MEASURED:
        try:
            found = results[name]["environment"]
        except MissingError as missing:
            rows.append([f"`{name}`", str(missing), "", ""])
            continue
        load, cores = found.get("load"), found["cores"]
        busy = "not known" if load is None else f"{load:.1f} on {cores} cores"
        idle = load is not None and load <= cores / 2
        torch = found["packages"]["torch"]
        rows.append(
            [
                f"`{name}`",
                f"{found['system']}, {found['machine']}, torch {torch}",
                busy,
                "" if idle else "**again, idle**",
            ]
        )
    return markdown_rows(["benchmark", "machine", "load when it began", ""], rows, 2)


TABLES: dict[str, Callable[[Results], str]] = {
    "bars": bars,
    "overhead": overhead,
    "laplace-torch": peer,
    "memory": memory,
    "growth": growth,
    "many classes, costs": many_costs,
    "many classes, distance": many_distances,
    "precision": precision,
    "surroundings": surroundings,
}


def fill(page: str, folder: Path) -> str:
    """The page with its tables as the measurements have them.

    Args:
        page: Markdown.
        folder: that the benchmarks wrote to.

    Returns:
        The page.
    """
    results = Results(folder)

    def place(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in TABLES:
            message = f"there is no table {name!r}; there are {', '.join(TABLES)}."
            raise KeyError(message)
        try:
            text = TABLES[name](results)
        except MissingError as missing:  # said on the page, where a number would stand
            text = f"**{str(missing).capitalize()}.**"
        return f"{start}\n{text}\n\n{end}"

    return PLACE.sub(place, page)


def main() -> None:
    """Fill the page in place."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
