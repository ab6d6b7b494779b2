"""Distances from the training classes, and logits that are cooled by them: against formulas, and by laws."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola.laplace import ClassDistance, ClassGeometry, ClassSums, LogitMoments
from mola.laplace import distance as distances
from mola.links import LINKS
from mola.tuning.distance import FAR
from tests.conftest import STRUCTURES, make_problem
from tests.reference import distance as reference

CLASSES = 4

pytestmark = pytest.mark.filterwarnings("ignore::mola.MolaWarning")  # small problems, at the ends of grids


def blobs(seed=0, count=160, classes=CLASSES, spread=1.0):
    """Inputs around as many corners as there are classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    corners = 1.9 * torch.randn(classes, 3, generator=torch.Generator().manual_seed(99))
    return corners[labels] + spread * torch.randn(count, 3, generator=generator), labels


def trained(seed, classes=CLASSES, bias=True, width=8):
    """A small network that has learnt the blobs."""
    torch.manual_seed(seed)
    layers = [nn.Linear(3, width, bias=bias), nn.ReLU(), nn.Linear(width, width, bias=bias), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, classes, bias=bias))
    inputs, labels = blobs(classes=classes)
    optimiser = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(120):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    return network.eval()


@pytest.fixture(scope="module")
def networks():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = [trained(seed) for seed in range(3)]
    torch.set_default_dtype(before)
    return made


def loader(seed=0, size=50, **options):
    inputs, labels = blobs(seed, **options)
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def fitted(networks, **options):
    return mola.fit(networks, loader(), progress=False, **options)


def score_of(probs, labels, name):
    truth = nn.functional.one_hot(labels, probs.shape[1])
    losses = {"nll": -(probs.log() * truth).sum(1), "brier": (probs - truth).square().sum(1)}
    return float(losses[name].mean())


def features_of(network, inputs):
    with torch.no_grad():
        return network[:-1](inputs)


