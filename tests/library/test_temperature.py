"""Temperatures: the exact minimum under the prior, against scipy and a fine grid; the predictors that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, special
from sklearn.datasets import load_digits
from torch import nn

import molaplace as mola
from molaplace.calibration import fit_temperature, temperature_scaled
from molaplace.errors import DataError, MolaWarning, OptionError
from molaplace.rules.temperature import best_temperature
from tests.conftest import make_problem
from tests.library.problems import train


def loss_at(logits, labels, weights, temperature):
    """The mixture's log loss and the prior, written out."""
    members = special.softmax(logits / temperature, axis=-1)[:, np.arange(len(labels)), labels]
    loss = -np.log(np.tensordot(weights, members, axes=1)).mean()
    return loss + (2 * np.log(temperature) ** 2 / len(labels) if temperature < 1 else 0)


def draw(members, count=60, classes=4, scale=3.0, seed=0, sharpness=0.5):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(members, count, classes, generator=generator)
    chosen = torch.distributions.Categorical(logits=sharpness * logits.mean(0))
    torch.manual_seed(seed)
    return logits, chosen.sample()


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sharpness", [0.5, 5.0])
def test_the_temperature_is_scipys_and_the_best_of_a_fine_grid(members, seed, sharpness):
    logits, labels = draw(members, seed=seed, sharpness=sharpness)
    weights = torch.arange(1.0, members + 1) / sum(range(1, members + 1))
    temperature = fit_temperature(logits, labels, weights)

    def loss(log_t):
        return loss_at(logits.numpy(), labels.numpy(), weights.numpy(), np.exp(log_t))

    scipys = optimize.minimize_scalar(loss, bracket=(np.log(temperature) - 1, np.log(temperature) + 1), tol=1e-12)
    assert abs(np.log(temperature) - scipys.x) < 1e-6  # scipy sees the loss alone, whose minimum is flat to rounding
    assert loss(np.log(temperature)) <= min(loss(log_t) for log_t in np.linspace(-4, 5, 400)) + 1e-12
    step = 1e-5
    slope = (loss(np.log(temperature) + step) - loss(np.log(temperature) - step)) / (2 * step)
    assert abs(slope) < 1e-7
    assert (temperature < 1) == (sharpness > 1)


def test_two_minima_and_the_lower_is_taken():
    """Members whose logits differ in scale want different temperatures: some such losses have two minima."""
    generator = torch.Generator().manual_seed(3)
    grid = np.exp(np.linspace(-7, 9, 400))
    count = 0
    for _ in range(60):
        logits = torch.tensor([0.05, 50.0])[:, None, None] * torch.randn(2, 12, 3, generator=generator)
        labels = torch.randint(3, (12,), generator=generator)
        losses = np.array([loss_at(logits.numpy(), labels.numpy(), [0.5, 0.5], t) for t in grid])
        inner = (losses[1:-1] < losses[:-2]) & (losses[1:-1] < losses[2:])
        if inner.sum() == 2 and 0 < losses.argmin() < len(grid) - 1:
            count += 1
            temperature = fit_temperature(logits, labels)
            assert loss_at(logits.numpy(), labels.numpy(), [0.5, 0.5], temperature) <= losses.min() + 1e-12
    assert count >= 2


def test_labels_that_contradict_the_logits_take_the_end_of_the_range_with_a_warning():
    logits, _ = draw(1)
    with pytest.warns(MolaWarning, match="goes to infinity"):
        temperature = fit_temperature(logits, logits[0].argmin(1))
    assert float((logits[0] / temperature).softmax(-1).amax()) < 0.26
    with pytest.warns(MolaWarning, match="every temperature"):
        assert fit_temperature(torch.ones(1, 5, 3), torch.zeros(5, dtype=torch.long)) == 1.0


@pytest.mark.parametrize("scale", [0.03, 3.0, 300.0])
def test_labels_that_are_all_right_sharpen_as_far_as_the_prior_allows(scale):
    logits, _ = draw(1, scale=scale)
    labels = logits[0].argmax(1)
    temperatures = [fit_temperature(logits.repeat(1, copies, 1), labels.repeat(copies)) for copies in (1, 10, 100)]
    assert all(0 < temperature <= 1 + 1e-6 for temperature in temperatures)
    if scale < 300:
        assert temperatures == sorted(temperatures, reverse=True)  # more data are stronger evidence
        assert temperatures[0] > temperatures[2]


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (torch.randn(3), torch.zeros(3, dtype=torch.long), "members, data, classes"),
        (torch.randn(1, 4, 1), torch.zeros(4, dtype=torch.long), "2 classes"),
        (torch.randn(1, 4, 3), torch.full((4,), 3), r"lie in \[0, 2\]"),
        (torch.randn(1, 4, 3), torch.zeros(5, dtype=torch.long), "4 class indices"),
        (torch.full((1, 4, 3), float("nan")), torch.zeros(4, dtype=torch.long), "NaN"),
    ],
)
def test_bad_data_are_refused(logits, labels, words):
    with pytest.raises(DataError, match=words):
        fit_temperature(logits, labels)


