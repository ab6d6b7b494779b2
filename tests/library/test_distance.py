"""Distances from the training classes, and logits that are divided by them: against formulas, and by laws."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import MolaWarning, OptionError
from molaplace.links import LINKS
from molaplace.rules import Calibrated, Distance, Score
from molaplace.structures.distance import ClassDistance, distance_sums
from molaplace.sums import Sums
from tests.closeness import assert_close
from tests.conftest import STRUCTURES
from tests.library.problems import CLASSES, blob_loader, blobs, close, features_of, trained
from tests.reference import closed_form
from tests.reference import distance as reference

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")  # small problems, at the ends of grids


@pytest.fixture(scope="module")
def networks():
    return [trained(seed) for seed in range(3)]


def fitted(networks, **options):
    return mola.fit(networks, blob_loader(), progress=False, **options)


def tuned(networks, rule="nll", **options):
    return fitted(networks, **options).tune(blob_loader(1), rule=rule, progress=False)


def log_loss(posterior, inputs, labels):
    return -float(posterior(inputs).gather(1, labels[:, None]).log().mean())


def reference_distances(network, queries):
    inputs, labels = blobs()
    training_features = features_of(network, inputs).numpy()
    return reference.distances(training_features, labels.numpy(), features_of(network, queries).numpy())


def solved(features, labels, classes=CLASSES):
    return ClassDistance.from_sums(Sums(distance_sums(features, labels, classes, predicted=False), len(features)))


class TestAgainstTheFormulas:
    def test_distances_and_norms(self, networks):
        queries = 3 * torch.randn(20, 3)
        for component, network in zip(fitted(networks).components, networks, strict=True):
            logs, norms = component.layer.distance.logs(features_of(network, queries))
            assert np.allclose(logs.exp().numpy(), reference_distances(network, queries), rtol=1e-9)
            assert torch.allclose(norms.exp(), features_of(network, queries).norm(dim=1), rtol=1e-12)

    def test_a_class_without_data_is_not_near(self):
        rows = torch.randn(300, 6)
        labels = torch.randint(40, (300,))
        queries = torch.randn(10, 6)
        actual = solved(rows, labels, 41).logs(queries)[0].exp()
        assert np.allclose(
            actual.numpy(), reference.distances(rows.numpy(), labels.numpy(), queries.numpy()), rtol=1e-9
        )

    def test_entropy_that_distance_adds_is_epistemic(self, networks):
        posterior = tuned(networks).with_prior_precision(0.3)
        direction = torch.randn(1, 3)
        queries = torch.cat([direction * scale for scale in (1.0, 10.0, 100.0, 1e4)])
        near, careful = (posterior.with_distance_exponent(exponent).predict(queries) for exponent in (0, 2))
        assert_close(careful.aleatoric, torch.minimum(near.aleatoric, careful.entropy), "float64")
        assert_close(careful.epistemic + careful.aleatoric, careful.entropy, "float64")
        assert float(careful.mutual_information[-1]) < 0.01
        assert float(careful.epistemic[-1]) > 0.9 * math.log(CLASSES)
        # Without its logits, which shrink with its features, a network no longer cancels the logits of another, so entropy falls.
        pooled = posterior.with_pooling(0.0)
        queries = 4 * torch.randn(2000, 3)
        near, careful = (pooled.with_distance_exponent(exponent, onset=1e6).predict(queries) for exponent in (0, 2))
        assert bool((near.aleatoric > careful.entropy + 1e-3).any())
        assert_close(careful.aleatoric, torch.minimum(near.aleatoric, careful.entropy), "float64")

    @pytest.mark.parametrize("structure", STRUCTURES)
    @pytest.mark.parametrize("link", closed_form.LINKS)
    @pytest.mark.parametrize(("pooling", "onset"), [(1.0, 1.0), (0.4, 1.4), (0.0, 0.7)])
    def test_probabilities(self, networks, structure, link, pooling, onset):
        weights = [0.5, 0.3, 0.2]
        queries = 4 * torch.randn(30, 3)
        posterior = tuned(networks, rule=Score(grid=[0.3]), structure=structure, link=link, weights=weights)
        posterior = posterior.with_temperature(0.8).with_distance_exponent(1.5, onset=onset).with_pooling(pooling)
        prediction = posterior.predict(queries)
        distance = [reference_distances(network, queries) for network in networks]
        norms = [features_of(network, queries).norm(dim=1).numpy() for network in networks]
        scales = posterior.reference.scales
        divisors = reference.divisors(distance, norms, [tuple(scale) for scale in scales], weights, 0.8, 1.5, onset)
        assert max(divisor.max() for divisor in divisors) > 2  # some inputs are far
        means = [mean.numpy() / by[:, None] for mean, by in zip(prediction.logit_mean.unbind(1), divisors, strict=True)]
        centre = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
        centring = np.eye(CLASSES) - 1 / CLASSES
        probs = 0.0
        for weight, mean, component, by in zip(weights, means, posterior.components, divisors, strict=True):
            network = component.network
            phi = torch.cat([features_of(network, queries), torch.ones(len(queries), 1)], 1)
            covariance = component.spread(component.project(phi), 0.3).covariance().numpy() / by[:, None, None] ** 2
            moments = closed_form.Moments(
                centre + pooling * (mean - centre), centring @ covariance @ centring, np.einsum("ncc->nc", covariance)
            )
            probs = probs + weight * closed_form.LINKS[link](moments)
        assert np.allclose(prediction.probs.numpy(), probs, atol=1e-10)
        relative = [ratios / scale.distance for ratios, scale in zip(distance, scales, strict=True)]
        expected = np.exp(sum(weight * np.log(ratios) for weight, ratios in zip(weights, relative, strict=True)))
        assert np.allclose(prediction.distance.numpy(), expected, rtol=1e-9)

    def test_the_reference_is_the_median_distance_and_the_99_per_cent_quantile_of_the_norms(self, networks):
        held, _ = blobs(1)
        posterior = tuned(networks)
        for network, scale in zip(networks, posterior.reference.scales, strict=True):
            logs = np.log(reference_distances(network, held))
            assert scale.distance == pytest.approx(np.exp(np.median(logs)), rel=1e-9)
            norms = np.log(features_of(network, held).norm(dim=1).numpy())
            assert scale.norm == pytest.approx(np.exp(np.quantile(norms, 0.99)), rel=1e-9)
        assert float(posterior.predict(held).distance.median()) == pytest.approx(1, abs=0.15)

    def test_without_validation_data_the_reference_is_from_the_training_data(self, networks):
        inputs, labels = blobs()
        rows = features_of(networks[0], inputs).numpy()
        means = reference.class_means(rows, labels.numpy())
        inverse = np.linalg.inv(reference.covariance(rows, labels.numpy()))
        away = [reference.direction(row) - means[label] for row, label in zip(rows, labels.tolist(), strict=True)]
        expected = np.sqrt(np.mean([offset @ inverse @ offset for offset in away]))
        posterior = fitted(networks[:1])
        assert posterior.reference.scales[0].distance == pytest.approx(expected, rel=1e-9)
        norms = np.linalg.norm(rows, axis=1)
        quantile = norms.mean() + float(torch.special.ndtri(torch.tensor(0.99))) * norms.std()
        assert posterior.reference.scales[0].norm == pytest.approx(quantile, rel=1e-4)
        assert posterior.predict(inputs).ood_score_name == "far-field"

    def test_the_outlier_score_is_the_sum_of_its_terms(self, networks):
        posterior = tuned(networks)
        inside, _ = blobs(2)
        prediction = posterior.predict(inside)
        usual = posterior.reference
        assert prediction.ood_score_name == "far-field + energy + distance"
        nus = [
            (features_of(network, inside).norm(dim=1) / scale.norm).clamp_min(1)
            for network, scale in zip(networks, usual.scales, strict=True)
        ]
        energies = [
            -torch.logsumexp(network(inside) / nu[:, None] ** 2, 1) for network, nu in zip(networks, nus, strict=True)
        ]
        departure = prediction.distance.log() + 4 * torch.stack(nus).log().mean(0)
        parts = [prediction.far_field, torch.stack(energies).mean(0).detach(), departure]
        z = [(part - mean) / spread for part, (mean, spread) in zip(parts, usual.score, strict=True)]
        assert close(prediction.ood_score, z[0] + z[1] + (z[2] - 1).clamp_min(0), 1e-9)

    @pytest.mark.parametrize("factor", [1e2, 1e4, 1e8])
    def test_inputs_in_wrong_units_raise_an_alarm(self, networks, factor):
        posterior = tuned(networks)
        threshold = mola.alarm_threshold(posterior.predict(blobs(1)[0]).ood_score, 0.05)
        inside = blobs(2, count=2000)[0]
        assert float((posterior.predict(inside).ood_score > threshold).double().mean()) < 0.15
        assert bool((posterior.predict(factor * inside).ood_score > threshold).all())


class TestLaws:
    def test_a_constant_added_to_the_logits_of_one_network_changes_no_outlier_score(self, networks):
        """Whatever the weights, although the network's energy changes by the constant."""
        inputs, labels = blobs(1)
        longest = int(features_of(networks[1], inputs).norm(dim=1).argmax())
        rows = torch.cat([torch.arange(len(inputs)), torch.full((10,), longest)])  # norms up to the largest are typical
        validation = [(inputs[rows], labels[rows])]
        shifted = copy.deepcopy(networks)
        with torch.no_grad():
            shifted[1][-1].bias += 20
        scores = []
        for members in (networks, shifted):
            posterior = fitted(members).tune(validation, progress=False)
            mixtures = [posterior, posterior.with_weights([0.1, 0.7, 0.2]), posterior.with_weights([0.0, 1.0, 0.0])]
            scores.append(torch.stack([mixture.predict(inputs).ood_score for mixture in mixtures]))
        assert_close(scores[1], scores[0], "search")
        assert float((scores[0] - scores[0][:1]).abs().max()) > 0.1  # the weights matter

    @pytest.mark.parametrize("link", [name for name in LINKS if name != "bridge"])
    @pytest.mark.parametrize("bias", [True, False])
    def test_far_away_all_classes_are_equally_likely(self, link, bias):
        """Features grow, and logits no faster. (The bridge keeps the ratios of the variances.)"""
        network = trained(0, bias=bias)
        posterior = tuned(network, rule=Score(grid=[1.0]), link=link)
        cautious = posterior.with_distance_exponent(0.5)
        queries = torch.randn(30, 3)
        queries = queries[features_of(network, 1e6 * queries).norm(dim=1) > 1e3]
        assert len(queries) > 10
        levels = [float(cautious(scale * queries).max()) for scale in (1e2, 1e4, 1e6, 1e8, 1e12, 1e20, 1e30)]
        assert all(more <= less + 1e-12 for less, more in itertools.pairwise(levels))
        assert levels[-1] == pytest.approx(1 / CLASSES, abs=1e-6)
        assert float(posterior(1e8 * queries).max()) > 0.5

    def test_a_larger_exponent_is_less_confident(self, networks):
        queries = 4 * torch.randn(40, 3)
        posterior = tuned(networks)
        levels = [
            posterior.with_distance_exponent(exponent)(queries).max(1).values for exponent in (0.1, 1.0, 3.0, 10.0)
        ]
        for less, more in itertools.pairwise(levels):
            assert bool((more <= less + 1e-12).all())

    @pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e30, 1e200])
    def test_logs_hold_over_the_whole_range_of_float64(self, networks, scale):
        distance = fitted(networks[:1]).components[0].layer.distance
        rows = features_of(networks[0], blobs(2)[0])
        near = distance.logs(rows)
        far = distance.logs(scale * rows)
        assert close(far[0], near[0], 1e-9)
        assert close(far[1], near[1] + math.log(scale), 1e-9)
        assert bool(torch.isfinite(distance.logs(0 * rows)[0]).all())


