"""Measure the regret and CPU time of Bayesian optimisation with molaplace's posteriors, beside a Gaussian process.

    python benchmarks/bayesian_optimisation.py [--seeds 10]

Each run minimises Branin (2 inputs) or Hartmann-6 (6 inputs) as examples/bayesian_optimisation.py does. Runs are stored one by one in
benchmarks/results/bayesian_optimisation.json and not repeated. Needs the extra `botorch`.
"""

import argparse
import importlib.util
import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import record
import torch

ROOT = Path(__file__).resolve().parent.parent
STEPS = {"branin": 20, "hartmann": 40}
NAME = "bayesian_optimisation"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "bayesian_optimisation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean log10 regret after every step with its standard error, and mean seconds, for each function and method."""
    rows = []
    for function, method in dict.fromkeys((run["function"], run["method"]) for run in runs):
        chosen = [run for run in runs if (run["function"], run["method"]) == (function, method)]
        curves = list(zip(*(run["regret"] for run in chosen), strict=True))
        logs = [[math.log10(max(value, 1e-6)) for value in values] for values in curves]
        errors = [statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0 for values in logs]
        last = curves[-1]
        rows.append(
            {
                "function": function,
                "method": method,
                "seeds": len(chosen),
                "log10_regret": [round(statistics.fmean(values), 4) for values in logs],
                "log10_regret_error": [round(error, 4) for error in errors],
                "last_regret": round(statistics.fmean(last), 5),
                "last_regret_error": round(statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else 0.0, 5),
                "median_last_regret": round(statistics.median(last), 5),
                "fit_seconds": round(statistics.fmean(run["seconds"][0] for run in chosen), 4),
                "search_seconds": round(statistics.fmean(run["seconds"][1] for run in chosen), 4),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    example = load_example()
    settings = {"steps": STEPS, "initial": example.INITIAL, "networks": example.NETWORKS}
    runs = record.read(NAME)["runs"] if record.exists(NAME) else []
    for seed in range(options.seeds):
        for function, steps in STEPS.items():
            for method in example.METHODS:
                key = {"function": function, "method": method, "seed": seed}
                if any(key.items() <= run.items() for run in runs):
                    continue
                surrogate = example.surrogate_of(method, function, seed)
                regret, seconds = example.minimise(function, surrogate, steps, seed)
                runs.append(
                    key
                    | {
                        "regret": [round(value, 6) for value in regret],
                        "seconds": [round(value, 4) for value in seconds],
                    }
                )
                environment = record.environment("botorch", "gpytorch")
                document = {"environment": environment, "settings": settings, "summary": summary(runs), "runs": runs}
                record.write(NAME, document)
                print(function, method, seed, f"{regret[-1]:.5f}", seconds, flush=True)


if __name__ == "__main__":
    main()
