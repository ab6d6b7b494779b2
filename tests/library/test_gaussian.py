"""Regression: every structure against the dense Hessian, the mixture against draws, noise, units, rules and refusals."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola import normal_mixtures
from mola.errors import DataError, HeadError, OptionError, StorageError
from mola.schema import sealed
from mola.training import Recipe, train_mlps
from mola.training.labelled import Labelled
from tests.conftest import STRUCTURES
from tests.reference import gaussian as dense

NAMES = tuple(STRUCTURES)


def network(outputs=1, seed=0, inputs=3, hidden=6):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def data(outputs=1, count=60, seed=1, inputs=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :1] + torch.arange(outputs)) + 0.3 * torch.randn(count, outputs, generator=generator).double()
    return x, y


def lifted(net, x):
    hidden = net[1](net[0](x))
    return torch.cat([hidden, torch.ones(len(x), 1, dtype=torch.float64)], 1).detach()


def weights_of(net):
    return torch.cat([net[2].weight, net[2].bias[:, None]], 1).detach()


def fitted(outputs=1, members=1, structure="kron-exact", likelihood="gaussian", **options):
    nets = [network(outputs, seed) for seed in range(members)]
    x, y = data(outputs)
    return mola.fit(nets, [(x, y)], structure=structure, likelihood=likelihood, progress=False, **options), nets, x, y


# --- structures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("structure", NAMES)
def test_posterior_and_evidence_are_those_of_the_dense_hessian(structure, outputs):
    noise = torch.linspace(0.3, 0.7, outputs, dtype=torch.float64)
    likelihood = mola.Gaussian(noise=noise.tolist())
    posterior, nets, x, y = fitted(outputs, structure=structure, likelihood=likelihood, prior_precision=0.37)
    weights, phi = weights_of(nets[0]), lifted(nets[0], x)
    precision = dense.precision(structure, weights, phi, y, noise, 0.37)
    new = data(outputs, 7, seed=5)[0]
    expected = dense.variances(precision, lifted(nets[0], new), outputs)
    found = posterior.predict(new)
    assert torch.allclose(found.within, expected, rtol=1e-10, atol=1e-12)
    assert torch.allclose(found.aleatoric, noise.square().expand(7, -1), rtol=1e-12)
    evidence = dense.log_evidence(precision, weights, phi, y, noise, 0.37)
    assert posterior.log_evidence().item() == pytest.approx(evidence.item(), abs=1e-8)


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "kron-exact"])
def test_networks_that_say_their_variance_have_its_inverse_as_curvature(structure):
    net = network(2)
    x, y = data()
    posterior = mola.fit(
        net,
        [(x, y)],
        structure=structure,
        likelihood=mola.Gaussian(heteroscedastic=True),
        prior_precision=0.5,
        progress=False,
    )
    phi, weights = lifted(net, x), weights_of(net)[:1]
    told = (net(x)[:, 1:] / 2).exp().detach()
    precision = dense.precision(structure, weights, phi, y, told, 0.5)
    found = posterior.predict(x[:5])
    assert torch.allclose(found.within, dense.variances(precision, phi[:5], 1), rtol=1e-10)
    assert torch.allclose(found.aleatoric, told[:5].square(), rtol=1e-12)
    assert torch.allclose(found.mean, net(x[:5])[:, :1].detach())
    evidence = dense.log_evidence(precision, weights, phi, y, told, 0.5)
    assert posterior.log_evidence().item() == pytest.approx(evidence.item(), abs=1e-8)


def test_order_and_form_of_the_variance_are_read_as_they_are_said():
    stacked = torch.tensor([[1.0, 2.0, 0.5, -0.3]], dtype=torch.float64)
    woven = stacked[:, [0, 2, 1, 3]]
    plain = mola.Gaussian(heteroscedastic=True)
    other = mola.Gaussian(heteroscedastic=True, order="interleaved")
    assert torch.equal(plain.means(stacked), other.means(woven))
    assert torch.equal(plain.noise_variance(stacked), other.noise_variance(woven))
    deviation = mola.Gaussian(heteroscedastic=True, variance="log-deviation")
    assert torch.allclose(deviation.noise_variance(stacked), plain.noise_variance(stacked).square())
    soft = mola.Gaussian(heteroscedastic=True, variance="softplus")
    assert torch.allclose(soft.noise_variance(stacked), nn.functional.softplus(stacked[:, 2:]))
    target, mean, variance = torch.tensor([[0.4, 2.5]]).double(), stacked[:, :2], stacked[:, 2:].exp()
    loss = nn.GaussianNLLLoss(full=True, reduction="sum")(mean, target, variance)
    assert -plain.log_likelihood(stacked, target).item() == pytest.approx(loss.item())


@pytest.mark.parametrize("structure", ["full", "kron-exact"])
def test_evidence_at_the_most_probable_weights_is_the_density_of_all_targets(structure):
    net, noise, prior = network(2), torch.tensor([0.4, 0.9], dtype=torch.float64), 0.8
    x, y = data(2)
    phi = lifted(net, x)
    best = dense.ridge_weights(phi, y, noise, prior)
    with torch.no_grad():
        net[2].weight.copy_(best[:, :-1])
        net[2].bias.copy_(best[:, -1])
    likelihood = mola.Gaussian(noise=noise.tolist())
    posterior = mola.fit(
        net, [(x, y)], structure=structure, likelihood=likelihood, prior_precision=prior, progress=False
    )
    exact = dense.exact_log_evidence(phi, y, noise, prior)
    assert posterior.log_evidence().item() == pytest.approx(exact.item(), abs=1e-8)


@pytest.mark.parametrize("structure", NAMES)
def test_another_noise_after_the_fit_is_the_same_as_before_it(structure):
    later = fitted(2, structure=structure)[0].with_noise([0.2, 1.4])
    before = fitted(2, structure=structure, likelihood=mola.Gaussian(noise=[0.2, 1.4]))[0]
    x = data(2, 9, seed=3)[0]
    assert torch.allclose(later.predict(x).variance, before.predict(x).variance, rtol=1e-12)
    assert torch.allclose(later.log_evidence(), before.log_evidence(), rtol=1e-12)
    spectrum = before.components[0].curvature.spectrum
    once, twice = before.components[0].rescaled(1.7), before.with_noise([0.2 * 1.7, 1.4 * 1.7]).components[0]
    assert spectrum is not once.curvature.spectrum
    assert torch.allclose(
        once.curvature.spectrum.posterior(0.3).variance(lifted(before.networks[0], x)),
        twice.curvature.spectrum.posterior(0.3).variance(lifted(before.networks[0], x)),
        rtol=1e-10,
    )


# --- noise and units ----------------------------------------------------------------------------------------------------


def test_estimated_noise_is_that_of_the_residuals_however_the_data_are_batched():
    posterior, nets, x, y = fitted(2)
    expected = (nets[0](x) - y).square().mean(0).sqrt().detach()
    assert torch.allclose(posterior.noise[0], expected, rtol=1e-12)
    batches = [(x[start : start + 7], y[start : start + 7]) for start in range(0, len(x), 7)]
    again = mola.fit(nets, batches[::-1], structure="kron-exact", likelihood="gaussian", progress=False)
    assert torch.allclose(again.noise, posterior.noise, rtol=1e-12)
    shared = mola.fit(nets, batches, likelihood=mola.Gaussian(shared=True), progress=False)
    assert torch.allclose(shared.noise[0], expected.square().mean().sqrt().expand(2), rtol=1e-12)


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_predictions_come_back_in_the_units_of_the_targets():
    plain, nets, x, y = fitted(2, 2, prior_precision=0.5)
    location, scale = torch.tensor([3.0, -40.0]).double(), torch.tensor([10.0, 0.2]).double()
    in_units = location + scale * y
    likelihood = mola.Gaussian(location=location.tolist(), scale=scale.tolist())
    posterior = mola.fit(
        nets, [(x, in_units)], structure="kron-exact", likelihood=likelihood, prior_precision=0.5, progress=False
    )
    one, other = plain.predict(x), posterior.predict(x)
    assert torch.allclose(other.mean, location + scale * one.mean)
    assert torch.allclose(other.epistemic, scale.square() * one.epistemic)
    assert torch.allclose(posterior.noise, scale * plain.noise)
    assert torch.allclose(other.log_prob(in_units), one.log_prob(y) - scale.log().sum())
    assert torch.allclose(posterior.log_evidence(), plain.log_evidence() - len(x) * scale.log().sum())
    held = data(2, 40, seed=8)
    tuned = plain.tune([held], progress=False)
    same = posterior.tune([(held[0], location + scale * held[1])], progress=False)
    assert same.prior_precision == pytest.approx(tuned.prior_precision)
    assert torch.allclose(same.noise, scale * tuned.noise, rtol=1e-6)


# --- what a prediction says ---------------------------------------------------------------------------------------------


def mixture(members=3, count=40, outputs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(members, count, outputs, generator=generator).double() * 2
    variances = torch.exp(torch.randn(members, count, outputs, generator=generator).double())
    weights = torch.softmax(torch.randn(members, generator=generator), 0).double()
    return weights, means, variances


def test_density_distribution_and_moments_are_those_of_the_mixture():
    weights, means, variances = mixture()
    reference = dense.mixture(weights, means, variances)
    noise = 0.3 * variances
    said = mola.RegressionPrediction(means, variances, noise, weights, torch.zeros(40), "variance")
    assert torch.allclose(said.mean, reference.mean)
    assert torch.allclose(said.variance, reference.variance)
    assert torch.allclose(said.aleatoric + said.within + said.between, said.variance)
    values = torch.linspace(-3, 3, 80).double().view(40, 2)
    assert torch.allclose(said.cdf(values), reference.cdf(values))
    assert torch.allclose(normal_mixtures.log_density(weights, means, variances, values), reference.log_prob(values))
    joint = torch.stack(
        [torch.distributions.Normal(m, v.sqrt()).log_prob(values).sum(1) for m, v in zip(means, variances, strict=True)]
    )
    assert torch.allclose(said.log_prob(values), torch.logsumexp(joint + weights.log()[:, None], 0))


@pytest.mark.parametrize("level", [1e-9, 0.05, 0.37, 0.5, 0.9, 1 - 1e-6])
def test_quantiles_invert_the_distribution_function(level):
    weights, means, variances = mixture(count=500, seed=3)
    means = means * torch.logspace(-2, 3, 500).double()[:, None]
    found = normal_mixtures.quantile(weights, means, variances, level)
    assert float((normal_mixtures.cdf(weights, means, variances, found) - level).abs().max()) < 1e-10


def test_crps_is_its_integral():
    weights, means, variances = mixture(count=5)
    targets = torch.linspace(-2, 2, 10).double().view(5, 2)
    grid = torch.linspace(-40, 40, 200_001).double()
    for row in range(5):
        for output in range(2):
            below = normal_mixtures.cdf(weights, means[:, row, output, None], variances[:, row, output, None], grid)
            gaps = (below - (grid >= targets[row, output]).double()).square()
            expected = torch.trapezoid(gaps, grid)
            found = normal_mixtures.crps(weights, means, variances, targets)[row, output]
            assert float(found) == pytest.approx(float(expected), abs=2e-4)


def test_draws_of_weights_and_noise_have_the_mixtures_moments_and_intervals():
    posterior, nets, x, _ = fitted(2, 3, structure="full", prior_precision=0.5)
    new = x[:4]
    said = posterior.predict(new)
    generator = torch.Generator().manual_seed(0)
    draws = posterior.sample(60_000, generator=generator)
    features = torch.stack([lifted(net, new) for net in nets])
    chosen = draws.component
    outputs = torch.einsum("snp,scp->snc", features[chosen], draws.weights)
    outputs += posterior.noise[chosen][:, None] * torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    error = (said.variance / len(outputs)).sqrt()
    assert bool(((outputs.mean(0) - said.mean).abs() < 5 * error).all())
    assert torch.allclose(outputs.var(0), said.variance, rtol=0.04)
    lower, upper = said.interval(0.9)
    inside = ((outputs >= lower) & (outputs <= upper)).double().mean(0)
    assert float((inside - 0.9).abs().max()) < 0.01  # 60,000 draws: a standard error of 0.0012


def test_equal_components_are_one_component():
    one, nets, x, y = fitted(2, prior_precision=0.5)
    three = mola.fit(
        nets * 3, [(x, y)], structure="kron-exact", likelihood="gaussian", prior_precision=0.5, progress=False
    )
    a, b = one.predict(x), three.predict(x)
    assert torch.allclose(a.variance, b.variance)
    assert float(b.between.abs().max()) < 1e-20
    assert torch.allclose(a.quantile(0.1), b.quantile(0.1))


def test_predictions_of_batches_join_and_are_values():
    posterior, _, x, y = fitted(2, 2)
    whole = posterior.predict(x)
    parts = posterior.predict([x[:13], x[13:]])
    for name in ("mean", "variance", "within", "ood_score", "distance", "component_variance"):
        assert torch.allclose(getattr(whole, name), getattr(parts, name)), name
    assert torch.allclose(whole.log_prob(y), parts.log_prob(y))
    with pytest.raises(AttributeError, match="RegressionPrediction cannot be changed"):
        whole.mean = None
    assert torch.allclose(posterior(x), whole.mean)
    single = fitted(1)[0].predict(x)
    assert single.mean.shape == (60, 1)


# --- rules --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """In float32: networks that fit a curve with a gap in the middle, and their data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(80, 1, generator=generator) - 2, torch.rand(80, 1, generator=generator) + 1])
    x = x[torch.randperm(160, generator=generator)]
    y = torch.sin(2 * x) + 0.1 * torch.randn(160, 1, generator=generator)
    recipe = Recipe(epochs=150, batch_size=32, learning_rate=1e-2, weight_decay=1e-5, optimiser="adam")
    nets = train_mlps(1, (30,), 1, Labelled(x[:120], y[:120]), recipe, members=3, seed=0, loss="squared-error")
    return nets, [(x[:120], y[:120])], [(x[120:], y[120:])]


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
@pytest.mark.parametrize("structure", NAMES)
def test_no_prior_precision_and_noise_do_better_on_validation_data(trained, structure):
    nets, train, held = trained
    posterior = mola.fit(nets, train, held, structure, likelihood="gaussian", progress=False)
    assert posterior.tuning.noise_factors
    x, y = held[0]

    def loss(one):
        return float(-one.predict(x).log_prob(y).double().mean())

    best = loss(posterior)
    for precision in (1e-4, 1e-2, 1.0, 1e2):
        for factor in (0.8, 0.95, 1.0, 1.05, 1.3):
            other = posterior.with_prior_precision(precision).with_noise(posterior.noise * factor)
            assert best <= loss(other) + 2e-3


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_noise_that_was_given_stays(trained):
    nets, train, held = trained
    for rule in ("nll", "crps", "distance"):
        posterior = mola.fit(nets, train, held, likelihood=mola.Gaussian(noise=0.25), rule=rule, progress=False)
        assert torch.equal(posterior.noise, torch.full((3, 1), 0.25, dtype=torch.float64))
    assert (
        float(mola.fit(nets, train, likelihood=mola.Gaussian(noise=0.25), rule="evidence", progress=False).noise[0])
        == 0.25
    )


