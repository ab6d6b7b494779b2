"""Class weights and label smoothing: the Hessian, the gradient and the value of the loss with which networks were trained."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import molaplace as mola
from molaplace.errors import HeadError, OptionError
from molaplace.likelihoods import BERNOULLI, CATEGORICAL, Bernoulli, Categorical
from tests.conftest import make_problem
from tests.library.problems import close, loader

WEIGHTS = (0.5, 2.0, 1.0, 0.0)
POSITIVE = (3.0, 0.25, 1.0, 2.0)
CATEGORICALS = {
    "weights": Categorical(class_weights=WEIGHTS),
    "smoothing": Categorical(label_smoothing=0.2),
    "both": Categorical(WEIGHTS, 0.2),
}
BERNOULLIS = {
    "weights": Bernoulli(pos_weight=POSITIVE),
    "one weight": Bernoulli(pos_weight=2.5),
    "smoothing": Bernoulli(label_smoothing=0.2),
    "both": Bernoulli(POSITIVE, 0.2),
}
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def cross_entropy(likelihood, logits, labels):
    weights = None if likelihood.class_weights is None else torch.tensor(likelihood.class_weights)
    return functional.cross_entropy(
        logits, labels, weights, reduction="none", label_smoothing=likelihood.label_smoothing
    )


def binary_cross_entropy(likelihood, logits, labels):
    smooth = labels * (1 - likelihood.label_smoothing) + likelihood.label_smoothing / 2
    weights = None if likelihood.pos_weight is None else torch.tensor(likelihood.pos_weight)
    return functional.binary_cross_entropy_with_logits(logits, smooth, pos_weight=weights, reduction="none").sum(1)


@pytest.fixture(
    params=[("categorical", name) for name in CATEGORICALS] + [("bernoulli", name) for name in BERNOULLIS], ids=" ".join
)
def case(request):
    kind, name = request.param
    problem = make_problem()
    if kind == "categorical":
        return CATEGORICALS[name], cross_entropy, problem
    problem.labels = torch.randint(2, (40, 4), generator=torch.Generator().manual_seed(1)).double()
    return BERNOULLIS[name], binary_cross_entropy, problem


def output_hessian(likelihood, loss, output, label):
    """Hessian (C, C) of one datum's loss with respect to its outputs, by differentiating twice."""
    return torch.autograd.functional.hessian(lambda logits: loss(likelihood, logits[None], label[None])[0], output)


def output_hessians(likelihood, loss, problem):
    with torch.no_grad():
        logits = problem.network(problem.inputs)
    pairs = zip(logits, problem.labels, strict=True)
    return torch.stack([output_hessian(likelihood, loss, output, label) for output, label in pairs])


def test_value_and_gradient_are_those_of_torch(case):
    likelihood, loss, problem = case
    logits = problem.network(problem.inputs).detach().requires_grad_()
    actual = likelihood.log_likelihood(logits, problem.labels)
    expected = -loss(likelihood, logits, problem.labels)
    torch.testing.assert_close(actual, expected, **EXACT)
    (gradient,) = torch.autograd.grad(actual.sum(), logits)
    (reference,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient, reference, **EXACT)


def dense_precision(structure, case, prior):
    """The posterior precision of each structure from the Hessians of every datum, written out."""
    problem = case[2]
    hessians = output_hessians(*case)
    features = problem.features()
    count = len(features)
    full = sum(torch.kron(a, torch.outer(phi, phi)) for a, phi in zip(hessians, features, strict=True))
    identity = torch.eye(len(full))
    if structure == "full":
        return full + prior * identity
    if structure == "diag":
        return torch.diag(full.diagonal()) + prior * identity
    a = hessians.mean(0)
    b = features.T @ features / count
    if structure == "kron-exact":
        return count * torch.kron(a, b) + prior * identity
    left = count**0.5 * a + prior**0.5 * torch.eye(len(a))
    right = count**0.5 * b + prior**0.5 * torch.eye(len(b))
    return torch.kron(left, right)


@pytest.mark.parametrize("structure", ["kron", "kron-exact", "diag", "full"])
def test_posterior_is_that_of_the_losses_own_hessian(case, structure):
    likelihood, _, problem = case
    posterior = mola.fit(
        problem.network, problem.loader, likelihood=likelihood, structure=structure, prior_precision=0.3
    )
    covariance = torch.linalg.inv(dense_precision(structure, case, 0.3))
    phi = problem.features()[:5]
    size = covariance.shape[0] // 4
    jacobians = torch.stack([torch.kron(torch.eye(4), row[None]) for row in phi])
    expected = (jacobians @ covariance @ jacobians.mT).diagonal(dim1=1, dim2=2)
    actual = posterior.components[0].layer.curvature.variance(posterior.components[0].layer.curvature.project(phi), 0.3)
    assert size == phi.shape[1]
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


def test_kron_diag_has_the_diagonal_of_kron(case):
    likelihood, _, problem = case
    posterior = mola.fit(problem.network, problem.loader, likelihood=likelihood, structure="kron-diag")
    sums = posterior.components[0].layer.sums.tensors
    diagonal = output_hessians(*case).diagonal(dim1=1, dim2=2).sum(0)
    actual = sums["degrees"] if "degrees" in sums else sums["separate"]
    torch.testing.assert_close(actual, diagonal, rtol=1e-9, atol=1e-10)


