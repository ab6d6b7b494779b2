"""Draw the figure of docs/bayesian-optimisation.md from `benchmarks/results/bayesian_optimisation.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from molaplace.report.style import COLOURS, DASHED, INK, Figure, as_png, canvas, drawing, quiet_axes

ROOT = Path(__file__).resolve().parent.parent.parent
TITLES = {"branin": "Branin, 2 inputs", "hartmann": "Hartmann-6, 6 inputs"}
STYLES = {
    "random": {"color": COLOURS["MAP"]},
    "Gaussian process": {"color": INK},
    "molaplace": {"color": COLOURS["MoLA"]},
    "molaplace, conditioned": {"color": COLOURS["MoLA"], "linestyle": DASHED},
}


def draw(wide: bool, rows: list[dict[str, Any]], initial: dict[str, int]) -> Figure:
    """Draw one panel per function: mean log regret and its standard error against the number of evaluations."""
    figure, panels = canvas(1, 2, 3.2, 9.0) if wide else canvas(2, 1, 2.9, 4.4)
    for panel, (function, title) in zip(panels, TITLES.items(), strict=True):
        quiet_axes(panel)
        for row in rows:
            if row["function"] != function:
                continue
            evaluations = range(initial[function], initial[function] + len(row["log10_regret"]))
            means = row["log10_regret"]
            errors = row["log10_regret_error"]
            style = STYLES[row["method"]]
            panel.plot(evaluations, means, label=row["method"], **style)
            low = [mean - error for mean, error in zip(means, errors, strict=True)]
            high = [mean + error for mean, error in zip(means, errors, strict=True)]
            panel.fill_between(evaluations, low, high, color=style["color"], alpha=0.2, linewidth=0)
        panel.set_title(title)
        panel.set_xlabel("evaluations")
        panel.set_ylabel("log10 of the regret")
    panels[0].legend(fontsize=8)
    return figure


def main() -> None:
    """Draw the wide and the narrow figure."""
    record = json.loads((ROOT / "benchmarks/results/bayesian_optimisation.json").read_text(encoding="utf-8"))
    with drawing():
        for wide, ending in ((True, ""), (False, "-narrow")):
            path = ROOT / "docs" / "images" / f"bayesian-optimisation{ending}.png"
            path.write_bytes(as_png(draw(wide, record["summary"], record["settings"]["initial"])))


if __name__ == "__main__":
    main()