@pytest.mark.parametrize("shared", [True, False])
def test_evidence_chooses_a_maximum_in_prior_precision_and_noise(trained, shared):
    nets, train, _ = trained
    posterior = mola.fit(nets, train, structure="kron-exact", likelihood="gaussian", progress=False)
    tuned = posterior.tune(rule=mola.Evidence(shared=shared), progress=False)
    best = tuned.log_evidence()
    for precision in (0.97, 1.03):
        for factor in (0.99, 1.01):
            moved = tuned.with_prior_precision([one * precision for one in tuned.prior_precision])
            other = moved.with_noise(tuned.noise * factor).log_evidence()
            assert float(other.sum()) < float(best.sum())
            if not shared:
                assert bool((other < best).all())


def test_distance_keeps_to_its_price_and_makes_the_gap_and_the_outside_uncertain(trained):
    nets, train, held = trained
    plain = mola.fit(nets, train, held, likelihood="gaussian", progress=False)
    careful = mola.fit(nets, train, held, likelihood="gaussian", rule="distance", progress=False)
    x, y = held[0]
    cost = float((plain.predict(x).log_prob(y) - careful.predict(x).log_prob(y)).double().mean())
    assert careful.distance_exponent > 0
    assert -1e-3 < cost <= 0.01 + 1e-5
    gap, outside, inside = (torch.tensor([[place]], dtype=torch.float32) for place in (0.0, 4.0, -1.5))
    for place in (gap, outside):
        assert float(careful.predict(place).std / careful.predict(inside).std) > 2
        assert float(careful.predict(place).std) >= float(plain.predict(place).std)
    assert torch.allclose(careful.predict(gap).aleatoric, plain.predict(gap).aleatoric)
    assert float(careful.predict(gap).ood_score) > float(careful.predict(inside).ood_score)


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
@pytest.mark.parametrize("structure", NAMES)
@pytest.mark.parametrize("rule", ["nll", "distance"])
def test_far_away_the_standard_deviation_grows_without_bound(trained, structure, rule):
    nets, train, held = trained
    posterior = mola.fit(nets, train, held, structure, likelihood="gaussian", rule=rule, progress=False)
    for side in (-1.0, 1.0):
        stds = [
            float(posterior.predict(torch.tensor([[side * far]], dtype=torch.float32)).std) for far in (1e2, 1e4, 1e6)
        ]
        assert stds[1] > 10 * stds[0]
        assert stds[2] > 10 * stds[1]


