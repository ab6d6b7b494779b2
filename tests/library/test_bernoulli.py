"""Binary and multi-label classification: dense Hessians, brute force, and one logit against two classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace import metrics
from molaplace.errors import DataError, HeadError
from molaplace.likelihoods import BERNOULLI
from molaplace.rules.objective import paired
from molaplace.uncertainty import entropy, expected_sigmoid
from tests.conftest import Problem, make_problem
from tests.library.problems import train

pytestmark = pytest.mark.filterwarnings(
    "ignore::molaplace.errors.MolaWarning"
)  # random data, on which no rule finds an optimum

NAN = float("nan")
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def labelled(outputs: int = 3, missing: bool = True, **options) -> Problem:
    """A problem with labels (n, C), some of them missing, and none without any label."""
    problem = make_problem(classes=outputs, **options)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (len(problem.inputs), outputs), generator=generator).double()
    if missing:
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = NAN
        labels[0] = 1.0
        labels[labels.isnan().all(1)] = 0.0
    problem.labels = labels
    return problem


def fit(networks, loader, val_loader=None, **options):
    return mola.fit(networks, loader, val_loader, likelihood="bernoulli", progress=False, **options)


def twin(network: nn.Module) -> nn.Module:
    """The same network with two classes, whose logits are (-z/2, z/2)."""
    head = network[-1]
    two = nn.Linear(head.in_features, 2)
    with torch.no_grad():
        two.weight.copy_(torch.cat([-head.weight, head.weight]) / 2)
        two.bias.copy_(torch.cat([-head.bias, head.bias]) / 2)
    return nn.Sequential(*list(network)[:-1], two)


class Squeezed(nn.Module):
    """A network whose output is (n,), as many that are trained by BCEWithLogitsLoss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network(inputs).squeeze(-1)


# --- curvature --------------------------------------------------------------------------------------------------------


def test_loss_and_curvature_are_torchs():
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(50, 4, generator=generator)
    labels = torch.randint(2, logits.shape, generator=generator).double()
    expected = -nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1)
    torch.testing.assert_close(BERNOULLI.log_likelihood(logits, labels), expected, rtol=1e-14, atol=1e-14)
    # To all digits, where 1 - p has none left.
    exact = torch.exp(nn.functional.logsigmoid(logits) + nn.functional.logsigmoid(-logits))
    torch.testing.assert_close(BERNOULLI.curvature(logits, labels).separate, exact, rtol=1e-13, atol=0)


# --- labels -----------------------------------------------------------------------------------------------------------


def test_data_without_any_label_change_nothing(structure):
    problem = labelled(3)
    more = torch.randn(11, 3)
    inputs = torch.randn(10, 3)
    with_more = [(more, torch.full((11, 3), NAN)), *problem.loader, (more, torch.full((11, 3), -100.0))]
    plain, padded = (fit(problem.network, loader, structure=structure) for loader in (problem.loader, with_more))
    torch.testing.assert_close(plain(inputs), padded(inputs), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.log_evidence(), padded.log_evidence(), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.predict(inputs).distance, padded.predict(inputs).distance, rtol=1e-9, atol=0)


def test_one_logit_may_have_any_shape():
    problem = labelled(1, missing=False)
    inputs = torch.randn(8, 3)
    expected = fit(problem.network, problem.loader)(inputs)
    for network in (problem.network, Squeezed(problem.network)):
        for loader in (problem.loader, [(x, y[:, 0]) for x, y in problem.loader]):
            actual = fit(network, loader)(inputs)
            assert actual.shape == (8, 1)
            assert torch.equal(actual, expected)
    plain = mola.ensemble(Squeezed(problem.network), likelihood="bernoulli")
    assert torch.equal(plain(inputs), torch.sigmoid(problem.network(inputs).detach()))


