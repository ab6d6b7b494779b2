"""Every closed form of numbers and of yes or no against Monte Carlo with very many samples.

    python benchmarks/closed_forms_against_monte_carlo.py [--samples 1000000] [--quick]

Weights of the last layer are drawn from the posterior of a mixture of three networks, and
everything that a prediction says in closed form is computed again from the draws: for numbers the mean, the parts of the variance, the
distribution function, quantiles, log density and CRPS; for yes or no the probability, by quadrature and by the probit link, and the
parts of the entropy. A draw knows nothing of the formulas: it is a network's outputs with these weights, and noise.

For each it prints the largest error over inputs and outputs, the standard error of Monte Carlo there, and the largest error in
standard errors. What is exact must be within 5 of them; the probit is an approximation, and its error is what it is.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import record
import torch
from torch import Tensor, nn

import mola
from mola.uncertainty import expected_sigmoid

STRUCTURES = ("full", "diag", "kron", "kron-exact", "kron-diag")
WEIGHTS = (0.5, 0.3, 0.2)
INPUTS, OUTPUTS, HIDDEN = 6, 2, 10
CHUNK = 5000
"""Draws at once: what leaves the processor's cache takes several times as long."""

PRECISION = 0.5
LEVELS = (0.05, 0.5, 0.95)
JUDGED = 5.0
"""Standard errors: of some thousand comparisons, one is beyond 5 by chance in a thousand runs."""


@dataclass
class Average:
    """Mean over draws and its standard error, from sums of draws less a first guess: no digits are lost where the mean is large."""

    count: int = 0
    guess: Tensor | None = None
    sums: list[Tensor] = field(default_factory=list)

    def add(self, draws: Tensor) -> None:
        """Take draws (S, ...) in."""
        if self.guess is None:
            self.guess = draws.mean(0)
            self.sums = [torch.zeros_like(self.guess), torch.zeros_like(self.guess)]
        apart = draws - self.guess
        self.count += len(draws)
        self.sums[0] += apart.sum(0)
        self.sums[1] += apart.square().sum(0)

    @property
    def mean(self) -> Tensor:
        assert self.guess is not None
        return self.guess + self.sums[0] / self.count

    @property
    def error(self) -> Tensor:
        """Standard error of the mean."""
        mean = self.sums[0] / self.count
        return ((self.sums[1] / self.count - mean.square()).clamp_min(0) / self.count).sqrt()


Found = tuple[str, Tensor, Tensor, Tensor, bool]
"""Name, closed form, Monte Carlo, its standard error, and whether the closed form is meant to be exact."""


def networks(outputs: int) -> list[nn.Sequential]:
    made = []
    for seed in range(len(WEIGHTS)):
        torch.manual_seed(seed)
        made.append(nn.Sequential(nn.Linear(3, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)).double())
    return made


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, OUTPUTS, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :1] + torch.arange(OUTPUTS)) + 0.3 * noise


def lifted(network: nn.Sequential, x: Tensor) -> Tensor:
    """What the last layer is given (n, P), the constant 1 included."""
    with torch.no_grad():
        return torch.cat([network[:-1](x), torch.ones(len(x), 1, dtype=torch.float64)], 1)


