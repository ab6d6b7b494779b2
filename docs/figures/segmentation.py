"""Draw the maps in docs/dense.md and write the numbers in docs/results/ood-scores.md, using examples/segmentation.py.

Run `python docs/figures/segmentation.py`.
"""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Train and evaluate the networks, draw the maps and write the numbers."""
    example = runpy.run_path(str(ROOT / "examples" / "segmentation.py"))
    methods, sets = example["study"](0, 300)
    metrics = {
        name: {kind: example["measured"](method, *pictures) for kind, pictures in sets.items()}
        for name, method in methods.items()
    }
    entries = [f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in metrics.items()]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    (ROOT / "benchmarks" / "results" / "segmentation.json").write_text(text, encoding="utf-8")
    example["draw"](methods, sets, ROOT / "docs" / "images" / "segmentation.png")


if __name__ == "__main__":
    main()
