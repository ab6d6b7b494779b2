"""Networks in low precision, and features of any size: against the same weights in float64."""

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.likelihoods import Bernoulli, Categorical
from molaplace.links import Bridge, CentredProbit, MeanField, MonteCarlo, Probit
from molaplace.structures.distance import ClassDistance, distance_sums
from molaplace.sums import Sums
from tests.closeness import assert_close
from tests.conftest import CLOSED_FORM_LINKS, STRUCTURES
from tests.library.problems import close, data, loader, networks

LINKS = {
    "probit": Probit(),
    "probit-centred": CentredProbit(),
    "mean-field": MeanField(),
    "bridge": Bridge(),
    "normalised bridge": Bridge(normalised=True),
    "mc": MonteCarlo(40),
    "mc over weights": MonteCarlo(40, "weights"),
}
SCALES = (0.0, 1.0, 1e-8, 1e-19, 1e-23, 1e-30, 1e-37, 1e6, 1e12, 1e19, 1e25, 1e37)

pytestmark = pytest.mark.filterwarnings("ignore:.*have no training data")


def head(*, bias, seed=0, classes=4, width=6, dtype=torch.float32):
    """A network whose features are its inputs, with weights that float32 holds."""
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Identity(), nn.Linear(width, classes, bias=bias))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).float())
    return network.to(dtype)


def rows(count=5, seed=5, width=6):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def pair(structure, *, bias, size=1.0, count=2, **options):
    """Posteriors of the same networks in float32 and in float64, fitted on the same numbers."""
    inputs = size * rows(50, seed=1)
    labels = torch.arange(50) % 4
    return [
        mola.fit(
            [head(bias=bias, seed=seed, dtype=dtype) for seed in range(count)],
            [(inputs.to(dtype), labels)],
            structure=structure,
            progress=False,
            **options,
        )
        for dtype in (torch.float32, torch.float64)
    ]


def check(posteriors, link, inputs, position):
    """Values to 1e-5 of the largest, differences to 1e-4."""
    actual, exact = (
        posterior.with_link(link).predict(inputs.to(dtype))
        for posterior, dtype in zip(posteriors, (torch.float32, torch.float64), strict=True)
    )
    assert torch.equal(posteriors[0].with_link(link)(inputs), actual.probs)
    for name, tolerance in (("probs", 1e-5), ("entropy", 1e-5), ("mutual_information", 1e-4), ("ood_score", 1e-4)):
        value = getattr(actual, name)
        expected = getattr(exact, name)
        assert value.dtype == torch.float32, name
        assert bool(torch.isfinite(value).all()), (name, position)
        assert float((value - expected).abs().max() / (1 + expected.abs().max())) < tolerance, (name, position)
    assert actual.logit_mean.dtype == actual.logit_variance.dtype == torch.float32


class TestLowPrecision:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
    )
    @pytest.mark.parametrize("link", CLOSED_FORM_LINKS)
    def test_networks_in_low_precision_give_the_float64_answer(self, structure, link, dtype, tolerance):
        inputs, labels = data(count=200)
        members = networks(2)
        # Inputs and weights that the low precision holds exactly: what differs is the arithmetic alone.
        inputs = inputs.to(torch.bfloat16).double()
        for member in members:
            for parameter in member.parameters():
                parameter.data = parameter.data.to(torch.bfloat16).double()
        options = {"structure": structure, "link": link, "prior_precision": 0.1}
        expected = mola.fit(members, loader(inputs, labels, 50), **options)(inputs)
        low = [member.to(dtype) for member in members]
        small = inputs.to(dtype)
        actual = mola.fit(low, loader(small, labels, 50), **options)(small)
        assert actual.dtype == torch.float32
        assert close(actual.double(), expected, tolerance)

    @pytest.mark.parametrize("kind", ["combinations of 8", "sizes from 1e-6 to 100", "almost constant", "certain"])
    @pytest.mark.parametrize("prior", [1e-6, 1.0])
    def test_features_near_singularity(self, structure, kind, prior):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(500, 24, generator=generator)
        if kind == "combinations of 8":
            inputs = inputs[:, :8] @ torch.randn(8, 24, generator=generator)
        elif kind == "sizes from 1e-6 to 100":
            inputs = inputs * torch.logspace(-6, 2, 24)
        elif kind == "almost constant":
            inputs = 1 + 1e-4 * inputs
        inputs = inputs.float()
        labels = torch.arange(500) % 10
        probs = []
        for dtype in (torch.float32, torch.float64):
            network = head(bias=True, classes=10, width=24, dtype=dtype)
            if kind == "certain":
                with torch.no_grad():
                    network[-1].weight.mul_(32)
            posterior = mola.fit(network, [(inputs.to(dtype), labels)], structure=structure, prior_precision=prior)
            probs.append(posterior(inputs.to(dtype)).double())
        assert close(*probs, 5e-4)  # float32 outputs of up to 500 have errors of about 1e-4

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


