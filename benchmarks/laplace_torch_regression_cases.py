"""Run mola and laplace-torch on the same networks for numbers and print their differences as JSON. See `compare_laplace_torch.py`.

For one noise of all outputs, given to both, the two libraries define the same posterior for

* `full` and `diag`, with a bias or without;
* mola's `kron-exact` and laplace-torch's `kron`, on a head without bias. With one, laplace-torch gives the bias a block of its own,
  without covariance to the weights, and so a coarser approximation: the output side of the curvature is constant here, and
  `kron-exact` is `full`, with a bias or without.

laplace-torch has one noise for all outputs, so that of mola is shared, too. The rule of mola's evidence chooses both it and the prior
precision: laplace-torch's slopes must vanish there.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import record
import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from laplace_torch_cases import PEER_NAME, PRIOR_PRECISIONS, TOLERANCE, apart, bias_last, their_covariance
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mola
from mola.lab.models import lenet

NOISE = 0.3

SETTLED = 1e-6
"""Slope at the end of mola's search for the largest evidence: it ends where the evidence itself, in float64, grows no more."""

STEP = 2e-3
"""Of differences, in the logarithm of a prior precision or a noise."""


def mlp(outputs: int, bias: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs, bias=bias))


def lenet_with(outputs: int, bias: bool) -> nn.Sequential:
    network = lenet()
    network[-1] = nn.Linear(84, outputs, bias=bias)
    return network


CASES: tuple[tuple[str, Callable[[int, bool], nn.Sequential], tuple[int, ...], int], ...] = (
    ("MLP 8-16-1", mlp, (8,), 1),
    ("MLP 8-16-3", mlp, (8,), 3),
    ("LeNet 84-3", lenet_with, (1, 28, 28), 3),
)


def observed(inputs: Tensor, outputs: int) -> Tensor:
    """Targets (n, D): waves along the first number of each input, and noise."""
    phases = torch.arange(outputs, dtype=torch.float64)
    return torch.sin(inputs.flatten(1)[:, :1] + phases) + NOISE * torch.randn(len(inputs), outputs, dtype=torch.float64)


