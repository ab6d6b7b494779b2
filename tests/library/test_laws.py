"""Laws that hold for every structure: what must not matter does not, and limits are what they should be."""

import itertools

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import OptionError
from molaplace.sums import Sums
from tests.conftest import make_problem
from tests.library.problems import close, data, loader, networks

pytestmark = pytest.mark.filterwarnings("ignore:.*have no training data")


class TestSums:
    def test_adding_leaves_the_terms_as_they_were(self):
        batch = Sums({"gram": torch.ones(2, 2, dtype=torch.float64)}, 1)
        total = Sums({}) + batch
        total += batch
        assert float(batch.tensors["gram"][0, 0]) == 1


class TestWhatDoesNotMatter:
    def test_labels_matter_to_the_evidence_alone(self, structure):
        inputs, labels = data()
        with_labels = mola.fit(networks(1), loader(inputs, labels, 7), structure=structure)
        without = mola.fit(networks(1), list(inputs.split(7)), structure=structure)
        assert torch.equal(with_labels(inputs), without(inputs))
        with pytest.raises(OptionError, match="training labels"):
            without.log_evidence()

    @pytest.mark.parametrize("way", ["inference mode", "default device"])
    @pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")  # untrained networks
    def test_surroundings(self, structure, way):
        inputs, labels = data()
        members = networks(2)
        batches = loader(inputs, labels, 7)
        expected = mola.fit(members, batches, structure=structure).tune(rule="evidence").tune(batches)
        with torch.inference_mode() if way == "inference mode" else torch.device("meta"):
            actual = mola.fit(members, batches, structure=structure).tune(rule="evidence").tune(batches)
            probs = actual.predict(inputs).probs
        assert actual.prior_precision == expected.prior_precision
        assert torch.equal(probs, expected(inputs))


class TestLimits:
    @pytest.mark.parametrize("link", ["probit", "probit-centred", "mean-field", "mc"])
    def test_infinite_prior_precision_gives_the_ensemble(self, structure, link):
        inputs, labels = data()
        members = networks(3)
        posterior = mola.fit(members, loader(inputs, labels, 7), structure=structure, prior_precision=1e30, link=link)
        plain = mola.ensemble(members)(inputs)
        assert close(posterior(inputs), plain, 1e-10)
        assert close(plain, sum(torch.softmax(network(inputs), 1) for network in members).detach() / 3)

    def test_confidence_rises_with_the_prior_precision_towards_the_networks_own(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(2), loader(inputs, labels, 7), structure=structure)
        values = (1e-30, 1e-6, 1e-3, 1.0, 1e3)
        means = [float(posterior.with_prior_precision(p)(inputs).max(1).values.mean()) for p in values]
        plain = float(mola.ensemble(networks(2))(inputs).max(1).values.mean())
        assert all(low < high + 1e-9 for low, high in itertools.pairwise([*means, plain]))
        if structure != "diag":  # its variance has a floor: the Hessian's diagonal, of which no entry is 0
            assert means[0] == pytest.approx(0.25, abs=1e-3)


class TestMixing:
    def test_the_mixture_is_the_average_of_its_components(self, structure):
        """Also of networks of different width, with a bias and without."""
        inputs, labels = data()
        widths = ((9, True), (2, False), (6, True))
        weights = [0.2, 0.3, 0.5]
        members = [make_problem(seed, width=width, bias=bias).network for seed, (width, bias) in enumerate(widths)]
        mixture = mola.fit(members, loader(inputs, labels, 7), structure=structure, weights=weights)
        alone = [mola.fit(member, loader(inputs, labels, 7), structure=structure) for member in members]
        assert close(mixture(inputs), sum(w * posterior(inputs) for w, posterior in zip(weights, alone, strict=True)))
        assert close(mixture(inputs), mola.Mixture(alone, weights)(inputs))
        assert close(mixture.log_evidence(), torch.cat([posterior.log_evidence() for posterior in alone]))
        drawn = mixture.sample(20, generator=torch.Generator().manual_seed(0))
        assert [weight.shape[1] for weight in drawn.weights] == [(10, 2, 7)[k] for k in drawn.component.tolist()]


class TestUncertainty:
    def test_epistemic_part_of_one_component_against_many_draws(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(1), loader(inputs, labels, 7), structure=structure, prior_precision=0.5)
        drawn = posterior.sample(20_000, generator=torch.Generator().manual_seed(0)).weights
        features = torch.cat([posterior.networks[0][:-1](inputs), torch.ones(40, 1)], 1).detach()
        probs = torch.softmax(torch.einsum("np,scp->snc", features, drawn), 2)
        share = 1 - torch.special.entr(probs).sum(2).mean(0) / torch.special.entr(probs.mean(0)).sum(1)
        shares = []
        for seed in range(16):
            actual = posterior.predict(inputs, generator=torch.Generator().manual_seed(seed))
            shares.append(actual.epistemic / actual.entropy)
        assert close(sum(shares) / 16, share, 0.02)
        assert not torch.equal(shares[0], shares[1])  # each seed draws anew


class TestOutlierScore:
    def test_is_the_ranking_by_confidence_as_the_prior_vanishes(self):
        inputs, labels = data()
        posterior = mola.fit(networks(3), loader(inputs, labels, 7))
        tiny = 1 - posterior.with_prior_precision(1e-24)(inputs).max(1).values
        assert torch.equal(posterior.predict(inputs).ood_score.argsort(), tiny.argsort())

    def test_does_not_depend_on_the_prior_precision(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure)
        variant = posterior.with_prior_precision(1e-5)
        assert torch.equal(posterior.predict(inputs).ood_score, variant.predict(inputs).ood_score)

    def test_ignores_the_length_of_the_features(self, structure):
        network = nn.Sequential(nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False))
        inputs, labels = data()
        posterior = mola.fit(network, loader(inputs, labels, 7), structure=structure)
        assert close(posterior.predict(inputs).ood_score, posterior.predict(1e6 * inputs).ood_score, 1e-9)

    def test_rises_with_distance_from_the_data_in_feature_space(self, structure):
        """Features never seen in training: the same logits over a longer Mahalanobis norm."""
        head = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            head.weight[:, 3] = 0  # the fourth feature changes no logit
        inputs = torch.randn(500, 4) * torch.tensor([1.0, 1.0, 1.0, 0.01])
        posterior = mola.fit(head, list(inputs.split(100)), structure=structure)
        odd = inputs[:20].clone()
        odd[:, 3] = 5.0
        plain = posterior.predict(inputs[:20])
        outlying = posterior.predict(odd)
        assert torch.equal(plain.label, outlying.label)
        assert bool((outlying.ood_score > plain.ood_score).all())
