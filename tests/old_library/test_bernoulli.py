"""Yes or no, for one label or many: every structure against a dense Hessian, every closed form against brute force, and the twin.

The twin of a network with one logit z is a softmax over two classes whose logits differ by z. Where the two must agree they do.
"""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import mola
from mola import metrics
from mola.errors import DataError, HeadError, OptionError
from mola.hub.card import measure
from mola.laplace import as_structure
from mola.likelihood import BERNOULLI, LIKELIHOODS, as_likelihood
from mola.tuning.candidates import read_held_out
from mola.uncertainty import entropy, expected_sigmoid, far_field_score, label_energy_score
from tests.conftest import STRUCTURES, Problem, make_problem
from tests.reference import dense

pytestmark = pytest.mark.filterwarnings(
    "ignore::mola.errors.MolaWarning"
)  # of random data, on which no rule finds an optimum

NAN = float("nan")


def labelled(outputs: int = 3, missing: bool = True, **options: object) -> Problem:
    """A problem with labels (n, C), some of them missing."""
    problem = make_problem(classes=outputs, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (len(problem.inputs), outputs), generator=generator).double()
    if missing:
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = NAN
        labels[0] = 1.0  # a datum without any label would leave the sums altogether
        labels[labels.isnan().all(1)] = 0.0
    problem.labels = labels
    return problem


def fit(models, loader, val_loader=None, **options):
    return mola.fit(models, loader, val_loader, likelihood="bernoulli", progress=False, **options)


def twin(network: nn.Module) -> nn.Module:
    """Two classes whose logits are (-z/2, z/2)."""
    head = network[-1]
    two = nn.Linear(head.in_features, 2, bias=head.bias is not None)
    with torch.no_grad():
        two.weight.copy_(torch.cat([-head.weight, head.weight]) / 2)
        if head.bias is not None:
            two.bias.copy_(torch.cat([-head.bias, head.bias]) / 2)
    return nn.Sequential(*list(network)[:-1], two)