def test_stacking_favours_the_network_that_predicts(trained):
    nets, train, held = trained
    spoilt = [nets[0], network(1, inputs=1).float()]
    posterior = mola.fit(spoilt, train, likelihood="gaussian", progress=False)
    weights = posterior.reweight(held, progress=False).weights
    assert float(weights[0]) > 0.9


# --- files --------------------------------------------------------------------------------------------------------------


def test_a_saved_posterior_says_the_same(tmp_path, trained):
    nets, train, held = trained
    likelihood = mola.Gaussian(location=5.0, scale=2.0)
    moved = [[(x, 5 + 2 * y) for x, y in part] for part in (train, held)]
    posterior = mola.fit(nets, *moved, likelihood=likelihood, rule="distance", progress=False)
    posterior.save(tmp_path / "posterior")
    again = mola.load(tmp_path / "posterior", nets)
    x, y = moved[1][0]
    assert isinstance(again, mola.RegressionMoLA)
    assert torch.equal(again.noise, posterior.noise)
    assert len({tuple(row.tolist()) for row in again.noise}) == 3
    assert torch.equal(again.predict(x).variance, posterior.predict(x).variance)
    assert torch.allclose(again.log_evidence(), posterior.log_evidence(), rtol=1e-12)
    assert again.tuning.noise_factors == posterior.tuning.noise_factors
    retuned = again.tune(moved[1], progress=False)
    assert torch.allclose(
        retuned.predict(x).log_prob(y).mean(), posterior.tune(moved[1], progress=False).predict(x).log_prob(y).mean()
    )