class TestAgainstTheFormulas:
    def test_distances(self, networks):
        inputs, labels = blobs()
        asked = 3 * torch.randn(20, 3)
        posterior = fitted(networks)
        for component, network in zip(posterior.components, networks, strict=True):
            logs, lengths = component.distance.logs(features_of(network, asked))
            expected = reference.distances(
                features_of(network, inputs).numpy(), labels.numpy(), features_of(network, asked).numpy()
            )
            assert np.allclose(logs.exp().numpy(), expected, rtol=1e-9)
            assert np.allclose(lengths.exp().numpy(), features_of(network, asked).norm(dim=1).numpy(), rtol=1e-12)

    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_cooled_probabilities(self, networks, structure):
        weights = [0.5, 0.3, 0.2]
        asked = 4 * torch.randn(30, 3)
        posterior = fitted(networks, structure=structure, prior_precision=0.3, weights=weights).tune(
            loader(1), progress=False
        )
        posterior = posterior.with_temperature(0.8).with_distance_exponent(1.5)
        prediction = posterior.predict(asked)
        inputs, labels = blobs()
        distance = [
            reference.distances(features_of(one, inputs).numpy(), labels.numpy(), features_of(one, asked).numpy())
            for one in networks
        ]
        length = [features_of(one, asked).norm(dim=1).numpy() for one in networks]
        usual = [tuple(scale) for scale in posterior.cooling.usual.scales]
        divisors = reference.divisors(distance, length, usual, weights, 0.8, 1.5)
        assert max(one.max() for one in divisors) > 2  # something is far
        probs = sum(
            weight * reference.probit(mean.numpy(), variance.numpy(), divisor)
            for weight, mean, variance, divisor in zip(
                weights, prediction.logit_mean, prediction.logit_variance, divisors, strict=True
            )
        )
        assert np.allclose(prediction.probs.numpy(), probs, atol=1e-10)
        relative = [one / scale[0] for one, scale in zip(distance, usual, strict=True)]
        expected = np.exp(sum(weight * np.log(one) for weight, one in zip(weights, relative, strict=True)))
        assert np.allclose(prediction.distance.numpy(), expected, rtol=1e-9)

    def test_what_is_usual_is_the_median_and_the_99_per_cent_quantile(self, networks):
        inputs, labels = blobs()
        held, _ = blobs(1)
        posterior = fitted(networks).tune(loader(1), progress=False)
        for network, scale in zip(networks, posterior.cooling.usual.scales, strict=True):
            expected = reference.distances(
                features_of(network, inputs).numpy(), labels.numpy(), features_of(network, held).numpy()
            )
            assert scale.distance == pytest.approx(np.exp(np.median(np.log(expected))), rel=1e-9)
            long = np.log(features_of(network, held).norm(dim=1).numpy())
            assert scale.length == pytest.approx(np.exp(np.quantile(long, 0.99)), rel=1e-9)
        assert float(posterior.predict(held).distance.median()) == pytest.approx(1, abs=0.15)

    def test_without_validation_data_the_training_data_say_what_is_usual(self, networks):
        inputs, labels = blobs()
        posterior = fitted(networks[:1])
        means = reference.class_means(features_of(networks[0], inputs).numpy(), labels.numpy())
        inverse = np.linalg.inv(reference.covariance(features_of(networks[0], inputs).numpy(), labels.numpy()))
        squares = []
        for row, label in zip(features_of(networks[0], inputs).numpy(), labels.tolist(), strict=True):
            away = reference.direction(row) - means[label]
            squares.append(away @ inverse @ away)
        assert posterior.cooling.usual.scales[0].distance == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-9)
        assert posterior.predict(inputs).ood_score_name == "far-field"

    @pytest.mark.parametrize("link", [*LINKS, mola.Bridge(normalised=True), mola.MonteCarlo(20, "weights")])
    def test_links_see_the_gaussian_of_the_quotient(self, structure, link):
        """Halved weights give at any features what the weights themselves give at half of these, the constant 1 included."""
        problem = make_problem()
        posterior = mola.fit(
            problem.network, problem.loader, structure=structure, prior_precision=2.0, link=link, progress=False
        )
        moments = posterior._moments(problem.inputs)[0]
        halved = LogitMoments(moments.mean / 2, moments.spread.posterior.at(moments.spread.features / 2))
        quotients = (
            moments.divided(torch.tensor(2.0)),
            moments.divided(torch.full((len(moments.mean),), 2.0)),
            moments.divided(torch.tensor(4.0)).divided(torch.tensor(0.5)),
        )
        for quotient in quotients:
            assert torch.allclose(posterior.link(quotient), posterior.link(halved), atol=1e-10)
        if link != mola.Bridge(normalised=True):
            assert not torch.allclose(posterior.link(moments), posterior.link(halved), atol=1e-3)

    def test_the_normalised_bridge_is_the_same_at_every_temperature(self, networks):
        """Also where squares of divisors leave the range of float32."""
        posterior = fitted(networks[:1], link=mola.Bridge(normalised=True))
        asked = 3 * torch.randn(20, 3)
        expected = posterior(asked)
        for made in (posterior.with_temperature(0.01), posterior.with_distance_exponent(3.0)):
            assert torch.allclose(made(asked), expected, atol=1e-10)
        moments = posterior._moments(asked)[0]
        coarse = LogitMoments(
            moments.mean.float(),
            moments.spread.posterior.to(torch.device("cpu"), torch.float32).at(moments.spread.features.float()),
        )
        assert torch.allclose(posterior.link(coarse.divided(torch.tensor(1e17))).double(), expected, atol=1e-4)

    def test_a_divided_gaussian_is_the_gaussian_of_the_quotient(self):
        """Dividing logits by one number for all is the posterior of a network whose head is divided."""
        problem = make_problem()
        posterior = mola.fit(problem.network, problem.loader, prior_precision=2.0, progress=False)
        halved = make_problem().network
        with torch.no_grad():
            for parameter in halved[-1].parameters():
                parameter /= 2
        moments = posterior._moments(problem.inputs)[0]
        scaled = moments.divided(torch.tensor(2.0))
        assert torch.allclose(scaled.mean, halved(problem.inputs))
        assert torch.allclose(scaled.variance, moments.variance / 4)
        assert torch.allclose(scaled.contrast_covariance, moments.contrast_covariance / 4)
        draws = [
            torch.cat(list(one.draws(16, torch.Generator().manual_seed(0), "logits")), 1) for one in (moments, scaled)
        ]
        assert torch.allclose(draws[0] / 2, draws[1])
        everything = slice(None)
        pairs = [one.even_draws(8, 0)(everything) for one in (moments, scaled)]
        assert torch.allclose(pairs[0] / 2, pairs[1])
        each = [one.difference_variances()(everything, everything, everything) for one in (moments, scaled)]
        assert torch.allclose(each[0] / 4, each[1])


