"""Minimise a function with a mixture of small networks as its model, beside a Gaussian process.

    pip install 'molaplace[botorch]'
    python examples/bayesian_optimisation.py --function branin --steps 25

Each step trains the networks a little on all evaluations so far, fits a posterior, and evaluates the function where the expected
improvement is largest. The method "conditioned" trains at every fifth step only, and conditions the posterior on the evaluations in
between. The regret is the difference between the best value found and the minimum. In few dimensions, Gaussian processes usually win.
"""

import argparse
import copy
import time
import warnings

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import molaplace as mola
from molaplace.botorch import PosteriorModel

FUNCTIONS = {"branin": Branin, "hartmann": Hartmann}
INITIAL = {"branin": 6, "hartmann": 12}
NETWORKS = 3
HIDDEN = 50
FIRST_EPOCHS = 600
EPOCHS = 100
RESTARTS = 4
CANDIDATES = 128


class Surrogate:
    """Networks that are trained further whenever there are new evaluations, and the posterior over their last layers."""

    def __init__(self, dimension: int, every: int):
        self.networks = [
            nn.Sequential(
                nn.Linear(dimension, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
            )
            for _ in range(NETWORKS)
        ]
        for network in self.networks:
            network.double()
        self.every = every
        self.model = None
        self.step = 0

    def fit(self, x: Tensor, y: Tensor) -> PosteriorModel:
        """Return the model after training or, between trainings, the model conditioned on the last evaluation."""
        if self.step % self.every:
            self.model = self.model.condition_on_observations(x[-1:], y[-1:])
        else:
            self.model = self._trained(x, y)
        self.step += 1
        return self.model

    def _trained(self, x, y):
        centred = 2 * x - 1
        mean, std = y.mean(), y.std()
        targets = (y - mean) / std
        for network in self.networks:
            train(network, centred, targets, EPOCHS if self.step else FIRST_EPOCHS)
        likelihood = mola.likelihoods.Gaussian(location=float(mean), scale=float(std), noise=0.02 * float(std))
        networks = [nn.Sequential(Centred(), *copy.deepcopy(network)) for network in self.networks]
        posterior = mola.fit(
            networks,
            [(x, y)],
            likelihood=likelihood,
            structure="full",
            rule="evidence",
            distances=False,
            progress=False,
        )
        return PosteriorModel(posterior)


class Centred(nn.Module):
    """A map from the unit cube to [-1, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs on the new scale."""
        return 2 * x - 1


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=1e-5)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.mse_loss(network(x), y).backward()
        optimiser.step()


class GaussianProcess:
    """BoTorch's standard Gaussian process."""

    def fit(self, x: Tensor, y: Tensor) -> SingleTaskGP:
        """Return the Gaussian process after maximising its evidence."""
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model


def minimise(name: str, surrogate, steps: int, seed: int):
    """Return the regret after the initial design and after each step, and the CPU seconds per step of fits and of searches."""
    torch.manual_seed(seed)
    function = FUNCTIONS[name](negate=True).double()
    low, high = function.bounds
    bounds = torch.stack([torch.zeros_like(low), torch.ones_like(high)])
    x = torch.quasirandom.SobolEngine(function.dim, scramble=True, seed=seed).draw(INITIAL[name] + steps).double()
    drawn, x = x[INITIAL[name] :], x[: INITIAL[name]]
    y = function(low + (high - low) * x)[:, None]
    regrets = [function.optimal_value - float(y.max())]
    seconds = [0.0, 0.0]
    for step in range(steps):
        start = time.process_time()
        candidate = drawn[step : step + 1]
        if surrogate is not None:
            model = surrogate.fit(x, y)
            seconds[0] += time.process_time() - start
            start = time.process_time()
            acquisition = qLogExpectedImprovement(model, best_f=y.max())
            candidate, _ = optimize_acqf(
                acquisition, bounds, q=1, num_restarts=RESTARTS, raw_samples=CANDIDATES, options={"maxiter": 50}
            )
        seconds[1] += time.process_time() - start
        x = torch.cat([x, candidate])
        y = torch.cat([y, function(low + (high - low) * candidate)[:, None]])
        regrets.append(function.optimal_value - float(y.max()))
    return regrets, [total / steps for total in seconds]


def surrogate_of(method: str, name: str, seed: int):
    torch.manual_seed(seed)
    dimension = FUNCTIONS[name]().dim
    if method == "random":
        return None
    if method == "Gaussian process":
        return GaussianProcess()
    return Surrogate(dimension, every=5 if "conditioned" in method else 1)


METHODS = ("random", "Gaussian process", "molaplace", "molaplace, conditioned")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", choices=list(FUNCTIONS), default="branin")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of BoTorch and GPyTorch about their own numerics
    torch.set_num_threads(1)
    print(f"{'method':<24}{'first regret':>14}{'last regret':>14}{'fit, s/step':>14}{'search, s/step':>16}")
    for method in METHODS:
        regrets, seconds = minimise(
            options.function, surrogate_of(method, options.function, options.seed), options.steps, options.seed
        )
        print(f"{method:<24}{regrets[0]:>14.4f}{regrets[-1]:>14.4f}{seconds[0]:>14.3f}{seconds[1]:>16.3f}", flush=True)


if __name__ == "__main__":
    main()