def test_an_interrupted_fit_goes_on_with_its_residuals(tmp_path):
    net = network(2)
    x, y = data(2)
    batches = [(x[start : start + 10], y[start : start + 10]) for start in range(0, 60, 10)]

    class StoppedError(Exception):
        pass

    def until(count):
        yield from batches[:count]
        raise StoppedError

    with pytest.raises(StoppedError):
        mola.fit(
            net,
            until(4),
            structure=mola.Kron(running_average=0.9),
            likelihood="gaussian",
            checkpoint=tmp_path / "sums",
            checkpoint_every=1,
            progress=False,
        )
    with pytest.raises(StoppedError):
        mola.fit(
            net, until(4), likelihood="gaussian", checkpoint=tmp_path / "other", checkpoint_every=1, progress=False
        )
    posterior = mola.fit(
        net, batches, likelihood="gaussian", checkpoint=tmp_path / "other", checkpoint_every=1, progress=False
    )
    whole = mola.fit(net, batches, likelihood="gaussian", progress=False)
    assert torch.allclose(posterior.noise, whole.noise, rtol=1e-12)
    assert torch.allclose(posterior.predict(x).variance, whole.predict(x).variance, rtol=1e-10)
    running = mola.fit(
        net,
        batches,
        structure=mola.Kron(running_average=0.9),
        likelihood="gaussian",
        checkpoint=tmp_path / "sums",
        progress=False,
    )
    assert torch.allclose(running.noise, whole.noise, rtol=1e-12)