class Squeezed(nn.Module):
    """A network whose output is (n,), as many that are trained by BCEWithLogitsLoss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network(inputs).squeeze(-1)


# --- the curvature, against dense references ------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True], ids=["all known", "some missing"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_every_structure_is_the_dense_one(structure, outputs, missing, bias):
    problem, prior = labelled(outputs, missing, bias=bias), 0.7
    posterior = fit(problem.network, problem.loader, structure=structure, prior_precision=prior)
    features, weights = problem.features(), problem.weights
    precision = dense.label_precision(structure, weights, features, problem.labels, prior)
    covariance = torch.linalg.inv(precision)
    (component,) = posterior.components
    spectrum = component.curvature.spectrum
    ready = spectrum.posterior(prior)
    expected = torch.stack([dense.logit_covariance(covariance, phi, outputs) for phi in features])
    exact = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(ready.covariance(features), expected, **exact)
    torch.testing.assert_close(ready.contrast_covariance(features), expected, **exact)  # nothing is hidden
    own = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(ready.variance(features), own, **exact)
    torch.testing.assert_close(ready.contrast_variance(features), own, **exact)
    tried = spectrum.variances(spectrum.project(features), [prior, 2.0])[0].T
    torch.testing.assert_close(tried, own, **exact)
    blocks = covariance.view(outputs, features.shape[1], outputs, features.shape[1])
    for output in range(outputs):
        block = blocks[output, :, output]
        torch.testing.assert_close(spectrum.class_covariance(prior, output), block, **exact)
        least = torch.linalg.eigvalsh(block)[0]
        torch.testing.assert_close(spectrum.smallest_class_variance(prior)[output], least, **exact)
    score = -dense.label_loss(weights, features, problem.labels)
    size = weights.numel()
    evidence = score + 0.5 * (size * math.log(prior) - prior * weights.square().sum() - torch.logdet(precision))
    torch.testing.assert_close(posterior.log_evidence()[0], evidence, **exact)


@pytest.mark.parametrize("outputs", [1, 3])
def test_draws_have_the_covariance(structure, outputs):
    problem = labelled(outputs)
    posterior = fit(problem.network, problem.loader, structure=structure)
    ready, features = posterior.components[0].curvature.spectrum.posterior(1.0), problem.features()[:5]
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(200_000, ready.noise_size, generator=generator)
    drawn = ready.perturb(features, noise)
    covariance = drawn.transpose(1, 2) @ drawn / drawn.shape[1]
    torch.testing.assert_close(covariance, ready.covariance(features), rtol=0.03, atol=0.02)
    weights = posterior.sample(20_000, generator=generator).weights - problem.weights
    logits = torch.einsum("np,scp->nsc", features, weights)
    sampled = logits.transpose(1, 2) @ logits / logits.shape[1]
    torch.testing.assert_close(sampled, ready.covariance(features), rtol=0.06, atol=0.05)


def test_the_loss_and_its_curvature_are_torchs():
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(50, 4, generator=generator)
    labels = torch.randint(2, logits.shape, generator=generator).double()
    expected = -nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1)
    torch.testing.assert_close(BERNOULLI.log_likelihood(logits, labels), expected, rtol=1e-14, atol=1e-14)
    scores, curvature = BERNOULLI.scored_curvature(logits, labels)
    torch.testing.assert_close(scores, expected, rtol=1e-14, atol=1e-14)
    # To all digits, where 1 - p has none left.
    exact = torch.exp(nn.functional.logsigmoid(logits) + nn.functional.logsigmoid(-logits))
    torch.testing.assert_close(curvature.separate, exact, rtol=1e-13, atol=0)


# --- labels that are missing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_labels_apart_are_networks_apart(structure):
    """Where weights of labels are independent, each label is what a network with that one logit makes of the data that have it."""
    problem = labelled(3)
    whole = fit(problem.network, problem.loader, structure=structure, prior_precision=0.3)
    inputs = torch.randn(20, 3)
    for label in range(3):
        head, network = problem.network[-1], nn.Sequential(*list(problem.network)[:-1], nn.Linear(6, 1))
        with torch.no_grad():
            network[-1].weight.copy_(head.weight[label : label + 1])
            network[-1].bias.copy_(head.bias[label : label + 1])
        known = ~problem.labels[:, label].isnan()
        alone = fit(
            network, [(problem.inputs[known], problem.labels[known, label])], structure=structure, prior_precision=0.3
        )
        torch.testing.assert_close(alone(inputs)[:, 0], whole(inputs)[:, label], rtol=1e-10, atol=1e-12)


def test_data_without_any_label_leave_no_trace(structure):
    problem = labelled(3)
    more = torch.randn(11, 3)
    with_more = [(more, torch.full((11, 3), NAN)), *problem.loader, (more, torch.full((11, 3), -100.0))]
    plain, padded = (fit(problem.network, loader, structure=structure) for loader in (problem.loader, with_more))
    inputs = torch.randn(10, 3)
    torch.testing.assert_close(plain(inputs), padded(inputs), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.log_evidence(), padded.log_evidence(), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.predict(inputs).distance, padded.predict(inputs).distance, rtol=1e-9, atol=0)


def test_labels_of_any_type_are_the_same():
    problem = labelled(3, missing=False)
    inputs = torch.randn(8, 3)
    expected = fit(problem.network, problem.loader)(inputs)
    for kind in (torch.bool, torch.uint8, torch.int64, torch.float32, torch.float16):
        loader = [(x, y.to(kind)) for x, y in problem.loader]
        assert torch.equal(fit(problem.network, loader)(inputs), expected)
    holes = problem.labels.clone()
    holes[::3, 1] = NAN
    marked = holes.nan_to_num(-100).long()
    one, other = (fit(problem.network, [(problem.inputs, labels)]) for labels in (holes, marked))
    assert torch.equal(one(inputs), other(inputs))
    assert torch.equal(one.log_evidence(), other.log_evidence())


def test_one_logit_in_any_shape_is_the_same():
    problem = labelled(1, missing=False)
    inputs = torch.randn(8, 3)
    expected = fit(problem.network, problem.loader)
    flat = [(x, y[:, 0]) for x, y in problem.loader]
    for network in (problem.network, Squeezed(problem.network)):
        for loader in (problem.loader, flat):
            found = fit(network, loader)
            assert torch.equal(found(inputs), expected(inputs))
            assert found(inputs).shape == (8, 1)
    plain = mola.ensemble(Squeezed(problem.network), likelihood="bernoulli")
    assert torch.equal(plain(inputs), torch.sigmoid(problem.network(inputs).detach()))


def test_the_batches_do_not_matter(structure):
    problem = labelled(3)
    sizes = [fit(problem.network, problem.batches(size), structure=structure) for size in (1, 7, 40)]
    inputs = torch.randn(8, 3)
    for other in sizes[1:]:
        torch.testing.assert_close(other(inputs), sizes[0](inputs), rtol=1e-11, atol=0)
    unlabelled = fit(problem.network, [x for x, _ in problem.loader], structure=structure)
    known = fit(problem.network, [(x, torch.zeros(len(x), 3)) for x, _ in problem.loader], structure=structure)
    torch.testing.assert_close(unlabelled(inputs), known(inputs), rtol=1e-12, atol=0)


# --- the twin -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron-exact"])
def test_one_logit_is_two_classes_at_twice_the_precision(structure):
    """The difference of two weights with prior precision lambda each has lambda / 2."""
    problem = labelled(1, missing=False)
    labels = problem.labels[:, 0].long()
    two = mola.fit(
        twin(problem.network),
        [(problem.inputs, labels)],
        structure=structure,
        prior_precision=1.4,
        link="mean-field",
        progress=False,
    )
    one = fit(problem.network, problem.loader, structure=structure, prior_precision=0.7)
    inputs = 3 * torch.randn(30, 3)
    torch.testing.assert_close(one(inputs)[:, 0], two(inputs)[:, 1], rtol=1e-9, atol=1e-12)
    ours, theirs = one.predict(inputs), two.predict(inputs)
    assert torch.equal(ours.label[:, 0], theirs.label)
    torch.testing.assert_close(ours.confidence[:, 0], theirs.confidence, rtol=1e-9, atol=0)
    torch.testing.assert_close(ours.entropy[:, 0], theirs.entropy, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(ours.far_field, theirs.far_field, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(ours.distance, theirs.distance, rtol=1e-10, atol=0)
    # Theirs is measured on a few draws.
    torch.testing.assert_close(ours.mutual_information[:, 0], theirs.mutual_information, rtol=0.05, atol=0.015)


def test_the_twins_score_alike_in_tuning():
    problem = labelled(1, missing=False)
    inputs, labels = torch.randn(60, 3), torch.randint(2, (60,))
    train = [(problem.inputs, problem.labels[:, 0].long())]
    two = mola.fit(twin(problem.network), train, structure="full", link="mean-field", progress=False)
    one = fit(problem.network, problem.loader, structure="full")
    grid = (0.1, 1.0, 10.0)
    for score in ("nll", "brier", "ece"):
        ours = one.tune([(inputs, labels)], mola.ValidationScore(score, grid=grid), progress=False).tuning.curve
        wide = mola.ValidationScore(score, grid=[2 * value for value in grid])
        theirs = two.tune([(inputs, labels)], wide, progress=False).tuning.curve
        where = [theirs["prior_precision"].index(2 * value) for value in grid]
        here = [ours["prior_precision"].index(value) for value in grid]
        for name in ("confidence", "nll", "brier", "ece"):
            mine, other = torch.tensor(ours[name])[here], torch.tensor(theirs[name])[where]
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_outlier_terms_are_those_of_two_classes():
    logits = torch.randn(2, 9, 1)
    pair = torch.cat([-logits / 2, logits / 2], dim=-1)
    torch.testing.assert_close(label_energy_score(logits), -torch.logsumexp(pair, -1))
    length, weights = torch.rand(2, 9), torch.tensor([0.3, 0.7])
    torch.testing.assert_close(
        far_field_score(logits, length, weights, BERNOULLI), far_field_score(pair, length, weights)
    )
    many = torch.randn(5, 4)
    torch.testing.assert_close(label_energy_score(many), -torch.log1p(many.exp()).sum(-1))


# --- links ----------------------------------------------------------------------------------------------------------

MEANS, SPREADS = torch.linspace(-20, 20, 41), torch.tensor([0.0, 1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0])


def integrals(mean: float, spread: float) -> tuple[float, float]:
    """The mean of the sigmoid and of its entropy under a Gaussian, by very many steps."""
    if spread == 0:
        yes = torch.sigmoid(torch.tensor(mean))
        return float(yes), float(entropy(torch.stack([yes, 1 - yes])))
    nodes = torch.linspace(-9, 9, 20_001) * spread + mean
    density = torch.exp(-(((nodes - mean) / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    yes = torch.sigmoid(nodes)
    uncertain = yes * nn.functional.softplus(-nodes) + (1 - yes) * nn.functional.softplus(nodes)
    return float(torch.trapezoid(yes * density, nodes)), float(torch.trapezoid(uncertain * density, nodes))


def test_the_quadrature_is_exact():
    mean, spread = torch.meshgrid(MEANS[::4], SPREADS, indexing="ij")
    yes, uncertain = expected_sigmoid(mean, spread.square())
    expected = torch.tensor(
        [integrals(*pair) for pair in zip(mean.flatten().tolist(), spread.flatten().tolist(), strict=True)]
    )
    torch.testing.assert_close(yes.flatten(), expected[:, 0], rtol=0, atol=1e-11)
    torch.testing.assert_close(uncertain.flatten(), expected[:, 1], rtol=1e-9, atol=1e-11)


def test_the_probit_is_within_two_hundredths_of_the_integral():
    """MacKay's approximation: at most 0.0177 off, for logits that spread without bound; 0.0015 where they spread by at most 0.5."""
    mean, spread = torch.meshgrid(torch.linspace(0, 30, 301), torch.logspace(-2, 2, 60), indexing="ij")
    probit = torch.sigmoid(mean / (1 + math.pi / 8 * spread.square()).sqrt())
    error = (probit - expected_sigmoid(mean, spread.square())[0]).abs()
    assert 0.017 < float(error.max()) < 0.0177
    assert float(error[spread <= 0.5].max()) < 1.5e-3