class TestLaws:
    def test_without_the_rule_nothing_changes(self, networks, structure):
        asked = torch.randn(20, 3)
        options = {"structure": structure, "prior_precision": 0.7}
        plain = fitted(networks, distances=False, **options)
        cooled = fitted(networks, **options)
        assert torch.equal(plain(asked), cooled(asked))
        assert torch.equal(plain(asked), cooled.with_temperature(1.0).with_distance_exponent(0.0)(asked))
        assert not plain.has_distances
        assert plain.predict(asked).distance is None
        assert cooled.has_distances

    def test_sums_do_not_depend_on_batches_or_order(self, networks):
        inputs, labels = blobs()
        order = torch.randperm(len(inputs))
        ways = [loader(), loader(size=7), [(inputs[order], labels[order])]]
        sums = [mola.fit(networks, way, progress=False).components[1].curvature.classes for way in ways]
        for other in sums[1:]:
            for name, tensor in sums[0].tensors().items():
                assert torch.allclose(tensor, other.tensors()[name], rtol=1e-12, atol=1e-12), name

    def test_sums_of_parts_add_up(self, networks):
        inputs, labels = blobs()
        rows = features_of(networks[0], inputs)
        parts = [ClassSums.empty(rows.shape[1], CLASSES, torch.device("cpu")) for _ in range(4)]
        for part, some in zip(parts[:3], (slice(0, 50), slice(50, 51), slice(51, None)), strict=True):
            part.absorb(rows[some].clone(), labels[some], predicted=False)
        parts[3].absorb(rows.clone(), labels, predicted=False)
        for first, second in (
            (parts[0] + parts[1] + parts[2], parts[3]),
            (parts[0] + (parts[1] + parts[2]), (parts[0] + parts[1]) + parts[2]),
        ):
            for name, tensor in first.tensors().items():
                assert torch.allclose(tensor, second.tensors()[name], rtol=1e-12, atol=1e-12)

    def test_equal_components_are_one(self, networks):
        asked = 3 * torch.randn(20, 3)
        one, three = (
            fitted(some).tune(loader(1), rule="distance", progress=False) for some in (networks[:1], networks[:1] * 3)
        )
        assert one.distance_exponent == three.distance_exponent > 0
        assert torch.allclose(one(asked), three(asked), atol=1e-12)
        assert torch.allclose(one.predict(asked).distance, three.predict(asked).distance)

    @pytest.mark.parametrize("exponent", [0.5, 2.0, 6.0])
    @pytest.mark.parametrize("before", [(1 / 3, 1 / 3, 1 / 3), (0.98, 0.01, 0.01), (0.0, 0.3, 0.7)])
    def test_stacking_ends_where_it_stays_and_is_no_worse_than_where_it_began(self, networks, before, exponent):
        """The distance depends on the weights: weights for the distances of others are not yet those for their own."""
        held = loader(1, spread=2.5)
        inputs, labels = blobs(1, spread=2.5)
        tuned = fitted(networks, link="probit-centered", prior_precision=3.0).tune(
            held, rule=mola.ValidationScore(grid=[3.0]), progress=False
        )
        posterior = tuned.with_distance_exponent(exponent).with_weights(before)

        def score(one):
            return float(one(inputs).gather(1, labels[:, None]).log().mean())

        stacked = posterior.reweight(held, progress=False)
        assert torch.allclose(stacked.reweight(held, progress=False).weights, stacked.weights, atol=1e-12)
        assert score(stacked) >= max(score(posterior), score(posterior.with_weights("uniform"))) - 1e-9
        if exponent < 6:  # there was something to gain; where distances count for very much, turns lead downhill
            assert score(stacked) > score(posterior.with_weights("uniform")) + 1e-4
        # The same as without turns where distances do not count.
        plain = tuned.with_weights(before).reweight(held, progress=False)
        assert torch.equal(plain.weights, tuned.reweight(held, progress=False).weights)

    def test_a_prediction_does_not_depend_on_its_batch(self, networks):
        asked = 3 * torch.randn(20, 3)
        posterior = fitted(networks).tune(loader(1), rule="distance", progress=False)
        together, apart = posterior.predict(asked), [posterior.predict(row[None]) for row in asked]
        for name in ("probs", "distance", "ood_score"):
            joined = torch.cat([getattr(one, name) for one in apart])
            assert torch.allclose(getattr(together, name), joined, atol=1e-11), name

    def test_scaling_the_features_of_all_data_does_not_matter(self, networks):
        """Features that are 8 times as long, with weights that are an eighth: the same logits, distances and cooling."""

        class Longer(nn.Module):
            def __init__(self, network):
                super().__init__()
                self.body, self.head = network[:-1], nn.Linear(8, CLASSES)
                with torch.no_grad():
                    self.head.weight.copy_(network[-1].weight / 8)
                    self.head.bias.copy_(network[-1].bias)

            def forward(self, inputs):
                return self.head(8 * self.body(inputs))

        asked = 3 * torch.randn(20, 3)
        first, second = (
            mola.fit(made, loader(), progress=False, prior_precision=1e12)
            .tune(loader(1), rule=mola.Distance(price=0.5, rule=mola.ValidationScore(grid=[1e12])), progress=False)
            .predict(asked)
            for made in (networks[0], Longer(networks[0]))
        )
        assert torch.allclose(first.distance, second.distance, rtol=1e-9)
        assert torch.allclose(first.probs, second.probs, atol=1e-7)

    @pytest.mark.parametrize("link", [name for name in LINKS if name != "bridge"])
    @pytest.mark.parametrize("bias", [True, False])
    def test_far_away_all_classes_are_equally_likely(self, link, bias):
        """With biases, too: features grow, and logits no faster. The bridge keeps the ratios of the variances."""
        network = trained(0, bias=bias)
        posterior = mola.fit(network, loader(), progress=False, link=link, prior_precision=1.0)
        posterior = posterior.tune(loader(1), rule=mola.ValidationScore(grid=[1.0]), progress=False)
        cautious = posterior.with_distance_exponent(0.5)
        asked = torch.randn(30, 3)
        asked = asked[features_of(network, 1e6 * asked).norm(dim=1) > 1e3]
        assert len(asked) > 10
        last = 1.0
        for scale in (1e2, 1e4, 1e6, 1e8, 1e12, 1e20, 1e30):
            confidence = float(cautious(scale * asked).max())
            assert confidence <= last + 1e-12
            last = confidence
        assert last == pytest.approx(1 / CLASSES, abs=1e-6)
        assert float(posterior(1e8 * asked).max()) > 0.5

    def test_limit_and_bound_are_those_of_the_cooled_posterior(self):
        network = trained(0, bias=False)
        posterior = mola.fit([network, trained(1, bias=False)], loader(), progress=False)
        cautious = posterior.with_distance_exponent(1.0)
        asked = torch.randn(20, 3)
        limit = cautious.far_field_limit(asked)
        for scale in (1e9, 1e18, 1e30):
            assert torch.allclose(limit, cautious(scale * asked), atol=1e-6)
        for made in (
            cautious,
            posterior.with_temperature(0.5),
            posterior.with_temperature(3.0),
            cautious.with_temperature(2.0),
        ):
            for scale in (0.1, 1.0, 10.0, 1e4):
                bound = made.confidence_bound(scale * asked)
                assert (made(scale * asked).max(1).values <= bound + 1e-12).all()
                members = made.confidence_bound(scale * asked, lemma=True)
                assert members.shape == (2, 20)
        for scale in (1e9, 1e18, 1e30):
            assert float(cautious.confidence_bound(scale * asked).max()) == pytest.approx(1 / CLASSES, abs=1e-6)
        # A temperature alone changes nothing far away.
        assert torch.allclose(posterior.with_temperature(3.0).far_field_limit(asked), posterior.far_field_limit(asked))

    def test_features_beyond_the_range_of_float32(self, structure):
        """Their squares leave it: distances are then computed in float64, and are those of the direction."""
        network = copy.deepcopy(trained(0, bias=False)).float()
        inputs, labels = blobs()
        posterior = mola.fit(network, [(inputs.float(), labels)], progress=False, structure=structure)
        asked = torch.randn(10, 3).float()
        near, far = posterior.predict(asked), posterior.predict(1e25 * asked)
        assert torch.allclose(near.distance, far.distance, rtol=1e-3)
        assert far.distance.dtype == torch.float32
        cautious = posterior.with_distance_exponent(1.0)
        for scale in (1e12, 1e18, 1e25):
            assert float(cautious(scale * asked).max()) == pytest.approx(1 / CLASSES, abs=1e-5)

    def test_features_below_the_range_of_float32(self):
        """Under a head with a bias, whose constant 1 is in the range: directions have all their digits."""
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, CLASSES)).float()
        inputs, labels = blobs()
        posterior = mola.fit(network, [(inputs.float(), labels)], progress=False)
        asked = torch.randn(10, 3).float()
        near, tiny = posterior.predict(asked), posterior.predict(1e-25 * asked)
        assert torch.allclose(near.distance, tiny.distance, rtol=1e-3)

    def test_more_exponent_is_more_caution(self, networks):
        asked = 4 * torch.randn(40, 3)
        posterior = fitted(networks).tune(loader(1), progress=False)
        levels = [posterior.with_distance_exponent(one)(asked).max(1).values for one in (0.1, 1.0, 3.0, 10.0)]
        for more, less in zip(levels[1:], levels, strict=False):
            assert (more <= less + 1e-12).all()

    def test_many_classes_in_portions(self, monkeypatch):
        """The smallest distance over classes does not depend on how many are looked at together, nor on what is kept."""
        rows, labels = torch.randn(300, 6), torch.randint(40, (300,))
        sums = ClassSums.empty(6, 41, torch.device("cpu"))  # the last class has no data
        sums.absorb(rows.clone(), labels, predicted=False)
        asked = torch.randn(10, 6)
        whole = ClassDistance(ClassGeometry(sums)).logs(asked)[0]
        expected = reference.distances(rows.numpy(), labels.numpy(), asked.numpy())
        assert np.allclose(whole.exp().numpy(), expected, rtol=1e-9)
        monkeypatch.setattr(distances, "AT_ONCE", 13)
        monkeypatch.setattr(distances, "KEPT", 1)
        assert torch.allclose(ClassDistance(ClassGeometry(sums)).logs(asked)[0], whole, rtol=1e-9)

    def test_float32_holds_distances(self, networks):
        rows, labels = blobs(count=2000)
        features = features_of(networks[0], rows)
        sums = ClassSums.empty(8, CLASSES, torch.device("cpu"))
        sums.absorb(features.clone(), labels, predicted=False)
        exact = ClassDistance(ClassGeometry(sums))
        asked = features_of(networks[0], 3 * torch.randn(200, 3))
        coarse = exact.to(torch.device("cpu"), torch.float32).logs(asked.float())
        assert torch.allclose(coarse[0].double(), exact.logs(asked)[0], atol=2e-3)
        assert torch.allclose(coarse[1].double(), exact.logs(asked)[1], atol=1e-5)