# --- baselines ----------------------------------------------------------------------------------------------------------


def test_scaled_noise_is_the_best_for_each_output():
    nets = [network(2, seed) for seed in range(3)]
    held = data(2, 50, seed=4)
    plain = mola.ensemble(nets, likelihood="gaussian")
    scaled = mola.scale_noise(plain, [held])
    best = float(scaled.predict(held[0]).log_prob(held[1]).mean())
    for moved in ([0.9, 1], [1.1, 1], [1, 0.9], [1, 1.1]):
        noise = scaled.noise[0] * torch.tensor(moved).double()
        other = mola.ensemble(nets, likelihood=mola.Gaussian(noise=noise.tolist()))
        # Each output's own density is as good as can be; the joint one, which couples them through the components, nearly.
        said, mine = other.predict(held[0]), scaled.predict(held[0])
        args = [(one.weights, one.component_mean, one.component_variance) for one in (said, mine)]
        worse, better = (normal_mixtures.log_density(*one, held[1]).mean(0) for one in args)
        assert bool((better >= worse - 1e-12).all())
    assert math.isfinite(best)
    with pytest.raises(OptionError, match="noise is not known"):
        plain.predict(held[0])


def test_swag_and_dropout_predict_numbers():
    torch.manual_seed(0)
    x, y = data(1, 80)
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 1)).double()
    swag = mola.Swag.fit(
        net, [(x, y)], learning_rate=1e-2, epochs=5, rank=2, samples=4, likelihood="gaussian", progress=False
    )
    dropout = mola.McDropout(net, 4, likelihood=mola.Gaussian(noise=0.5))
    for predictor in (mola.scale_noise(swag, [(x, y)]), dropout, mola.scale_noise(dropout, [(x, y)])):
        said = predictor.predict(x)
        assert said.component_mean.shape == (4, 80, 1)
        assert float(said.between.mean()) > 0
        assert torch.allclose(said.variance, said.aleatoric + said.between)
    with pytest.raises(OptionError, match="one learning_rate"):
        mola.Swag.fit(net, [(x, y)], [(x, y)], learning_rate=[1e-2, 1e-3], likelihood="gaussian", progress=False)
    posterior = mola.fit(net, [(x, y)], likelihood="gaussian", progress=False)
    with pytest.raises(OptionError, match=r"posterior\.tune"):
        mola.scale_noise(posterior, [(x, y)])


def outputs_of(kind, noise=None):
    """A network, data with targets of that kind, and the likelihood as it was given."""
    torch.manual_seed(0)
    x, y = data(2, 80)
    net = nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 2)).double()
    if kind == "bernoulli":
        return net, x, (y > 0).double(), mola.Bernoulli()
    return net, x, 7 + 3 * y, mola.Gaussian(noise=noise, location=[7.0, 7.0], scale=3.0)


def as_swag(net, x, y, likelihood):
    return mola.Swag.fit(
        net, [(x, y)], learning_rate=1e-3, epochs=4, rank=2, samples=3, likelihood=likelihood, progress=False
    )


def as_dropout(net, x, y, likelihood):
    return mola.McDropout(net, 3, seed=5, likelihood=likelihood)


BASELINES = {"swag": (as_swag, mola.Swag.load), "dropout": (as_dropout, mola.McDropout.load)}


@pytest.mark.parametrize("kind", ["gaussian", "scaled", "bernoulli"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_saved_baselines_say_the_same_to_the_bit(tmp_path, baseline, kind):
    make, load = BASELINES[baseline]
    net, x, y, likelihood = outputs_of(kind, [0.4, 0.9])
    predictor = make(net, x, y, likelihood)
    if kind == "scaled":
        before = predictor.likelihood
        predictor, plain = mola.scale_noise(predictor, [(x, y)]), predictor
        assert plain.likelihood == before, "the predictor that was given stays as it was"
        assert predictor.likelihood.estimated
    predictor.save(tmp_path / "it")
    again = load(tmp_path / "it", net)
    assert again.likelihood == predictor.likelihood
    assert torch.equal(again(x), predictor(x))
    said, expected = again.predict(x), predictor.predict(x)
    if kind == "bernoulli":
        assert torch.equal(said.probs, expected.probs)
        assert said.probs.shape == (80, 2)
        assert not torch.allclose(said.probs.sum(1), torch.ones(80))  # two answers, and not two classes
        return
    for name in ("component_mean", "component_noise", "variance", "between"):
        assert torch.equal(getattr(said, name), getattr(expected, name)), name
    assert torch.equal(said.log_prob(y), expected.log_prob(y))
    noise = torch.tensor(predictor.likelihood.noise).double()
    assert torch.allclose(said.aleatoric, noise.square().expand(80, 2))
    assert 5 < float(said.mean.mean()) < 9  # in the targets' units


@pytest.mark.parametrize("baseline", BASELINES)
def test_saved_baselines_are_refused_by_another_network(tmp_path, baseline):
    make, load = BASELINES[baseline]
    net, x, y, likelihood = outputs_of("gaussian", 0.4)
    make(net, x, y, likelihood).save(tmp_path / "it")
    layers = list(net)
    wider = nn.Sequential(*layers[:-1], nn.Linear(20, 3)).double()
    with pytest.raises(StorageError, match=r"does not fit Sequential|not the network that was saved"):
        load(tmp_path / "it", wider)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("noise", -1.0),
        ("noise", [0.5, "loud"]),
        ("noise", None),
        ("scale", [0.0]),
        ("location", ["here"]),
        ("heteroscedastic", True),
        ("heteroscedastic", 1),
        ("loudness", 3.0),
        (None, []),
        (None, "gaussian"),
    ],
)
@pytest.mark.parametrize("baseline", BASELINES)
def test_settings_that_nobody_would_save_are_refused(tmp_path, baseline, entry, value):
    make, load = BASELINES[baseline]
    net, x, y, likelihood = outputs_of("gaussian", 0.4)
    make(net, x, y, likelihood).save(tmp_path / "it")
    (path,) = (tmp_path / "it").glob("*.json")
    document = json.loads(path.read_text())
    del document["sha256"]
    if entry is None:
        document["likelihood_settings"] = value
    else:
        document["likelihood_settings"][entry] = value
    path.write_text(json.dumps(sealed(document)))
    if (entry, value) == ("noise", None):  # as if it had never been known: said when it is needed
        with pytest.raises(OptionError, match="noise is not known"):
            load(tmp_path / "it", net).predict(x)
        return
    with pytest.raises(StorageError):
        load(tmp_path / "it", net)
    document["likelihood"] = "poisson"
    path.write_text(json.dumps(sealed(document)))
    with pytest.raises(StorageError, match=r"likelihood"):
        load(tmp_path / "it", net)


