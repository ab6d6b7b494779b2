"""Features of any size: 0, huge and tiny, for every structure and every link; float32 against the same in float64."""

import math

import pytest
import torch
from torch import nn

import mola
from mola.export.graph import OUTPUTS, Exported, Signature
from mola.laplace import LogitMoments
from mola.uncertainty import entropy, epistemic_share, far_field_score
from tests.closeness import assert_close
from tests.conftest import STRUCTURES

LINKS = {
    "probit": mola.Probit(),
    "probit-centered": mola.CentredProbit(),
    "mean-field": mola.MeanField(),
    "bridge": mola.Bridge(),
    "normalised bridge": mola.Bridge(normalised=True),
    "mc": mola.MonteCarlo(40),
    "mc over weights": mola.MonteCarlo(40, "weights"),
}

SCALES = (0.0, 1.0, 1e-8, 1e-19, 1e-23, 1e-30, 1e-37, 1e-41, 1e6, 1e12, 1e19, 1e25, 1e37)


class Own(mola.Link):
    """A probit of the user's own, written out."""

    name = "own"

    def __call__(self, moments, seed=None):
        return torch.softmax(moments.mean / (1 + math.pi / 8 * moments.variance).sqrt(), dim=1)


def head(*, bias, seed=0, classes=4, width=6):
    """A network whose features are its inputs."""
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Identity(), nn.Linear(width, classes, bias=bias))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network.float()


