"""Compare closed forms and links with Monte Carlo estimates from many samples.

    python benchmarks/links.py [--quick]
    python benchmarks/links.py --data DIR --networks DIR [--cache DIR] [--network 0]

Without --data and --networks, last-layer weights are drawn from the posterior of a mixture of three small networks. Every
closed-form quantity in a prediction is then estimated from the draws. For regression, the quantities are the mean, the parts of
the variance, the distribution function, quantiles, the log density and the CRPS. For binary labels, they are the probability
(by quadrature and with the links) and the parts of the entropy. Exact quantities must be within 5 standard errors of the Monte
Carlo estimates. Links are approximations, so their errors are reported but not tested. Writes closed_forms.json.

With --data (the data sets) and --networks (ResNet-20s), the benchmark measures the error of each link relative to a Monte Carlo
estimate from 100,000 samples, on the logits of 1000 CIFAR-10 test images and 1000 SVHN images. It also measures how well each
link predicts with a prior precision tuned for that link. Finally, it splits the variance of the logits into a part common to
all classes and a part in the contrasts between classes. Writes links_against_monte_carlo.json.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record
import torch
from suites import open_suite
from torch import Tensor, nn

import molaplace as mola
from molaplace import links, metrics
from molaplace.uncertainty import expected_sigmoid
from molaplace_lab.suite import DataOptions

# --- closed forms -----------------------------------------------------------------------------------------------------

STRUCTURES = ("full", "diag", "kron", "kron-exact", "kron-diag")
WEIGHTS = (0.5, 0.3, 0.2)
PRECISION = 0.5
INPUTS = 6
OUTPUTS = 2
HIDDEN = 10
CHUNK = 5000
"""Number of draws processed at once. Larger chunks would not fit in the processor's cache and would be several times slower."""
LEVELS = (0.05, 0.5, 0.95)
JUDGED = 5.0
"""Largest allowed difference, in standard errors. Each run makes thousands of comparisons, and in about one run in a thousand,
a difference exceeds this limit by chance."""

Found = tuple[str, Tensor, Tensor, Tensor, bool]
"""Name, closed form, Monte Carlo estimate, its standard error, and whether the closed form is exact."""


@dataclass
class Average:
    """Mean over draws, with its standard error.

    A first estimate of the mean is subtracted from the draws to avoid a loss of precision if the mean is large.
    """

    count: int = 0
    guess: Tensor | None = None
    sums: list[Tensor] = field(default_factory=list)

    def add(self, draws: Tensor) -> None:
        """Add S draws, stacked along the first dimension."""
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
        mean = self.sums[0] / self.count
        return ((self.sums[1] / self.count - mean.square()).clamp_min(0) / self.count).sqrt()


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