def test_several_swags_of_numbers_are_saved(tmp_path):
    nets = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double() for _ in range(2)]
    x, y = data(2, 80)
    likelihood = mola.Gaussian(noise=[0.5, 0.7])
    made = mola.multi_swag(
        nets, [(x, y)], learning_rate=1e-3, epochs=3, rank=2, samples=2, likelihood=likelihood, progress=False
    )
    made.save(tmp_path)
    again = mola.MultiSwag.load(tmp_path, nets)
    said, expected = again.predict(x), made.predict(x)
    assert said.component_mean.shape == (4, 80, 2)
    assert torch.equal(said.variance, expected.variance)
    assert torch.equal(said.log_prob(y), expected.log_prob(y))


def test_a_mixture_of_posteriors_has_all_their_components():
    first, _, x, y = fitted(2, 2)
    second = fitted(2, 1, structure="diag")[0]
    both = mola.Mixture([first, second], [0.3, 0.7]).predict(x)
    assert both.component_mean.shape[0] == 3
    one, other = first.predict(x), second.predict(x)
    expected = torch.logaddexp(one.log_prob(y) + math.log(0.3), other.log_prob(y) + math.log(0.7))
    assert torch.allclose(both.log_prob(y), expected)


def test_a_mixture_of_means_and_distributions_is_refused():
    first, networks, x, _ = fitted(2, 2)
    with pytest.raises(OptionError, match=r"predictors\[1\] gives means alone and predictors\[0\] distributions"):
        mola.Mixture([first, networks[0]]).predict(x)


def test_a_temperature_for_numbers_names_what_scales_their_noise():
    _, networks, x, y = fitted(2, 2)
    with pytest.raises(OptionError, match=r"use mola.scale_noise"):
        mola.temperature_scaled(mola.ensemble(networks, likelihood="gaussian"), [(x, y)])


def test_noise_that_a_rule_scales_stays_within_its_range():
    for likelihood in (mola.Gaussian(noise=[0.5, 0.7]), mola.Gaussian(noise=0.5, location=3.0, scale=20.0)):
        for factor in (1e-30, 1e30):
            scaled = likelihood.scaled(factor, 2)
            assert all(1e-12 <= one <= 1e12 for one in scaled.noise)
    assert mola.Gaussian(noise=0.5).scaled(2.0, 1).noise == (1.0,)


# --- wrong use ----------------------------------------------------------------------------------------------------------


def broken(change):
    x, y = data(2)
    return [(x, change(y))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: torch.where(torch.arange(60)[:, None] == 3, math.nan, y), "targets must be finite"),
        (lambda y: y[:, :1], r"expected targets of shape \(60, 2\)"),
        (lambda y: y[:, 0], "as many targets"),
        (lambda y: y[:40], "expected targets of shape"),
        (lambda y: torch.zeros(60, dtype=torch.int64), "likelihood='categorical'"),
        (lambda y: torch.stack([y[:, 0], torch.full((60,), 3.0).double()], 1), "target 1 is the same, 3"),
    ],
)
def test_wrong_targets_are_named(change, words):
    with pytest.raises(DataError, match=words):
        mola.fit(network(2), broken(change), likelihood="gaussian", progress=False)


def test_whole_numbers_are_numbers():
    x, _ = data()
    posterior = mola.fit(network(), [(x, torch.arange(60) % 3)], likelihood="gaussian", progress=False)
    assert posterior.predict(x).mean.shape == (60, 1)