class TestTheRule:
    def test_the_paper_s_price(self, networks):
        posterior = fitted(networks).tune(loader(1), rule="distance", progress=False)
        inputs, labels = blobs(1)
        accuracy = np.mean([float((one(inputs).argmax(1) == labels).double().mean()) for one in networks])
        confidence = float(posterior(inputs).max(1).values.mean())
        assert confidence == pytest.approx(accuracy - 0.01, abs=1e-3)
        assert posterior.distance_exponent == posterior.tuning.distance_exponent > 0
        assert "caution costs" in posterior.tuning.notes[-1]
        assert "distance exponent" in str(posterior.tuning)
        plain = fitted(networks).tune(loader(1), rule="nll", progress=False)
        assert posterior.prior_precision == plain.prior_precision
        assert posterior.temperature == plain.temperature

    @pytest.mark.parametrize("price", [0.02, 0.2])
    def test_a_price_in_log_loss(self, networks, price):
        inputs, labels = blobs(1)
        plain = fitted(networks).tune(loader(1), rule="nll", progress=False)
        cautious = plain.tune(loader(1), rule=mola.Distance(price=price), progress=False)
        losses = [-float(one(inputs).gather(1, labels[:, None]).log().mean()) for one in (plain, cautious)]
        assert losses[1] / losses[0] - 1 == pytest.approx(price, rel=0.05) or cautious.distance_exponent == 8.0
        assert losses[1] / losses[0] - 1 <= price + 1e-9

    def test_no_dearer_than_the_paper_s_rule(self, networks):
        inputs, labels = blobs(1)
        paper = fitted(networks).tune(loader(1), rule="threshold", progress=False)
        cautious = fitted(networks).tune(loader(1), rule=mola.Distance(price="loss"), progress=False)
        for one in (paper, cautious):
            one.loss = -float(one(inputs).gather(1, labels[:, None]).log().mean())
            one.sure = float(one(inputs).max(1).values.mean())
        assert cautious.loss <= paper.loss + 1e-9
        assert (
            cautious.sure
            >= min(paper.sure, float(paper.tuning.rule.split("confidence ")[1].split(" %")[0]) / 100) - 1e-3
        )

    @pytest.mark.parametrize("link", LINKS)
    def test_every_link_is_tuned_as_it_predicts(self, networks, link):
        posterior = fitted(networks[:2], link=link, prior_precision=2.0, weights=[0.7, 0.3])
        base = mola.ValidationScore(grid=[1.0, 2.0])
        tuned = posterior.tune(loader(1), rule=mola.Distance(price=0.1, rule=base), progress=False)
        inputs, labels = blobs(1)
        curve = tuned.tuning.curve
        place = curve["distance_exponent"].index(tuned.distance_exponent)
        loss = -float(tuned(inputs).gather(1, labels[:, None]).log().mean())
        assert loss == pytest.approx(curve["nll"][place], rel=1e-9)

    def test_other_rules_come_before_it_or_stand_alone(self, networks):
        posterior = fitted(networks)
        evidence = posterior.tune(rule="evidence", progress=False)
        both = posterior.tune(loader(1), rule=mola.Distance(rule="evidence"), progress=False)
        assert both.prior_precision == evidence.prior_precision
        alone = both.tune(loader(1), rule="threshold", progress=False)
        assert alone.distance_exponent == 0
        assert alone.temperature == 1

    def test_the_networks_read_the_validation_data_once(self, networks):
        calls = []
        handle = networks[0].register_forward_pre_hook(lambda *_: calls.append(1))
        posterior = mola.fit(networks[:1], loader(), progress=False)
        calls.clear()
        batches = loader(1)
        posterior.tune(batches, rule="distance", progress=False)
        handle.remove()
        assert len(calls) == len(batches)

    def test_it_says_why_it_cannot(self, networks):
        with pytest.raises(mola.OptionError, match="distances=False"):
            fitted(networks, distances=False).tune(loader(1), rule="distance", progress=False)
        with pytest.raises(mola.OptionError, match="plain ensemble"):
            mola.ensemble(networks).with_distance_exponent(1.0)
        with pytest.raises(mola.OptionError, match="needs validation data"):
            mola.fit(networks, loader(), rule="distance", progress=False)
        for price in (0, -1, 2, "cheap", True, float("nan")):
            with pytest.raises(mola.OptionError, match="price must be"):
                mola.Distance(price=price)
        with pytest.raises(mola.OptionError, match="rule"):
            mola.Distance(rule="distance")
        for value in (-1, float("nan"), 1000, "2"):
            with pytest.raises(mola.OptionError, match="distance_exponent"):
                fitted(networks).with_distance_exponent(value)
        for value in (0, -1, float("inf"), "hot"):
            with pytest.raises(mola.OptionError, match="temperature"):
                fitted(networks).with_temperature(value)

    def test_unlabelled_training_data(self, networks):
        inputs, _ = blobs()
        posterior = mola.fit(networks, [inputs], progress=False).tune(loader(1), rule="distance", progress=False)
        assert any("had no labels" in note for note in posterior.tuning.notes)
        assert posterior.distance_exponent > 0

    def test_features_that_are_all_alike(self):
        network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, CLASSES))
        with torch.no_grad():
            network[0].weight.zero_()
            network[0].bias.fill_(1.0)
        # So many that the sums lose more to rounding than a few do.
        posterior = mola.fit(network, 80 * list(loader()), progress=False)
        with pytest.warns(mola.MolaWarning):
            posterior = posterior.tune(loader(1), rule="distance", progress=False)
        assert any("alike" in note for note in posterior.tuning.notes)
        assert not any("times as far" in note for note in posterior.tuning.notes)
        assert "whose features are longer than usual" in posterior.tuning.notes[-1]
        asked = torch.randn(4, 3)
        assert torch.allclose(posterior(asked), posterior.with_distance_exponent(0.0)(asked), atol=1e-12)
        assert torch.equal(posterior.predict(torch.randn(4, 3)).distance, torch.ones(4))

    @pytest.mark.parametrize("spread", [1e-3, 1e-5, 1e-6, 1e-7, 1e-9, 0.0])
    def test_features_that_are_almost_alike(self, spread):
        """Down to where rounding is all that is left, there is an answer."""
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, CLASSES))
        with torch.no_grad():
            network[0].weight.mul_(spread)
            network[0].bias.copy_(torch.rand(16))
        posterior = mola.fit(network, 40 * list(loader()), list(loader(1)), progress=False)
        assert torch.isfinite(posterior.with_distance_exponent(1.0)(torch.randn(4, 3))).all()

    def test_validation_data_that_are_mostly_copies(self, networks):
        """More than half of them lie where a class is so tight that their distance is rounding: no unit for all others."""
        inputs, labels = blobs()
        inputs[labels == 0] = inputs[labels == 0][:1]
        copies = inputs[labels == 0][:1].repeat(100, 1), torch.zeros(100, dtype=torch.int64)
        others = inputs[labels != 0][:60], labels[labels != 0][:60]
        posterior = mola.fit(networks, [(inputs, labels)], progress=False)
        with pytest.warns(mola.MolaWarning, match="almost copies"):
            tuned = posterior.tune([copies, others], rule=mola.Distance(price=0.05), progress=False)
        found = tuned.predict(torch.cat([copies[0], others[0]])).distance
        assert float(found[:100].max()) < 1
        assert float(found.max()) < 100

    @pytest.mark.parametrize("link", [*LINKS, mola.Bridge(normalised=True)])
    def test_it_says_where_confidence_tends_to_and_no_more(self, networks, link):
        """What the note claims of inputs far away is what the posterior does there."""
        posterior = fitted(networks[:1], link=link, prior_precision=1.0)
        rule = mola.Distance(price=0.2, rule=mola.ValidationScore(grid=[1.0]))
        tuned = posterior.tune(loader(1), rule=rule, progress=False)
        note = tuned.tuning.notes[-1]
        assert tuned.distance_exponent > 0
        assert (
            f"2 times as far from the training classes as usual are divided by {2**tuned.distance_exponent:.3g}" in note
        )
        asked = 1e9 * torch.randn(20, 3)
        grow = features_of(networks[0], asked).norm(dim=1) > 1e6
        assert grow.sum() > 5
        level = float(tuned(asked[grow]).max()) < 1 / CLASSES + 1e-3
        assert (f"where features grow without bound, confidence tends to 1/{CLASSES}" in note) is level
        changed = not torch.allclose(tuned(asked), tuned.with_distance_exponent(0.0)(asked))
        assert any("changes no probability" in one for one in tuned.tuning.notes) is not changed

    def test_of_a_link_of_one_s_own_it_says_nothing(self, networks):
        class Sure(mola.links.Probit):
            def __call__(self, moments, seed=None):
                return torch.softmax(moments.mean + torch.arange(4), 1)

        posterior = fitted(networks[:1], link=Sure())
        note = posterior.tune(loader(1), rule=mola.Distance(price=0.5), progress=False).tuning.notes[-1]
        assert "4 times as far" in note
        assert "without bound" not in note

    @pytest.mark.parametrize("label", range(CLASSES))
    def test_few_validation_data_of_one_class(self, networks, label):
        """The rule means the same for three data as for many, and says that they are few."""
        inputs, labels = blobs(1)
        few = inputs[labels == label][:3]
        truth = torch.full((3,), label)
        tuned = fitted(networks).tune([(few, truth)], rule="distance", progress=False)
        assert any(note.startswith("few validation data") for note in tuned.tuning.notes)
        for network, component, scale in zip(networks, tuned.components, tuned.cooling.usual.scales, strict=True):
            found = component.distance.logs(features_of(network, few))[0].exp()
            assert scale.distance == pytest.approx(float(found.median()), rel=1e-9)
        accuracy = np.mean([float((one(few).argmax(1) == label).double().mean()) for one in networks])
        target, confidence = max(accuracy - 0.01, 1 / CLASSES), float(tuned(few).max(1).values.mean())
        if tuned.distance_exponent > 0:
            assert target <= confidence <= target + 1e-3
        else:
            assert confidence < target
            assert "nothing is left to spend" in tuned.tuning.notes[-1]

    def test_one_validation_datum(self, networks):
        """It is what is usual, and is not cooled whatever the exponent; others are."""
        inputs, labels = blobs(1)
        one = inputs[1:2]
        tuned = fitted(networks).tune([(one, labels[1:2])], rule=mola.Distance(price=0.02), progress=False)
        assert float(tuned.predict(one).distance) == pytest.approx(1, rel=1e-9)
        assert torch.allclose(tuned(one), tuned.with_distance_exponent(0.0)(one), atol=1e-12)
        assert float(tuned.predict(inputs).distance.max()) > 1.5

    def test_validation_data_unlike_the_training_data(self, networks):
        """Training data close around their classes, validation data that are not: it is told, and by how much."""
        rule = mola.Distance(price=0.05)
        posterior = mola.fit(networks, loader(spread=0.2), progress=False)
        held = loader(1)
        with pytest.warns(mola.MolaWarning, match="times as far from the training classes as the training data"):
            far = posterior.tune(held, rule=rule, progress=False)
        pairs = zip(far.cooling.usual.scales, posterior.cooling.usual.scales, strict=True)
        ratio = np.exp(np.mean([np.log(here.distance / there.distance) for here, there in pairs]))
        assert ratio > FAR
        assert any(note.startswith(f"the validation data are {ratio:.1f} times as far") for note in far.tuning.notes)
        # Distances count from the validation data's median all the same.
        assert float(far.predict(blobs(1)[0]).distance.median()) == pytest.approx(1, abs=0.15)
        for usual in (
            fitted(networks).tune(held, rule=rule, progress=False),
            posterior.tune(loader(1, spread=0.2), rule=rule, progress=False),
        ):
            assert not any(note.startswith("the validation data are") for note in usual.tuning.notes)