def drawn(posterior: mola.MoLA, x: Tensor, samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of S draws: the outputs under the drawn weights, of shape (S, n, D), and the network index of each draw."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        features = torch.stack([network[:-1](x) for network in posterior.networks])
    features = torch.cat([features, torch.ones_like(features[..., :1])], -1)
    for start in range(0, samples, CHUNK):
        some = posterior.sample(min(CHUNK, samples - start), generator=generator)
        yield torch.einsum("snp,sdp->snd", features[some.component], some.weights), some.component


def regression(structure: str, heteroscedastic: bool, samples: int) -> Iterator[Found]:
    """Compare all quantities in a regression prediction with their Monte Carlo estimates."""
    gaussian = mola.likelihoods.Gaussian
    likelihood = gaussian(heteroscedastic=True) if heteroscedastic else gaussian(noise=[0.3, 0.7])
    options: dict[str, Any] = {"structure": structure, "likelihood": likelihood, "prior_precision": PRECISION}
    nets = networks(2 * OUTPUTS if heteroscedastic else OUTPUTS)
    posterior = mola.fit(nets, [data(60, 1)], weights=WEIGHTS, progress=False, **options)
    x, y = data(INPUTS, 2)
    prediction = posterior.predict(2 * x)
    noises = prediction.component_noise.sqrt().transpose(0, 1)
    quantiles = [prediction.quantile(level) for level in LEVELS]
    generator = torch.Generator().manual_seed(11)
    names = ("mean", "variance", "within", "between", "aleatoric", "cdf", "density", "distance", "spread")
    averages = {name: Average() for name in names}
    below = [Average() for _ in LEVELS]
    for outputs, component in drawn(posterior, 2 * x, samples):
        noise = noises[component]
        centre = prediction.component_mean.transpose(0, 1)[component]
        shaken = noise * torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
        draws = outputs + shaken
        half = len(outputs) // 2
        quantities = {
            "mean": draws,
            "variance": (draws - prediction.mean).square(),
            "within": (outputs - centre).square(),
            "between": (centre - prediction.mean).square(),
            "aleatoric": shaken.square(),
            "cdf": (draws <= y).double(),
            # Given the weights, the density is known exactly, so the noise is integrated out instead of being drawn.
            "density": torch.distributions.Normal(outputs, noise).log_prob(y).sum(2).exp(),
            "distance": (draws - y).abs(),
            "spread": (draws[:half] - draws[half : 2 * half]).abs(),
        }
        for name, values in quantities.items():
            averages[name].add(values)
        for statistics, quantile in zip(below, quantiles, strict=True):
            statistics.add((draws <= quantile).double())
    for name in ("mean", "variance", "within", "between", "aleatoric"):
        yield name, getattr(prediction, name), averages[name].mean, averages[name].error, True
    yield "distribution function", prediction.cdf(y), averages["cdf"].mean, averages["cdf"].error, True
    for level, quantile, statistics in zip(LEVELS, quantiles, below, strict=True):
        # Divide by the density at the quantile to obtain errors in the units of the targets.
        slope = (prediction.cdf(quantile + 1e-4) - prediction.cdf(quantile - 1e-4)) / 2e-4
        chance = math.sqrt(level * (1 - level) / statistics.count)
        yield f"quantile {level:g}", quantile, quantile + (level - statistics.mean) / slope, chance / slope, True
    density, distance, spread = (averages[name] for name in ("density", "distance", "spread"))
    yield "log density", prediction.log_prob(y), density.mean.log(), density.error / density.mean, True
    error = (distance.error.square() + spread.error.square() / 4).sqrt()
    yield "CRPS", prediction.crps(y), distance.mean - spread.mean / 2, error, True


def labels(structure: str, samples: int) -> Iterator[Found]:
    """Compare all quantities in a prediction of binary labels with their Monte Carlo estimates."""
    x, y = data(60, 1)
    options: dict[str, Any] = {"structure": structure, "likelihood": "bernoulli", "prior_precision": PRECISION}
    posterior = mola.fit(networks(OUTPUTS), [(x, (y > 0).double())], weights=WEIGHTS, progress=False, **options)
    x = 2 * data(INPUTS, 2)[0]
    prediction = posterior.predict(x)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)

    def mixed(values: Tensor) -> Tensor:
        return torch.einsum("k,nkd->nd", weights, values)

    yes, uncertain = (mixed(logits) for logits in expected_sigmoid(prediction.logit_mean, prediction.logit_variance))
    mean = mixed(prediction.logit_mean)
    variance = mixed(prediction.logit_variance + (prediction.logit_mean - mean[:, None]).square())
    probability = Average()
    entropy = Average()
    logits = Average()
    squares = Average()
    softplus = nn.functional.softplus
    for outputs, _ in drawn(posterior, x, samples):
        probs = torch.sigmoid(outputs)
        probability.add(probs)
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
    yield "mutual information", prediction.mutual_information, of_mean - entropy.mean, error, True
    yield "probability, by the probit link", prediction.probs, probability.mean, probability.error, False
    mean_field = posterior.with_link("mean-field")(x)
    yield "probability, by the mean-field link", mean_field, probability.mean, probability.error, False


def closed_forms(samples: int, structures: tuple[str, ...] = STRUCTURES) -> Iterator[dict[str, Any]]:
    """Yield one row for each likelihood, structure and closed form."""
    for likelihood in ("gaussian", "gaussian, heteroscedastic", "bernoulli"):
        for structure in structures:
            discrete = likelihood == "bernoulli"
            comparisons = labels(structure, samples) if discrete else regression(structure, "," in likelihood, samples)
            for name, closed, values, error, exact in comparisons:
                apart = (closed - values).abs()
                yield {
                    "likelihood": likelihood,
                    "structure": structure,
                    "quantity": name,
                    "exact": exact,
                    "error": float(apart.max()),
                    "standard_error": float(error.flatten()[int(apart.argmax())]),
                    # If a quantity is the same in every draw, its standard error is 0 and only rounding errors remain.
                    "standard_errors": float((apart / error.clamp_min(1e-13 * (1 + closed.abs()))).max()),
                    "size": float(closed.abs().max()),
                    "compared": closed.numel(),
                }


