"""Exported files of posteriors for labels that are yes or no say what the posterior says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mola
from tests.closeness import assert_close
from tests.library.test_bernoulli import Squeezed

pytestmark = pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")


def posterior_of(*outputs, rule, squeezed=False):
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    inputs = torch.randn(200, 5)
    networks = [nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, *outputs)) for _ in range(2)]
    labels = (networks[0](inputs).detach() + torch.randn(200, *outputs) > 0).float()
    given = [Squeezed(network) for network in networks] if squeezed else networks
    return mola.fit(
        given, [(inputs, labels)], [(inputs, labels)], likelihood="bernoulli", rule=rule, progress=False
    ), inputs


@pytest.mark.parametrize(
    ("writer", "outputs", "squeezed"),
    [
        pytest.param("onnx", 3, False, id="onnx, three labels", marks=pytest.mark.slow),
        pytest.param("torch", 1, True, id="torch, (n,)"),
    ],
)
def test_a_file_says_what_the_posterior_says(writer, outputs, squeezed, tmp_path):
    if writer == "onnx":
        pytest.importorskip("onnxruntime")
    posterior, inputs = posterior_of(outputs, rule="distance", squeezed=squeezed)
    posterior = posterior.with_distance_exponent(1.0)
    write = mola.export_onnx if writer == "onnx" else mola.export_torch
    path = tmp_path / ("labels.onnx" if writer == "onnx" else "labels.pt2")
    written = write(posterior, path, inputs[:4], classes=[f"label {index}" for index in range(outputs)])
    # The outlier score is in units of its spread on the validation data, and these are alike.
    assert written.differences.pop("ood_score") < 1e-4
    assert max(written.differences.values()) < 1e-5
    assert written.document["likelihood"] == "bernoulli"
    found = mola.load_exported(path, trust=True)(inputs[:7])
    expected = posterior.predict(inputs[:7])
    assert found["probabilities"].shape == found["mutual_information"].shape == (7, outputs)
    assert_close(found["probabilities"], expected.probs)
    assert torch.equal(torch.as_tensor(found["label"]), expected.label)


def test_a_plain_ensemble(tmp_path):
    pytest.importorskip("onnxruntime")
    posterior, inputs = posterior_of(2, rule="nll")
    plain = mola.ensemble(posterior.networks, likelihood="bernoulli")
    written = mola.export_onnx(plain, tmp_path / "plain.onnx", inputs[:4])
    assert max(written.differences.values()) < 1e-5
