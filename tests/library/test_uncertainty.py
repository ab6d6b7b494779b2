"""Entropies of sure predictions to relative rounding: the epistemic part is a share of them."""

import math

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.uncertainty import entropy, entropy_limit, softmax_and_entropy
from tests.closeness import assert_close


def reference(logits):
    """-sum p ln p in float64; good to 1e-7 above the entropies of 1e-9 that are compared here."""
    return torch.special.entr(logits.double().softmax(-1)).sum(-1)


@pytest.mark.parametrize("classes", [2, 7])
def test_entropies_of_sure_predictions_have_all_digits_of_float32(classes):
    logits = torch.cat([torch.randn(500, classes) * scale for scale in (1e-3, 1.0, 5.0, 10.0, 20.0)]).float()
    expected = reference(logits)
    large = expected > 1e-9
    assert float(expected[large].min()) < 1e-6  # some are sure
    probs, entropies = softmax_and_entropy(logits)
    torch.testing.assert_close(probs, logits.softmax(-1), rtol=1e-5, atol=0)
    for values in (entropies, entropy(probs)):
        torch.testing.assert_close(values[large].double(), expected[large], rtol=1e-5, atol=0)
    naive = torch.special.entr(probs).sum(-1)
    assert float(((naive - expected) / expected)[large].abs().max()) > 1e-3  # the error that the formula avoids


@pytest.mark.parametrize(
    "logits", [[0.0, 0.0], [0.0] * 5, [3.0, 3.0, 0.0], [40.0, 40.0, 0.0], [500.0, 0.0, 0.0], [-1e12, 1e12, 1e12]]
)
def test_ties_and_certainty(logits):
    logits = torch.tensor(logits, dtype=torch.float32)
    probs, entropies = softmax_and_entropy(logits)
    for values in (entropies, entropy(probs)):
        torch.testing.assert_close(values.double(), reference(logits), rtol=1e-6, atol=1e-30)


def test_the_epistemic_part_agrees_across_precisions_where_the_draws_are_sure_and_the_link_is_not():
    network = nn.Linear(4, 3).float()
    labels = torch.arange(200) % 3
    inputs = torch.randn(200, 4, dtype=torch.float32) + 3 * torch.eye(3, 4, dtype=torch.float32)[labels]
    with torch.no_grad():
        network.weight.copy_(4 * torch.eye(3, 4))
    information = []
    for dtype in (torch.float32, torch.float64):
        posterior = mola.fit(
            network.to(dtype), [(inputs.to(dtype), labels)], prior_precision=0.1, link="mean-field", progress=False
        )
        information.append(posterior.predict(3 * inputs.to(dtype)).mutual_information.double())
    assert_close(information[0], information[1], "difference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_the_parts_of_the_uncertainty_are_never_negative_and_sum_to_it(likelihood, dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator, dtype=torch.float64).to(dtype)
    labels = {
        "categorical": torch.arange(60) % 3,
        "bernoulli": torch.randint(2, (60, 3), generator=generator),
        "gaussian": torch.randn(60, 3, generator=generator, dtype=torch.float64),
    }[likelihood]
    networks = [nn.Linear(4, 3).to(dtype) for _ in range(2)]
    for network in networks:
        nn.init.normal_(network.weight, std=10, generator=generator)
    options = {"likelihood": likelihood, "prior_precision": 1e3, "progress": False}
    posterior = mola.fit(networks, [(inputs, labels)], **options)
    for exponent in (0.0, 2.0):
        prediction = posterior.with_distance_exponent(exponent).predict(2 * inputs)
        total = prediction.variance if likelihood == "gaussian" else prediction.entropy
        assert bool((prediction.aleatoric >= 0).all())
        assert bool((prediction.epistemic >= 0).all())
        assert_close(prediction.aleatoric + prediction.epistemic, total, str(dtype).removeprefix("torch."))
        assert prediction.numpy().keys() >= {"aleatoric", "epistemic", "ood_score"}
        for name, values in prediction.numpy().items():
            torch.testing.assert_close(torch.from_numpy(values), getattr(prediction, name), rtol=0, atol=0)


@pytest.mark.parametrize("draws", [8, 16, 64])
@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_the_entropy_of_a_mean_of_few_draws_is_extrapolated_to_that_of_many(draws, spread):
    """A mean of few draws has too little entropy. The estimate is closer, and never exceeds the largest entropy."""
    means = torch.randn(40, 1, 30)
    probs = (means + spread * torch.randn(40, 4096, 30)).softmax(-1)
    expected = entropy(probs.mean(1))
    parts = probs.view(40, 4096 // draws, 4, draws // 4, 30).mean(3)
    limits = torch.stack([entropy_limit(quarters) for quarters in parts.unbind(1)]).mean(0)
    plain = entropy(parts.mean(2)).mean(1)
    assert bool((plain < expected).all())
    assert float((limits - expected).abs().mean()) < 0.8 * float((plain - expected).abs().mean())
    assert bool((limits <= math.log(30) + 1e-12).all())
