"""Agreement with laplace-torch wherever the two libraries define the same thing, in float64: classes and numbers.

    python benchmarks/compare_laplace_torch.py [--venv DIR]

Both libraries run in an environment made for that (`peer_environment.py`), in one process, on the same networks
(`laplace_torch_cases.py`, `laplace_torch_regression_cases.py`). Prints tables and fails if any difference is above the tolerance.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import peer_environment
import record


def table(rows: list[dict[str, Any]]) -> str:
    precisions = [f"{value:g}" for value in rows[0]["prior_precision"]]
    head = f"{'network':20} {'structure':13} {'quantity':27}" + "".join(f"{value:>10}" for value in precisions)
    lines = [
        f"{row['network']:20} {row['structure']:13} {row['quantity']:27}"
        + "".join(f"{value:10.1e}" for value in row["difference"])
        for row in rows
    ]
    return "\n".join([head, "-" * len(head), *lines])


RECORDS = {
    "compare_laplace_torch": "laplace_torch_cases.py",
    "compare_laplace_torch_regression": "laplace_torch_regression_cases.py",
}


def above(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the same definition that differ by more than the tolerance, or than their own."""
    return [row for row in result["same"] if not max(row["difference"]) <= row.get("tolerance", result["tolerance"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, default=peer_environment.cache_folder(), help="where laplace-torch is installed"
    )
    python = peer_environment.prepare(parser.parse_args().venv)
    failed = 0
    for name, script in RECORDS.items():
        result = peer_environment.run(python, script)
        record.write(name, result)
        kind = "Numbers" if "regression" in name else "Classes"
        print(
            f"\n{kind}: largest difference relative to the largest value, by prior precision (slopes: at mola's best)\n"
        )
        print("The same definition:")
        print(table(result["same"]))
        print("\nNot the same definition or precision, for comparison (not judged):")
        print(table(result["different"]))
        wrong = above(result)
        failed += len(wrong)
        print(
            f"\n{len(result['same']) - len(wrong)} of {len(result['same'])} rows within {result['tolerance']:g}, or their own"
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
