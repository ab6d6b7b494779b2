"""Regression: structures against dense Hessians, the mixture against draws, noise, units, rules and wrong use."""

import copy
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace import normal_mixtures
from molaplace.errors import BoundError, DataError, HeadError, MolaWarning, OptionError
from molaplace.likelihoods import Gaussian
from molaplace.sums import Sums
from tests.closeness import assert_close
from tests.library.problems import train
from tests.reference import gaussian as dense


def network(outputs=1, seed=0, inputs=3, hidden=6):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def data(outputs=1, count=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return x, torch.sin(x[:, :1] + torch.arange(outputs)) + 0.3 * torch.randn(count, outputs, generator=generator)


def lifted(net, x):
    return torch.cat([net[1](net[0](x)), torch.ones(len(x), 1)], 1).detach()


def fit(networks, loader, val_loader=None, *, likelihood="gaussian", **options):
    return mola.fit(networks, loader, val_loader, likelihood=likelihood, progress=False, **options)


def fitted(outputs=1, members=1, structure="kron-exact", **options):
    nets = [network(outputs, seed) for seed in range(members)]
    x, y = data(outputs)
    return fit(nets, [(x, y)], structure=structure, **options), nets, x, y


# --- structures -------------------------------------------------------------------------------------------------------


def test_order_and_form_of_the_variance():
    stacked = torch.tensor([[1.0, 2.0, 0.5, -0.3]])
    plain = Gaussian(heteroscedastic=True)
    woven = Gaussian(heteroscedastic=True, order="interleaved")
    assert torch.equal(plain.means(stacked), woven.means(stacked[:, [0, 2, 1, 3]]))
    assert torch.equal(plain.noise_variance(stacked), woven.noise_variance(stacked[:, [0, 2, 1, 3]]))
    deviation = Gaussian(heteroscedastic=True, variance="log-deviation")
    assert torch.allclose(deviation.noise_variance(stacked), plain.noise_variance(stacked).square())
    soft = Gaussian(heteroscedastic=True, variance="softplus")
    assert torch.allclose(soft.noise_variance(stacked), nn.functional.softplus(stacked[:, 2:]))
    target = torch.tensor([[0.4, 2.5]])
    mean = stacked[:, :2]
    variance = stacked[:, 2:].exp()
    loss = nn.GaussianNLLLoss(full=True, reduction="sum")(mean, target, variance)
    assert -plain.log_likelihood(stacked, target).item() == pytest.approx(loss.item())


@pytest.mark.parametrize("structure", ["full", "kron-exact"])
def test_evidence_at_the_most_probable_weights_is_the_density_of_all_targets(structure):
    net = network(2)
    noise = torch.tensor([0.4, 0.9])
    prior = 0.8
    x, y = data(2)
    phi = lifted(net, x)
    best = dense.ridge_weights(phi, y, noise, prior)
    with torch.no_grad():
        net[2].weight.copy_(best[:, :-1])
        net[2].bias.copy_(best[:, -1])
    likelihood = Gaussian(noise=noise.tolist())
    posterior = fit(net, [(x, y)], structure=structure, likelihood=likelihood, prior_precision=prior)
    exact = dense.exact_log_evidence(phi, y, noise, prior)
    assert posterior.log_evidence().item() == pytest.approx(exact.item(), abs=1e-8)


def test_noise_may_be_changed_after_the_fit(structure):
    later = fitted(2, structure=structure, likelihood=Gaussian(noise=[0.4, 2.8]))[0].with_settings(noise_factor=0.5)
    before = fitted(2, structure=structure, likelihood=Gaussian(noise=[0.2, 1.4]))[0]
    assert torch.allclose(later.noise, before.noise, rtol=1e-12)
    x = data(2, 9, seed=3)[0]
    assert torch.allclose(later.predict(x).variance, before.predict(x).variance, rtol=1e-12)
    assert torch.allclose(later.log_evidence(), before.log_evidence(), rtol=1e-12)


# --- noise and units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_the_density_of_all_targets_follows_from_the_sums(heteroscedastic):
    """In the user's units, however the targets were standardised."""
    likelihood = Gaussian(noise=[0.7, 1.9], location=[1.0, -2.0], scale=[3.0, 0.2], heteroscedastic=heteroscedastic)
    outputs = torch.randn(30, 4 if heteroscedastic else 2)
    targets = torch.randn(30, 2)
    sums = Sums(dict(likelihood.label_sums(outputs, targets)), 30)
    assert float(likelihood.log_likelihood(outputs, targets).sum()) == pytest.approx(
        likelihood.total_log_likelihood(sums), rel=1e-12
    )


def test_estimated_noise_is_that_of_the_residuals_however_the_data_are_batched():
    posterior, nets, x, y = fitted(2)
    expected = (nets[0](x) - y).square().mean(0).sqrt().detach()
    assert torch.allclose(posterior.noise[0], expected, rtol=1e-12)
    batches = list(zip(x.split(7), y.split(7), strict=True))
    again = fit(nets, batches[::-1], structure="kron-exact")
    assert torch.allclose(again.noise, posterior.noise, rtol=1e-12)
    shared = fit(nets, batches, likelihood=Gaussian(shared=True))
    assert torch.allclose(shared.noise[0], expected.square().mean().sqrt().expand(2), rtol=1e-12)


def test_predictions_are_in_the_units_of_the_targets():
    plain, nets, x, y = fitted(2, 2, prior_precision=0.5)
    location = torch.tensor([3.0, -40.0])
    scale = torch.tensor([10.0, 0.2])
    in_units = location + scale * y
    likelihood = Gaussian(location=location.tolist(), scale=scale.tolist())
    posterior = fit(nets, [(x, in_units)], structure="kron-exact", likelihood=likelihood, prior_precision=0.5)
    standard = plain.predict(x)
    converted = posterior.predict(x)
    assert torch.allclose(converted.mean, location + scale * standard.mean)
    assert torch.allclose(converted.epistemic, scale.square() * standard.epistemic)
    assert torch.allclose(posterior.noise, scale * plain.noise)
    assert torch.allclose(converted.log_prob(in_units), standard.log_prob(y) - scale.log().sum())
    assert torch.allclose(posterior.log_evidence(), plain.log_evidence() - len(x) * scale.log().sum())
    held = data(2, 40, seed=8)
    with warnings.catch_warnings(action="ignore", category=MolaWarning):
        tuned = plain.tune([held], progress=False)
        same = posterior.tune([(held[0], location + scale * held[1])], progress=False)
    assert same.prior_precision == pytest.approx(tuned.prior_precision)
    assert torch.allclose(same.noise, scale * tuned.noise, rtol=1e-6)


# --- predictions ------------------------------------------------------------------------------------------------------


def mixture(members=3, count=40, outputs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(count, members, outputs, generator=generator) * 2
    variances = torch.exp(torch.randn(count, members, outputs, generator=generator))
    return torch.softmax(torch.randn(members, generator=generator), 0), means, variances


def test_density_distribution_and_moments_are_those_of_the_mixture():
    weights, means, variances = mixture()
    reference = dense.mixture(weights, means.transpose(0, 1), variances.transpose(0, 1))
    fields = {"component_mean": means, "component_variance": variances, "component_noise": 0.3 * variances}
    actual = mola.RegressionPrediction(fields | {"ood_score": torch.zeros(40)}, weights=weights)
    assert torch.allclose(actual.mean, reference.mean)
    assert torch.allclose(actual.variance, reference.variance)
    assert torch.allclose(actual.std, reference.variance.sqrt())
    assert torch.allclose(actual.aleatoric + actual.within + actual.between, actual.variance)
    assert torch.allclose(actual.within + actual.between, actual.epistemic)
    values = torch.linspace(-3, 3, 80).view(40, 2)
    assert torch.allclose(actual.cdf(values), reference.cdf(values))
    assert torch.allclose(normal_mixtures.log_density(weights, means, variances, values), reference.log_prob(values))
    pairs = zip(means.unbind(1), variances.unbind(1), strict=True)
    joint = torch.stack([torch.distributions.Normal(m, v.sqrt()).log_prob(values).sum(1) for m, v in pairs])
    assert torch.allclose(actual.log_prob(values), torch.logsumexp(joint + weights.log()[:, None], 0))


@pytest.mark.parametrize("level", [1e-9, 0.05, 0.37, 0.5, 0.9, 1 - 1e-6])
def test_quantiles_invert_the_distribution_function(level):
    weights, means, variances = mixture(count=500, seed=3)
    means = means * torch.logspace(-2, 3, 500)[:, None, None]
    actual = normal_mixtures.quantile(weights, means, variances, level)
    assert float((normal_mixtures.cdf(weights, means, variances, actual) - level).abs().max()) < 1e-10


def test_crps_is_its_integral():
    weights, means, variances = mixture(count=5)
    targets = torch.linspace(-2, 2, 10).view(5, 2)
    grid = torch.linspace(-40, 40, 200_001)
    actual = normal_mixtures.crps(weights, means, variances, targets)
    for row in range(5):
        for output in range(2):
            moments = means[row, :, output], variances[row, :, output]
            below = normal_mixtures.cdf(weights, *(values[None, :, None] for values in moments), grid[None])[0]
            expected = torch.trapezoid((below - (grid >= targets[row, output]).double()).square(), grid)
            assert float(actual[row, output]) == pytest.approx(float(expected), abs=2e-4)


@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_the_temperature_multiplies_every_standard_deviation(heteroscedastic):
    likelihood = Gaussian(heteroscedastic=heteroscedastic)
    networks = [network(4 if heteroscedastic else 2, seed) for seed in range(2)]
    x, y = data(2)
    posterior = fit(networks, [(x, y)], likelihood=likelihood).with_distance_exponent(1.0)
    plain = posterior.predict(3 * x)
    scaled = posterior.with_temperature(1.7).predict(3 * x)
    for name in ("aleatoric", "within", "component_variance", "component_noise"):
        assert_close(getattr(scaled, name), 1.7**2 * getattr(plain, name), "float64", name=name)
    assert_close(scaled.between, plain.between, "float64")
    assert_close(scaled.epistemic, 1.7**2 * plain.within + plain.between, "float64")


def test_draws_of_weights_and_noise_have_the_moments_and_intervals():
    posterior, nets, x, _ = fitted(2, 3, structure="full", prior_precision=0.5)
    actual = posterior.predict(x[:4])
    generator = torch.Generator().manual_seed(0)
    draws = posterior.sample(60_000, generator=generator)
    features = torch.stack([lifted(net, x[:4]) for net in nets])[draws.component]
    outputs = torch.einsum("snp,scp->snc", features, draws.weights)
    outputs += posterior.noise[draws.component][:, None] * torch.randn(outputs.shape, generator=generator)
    error = (actual.variance / len(outputs)).sqrt()
    assert bool(((outputs.mean(0) - actual.mean).abs() < 5 * error).all())
    assert torch.allclose(outputs.var(0), actual.variance, rtol=0.04)
    lower, upper = actual.interval(0.9)
    inside = ((outputs >= lower) & (outputs <= upper)).double().mean(0)
    assert float((inside - 0.9).abs().max()) < 0.01  # 60,000 draws: a standard error of 0.0012


def test_mixture_of_posteriors_has_all_their_components():
    first, _, x, y = fitted(2, 2)
    second = fitted(2, 1, structure="diag")[0]
    both = mola.Mixture([first, second], [0.3, 0.7]).predict(x)
    assert both.component_mean.shape[1] == 3
    left = first.predict(x)
    right = second.predict(x)
    expected = torch.logaddexp(left.log_prob(y) + math.log(0.3), right.log_prob(y) + math.log(0.7))
    assert torch.allclose(both.log_prob(y), expected)
    torch.testing.assert_close(both.distance, 0.3 * left.distance + 0.7 * right.distance)


def test_ensemble_disagrees_and_needs_a_noise():
    nets = [network(2, seed) for seed in range(3)]
    x = data(2)[0]
    actual = mola.ensemble(nets, likelihood=Gaussian(noise=[0.2, 0.5])).predict(x)
    members = torch.stack([net(x).detach() for net in nets])
    torch.testing.assert_close(actual.mean, members.mean(0))
    torch.testing.assert_close(actual.between, members.var(0, correction=0))
    torch.testing.assert_close(actual.aleatoric, torch.tensor([0.04, 0.25]).expand(60, 2))
    assert actual.ood_score.shape == (60,)
    plain = mola.ensemble(nets, likelihood="gaussian")
    for use in (lambda: plain.predict(x).variance, lambda: plain.noise):
        with pytest.raises(OptionError, match=r"noise is unknown.*scale_noise"):
            use()
    heteroscedastic = mola.ensemble([network(2)], likelihood=Gaussian(heteroscedastic=True))
    assert heteroscedastic.noise.tolist() == [[1.0]]


def test_variances_beyond_float32_stay_finite():
    nets = [nn.Sequential(nn.Linear(3, 2)).float() for _ in range(2)]
    x, y = data(2)
    posterior = fit(nets, [(x.float(), y.float())])
    far = 1e25 * x[:4].float()
    exact = fit([copy.deepcopy(net).double() for net in nets], [(x.float().double(), y.float().double())])
    actual = posterior.predict(far)
    expected = exact.predict(far.double())
    assert actual.std.dtype == torch.float32
    for name in ("mean", "std"):
        assert_close(getattr(actual, name), getattr(expected, name))
    for end, expected_end in zip(actual.interval(0.9), expected.interval(0.9), strict=True):
        assert_close(end, expected_end)
    assert bool(actual.log_prob(y[:4]).isfinite().all())
    assert bool(actual.crps(y[:4]).isfinite().all())


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """Networks in float32 that fit a curve with a gap in the middle, and their data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(80, 1, generator=generator) - 2, torch.rand(80, 1, generator=generator) + 1])
    x = x[torch.randperm(160, generator=generator)].float()
    y = torch.sin(2 * x) + 0.1 * torch.randn(160, 1, generator=generator).float()
    nets = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(3):
            net = network(1, seed, inputs=1, hidden=30).float()
            nets.append(train(net, x[:120], y[:120], 400, 2e-2, nn.functional.mse_loss))
    return nets, [(x[:120], y[:120])], [(x[120:], y[120:])]


pytestmark = pytest.mark.filterwarnings("ignore:the prior precision:molaplace.errors.MolaWarning")


def test_no_prior_precision_and_noise_do_better_on_validation_data(trained, structure):
    nets, train, held = trained
    posterior = fit(nets, train, held, structure=structure, rule="nll")
    assert posterior.settings.noise_factor
    ((x, y),) = held

    def loss(candidate):
        return float(-candidate.predict(x).log_prob(y).double().mean())

    best = loss(posterior)
    for precision in (1e-4, 1e-2, 1.0, 1e2):
        for factor in (0.8, 0.95, 1.0, 1.05, 1.3):
            noise = [factor * chosen for chosen in posterior.settings.noise_factor]
            other = posterior.with_settings(prior_precision=precision, noise_factor=noise)
            assert best <= loss(other) + 2e-3


def test_given_noise_stays(trained):
    nets, train, held = trained
    for rule in ("nll", "crps", "distance", "evidence"):
        val = None if rule == "evidence" else held
        posterior = fit(nets, train, val, likelihood=Gaussian(noise=0.25), rule=rule)
        assert torch.equal(posterior.noise, torch.full((3, 1), 0.25))


@pytest.mark.parametrize("shared", [True, False])
def test_evidence_chooses_a_maximum_in_prior_precision_and_noise(trained, shared):
    nets, train, _ = trained
    tuned = fit(nets, train, structure="kron-exact").tune(rule=mola.rules.Evidence(shared=shared), progress=False)
    best = tuned.log_evidence()
    for precision in (0.97, 1.03):
        for factor in (0.99, 1.01):
            neighbour = tuned.with_prior_precision([chosen * precision for chosen in tuned.prior_precision])
            noise = [factor * chosen for chosen in tuned.settings.noise_factor]
            other = neighbour.with_settings(noise_factor=noise).log_evidence()
            assert float(other.sum()) < float(best.sum())
            assert shared or bool((other < best).all())


def test_stacking_pooled_predictions_is_no_worse_than_before():
    posterior, _, x, y = fitted(1, 3, likelihood=Gaussian(noise=0.4))
    pooled = posterior.with_pooling(0.0)
    stacked = pooled.reweight([(x, y)], progress=False)
    assert float(stacked.predict(x).log_prob(y).mean()) >= float(pooled.predict(x).log_prob(y).mean()) - 1e-9


def test_distance_keeps_to_its_price_and_makes_the_gap_and_the_outside_uncertain(trained):
    nets, train, held = trained
    plain = fit(nets, train, held, rule="nll")
    careful = fit(nets, train, held, rule="distance")
    ((x, y),) = held
    cost = float((plain.predict(x).log_prob(y) - careful.predict(x).log_prob(y)).double().mean())
    assert careful.distance_exponent > 0
    assert -1e-3 < cost <= 0.01 + 1e-5
    gap, outside, inside = (torch.tensor([[position]], dtype=torch.float32) for position in (0.0, 4.0, -1.5))
    for position in (gap, outside):
        assert float(careful.predict(position).std / careful.predict(inside).std) > 2
        assert float(careful.predict(position).std) >= float(plain.predict(position).std)
    assert torch.allclose(careful.predict(gap).aleatoric, plain.predict(gap).aleatoric)
    assert float(careful.predict(gap).ood_score) > float(careful.predict(inside).ood_score)


@pytest.mark.parametrize("rule", ["nll", "distance"])
def test_far_away_the_standard_deviation_grows_without_bound(structure, rule):
    torch.manual_seed(0)  # ReLU: features that grow with the input
    nets = [nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1)) for _ in range(2)]
    x = torch.randn(100, 1)
    train = [(x[:60], x[:60].sin())]
    held = [(x[60:], x[60:].sin() + 0.1 * torch.randn(40, 1))]
    with warnings.catch_warnings(action="ignore", category=MolaWarning):
        posterior = fit(nets, train, held, structure=structure, rule=rule)
    for side in (-1.0, 1.0):
        stds = [float(posterior.predict(torch.tensor([[side * far]])).std) for far in (1e2, 1e4, 1e6)]
        assert stds[1] > 10 * stds[0]
        assert stds[2] > 10 * stds[1]


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: torch.where(torch.arange(60)[:, None] == 3, math.nan, y), "targets must be finite"),
        (lambda y: y[:, :1], r"expected targets of shape \(60, 2\).*heteroscedastic"),
        (lambda y: y[:, 0], "one for each"),
        (lambda y: torch.zeros(60, dtype=torch.int64), "likelihood='categorical'"),
        (lambda y: torch.stack([y[:, 0], torch.full((60,), 3.0)], 1), r"target 1 is constant \(3\)"),
    ],
)
def test_wrong_targets_are_named(change, words):
    x, y = data(2)
    with pytest.raises(DataError, match=words):
        fit(network(2), [(x, change(y))])


def test_targets_in_other_units_than_the_networks_are_warned_of():
    posterior, _, _, _ = fitted(2)
    x, y = data(2, 30, seed=7)
    with pytest.warns(MolaWarning, match=r"standardised.*location"):
        posterior.tune([(x, 1000 + 50 * y)], progress=False)


def test_exact_residuals_leave_no_noise():
    net = network(2)
    x, _ = data(2)
    with pytest.raises(DataError, match="exactly"):
        fit(net, [(x, net(x).detach())])


def test_what_does_not_apply_to_regression_is_refused():
    posterior, nets, x, y = fitted(2)
    held = [data(2, 30, seed=7)]
    for words, use in (
        ("rule 'threshold' does not apply", lambda: posterior.tune(held, rule="threshold")),
        ("does not apply", lambda: posterior.tune(held, rule=mola.rules.Outliers(held))),
        ("'mc' does not apply", lambda: fit(nets, [(x, y)], link="mc")),
        ("no class probabilities", lambda: posterior.predict_proba(np.zeros((1, 3)))),
        ("noise is unknown", lambda: fit(nets, [x])),
        ("one value, or 1 values", lambda: posterior.with_settings(noise_factor=[0.1, 0.2, 0.3])),
        ("has no noise", lambda: mola.ensemble(nets).with_settings(noise_factor=0.1)),
        ("return only means", lambda: mola.Mixture([posterior, nets[0]]).predict(x)),
        *(
            ("finite number", lambda noise=noise: Gaussian(noise=noise))
            for noise in (0.0, math.nan, "loud", [1.0, 0.0], True)
        ),
    ):
        with pytest.raises(OptionError, match=words):
            use()
    for bound in (posterior.confidence_bound, posterior.far_field_limit):
        with pytest.raises(BoundError, match="regression"):
            bound(x)


def test_wrong_questions_to_a_prediction():
    posterior, _, x, y = fitted(2)
    actual = posterior.predict(x)
    for error, words, use in (
        (OptionError, "level must be above 0", lambda: actual.quantile(1.0)),
        (OptionError, "probability must be above 0", lambda: actual.interval(90)),
        (DataError, r"shape \(60, 2\).*got shape \(60,\)", lambda: actual.log_prob(y[:, 0])),
        (DataError, "real targets", lambda: actual.crps(torch.zeros(60, 2, dtype=torch.complex64))),
    ):
        with pytest.raises(error, match=words):
            use()


@pytest.mark.parametrize(
    ("outputs", "options", "words"),
    [
        (2, {"noise": [1, 2, 3]}, "noise has 3 values"),
        (4, {"location": (20.0, 250.0)}, "location has 2 values.*4 outputs for 4 targets.*heteroscedastic"),
        (
            2,
            {"location": (2.0, 5.0), "heteroscedastic": True},
            "2 outputs for 1 target.*heteroscedastic",
        ),
    ],
)
def test_settings_for_another_number_of_targets_are_named(outputs, options, words):
    with pytest.raises(HeadError, match=words):
        fit(nn.Linear(3, outputs), [(torch.randn(8, 3), torch.randn(8, 2))], likelihood=Gaussian(**options))


def test_one_network_of_a_tuned_regression_keeps_its_noise():
    posterior, _, x, _ = fitted(1, 2)
    tuned = posterior.tune(rule="evidence", progress=False)
    assert torch.equal(tuned.alone(1).noise[0], tuned.noise[1])
    assert tuned.function(0)(x[:3]).shape == (3, 1)
    with pytest.raises(OptionError, match="noise_factor"):
        replace(tuned.settings, noise_factor=(1.0, 2.0, 3.0))
