"""Joint predictions and gradients against stored values of laplace-torch (`benchmarks/joint_reference.py` prints the file)."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import molaplace as mola
from tests.library.problems import relative

REFERENCE = json.loads((Path(__file__).parent / "joint_reference.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-8


@pytest.fixture(params=REFERENCE["cases"], ids=lambda case: f"{case['likelihood']}-{case['structure']}")
def case(request):
    keep = ("likelihood", "structure", "bias", "state")
    return {name: value if name in keep else torch.tensor(value) for name, value in request.param.items()}


def fit(case):
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3, bias=case["bias"]))
    network.load_state_dict({name: torch.tensor(value) for name, value in case["state"].items()})
    regression = case["likelihood"] == "regression"
    return mola.fit(
        network,
        [(case["inputs"], case["labels"])],
        structure=case["structure"],
        likelihood=mola.likelihoods.Gaussian(noise=REFERENCE["noise"]) if regression else "categorical",
        prior_precision=REFERENCE["prior_precision"],
        progress=False,
    )


def test_joint_predictions_are_those_of_laplace_torch(case):
    new = case["new"].requires_grad_()
    joint = fit(case).joint(new)
    covariance = joint.covariance().reshape(12, 12)
    assert relative(joint.mean.flatten(), case["mean"]) < TOLERANCE
    assert relative(covariance, case["joint"]) < TOLERANCE
    assert relative(covariance, case["functional_covariance"]) < TOLERANCE
    (gradient,) = torch.autograd.grad((case["projection"] * covariance).sum(), new)
    assert relative(gradient, case["joint_gradient"]) < TOLERANCE


def test_gradients_of_a_call_are_those_of_laplace_torch(case):
    new = case["new"].requires_grad_()
    posterior = fit(case)
    values = posterior(new)
    if case["likelihood"] == "classification":
        assert relative(values, case["probs"]) < TOLERANCE
    else:
        variance = case["variance"].diagonal(dim1=1, dim2=2)
        assert relative(posterior.joint(new).variances[:, 0], variance) < TOLERANCE
    (gradient,) = torch.autograd.grad((case["weights"] * values).sum(), new)
    assert relative(gradient, case["gradient"]) < TOLERANCE
