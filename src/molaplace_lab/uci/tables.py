"""Tables of the UCI records, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from molaplace_lab.uci.comparison import UCI_METHODS

Records = Sequence[Mapping[str, Any]]


def _scores(records: Records, *, gaps: bool) -> pd.DataFrame:
    # Return a frame with a row for each method on each split: the gap splits if `gaps` is True, and the published splits otherwise.
    rows = [
        {"set": record["set"], "method": method, **scores}
        for record in records
        if record["split"].startswith("gap") == gaps
        for method, scores in record["methods"].items()
    ]
    return pd.DataFrame(rows)


def _estimates(records: Records, score: str) -> dict[str, pd.DataFrame]:
    # Return frames with a row for each set and a column for each method: the mean of a score over the published splits, its standard
    # error, and the number of splits.
    estimates = _scores(records, gaps=False).groupby(["set", "method"])[score].agg(["mean", "sem", "count"])
    return {name: estimates[name].unstack()[list(UCI_METHODS)] for name in estimates}


def as_good(records: Records, score: str) -> pd.DataFrame:
    """Return whether each method's mean on each set is within one standard error (its own or the best method's) of the best mean."""
    estimates = _estimates(records, score)
    mean = estimates["mean"]
    error = estimates["sem"].fillna(0)
    best = pd.Series(error.to_numpy()[range(len(mean)), mean.to_numpy().argmin(1)], mean.index)
    return mean.sub(mean.min(axis=1), axis=0) <= error.clip(lower=best, axis=0)


def score_table(records: Records, score: str) -> str:
    """Return a Markdown table with a row for each set and a column for each method; the best values are in bold."""
    estimates = _estimates(records, score)
    rows = []
    for name, means in estimates["mean"].iterrows():
        cells = []
        for method, mean in means.items():
            digits = 4 if abs(mean) < 0.05 else 3 if abs(mean) < 0.3 else 2
            error = estimates["sem"].loc[name, method]
            text = f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" \u00b1 {error:.{digits}f}")
            cells.append(f"**{text}**" if mean == means.min() else text)
        rows.append([name, str(int(estimates["count"].loc[name].max())), *cells])
    return _markdown(["set", "splits", *UCI_METHODS], rows)


def gap_table(records: Records) -> str:
    """Return a Markdown table for the splits that hold out the middle of a feature's range.

    The NLL is a median over splits, because the worst split would dominate the mean. The coverage of 90 % intervals, and the ratio
    of the standard deviation on test rows to that on validation rows, are means over splits.
    """
    rows = []
    for (name, method), scores in _scores(records, gaps=True).groupby(["set", "method"], sort=False):
        wider = (scores["std"] / scores["std_inside"]).mean()
        coverage = 100 * scores["coverage"].mean()
        rows.append(
            [name, str(len(scores)), method, f"{scores['nll'].median():.2f}", f"{coverage:.0f} %", f"{wider:.2f}"]
        )
    header = ["set", "features", "method", "median NLL", "90 % intervals hold", "times as wide as inside"]
    return _markdown(header, rows)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])
