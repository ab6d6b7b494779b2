"""The comparison with laplace-torch: its records, and its script against a dense peer, so that it runs on the day it is needed."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ("compare_laplace_torch", "compare_laplace_torch_regression")


class Dense:
    """Dense stand-in for laplace-torch's `Laplace` on a last layer: the Hessian of the loss by autograd, inverted.

    Parameters are weights row by row, and then biases. `kron` is `full` here, as it is for regression without a bias.
    """

    def __init__(
        self, model, likelihood, *, subset_of_weights, hessian_structure, backend, sigma_noise=1.0, prior_precision=1.0
    ):
        assert subset_of_weights == "last_layer"
        assert backend is Dense
        self.body, self.head = model[:-1], model[-1]
        self.likelihood, self.structure = likelihood, hessian_structure
        self.sigma_noise, self.prior_precision = torch.tensor(sigma_noise), prior_precision

    def fit(self, loader) -> None:
        inputs, self.labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        self.features = self.body(inputs).detach()
        self.flat = torch.cat([one.detach().flatten() for one in self.head.parameters()])
        self.n_params, self.n_data, self.n_outputs = len(self.flat), len(inputs), self.head.out_features
        self.curvature = hessian(self.unit_loss, self.flat)
        if self.structure == "diag":
            self.curvature = torch.diag(self.curvature.diagonal())

    def outputs(self, flat: Tensor, features: Tensor) -> Tensor:
        named, start = {}, 0
        for name, one in self.head.named_parameters():
            named[name] = flat[start : start + one.numel()].view_as(one)
            start += one.numel()
        return functional_call(self.head, named, (features,))

    def unit_loss(self, flat: Tensor) -> Tensor:
        """Loss at unit noise, without terms that depend only on the noise."""
        outputs = self.outputs(flat, self.features)
        if self.likelihood == "regression":
            return (outputs - self.labels).square().sum() / 2
        return nn.functional.cross_entropy(outputs, self.labels, reduction="sum")

    @property
    def posterior_precision(self) -> Tensor:
        whole = self.curvature / self.sigma_noise**2 + self.prior_precision * torch.eye(self.n_params)
        return whole.diagonal() if self.structure == "diag" else whole

    @property
    def log_likelihood(self) -> Tensor:
        constant = self.n_data * self.n_outputs * torch.log(self.sigma_noise * math.sqrt(2 * math.pi))
        found = -self.unit_loss(self.flat) / self.sigma_noise**2
        return found - constant if self.likelihood == "regression" else found

    def log_marginal_likelihood(self, prior_precision=None, sigma_noise=None) -> Tensor:
        self.prior_precision = self.prior_precision if prior_precision is None else prior_precision
        self.sigma_noise = self.sigma_noise if sigma_noise is None else sigma_noise.squeeze()
        prior = torch.as_tensor(self.prior_precision)
        precision = self.posterior_precision
        size = precision.log().sum() if precision.dim() == 1 else torch.linalg.slogdet(precision).logabsdet
        penalty = prior * self.flat.square().sum() - self.n_params * prior.log()
        return (self.log_likelihood - (size + penalty) / 2).squeeze()

    def _glm_predictive_distribution(self, inputs) -> tuple[Tensor, Tensor]:
        features = self.body(inputs).detach()
        slopes = jacobian(lambda flat: self.outputs(flat, features), self.flat)
        precision = self.posterior_precision
        covariance = torch.linalg.inv(torch.diag(precision) if precision.dim() == 1 else precision)
        return self.outputs(self.flat, features).detach(), (slopes @ covariance @ slopes.mT).detach()

    def __call__(self, inputs, link_approx="probit"):
        mean, spread = self._glm_predictive_distribution(inputs)
        if self.likelihood == "regression":
            return mean, spread
        if link_approx == "probit":
            return torch.softmax(mean / (1 + math.pi / 8 * spread.diagonal(dim1=1, dim2=2)).sqrt(), 1)
        # Hobbhahn et al. (2022): logits given that their sum is 0, then the Dirichlet distribution nearest to them.
        rows, total = spread.sum(2), spread.sum((1, 2))[:, None]
        mean = mean - rows * mean.sum(1, keepdim=True) / total
        spread = spread - rows[:, :, None] * rows[:, None] / total[:, :, None]
        variance, classes = spread.diagonal(dim1=1, dim2=2), mean.shape[1]
        if link_approx == "bridge_norm":
            scale = variance.mean(1, keepdim=True) / math.sqrt(classes / 2)
            mean, variance = mean / scale.sqrt(), variance / scale
        alpha = (1 - 2 / classes + mean.exp() / classes**2 * (-mean).exp().sum(1, keepdim=True)) / variance
        return alpha / alpha.sum(1, keepdim=True)


@pytest.fixture
def peers(monkeypatch):
    """The script of the comparison, with the dense peer in laplace-torch's place."""
    laplace = ModuleType("laplace")
    laplace.Laplace = Dense
    monkeypatch.setitem(sys.modules, "laplace", laplace)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_classes_agree_with_a_dense_peer(peers, bias):
    inputs, labels, unseen = torch.randn(120, 8), torch.randint(5, (120,)), torch.randn(20, 8)
    network, data = peers.mlp(5, bias), TensorDataset(inputs, labels)
    peers.train(network, data)
    for structure in ("full", "diag"):
        rows = peers.compare("MLP", network, structure, data, (unseen, labels[:20]), Dense)
        judged = [row for row in rows if structure == "full" or "bridge" not in row["quantity"]]
        assert len(judged) >= 6
        for row in judged:
            assert max(row["difference"]) <= row.get("tolerance", peers.TOLERANCE), row


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_agrees_with_a_dense_peer(peers, outputs, bias):
    inputs, unseen = torch.randn(120, 8), torch.randn(20, 8)
    data = TensorDataset(inputs, peers.observed(inputs, outputs))
    network = peers.mlp(outputs, bias)
    peers.train(network, data)
    # For regression `kron-exact` equals `full`, also with a bias if the peer does not treat the bias separately.
    for structure in ("full", "diag", "kron-exact"):
        rows = peers.compare("MLP", network, structure, data, (unseen, peers.observed(unseen, outputs)), Dense)
        assert {row["quantity"] for row in rows} >= {"predictive variance", "log marginal likelihood", "slope in noise"}
        for row in rows:
            assert max(row["difference"]) <= row.get("tolerance", peers.TOLERANCE), row


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_agrees_wherever_definitions_do(name):
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert record["tolerance"] <= 1e-8
    for row in record["same"]:
        assert max(row["difference"]) <= row.get("tolerance", record["tolerance"]), row
    compared = {(row["network"].removesuffix(" no bias").split("-")[-1], row["structure"]) for row in record["same"]}
    widths = {"1", "3"} if "regression" in name else {"5", "10"}
    assert compared == {(width, structure) for width in widths for structure in ("full", "diag", "kron-exact")}
    if "regression" in name:
        for quantity in ("mean", "weight covariance by output", "predictive variance", "log marginal likelihood"):
            assert sum(row["quantity"] == quantity for row in record["same"]) == 15


@pytest.mark.slow
def test_laplace_torch_itself_agrees(monkeypatch, capsys):
    """Runs only if the environment exists: creating it takes minutes and needs the package index."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    environment = importlib.import_module("peer_environment")
    if not (environment.cache_folder() / "ready.json").exists():
        pytest.skip("NO LAPLACE-TORCH: run benchmarks/peers.py laplace once, which makes an environment for it.")
    peers = importlib.import_module("peers")
    monkeypatch.setattr(peers.record, "write", lambda name, result: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "laplace"])
    assert peers.main() == 0, capsys.readouterr().out