def timid(networks, by):
    """The same networks with logits divided by a number: as right, and less sure."""
    made = [copy.deepcopy(network) for network in networks]
    with torch.no_grad():
        for network in made:
            network[-1].weight /= by
            network[-1].bias /= by
    return made


class TestTemperature:
    @pytest.mark.parametrize("rule", ["nll", "brier"])
    @pytest.mark.parametrize("grid", [None, [0.5, 1.0, 2.0]])
    def test_what_is_told_of_the_prior_precision_is_told_at_the_temperature(self, networks, rule, grid):
        """The curve is that of the posterior as it predicts, its best is what was chosen, and the grid grew for it."""
        posterior = mola.fit(timid(networks, 8), loader(), progress=False)
        tuned = posterior.tune(loader(1), rule=mola.ValidationScore(rule, grid=grid), progress=False)
        assert tuned.temperature < 1
        inputs, labels = blobs(1)
        curve = tuned.tuning.curve
        place = curve["prior_precision"].index(tuned.prior_precision[0])
        assert place == int(torch.tensor(curve[rule]).argmin())
        probs = tuned(inputs)
        loss = -float(probs.gather(1, labels[:, None]).log().mean())
        assert loss == pytest.approx(curve["nll"][place], rel=1e-9)
        assert float(probs.max(1).values.mean()) == pytest.approx(curve["confidence"][place], rel=1e-9)
        grew = len(curve["prior_precision"]) > len(grid or mola.tuning.rules.PAPER_GRID)
        assert any("reached the end of its grid" in note for note in tuned.tuning.notes) == grew
        at_end = place in (0, len(curve["prior_precision"]) - 1)
        assert any("no interior optimum" in note for note in tuned.tuning.notes) == at_end
        if grid is not None:
            assert grew
        assert score_of(probs, labels, rule) < score_of(tuned.with_temperature(1.0)(inputs), labels, rule)

    def test_the_lowest_temperature_is_told(self, networks):
        posterior = mola.fit(timid(networks, 100), loader(), progress=False)
        with pytest.warns(mola.MolaWarning, match="lowest temperature"):
            lowest = posterior.tune(loader(1), rule="nll", progress=False)
        assert lowest.temperature == pytest.approx(0.1)
        assert "lowest temperature" in lowest.tuning.notes[-1]
        higher = mola.fit(timid(networks, 4), loader(), progress=False).tune(loader(1), rule="nll", progress=False)
        assert 0.1 < higher.temperature < 1
        assert not any("lowest temperature" in note for note in higher.tuning.notes)

    def test_a_link_that_does_not_depend_on_temperatures_gets_none(self, networks):
        posterior = mola.fit(timid(networks, 8), loader(), link=mola.Bridge(normalised=True), progress=False)
        assert posterior.tune(loader(1), rule="nll", progress=False).temperature == 1

    def test_networks_that_are_less_sure_than_right_are_sharpened(self, networks):
        """Logits of an eighth: the temperature brings them back, and the note says so."""
        inputs, labels = blobs(1)
        posterior = mola.fit(timid(networks, 8), loader(), progress=False)
        sharper = posterior.tune(loader(1), rule="nll", progress=False)
        assert 0.1 < sharper.temperature < 0.7
        assert any("less sure than they are right" in note for note in sharper.tuning.notes)
        losses = [
            -float(one(inputs).gather(1, labels[:, None]).log().mean())
            for one in (posterior.with_prior_precision(1e12), sharper)
        ]
        assert losses[1] < losses[0]
        both = posterior.tune(loader(1), rule="distance", progress=False)
        assert both.temperature == sharper.temperature
        with pytest.warns(mola.MolaWarning, match="rule='distance'"):
            posterior.tune(loader(1), rule="threshold", progress=False)

    def test_others_are_not(self, networks):
        for rule in ("nll", "brier", "ece"):
            assert fitted(networks).tune(loader(1), rule=rule, progress=False).temperature >= 1

    def test_without_covariance_it_is_temperature_scaling(self, networks):
        asked = torch.randn(10, 3)
        scaled = mola.ensemble(networks).with_temperature(2.5)
        expected = sum(torch.softmax(one(asked) / 2.5, 1) for one in networks) / 3
        assert torch.allclose(scaled(asked), expected)

    def test_a_whole_network_posterior_has_one_too(self, networks):
        posterior = mola.fit_whole(networks[:1], loader(), structure="diag", progress=False)
        asked = torch.randn(10, 3)
        assert torch.allclose(posterior.with_temperature(1e3)(asked), torch.full((10, CLASSES), 0.25), atol=0.01)
        with pytest.raises(mola.OptionError, match="samples"):
            posterior.with_link("samples").with_temperature(2.0)
        with pytest.raises(mola.OptionError, match="no distances"):
            posterior.with_distance_exponent(2.0)


