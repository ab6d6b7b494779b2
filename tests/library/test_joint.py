"""Joint predictions and drawn functions against dense definitions, their laws, and gradients against finite differences."""

import math

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError
from tests.closeness import assert_close
from tests.conftest import STRUCTURES, make_problem
from tests.library.problems import relative
from tests.library.test_every_structure import LAYOUTS, LIKELIHOODS, OUTPUTS, Case

SMOOTH_LINKS = ("probit", "probit-centred", "mean-field", "bridge", "mc")


def dense_joint(precision, phi, outputs):
    """Covariances (n, C, n, C): `J Sigma J'`, with the Jacobian of all logits written out."""
    jacobian = torch.cat([torch.kron(torch.eye(outputs), row[None]) for row in phi])
    covariance = jacobian @ torch.linalg.inv(precision) @ jacobian.T
    return covariance.view(len(phi), outputs, len(phi), outputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_covariances_between_inputs_are_those_of_the_second_derivative(structure, likelihood, layout):
    case = Case(likelihood, layout)
    posterior = case.fit(structure)
    joint = posterior.joint(case.inputs)
    expected = dense_joint(case.precision(structure), case.every, OUTPUTS)
    assert relative(joint.covariances()[0], expected) < 1e-10
    assert relative(joint.covariance(), expected) < 1e-10
    for output in range(OUTPUTS):
        assert relative(joint.output_covariances(output)[0], expected[:, output, :, output]) < 1e-10
    count = len(case.every)
    assert (
        relative(joint.variances[:, 0], expected.reshape(count * OUTPUTS, -1).diagonal().view(count, OUTPUTS)) < 1e-10
    )
    assert relative(joint.means[:, 0], case.outputs.flatten(0, -2)[:, :OUTPUTS]) < 1e-12
    if structure in ("kron", "kron-diag"):
        ((inputs, outputs),) = joint.kronecker_factors()
        assert relative(torch.einsum("nm,cd->ncmd", inputs, outputs), expected) < 1e-10
    else:
        with pytest.raises(OptionError, match="Kronecker"):
            joint.kronecker_factors()


def two_networks(likelihood="categorical", structure="kron", **options):
    first = make_problem(0)
    second = make_problem(1)
    labels = first.labels
    if likelihood == "bernoulli":
        labels = nn.functional.one_hot(labels, 4).double()
    elif likelihood != "categorical":
        labels = torch.sin(first.inputs.sum(1, keepdim=True) + torch.arange(4))
    posterior = mola.fit(
        [first.network, second.network],
        [(first.inputs, labels)],
        structure=structure,
        likelihood=likelihood,
        weights=[0.3, 0.7],
        prior_precision=[0.5, 2.0],
        progress=False,
        **options,
    )
    return posterior, first.inputs, labels


GAUSSIAN = mola.likelihoods.Gaussian(
    noise=[0.2, 0.3, 0.4, 0.5], location=[1.0, 2.0, 3.0, 4.0], scale=[1.0, 2.0, 0.5, 3.0]
)


def settled(posterior):
    """All settings away from neutral."""
    return posterior.with_temperature(1.7).with_pooling(0.6).with_distance_exponent(1.3, onset=0.5)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_marginals_are_the_logits_of_predict(structure, likelihood):
    posterior, x, _ = two_networks(likelihood, structure)
    joint = posterior.joint(x[:7])
    prediction = posterior.predict(x[:7])
    assert_close(joint.means, prediction.logit_mean, "float64")
    assert_close(joint.variances, prediction.logit_variance, "float64")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_marginals_are_what_the_link_receives(structure):
    posterior, x, _ = two_networks("categorical", structure)
    posterior = settled(posterior)
    joint = posterior.joint(x[:7])
    scale = torch.rsqrt(1 + math.pi / 8 * joint.variances)
    probs = torch.einsum("k,nkc->nc", posterior.weights, (joint.means * scale).softmax(-1))
    assert_close(posterior(x[:7]), probs, "float64")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_marginals_in_regression_are_those_of_predict_in_the_units_of_the_targets(structure):
    posterior, x, y = two_networks(GAUSSIAN, structure)
    neutral = posterior.joint(x[:7])
    prediction = posterior.predict(x[:7])
    assert_close(neutral.mean, prediction.mean, "float64")
    assert_close(torch.einsum("k,nkd->nd", posterior.weights, neutral.variances), prediction.within, "float64")
    diagonal = torch.stack([neutral.covariance(d).diagonal() for d in range(4)], 1)
    assert_close(diagonal, prediction.epistemic, "float64")
    assert_close(neutral.noises, prediction.component_noise, "float64")
    scaled = settled(posterior)
    joint = scaled.joint(x[:7])
    prediction = scaled.predict(x[:7])
    assert_close(joint.means, prediction.component_mean, "float64")
    assert_close(joint.variances + joint.noises, prediction.component_variance, "float64")
    single = torch.stack([scaled.joint(x[i : i + 1]).log_prob(y[i : i + 1]) for i in range(7)])
    assert_close(single, prediction.log_prob(y[:7]), "float64")


def test_the_density_of_targets_is_that_of_the_mixture_of_normals():
    posterior, x, y = two_networks(GAUSSIAN)
    joint = settled(posterior).joint(x[:5])
    logs = []
    for k, weight in enumerate(posterior.weights):
        covariance = joint.covariances()[k].reshape(20, 20) + torch.diag(joint.noises[:, k].flatten())
        normal = torch.distributions.MultivariateNormal(joint.means[:, k].flatten(), covariance)
        logs.append(weight.log() + normal.log_prob(y[:5].flatten()))
    assert_close(joint.log_prob(y[:5]), torch.stack(logs).logsumexp(0), "float64")
    with pytest.raises(DataError):
        joint.log_prob(y[:4])


def test_the_joint_density_is_bayes_rule_in_sequence():
    """The density of a set of targets is the product of predictive densities, each after the targets before: here by weights."""
    posterior, x, y = two_networks(GAUSSIAN)
    joint = posterior.alone(0).joint(x[:6])
    total = 0.0
    for output in range(4):
        mean = joint.means[:, 0, output]
        covariance = joint.output_covariances(output)[0] + torch.diag(joint.noises[:, 0, output])
        for index in range(6):
            before = slice(index)
            gain = torch.linalg.solve(covariance[before, before], covariance[before, index])
            variance = covariance[index, index] - gain @ covariance[before, index]
            predicted = mean[index] + gain @ (y[before, output] - mean[before])
            total = total + torch.distributions.Normal(predicted, variance.sqrt()).log_prob(y[index, output])
    assert_close(joint.log_prob(y[:6]), total, "float64")


def standard_scores(values, mean, covariance):
    """Standard scores of the empirical mean and covariance of draws (S, M)."""
    values, mean, covariance = values.detach(), mean.detach(), covariance.detach()
    count = len(values)
    variance = covariance.diagonal()
    mean_scores = (values.mean(0) - mean) / (variance / count).sqrt()
    centred = values - mean
    products = centred[:, :, None] * centred[:, None, :]
    errors = products.std(0) / count**0.5
    return mean_scores, (products.mean(0) - covariance) / errors


@pytest.mark.parametrize("likelihood", ["categorical", GAUSSIAN], ids=["categorical", "gaussian"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_have_the_moments_of_the_mixture(structure, likelihood):
    posterior, x, _ = two_networks(likelihood, structure)
    joint = settled(posterior).joint(x[:3])
    draws = joint.sample(20_000, generator=torch.Generator().manual_seed(1)).flatten(1)
    for scores in standard_scores(draws, joint.mean.flatten(), joint.covariance().reshape(12, 12)):
        assert float(scores.abs().max()) < 4.5
    if likelihood is GAUSSIAN:
        draws = joint.sample(20_000, noise=True, generator=torch.Generator().manual_seed(2)).flatten(1)
        noise = torch.einsum("k,nkd->nd", posterior.weights, joint.noises).flatten()
        for scores in standard_scores(
            draws, joint.mean.flatten(), joint.covariance().reshape(12, 12) + torch.diag(noise)
        ):
            assert float(scores.abs().max()) < 4.5


@pytest.mark.parametrize(
    ("structure", "likelihood"), [*((structure, GAUSSIAN) for structure in STRUCTURES), ("kron", "categorical")]
)
def test_functions_have_the_joint_covariance(structure, likelihood):
    posterior, x, _ = two_networks(likelihood, structure)
    scaled = settled(posterior)
    joint = scaled.joint(x[:2])
    with torch.no_grad():
        draws = torch.stack([scaled.function(seed).latent(x[:2]) for seed in range(400)]).flatten(1)
    for scores in standard_scores(draws, joint.mean.flatten(), joint.covariance().reshape(8, 8)):
        assert float(scores.abs().max()) < 4.5


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_function_is_the_same_at_every_call_and_in_every_batch(structure, scaled):
    posterior, x, _ = two_networks(structure=structure)
    posterior = settled(posterior) if scaled else posterior
    function = posterior.function(3)
    values = function(x)
    assert_close(function(x), values, "float64")
    assert_close(torch.cat([function(row[None]) for row in x]), values, "float64")
    assert_close(posterior.function(3)(x), values, "float64")
    assert relative(posterior.function(4)(x), values) > 1e-3
    assert_close(function.latent(x).softmax(-1), values, "float64")


def test_the_mean_of_many_functions_is_the_monte_carlo_prediction():
    posterior, x, _ = two_networks()
    posterior = settled(posterior)
    with torch.no_grad():
        draws = torch.stack([posterior.function(seed)(x[:3]) for seed in range(400)])
    exact = posterior.with_link(mola.links.MonteCarlo(2**14))(x[:3])
    scores = (draws.mean(0) - exact) / (draws.std(0) / len(draws) ** 0.5)
    assert float(scores.abs().max()) < 4.5


def test_a_function_without_pooling_runs_one_network():
    posterior, x, _ = two_networks()
    function = posterior.function(0)
    assert len(function.posterior.networks) == 1
    whole = settled(posterior).with_temperature(1).with_pooling(1).with_distance_exponent(0).function(0)
    assert_close(whole(x), function(x), "float64")


def test_functions_and_joint_predictions_of_an_ensemble_have_no_spread():
    networks = [make_problem(seed).network for seed in (0, 1)]
    ensemble = mola.ensemble(networks)
    x = make_problem().inputs[:5]
    joint = ensemble.joint(x)
    assert float(joint.variances.abs().max()) == 0
    assert float(joint.covariances().abs().max()) == 0
    outputs = [network(x).detach() for network in networks]
    for seed in range(4):
        values = ensemble.function(seed).latent(x)
        assert min(relative(values, output) for output in outputs) < 1e-12
    assert joint.sample(3).shape == (3, 5, 4)


def test_dense_functions_keep_the_layout():
    case = Case("categorical", "image")
    posterior = case.fit("kron")
    function = posterior.function(1)
    assert function(case.inputs).shape == posterior(case.inputs).shape
    assert_close(function(case.inputs).sum(1), torch.ones(4, 2, 3), "float64")


def test_classification_has_no_density():
    posterior, x, _ = two_networks()
    with pytest.raises(OptionError, match="noise"):
        posterior.joint(x).log_prob(torch.zeros(len(x), 4))
    with pytest.raises(OptionError, match="seed"):
        posterior.function(-1)
    with pytest.raises(OptionError, match="output"):
        posterior.joint(x).output_covariances(4)


# --- whole networks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_whole_networks(structure):
    problem = make_problem(width=3, classes=3)
    posterior = mola.whole.fit(problem.network, problem.loader, structure=structure, progress=False)
    x = problem.inputs[:2]
    joint = posterior.joint(x)
    assert_close(joint.variances, posterior.predict(x).logit_variance, "float64")
    matrix = joint.covariances()[0]
    assert_close(joint.output_covariances(1)[0], matrix[:, 1, :, 1], "float64")
    parameters = dict(problem.network.named_parameters())
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(problem.network, p, (x,)))(parameters)
    jacobians = torch.cat([value.detach().flatten(2) for value in jacobian.values()], 2)
    (component,) = posterior.components
    if structure != "kron":  # the order of the blocks is that of the parameters
        basis = torch.eye(jacobians.shape[2])
        inverse = component.layer.curvature.inverse(1.0)
        if structure == "full":
            ((basis, _),) = component.layer.curvature.bases
        sigma = (basis * inverse) @ basis.T
        assert_close(matrix, torch.einsum("ncp,pq,mdq->ncmd", jacobians, sigma, jacobians), "float64")
    draws = torch.stack([posterior.function(seed).latent(x) for seed in range(400)]).flatten(1)
    for scores in standard_scores(draws, joint.mean.flatten(), joint.covariance().reshape(6, 6)):
        assert float(scores.abs().max()) < 4.5


# --- gradients --------------------------------------------------------------------------------------------------------


def check_gradient(compute, x, parameters):
    """Compare the gradient of a random projection with central differences, along random directions of inputs and parameters."""
    generator = torch.Generator().manual_seed(5)
    x = x.clone().requires_grad_()
    value = compute(x)
    weights = torch.randn(value.shape, generator=generator)
    gradients = torch.autograd.grad((value * weights).sum(), [x, *parameters], allow_unused=True)
    step = 1e-6
    for leaf, gradient in zip([x, *parameters], gradients, strict=True):
        assert gradient is not None
        direction = torch.randn(leaf.shape, generator=generator)
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                leaf += sign * step * direction
                values.append((compute(x) * weights).sum())
                leaf -= sign * step * direction
        numeric = (values[0] - values[1]) / (2 * step)
        analytic = (gradient * direction).sum()
        assert abs(float(numeric - analytic)) < 1e-6 * max(1.0, float(gradient.norm() * direction.norm()))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("link", SMOOTH_LINKS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_probabilities_have_the_gradients_of_finite_differences(structure, link, scaled):
    posterior, x, _ = two_networks(structure=structure, link=link)
    posterior = settled(posterior) if scaled else posterior
    parameters = [parameter for network in posterior.networks for parameter in network.parameters()]
    check_gradient(posterior, x[:3], parameters)


@pytest.mark.parametrize("likelihood", ["bernoulli", GAUSSIAN], ids=["bernoulli", "gaussian"])
def test_other_likelihoods_have_the_gradients_of_finite_differences(likelihood):
    posterior, x, _ = two_networks(likelihood)
    posterior = settled(posterior)
    check_gradient(posterior, x[:3], [posterior.networks[0][0].weight])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_joint_predictions_and_functions_have_the_gradients_of_finite_differences(structure):
    posterior, x, y = two_networks(GAUSSIAN, structure)
    posterior = settled(posterior)
    parameters = [posterior.networks[1][0].weight]
    check_gradient(lambda x: posterior.joint(x).covariance(), x[:3], parameters)
    check_gradient(lambda x: posterior.joint(x).log_prob(y[:3]), x[:3], parameters)
    check_gradient(
        lambda x: posterior.joint(x).sample(2, generator=torch.Generator().manual_seed(0)), x[:3], parameters
    )
    check_gradient(posterior.function(2), x[:3], parameters)


def test_gradients_are_off_where_they_are_off():
    posterior, x, _ = two_networks()
    free = x[:3].clone().requires_grad_()
    assert posterior(free).requires_grad
    with torch.no_grad():
        assert not posterior(free).requires_grad
        assert not posterior.joint(free).covariance().requires_grad
    with torch.inference_mode():
        assert not posterior(free).requires_grad
    prediction = posterior.predict(free)
    assert not any(
        getattr(prediction, name).requires_grad for name in ("probs", "epistemic", "logit_variance", "ood_score")
    )
    assert_close(posterior(free).detach(), prediction.probs, "float64")
    assert posterior.predict_proba(x[:3].numpy()).shape == (3, 4)
    bare = nn.Linear(3, 4)  # its features are its inputs
    fitted = mola.fit(bare, make_problem().loader, progress=False)
    assert not fitted.predict(free).logit_variance.requires_grad
    whole = mola.whole.fit(make_problem(width=3).network, make_problem().loader, progress=False)
    assert not whole(free).requires_grad


def test_gradients_by_a_carried_head_and_dense_outputs():
    case = Case("categorical", "sequence")
    posterior = case.fit("kron")
    check_gradient(posterior, case.inputs, list(case.network.parameters()))

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)
            self.head = nn.Linear(3, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.layer(x)))[:, -1]

    network = Last()
    x = torch.randn(5, 4, 2)
    carried = mola.fit(network, [(x, torch.arange(5) % 4)], progress=False)
    check_gradient(carried, x, list(network.parameters()))


# --- files and graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_loaded_posterior_has_the_same_joint_prediction_and_functions(structure, tmp_path):
    posterior, x, _ = two_networks(GAUSSIAN, structure)
    posterior = settled(posterior)
    loaded = mola.load(posterior.save(tmp_path / "posterior"), posterior.networks)
    assert_close(loaded.joint(x[:4]).covariance(), posterior.joint(x[:4]).covariance(), "float64")
    assert_close(loaded.function(5)(x[:4]), posterior.function(5)(x[:4]), "float64")


@pytest.mark.export
def test_calls_are_traced_with_and_without_gradients():
    posterior, x, _ = two_networks()
    posterior = settled(posterior)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            graph = torch.export.export(posterior, (x[:3],)).module()
            assert_close(graph(x[3:6]), posterior(x[3:6]), "float64")