def test_what_means_nothing_for_numbers_is_refused():
    posterior, nets, x, y = fitted(2)
    held = [data(2, 30, seed=7)]
    for rule in ("threshold", "brier", "ece"):
        with pytest.raises(OptionError, match=f"rule '{rule}' means nothing"):
            posterior.tune(held, rule=rule, progress=False)
    for rule in (mola.ConfidenceThreshold(), mola.ValidationScore("brier"), mola.OutlierExposure(held)):
        with pytest.raises(OptionError, match="means nothing for likelihood 'gaussian'"):
            posterior.tune(held, rule=rule, progress=False)
    with pytest.raises(OptionError, match="nats"):
        posterior.tune(held, rule=mola.Distance(price="loss"), progress=False)
    with pytest.raises(OptionError, match="mc"):
        mola.fit(nets, [(x, y)], likelihood="gaussian", link="mc", progress=False)
    with pytest.raises(OptionError, match="grows without bound"):
        posterior.confidence_bound(x)
    with pytest.raises(OptionError, match="no limit"):
        posterior.far_field_limit(x)
    with pytest.raises(OptionError, match="no probabilities"):
        posterior.predict_proba(np.zeros((1, 3)))
    with pytest.raises(HeadError, match="noise has 3 numbers"):
        mola.fit(nets, [(x, y)], likelihood=mola.Gaussian(noise=[1, 2, 3]), progress=False)
    with pytest.raises(HeadError, match="two outputs for each target"):
        mola.fit(network(3), [(x, y)], likelihood=mola.Gaussian(heteroscedastic=True), progress=False)
    with pytest.raises(OptionError, match="noise is not known"):
        mola.fit(nets, [x], likelihood="gaussian", progress=False)
    for noise in (0.0, -1.0, math.nan, "loud", [1.0, 0.0]):
        with pytest.raises(OptionError, match="noise must be a finite number"):
            mola.Gaussian(noise=noise)
    with pytest.raises(OptionError, match="level must lie"):
        posterior.predict(x).quantile(1.0)
    with pytest.raises(DataError, match="expected targets of shape"):
        posterior.predict(x).log_prob(y[:, 0])


def test_validation_data_that_were_trained_on_or_are_in_other_units_are_noticed():
    posterior, _, x, y = fitted(1)
    with pytest.warns(mola.MolaWarning, match="validation data are the training data"):
        posterior.tune([(x, y)], progress=False)
    held = data(1, 50, seed=9)
    with pytest.warns(mola.MolaWarning, match="no better than a constant"):
        posterior.tune([(held[0], 1000 + 50 * held[1])], progress=False)


# --- export -------------------------------------------------------------------------------------------------------------


@pytest.mark.export
@pytest.mark.parametrize("rule", [pytest.param("nll", marks=pytest.mark.slow), "distance"])
def test_exported_files_say_what_the_posterior_says(tmp_path, trained, rule):
    nets, train, held = trained
    likelihood = mola.Gaussian(location=5.0, scale=2.0)
    moved = [[(x, 5 + 2 * y) for x, y in part] for part in (train, held)]
    posterior = mola.fit(nets, *moved, likelihood=likelihood, rule=rule, progress=False)
    x = held[0][0]
    said = posterior.predict(x)
    export, name = (mola.export_onnx, "one.onnx") if rule == "nll" else (mola.export_torch, "one.pt2")
    export(posterior, tmp_path / name, x[:4])
    found = mola.load_exported(tmp_path / name, trust=True)(x)
    assert set(found) == {"mean", "variance", "epistemic", "aleatoric", "ood_score", "distance"}
    for field, values in found.items():
        assert np.allclose(np.asarray(values), getattr(said, field).numpy(), rtol=2e-4, atol=1e-4), field
    with pytest.raises(OptionError, match="expected some of mean"):
        mola.export_torch(posterior, tmp_path / "no.pt2", x[:4], outputs=["probabilities"])


# --- what a review found ------------------------------------------------------------------------------------------------


def test_heteroscedastic_posterior_is_loaded_again(tmp_path):
    x, y = data()
    nets = [network(2, seed) for seed in range(2)]
    posterior = mola.fit(nets, [(x, y)], likelihood=mola.Gaussian(heteroscedastic=True), progress=False)
    posterior.save(tmp_path / "p")
    again = mola.load(tmp_path / "p", nets)
    assert torch.equal(again.predict(x).variance, posterior.predict(x).variance)
    with torch.no_grad():
        nets[1][2].weight[1, 0] += 1  # of the variance: no mean row has changed
    with pytest.raises(mola.StorageError, match="other layers have changed"):
        mola.load(tmp_path / "p", nets)


def test_noise_of_each_output_may_be_any_kind_of_vector():
    posterior, *_ = fitted(outputs=2, members=2)
    expected = torch.tensor([[0.1, 0.5], [0.1, 0.5]], dtype=torch.float64)
    for given in ([0.1, 0.5], (0.1, 0.5), np.array([0.1, 0.5]), expected[0], expected, expected.numpy()):
        assert torch.equal(posterior.with_noise(given).noise, expected)
    for given in (0.3, torch.tensor(0.3).double(), np.array(0.3), np.float64(0.3), [[0.3], [0.3]]):
        assert torch.equal(posterior.with_noise(given).noise, torch.full((2, 2), 0.3, dtype=torch.float64))