def train(network: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Some steps, so that outputs are of the size of the targets, and residuals are not."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.mse_loss(network(inputs), targets).backward()
        optimizer.step()
    network.eval().zero_grad()


def our_whole_precision(spectrum: Any, precision: float) -> Tensor:
    """Posterior precision (DP, DP) of the structure `full`, from its spectrum."""
    vectors = spectrum.vectors.flatten(0, 1)
    return (vectors * (spectrum.values + precision)) @ vectors.T


def quantities(
    ours: mola.RegressionMoLA, peer: Any, inputs: Tensor, targets: Tensor, order: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, mola's value and laplace-torch's."""
    (component,), (precision,) = ours.components, ours.prior_precision
    spectrum = component.curvature.spectrum
    with torch.no_grad():
        moments = component.moments(inputs)
    covariance = their_covariance(peer)[order][:, order]
    blocks = covariance.view(spectrum.outputs, spectrum.features, spectrum.outputs, spectrum.features)
    said = ours.predict(inputs)
    mean, spread = peer(inputs)
    variance = spread.diagonal(dim1=1, dim2=2) + peer.sigma_noise.square()
    yield "mean", said.mean, mean
    yield (
        "weight covariance by output",
        torch.stack([spectrum.class_covariance(precision, d) for d in range(spectrum.outputs)]),
        torch.stack([blocks[d, :, d] for d in range(spectrum.outputs)]),
    )
    if ours.structure == "full":
        yield (
            "weight precision, whole",
            our_whole_precision(spectrum, precision),
            peer.posterior_precision[order][:, order],
        )
        yield "weight covariance, whole", torch.linalg.inv(our_whole_precision(spectrum, precision)), covariance
    yield "functional covariance", moments.spread.posterior.covariance(moments.spread.features), spread
    yield "functional variance", said.epistemic, spread.diagonal(dim1=1, dim2=2)
    yield "predictive variance", said.variance, variance
    yield "log density of targets", said.log_prob(targets), normal_log_density(mean, variance, targets)
    yield (
        "log likelihood",
        torch.tensor(component.curvature.log_likelihood, dtype=torch.float64),
        peer.log_likelihood,
    )
    yield "log marginal likelihood", ours.log_evidence()[0], peer.log_marginal_likelihood()


def normal_log_density(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Of each datum's targets (n,), their outputs being independent."""
    return torch.distributions.Normal(mean, variance.sqrt()).log_prob(targets).sum(1)


def evidence_slopes(ours: mola.RegressionMoLA, peer: Any) -> tuple[float, float, list[float]]:
    """Prior precision and noise that mola's evidence rule picks, and laplace-torch's slopes there.

    Slopes are in logarithms, and relative to their own value far away: half the number of weights of a strong prior, and the number
    of targets of much noise. By differences of the fourth order: for `kron`, automatic differentiation does not reach the noise in
    laplace-torch's determinant.
    """
    free = ours._with(
        components=[one.of_likelihood(replace(one.likelihood, estimated=True)) for one in ours.components]
    )
    best = free.tune(rule=mola.Evidence(), progress=False)
    precision, noise = best.prior_precision[0], float(best.noise[0, 0])

    def evidence(along: int, by: float) -> float:
        moved = [precision, noise]
        moved[along] *= math.exp(by)
        return float(peer.log_marginal_likelihood(*(torch.tensor([one], dtype=torch.float64) for one in moved)))

    def slope(along: int) -> float:
        near, far = (evidence(along, by * STEP) - evidence(along, -by * STEP) for by in (1, 2))
        return (8 * near - far) / (12 * STEP)

    sizes = peer.n_params / 2, peer.n_data * peer.n_outputs
    return precision, noise, [float(f"{abs(slope(along)) / size:.2g}") for along, size in enumerate(sizes)]


def compare(
    name: str,
    network: nn.Sequential,
    structure: str,
    data: TensorDataset,
    unseen: tuple[Tensor, Tensor],
    backend: Any,
) -> list[dict[str, Any]]:
    loader = DataLoader(data, batch_size=100)
    ours = mola.fit(
        network, loader, structure=structure, likelihood=mola.Gaussian(noise=NOISE, shared=True), progress=False
    )
    peer = Laplace(
        deepcopy(network),
        "regression",
        subset_of_weights="last_layer",
        hessian_structure=PEER_NAME[structure],
        sigma_noise=NOISE,
        backend=backend,
    )
    peer.fit(loader)
    head = network[-1]
    order = bias_last(head.out_features, head.in_features, head.bias is not None)
    rows: dict[str, list[float]] = {}
    for precision in PRIOR_PRECISIONS:
        peer.prior_precision = precision
        for quantity, mine, theirs in quantities(ours.with_prior_precision(precision), peer, *unseen, order):
            rows.setdefault(quantity, []).append(apart(mine, theirs))
    common = {"network": name, "structure": structure}
    listed = [
        common | {"quantity": quantity, "prior_precision": PRIOR_PRECISIONS, "noise": NOISE, "difference": differences}
        for quantity, differences in rows.items()
    ]
    precision, noise, slopes = evidence_slopes(ours, peer)
    names = ("slope in prior precision", "slope in noise")
    return listed + [
        common
        | {
            "quantity": what,
            "prior_precision": (precision,),
            "noise": noise,
            "difference": [slope],
            "tolerance": SETTLED,
        }
        for what, slope in zip(names, slopes, strict=True)
    ]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small matrices: threads would only wait for each other
    same, different = [], []
    for name, make, shape, outputs in CASES:
        inputs, others = (torch.randn(count, *shape, dtype=torch.float64) for count in (300, 50))
        data, unseen = TensorDataset(inputs, observed(inputs, outputs)), (others, observed(others, outputs))
        for bias in (True, False):
            network = make(outputs, bias).double()
            train(network, *data.tensors)
            label = f"{name}{'' if bias else ' no bias'}"
            for structure in PEER_NAME if not bias else ("full", "diag"):
                same += compare(label, network, structure, data, unseen, BackPackGGN)
            if bias:
                different += compare(label, network, "kron-exact", data, unseen, BackPackGGN)
            if bias and make is mlp:
                by_default = compare(label, network, "full", data, unseen, CurvlinopsGGN)
                different += [row | {"structure": "full, float32"} for row in by_default]
    result = {
        "tolerance": TOLERANCE,
        "environment": record.environment("laplace-torch", "backpack-for-pytorch", "curvlinops-for-pytorch"),
        "same": same,
        "different": different,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
