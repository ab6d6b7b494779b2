"""Laws that hold for every structure: what must not matter does not, and limits are what they should be."""

import itertools

import pytest
import torch
from torch import nn

import mola
from mola.laplace import STRUCTURES as KNOWN
from mola.likelihood import CATEGORICAL, OutputCurvature
from tests.conftest import CLOSED_FORM_LINKS, make_problem


def networks(count, classes=4):
    return [make_problem(seed=seed, classes=classes).network for seed in range(count)]


def data(seed=9, count=40, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randint(classes, (count,), generator=generator)


def loader(inputs, labels, size):
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def close(first, second, tolerance=1e-12):
    return float((first - second).abs().max()) <= tolerance


def factors(posterior):
    return [component.curvature.factors for component in posterior.components]


class TestWhatDoesNotMatter:
    def test_batch_size(self, structure):
        inputs, labels = data()
        posteriors = [mola.fit(networks(2), loader(inputs, labels, size), structure=structure) for size in (1, 7, 40)]
        for posterior in posteriors[1:]:
            assert close(posterior(inputs), posteriors[0](inputs))
            assert close(posterior.log_evidence(), posteriors[0].log_evidence(), 1e-9)

    def test_order(self, structure):
        inputs, labels = data()
        order = torch.randperm(40)
        straight = mola.fit(networks(2), loader(inputs, labels, 7), structure=structure)
        shuffled = mola.fit(networks(2), loader(inputs[order], labels[order], 7), structure=structure)
        assert close(straight(inputs), shuffled(inputs))

    def test_sharding(self, structure):
        inputs, labels = data()
        whole = factors(mola.fit(networks(1), loader(inputs, labels, 7), structure=structure))[0]
        shards = [
            factors(mola.fit(networks(1), loader(inputs[part], labels[part], 7), structure=structure))[0]
            for part in (slice(0, 5), slice(5, 30), slice(30, 40))
        ]
        for order in itertools.permutations(shards):
            left, right = (order[0] + order[1]) + order[2], order[0] + (order[1] + order[2])
            for merged in (left, right):
                assert merged.count == whole.count
                assert abs(merged.log_likelihood - whole.log_likelihood) < 1e-10
                for name, tensor in whole.tensors().items():
                    assert close(merged.tensors()[name] / tensor.abs().max(), tensor / tensor.abs().max())

    def test_rounding_of_the_machine_that_saved(self):
        """Kronecker factors whose diagonal was rounded otherwise are still a softmax's, and add up with others."""
        problem, kron = make_problem(), KNOWN["kron"]()
        features = problem.features()
        made = kron.sums(features, CATEGORICAL.curvature(features @ problem.weights.T), None)
        saved = {name: tensor.clone() for name, tensor in made.saved().items()}
        saved["output"][1, 1] *= 1 + 2**-52
        restored = kron.restore(made.count, None, saved)
        assert restored.separate is None
        for both in (made + restored, restored + made):
            assert close(both.output, 2 * made.output)

    def test_order_of_factors_of_which_one_lacks_a_part(self):
        problem, kron = make_problem(), KNOWN["kron"]()
        features = problem.features()
        coupled = kron.sums(features, CATEGORICAL.curvature(features @ problem.weights.T), None)
        apart = kron.sums(features, OutputCurvature(separate=torch.rand(40, 4), coupling=None), None)
        for both in (coupled + apart, apart + coupled):
            assert close(both.output, coupled.output + apart.output)

    def test_batches_at_prediction(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(2), loader(inputs, labels, 7), structure=structure)
        whole, parts = posterior.predict(inputs), posterior.predict(loader(inputs, labels, 7))
        for name in ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance"):
            assert close(getattr(whole, name), getattr(parts, name)), name

    def test_order_of_components(self, structure):
        inputs, labels = data()
        members = networks(3)
        forward = mola.fit(members, loader(inputs, labels, 7), structure=structure, weights=[0.2, 0.3, 0.5])
        backward = mola.fit(members[::-1], loader(inputs, labels, 7), structure=structure, weights=[0.5, 0.3, 0.2])
        assert close(forward(inputs), backward(inputs))

    def test_labels_matter_to_the_evidence_alone(self, structure):
        inputs, labels = data()
        with_labels = mola.fit(networks(1), loader(inputs, labels, 7), structure=structure)
        without = mola.fit(networks(1), list(inputs.split(7)), structure=structure)
        assert torch.equal(with_labels(inputs), without(inputs))
        with pytest.raises(mola.OptionError, match="training labels"):
            without.log_evidence()


class TestLimits:
    @pytest.mark.parametrize("link", ["probit", "probit-centered", "mean-field", "mc"])
    def test_infinite_prior_precision_gives_the_ensemble(self, structure, link):
        inputs, labels = data()
        members = networks(3)
        posterior = mola.fit(members, loader(inputs, labels, 7), structure=structure, prior_precision=1e30, link=link)
        plain = mola.ensemble(members)(inputs)
        assert close(posterior(inputs), plain, 1e-10)
        assert close(plain, sum(torch.softmax(network(inputs), 1) for network in members).detach() / 3)

    def test_one_network_alone_is_its_softmax(self):
        inputs, _ = data()
        network = networks(1)[0]
        assert torch.equal(mola.ensemble(network)(inputs), torch.softmax(network(inputs), 1).detach())

    def test_vanishing_prior_precision_forgets(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(2), loader(inputs, labels, 7), structure=structure, prior_precision=1e-30)
        confidence = posterior(inputs).max(1).values
        if structure == "diag":  # its variance has a floor: the Hessian's diagonal, of which no entry is 0
            assert float(confidence.mean()) < float(mola.ensemble(networks(2))(inputs).max(1).values.mean())
        else:
            assert close(confidence, torch.full((40,), 0.25), 1e-3)

    def test_confidence_rises_with_the_prior_precision_towards_the_networks_own(self, structure):
        """A weaker prior leaves more variance: lambda -> 0 is unsure, lambda -> infinity is the plain ensemble, never above."""
        inputs, labels = data()
        posterior = mola.fit(networks(2), loader(inputs, labels, 7), structure=structure)
        means = [float(posterior.with_prior_precision(p)(inputs).max(1).values.mean()) for p in (1e-6, 1e-3, 1.0, 1e3)]
        plain = float(mola.ensemble(networks(2))(inputs).max(1).values.mean())
        assert all(low < high for low, high in itertools.pairwise([*means, plain]))

    def test_more_data_means_less_variance(self, structure):
        inputs, labels = data(count=400)
        few = mola.fit(networks(1), loader(inputs[:40], labels[:40], 40), structure=structure)
        many = mola.fit(networks(1), loader(inputs, labels, 40), structure=structure)
        assert float(many.predict(inputs).logit_variance.mean()) < float(few.predict(inputs).logit_variance.mean())


class TestMixing:
    @pytest.mark.parametrize("link", [*CLOSED_FORM_LINKS, "mc"])
    def test_equal_components_are_one(self, structure, link):
        inputs, labels = data()
        network = networks(1)[0]
        one = mola.fit(network, loader(inputs, labels, 7), structure=structure, link=link)
        three = mola.fit([network] * 3, loader(inputs, labels, 7), structure=structure, link=link)
        first, second = one.predict(inputs), three.predict(inputs)
        for name in ("probs", "mutual_information", "ood_score"):
            assert close(getattr(first, name), getattr(second, name)), name
        if link == "probit":
            assert close(one.confidence_bound(inputs), three.confidence_bound(inputs))

    def test_the_mixture_is_the_average_of_its_components(self, structure):
        inputs, labels = data()
        members = networks(3)
        weights = [0.2, 0.3, 0.5]
        mixture = mola.fit(members, loader(inputs, labels, 7), structure=structure, weights=weights)
        alone = [mola.fit(member, loader(inputs, labels, 7), structure=structure) for member in members]
        assert close(mixture(inputs), sum(w * one(inputs) for w, one in zip(weights, alone, strict=True)))
        assert close(mixture(inputs), mola.Mixture(alone, weights)(inputs))
        assert close(mixture.log_evidence(), torch.cat([one.log_evidence() for one in alone]))

    def test_networks_of_different_width_mix(self, structure):
        inputs, labels = data()
        wide = make_problem(width=9).network
        narrow = make_problem(width=2, bias=False).network
        mixture = mola.fit([wide, narrow], loader(inputs, labels, 7), structure=structure)
        alone = [mola.fit(member, loader(inputs, labels, 7), structure=structure) for member in (wide, narrow)]
        assert close(mixture(inputs), (alone[0](inputs) + alone[1](inputs)) / 2)
        drawn = mixture.sample(20, generator=torch.Generator().manual_seed(0))
        assert [weights.shape[1] for weights in drawn.weights] == [
            10 if k == 0 else 2 for k in drawn.component.tolist()
        ]


class TestUncertainty:
    def test_parts_add_up_and_are_not_negative(self, structure):
        inputs, labels = data()
        for link in ("probit", "mean-field", "mc"):
            prediction = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure, link=link).predict(
                inputs
            )
            assert close(prediction.aleatoric + prediction.epistemic, prediction.total)
            assert bool((prediction.aleatoric >= 0).all())
            assert bool((prediction.epistemic >= 0).all())

    def test_a_single_certain_network_has_no_epistemic_part(self):
        inputs, _ = data()
        assert float(mola.ensemble(networks(1)).predict(inputs).epistemic.max()) < 1e-14

    def test_an_ensemble_s_epistemic_part_is_its_mutual_information(self):
        inputs, _ = data()
        members = networks(3)
        probs = torch.stack([torch.softmax(member(inputs), 1) for member in members]).detach()
        expected = torch.special.entr(probs.mean(0)).sum(1) - torch.special.entr(probs).sum(2).mean(0)
        assert close(mola.ensemble(members).predict(inputs).epistemic, expected)

    def test_epistemic_part_of_one_component_against_many_draws(self, structure, monkeypatch):
        inputs, labels = data()
        posterior = mola.fit(networks(1), loader(inputs, labels, 7), structure=structure, prior_precision=0.5)
        drawn = posterior.sample(20_000, generator=torch.Generator().manual_seed(0)).weights
        features = torch.cat([posterior.networks[0][:-1](inputs), torch.ones(40, 1)], 1).detach()
        probs = torch.softmax(torch.einsum("np,scp->snc", features, drawn), 2)
        mean = probs.mean(0)
        share = 1 - torch.special.entr(probs).sum(2).mean(0) / torch.special.entr(mean).sum(1)
        monkeypatch.setattr("mola.uncertainty.SPREAD_DRAWS", 10_000)
        found = posterior.predict(inputs)
        assert close(found.epistemic / found.total, share, 0.015)