def test_links_agree_with_very_many_draws(structure):
    problem = labelled(3)
    inputs = torch.randn(6, 3)
    posterior = fit(problem.network, problem.loader, structure=structure)
    plain, prediction = posterior(inputs), posterior.predict(inputs)
    assert torch.equal(posterior.with_link("mean-field")(inputs), plain)
    drawn = posterior.with_link(mola.MonteCarlo(samples=200_000))(inputs)
    exact, _ = expected_sigmoid(prediction.logit_mean[0], prediction.logit_variance[0])
    assert float((drawn - exact).abs().max()) < 5e-3  # a standard error is at most 0.5 / sqrt(200,000) = 1.1e-3
    assert float((plain - exact).abs().max()) < 0.0177
    over = posterior.with_link(mola.MonteCarlo(samples=20_000, over="weights"))(inputs)
    assert float((over - exact).abs().max()) < 1.6e-2


@pytest.mark.parametrize("link", ["probit-centered", "bridge"])
def test_links_for_classes_are_refused(link):
    problem = labelled(2)
    with pytest.raises(OptionError, match=rf"(?s){link}.*bernoulli.*probit, mean-field, mc"):
        fit(problem.network, problem.loader, link=link)
    with pytest.raises(OptionError, match="bernoulli"):
        fit(problem.network, problem.loader).with_link(link)