class TestFiles:
    def test_they_keep_all_of_it(self, networks, tmp_path):
        posterior = fitted(networks).tune(loader(1), rule="distance", progress=False)
        posterior.save(tmp_path / "one")
        again = mola.load(tmp_path / "one", networks)
        asked = 3 * torch.randn(20, 3)
        first, second = posterior.predict(asked), again.predict(asked)
        for name in ("probs", "distance", "ood_score", "far_field"):
            assert torch.equal(getattr(first, name), getattr(second, name)), name
        assert again.distance_exponent == posterior.distance_exponent
        assert again.tuning == posterior.tuning
        assert again.cooling == posterior.cooling

    def test_files_without_distances_load_and_say_so(self, networks, tmp_path):
        """As older versions wrote them: no class sums, no cooling."""
        import json

        fitted(networks, distances=False).save(tmp_path / "one")
        document = json.loads((tmp_path / "one" / "posterior.json").read_text())
        assert document["version"] == 1
        again = mola.load(tmp_path / "one", networks)
        assert not again.has_distances
        assert again.predict(torch.randn(3, 3)).distance is None
        with pytest.raises(mola.OptionError, match="older version"):
            again.with_distance_exponent(1.0)

    def test_an_older_version_does_not_read_what_it_does_not_know(self, networks, tmp_path):
        import json

        fitted(networks).with_temperature(0.5).save(tmp_path / "one")
        assert json.loads((tmp_path / "one" / "posterior.json").read_text())["version"] == 2