class TestOutlierScore:
    def test_is_the_ranking_by_confidence_as_the_prior_vanishes(self):
        """PAPER: at lambda near 0 the largest probability of Algorithm 1's mixture ranks as the closed form does."""
        inputs, labels = data()
        posterior = mola.fit(networks(3), loader(inputs, labels, 7))
        score = posterior.predict(inputs).ood_score
        tiny = 1 - posterior.with_prior_precision(1e-24)(inputs).max(1).values
        assert torch.equal(score.argsort(), tiny.argsort())

    def test_does_not_depend_on_the_prior_precision(self, structure):
        inputs, labels = data()
        posterior = mola.fit(networks(3), loader(inputs, labels, 7), structure=structure)
        moved = posterior.with_prior_precision(1e-5)
        assert torch.equal(posterior.predict(inputs).ood_score, moved.predict(inputs).ood_score)

    def test_ignores_the_length_of_the_features(self, structure):
        network = nn.Sequential(nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False))
        inputs, labels = data()
        posterior = mola.fit(network, loader(inputs, labels, 7), structure=structure)
        near, far = posterior.predict(inputs).ood_score, posterior.predict(1e6 * inputs).ood_score
        assert close(near, far, 1e-9)

    def test_rises_with_distance_from_the_data_in_feature_space(self, structure):
        """Features never seen in training: the same logits over a longer Mahalanobis norm."""
        head = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            head.weight[:, 3] = 0  # the fourth feature changes no logit
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(500, 4, generator=generator) * torch.tensor([1.0, 1.0, 1.0, 0.01])
        posterior = mola.fit(head, list(inputs.split(100)), structure=structure)
        odd = inputs[:20].clone()
        odd[:, 3] = 5.0
        plain, outlying = posterior.predict(inputs[:20]), posterior.predict(odd)
        assert torch.equal(plain.label, outlying.label)
        assert bool((outlying.ood_score > plain.ood_score).all())

    def test_an_ensemble_s_score_is_named(self):
        inputs, _ = data()
        prediction = mola.ensemble(networks(2)).predict(inputs)
        assert prediction.ood_score_name == "max-probability"
        assert close(prediction.ood_score, 1 - prediction.confidence)