# --- predictions ----------------------------------------------------------------------------------------------------


def test_fields_of_a_prediction():
    problem = labelled(3)
    networks = [problem.network, labelled(3, seed=5).network]
    posterior = fit(networks, problem.loader, problem.loader, rule="nll")
    inputs = torch.randn(9, 3)
    prediction = posterior.predict([inputs[:4], inputs[4:]])
    probs = prediction.probs
    assert probs.shape == (9, 3)
    assert torch.equal(prediction.label, (probs > 0.5).long())
    assert torch.equal(prediction.confidence, torch.maximum(probs, 1 - probs))
    torch.testing.assert_close(prediction.entropy, entropy(torch.stack([probs, 1 - probs], -1)))
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.entropy)
    assert prediction.mutual_information.shape == (9, 3)
    assert bool((prediction.mutual_information >= 0).all())
    for scores in (prediction.ood_score, prediction.distance, prediction.far_field):
        assert scores.shape == (9,)
    for name in ("probs", "mutual_information", "ood_score", "label", "distance"):
        whole = getattr(posterior.predict(inputs), name)
        torch.testing.assert_close(getattr(prediction, name), whole, rtol=1e-12, atol=1e-12)
    again = pickle.loads(pickle.dumps(prediction))
    assert torch.equal(again.confidence, prediction.confidence)
    assert "3 labels" in repr(prediction)
    assert posterior.predict_proba(inputs.numpy()).shape == (9, 3)


def test_the_epistemic_share_is_that_of_the_integrals():
    problem = labelled(2)
    posterior = fit([problem.network, labelled(2, seed=3).network], problem.loader, prior_precision=0.1)
    prediction = posterior.predict(torch.randn(5, 3))
    mean, spread = prediction.logit_mean, prediction.logit_variance.sqrt()
    found = torch.tensor(
        [integrals(*pair) for pair in zip(mean.flatten().tolist(), spread.flatten().tolist(), strict=True)]
    )
    yes, within = (part.view(mean.shape).mean(0) for part in found.T)
    share = 1 - within / entropy(torch.stack([yes, 1 - yes], -1))
    torch.testing.assert_close(prediction.mutual_information / prediction.entropy, share, rtol=1e-8, atol=1e-9)


