"""Fit, predict, save and load with an installed molaplace; run before an upload, from outside the clone."""

import tempfile

import torch
from torch import nn

import molaplace as mola

torch.manual_seed(0)
x, y = torch.randn(60, 4), torch.arange(60) % 3
networks = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]
posterior = mola.fit(networks, [(x, y)], progress=False)
probs = posterior(x)
assert torch.allclose(probs.sum(1), torch.ones(60), atol=1e-5)
with tempfile.TemporaryDirectory() as folder:
    posterior.save(f"{folder}/posterior")
    assert torch.allclose(mola.load(f"{folder}/posterior", networks)(x), probs, atol=1e-6)
print(f"molaplace {mola.__version__} works: {posterior}")
