"""A likelihood of your own: counts with a Poisson distribution, in one file and registered by one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import molaplace as mola
from molaplace.errors import DataError
from molaplace.likelihoods import LIKELIHOODS, OutputCurvature, RegressionLikelihood, RegressionPredictive
from molaplace.likelihoods.base import matrix_of, pooled
from tests.closeness import assert_close
from tests.library.problems import train


class CountMixture(RegressionPredictive):
    """A mixture of negative binomials: Poisson counts whose rate has a gamma distribution with the given mean and variance."""

    def _parts(self):
        mean = self.means.double()
        excess = (self.variances.double() - mean).clamp_min(1e-9 * mean)
        size = (mean.square() / excess).cpu().numpy()
        shape = (-1, *[1] * (mean.dim() - 2))
        return self.weights.double().cpu().numpy().reshape(shape), stats.nbinom(
            size, size / (size + mean.cpu().numpy())
        )

    def log_density(self, targets):
        weights, counts = self._parts()
        logs = torch.from_numpy(counts.logpmf(targets.cpu().numpy()[:, None])).sum(-1)
        return torch.logsumexp(logs + torch.from_numpy(np.log(weights[..., 0])), 1)

    def cdf(self, values):
        weights, counts = self._parts()
        return torch.from_numpy((weights * counts.cdf(values.cpu().numpy()[:, None])).sum(1))

    def quantile(self, level):
        counts = torch.zeros_like(self.point(), dtype=torch.float64)
        while bool((below := self.cdf(counts) < level).any()):
            counts = counts + below
        return counts

    def crps(self, targets):
        last = int(max(targets.max(), self.quantile(1 - 1e-9).max()))
        counts = range(last + 1)
        steps = [self.cdf(torch.full_like(targets, count)) - (count >= targets).double() for count in counts]
        return torch.stack(steps).square().sum(0)


@dataclass(frozen=True)
class Poisson(RegressionLikelihood):
    name = "poisson"
    mixture_type = CountMixture

    def check_outputs(self, outputs, ran=()):
        return matrix_of(outputs, ran, "log rates of shape (batch, outputs)")

    def check_labels(self, labels, outputs, where):
        counts = labels.to(outputs.device).double().view_as(outputs)
        if bool(((counts < 0) | (counts != counts.round())).any()):
            raise DataError(f"{where}: expected counts.")
        return counts

    def log_likelihood(self, outputs, labels):
        return (labels * outputs - outputs.exp() - (labels + 1).lgamma()).sum(1)

    def curvature(self, outputs, labels=None):
        return OutputCurvature(separate=outputs.exp())

    def predictive(self, members, link, seed=None):
        logs = pooled(members.outputs, members.weights, members.pooling)
        zero = torch.zeros_like(members.outputs[0])
        variances = torch.stack([zero if spread is None else spread.variance() for spread in members.spreads], 1)
        variances = variances * torch.stack(list(members.divisors), 1).square()
        rates = (torch.stack(list(logs), 1) + variances / 2).exp()
        return CountMixture(members.weights, rates, rates + rates.square() * variances.expm1(), rates)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(LIKELIHOODS, "poisson", Poisson)


def problem():
    torch.manual_seed(0)
    inputs = torch.randn(300, 3, dtype=torch.float64)
    counts = torch.poisson((inputs[:, :1] + 0.5).exp())
    networks = []
    for _ in range(2):
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        networks.append(train(network, inputs[:200], counts[:200], 150, 0.02, nn.functional.poisson_nll_loss))
    return networks, inputs, counts


def test_a_registered_likelihood_is_fitted_tuned_called_saved_and_evaluated(tmp_path):
    networks, inputs, counts = problem()
    loader = [(inputs[:200], counts[:200])]
    val = [(inputs[200:250], counts[200:250])]
    new = inputs[250:]
    posterior = mola.fit(networks, loader, val, likelihood="poisson", structure="full", progress=False)
    assert posterior.tuning is not None
    assert torch.isfinite(posterior.log_evidence()).all()
    prediction = posterior.predict(new)
    assert_close(posterior(new), prediction.mean, "float64")
    assert_close(prediction.variance, prediction.aleatoric + prediction.epistemic, "float64")
    assert bool((prediction.aleatoric > 0).all())
    assert bool((prediction.epistemic > 0).all())
    low, high = prediction.interval(0.9)
    inside = (prediction.cdf(high) - prediction.cdf(low - 1)).mean()
    assert 0.88 < float(inside) < 1
    loaded = mola.load(posterior.save(tmp_path / "posterior"), networks)
    assert_close(loaded(new), posterior(new), "float64")
    plain = mola.baselines(posterior, val, progress=False)
    assert list(plain) == ["MAP", "DE", "LLLA"]
    table = mola.evaluate({"MoLA": posterior, **plain}, [(new, counts[250:])], likelihood="poisson")
    metrics = table["MoLA", "test"]
    assert_close(metrics["nll"].value, -float(prediction.log_prob(counts[250:]).mean()), "float64")
    assert 0.8 < metrics["coverage_90"].value <= 1


def test_its_laplace_approximation_is_the_hessian_of_its_log_likelihood():
    networks, inputs, counts = problem()
    network = networks[0]
    posterior = mola.fit(
        network,
        [(inputs[:200], counts[:200])],
        likelihood="poisson",
        structure="full",
        prior_precision=2.0,
        progress=False,
    )
    phi = torch.cat([network[:-1](inputs[:200]), torch.ones(200, 1)], 1).detach()
    start = torch.cat([network[-1].weight, network[-1].bias[:, None]], 1).detach()

    def loss(weights):
        logs = phi @ weights.T
        return -(counts[:200] * logs - logs.exp()).sum() + weights.square().sum()

    hessian = torch.autograd.functional.hessian(loss, start).view(9, 9)
    features = torch.cat([network[:-1](inputs[250:251]), torch.ones(1, 1)], 1).detach()
    variance = float(features @ torch.linalg.inv(hessian) @ features.T)
    mean = float(network(inputs[250:251]).detach())
    assert_close(posterior(inputs[250:251]), torch.tensor([[math.exp(mean + variance / 2)]]), "float64")