def drawn(posterior: mola.MoLA, x: Tensor, samples: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs (S, n, D) of networks with drawn weights, and which network each is, in portions."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.stack([lifted(network, x) for network in posterior.networks])
    for start in range(0, samples, CHUNK):
        some = posterior.sample(min(CHUNK, samples - start), generator=generator)
        yield torch.einsum("snp,sdp->snd", features[some.component], some.weights), some.component


def numbers(structure: str, heteroscedastic: bool, samples: int) -> Iterator[Found]:
    """What is said of numbers."""
    nets = networks(2 * OUTPUTS if heteroscedastic else OUTPUTS)
    likelihood = mola.Gaussian(heteroscedastic=True) if heteroscedastic else mola.Gaussian(noise=[0.3, 0.7])
    options: dict[str, Any] = {"structure": structure, "likelihood": likelihood, "prior_precision": PRECISION}
    posterior = mola.fit(nets, [data(60, 1)], weights=WEIGHTS, progress=False, **options)
    x, y = data(INPUTS, 2)
    said = posterior.predict(2 * x)
    noises = said.component_noise.sqrt()
    quantiles = [said.quantile(level) for level in LEVELS]
    generator = torch.Generator().manual_seed(11)

    def normals(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    names = ("mean", "variance", "within", "between", "aleatoric", "cdf", "density", "distance", "spread")
    averages = {name: Average() for name in names}
    below = [Average() for _ in LEVELS]
    for outputs, component in drawn(posterior, 2 * x, samples, 3):
        noise = noises[component]
        shaken = noise * normals(outputs.shape)
        draws = outputs + shaken
        centre = said.component_mean[component]
        averages["mean"].add(draws)
        averages["variance"].add((draws - said.mean).square())
        # Around the network's own mean; of that around all; and what is drawn beside the weights.
        averages["within"].add((outputs - centre).square())
        averages["between"].add((centre - said.mean).square())
        averages["aleatoric"].add(shaken.square())
        averages["cdf"].add((draws <= y).double())
        # The noise integrated out: the density of the targets given weights is known.
        averages["density"].add(torch.distributions.Normal(outputs, noise).log_prob(y).sum(2).exp())
        averages["distance"].add((draws - y).abs())
        half = len(draws) // 2
        averages["spread"].add((draws[:half] - draws[half : 2 * half]).abs())
        for one, place in zip(below, quantiles, strict=True):
            one.add((draws <= place).double())
    closed = {name: getattr(said, name) for name in ("mean", "variance", "within", "between", "aleatoric")}
    for name, value in closed.items():
        yield name, value, averages[name].mean, averages[name].error, True
    yield "distribution function", said.cdf(y), averages["cdf"].mean, averages["cdf"].error, True
    for level, place, one in zip(LEVELS, quantiles, below, strict=True):
        # In units of the targets: by the density there, which the derivative of the distribution function gives.
        step = 1e-4
        slope = (said.cdf(place + step) - said.cdf(place - step)) / (2 * step)
        chance = math.sqrt(level * (1 - level) / one.count)
        yield f"quantile {level:g}", place, place + (level - one.mean) / slope, chance / slope, True
    density = averages["density"]
    yield "log density", said.log_prob(y), density.mean.log(), density.error / density.mean, True
    distance, spread = averages["distance"], averages["spread"]
    crps = distance.mean - spread.mean / 2
    yield "CRPS", said.crps(y), crps, (distance.error.square() + spread.error.square() / 4).sqrt(), True


def answers(structure: str, samples: int) -> Iterator[Found]:
    """What is said of yes or no."""
    x, y = data(60, 1)
    posterior = mola.fit(
        networks(OUTPUTS),
        [(x, (y > 0).double())],
        structure=structure,
        likelihood="bernoulli",
        prior_precision=PRECISION,
        weights=WEIGHTS,
        progress=False,
    )
    x = 2 * data(INPUTS, 2)[0]
    said = posterior.predict(x)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    yes, uncertain = (
        torch.einsum("k,knd->nd", weights, one) for one in expected_sigmoid(said.logit_mean, said.logit_variance)
    )
    probability, entropy, logits, squares = Average(), Average(), Average(), Average()
    mean = torch.einsum("k,knd->nd", weights, said.logit_mean)
    variance = torch.einsum("k,knd->nd", weights, said.logit_variance + (said.logit_mean - mean).square())
    for outputs, _ in drawn(posterior, x, samples, 3):
        probs = torch.sigmoid(outputs)
        probability.add(probs)
        softplus = nn.functional.softplus
        entropy.add(probs * softplus(-outputs) + (1 - probs) * softplus(outputs))
        logits.add(outputs)
        squares.add((outputs - mean).square())
    yield "mean of the logits", mean, logits.mean, logits.error, True
    yield "variance of the logits", variance, squares.mean, squares.error, True
    yield "probability, by quadrature", yes, probability.mean, probability.error, True
    yield "mean entropy, by quadrature", uncertain, entropy.mean, entropy.error, True
    whole = probability.mean
    of_mean = torch.special.entr(whole) + torch.special.entr(1 - whole)
    slope = (torch.log1p(-whole) - whole.log()).abs()
    error = (entropy.error.square() + (slope * probability.error).square()).sqrt()
    yield "mutual information", said.mutual_information, of_mean - entropy.mean, error, True
    yield "probability, by the probit link", said.probs, probability.mean, probability.error, False
    mean_field = posterior.with_link("mean-field")(x)
    yield "probability, by the mean-field link", mean_field, probability.mean, probability.error, False


def rows(samples: int, structures: tuple[str, ...] = STRUCTURES) -> Iterator[dict[str, Any]]:
    """One for each likelihood, structure and closed form."""
    kinds: dict[str, Callable[[str], Iterator[Found]]] = {
        "gaussian": lambda structure: numbers(structure, False, samples),
        "gaussian, heteroscedastic": lambda structure: numbers(structure, True, samples),
        "bernoulli": lambda structure: answers(structure, samples),
    }
    for kind, made in kinds.items():
        for structure in structures:
            for name, closed, drawn_values, error, exact in made(structure):
                apart = (closed - drawn_values).abs()
                worst = int(apart.argmax())
                yield {
                    "likelihood": kind,
                    "structure": structure,
                    "quantity": name,
                    "exact": exact,
                    "error": float(apart.max()),
                    "standard_error": float(error.flatten()[worst]),
                    # What does not vary at all is off by rounding.
                    "standard_errors": float((apart / error.clamp_min(1e-13 * (1 + closed.abs()))).max()),
                    "size": float(closed.abs().max()),
                    "compared": closed.numel(),
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="draws of the weights (default 1,000,000)")
    parser.add_argument("--quick", action="store_true", help="100,000 draws; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = 100_000 if options.quick else options.samples
    found = []
    print(f"{'likelihood':26} {'structure':11} {'closed form':36} {'error':>9} {'MC error':>9} {'in MC errors':>13}")
    for row in rows(samples):
        found.append(row)
        print(
            f"{row['likelihood']:26} {row['structure']:11} {row['quantity']:36} {row['error']:9.1e} {row['standard_error']:9.1e} "
            f"{row['standard_errors']:13.2f}{'' if row['exact'] else '  (approximation)'}",
            flush=True,
        )
    if not options.quick:
        document = {"samples": samples, "environment": record.environment("mola-torch"), "rows": found}
        record.write("closed_forms", document)
    return int(any(row["exact"] and not row["standard_errors"] <= JUDGED for row in found))


if __name__ == "__main__":
    sys.exit(main())
