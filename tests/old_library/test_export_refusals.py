"""Mixtures that have no closed form of constants are refused by name before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mola
from mola.errors import OptionError

CLASSES, WIDTH = 3, 6


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).float().eval()


def data(count: int = 24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float32), torch.arange(count) % CLASSES


def whole():
    return mola.fit_whole(network(), [data()], structure="diag", progress=False)


def swag():
    return mola.Swag.fit(network(), [data()], learning_rate=0.01, epochs=2, rank=2, samples=2, progress=False)


def mimo():
    return mola.Mimo(network(), 2, example=data()[0])


@pytest.mark.parametrize("write", [mola.export_onnx, mola.export_torch])
@pytest.mark.parametrize("make", [whole, swag, mimo])
def test_other_mixtures_are_refused_and_told_what_to_do(make, write, tmp_path):
    mixture = make()
    name = type(mixture).__name__
    with pytest.raises(
        OptionError, match=rf"mola\.fit, mola\.ensemble or mola\.load, got {name}\..*networks to mola\.fit"
    ):
        write(mixture, tmp_path / "file", data(2)[0])
    assert list(tmp_path.iterdir()) == []


def test_the_heads_of_a_mimo_network_are_exported_as_the_message_says(tmp_path):
    posterior = mola.mimo_mola(mimo(), [data()], progress=False)
    mola.export_torch(posterior, tmp_path / "file.pt2", data(2)[0], outputs=["probabilities", "ood_score"])
    run = mola.load_exported(tmp_path / "file.pt2", trust=True)
    for count in (1, 7):
        inputs = data(24)[0][:count]
        found, wanted = run(inputs), posterior.predict(inputs)
        torch.testing.assert_close(found["probabilities"], wanted.probs, rtol=0, atol=1e-5)
        torch.testing.assert_close(found["ood_score"], wanted.ood_score, rtol=0, atol=1e-5)