# --- one logit against two classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron-exact"])
def test_one_logit_is_two_classes_at_twice_the_precision(structure):
    """The difference of two weights with prior precision lambda each has lambda / 2."""
    problem = labelled(1, missing=False)
    classes = [(problem.inputs, problem.labels[:, 0].long())]
    options = {"structure": structure, "prior_precision": 1.4, "link": "mean-field", "progress": False}
    double = mola.fit(twin(problem.network), classes, **options)
    single = fit(problem.network, problem.loader, structure=structure, prior_precision=0.7)
    inputs = 3 * torch.randn(30, 3)
    torch.testing.assert_close(single(inputs)[:, 0], double(inputs)[:, 1], rtol=1e-9, atol=1e-12)
    binary = single.predict(inputs)
    classes_prediction = double.predict(inputs)
    assert torch.equal(binary.label[:, 0], classes_prediction.label)
    torch.testing.assert_close(binary.confidence[:, 0], classes_prediction.confidence, rtol=1e-9, atol=0)
    torch.testing.assert_close(binary.entropy[:, 0], classes_prediction.entropy, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(binary.far_field, classes_prediction.far_field, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(binary.distance, classes_prediction.distance, rtol=1e-10, atol=0)
    # The two-class value is estimated from a few draws.
    torch.testing.assert_close(
        binary.mutual_information[:, 0], classes_prediction.mutual_information, rtol=0.05, atol=0.015
    )


# --- links ------------------------------------------------------------------------------------------------------------


def integrals(mean: float, spread: float) -> tuple[float, float]:
    """Mean of the sigmoid and of its entropy under a Gaussian, by very many steps."""
    if spread == 0:
        yes = torch.sigmoid(torch.tensor(mean))
        return float(yes), float(entropy(torch.stack([yes, 1 - yes])))
    nodes = torch.linspace(-9, 9, 20_001) * spread + mean
    density = torch.exp(-(((nodes - mean) / spread) ** 2) / 2) / (spread * math.sqrt(2 * math.pi))
    yes = torch.sigmoid(nodes)
    uncertain = yes * nn.functional.softplus(-nodes) + (1 - yes) * nn.functional.softplus(nodes)
    return float(torch.trapezoid(yes * density, nodes)), float(torch.trapezoid(uncertain * density, nodes))


def test_quadrature_is_exact():
    spreads = torch.tensor([0.0, 1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0])
    mean, spread = (grid.flatten() for grid in torch.meshgrid(torch.linspace(-20, 20, 11), spreads, indexing="ij"))
    yes, uncertain = expected_sigmoid(mean, spread.square())
    expected = torch.tensor([integrals(*pair) for pair in zip(mean.tolist(), spread.tolist(), strict=True)])
    torch.testing.assert_close(yes, expected[:, 0], rtol=0, atol=1e-11)
    torch.testing.assert_close(uncertain, expected[:, 1], rtol=1e-9, atol=1e-11)


def test_links_agree_with_very_many_draws(structure):
    problem = labelled(3)
    inputs = torch.randn(6, 3)
    posterior = fit(problem.network, problem.loader, structure=structure)
    plain = posterior(inputs)
    prediction = posterior.predict(inputs)
    assert torch.equal(posterior.with_link("mean-field")(inputs), plain)
    exact, _ = expected_sigmoid(prediction.logit_mean[:, 0], prediction.logit_variance[:, 0])
    drawn = posterior.with_link(mola.links.MonteCarlo(samples=200_000))(inputs)
    assert float((drawn - exact).abs().max()) < 5e-3  # a standard error is at most 0.5 / sqrt(200,000) = 1.1e-3
    assert float((plain - exact).abs().max()) < 0.0177
    over = posterior.with_link(mola.links.MonteCarlo(samples=20_000, over="weights"))(inputs)
    assert float((over - exact).abs().max()) < 1.6e-2


# --- predictions ------------------------------------------------------------------------------------------------------


def test_fields_of_a_prediction():
    problem = labelled(3)
    prediction = fit(problem.network, problem.loader).predict(torch.randn(9, 3))
    probs = prediction.probs
    assert torch.equal(prediction.label, (probs > 0.5).long())
    assert torch.equal(prediction.confidence, torch.maximum(probs, 1 - probs))
    torch.testing.assert_close(prediction.entropy, entropy(torch.stack([probs, 1 - probs], -1)))
    assert prediction.ood_score.shape == prediction.distance.shape == prediction.far_field.shape == (9,)


def test_epistemic_share_is_that_of_the_integrals():
    problem = labelled(2)
    posterior = fit([problem.network, labelled(2, seed=3).network], problem.loader, prior_precision=0.1)
    prediction = posterior.predict(torch.randn(5, 3))
    mean = prediction.logit_mean
    spread = prediction.logit_variance.sqrt()
    pairs = zip(mean.flatten().tolist(), spread.flatten().tolist(), strict=True)
    yes, within = (part.view(mean.shape).mean(1) for part in torch.tensor([integrals(*pair) for pair in pairs]).T)
    share = 1 - within / entropy(torch.stack([yes, 1 - yes], -1))
    torch.testing.assert_close(prediction.mutual_information / prediction.entropy, share, rtol=1e-8, atol=1e-9)


def test_ensemble_is_the_mean_of_sigmoids():
    networks = [labelled(3, seed=seed).network for seed in range(3)]
    inputs = torch.randn(7, 3)
    members = torch.stack([torch.sigmoid(network(inputs).detach()) for network in networks])
    plain = mola.ensemble(networks, likelihood="bernoulli")
    torch.testing.assert_close(plain(inputs), members.mean(0))
    prediction = plain.predict(inputs)
    within = entropy(torch.stack([members, 1 - members], -1)).mean(0)
    torch.testing.assert_close(prediction.aleatoric, within, **EXACT)
    torch.testing.assert_close(prediction.ood_score, 1 - prediction.confidence.mean(1))
    mixed = mola.Mixture([mola.ensemble(network, likelihood="bernoulli") for network in networks])
    torch.testing.assert_close(mixed(inputs), plain(inputs))
    torch.testing.assert_close(mixed.predict(inputs).aleatoric, within)
    function = mola.Mixture([lambda x: torch.sigmoid(networks[0](x))], likelihood="bernoulli")
    torch.testing.assert_close(function.predict(inputs).confidence, torch.maximum(members[0], 1 - members[0]))


def test_bounds_hold_and_the_far_field_is_one_half(structure):
    networks = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        network = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
        for parameter in network.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        networks.append(network)
    inputs = torch.randn(40, 3)
    loader = [(inputs, (networks[0](inputs) > 0).double())]
    posterior = fit(networks, loader, structure=structure, prior_precision=0.5)
    alone = [fit(network, loader, structure=structure, prior_precision=0.5) for network in networks]
    for far in (1, 10, 1e4):
        bound = posterior.confidence_bound(far * inputs)
        assert bound.shape == (40, 2)
        assert bool((posterior.predict(far * inputs).confidence <= bound + 1e-12).all())
        members = posterior.confidence_bound(far * inputs, lemma=True)
        for bound_of_member, posterior_alone in zip(members.unbind(1), alone, strict=True):
            assert bool((posterior_alone.predict(far * inputs).confidence <= bound_of_member + 1e-12).all())
    torch.testing.assert_close(posterior.far_field_limit(inputs), posterior(1e9 * inputs), rtol=1e-6, atol=1e-6)
    careful = posterior.with_distance_exponent(1.0)
    active = torch.stack([network[:2](inputs).any(1) for network in networks]).all(0)
    half = torch.full((int(active.sum()), 2), 0.5)
    torch.testing.assert_close(careful(1e9 * inputs)[active], half, rtol=0, atol=1e-6)
    torch.testing.assert_close(careful.far_field_limit(inputs)[active], half, rtol=0, atol=1e-12)
    assert bool((careful.predict(10 * inputs).confidence <= careful.confidence_bound(10 * inputs) + 1e-12).all())


# --- tuning -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """Two small networks trained on three labels of points in the plane, and validation data with missing labels."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        inputs = torch.randn(count, 2, generator=generator)
        hidden = torch.stack([inputs[:, 0], inputs[:, 1], inputs.square().sum(1) - 2], 1)
        noise = 0.5 * torch.randn(hidden.shape, generator=generator)
        return inputs, (hidden + noise > 0).double()

    points = draw(300)
    val = draw(400)
    networks = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(2):
            torch.manual_seed(seed)
            network = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3))
            loss = nn.functional.binary_cross_entropy_with_logits
            networks.append(train(network, *points, 250, 0.03, loss))
    holes = val[1].clone()
    holes[::5, 1] = NAN
    torch.set_default_dtype(before)
    return networks, [points], [(val[0], holes)]


