"""A call builds a graph only if an input requires gradients, whatever predicts and however the inputs are passed."""

import pytest
import torch
from torch import nn

import molaplace as mola
from tests.closeness import assert_close

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(24) % 4


class Two(nn.Module):
    """A network of two inputs, which accepts them by position or by name."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 6)
        self.table = nn.Embedding(4, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x, ids):
        return self.head(torch.tanh(self.body(x) + self.table(ids)))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))


def classifier(**options):
    return mola.fit([network(0), network(1)], [(X, Y)], progress=False, **options)


def regression():
    targets = torch.stack([X[:, 0], X[:, 1] + X[:, 2], X[:, 0] ** 2, X[:, 1]], 1)
    return mola.fit([network(0), network(1)], [(X, targets)], likelihood="gaussian", progress=False)


def joint(posterior, compute):
    return lambda x: compute(posterior.joint(x))


CALLS = {
    "posterior": lambda: classifier(),
    "tuned": lambda: classifier().with_temperature(0.7).with_pooling(0.5).with_distance_exponent(2.0),
    "draws": lambda: classifier(link=mola.links.MonteCarlo(8)),
    "draws of weights": lambda: classifier(link=mola.links.MonteCarlo(8, over="weights")),
    "regression": regression,
    "ensemble": lambda: mola.ensemble([network(0), network(1)]),
    "mixture": lambda: mola.Mixture([classifier(), mola.ensemble(network(2))]),
    "mixture of functions": lambda: mola.Mixture([nn.Sequential(network(3), nn.Softmax(1))]),
    "whole networks": lambda: mola.whole.fit(network(), [(X, Y)], progress=False),
    "function": lambda: classifier().function(0),
    "logits of a function": lambda: classifier().with_pooling(0.5).function(1).latent,
    "function of whole networks": lambda: mola.whole.fit(network(), [(X, Y)], progress=False).function(0),
    "joint mean": lambda: joint(classifier(), lambda values: values.mean),
    "joint covariance": lambda: joint(regression(), lambda values: values.covariance()),
    "joint draws": lambda: joint(regression(), lambda values: values.sample(2)),
}


def bytes_saved(compute):
    """What a call saves for a backward pass, in bytes."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(sizes)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_data_builds_no_graph(name):
    call = CALLS[name]()
    values = call(X)
    assert values.grad_fn is None
    assert not values.requires_grad
    assert values.numpy().shape == tuple(values.shape)
    if "whole" not in name:  # Jacobians need backward passes of their own
        assert bytes_saved(lambda: call(X)) == 0


@pytest.mark.parametrize("name", ["posterior", "ensemble", "function", "joint covariance"])
def test_an_input_that_requires_gradients_builds_one(name):
    call = CALLS[name]()
    free = X.clone().requires_grad_()
    assert call(free).requires_grad
    assert bytes_saved(lambda: call(free)) > X.numel()
    assert_close(call(free).detach(), call(X), "float64")
    with torch.no_grad():
        assert not call(free).requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("form", ["tuple", "mapping", "keywords", "nested"])
def test_any_tensor_among_the_inputs_counts(form):
    ids = Y % 4

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Two()

        def forward(self, pair):
            return self.inner(pair["data"][0], pair["ids"])

    def inputs(x):
        if form == "nested":
            return ({"data": [x], "ids": ids},)
        return (x, ids) if form == "tuple" else {"x": x, "ids": ids}

    model = Nested() if form == "nested" else Two()
    posterior = mola.fit([model], [(inputs(X), Y)], progress=False)

    def call(x):
        return posterior(**inputs(x)) if form == "keywords" else posterior(inputs(x))

    assert not call(X).requires_grad
    free = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(free)[:, 0].sum(), free)
    assert float(gradient.abs().min()) > 0


def test_frozen_networks_have_gradients_for_their_inputs():
    posterior = classifier()
    posterior.requires_grad_(False)
    free = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(posterior(free)[:, 0].sum(), free)
    assert float(gradient.abs().max()) > 0


def test_an_input_that_requires_gradients_gives_those_of_the_parameters():
    """The one documented way; `torch.func` agrees."""
    posterior = classifier()
    loss = -posterior(X.clone().requires_grad_())[torch.arange(24), Y].log().mean()
    names, parameters = zip(*posterior.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)

    def of_parameters(values):
        return -torch.func.functional_call(posterior, values, (X,))[torch.arange(24), Y].log().mean()

    values = {name: parameter.detach().clone() for name, parameter in posterior.named_parameters()}
    expected = torch.func.grad(of_parameters)(values)
    for name, gradient in zip(names, gradients, strict=True):
        assert float(gradient.abs().max()) > 0
        assert_close(gradient, expected[name], "float64")


def test_transforms_of_torch_func_differentiate():
    """They call on tensors that do not require gradients in the usual sense; a call without gradients would return zeros."""
    posterior = classifier().with_distance_exponent(1.0)
    x = X[:3]
    reference = torch.autograd.functional.jacobian(posterior, x)
    assert float(reference.abs().max()) > 0
    assert_close(torch.func.jacrev(posterior)(x), reference, "float64")
    assert_close(torch.func.jacfwd(posterior)(x), reference, "float64")

    def total(inputs):
        return torch.func.vmap(lambda row: posterior(row[None])[0, 0])(inputs).sum()

    assert_close(torch.func.grad(total)(x), reference[:, 0].sum(0), "float64")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(posterior(dual)).tangent
    assert tangent is not None
    assert_close(tangent, reference.sum((2, 3)), "float64")


def test_what_a_pass_over_data_keeps_is_its_probabilities():
    """Activations are a thousand times as large as the probabilities; those of no batch outlive the call."""
    model = nn.Sequential(nn.Linear(3, 4000), nn.ReLU(), nn.Linear(4000, 4))
    posterior = mola.fit([model], [(X, Y)], structure="diag", distances=False, progress=False)
    alive = []
    for batch in X.split(6):
        probs = posterior(batch)
        alive.append(probs)
        assert probs.untyped_storage().nbytes() <= 6 * 4 * 8
    assert bytes_saved(lambda: [posterior(batch) for batch in X.split(6)]) == 0