class TestTheRule:
    def test_the_paper_s_price(self, networks):
        posterior = tuned(networks, rule="distance")
        plain = tuned(networks, rule="nll")
        inputs, labels = blobs(1)
        accuracy = np.mean([float((network(inputs).argmax(1) == labels).double().mean()) for network in networks])
        assert float(posterior(inputs).max(1).values.mean()) == pytest.approx(accuracy - 0.01, abs=1e-3)
        assert posterior.distance_exponent == posterior.tuning.settings.distance_exponent > 0
        assert f"divided by {2**posterior.distance_exponent:.3g}" in posterior.tuning.summary
        assert posterior.prior_precision == plain.prior_precision
        assert posterior.temperature == plain.temperature

    @pytest.mark.parametrize("price", [0.02, 0.2])
    def test_a_price_in_log_loss(self, networks, price):
        plain = tuned(networks)
        cautious = tuned(networks, rule=Distance(price=price))
        ratio = log_loss(cautious, *blobs(1)) / log_loss(plain, *blobs(1)) - 1
        assert ratio == pytest.approx(price, rel=0.05) or cautious.distance_exponent == 8.0
        assert ratio <= price + 1e-9

    @pytest.mark.parametrize("link", LINKS)
    def test_every_link_is_tuned_as_it_predicts(self, networks, link):
        rule = Distance(price=0.1, rule=Score(grid=[1.0, 2.0]))
        made = tuned(networks[:2], rule=rule, link=link, weights=[0.7, 0.3])
        curve = made.tuning.curve
        index = curve["distance_exponent"].index(made.distance_exponent)
        assert log_loss(made, *blobs(1)) == pytest.approx(curve["nll"][index], rel=1e-9)

    def test_another_rule_may_come_before_it(self, networks):
        posterior = fitted(networks)
        evidence = posterior.tune(rule="evidence", progress=False)
        both = posterior.tune(blob_loader(1), rule=Distance(rule="evidence"), progress=False)
        assert both.prior_precision == evidence.prior_precision
        calibrated = posterior.tune(blob_loader(1), rule="calibrated", progress=False)
        both = posterior.tune(blob_loader(1), rule=Distance(price=0.02, rule=Calibrated()), progress=False)
        assert (both.pooling, both.temperature) == (calibrated.pooling, calibrated.temperature)

    def test_unlabelled_training_data(self, networks):
        inputs, _ = blobs()
        posterior = mola.fit(networks, [inputs], progress=False).tune(blob_loader(1), rule="distance", progress=False)
        assert any("no labels" in note for note in posterior.tuning.notes)
        assert posterior.distance_exponent > 0

    def test_features_that_are_all_alike(self):
        network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, CLASSES))
        with torch.no_grad():
            network[0].weight.zero_()
            network[0].bias.fill_(1.0)
        posterior = mola.fit(network, 80 * blob_loader(), progress=False)
        with pytest.warns(MolaWarning, match="do not vary within classes"):
            posterior = posterior.tune(blob_loader(1), rule="distance", progress=False)
        queries = torch.randn(4, 3)
        assert close(posterior(queries), posterior.with_distance_exponent(0.0)(queries))
        assert torch.equal(posterior.predict(queries).distance, torch.ones(4))

    @pytest.mark.parametrize("spread", [1e-3, 1e-6, 1e-9, 0.0])
    def test_features_that_are_almost_alike(self, spread):
        """Down to where rounding is all that is left, there is an answer."""
        network = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, CLASSES))
        with torch.no_grad():
            network[0].weight.mul_(spread)
            network[0].bias.copy_(torch.rand(16))
        posterior = mola.fit(network, 40 * blob_loader(), blob_loader(1), progress=False)
        assert torch.isfinite(posterior.with_distance_exponent(1.0)(torch.randn(4, 3))).all()

    def test_validation_data_that_are_mostly_copies(self, networks):
        """More than half of them at a distance of rounding: that is no unit for the others."""
        inputs, labels = blobs()
        inputs[labels == 0] = inputs[labels == 0][:1]
        copies = inputs[labels == 0][:1].repeat(100, 1), torch.zeros(100, dtype=torch.int64)
        others = inputs[labels != 0][:60], labels[labels != 0][:60]
        posterior = mola.fit(networks, [(inputs, labels)], progress=False)
        made = posterior.tune([copies, others], rule=Distance(price=0.05), progress=False)
        actual = made.predict(torch.cat([copies[0], others[0]])).distance
        assert float(actual[:100].max()) < 1
        assert float(actual.max()) < 100

    def test_validation_data_unlike_the_training_data(self, networks):
        posterior = mola.fit(networks, blob_loader(spread=0.2), progress=False)
        rule = Distance(price=0.05)
        with pytest.warns(MolaWarning, match="times as far"):
            posterior.tune(blob_loader(1), rule=rule, progress=False)
        usual = posterior.tune(blob_loader(1, spread=0.2), rule=rule, progress=False)
        assert not any("times as far" in note for note in usual.tuning.notes)


class TestWrongUse:
    def test_without_distances(self, networks):
        with pytest.raises(OptionError, match="distances=True"):
            tuned(networks, rule="distance", distances=False)
        with pytest.raises(OptionError, match="validation data"):
            mola.fit(networks, blob_loader(), rule="distance", progress=False)

    @pytest.mark.parametrize("price", [-1, 2, "cheap", float("nan")])
    def test_prices(self, price):
        with pytest.raises(OptionError, match="price"):
            Distance(price=price)

    @pytest.mark.parametrize("rule", ["distance", "nil", 3])
    def test_rules_before_it(self, rule):
        with pytest.raises(OptionError, match="rule"):
            Distance(rule=rule)