class TestFeaturesOfAnySize:
    @pytest.mark.parametrize("link", LINKS)
    def test_every_size(self, structure, link):
        """With a bias and without, which every structure and every link meet."""
        bias = (STRUCTURES.index(structure) + list(LINKS).index(link)) % 2 == 0
        posteriors = pair(structure, bias=bias, prior_precision=0.3)
        for scale in SCALES:
            check(posteriors, LINKS[link], scale * rows(), scale)
        mixed = rows(len(SCALES)) * torch.tensor(SCALES)[:, None].float()
        check(posteriors, LINKS[link], mixed, "all in one batch")

    @pytest.mark.parametrize(("precision", "bias"), [(1e-30, True), (1e-24, False), (1e30, True), (1e30, False)])
    def test_extreme_prior_precisions(self, structure, precision, bias):
        posteriors = pair(structure, bias=bias, prior_precision=precision)
        for link in ("probit", "probit-centred", "mean-field", "normalised bridge"):
            for scale in (1.0, 1e-4):
                check(posteriors, LINKS[link], scale * rows(), (link, scale))

    @pytest.mark.parametrize("size", [1e15, 1e-15])
    def test_training_features_of_every_size(self, structure, size):
        posteriors = pair(structure, bias=False, size=size, prior_precision=1e-20)
        for link in ("probit", "mean-field", "bridge"):
            check(posteriors, LINKS[link], size * rows(), (link, size))

    @pytest.mark.parametrize("link", [Bridge(), Bridge(normalised=True)])
    def test_the_bridge_at_zero(self, structure, link):
        """Features that are all 0 have no variance: the bridge is uniform there, and not 0 / 0."""
        _, posterior = pair(structure, bias=False)
        at_zero = posterior.with_link(link)(torch.zeros(2, 6))
        assert close(at_zero, torch.full((2, 4), 0.25))

    @pytest.mark.parametrize("scale", [1e-25, 1e12, 1e25])
    def test_distances_are_those_of_the_direction(self, structure, scale):
        posterior, _ = pair(structure, bias=True)
        near = posterior.predict(rows())
        far = posterior.predict(scale * rows())
        assert_close(near.distance, far.distance, "difference")
        assert far.distance.dtype == torch.float32
        if scale > 1:
            assert float(posterior.with_distance_exponent(1.0)(scale * rows()).max()) == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("spread", [0.3, 0.01])
def test_distances_of_tight_classes(spread):
    """Class means thousands of standard deviations apart, as trained networks have them, and features rounded to float32."""
    means = torch.randn(10, 24).relu()
    labels = torch.randint(10, (800,))
    features = means[labels] + spread * torch.logspace(0, -2, 24) * torch.randn(800, 24)
    distance = ClassDistance.from_sums(Sums(distance_sums(features, labels, 10, predicted=False), 800))
    exact = distance.logs(features)[0]
    rounded = distance.logs(features.float().double())[0]
    assert float((exact - rounded).abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_vanished_probability_costs_what_its_data_type_can_hold(dtype):
    limits = torch.finfo(dtype)
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype)
    losses = Categorical().distribution(probs).scores(torch.tensor([1, 0]))["nll"]
    assert_close(losses, -torch.tensor([limits.tiny, 0.5], dtype=torch.float64).log(), "float64")
    labels = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    losses = Bernoulli().distribution(probs).scores(labels)["nll"]
    assert_close(losses, -torch.tensor([limits.eps, limits.eps, 0.5, 0.5], dtype=torch.float64).log(), "float64")


def test_a_posterior_rounded_to_half_precision_can_be_saved(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    posterior = mola.fit(network, [(torch.randn(40, 3), torch.randint(4, (40,)))], progress=False)
    posterior.bfloat16()
    posterior.check_unchanged()
    rounded = posterior.networks[0][-1].weight
    assert torch.equal(posterior.components[0].layer.weights[:, :-1], rounded.double())
    assert mola.load(posterior.save(tmp_path / "saved"), network).prior_precision == posterior.prior_precision
