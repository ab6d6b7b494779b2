"""Run mola and laplace-torch on the same networks and print their differences as JSON. See `compare_laplace_torch.py`.

The two libraries define the same posterior for

* `full` and `diag`, with a bias: laplace-torch keeps it apart, at the end of the parameter vector; mola's bias trick puts it
  in the last column of the weights. The order differs, the Hessian does not.
* mola's `kron-exact` and laplace-torch's `kron`, on a head without bias. With one, laplace-torch gives the bias a block of
  its own, without covariance to the weights.

The Laplace bridge is the same where the constant vector is an eigenvector of the logit covariance, so for all structures but
`diag`: laplace-torch conditions the logits on a sum of 0, mola projects them, which is what the softmax does.

laplace-torch computes with BackPACK here. Its default backend, curvlinops, multiplies the Hessian of `full` out in float32
whatever the network's precision; the difference to that is listed apart, on the small network.
"""

import json
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import record
import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mola
from mola.lab.models import lenet

TOLERANCE = 1e-8
"""Eigendecomposition here, Cholesky there: at prior precision 1e-3 the posterior precisions have condition numbers of 1e6 and
more, so of float64's 16 digits about 10 can agree."""

PRIOR_PRECISIONS = (1e-3, 1e-1, 1.0, 30.0, 1e3)
PEER_NAME = {"full": "full", "diag": "diag", "kron-exact": "kron"}


def mlp(bias: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5, bias=bias))


def lenet_with(bias: bool) -> nn.Sequential:
    network = lenet()
    network[-1] = nn.Linear(84, 10, bias=bias)
    return network


CASES: tuple[tuple[str, Callable[[bool], nn.Sequential], tuple[int, ...]], ...] = (
    ("MLP 8-16-5", mlp, (8,)),
    ("LeNet 84-10", lenet_with, (1, 28, 28)),
)


def train(network: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """A few steps, so that logits are of the size of a trained network's."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    network.eval().zero_grad()


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest value."""
    ours, theirs = ours.detach(), theirs.detach()
    return float(f"{float((ours - theirs).abs().max() / theirs.abs().max()):.2g}")


def bias_last(classes: int, features: int, bias: bool) -> Tensor:
    """Where in laplace-torch's parameter vector (weights row by row, then biases) each of mola's weights (C, P) is."""
    weights = torch.arange(classes * features).view(classes, features)
    if bias:
        weights = torch.cat([weights, classes * features + torch.arange(classes)[:, None]], dim=1)
    return weights.flatten()


def their_covariance(peer: Any) -> Tensor:
    """Posterior covariance of all weights as a matrix."""
    precision = peer.posterior_precision
    if isinstance(precision, Tensor):
        return precision.inverse() if precision.dim() == 2 else torch.diag(1 / precision)
    return precision.to_matrix().inverse()


def our_whole_covariance(spectrum: Any, precision: float) -> Tensor:
    """Posterior covariance (CP, CP) of the structure `full`, from its spectrum."""
    vectors = spectrum.vectors.flatten(0, 1)
    prior = torch.kron(spectrum.unseen @ spectrum.unseen.T, torch.eye(spectrum.features, dtype=torch.float64))
    return (vectors / (spectrum.values + precision)) @ vectors.T + prior / precision


def quantities(ours: mola.MoLA, peer: Any, inputs: Tensor, order: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, mola's value and laplace-torch's."""
    component, precision = ours.components[0], ours.prior_precision[0]
    spectrum = component.curvature.spectrum
    with torch.no_grad():
        moments = component.moments(inputs)
    covariance = their_covariance(peer)[order][:, order]
    blocks = covariance.view(spectrum.outputs, spectrum.features, spectrum.outputs, spectrum.features)
    logits, logit_covariance = peer._glm_predictive_distribution(inputs)
    yield "logit mean", moments.mean, logits
    yield (
        "weight covariance by class",
        torch.stack([spectrum.class_covariance(precision, c) for c in range(spectrum.outputs)]),
        torch.stack([blocks[c, :, c] for c in range(spectrum.outputs)]),
    )
    if ours.structure == "full":
        yield "weight covariance, whole", our_whole_covariance(spectrum, precision), covariance
    yield "logit covariance", moments.spread.posterior.covariance(moments.spread.features), logit_covariance
    yield "log marginal likelihood", ours.log_evidence()[0], peer.log_marginal_likelihood()
    for link, theirs in ((mola.Probit(), "probit"), (mola.Bridge(), "bridge"), (mola.Bridge(True), "bridge_norm")):
        yield f"probabilities, {theirs}", ours.with_link(link)(inputs), peer(inputs, link_approx=theirs)


def evidence_slope(ours: mola.MoLA, peer: Any) -> tuple[float, float]:
    """The prior precision that mola's evidence rule picks, and laplace-torch's slope there by automatic differentiation.

    The slope is in the logarithm of the precision and relative to the number of weights, its value for a strong prior.
    """
    best = ours.tune(rule=mola.Evidence()).prior_precision[0]
    logarithm = torch.tensor(best, dtype=torch.float64).log().requires_grad_()
    (slope,) = torch.autograd.grad(peer.log_marginal_likelihood(logarithm.exp().view(1)), logarithm)
    return best, float(slope.abs()) / peer.n_params


def compare(name: str, network: nn.Module, structure: str, data: TensorDataset, inputs: Tensor, backend: Any) -> list:
    loader = DataLoader(data, batch_size=100)
    ours = mola.fit(network, loader, structure=structure, progress=False)
    peer = Laplace(
        deepcopy(network),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=PEER_NAME[structure],
        backend=backend,
    )
    peer.fit(loader)
    head = network[-1]
    order = bias_last(head.out_features, head.in_features, head.bias is not None)
    rows: dict[str, list[float]] = {}
    for precision in PRIOR_PRECISIONS:
        peer.prior_precision = precision
        for quantity, mine, theirs in quantities(ours.with_prior_precision(precision), peer, inputs, order):
            rows.setdefault(quantity, []).append(apart(mine, theirs))
    best, slope = evidence_slope(ours, peer)
    common = {"network": name, "structure": structure}
    listed = [
        common | {"quantity": quantity, "prior_precision": PRIOR_PRECISIONS, "difference": differences}
        for quantity, differences in rows.items()
    ]
    return [*listed, common | {"quantity": "evidence slope at best", "prior_precision": (best,), "difference": [slope]}]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices: threads would only wait for each other
    same, different = [], []
    for name, make, shape in CASES:
        inputs, labels = torch.randn(300, *shape, dtype=torch.float64), torch.randint(5, (300,))
        data, unseen = TensorDataset(inputs, labels), torch.randn(50, *shape, dtype=torch.float64)
        for bias in (True, False):
            network = make(bias).double()
            train(network, inputs, labels)
            label = f"{name}{'' if bias else ' no bias'}"
            for structure in PEER_NAME if not bias else ("full", "diag"):
                for row in compare(label, network, structure, data, unseen, BackPackGGN):
                    projected = structure != "diag" or "bridge" not in row["quantity"]
                    (same if projected else different).append(row)
            if bias:
                different += compare(label, network, "kron-exact", data, unseen, BackPackGGN)
            if bias and make is mlp:
                in_float32 = compare(label, network, "full", data, unseen, CurvlinopsGGN)
                different += [row | {"structure": "full, float32"} for row in in_float32]
    result = {
        "tolerance": TOLERANCE,
        "environment": record.environment("laplace-torch", "backpack-for-pytorch", "curvlinops-for-pytorch"),
        "same": same,
        "different": different,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