# --- links on the logits of a real network ----------------------------------------------------------------------------

REAL_STRUCTURES = ("kron", "kron-exact", "diag", "full")
RULES = {"threshold": "threshold", "validation NLL": "nll"}
LINKS: dict[str, links.Link] = {
    "probit": links.Probit(),
    "probit-centred": links.CentredProbit(),
    "mean-field": links.MeanField(),
    "bridge": links.Bridge(),
    "bridge, normalised": links.Bridge(normalised=True),
    "mc, 100 samples": links.MonteCarlo(100),
}
PLAIN = "softmax of the mean"
POINTS = 1000
JUDGE_SAMPLES = 100_000


@dataclass(frozen=True)
class Experiment:
    """A trained head, its training data, and its evaluation data, all in float64."""

    head: nn.Linear
    train: list[tuple[Tensor, Tensor]]
    validation: list[tuple[Tensor, Tensor]]
    test: Tensor
    test_labels: Tensor
    svhn: Tensor

    def tune(self, posterior: mola.MoLA, rule: str) -> mola.MoLA:
        """Return the posterior with the prior precision that the rule chooses."""
        return posterior.tune(self.validation, rule=rule, progress=False)


def read(folder: Path, weights: Path, cache: Path, network: int) -> Experiment:
    options = DataOptions(folder, normalisation="imagenet", outliers=10_000)
    suite = open_suite("cifar10", weights, options, cache, network + 1, ("train", "validation", "test", "svhn"))
    stored = suite.read(slice(network, network + 1))

    def batches(name: str) -> list[tuple[Tensor, Tensor]]:
        return [(features[:, 0].double(), labels) for features, labels in stored[name]]

    test, svhn = (torch.cat([features for features, _ in batches(name)]) for name in ("test", "svhn"))
    head = stored["train"].heads[0].head.double()
    return Experiment(head, batches("train"), batches("validation"), test, stored["test"].labels, svhn)


def total_variation(first: Tensor, second: Tensor) -> Tensor:
    """Return half the sum of absolute differences, of shape (n,): the largest difference in the probability of any set of classes."""
    return (first - second).abs().sum(1) / 2


def link_errors(experiment: Experiment, structure: str, fitted: mola.MoLA) -> Iterator[dict[str, Any]]:
    """Measure the errors of each link at the prior precisions that the rules choose for the probit link."""
    points = {
        "test": (experiment.test[:POINTS], experiment.test_labels[:POINTS]),
        "svhn": (experiment.svhn[:POINTS], None),
    }
    for rule_name, rule in RULES.items():
        posterior = experiment.tune(fitted, rule)
        for data, (inputs, known) in points.items():
            halves = [
                posterior.with_link(links.MonteCarlo(JUDGE_SAMPLES // 2, seed=seed))(inputs) for seed in (101, 202)
            ]
            truth = (halves[0] + halves[1]) / 2
            probs = {PLAIN: mola.ensemble(experiment.head)(inputs)}
            probs |= {name: posterior.with_link(link)(inputs) for name, link in LINKS.items()}
            for name, values in probs.items():
                distance = total_variation(values, truth)
                row = {
                    "structure": structure,
                    "rule": rule_name,
                    "prior_precision": posterior.prior_precision[0],
                    "data": data,
                    "link": name,
                    "mean_tv": float(distance.mean()),
                    "max_tv": float(distance.max()),
                    "confidence_error": metrics.mean_confidence(values) - metrics.mean_confidence(truth),
                    "same_class": float((values.argmax(1) == truth.argmax(1)).double().mean()),
                    "judge_confidence": metrics.mean_confidence(truth),
                    "judge_error": float(total_variation(*halves).mean()) / 2,
                }
                nll = metrics.negative_log_likelihood
                yield row if known is None else row | {"nll_difference": nll(values, known) - nll(truth, known)}


def scores(experiment: Experiment, structure: str, name: str, posterior: mola.MoLA) -> dict[str, Any]:
    """Measure log loss and ECE on all test images, and how well the confidence separates test images from SVHN images."""
    inside = posterior(experiment.test)
    outside = posterior(experiment.svhn)
    return {
        "structure": structure,
        "link": name,
        "prior_precision": posterior.prior_precision[0] if name in LINKS else None,
        "nll": metrics.negative_log_likelihood(inside, experiment.test_labels),
        "ece": metrics.expected_calibration_error(inside, experiment.test_labels),
        "svhn_auroc": metrics.auroc(-inside.max(1).values, -outside.max(1).values),
    }


def variances(experiment: Experiment, structure: str, posterior: mola.MoLA) -> dict[str, Any]:
    """Measure the median variance of a logit, split into the part common to all classes and the part in the contrasts between them."""
    row: dict[str, Any] = {"structure": structure, "prior_precision": posterior.prior_precision[0]}
    for name, inputs in (("test", experiment.test), ("svhn", experiment.svhn)):
        curvature = posterior.components[0].layer.curvature
        precision = posterior.prior_precision[0]
        phi = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], 1)
        contrast = curvature.variance(curvature.project(phi), precision, centred=True)
        row[f"common_{name}"] = float(
            (curvature.variance(curvature.project(phi), precision) - contrast).mean(1).median()
        )
        row[f"contrast_{name}"] = float(contrast.mean(1).median())
    return row