def test_without_labels_the_hessian_is_its_expectation_under_the_network(case):
    likelihood, loss, problem = case
    logits = problem.network(problem.inputs).detach()
    curvature = likelihood.curvature(logits)
    if curvature.coupling is not None:
        probs = logits.softmax(1)
        expected = torch.stack(
            [
                sum(p * output_hessian(likelihood, loss, output, torch.tensor(label)) for label, p in enumerate(row))
                for output, row in zip(logits, probs, strict=True)
            ]
        ).diagonal(dim1=1, dim2=2)
        coupling = curvature.coupling
        actual = coupling * (coupling.sum(1, keepdim=True) - coupling)
    else:
        yes, no = (likelihood.curvature(logits, torch.full_like(logits, label)).separate for label in (1.0, 0.0))
        probs = torch.sigmoid(logits)
        expected = probs * yes + (1 - probs) * no
        actual = curvature.separate
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_whole_weights_count_data_several_times(structure):
    problem = make_problem()
    weighted = mola.fit(problem.network, problem.loader, likelihood=Categorical((1, 3, 1, 2)), structure=structure)
    times = torch.tensor([1, 3, 1, 2])[problem.labels]
    repeated = loader(problem.inputs.repeat_interleave(times, 0), problem.labels.repeat_interleave(times), 11)
    expected = mola.fit(problem.network, repeated, structure=structure)
    assert close(weighted(problem.inputs), expected(problem.inputs))
    torch.testing.assert_close(weighted.log_evidence(), expected.log_evidence())


def test_neutral_options_change_nothing():
    logits = torch.randn(5, 4)
    labels = torch.tensor([0, 1, 2, 3, 0])
    for likelihood in (Categorical(), Categorical((1, 1, 1, 1)), Categorical(label_smoothing=0.0)):
        torch.testing.assert_close(
            likelihood.log_likelihood(logits, labels), CATEGORICAL.log_likelihood(logits, labels)
        )
        torch.testing.assert_close(likelihood.curvature(logits, labels).coupling, logits.softmax(1))
    assert Categorical() == CATEGORICAL
    assert Bernoulli() == BERNOULLI
    missing = torch.tensor([[1.0, torch.nan, 0.0, 1.0]] * 5)
    likelihood = Bernoulli(pos_weight=[1, 1, 1, 1])
    torch.testing.assert_close(likelihood.log_likelihood(logits, missing), BERNOULLI.log_likelihood(logits, missing))
    torch.testing.assert_close(
        likelihood.curvature(logits, missing).separate, BERNOULLI.curvature(logits, missing).separate
    )


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_scores_and_rules_are_those_of_the_unweighted_likelihood():
    problem = make_problem()
    weighted = mola.fit(problem.network, problem.loader, likelihood=Categorical(WEIGHTS, 0.1), prior_precision=1e30)
    plain = mola.fit(problem.network, problem.loader, prior_precision=1e30)
    assert str(mola.evaluate(weighted, problem.loader)) == str(mola.evaluate(plain, problem.loader))


def test_saved_and_loaded(case, tmp_path):
    likelihood, _, problem = case
    posterior = mola.fit(problem.network, problem.loader, likelihood=likelihood)
    loaded = mola.load(posterior.save(tmp_path / "posterior"), problem.network)
    assert loaded.likelihood == likelihood
    assert torch.equal(loaded(problem.inputs), posterior(problem.inputs))
    other = mola.fit(problem.network, problem.loader, likelihood=type(likelihood)())
    with pytest.raises(OptionError, match="likelihood"):
        posterior + other
    assert close(posterior.add(problem.batches(9))(problem.inputs), (posterior + posterior)(problem.inputs))


def test_invalid_options_are_refused():
    for kind, argument in ((Categorical, "class_weights"), (Bernoulli, "pos_weight")):
        for values in ([1, -1], [0, 0], [float("nan")], "many", [[1, 2]]):
            with pytest.raises(OptionError, match=argument):
                kind(**{argument: values})
        for value in (-0.1, 1.1, "some"):
            with pytest.raises(OptionError, match="label_smoothing"):
                kind(label_smoothing=value)
    problem = make_problem()
    with pytest.raises(HeadError, match="one weight for each class"):
        mola.fit(problem.network, problem.loader, likelihood=Categorical([1, 2]))
    with pytest.raises(HeadError, match="one for each output"):
        mola.fit(problem.network, problem.loader, likelihood=Bernoulli([1, 2]))
    with pytest.raises(OptionError, match="unweighted"):
        mola.whole.fit(nn.Linear(3, 4), problem.loader, likelihood=Categorical(label_smoothing=0.1))


def test_arrays_and_tensors_are_accepted():
    weights = torch.tensor(WEIGHTS)
    assert Categorical(weights) == Categorical(weights.numpy()) == Categorical(list(WEIGHTS))
    assert Bernoulli(torch.tensor(2.0)) == Bernoulli(2)