def test_the_score_tells_outliers_that_only_the_distance_tells(networks):
    """Inputs between the classes, which the networks are sure of: the distance knows better."""
    posterior = fitted(networks).tune(loader(1), progress=False)
    inside, _ = blobs(2)
    prediction = posterior.predict(inside)
    assert prediction.ood_score_name == "far-field + energy + distance"
    terms = posterior.cooling.usual.score
    assert len(terms) == 3
    longer = [
        (features_of(one, inside).norm(dim=1) / scale.length).clamp_min(1)
        for one, scale in zip(networks, posterior.cooling.usual.scales, strict=True)
    ]
    energies = [-torch.logsumexp(one(inside) / nu[:, None] ** 2, 1) for one, nu in zip(networks, longer, strict=True)]
    energy = torch.stack(energies).mean(0).detach()
    parts = [prediction.far_field, energy, prediction.distance.log()]
    z = [(part - mean) / spread for part, (mean, spread) in zip(parts, terms, strict=True)]
    assert torch.allclose(prediction.ood_score, z[0] + z[1] + (z[2] - 1).clamp_min(0), atol=1e-9)


def test_scaled_up_nothing_becomes_less_outlying(networks):
    """Logits that are large because an input was scaled up say nothing for it."""
    posterior = fitted(networks).tune(loader(1), progress=False)
    inside, _ = blobs(2)
    usual = posterior.predict(inside).ood_score
    for scale in (1e2, 1e4, 1e8, 1e16, 1e30):
        assert float((posterior.predict(scale * inside).ood_score > usual.median()).double().mean()) > 0.9


