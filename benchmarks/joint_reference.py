"""Print tests/library/joint_reference.json: joint predictions, functional covariances and gradients of laplace-torch.

    python benchmarks/joint_reference.py [--venv DIR] > tests/library/joint_reference.json

laplace-torch runs in its own environment (peer_environment.py). The file holds small networks, their data, and laplace-torch's values:
for `full` and `diag` with a bias, and for `kron`, which equals molaplace's `kron-exact`, without one. laplace-torch uses its BackPACK
backend, in float64, with `enable_backprop=True`.
"""

import argparse
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peer_environment
import torch
from torch import nn

PRECISION = 0.7
NOISE = 0.3
CASES = (("full", "full", True), ("diag", "diag", True), ("kron-exact", "kron", False))


def reference() -> dict[str, Any]:
    """Compute the reference inside laplace-torch's environment."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    cases = []
    for likelihood in ("classification", "regression"):
        for structure, peer_structure, bias in CASES:
            network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=bias))
            inputs = torch.randn(30, 3)
            labels = torch.randint(3, (30,)) if likelihood == "classification" else torch.randn(30, 3)
            options: dict[str, Any] = {} if likelihood == "classification" else {"sigma_noise": NOISE}
            peer = Laplace(
                network,
                likelihood,
                subset_of_weights="last_layer",
                hessian_structure=peer_structure,
                backend=BackPackGGN,
                prior_precision=PRECISION,
                enable_backprop=True,
                **options,
            )
            peer.fit(DataLoader(TensorDataset(inputs, labels), batch_size=10))
            new = torch.randn(4, 3).requires_grad_()
            mean, covariance = peer._glm_predictive_distribution(new, joint=True)
            jacobians, _ = peer.backend.last_layer_jacobians(new)
            functional = peer.functional_covariance(jacobians)
            projection = torch.randn(covariance.shape)
            case = {
                "likelihood": likelihood,
                "structure": structure,
                "bias": bias,
                "state": {name: value.tolist() for name, value in network.state_dict().items()},
                "inputs": inputs,
                "labels": labels,
                "new": new,
                "mean": mean,
                "joint": covariance,
                "functional_covariance": functional,
                "projection": projection,
                "joint_gradient": torch.autograd.grad((projection * covariance).sum(), new)[0],
            }
            weights = torch.randn(4, 3)
            if likelihood == "classification":
                probs = peer(new, link_approx="probit")
                case |= {"probs": probs, "weights": weights}
                (case["gradient"],) = torch.autograd.grad((weights * probs).sum(), new)
            else:
                mean, variance = peer(new)
                case |= {"variance": variance, "weights": weights}
                (case["gradient"],) = torch.autograd.grad((weights * mean).sum(), new)
            cases.append({name: value.tolist() if torch.is_tensor(value) else value for name, value in case.items()})
    packages = {name: version(name) for name in ("laplace-torch", "backpack-for-pytorch", "torch")}
    return {"packages": packages, "prior_precision": PRECISION, "noise": NOISE, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        warnings.simplefilter("ignore")
        json.dump(reference(), sys.stdout)
        return
    packages = peer_environment.LAPLACE_TORCH
    python = peer_environment.prepare(options.venv or peer_environment.cache_folder(packages), packages)
    print(json.dumps(peer_environment.run(python, "joint_reference.py", "--inside")))


if __name__ == "__main__":
    main()