def rows(count=5, seed=5, width=6, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def fitted(structure, *, bias, size=1.0, count=2, dtype=torch.float32, **options):
    inputs = size * rows(50, seed=1)
    labels = torch.randint(4, (50,), generator=torch.Generator().manual_seed(2))
    networks = [head(bias=bias, seed=seed).to(dtype) for seed in range(count)]
    return mola.fit(networks, [(inputs.to(dtype), labels)], structure=structure, **options)


def in_float64(posterior, inputs):
    """The moments by which the prediction goes: the network's own features and logits, and all that follows in float64."""
    moments = []
    for component in posterior.components:
        with torch.no_grad():
            mean = component.network(inputs).double()
        features = component.head.lift(inputs.double())
        moments.append(LogitMoments(mean, component.curvature.spectrum.posterior(component.precision).at(features)))
    return moments


def reference(posterior, link, inputs):
    moments, weights = in_float64(posterior, inputs), posterior.weights
    probs = sum(weight * link(one) for weight, one in zip(weights, moments, strict=True))
    lengths = torch.stack([one.spread.length() for one in moments])
    return {
        "probs": probs,
        "entropy": entropy(probs),
        "mutual_information": entropy(probs) * epistemic_share(moments, weights.tolist(), 0),
        "ood_score": far_field_score(torch.stack([one.mean for one in moments]), lengths, weights),
    }


def check(posterior, link, inputs, place):
    expected = reference(posterior, link, inputs)
    moved = posterior.with_link(link)
    prediction = moved.predict(inputs)
    assert_close(moved(inputs), prediction.probs)
    assert prediction.logit_mean.dtype == prediction.logit_variance.dtype == torch.float32
    for name, value in expected.items():
        found = getattr(prediction, name)
        assert found.dtype == torch.float32, (name, place)
        off = float((found - value).abs().max() / (1 + value.abs().max()))
        assert off < 2e-5, (name, place, off)


@pytest.mark.parametrize("link", LINKS)
def test_features_of_every_size(structure, link):
    """With a bias and without, which every structure and every link meet: it is one more feature, and no link sees features."""
    bias = (STRUCTURES.index(structure) + list(LINKS).index(link)) % 2 == 0
    posterior = fitted(structure, bias=bias, prior_precision=0.3)
    for scale in SCALES:
        check(posterior, LINKS[link], scale * rows(), scale)
    mixed = rows(len(SCALES)) * torch.tensor(SCALES)[:, None].float()
    check(posterior, LINKS[link], mixed, "all in one batch")


@pytest.mark.parametrize(("precision", "bias"), [(1e-30, True), (1e-24, False), (1e30, True), (1e30, False)])
def test_extreme_prior_precisions(structure, precision, bias):
    posterior = fitted(structure, bias=bias, prior_precision=precision)
    for link in ("probit", "probit-centered", "mean-field", "normalised bridge"):
        for scale in (1.0, 1e3, 1e8, 1e-4):
            check(posterior, LINKS[link], scale * rows(), (link, scale))


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_training_features_of_every_size(structure, size):
    posterior = fitted(structure, bias=False, size=size, prior_precision=1e-20)
    for link in ("probit", "mean-field", "bridge"):
        check(posterior, LINKS[link], size * rows(), (link, size))


def test_a_link_of_one_s_own_sees_finite_variances(structure):
    posterior = fitted(structure, bias=True)
    for scale in (1.0, 1e19, 1e30):
        found = posterior.with_link(Own())(scale * rows())
        assert found.dtype == torch.float32
        assert_close(found, posterior(scale * rows()))


def test_far_away_it_is_the_far_field_limit(structure):
    """The limit is known in closed form; float32 has long overflowed where it is reached."""
    posterior = fitted(structure, bias=False)
    limit = posterior.far_field_limit(rows())
    for scale in (1e12, 1e19, 1e37):
        torch.testing.assert_close(posterior(scale * rows()), limit, rtol=1e-4, atol=1e-5)
    for scale in (1e-30, 1e15):
        torch.testing.assert_close(posterior.far_field_limit(scale * rows()), limit, rtol=1e-4, atol=1e-5)


def test_monte_carlo_judges_huge_features(structure):
    """All is scale there: the largest logit of a draw wins, and its share of the draws is the integral."""
    posterior = fitted(structure, bias=False, count=1).with_link(mola.MonteCarlo(4000))
    (moments,) = in_float64(posterior, 1e20 * rows())
    generator = torch.Generator().manual_seed(11)
    drawn = torch.cat(list(moments.draws(4000, generator, "weights")), dim=1)
    shares = torch.stack([(drawn.argmax(2) == output).double().mean(1) for output in range(4)], dim=1)
    assert float((posterior(1e20 * rows()) - shares).abs().max()) < 0.05
    near = posterior.with_link("mean-field")(1e20 * rows())
    assert float((near - shares).abs().max()) < 0.2


def test_ordinary_features_are_computed_as_they_were(structure):
    """In the network's precision: nothing is lifted for features that are not extreme, zeros among them included."""
    posterior = fitted(structure, bias=False)
    inputs = torch.cat([rows(), 0 * rows(1), 1e-6 * rows(1), 1e9 * rows(1)])
    for one in posterior._moments(inputs):
        assert one.given is None
        assert one.mean.dtype == one.variance.dtype == torch.float32


@pytest.mark.parametrize("count", [1, 3])
def test_bridge_at_zero_is_the_limit(structure, count):
    """From any direction where there is one limit, and between the directions' where there are many."""
    posterior = fitted(structure, bias=False, count=count, dtype=torch.float64)
    for link in (mola.Bridge(), mola.Bridge(normalised=True)):
        moved = posterior.with_link(link)
        at_zero = moved(torch.zeros(1, 6, dtype=torch.float64))
        assert bool(torch.isfinite(at_zero).all())
        assert float(at_zero.sum()) == pytest.approx(1)
        near = posterior.with_link(mola.Bridge())(1e-60 * rows(200, dtype=torch.float64))
        if structure in ("kron", "kron-diag"):
            torch.testing.assert_close(at_zero.expand_as(near), near, rtol=1e-9, atol=0)
        elif count == 1:
            assert bool(((near.amin(0) < at_zero) & (at_zero < near.amax(0))).all())


def test_bridge_at_zero_over_whole_networks():
    posterior = mola.fit_whole(head(bias=False), [(rows(20), torch.arange(20) % 4)], link="bridge", progress=False)
    nothing = torch.zeros(2, 6, dtype=torch.float32)
    torch.testing.assert_close(posterior(nothing), torch.full((2, 4), 0.25, dtype=torch.float32))

    class Finite:
        def choose(self, problem, val_loader):
            curve = problem.curve(problem.read(val_loader, "validation loader", True), (0.1, 1.0, 10.0))
            assert all(bool(torch.isfinite(values).all()) for values in curve.values())
            return mola.Tuning("own", (1.0,))

    posterior.tune([(torch.cat([rows(18), nothing]), torch.arange(20) % 4)], Finite(), progress=False)


@pytest.mark.parametrize("structure", ["diag", "full", "kron"])
@pytest.mark.parametrize("link", ["probit", "probit-centered", "mean-field", "bridge", "mc"])
def test_whole_networks(structure, link):
    network, loader = head(bias=False), [(rows(20), torch.arange(20) % 4)]
    single = mola.fit_whole(network, loader, structure=structure, link=link, progress=False)
    double = mola.fit_whole(
        head(bias=False).double(),
        [(rows(20).double(), torch.arange(20) % 4)],
        structure=structure,
        link=link,
        progress=False,
    )
    for scale in (0.0, 1.0, 1e-19, 1e-25, 1e-37, 1e19, 1e25, 1e36):
        if link == "bridge" and scale > 1:
            continue  # exponentials of logits: their rounding in float32 is what differs
        found, expected = (
            one.predict(scale * rows().to(kind)) for one, kind in ((single, torch.float32), (double, torch.float64))
        )
        for name in ("probs", "mutual_information", "ood_score"):
            value = getattr(found, name)
            assert value.dtype == torch.float32
            assert float((value - getattr(expected, name)).abs().max()) < 1e-4, (scale, name)


def test_beyond_float64_is_refused():
    posterior = fitted("kron", bias=False, dtype=torch.float64)
    with pytest.raises(mola.DataError, match="leave the range of float64"):
        posterior(1e160 * rows(dtype=torch.float64))
    assert bool(torch.isfinite(posterior(1e120 * rows(dtype=torch.float64))).all())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_graph_is_right_or_nan(structure, bias):
    """A graph has one precision: what does not fit is NaN, never another answer than PyTorch's."""
    base = fitted(structure, bias=bias, prior_precision=0.3)
    inputs = torch.cat([scale * rows(3) for scale in SCALES])
    for name, link in LINKS.items():
        posterior = base.with_link(link)
        with torch.no_grad():
            found = Exported(posterior, Signature.of(inputs, posterior.networks[0]))(inputs)
        prediction = posterior.predict(inputs)
        for output in OUTPUTS:
            if output == "label":
                continue
            value, expected = found[output], getattr(prediction, "probs" if output == "probabilities" else output)
            wrong = (value - expected).abs() > 2e-4 * (1 + expected.abs())
            assert not bool(wrong.any()), (name, output)
            ordinary = slice(3, 6)
            assert bool(torch.isfinite(value[ordinary]).all()), (name, output)
        assert bool(torch.isfinite(found["probabilities"][:3]).all()), name


@pytest.mark.export
@pytest.mark.parametrize("link", ["probit", "mean-field", "bridge"])
def test_a_trace_is_right_or_nan(link):
    posterior = fitted("kron", bias=False, link=link)
    inputs = torch.cat([scale * rows(2) for scale in (0.0, 1.0, 1e6, 1e19, 1e25)])
    with torch.no_grad():
        expected = posterior(inputs)  # before: a trace makes no constants
        found = torch.export.export(posterior, (inputs,)).module()(inputs)
    wrong = (found - expected).abs() > 2e-4
    assert not bool(wrong.any())
    assert bool(torch.isfinite(found[:4]).all())
