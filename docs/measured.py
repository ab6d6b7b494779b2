"""Fill the tables of docs/speed.md from the records of the benchmarks: `python docs/measured.py`.

A page holds places such as

    <!-- measured: memory -->
    <!-- end -->

and the lines between are replaced by that table, made from `benchmarks/results`. The tests do the same and compare.
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
COMMANDS = {"speed": "speed.py", "memory": "memory.py", "speed_against_laplace_torch": "speed.py --peer"}


class MissingError(Exception):
    """A benchmark has not been run."""


class Results:
    """The records by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.exists():
            raise MissingError(f"not measured yet: `python benchmarks/{COMMANDS[name]}`")
        return json.loads(path.read_text(encoding="utf-8"))


def size(value: float) -> str:
    """Bytes in MB or GB."""
    return f"{value / 1e6:.1f} MB" if value < 1e9 else f"{value / 1e9:.1f} GB"


def seconds(value: float) -> str:
    """Seconds in a unit that suits."""
    return f"{value:.1f} s" if value >= 10 else f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _verdict(row: dict[str, Any], bar: str) -> list[str]:
    return [bar, ("**missed**" if row["missed"] else "met") if bar else ""]


def overhead(results: Results) -> str:
    """Time that mola adds, by setting, work and structure or rule."""
    rows = []
    for row in results["speed"]["rows"]:
        bar = f"at most {row['bar']:g}" if row["bar"] else f"at most {row['limit']:g} s" if row["limit"] else ""
        if "over" in row:
            bar += f", {size(row['over'])} (at most 300 MB)"
        ratios = ["", ""] if row["ratio"] is None else [f"{row['added']:.3f}", f"{row['ratio']:.3f}"]
        rows.append([row["setting"], row["work"], row["kind"], *ratios, seconds(row["seconds"]), *_verdict(row, bar)])
    return markdown_rows(["network", "work", "", "added", "ratio", "CPU time", "bar", ""], rows, 3)


def memory(results: Results) -> str:
    """Peaks beside the size of the result."""
    rows = []
    for row in results["memory"]["rows"]:
        sizes = [row["work"], row["structure"], *(f"{row[name]:,}" for name in ("features", "classes", "data"))]
        bar = "" if row["bar"] is None else f"at most {row['bar']:.0f} MB"
        rows.append([*sizes, size(row["peak"]), size(row["needed"]), *_verdict(row, bar)])
    return markdown_rows(["work", "structure", "P", "C", "N", "peak", "the result itself", "bar", ""], rows, 2)


def peer(results: Results) -> str:
    """Side by side with laplace-torch."""
    rows = []
    for row in results["speed_against_laplace_torch"]["rows"]:
        times = [seconds(row[f"{who}seconds"]) for who in ("bare_", "", "peer_")]
        ratio = f"{row['ratio']:.1f} [{row['quartile_1']:.1f}, {row['quartile_3']:.1f}]"
        rows.append([row["work"], f"P={row['features']}, C={row['classes']}", row["peer"], *times, ratio])
    names = ["work", "size", "laplace-torch's backend", "bare passes", "mola", "laplace-torch", "times [quartiles]"]
    return markdown_rows(names, rows, 3)


def surroundings(results: Results) -> str:
    """The machine of each record, and how busy it was."""
    rows = []
    for name, command in COMMANDS.items():
        try:
            found = results[name]["environment"]
        except MissingError as missing:
            rows.append([f"`{command}`", str(missing), "", ""])
            continue
        load, cores = found.get("load"), found["cores"]
        busy = "unknown" if load is None else f"{load:.1f} on {cores} cores"
        machine = f"{found['system']}, {found['machine']}, torch {found['packages']['torch']}"
        idle = load is not None and load <= cores / 2
        rows.append([f"`{command}`", machine, busy, "" if idle else "**again, idle**"])
    return markdown_rows(["benchmark", "machine", "load at the start", ""], rows, 2)


TABLES: dict[str, Callable[[Results], str]] = {
    "overhead": overhead,
    "memory": memory,
    "laplace-torch": peer,
    "surroundings": surroundings,
}


def fill(page: str, folder: Path) -> str:
    """The page with its tables from the records in a folder."""
    results = Results(folder)

    def place(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in TABLES:
            raise KeyError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
        try:
            text = TABLES[name](results)
        except MissingError as missing:
            text = f"**{str(missing).capitalize()}.**"
        return f"{start}\n{text}\n\n{end}"

    return PLACE.sub(place, page)


def main() -> None:
    """Fill the page in place."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
