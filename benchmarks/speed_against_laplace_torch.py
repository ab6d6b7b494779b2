"""mola and laplace-torch at the same work, side by side.

    python benchmarks/speed_against_laplace_torch.py [--venv DIR] [--repeats 9]

Both libraries run in an environment made for that (`peer_environment.py`), in one process with one thread, in turns
(`laplace_torch_speed_cases.py`). Ratios are laplace-torch's CPU time over mola's. Fails where one is below its bar.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import peer_environment
import record

BARS: tuple[tuple[str, int, str, float], ...] = (
    ("fit kron", 256, "fastest", 4),
    ("fit kron", 256, "curvlinops (default)", 12),
    ("fit full", 256, "curvlinops (default)", 8),
    ("tune, 100 values, whole call", 256, "curvlinops (default)", 1000),
    ("predict, probit, 256 inputs of 784 numbers", 256, "curvlinops (default)", 100),
    ("predict, probit, 1024 inputs of 784 numbers", 256, "curvlinops (default)", 100),
    ("fit kron", 2048, "fastest", 25),
)
"""Work, features, against which backend, and how many times faster mola must be."""


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bar with what was found."""
    found = []
    for work, features, peer, bar in BARS:
        rivals = [row for row in rows if row["work"] == work and row["features"] == features]
        if peer != "fastest":
            rivals = [row for row in rivals if row["peer"] == peer]
        if rivals:
            least = min(rivals, key=lambda row: row["ratio"])
            found.append({"work": work, "features": features, "against": peer, "bar": bar, "ratio": least["ratio"]})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--venv", type=Path, default=peer_environment.cache_folder(), help="where laplace-torch is installed"
    )
    parser.add_argument("--repeats", type=int, default=9, help="turns of each (default 9)")
    options = parser.parse_args()
    python = peer_environment.prepare(options.venv)
    result = peer_environment.run(python, "laplace_torch_speed_cases.py", "--repeats", str(options.repeats))
    bars = judged(result["rows"])
    record.write("speed_against_laplace_torch", result | {"bars": bars})
    print(
        f"{'work':32} {'P':>5} {'C':>5} {'N':>5} {'laplace-torch':22} {'mola':>10} {'theirs':>10}   times [quartiles]"
    )
    for row in result["rows"]:
        print(
            f"{row['work']:32} {row['features']:5} {row['classes']:5} {row['data']:5} {row['peer']:22} "
            f"{1e3 * row['seconds']:7.2f} ms {1e3 * row['peer_seconds']:7.0f} ms {row['ratio']:7.1f} "
            f"[{row['quartile_1']:.1f}, {row['quartile_3']:.1f}]"
        )
    print()
    for bar in bars:
        word = "met   " if bar["ratio"] >= bar["bar"] else "MISSED"
        print(f"{word} {bar['work']}, P={bar['features']}, {bar['against']}: {bar['ratio']:.1f}, bar {bar['bar']:g}")
    return int(any(bar["ratio"] < bar["bar"] for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
