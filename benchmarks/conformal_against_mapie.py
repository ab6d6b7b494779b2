"""Prediction sets and intervals beside those of MAPIE and TorchCP, on the same scores: equal where definitions agree.

    python benchmarks/conformal_against_mapie.py [--venv DIR]

All run in an environment made for that (`peer_environment.py`), in one process (`conformal_cases.py`). Prints a table and fails if
more than one set in a hundred differs. Single sets may: MAPIE adds classes whose score is above the threshold by rounding.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import peer_environment
import record

ALLOWED = 0.01
"""Share of sets that may differ, by classes within rounding of the threshold."""


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':9}{'':26}{'classes':>8}{'promised':>9}{'equal sets':>14}   {'coverage':16}{'mean size':16}"]
    for row in rows:
        coverage = " / ".join(f"{one:.3f}" for one in row["coverage"])
        size = " / ".join(f"{one:.2f}" for one in row["size"])
        equal = f"{row['equal']} of {row['sets']}"
        lines.append(
            f"{row['peer']:9}{row['case']:26}{row['classes']:8}{row['promised']:9g}{equal:>14}   {coverage:16}{size:16}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packages = peer_environment.CONFORMAL
    parser.add_argument(
        "--venv", type=Path, default=peer_environment.cache_folder(packages), help="where they are installed"
    )
    python = peer_environment.prepare(parser.parse_args().venv, packages)
    result = peer_environment.run(python, "conformal_cases.py")
    share = sum(row["equal"] for row in result["same"]) / sum(row["sets"] for row in result["same"])
    record.write("conformal_against_mapie", {**result, "equal_share": share})
    print("The same definition (ours / theirs):")
    print(table(result["same"]))
    print("\nNot the same definition, for comparison (not judged):")
    print(table(result["different"]))
    (intervals,) = result["intervals"]
    print(f"\nConformalised quantiles, MAPIE: largest difference {intervals['difference']:.1e}")
    bad = [row for row in result["same"] if row["equal"] < (1 - ALLOWED) * row["sets"]]
    return int(bool(bad) or not intervals["difference"] < 1e-9)


if __name__ == "__main__":
    sys.exit(main())