def by_hand(posterior, val):
    """Scores over the known labels."""
    ((inputs, labels),) = val
    known = ~labels.isnan()
    yes = posterior(inputs).detach()[known]
    targets = labels[known].long()
    pair = torch.stack([1 - yes, yes], 1)
    return {
        "confidence": float(pair.amax(1).mean()),
        "nll": float(-pair.gather(1, targets[:, None]).log().mean()),
        "brier": metrics.brier(pair, targets),
        "ece": metrics.expected_calibration_error(pair, targets),
    }


def test_every_rule_keeps_its_promise(trained):
    networks, points, val = trained
    ((inputs, labels),) = val
    posterior = fit(networks, points)
    known = ~labels.isnan()
    right = [((network(inputs) > 0) == labels)[known].double().mean() for network in networks]
    target = float(torch.stack(right).mean()) - 0.01
    assert by_hand(posterior.tune(val, rule="threshold", progress=False), val)["confidence"] >= target - 1e-9
    best = posterior.tune(val, rule="nll", progress=False)
    around = [best.with_prior_precision(best.prior_precision[0] * factor) for factor in (0.2, 5.0)]
    assert all(by_hand(best, val)["nll"] <= by_hand(candidate, val)["nll"] for candidate in around)
    careful = posterior.tune(val, rule="distance", progress=False)
    assert careful.distance_exponent > 0
    assert by_hand(careful, val)["confidence"] == pytest.approx(target, abs=2e-3)
    evidence = posterior.tune(rule="evidence")
    near = [evidence.with_prior_precision(evidence.prior_precision[0] * factor) for factor in (0.99, 1.01)]
    assert all(float(candidate.log_evidence().sum()) < float(evidence.log_evidence().sum()) for candidate in near)
    exposed = posterior.tune(val, rule=mola.rules.Outliers([8 * torch.randn(50, 2)]), progress=False)
    assert exposed.tuning.curve["objective"]


