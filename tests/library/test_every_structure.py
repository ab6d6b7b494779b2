"""Every structure x likelihood x layout of the outputs, against the Hessian of the network's own loss by autograd.

The loss is that of the whole last layer, called as it is: a linear layer on rows or on the positions of a sequence, or a 1x1
convolution on images. Its second derivative is the Hessian of `full`, its diagonal that of `diag`; the Kronecker structures are
defined by means over data, of which the outputs' is a second derivative, too.
"""

import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn import functional

import molaplace as mola
from tests.conftest import STRUCTURES
from tests.library.problems import relative
from tests.reference import dense

FEATURES = 3
OUTPUTS = 3
PRIOR = 0.7
LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "heteroscedastic")
LAYOUTS = ("rows", "sequence", "image")
NOISE = torch.tensor([0.4, 0.7, 1.1], dtype=torch.float64)


class Network(nn.Module):
    """Features from inputs of the same layout, and a head that is a module of its own."""

    def __init__(self, layer, head):
        super().__init__()
        self.layer = layer
        self.head = head

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)))


def network_and_inputs(layout, width):
    torch.manual_seed(1)
    if layout == "image":
        return Network(nn.Conv2d(2, FEATURES, 1), nn.Conv2d(FEATURES, width, 1)), torch.randn(4, 2, 2, 3)
    shape = (24, 2) if layout == "rows" else (4, 6, 2)
    return Network(nn.Linear(2, FEATURES), nn.Linear(FEATURES, width)), torch.randn(shape)


def last(values, layout):
    """Outputs as the last axis."""
    return values.movedim(1, -1) if layout == "image" else values


def first(values, layout):
    """Outputs where the layout has them."""
    return values.movedim(-1, 1) if layout == "image" else values


def labels_for(likelihood, outputs, layout):
    """Labels as users give them; some are missing, where the likelihood allows it."""
    shape = last(outputs, layout).shape[:-1]
    generator = torch.Generator().manual_seed(2)
    if likelihood == "categorical":
        labels = torch.randint(OUTPUTS, shape, generator=generator)
        if layout != "rows":
            labels[0, 1] = -100
        return labels
    numbers = torch.randn(*shape, OUTPUTS, generator=generator)
    if likelihood == "bernoulli":
        labels = (numbers > 0).double()
        labels[1, ..., 0] = math.nan
        return first(labels, layout)
    return first(numbers, layout)


def loss(likelihood, outputs, labels):
    """Negative log-likelihood of outputs (..., O), by torch's own functions; labels (...) or (..., D)."""
    if likelihood == "categorical":
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum")
    if likelihood == "bernoulli":
        known = ~labels.isnan()
        return functional.binary_cross_entropy_with_logits(outputs[known], labels[known], reduction="sum")
    if likelihood == "gaussian":
        return -torch.distributions.Normal(outputs, NOISE).log_prob(labels).sum()
    mean, logs = outputs.chunk(2, dim=-1)
    return nn.GaussianNLLLoss(full=True, reduction="sum")(mean, labels, logs.exp())


