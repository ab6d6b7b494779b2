"""Measure the regret and CPU time of Bayesian optimisation with molaplace's posteriors, beside a Gaussian process.

    python benchmarks/bayesian_optimisation.py [--seeds 10]

Each run minimises Branin (2 inputs) or Hartmann-6 (6 inputs) with the networks of examples/bayesian_optimisation.py. The regret is the
difference between the best value found and the minimum. "conditioned" trains at every fifth step only. Runs are stored one by one in
benchmarks/results/bayesian_optimisation.json and not repeated. Needs the extra `examples`.
"""

import argparse
import importlib.util
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import record
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = {"branin": Branin, "hartmann": Hartmann}
INITIAL = {"branin": 6, "hartmann": 12}
STEPS = {"branin": 20, "hartmann": 40}
METHODS = ("random", "Gaussian process", "molaplace", "molaplace, conditioned")
NAME = "bayesian_optimisation"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "bayesian_optimisation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class GaussianProcess:
    """BoTorch's standard Gaussian process."""

    def fit(self, x, y):
        """Return the Gaussian process after maximising its evidence."""
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model


def minimise(example, name, method, steps, seed):
    """Return the regret after the initial design and after each step, and the CPU seconds per step of fits and of searches."""
    function = FUNCTIONS[name](negate=True).double()
    torch.manual_seed(seed)
    surrogate = None
    if method == "Gaussian process":
        surrogate = GaussianProcess()
    elif method != "random":
        surrogate = example.Surrogate(function.dim, every=5 if "conditioned" in method else 1)
    torch.manual_seed(seed)
    low, high = function.bounds
    points = torch.quasirandom.SobolEngine(function.dim, scramble=True, seed=seed).draw(INITIAL[name] + steps).double()
    x = points[: INITIAL[name]]
    y = function(low + (high - low) * x)[:, None]
    regrets = [function.optimal_value - float(y.max())]
    seconds = [0.0, 0.0]
    for step in range(steps):
        point = points[INITIAL[name] + step :][:1]
        if surrogate is not None:
            start = time.process_time()
            model = surrogate.fit(x, y)
            fitted = time.process_time()
            point = example.next_point(model, y.max(), function.dim)
            seconds = [seconds[0] + fitted - start, seconds[1] + time.process_time() - fitted]
        x = torch.cat([x, point])
        y = torch.cat([y, function(low + (high - low) * point)[:, None]])
        regrets.append(function.optimal_value - float(y.max()))
    return regrets, [total / steps for total in seconds]


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
    settings = {"steps": STEPS, "initial": INITIAL, "networks": 3}
    runs = record.read(NAME)["runs"] if record.exists(NAME) else []
    for seed in range(options.seeds):
        for function, steps in STEPS.items():
            for method in METHODS:
                key = {"function": function, "method": method, "seed": seed}
                if any(key.items() <= run.items() for run in runs):
                    continue
                regret, seconds = minimise(example, function, method, steps, seed)
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
