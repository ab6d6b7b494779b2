"""Rivals that calibrate an ensemble's logits with more parameters than a temperature."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import nll_loss

import molaplace as mola
from molaplace.calibration import fit_temperature
from molaplace_lab.scaling import SCALINGS, jucal
from tests.closeness import assert_close

REFERENCE = json.loads((Path(__file__).parent / "structured_scaling_reference.json").read_text())
LOGITS = torch.tensor(REFERENCE["logits"], dtype=torch.float64)
LABELS = torch.tensor(REFERENCE["labels"])


@pytest.mark.parametrize("name", ["svs", "sms"])
def test_structured_scaling_agrees_with_its_authors_package(name):
    """The reference is probmetrics 1.3, which computes in float32 and has no prior on the temperature."""
    calibration, _ = SCALINGS[name](LOGITS, LABELS)
    expected = torch.tensor(REFERENCE[name], dtype=torch.float64)
    torch.testing.assert_close(calibration(LOGITS[: len(expected)]).exp(), expected, rtol=0, atol=1e-3)


def test_jucal_is_the_mixture_with_a_temperature_and_pooling():
    torch.manual_seed(0)
    signal = 2 * torch.randn(300, 1, 4)
    labels = signal[:, 0].softmax(1).multinomial(1)[:, 0]
    calibration, chosen = jucal(signal + 1.5 * torch.randn(300, 3, 4), labels)
    networks = [torch.nn.Linear(4, 4, bias=False).double() for _ in range(3)]
    with torch.no_grad():
        for network in networks:
            network.weight.copy_(torch.randn(4, 4))
        inputs = torch.randn(20, 4)
        logits = torch.stack([network(inputs) for network in networks], 1)
    assert 0 <= chosen["spread"] < 0.9  # most of the disagreement is noise
    mixture = mola.ensemble(networks).with_temperature(chosen["temperature"]).with_pooling(chosen["spread"])
    assert_close(calibration(logits).exp(), mixture.predict(inputs).probs)


def test_jucal_finds_the_lowest_log_loss():
    calibration, chosen = jucal(LOGITS, LABELS)
    mean = LOGITS.mean(1, keepdim=True)

    def loss(temperature, spread):
        return float(nll_loss(((mean + spread * (LOGITS - mean)) / temperature).softmax(2).mean(1).log(), LABELS))

    lowest = min(loss(t / 50, c / 50) for t in range(20, 250, 2) for c in range(0, 150, 3))
    assert float(nll_loss(calibration(LOGITS), LABELS)) <= lowest + 1e-6
    best = loss(**chosen)
    assert best == pytest.approx(float(nll_loss(calibration(LOGITS), LABELS)))
    for factor, step in itertools.product((0.998, 1.0, 1.002), (-0.01, 0.0, 0.01)):
        assert best <= loss(factor * chosen["temperature"], chosen["spread"] + step) + 1e-9


def test_one_network_has_no_disagreement_to_scale():
    calibration, chosen = jucal(LOGITS[:, :1], LABELS)
    temperature = fit_temperature(LOGITS[:, 0], LABELS)
    assert chosen["temperature"] == pytest.approx(temperature, rel=0.05)
    scaled = (LOGITS[:, 0] / temperature).log_softmax(1)
    assert float(nll_loss(calibration(LOGITS[:, :1]), LABELS)) <= float(nll_loss(scaled, LABELS)) + 1e-4