def test_an_ensemble_is_the_mean_of_sigmoids():
    networks = [labelled(3, seed=seed).network for seed in range(3)]
    inputs = torch.randn(7, 3)
    members = torch.stack([torch.sigmoid(network(inputs).detach()) for network in networks])
    plain = mola.ensemble(networks, likelihood="bernoulli")
    torch.testing.assert_close(plain(inputs), members.mean(0))
    prediction = plain.predict(inputs)
    within = entropy(torch.stack([members, 1 - members], -1)).mean(0)
    torch.testing.assert_close(prediction.aleatoric, within, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(prediction.ood_score, 1 - prediction.confidence.mean(1))
    mixed = mola.Mixture([mola.ensemble(network, likelihood="bernoulli") for network in networks])
    torch.testing.assert_close(mixed(inputs), plain(inputs))
    torch.testing.assert_close(mixed.predict(inputs).aleatoric, within)
    own = mola.Mixture([lambda x: torch.sigmoid(networks[0](x))], likelihood="bernoulli")
    torch.testing.assert_close(own.predict(inputs).confidence, torch.maximum(members[0], 1 - members[0]))


def test_bounds_hold_and_the_far_field_is_one_half(structure):
    networks = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        network = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
        for parameter in network.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        networks.append(network)
    inputs = torch.randn(40, 3)
    labels = (networks[0](inputs) > 0).double()
    posterior = fit(networks, [(inputs, labels)], structure=structure, prior_precision=0.5)
    for far in (1, 10, 1e4):
        prediction = posterior.predict(far * inputs)
        bound = posterior.confidence_bound(far * inputs)
        assert bound.shape == (40, 2)
        assert bool((prediction.confidence <= bound + 1e-12).all())
        members = posterior.confidence_bound(far * inputs, lemma=True)
        for k, component in enumerate(networks):
            alone = fit(component, [(inputs, labels)], structure=structure, prior_precision=0.5)
            assert bool((alone.predict(far * inputs).confidence <= members[k] + 1e-12).all())
    limit = posterior.far_field_limit(inputs)
    torch.testing.assert_close(limit, posterior(1e9 * inputs), rtol=1e-6, atol=1e-6)
    careful = posterior.with_distance_exponent(1.0)
    seen = torch.stack([network[:2](inputs).any(1) for network in networks]).all(0)
    torch.testing.assert_close(careful(1e9 * inputs)[seen], torch.full((int(seen.sum()), 2), 0.5), rtol=0, atol=1e-6)
    assert torch.equal(careful.far_field_limit(inputs)[seen], torch.full((int(seen.sum()), 2), 0.5))
    assert bool((careful.predict(10 * inputs).confidence <= careful.confidence_bound(10 * inputs) + 1e-12).all())


def test_distances_are_from_yes_and_no_or_from_all():
    problem = labelled(1, missing=False)
    posterior = fit(problem.network, problem.loader)
    sums = posterior.components[0].curvature.classes
    assert sums.counts.tolist() == [int((problem.labels == 0).sum()), int((problem.labels == 1).sum())]
    problem = labelled(3)
    assert fit(problem.network, problem.loader).components[0].curvature.classes.counts.tolist() == [40]


# --- tuning ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """Two small networks, trained on three labels of points in the plane, with validation data of which some labels are missing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        inputs = torch.randn(count, 2, generator=generator)
        hidden = torch.stack([inputs[:, 0], inputs[:, 1], inputs.square().sum(1) - 2], 1)
        noise = 0.5 * torch.randn(hidden.shape, generator=generator)
        return inputs, (hidden + noise > 0).double()

    train, val = draw(300), draw(400)
    networks = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(2):
            torch.manual_seed(seed)
            network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3))
            optimiser = torch.optim.Adam(network.parameters(), 0.03)
            for _ in range(250):
                optimiser.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(network(train[0]), train[1]).backward()
                optimiser.step()
            networks.append(network.requires_grad_(False))
    holes = val[1].clone()
    holes[::5, 1] = NAN
    torch.set_default_dtype(before)
    return networks, [train], [(val[0], holes)]


def by_hand(posterior, val):
    """Scores over the entries that have a label."""
    ((inputs, labels),) = val
    probs, known = posterior(inputs), ~labels.isnan()
    yes, answers = probs[known], labels[known]
    pair = torch.stack([1 - yes, yes], 1)
    return {
        "confidence": metrics.mean_confidence(pair),
        "nll": metrics.negative_log_likelihood(pair, answers.long()),
        "brier": metrics.brier(pair, answers.long()),
        "ece": metrics.expected_calibration_error(pair, answers.long()),
    }


@pytest.mark.parametrize("link", ["probit", "mean-field", "mc"])
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_scores_are_means_over_the_labels_that_are_known(trained, structure, link):
    networks, train, val = trained
    grid = (0.01, 0.3, 10.0)
    posterior = fit(networks, train, structure=structure, link=link)
    curve = posterior.tune(val, mola.ValidationScore("nll", grid=grid), progress=False).tuning.curve
    for index, value in enumerate(curve["prior_precision"]):
        if value in grid:
            expected = by_hand(posterior.with_prior_precision(value), val)
            for name, number in expected.items():
                assert curve[name][index] == pytest.approx(number, rel=1e-8, abs=1e-10), name