class TestPrecision:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
    )
    @pytest.mark.parametrize("link", ["probit", "probit-centered", "mean-field", "bridge"])
    def test_low_precision_networks_give_the_float64_answer(self, structure, link, dtype, tolerance):
        inputs, labels = data(count=200)
        members = networks(2)
        # Inputs and weights that the low precision holds exactly: what differs is the arithmetic alone.
        inputs = inputs.to(torch.bfloat16).double()
        for member in members:
            for parameter in member.parameters():
                parameter.data = parameter.data.to(torch.bfloat16).double()
        exact = mola.fit(members, loader(inputs, labels, 50), structure=structure, link=link, prior_precision=0.1)
        expected = exact(inputs)
        low = [member.to(dtype) for member in members]
        small = inputs.to(dtype)
        fitted = mola.fit(low, loader(small, labels, 50), structure=structure, link=link, prior_precision=0.1)
        found = fitted(small)
        assert found.dtype == torch.float32
        assert close(found.double(), expected, tolerance)

    @pytest.mark.parametrize("link", [*CLOSED_FORM_LINKS, "mc"])
    def test_float32_where_the_data_leave_directions_free(self, structure, link):
        """Features that span a part of their space, along no axis: there the covariance is the prior's, 1 / lambda."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(1000, 8, generator=generator) @ torch.randn(8, 24, generator=generator)
        inputs = inputs.float().double()
        head = nn.Linear(24, 5).float().double()
        labels = torch.randint(5, (1000,), generator=generator)
        settings = {"structure": structure, "link": link, "prior_precision": 1e-5}
        exact = mola.fit(head, loader(inputs, labels, 100), **settings)(inputs)
        head.float()
        found = mola.fit(head, loader(inputs.float(), labels, 100), **settings)(inputs.float())
        assert close(found.double(), exact, 1e-3 if link == "mc" else 1e-4)

    def test_autocast_is_for_the_networks_alone(self, structure):
        inputs, labels = data(count=200)
        network = networks(1)[0].float()
        posterior = mola.fit(network, loader(inputs.float(), labels, 50), structure=structure, prior_precision=1e-4)
        plain = posterior.predict(inputs.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = posterior.predict(inputs.float())
        assert rounded.probs.dtype == torch.float32
        assert close(rounded.probs, plain.probs, 0.03)
        assert float(torch.corrcoef(torch.stack([rounded.ood_score, plain.ood_score]))[0, 1]) > 0.99

    @pytest.mark.parametrize("way", ["inference mode", "default device"])
    def test_surroundings_do_not_matter(self, structure, way):
        inputs, labels = data()
        members = networks(2)
        expected = mola.fit(members, loader(inputs, labels, 7), structure=structure).tune(rule=mola.Evidence())
        with torch.inference_mode() if way == "inference mode" else torch.device("meta"):
            found = mola.fit(members, loader(inputs, labels, 7), structure=structure).tune(rule=mola.Evidence())
            probs = found.predict(inputs).probs
        assert found.prior_precision == expected.prior_precision
        assert torch.equal(probs, expected(inputs))

    def test_float32_with_nearly_singular_features(self, structure):
        """Features that are almost linearly dependent, and one that never fires."""
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(1000, 5, generator=generator)
        inputs = torch.cat(
            [base, base[:, :1] + 1e-4 * torch.randn(1000, 1, generator=generator), torch.zeros(1000, 1)], 1
        )
        head = nn.Linear(7, 10)
        labels = torch.randint(10, (1000,), generator=generator)
        inputs = inputs.float().double()
        head.to(torch.float32).to(torch.float64)
        exact = mola.fit(head, loader(inputs, labels, 100), structure=structure, prior_precision=1e-6)(inputs)
        head.float()
        found = mola.fit(head, loader(inputs.float(), labels, 100), structure=structure, prior_precision=1e-6)(
            inputs.float()
        )
        assert close(found.double(), exact, 1e-4)