def problems():
    """Three networks, and labels that they know something about."""
    made = [make_problem(seed) for seed in range(3)]
    with torch.no_grad():
        probs = sum((problem.network(made[0].inputs) / 2).softmax(-1) for problem in made) / 3
    made[0].labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    return made


@pytest.mark.parametrize("mean", ["probabilities", "logits"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_the_predictor_is_the_formula_at_its_best_temperature(likelihood, mean):
    made = problems()
    weights = torch.tensor([0.5, 0.3, 0.2])
    networks = [problem.network for problem in made]
    inputs = made[0].inputs
    labels = made[0].labels
    with torch.no_grad():
        logits = torch.stack([network(inputs) for network in networks])
    if likelihood == "bernoulli":
        labels = torch.bernoulli((logits.sum(0) / 6).sigmoid())
        labels[0, 1] = torch.nan
    options = {"mean": mean, "weights": weights, "likelihood": likelihood, "progress": False}
    predictor = temperature_scaled(networks, [(inputs, labels)], **options)

    def formula(temperature):
        link = (lambda z: z.softmax(-1)) if likelihood == "categorical" else torch.sigmoid
        if mean == "logits":
            return link(torch.einsum("k,knc->nc", weights, logits) / temperature)
        return torch.einsum("k,knc->nc", weights, link(logits / temperature))

    def loss(probs):
        if likelihood == "categorical":
            return float(nn.functional.nll_loss(probs.log(), labels))
        known = ~labels.isnan()
        return float(nn.functional.binary_cross_entropy(probs[known], labels[known]))

    torch.testing.assert_close(predictor(inputs), formula(predictor.temperature))
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert loss(formula(factor * predictor.temperature)) > loss(predictor(inputs))


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
@pytest.mark.parametrize(("factor", "bound"), [(1.0, 1.2), (0.3, 0.7)])
def test_sixty_digits_without_an_error_do_not_ruin_any_temperature(factor, bound):
    """Without a prior, temperatures tend to 0, and the log loss on test digits is infinite; with it, underconfidence is mended."""
    generator = torch.Generator().manual_seed(0)
    images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=generator)
    images = images[order] / 16
    labels = labels[order]
    networks = []
    for seed in range(3):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        train(network, images[:500], labels[:500], 100, 0.01)
        network[2].weight.data *= factor
        network[2].bias.data *= factor
        networks.append(network)
    with torch.no_grad():
        right = torch.stack([network(images[500:900]).argmax(1) == labels[500:900] for network in networks]).all(0)
    rows = 500 + right.nonzero().flatten()[:60]
    validation = [(images[rows], labels[rows])]

    def log_loss(predictor):
        return float(-predictor(images[900:]).gather(1, labels[900:, None]).log().mean())

    plain = log_loss(mola.ensemble(networks[0]))
    assert log_loss(temperature_scaled(networks[0], validation)) < bound * plain
    for mean in ("probabilities", "logits"):
        assert log_loss(temperature_scaled(networks, validation, mean=mean)) < bound * plain
    posterior = mola.fit(networks, [(images[:500], labels[:500])], progress=False)
    for rule in ("nll", "calibrated"):
        assert log_loss(posterior.tune(validation, rule=rule, progress=False)) < bound * plain


def test_regressions_and_other_settings_are_refused():
    problem = make_problem()
    with pytest.raises(OptionError, match="scale_noise"):
        temperature_scaled(problem.network, problem.loader, likelihood="gaussian")
    with pytest.raises(OptionError, match="mean must be one of"):
        temperature_scaled(problem.network, problem.loader, mean="logit")


def test_a_temperature_at_the_end_of_the_range_is_the_one_that_is_named():
    inputs = 100 * torch.randn(60, 3)
    network = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.eye(3))
    with pytest.warns(MolaWarning, match="contradict"):
        tuned = mola.ensemble(network).tune([(inputs, inputs.argmin(1))], progress=False)
    assert f"{tuned.temperature:.3g}" in " ".join(tuned.tuning.notes)


def test_the_search_stays_in_its_range():
    """Logarithms round: a grid from log(low) to log(high) may end beyond the range, depending on the spread of the logits."""
    tried = []
    for span in torch.linspace(0.05, 40, 200).tolist():
        best_temperature(lambda t: tried.append(t) or (t - 1) ** 2, torch.tensor([[0.0, span]]), 100, 1e-3, 1e3)
    assert min(tried) >= 1e-3
    assert max(tried) <= 1e3