def test_rules_do_what_they_say(trained):
    networks, train, val = trained
    posterior = fit(networks, train)
    paper = posterior.tune(val, progress=False)
    data = read_held_out(
        networks,
        [one.head for one in posterior.components],
        val,
        where="val",
        labelled=True,
        progress=False,
        likelihood=BERNOULLI,
    )
    ((inputs, labels),) = val
    known = ~labels.isnan()
    right = torch.stack([((network(inputs) > 0) == labels)[known].double().mean() for network in networks]).mean()
    assert data.mean_accuracy()[0] == pytest.approx(float(right), abs=1e-12)
    target = float(right) - 0.01
    assert by_hand(paper, val)["confidence"] >= target - 1e-9
    best = posterior.tune(val, "nll", progress=False)
    around = [best.with_prior_precision(best.prior_precision[0] * factor) for factor in (0.2, 5.0)]
    assert all(by_hand(best, val)["nll"] <= by_hand(one, val)["nll"] for one in around)
    careful = posterior.tune(val, "distance", progress=False)
    assert careful.distance_exponent > 0
    assert by_hand(careful, val)["confidence"] == pytest.approx(target, abs=2e-3)
    assert "tends to 1/2" in careful.tuning.notes[-1]
    evidence = posterior.tune(rule="evidence")
    near = [evidence.with_prior_precision(evidence.prior_precision[0] * factor) for factor in (0.99, 1.01)]
    assert all(float(one.log_evidence().sum()) < float(evidence.log_evidence().sum()) for one in near)
    exposed = posterior.tune(val, mola.OutlierExposure([8 * torch.randn(50, 2)]), progress=False)
    assert exposed.tuning.curve["objective"]


def test_stacking_maximises_the_likelihood_of_the_labels_that_are_known(trained):
    networks, train, val = trained
    posterior = fit(networks, train)
    weights = posterior.reweight(val, progress=False).weights
    ((inputs, labels),) = val
    known = ~labels.isnan()
    members = [fit(network, train)(inputs)[known] for network in networks]
    chosen = torch.stack([torch.where(labels[known] > 0, one, 1 - one) for one in members])
    grid = torch.linspace(0, 1, 2_001)[:, None]
    losses = (grid * chosen[0].mean() * 0 + (grid * chosen[0] + (1 - grid) * chosen[1]).log().mean(1, keepdim=True))[
        :, 0
    ]
    assert float(weights[0]) == pytest.approx(float(grid[losses.argmax(), 0]), abs=1e-3)
    assert fit(networks, train, weights="evidence").weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("mode", ["shared", "members", "pooled"])
def test_temperature_scaling(trained, mode, tmp_path):
    networks, _, val = trained
    scaled = mola.temperature_scaled(networks, val, mode, progress=False, likelihood="bernoulli")
    best = by_hand(scaled, val)["nll"]
    for factor in (0.9, 1.1):
        temperatures = [factor * one for one in scaled.temperatures]
        other = mola.TemperatureScaled(networks, temperatures, pooled=mode == "pooled", likelihood="bernoulli")
        if mode != "members":  # where each network is by itself, the mixture need not be best
            assert by_hand(other, val)["nll"] > best
    prediction = scaled.predict(val[0][0])
    assert prediction.mutual_information.shape == (400, 3)
    assert bool((prediction.epistemic <= prediction.entropy + 1e-12).all())
    scaled.save(tmp_path / "scaled")
    loaded = mola.TemperatureScaled.load(tmp_path / "scaled", networks)
    assert torch.equal(loaded(val[0][0]), scaled(val[0][0]))
    ((inputs, labels),) = val
    one = nn.Sequential(*list(networks[0])[:-1], nn.Linear(20, 1))
    alone = mola.temperature_scaled(one, [(inputs, labels[:, 0])], progress=False, likelihood="bernoulli")
    two = mola.temperature_scaled(twin(one), [(inputs, labels[:, 0].long())], progress=False)
    assert alone.temperatures == pytest.approx(two.temperatures, rel=1e-8)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
def test_saved_and_loaded_it_is_the_same(structure, outputs, tmp_path):
    problem = labelled(outputs)
    posterior = fit(problem.network, problem.loader, problem.loader, structure=structure, rule="distance")
    loaded = mola.load(posterior.save(tmp_path / "posterior"), problem.network)
    inputs = torch.randn(9, 3)
    assert loaded.likelihood == BERNOULLI
    ours, theirs = posterior.predict(inputs), loaded.predict(inputs)
    for name in ("probs", "label", "confidence", "ood_score", "distance", "mutual_information"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-10, atol=1e-12)