def test_stacking_maximises_the_likelihood_of_the_known_labels(trained):
    networks, points, val = trained
    ((inputs, labels),) = val
    weights = fit(networks, points).reweight(val, progress=False).weights
    known = ~labels.isnan()
    members = [fit(network, points)(inputs)[known] for network in networks]
    first, second = (torch.where(labels[known] > 0, member, 1 - member) for member in members)
    grid = torch.linspace(0, 1, 2_001)
    best = grid[torch.stack([(share * first + (1 - share) * second).log().mean() for share in grid]).argmax()]
    assert float(weights[0]) == pytest.approx(float(best), abs=1e-3)
    assert fit(networks, points, weights="evidence").weights.sum() == pytest.approx(1)


def test_labels_of_one_input_count_once_in_a_standard_error():
    layer = nn.Linear(3, 1)
    labels = (X[:, :1] > 0).double()
    errors = []
    for copies in (1, 30):
        repeated = nn.Linear(3, copies)
        repeated.weight.data = layer.weight.data.repeat(copies, 1)
        repeated.bias.data = layer.bias.data.repeat(copies)
        loader = [(X, labels.expand(-1, copies))]
        posterior = fit(repeated, loader)
        rows = posterior.read(loader, "loader", labelled=True)
        loss = posterior.distribution_of(posterior.project(next(rows.chunks()))).scores(rows.labels)["nll"]
        errors.append(paired(loss, torch.zeros_like(loss), rows)[1])
    assert errors[0] == pytest.approx(errors[1], rel=1e-9)