class Case:
    """A network, its data, and its posterior precision by second derivatives."""

    def __init__(self, likelihood, layout):
        self.likelihood = likelihood
        self.layout = layout
        self.network, self.inputs = network_and_inputs(
            layout, 2 * OUTPUTS if likelihood == "heteroscedastic" else OUTPUTS
        )
        with torch.no_grad():
            self.inputs_of_head = torch.tanh(self.network.layer(self.inputs))
            outputs = self.network(self.inputs)
        self.labels = labels_for(likelihood, outputs, layout)
        self.outputs = last(outputs, layout)
        targets = self.labels if likelihood == "categorical" else last(self.labels, layout)
        self.targets = targets
        counted = (targets != -100) if likelihood == "categorical" else torch.ones(self.outputs.shape[:-1]).bool()
        features = last(self.inputs_of_head, layout)
        ones = torch.ones(*features.shape[:-1], 1)
        self.every = torch.cat([features, ones], -1).flatten(0, -2)
        self.features = torch.cat([features, ones], -1)[counted]
        self.rows, self.labels_counted = self.outputs[counted], targets[counted]
        head = self.network.head
        weight, bias = (
            parameter.detach().flatten(1) if parameter.dim() > 1 else parameter.detach()[:, None]
            for parameter in head.parameters()
        )
        self.weights = torch.cat([weight, bias], 1)
        self.mean = self.weights[:OUTPUTS]
        """The rows that are uncertain: without those that give variances."""

    def loss_of(self, flat):
        """Of the head with other weights, called as the network calls it."""
        whole = torch.cat([flat.view(OUTPUTS, -1), self.weights[OUTPUTS:]])
        shape = self.network.head.weight.shape
        parameters = {"weight": whole[:, :-1].reshape(shape), "bias": whole[:, -1]}
        outputs = functional_call(self.network.head, parameters, (self.inputs_of_head,))
        return loss(self.likelihood, last(outputs, self.layout), self.targets)

    def factors(self):
        """Means over data of the outputs' curvature, a second derivative for each, and of the features' products."""
        total = torch.zeros(OUTPUTS, OUTPUTS)
        for row, target in zip(self.rows, self.labels_counted, strict=True):

            def alone(outputs, row=row, target=target):
                return loss(self.likelihood, torch.cat([outputs, row[OUTPUTS:]])[None], target[None])

            total += hessian(alone, row[:OUTPUTS].clone())
        count = len(self.rows)
        return total / count, sum(torch.outer(phi, phi) for phi in self.features) / count

    def precision(self, structure):
        """Posterior precision (DP, DP)."""
        flat = self.mean.flatten().clone()
        identity = torch.eye(len(flat))
        if structure in ("full", "diag"):
            actual = hessian(self.loss_of, flat)
            return (torch.diag(actual.diagonal()) if structure == "diag" else actual) + PRIOR * identity
        a, b = self.factors()
        count = len(self.rows)
        if structure == "kron-exact":
            return count * torch.kron(a, b) + PRIOR * identity
        if structure == "kron-diag":
            a = dense.same_diagonal(a.diagonal()) if self.likelihood == "categorical" else torch.diag(a.diagonal())
        elif structure != "kron":
            raise AssertionError(f"no reference for {structure}")
        left = count**0.5 * a + PRIOR**0.5 * torch.eye(len(a))
        return torch.kron(left, count**0.5 * b + PRIOR**0.5 * torch.eye(len(b)))

    def fit(self, structure):
        meant = {
            "gaussian": mola.likelihoods.Gaussian(noise=NOISE.tolist()),
            "heteroscedastic": mola.likelihoods.Gaussian(heteroscedastic=True),
        }
        return mola.fit(
            self.network,
            [(self.inputs[:2], self.labels[:2]), (self.inputs[2:], self.labels[2:])],
            structure=structure,
            prior_precision=PRIOR,
            likelihood=meant.get(self.likelihood, self.likelihood),
            progress=False,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_likelihood_and_layout_are_those_of_the_second_derivative(structure, likelihood, layout):
    case = Case(likelihood, layout)
    posterior = case.fit(structure)
    precision = case.precision(structure)
    covariance = torch.linalg.inv(precision)
    (component,) = posterior.components
    curvature = component.layer.curvature
    assert component.layer.sums.count == len(case.features)
    expected = torch.stack([dense.logit_covariance(covariance, phi, OUTPUTS) for phi in case.every])
    assert relative(curvature.covariance(curvature.project(case.every), PRIOR), expected) < 1e-10
    variances = expected.diagonal(dim1=1, dim2=2)
    assert relative(curvature.variance(curvature.project(case.every), PRIOR), variances) < 1e-10
    determinant = torch.linalg.slogdet(precision).logabsdet
    assert relative(curvature.log_determinant(torch.tensor(PRIOR)), determinant) < 1e-10
    size = case.mean.numel()
    penalty = PRIOR * case.mean.square().sum() - size * math.log(PRIOR)
    evidence = -case.loss_of(case.mean.flatten()) - (penalty + determinant) / 2
    assert relative(posterior.log_evidence()[0], evidence) < 1e-10
    # Predictions, in the layout of the inputs.
    prediction = posterior.predict(case.inputs)
    variance = prediction.within if likelihood in ("gaussian", "heteroscedastic") else prediction.logit_variance[:, 0]
    assert relative(last(variance, layout).flatten(0, -2), variances) < 1e-10
