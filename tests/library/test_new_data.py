"""New data: sums are added and subtracted, so that the result is the posterior over the remaining data."""

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError
from molaplace.likelihoods import Gaussian
from molaplace.structures import Kron
from tests.library.problems import blob_loader, close, data, loader, networks, relative, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*have no training data")


def batches(seed, count):
    inputs, labels = data(seed, count)
    return loader(inputs.double(), labels, 9)


BIG, SMALL, THIRD = (batches(seed, count) for seed, count in ((1, 60), (2, 25), (3, 15)))
QUERY = data(4, 30)[0].double()


def regression_loader(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return loader(inputs, torch.randn(count, 4, generator=generator, dtype=torch.float64), 8)


def binary_loader(seed, count):
    inputs, labels = data(seed, count)
    targets = nn.functional.one_hot(labels, 4).double()
    targets[::5, 1] = torch.nan
    return loader(inputs.double(), targets, 8)


CASES = {
    "categorical": (BIG, SMALL, THIRD),
    "bernoulli": tuple(binary_loader(seed, count) for seed, count in ((1, 60), (2, 25), (3, 15))),
    "gaussian": tuple(regression_loader(seed, count) for seed, count in ((1, 60), (2, 25), (3, 15))),
}


@pytest.fixture(params=tuple(CASES))
def case(request):
    return request.param, CASES[request.param]


def same_posterior(actual, expected, tolerance=1e-12):
    for component, other in zip(actual.components, expected.components, strict=True):
        sums = component.layer.sums
        others = other.layer.sums
        assert sums.count == others.count
        assert sums.log_likelihood == pytest.approx(others.log_likelihood, rel=tolerance, abs=tolerance)
        assert sums.tensors.keys() == others.tensors.keys()
        for name, tensor in sums.tensors.items():
            scale = float(others.tensors[name].abs().max()) or 1.0
            assert close(tensor / scale, others.tensors[name] / scale, tolerance), name
    prediction = actual.predict(QUERY)
    reference = expected.predict(QUERY)
    fields = (
        ("probs", "distance", "ood_score", "mutual_information")
        if actual.likelihood.classification
        else ("mean", "std")
    )
    for field in fields:
        assert relative(getattr(prediction, field), getattr(reference, field)) < 1e3 * tolerance, field
    torch.testing.assert_close(actual.log_evidence(), expected.log_evidence(), rtol=1e3 * tolerance, atol=1e-9)


class TestLaws:
    def test_adding_data_equals_a_fit_to_all_data(self, structure, case):
        likelihood, (first, second, _) = case
        expected = mola.fit(networks(2), [*first, *second], structure=structure, likelihood=likelihood)
        actual = mola.fit(networks(2), first, structure=structure, likelihood=likelihood).add(second)
        same_posterior(actual, expected)

    def test_sites_equal_one_fit_in_any_order_and_grouping(self, structure, case):
        likelihood, parts = case
        expected = mola.fit(
            networks(2), [batch for part in parts for batch in part], structure=structure, likelihood=likelihood
        )
        first, second, third = (
            mola.fit(networks(2), part, structure=structure, likelihood=likelihood) for part in parts
        )
        for actual in (first + second + third, first + (second + third), third + first + second):
            same_posterior(actual, expected)

    def test_adding_and_then_removing_is_the_identity(self, structure, case):
        likelihood, (first, second, _) = case
        posterior = mola.fit(networks(2), first, structure=structure, likelihood=likelihood)
        same_posterior(posterior.add(second).without(second), posterior, 1e-10)

    def test_removing_equals_a_fit_without_the_data(self, structure, case):
        likelihood, (first, second, _) = case
        posterior = mola.fit(networks(2), [*first, *second], structure=structure, likelihood=likelihood)
        same_posterior(
            posterior.without(second), mola.fit(networks(2), first, structure=structure, likelihood=likelihood), 1e-10
        )

    def test_data_without_labels(self, structure):
        first, second = ([inputs for inputs, _ in part] for part in (BIG, SMALL))
        expected = mola.fit(networks(1), [*first, *second], structure=structure)(QUERY)
        assert close(mola.fit(networks(1), first, structure=structure).add(second)(QUERY), expected)

    def test_without_distances(self):
        posterior = mola.fit(networks(1), BIG, distances=False).add(SMALL)
        assert not posterior.has_distances
        assert close(posterior(QUERY), mola.fit(networks(1), BIG + SMALL, distances=False)(QUERY))

    def test_the_posterior_itself_does_not_change(self):
        posterior = mola.fit(networks(1), BIG)
        before = {name: tensor.clone() for name, tensor in posterior.components[0].layer.sums.tensors.items()}
        posterior.add(SMALL)
        posterior.without(BIG[:1])
        for name, tensor in posterior.components[0].layer.sums.tensors.items():
            assert torch.equal(tensor, before[name])

    def test_evidence_weights_follow_the_data(self):
        actual = mola.fit(networks(2), BIG, weights="evidence").add(SMALL)
        assert close(actual.weights, mola.fit(networks(2), BIG + SMALL, weights="evidence").weights, 1e-9)

    def test_checkpoints_resume(self, tmp_path):
        def stopped():
            yield from SMALL[:2]
            raise InterruptedError

        posterior = mola.fit(networks(1), BIG)
        with pytest.raises(InterruptedError):
            posterior.add(stopped(), checkpoint=tmp_path / "pass", checkpoint_every=1)
        assert (tmp_path / "pass").exists()
        actual = posterior.add(SMALL, checkpoint=tmp_path / "pass", checkpoint_every=1)
        assert torch.equal(actual(QUERY), posterior.add(SMALL)(QUERY))
        assert not (tmp_path / "pass").exists()


def pixels(likelihood, seed, count, share):
    """Images of which a share of the pixels is labelled."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (count, 4, 5), generator=generator)
    labels[torch.rand(count, 4, 5, generator=generator) > share] = -100
    if likelihood == "bernoulli":
        known = (labels >= 0).double()[:, None]
        values = nn.functional.one_hot(labels.clamp_min(0), 4).double().movedim(-1, 1)
        labels = torch.where(known.bool(), values, torch.nan)
    elif likelihood == "gaussian":  # every pixel has targets, so the share differs by the size of the images
        images = images[:, :, : 1 + round(3 * share)]
        labels = torch.randn(count, 4, *images.shape[2:], generator=generator, dtype=torch.float64)
    return loader(images, labels, 4)


class TestAveragedPositions:
    """positions="average": an input is one datum, however many of its positions are labelled, in whatever data it was."""

    @pytest.fixture(params=["categorical", "bernoulli", "gaussian"])
    def parts(self, request):
        torch.manual_seed(0)
        self.networks = [
            nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 1)).double() for _ in range(2)
        ]
        self.likelihood = request.param
        return [pixels(self.likelihood, seed, 12 - seed, share) for seed, share in ((1, 0.9), (2, 0.2), (3, 0.5))]

    def fit(self, structure, *parts):
        data = [batch for part in parts for batch in part]
        options = {"structure": structure, "likelihood": self.likelihood, "positions": "average", "progress": False}
        return mola.fit(self.networks, data, **options)

    def same(self, actual, expected):
        query = torch.randn(3, 3, 4, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        prediction = actual.predict(query)
        reference = expected.predict(query)
        for field in (
            "distance",
            "epistemic",
            *(("probs",) if self.likelihood != "gaussian" else ("mean", "variance")),
        ):
            assert relative(getattr(prediction, field), getattr(reference, field)) < 1e-9, field
        assert relative(actual.log_evidence(), expected.log_evidence()) < 1e-9
        if self.likelihood == "gaussian":
            assert relative(actual.noise, expected.noise) < 1e-10

    def test_adding_removing_and_merging_are_exact(self, structure, parts, tmp_path):
        first, second, third = parts
        everything = self.fit(structure, *parts)
        added = self.fit(structure, first).add(second, progress=False).add(third, progress=False)
        self.same(added, everything)
        self.same(self.fit(structure, third) + self.fit(structure, first) + self.fit(structure, second), everything)
        remaining = self.fit(structure, first, third)
        self.same(everything.without(second, progress=False), remaining)
        self.same(added.without(second, progress=False), remaining)
        loaded = mola.load(everything.save(tmp_path / "posterior"), self.networks)
        self.same(loaded, everything)
        self.same(loaded.without(second, progress=False), remaining)

    def test_the_weight_is_that_of_the_inputs(self, structure, parts):
        """The same images with every pixel labelled twice, as with twice the resolution, are no more data."""
        finer = [(images.repeat_interleave(2, -1), labels.repeat_interleave(2, -1)) for images, labels in parts[0]]
        self.networks = [nn.Sequential(nn.Conv2d(3, 6, 1), nn.Tanh(), nn.Conv2d(6, 4, 1)).double() for _ in range(2)]
        self.same(self.fit(structure, finer), self.fit(structure, parts[0]))


class TestNoise:
    @pytest.mark.parametrize(
        "likelihood", [Gaussian(shared=True), Gaussian(location=0.5, scale=2.0), Gaussian(noise=0.7)]
    )
    def test_estimates_follow_the_data(self, likelihood):
        first, second, _ = CASES["gaussian"]
        expected = mola.fit(networks(2), first + second, likelihood=likelihood)
        actual = mola.fit(networks(2), first, likelihood=likelihood).add(second)
        assert relative(actual.noise, expected.noise) < 1e-12
        merged = mola.fit(networks(2), first, likelihood=likelihood) + mola.fit(
            networks(2), second, likelihood=likelihood
        )
        assert relative(merged.noise, expected.noise) < 1e-12

    def test_a_factor_chosen_by_tuning_is_kept(self):
        first, second, third = CASES["gaussian"]
        posterior = mola.fit(networks(2), first, likelihood="gaussian")
        tuned = posterior.tune(third, progress=False)
        factor = tuned.noise / posterior.noise
        assert float((factor - 1).abs().max()) > 1e-3
        assert relative(tuned.add(second).noise, factor * posterior.add(second).noise) < 1e-12


class TestStale:
    def test_tuning_is_kept_and_marked_until_the_next(self, tmp_path):
        members = [trained(seed) for seed in range(2)]
        validation = blob_loader(5)
        tuned = mola.fit(members, blob_loader(1), validation)
        posterior = tuned.add(blob_loader(2))
        assert posterior.stale
        assert not tuned.stale
        assert posterior.settings == tuned.settings
        assert posterior.reference == tuned.reference
        assert "stale" in repr(posterior)
        assert "stale" not in repr(tuned)
        loaded = mola.load(posterior.save(tmp_path / "posterior"), members)
        assert loaded.stale
        assert torch.equal(loaded(QUERY), posterior(QUERY))
        fresh = posterior.tune(validation)
        assert not fresh.stale
        expected = mola.fit(members, blob_loader(1) + blob_loader(2), validation)
        torch.testing.assert_close(fresh(QUERY), expected(QUERY), rtol=1e-6, atol=1e-8)
        assert fresh.reference.scales[0].distance == pytest.approx(expected.reference.scales[0].distance)

    def test_a_posterior_that_was_not_tuned_is_not_stale_and_its_reference_follows(self, tmp_path):
        members = networks(2)
        posterior = mola.load(mola.fit(members, BIG).save(tmp_path / "posterior"), members).add(SMALL)
        assert not posterior.stale
        scales = mola.fit(members, BIG + SMALL).reference.scales
        for actual, expected in zip(posterior.reference.scales, scales, strict=True):
            assert actual == pytest.approx(expected)

    def test_tuning_by_evidence_replaces_a_stale_reference(self):
        members = [trained(0)]
        posterior = mola.fit(members, blob_loader(1), blob_loader(5)).add(blob_loader(2)).tune(rule="evidence")
        assert not posterior.stale
        assert posterior.reference == mola.fit(members, blob_loader(1)).add(blob_loader(2)).reference


class TestRefused:
    def test_data_that_were_never_there(self, structure):
        posterior = mola.fit(networks(1), BIG, structure=structure)
        with pytest.raises(DataError, match="were not all among"):
            posterior.without(BIG + SMALL)  # more than all
        with pytest.raises(DataError, match="were not all among"):
            posterior.without(BIG)
        inputs, labels = BIG[0]
        with pytest.raises(DataError, match="class 0 would have"):
            posterior.without([(inputs, torch.zeros_like(labels))] * 2)

    def test_features_that_are_too_long_for_what_remains(self, structure):
        """Counts would be right; only the matrices show it."""
        inputs, labels = data(1, 60)
        posterior = mola.fit(nn.Linear(3, 4), [(inputs, labels)], structure=structure)
        with pytest.raises(DataError, match=r"negative|longer"):
            posterior.without([(40 * inputs[:3], labels[:3])])

    def test_directions_without_data(self, structure):
        """Sums of squares would be right; only the matrix of directions shows it."""
        inputs = torch.tensor([[3.0, 3.0], [-3.0, -3.0]]).repeat(10, 1)
        labels = torch.arange(20) // 2 % 2
        posterior = mola.fit(nn.Linear(2, 2), [(inputs, labels)], structure=structure)
        with pytest.raises(DataError, match="negative eigenvalue"):
            posterior.without([(torch.tensor([[3.0, -3.0], [-3.0, 3.0]]), labels[:2])])

    @pytest.mark.parametrize("likelihood", ["gaussian", Gaussian(noise=1.0)])
    def test_targets_that_were_never_there(self, likelihood):
        first, _, _ = CASES["gaussian"]
        posterior = mola.fit(networks(1), first, likelihood=likelihood)
        inputs, targets = first[0]
        with pytest.raises(DataError, match="sum of squares"):
            posterior.without([(inputs, 100 * targets)])

    def test_other_networks_structures_likelihoods_and_options(self):
        posterior = mola.fit(networks(2), BIG)
        others = {
            "weights": mola.fit(networks(3)[1:], BIG),
            "2 networks": mola.fit(networks(1), BIG),
            "structure": mola.fit(networks(2), BIG, structure="diag"),
            "likelihood": mola.fit(networks(2), CASES["bernoulli"][0], likelihood="bernoulli"),
            "distances": mola.fit(networks(2), BIG, distances=False),
            "last layer": mola.fit(networks(2), BIG, ignore_index=-1),
        }
        for difference, other in others.items():
            with pytest.raises(OptionError, match=difference):
                posterior + other
        with pytest.raises(OptionError, match="weights"):
            posterior + mola.fit(networks(2)[::-1], BIG)
        with pytest.raises(OptionError, match="likelihood"):
            mola.fit(networks(1), CASES["gaussian"][0], likelihood="gaussian") + mola.fit(
                networks(1), CASES["gaussian"][0], likelihood=Gaussian(noise=1.0)
            )
        with pytest.raises(TypeError):
            posterior + 1

    def test_a_network_of_which_only_the_features_differ(self):
        other = networks(1)
        with torch.no_grad():
            other[0][0].weight[0, 0] += 1
        with pytest.raises(OptionError, match="weights"):
            mola.fit(networks(1), BIG) + mola.fit(other, BIG)

    def test_a_body_that_has_changed(self):
        """The head is the same, but the features are not, so that their sums do not belong together."""
        members = networks(2)
        posterior = mola.fit(members, BIG)
        with torch.no_grad():
            members[1][0].weight.mul_(1.01)
        later = mola.fit(members, SMALL)
        for change in (lambda: posterior.add(SMALL), lambda: posterior.without(BIG[:1])):
            with pytest.raises(OptionError, match=r"networks\[1\].*have changed"):
                change()
        with pytest.raises(OptionError, match="weights"):
            posterior + later
        later.add(BIG)

    def test_a_body_that_has_changed_since_it_was_loaded(self, tmp_path):
        members = networks(1)
        posterior = mola.load(mola.fit(members, BIG).save(tmp_path / "posterior"), members)
        posterior.add(SMALL)
        with torch.no_grad():
            members[0][0].bias.add_(0.1)
        with pytest.raises(OptionError, match="have changed"):
            posterior.add(SMALL)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_a_rare_class_that_is_removed_twice(self, dtype):
        """Class counts are whole numbers in every precision; features are rounded."""
        inputs, labels = data(1, 2000, 3)
        labels[:3] = 3
        inputs = inputs.to(dtype)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
        posterior = mola.fit(network, loader(inputs, labels, 64), progress=False)
        rare = [(inputs[:3], labels[:3])]
        once = posterior.without(rare, progress=False)
        with pytest.raises(DataError, match="class 3 would have -3 data"):
            once.without(rare, progress=False)
        with pytest.raises(DataError, match="class 3"):
            posterior.without(rare + rare[:1], progress=False)
        for size in (1, 7, 300):  # other batch sizes round features differently
            posterior.without(loader(inputs[:700], labels[:700], size), progress=False)

    def test_a_head_that_has_changed(self):
        members = networks(1)
        posterior = mola.fit(members, BIG)
        with torch.no_grad():
            members[0][-1].weight.mul_(2)
        with pytest.raises(OptionError, match="have changed"):
            posterior.add(SMALL)

    def test_running_averages(self):
        posterior = mola.fit(networks(1), BIG, structure=Kron(running_average=0.9))
        for change in (lambda: posterior.add(SMALL), lambda: posterior.without(BIG[:1]), lambda: posterior + posterior):
            with pytest.raises(OptionError, match="order of the data"):
                change()

    def test_labels_and_no_labels(self):
        posterior = mola.fit(networks(1), BIG)
        unlabelled = [inputs for inputs, _ in SMALL]
        with pytest.raises(DataError, match="without labels"):
            posterior.add(unlabelled)
        with pytest.raises(DataError, match="without labels"):
            mola.fit(networks(1), unlabelled).add(BIG)

    def test_plain_ensembles_have_no_sums(self):
        with pytest.raises(OptionError, match="plain ensemble"):
            mola.ensemble(networks(1)).add(BIG)