def test_noise_of_other_outputs_and_none_are_refused_at_once():
    posterior, *_ = fitted(outputs=2, members=2)
    with pytest.raises(OptionError, match="expected one number, or 2 of them"):
        posterior.with_noise([0.1, 0.2, 0.3])
    with pytest.raises(OptionError, match="got None"):
        posterior.with_noise(None)


def test_noise_that_is_not_known_is_not_said_to_be_one():
    ensemble = mola.ensemble([network(2)], likelihood="gaussian")
    with pytest.raises(OptionError, match=r"not known.*scale_noise"):
        ensemble.noise  # noqa: B018
    own = mola.ensemble([network(2)], likelihood=mola.Gaussian(heteroscedastic=True))
    assert own.noise.tolist() == [[1.0]]


def test_variances_beyond_float32_stay_finite():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 2)).float() for _ in range(2)]
    x, y = data(2)
    posterior = mola.fit(nets, [(x.float(), y.float())], likelihood="gaussian", progress=False)
    far = 1e25 * x[:4].float()
    said = posterior.predict(far)
    twins = [copy.deepcopy(net).double() for net in nets]
    exact = mola.fit(twins, [(x.float().double(), y.float().double())], likelihood="gaussian", progress=False)
    expected = exact.predict(far.double())
    assert said.std.dtype == torch.float32
    for name in ("mean", "std", "variance", "within", "between", "epistemic"):
        torch.testing.assert_close(getattr(said, name).double(), getattr(expected, name), rtol=1e-4, atol=0)
    for one, other in zip(said.interval(0.9), expected.interval(0.9), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e20)
    assert bool(said.log_prob(y[:4]).isfinite().all())
    assert bool(said.crps(y[:4]).isfinite().all())


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_reweighting_by_distance_is_no_worse_than_where_it_began():
    nets = [network(1, 10 + member, hidden=3 + 2 * member) for member in range(3)]
    posterior = mola.fit(nets, [data(seed=1)], likelihood="gaussian", progress=False)
    new, targets = data(seed=101)
    new = 3 * new
    for start in ([0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [1 / 3, 1 / 3, 1 / 3]):
        before = posterior.with_weights(start).with_distance_exponent(4.0)
        after = before.reweight([(new, targets)], progress=False)
        uniform = before.with_weights("uniform")
        score = [float(one.predict(new).log_prob(targets).mean()) for one in (before, uniform, after)]
        assert score[2] >= max(score[:2]) - 1e-9
        again = after.reweight([(new, targets)], progress=False)
        assert float(again.predict(new).log_prob(targets).mean()) >= score[2] - 1e-9


def test_scale_noise_names_targets_that_cannot_be_used():
    ensemble, (x, y) = mola.ensemble([network(2)], likelihood="gaussian"), data(2)
    with pytest.raises(DataError, match=r"batch 1 of the validation loader: targets must be finite"):
        mola.scale_noise(ensemble, [(x, y), (x, y * math.nan)])
    with pytest.raises(
        DataError, match=r"batch 0 of the validation loader: expected targets of shape \(60, 2\), got \(60,\)"
    ):
        mola.scale_noise(ensemble, [(x, y[:, 0])])
    with pytest.raises(DataError, match="exactly"):
        mola.scale_noise(ensemble, [(x, network(2)(x).detach())])
    image = nn.Sequential(nn.Conv2d(3, 2, 1))
    with pytest.raises(OptionError, match="many positions"):
        mola.scale_noise(
            mola.ensemble([image], likelihood="gaussian"), [(torch.randn(2, 3, 4, 4), torch.randn(2, 2, 4, 4))]
        )


def test_targets_of_a_prediction_must_be_real_numbers():
    posterior, _, x, _ = fitted()
    said = posterior.predict(x[:2])
    with pytest.raises(DataError, match="got str"):
        said.log_prob("targets")
    with pytest.raises(DataError, match="real targets"):
        said.log_prob(torch.zeros(2, dtype=torch.complex64))


def test_words_are_about_numbers():
    posterior, *_ = fitted()
    words = repr(posterior.with_temperature(2.0).with_distance_exponent(0.5))
    assert "standard deviations multiplied: by 2 and by distance, with exponent 0.5" in words
    assert "logits" not in words
    x, y = data()
    own = mola.fit(network(2), [(x, y)], likelihood=mola.Gaussian(heteroscedastic=True), progress=False)
    assert "as the networks say, times 1, as they were trained" in repr(own)


@pytest.mark.parametrize(
    ("heteroscedastic", "words"),
    [
        (False, "have 4 outputs, and location has 2 numbers. .* pass heteroscedastic=True"),
        (
            True,
            "have 2 outputs, means and variances of 1 target, and location has 2 numbers. .* leave heteroscedastic out",
        ),
    ],
)
def test_units_for_another_number_of_targets_ask_about_variances(heteroscedastic, words):
    """Whoever forgets that half of the outputs are variances, or says so of means, is told so."""
    network = nn.Linear(3, 2 if heteroscedastic else 4)
    likelihood = mola.Gaussian(location=(20.0, 250.0), scale=(5.0, 60.0), heteroscedastic=heteroscedastic)
    with pytest.raises(mola.HeadError, match=words):
        mola.fit(network, [(torch.randn(8, 3), torch.randn(8, 2))], likelihood=likelihood, progress=False)