def test_a_checkpoint_goes_on(structure, tmp_path, monkeypatch):
    monkeypatch.setattr(
        as_structure(structure).__class__, "rows", lambda self, features, outputs: 5
    )  # gathered and summed
    problem = labelled(3)

    def interrupted():
        yield from problem.batches(5)[:5]
        raise KeyboardInterrupt

    options = {"structure": structure, "checkpoint": tmp_path / "sums", "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        fit(problem.network, interrupted(), **options)
    with pytest.raises(mola.StorageError, match="likelihood: expected bernoulli, got categorical"):
        mola.fit(problem.network, problem.batches(5), progress=False, **options)
    resumed = fit(problem.network, problem.batches(5), **options)
    whole = fit(problem.network, problem.batches(5), structure=structure)
    inputs = torch.randn(9, 3)
    torch.testing.assert_close(resumed(inputs), whole(inputs), rtol=1e-12, atol=0)
    torch.testing.assert_close(resumed.log_evidence(), whole.log_evidence(), rtol=1e-12, atol=0)


# --- wrong use ------------------------------------------------------------------------------------------------------

X = torch.randn(6, 3)
WRONG_LABELS = {
    "class indices for several labels": (3, torch.zeros(6, dtype=torch.int64), r"\(6, 3\).*class indices.*categorical"),
    "class indices for one logit": (1, torch.tensor([0, 1, 2, 3, 1, 0]), r"0 or 1.*class indices"),
    "another number of labels": (3, torch.zeros(6, 2), r"\(6, 3\).*\(6, 2\)"),
    "fewer rows": (3, torch.zeros(5, 3), r"\(6, 3\).*\(5, 3\)"),
    "soft labels": (2, torch.full((6, 2), 0.3), "soft"),
    "minus one": (2, -torch.ones(6, 2), "0 or 1"),
    "complex": (1, torch.zeros(6, dtype=torch.complex128), "complex"),
    "all missing": (2, torch.full((6, 2), NAN), "every label is missing"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_labels_that_do_not_fit_are_named(name):
    outputs, labels, words = WRONG_LABELS[name]
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    with pytest.raises(DataError, match=f"(?si){words}"):
        fit(network, [(X.double(), labels)])


def test_outputs_that_do_not_fit_are_named():
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    with pytest.raises(HeadError, match="sigmoid"):
        fit(nn.Sequential(body, nn.Linear(4, 2), nn.Sigmoid()), [(X.double(), torch.zeros(6, 2))])
    finished = nn.Sequential(body, nn.Linear(4, 2), nn.Sigmoid())
    with pytest.raises(HeadError, match="probabilities already"):
        mola.ensemble(finished, likelihood="bernoulli")(torch.randn(64, 3))
    with pytest.raises(HeadError, match="bernoulli"):
        mola.fit(
            nn.Sequential(body, nn.Linear(4, 1)), [(X.double(), torch.zeros(6, dtype=torch.int64))], progress=False
        )
    with pytest.raises(DataError, match="bernoulli"):  # one-hot labels for a softmax
        mola.fit(nn.Sequential(body, nn.Linear(4, 2)), [(X.double(), torch.eye(2).repeat(3, 1))], progress=False)
    whole = nn.Sequential(body, nn.Linear(4, 2))
    with pytest.raises(OptionError, match=r"(?s)likelihood must be one of.*Did you mean 'bernoulli'"):
        mola.fit(whole, [(X.double(), torch.zeros(6, 2))], likelihood="bernouli", progress=False)


def test_labels_of_other_outputs_are_noticed(trained):
    networks, train, val = trained
    posterior = fit(networks, train)
    ((inputs, labels),) = val
    with pytest.raises(DataError, match=r"(?s)another order.*\[2, 0, 1\]"):
        posterior.tune([(inputs, labels[:, [2, 0, 1]])], progress=False)
    with pytest.raises(DataError, match=r"(?s)another order.*0 -> 1, 1 -> 0"):
        posterior.tune([(inputs, 1 - labels)], progress=False)


def test_a_network_that_says_yes_too_often_is_noticed(trained):
    """As after training with pos_weight."""
    networks, train, val = trained
    eager = nn.Sequential(*list(networks[0])[:-1], nn.Linear(20, 3))
    with torch.no_grad():
        eager[-1].weight.copy_(networks[0][-1].weight)
        eager[-1].bias.copy_(networks[0][-1].bias + torch.tensor([0.0, 0.0, 3.0]))
    with pytest.warns(mola.MolaWarning, match=r"(?s)label 2.*pos_weight"):
        fit(eager, train, val, rule="nll")


def test_likelihoods_by_name():
    assert as_likelihood("bernoulli") == BERNOULLI
    assert as_likelihood(BERNOULLI) is BERNOULLI
    for name, kind in LIKELIHOODS.items():
        assert kind.name == name
        assert set(kind.links) <= {"probit", "probit-centered", "mean-field", "bridge", "mc"}
        assert kind.default_rule in kind.rules
    assert set(STRUCTURES) == {as_structure(name).name for name in STRUCTURES}


# --- beside it ------------------------------------------------------------------------------------------------------


def test_dropout_is_the_mean_of_sigmoids(tmp_path):
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    inputs = torch.randn(5, 3)
    drop = mola.McDropout(Squeezed(network), samples=7, seed=1, likelihood="bernoulli")
    prediction = drop.predict(inputs)
    assert prediction.probs.shape == prediction.mutual_information.shape == (5, 1)
    classes = mola.McDropout(nn.Sequential(network, PairOfLogits()), samples=7, seed=1).predict(inputs)
    torch.testing.assert_close(prediction.probs[:, 0], classes.probs[:, 1])
    torch.testing.assert_close(prediction.mutual_information[:, 0], classes.mutual_information)
    loaded = mola.McDropout.load(drop.save(tmp_path / "dropout"), drop.network)
    assert torch.equal(loaded(inputs), drop(inputs))


class PairOfLogits(nn.Module):
    """Two classes with the logits (0, z)."""

    def forward(self, logits):
        return torch.cat([torch.zeros_like(logits), logits], 1)


def test_whole_networks_are_for_classes():
    problem = labelled(2)
    with pytest.raises(OptionError, match=r"(?s)bernoulli.*fit_whole is for classes.*mola\.fit"):
        mola.fit_whole(problem.network, problem.loader, likelihood="bernoulli", progress=False)


def test_a_hub_folder_keeps_the_likelihood(trained, tmp_path):
    pytest.importorskip("matplotlib")
    networks, train, val = trained
    inputs = val[0][0]
    for posterior in (fit(networks, train), mola.ensemble(networks, likelihood="bernoulli")):
        measured = measure(posterior, val, "points")
        assert measured.count == int((~val[0][1].isnan()).sum())
        assert measured.values["nll"] == pytest.approx(by_hand(posterior, val)["nll"])
        folder = mola.save_to_hub_folder(
            posterior, tmp_path / "hub", classes=["right", "top", "far"], measured=measured, networks=False
        )
        assert "each yes or no" in (folder / "README.md").read_text()
        again = mola.load_from_hub_folder(folder, networks)
        assert torch.equal(again(inputs), posterior(inputs))


def test_labels_are_measured_one_by_one():
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    probs, labels = torch.rand(200, 3, generator=generator), torch.randint(2, (200, 3), generator=generator).double()
    labels[::5, 1] = NAN
    labels[:, 2] = 1.0
    areas, precisions = metrics.auroc_of_labels(probs, labels), metrics.average_precision_of_labels(probs, labels)
    gaps = metrics.calibration_error_of_labels(probs, labels)
    for label in range(3):
        known = ~labels[:, label].isnan()
        truth, said = labels[known, label].numpy(), probs[known, label].numpy()
        assert float(precisions[label]) == pytest.approx(sklearn.average_precision_score(truth, said))
        bins = np.ceil(said * 15).astype(int)
        gap = sum(abs((said - truth)[bins == place].sum()) for place in range(1, 16)) / len(said)
        assert float(gaps[label]) == pytest.approx(gap)
        if label < 2:
            assert float(areas[label]) == pytest.approx(sklearn.roc_auc_score(truth, said))
    assert math.isnan(float(areas[2]))
    with pytest.raises(DataError, match=r"\(200, 3\)"):
        metrics.auroc_of_labels(probs, labels[:, :2])


def test_scikit_learn_takes_several_labels():
    pytest.importorskip("sklearn")
    random = np.random.default_rng(0)
    table = random.normal(size=(300, 4))
    labels = np.stack([table[:, 0] > 0, table[:, 1] + table[:, 2] > 0], 1).astype(int)
    model = mola.MolaClassifier(members=2, epochs=40, random_state=0).fit(table, labels)
    assert model.posterior_.likelihood == BERNOULLI
    assert model.predict_proba(table).shape == (300, 2)
    assert (model.predict(table) == labels).mean() > 0.95
    np.testing.assert_array_equal(model.predict(table), model.prediction(table).label.numpy())
    assert model.ood_score(table).shape == (300,)
    tuned = mola.MolaClassifier(members=1, epochs=40, rule="nll", random_state=0).fit(table, labels)
    assert (tuned.predict(table) == labels).mean() > 0.9


class Flat(nn.Module):
    """A network whose one logit has no axis."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network(inputs).squeeze(-1)


@pytest.mark.parametrize("wrapped", [nn.Sequential, Flat])
def test_logits_between_0_and_1_of_a_weak_network_are_logits(wrapped):
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.mul_(0.1)
        layer.bias.fill_(0.5)
    assert bool(((layer(x) > 0) & (layer(x) < 1)).all())
    network = wrapped(layer)
    posterior = mola.fit(network, [(x, (torch.rand(200) < 0.6).float())], likelihood="bernoulli", progress=False)
    torch.testing.assert_close(
        posterior.with_prior_precision(1e12).predict(x).probs, torch.sigmoid(layer(x)).detach(), atol=1e-5, rtol=0
    )
    plain = mola.ensemble(network, likelihood="bernoulli")
    torch.testing.assert_close(plain(x), torch.sigmoid(layer(x)).detach())
    with pytest.raises(HeadError, match="seem to be probabilities"):
        mola.ensemble(nn.Sequential(layer, nn.Sigmoid()), likelihood="bernoulli")(x)