def on_real_logits(experiment: Experiment) -> dict[str, Any]:
    """Compute all rows of the record."""
    plain = mola.ensemble(experiment.head)
    scaled = mola.calibration.temperature_scaled([experiment.head], experiment.validation)
    rows = []
    spreads = []
    tuned = [scores(experiment, "none", PLAIN, plain), scores(experiment, "none", "temperature scaling", scaled)]
    for structure in REAL_STRUCTURES:
        fitted = mola.fit(experiment.head, experiment.train, structure=structure, progress=False)
        spreads.append(variances(experiment, structure, experiment.tune(fitted, "nll")))
        for name, link in LINKS.items():
            tuned.append(scores(experiment, structure, name, experiment.tune(fitted.with_link(link), "nll")))
        rows += link_errors(experiment, structure, fitted)
    return {"rows": rows, "tuned": tuned, "variances": spreads}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=int, default=1_000_000, help="number of weight samples to draw (default 1,000,000)"
    )
    parser.add_argument("--quick", action="store_true", help="use 20,000 draws; write no file")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--networks", type=Path, help="folder with 00.safetensors, ...")
    parser.add_argument("--cache", type=Path, default=Path("activations"), help="folder of activations")
    parser.add_argument("--network", type=int, default=0, help="index of the pretrained network (default 0)")
    options = parser.parse_args()
    environment = record.environment("molaplace")
    warnings.simplefilter("ignore", mola.errors.MolaWarning)  # warnings about extended grids are expected
    if options.networks is not None:
        results = on_real_logits(read(options.data, options.networks, options.cache, options.network))
        about = {
            "judge_samples": JUDGE_SAMPLES,
            "points": POINTS,
            "network": options.network,
            "environment": environment,
        }
        record.write("links_against_monte_carlo", about | results)
        return 0
    torch.set_num_threads(1)
    samples = 20_000 if options.quick else options.samples
    rows = []
    print(f"{'likelihood':26} {'structure':11} {'closed form':36} {'error':>9} {'MC error':>9} {'in MC errors':>13}")
    for row in closed_forms(samples, ("full", "kron") if options.quick else STRUCTURES):
        rows.append(row)
        numbers = f"{row['error']:9.1e} {row['standard_error']:9.1e} {row['standard_errors']:13.2f}"
        kind = "" if row["exact"] else "  (approximation)"
        print(f"{row['likelihood']:26} {row['structure']:11} {row['quantity']:36} {numbers}{kind}", flush=True)
    if not options.quick:
        record.write("closed_forms", {"samples": samples, "environment": environment, "rows": rows})
    return int(any(row["exact"] and not row["standard_errors"] <= JUDGED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
