"""Entropies of sure predictions to relative rounding: the epistemic part is a share of them, in PyTorch and in files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mola
from mola.export import Exported
from mola.export.graph import Signature
from mola.numerics import even_normals
from mola.uncertainty import entropy, fine_entropy, softmax_and_entropy


def reference(logits):
    """-sum p ln p in float64; good to 1e-7 above the entropies of 1e-9 that are looked at here."""
    probs = logits.double().softmax(-1)
    return torch.special.entr(probs).sum(-1)


@pytest.mark.parametrize("classes", [2, 7])
def test_entropies_of_sure_predictions_have_all_digits_of_float32(classes):
    generator = torch.Generator().manual_seed(0)
    scales = (1e-3, 1.0, 5.0, 10.0, 20.0)
    logits = torch.cat([torch.randn(500, classes, generator=generator) * scale for scale in scales]).float()
    wanted = reference(logits)
    kept = wanted > 1e-9
    assert float(wanted[kept].min()) < 1e-6  # some are sure
    probs, found = softmax_and_entropy(logits, -1)
    torch.testing.assert_close(found[kept].double(), wanted[kept], rtol=1e-5, atol=0)
    torch.testing.assert_close(probs, logits.softmax(-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(fine_entropy(probs)[kept].double(), wanted[kept], rtol=1e-5, atol=0)
    assert float(((entropy(probs) - wanted) / wanted)[kept].abs().max()) > 1e-3  # what it is for
    turned = softmax_and_entropy(logits.T, 0)
    torch.testing.assert_close(turned[1], found, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "logits", [[0.0, 0.0], [0.0] * 5, [3.0, 3.0, 0.0], [40.0, 40.0, 0.0], [500.0, 0.0, 0.0], [-1e12, 1e12, 1e12]]
)
def test_ties_and_certainty(logits):
    logits = torch.tensor(logits, dtype=torch.float32)
    probs, found = softmax_and_entropy(logits, -1)
    torch.testing.assert_close(found.double(), reference(logits), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(fine_entropy(probs).double(), reference(logits), rtol=1e-6, atol=1e-30)


def test_the_epistemic_part_agrees_where_the_draws_are_sure_and_the_link_is_not():
    """The mean-field link is less sure than its draws: what they leave of digits is then multiplied by hundreds."""
    torch.manual_seed(0)
    network = nn.Linear(4, 3).float()
    labels = torch.arange(200) % 3
    inputs = torch.randn(200, 4, dtype=torch.float32) + 3 * torch.eye(3, 4, dtype=torch.float32)[labels]
    with torch.no_grad():
        network.weight.copy_(4 * torch.eye(3, 4))
    posterior = mola.fit(network, [(inputs, labels)], prior_precision=0.1, link="mean-field", progress=False)
    rows = 3 * inputs
    with torch.no_grad():
        found = Exported(posterior, Signature.of(rows, network))(rows)["mutual_information"]
    wanted = posterior.predict(rows)
    exact = mola.fit(
        network.double(), [(inputs.double(), labels)], prior_precision=0.1, link="mean-field", progress=False
    )
    exact = exact.predict(rows.double()).mutual_information
    for value in (found, wanted.mutual_information):
        assert float((value.double() - exact).abs().max()) < 5e-6


def test_draws_do_not_depend_on_the_default_type_of_torch():
    found = []
    for kind in (torch.float32, torch.float64):
        torch.set_default_dtype(kind)
        found.append(even_normals.__wrapped__(16, 5, 3))
    assert torch.equal(*found)