def test_a_trace_leaves_nothing_behind(networks):
    """A posterior that shares its components with one that was traced goes on to measure."""
    posterior = fitted(networks).tune(loader(1), progress=False)
    inside, _ = blobs(2)
    posterior(inside)
    torch.export.export(posterior.with_distance_exponent(1.0), (inside,), strict=False)
    assert type(posterior.predict(inside).distance) is torch.Tensor
    assert torch.isfinite(posterior.predict(inside).ood_score).all()


def test_other_weights_leave_usual_data_usual(networks):
    """A shift common to all logits of one network says nothing, whatever its weight."""
    moved = copy.deepcopy(networks[1])
    with torch.no_grad():
        moved[-1].bias.add_(50.0)
    posterior = fitted([networks[0], moved]).tune(loader(1), progress=False)
    inside, _ = blobs(1)
    assert abs(float(posterior.predict(inside).ood_score.mean())) < 1
    other = posterior.with_weights([0.99, 0.01])
    assert abs(float(other.predict(inside).ood_score.mean())) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_and_lengths_hold_over_the_whole_range_of_a_precision(dtype: torch.dtype) -> None:
    """Against exact arithmetic with scales taken apart; and a datum's are the same bits beside data of any length."""
    plain = torch.randn(5, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    scales = torch.tensor([largest / 8, largest**0.6, tiny**0.6, 1.0, tiny * 8], dtype=dtype)[:, None]
    directions, logs = distances.directions_and_log_lengths(plain * scales)
    exact, exact_scales = plain.double(), scales.double()
    lengths = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    coarse = 16 * torch.finfo(dtype).eps
    # The smallest numbers of a precision have few digits of their own.
    torch.testing.assert_close(directions.double()[:4], (exact / lengths)[:4], rtol=0, atol=coarse)
    torch.testing.assert_close(directions.double(), exact / lengths, rtol=0, atol=0.05)
    torch.testing.assert_close(logs.double(), (lengths.log() + exact_scales.log())[:, 0], rtol=coarse, atol=0.05)

    alone = distances.directions_and_log_lengths(plain)
    nothing = torch.zeros(1, 7, dtype=dtype)
    beside = distances.directions_and_log_lengths(
        torch.cat([plain, plain[:1] * largest / 8, plain[:1] * tiny, nothing])
    )
    assert torch.equal(alone[0], beside[0][:5])
    assert torch.equal(alone[1], beside[1][:5])
    assert torch.equal(beside[0][-1], nothing[0])
    assert distances.directions_and_log_lengths(plain[:0])[0].shape == (0, 7)