def test_labels_are_measured_one_by_one():
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(200, 3, generator=generator)
    labels = torch.randint(2, (200, 3), generator=generator).double()
    labels[::5, 1] = NAN
    labels[:, 2] = 1.0
    areas = metrics.auroc_of_labels(probs, labels)
    precisions = metrics.average_precision_of_labels(probs, labels)
    gaps = metrics.calibration_error_of_labels(probs, labels)
    for label in range(3):
        known = ~labels[:, label].isnan()
        truth = labels[known, label].numpy()
        predicted = probs[known, label].numpy()
        assert float(precisions[label]) == pytest.approx(sklearn.average_precision_score(truth, predicted))
        bins = np.ceil(predicted * 15).astype(int)
        gap = sum(abs((predicted - truth)[bins == index].sum()) for index in range(1, 16)) / len(predicted)
        assert float(gaps[label]) == pytest.approx(gap)
        if label < 2:
            assert float(areas[label]) == pytest.approx(sklearn.roc_auc_score(truth, predicted))
    assert math.isnan(float(areas[2]))
    with pytest.raises(DataError, match=r"\(200, 3\)"):
        metrics.auroc_of_labels(probs, labels[:, :2])


# --- wrong use --------------------------------------------------------------------------------------------------------

WRONG_LABELS = {
    "class indices for several labels": (3, torch.zeros(6, dtype=torch.int64), r"\(6, 3\).*class indices.*categorical"),
    "class indices for one logit": (1, torch.tensor([0, 1, 2, 3, 1, 0]), r"0 or 1.*class indices"),
    "fewer rows": (3, torch.zeros(5, 3), r"\(6, 3\).*\(5, 3\)"),
    "soft labels": (2, torch.full((6, 2), 0.3), "soft"),
    "all missing": (2, torch.full((6, 2), NAN), "known label|every label is missing"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_labels_that_do_not_fit_are_named(name):
    outputs, labels, words = WRONG_LABELS[name]
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))
    with pytest.raises(DataError, match=f"(?si){words}"):
        fit(network, [(X, labels)])


def test_outputs_that_do_not_fit_are_named():
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    finished = nn.Sequential(body, nn.Linear(4, 2), nn.Sigmoid())
    with pytest.raises(HeadError, match="sigmoid"):
        fit(finished, [(X, torch.zeros(6, 2))])
    with pytest.raises(HeadError, match="probabilities"):
        mola.ensemble(finished, likelihood="bernoulli").predict(torch.randn(64, 3))
    with pytest.raises(HeadError, match="bernoulli"):
        mola.fit(nn.Sequential(body, nn.Linear(4, 1)), [(X, torch.zeros(6, dtype=torch.int64))], progress=False)
    with pytest.raises(DataError, match="bernoulli"):  # one-hot labels for a softmax
        mola.fit(nn.Sequential(body, nn.Linear(4, 2)), [(X, torch.eye(2).repeat(3, 1))], progress=False)


@pytest.mark.parametrize("wrapped", [nn.Sequential, Squeezed])
def test_logits_between_0_and_1_of_a_weak_network_are_logits(wrapped):
    x = torch.randn(200, 3)
    layer = nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.mul_(0.1)
        layer.bias.fill_(0.5)
    expected = torch.sigmoid(layer(x)).detach()
    assert bool(((layer(x) > 0) & (layer(x) < 1)).all())
    posterior = fit(wrapped(layer), [(x, (torch.rand(200) < 0.6).float())], prior_precision=1e12)
    torch.testing.assert_close(posterior(x), expected, atol=1e-5, rtol=0)
    plain = mola.ensemble(wrapped(layer), likelihood="bernoulli")
    torch.testing.assert_close(plain.predict(x).probs, expected)
