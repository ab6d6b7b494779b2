"""SWAG: moments against numpy over stored snapshots, draws against the formula, statistics against a literal pass."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, OptionError, StorageError
from molaplace_lab.swag import Moments, draw_network, fit_moments, fit_swag
from tests.conftest import make_problem

RATE = 0.05


def with_norm(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 4))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def moments_of(problem, **options):
    settings = {"learning_rate": RATE, "epochs": 6, "rank": 4, "progress": False} | options
    return fit_moments(copy.deepcopy(problem.network), problem.loader, **settings)


def draws_of(problem, network=None, **options):
    settings = {"learning_rate": RATE, "epochs": 6, "rank": 4, "samples": 5, "progress": False} | options
    return fit_swag(problem.network if network is None else network, problem.loader, **settings)


def walk(network, loader, epochs, rate=RATE, decay=3e-4):
    """A plain loop: SGD with momentum written out; the snapshots."""
    network = copy.deepcopy(network).train()
    velocity = [torch.zeros_like(p) for p in network.parameters()]
    snapshots = []
    for _ in range(epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(network(inputs), labels)
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            with torch.no_grad():
                for p, v, g in zip(network.parameters(), velocity, gradients, strict=True):
                    v.mul_(0.9).add_(g + decay * p)
                    p.sub_(rate * v)
        snapshots.append(flat(network.parameters()).numpy())
    return np.array(snapshots)


@pytest.mark.parametrize(("epochs", "rank"), [(7, 3), (4, 6), (5, 0)])
def test_moments_are_numpys_over_the_snapshots_of_a_plain_loop(epochs, rank):
    problem = make_problem()
    moments = moments_of(problem, epochs=epochs, rank=rank)
    snapshots = walk(problem.network, problem.loader, epochs)
    np.testing.assert_allclose(flat(moments.mean.values()), snapshots.mean(0), rtol=1e-12)
    variance = (snapshots**2).mean(0) - snapshots.mean(0) ** 2
    np.testing.assert_allclose(flat([moments.variance(name) for name in moments.mean]), variance, rtol=1e-6)
    columns = np.array([snapshots[t] - snapshots[: t + 1].mean(0) for t in range(epochs)])[max(epochs - rank, 0) :]
    deviations = torch.cat([column.flatten(1) for column in moments.columns.values()], dim=1)
    assert deviations.shape == ((min(rank, epochs), snapshots.shape[1]))
    if rank:
        np.testing.assert_allclose(deviations, columns, atol=1e-12)
        if epochs <= rank:
            assert np.all(deviations.numpy()[0] == 0)  # the first snapshot is its own mean


def test_float32_moments_do_not_cancel():
    """Weights near 1000 that move by 1e-2: the mean of squares minus the square of the mean would be all rounding."""
    steps = torch.randn(30, 50, generator=torch.Generator().manual_seed(0)) * 1e-2
    snapshots = (1000 + steps).float()
    moments = Moments()
    for snapshot in snapshots:
        moments.add({"w": snapshot}, 4)
    exact = snapshots.double().var(0, correction=0)
    torch.testing.assert_close(moments.variance("w").double(), exact, rtol=0.02, atol=0.0)
    naive = (snapshots.square().mean(0) - snapshots.mean(0).square()).double()
    assert float(((naive - exact) / exact).abs().max()) > 1


@pytest.mark.parametrize(("rank", "scale"), [(4, 0.5), (4, 0.2), (0, 1.0)])
def test_draws_have_the_mean_and_covariance_of_the_formula(rank, scale):
    problem = make_problem(width=2, classes=2)
    moments = moments_of(problem, rank=rank)
    count = 1_000
    generator = torch.Generator().manual_seed(7)
    seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    drawn = [moments.draw(seed, scale) for seed in seeds]
    draws = torch.stack([flat(weights[name] for name in moments.mean) for weights in drawn])
    mean = flat(moments.mean.values())
    deviations = torch.cat([column.flatten(1) for column in moments.columns.values()], dim=1)
    covariance = torch.diag(flat([moments.variance(name) for name in moments.mean]))
    if rank:
        covariance = covariance + deviations.T @ deviations / (rank - 1)
    covariance = scale * covariance
    spread = covariance.diagonal().sqrt()
    assert float(((draws.mean(0) - mean) / (spread / count**0.5)).abs().max()) < 5
    sampled = (draws - mean).T @ (draws - mean) / count
    # Variance of a product of two Gaussians: (S_ii S_jj + S_ij^2) / n.
    error = ((torch.outer(spread**2, spread**2) + covariance**2) / count).sqrt()
    assert float(((sampled - covariance) / error).abs().max()) < 5.5


def test_batchnorm_statistics_are_those_of_a_literal_pass_for_every_draw():
    problem = make_problem(count=43)
    network = with_norm()
    network[3].p = 0.0  # so that the literal pass below needs no random numbers
    loader = problem.batches(8)  # the last batch is smaller
    draws = fit_swag(network, loader, learning_rate=RATE, epochs=3, rank=2, samples=3, progress=False)
    probabilities = []
    for draw in draws:
        literal = copy.deepcopy(draw).train()
        means = torch.zeros(6)
        variances = torch.zeros(6)
        for inputs, _ in loader:
            hidden = literal[0](inputs).detach()
            means += len(inputs) * hidden.mean(0) / 43
            variances += len(inputs) * hidden.var(0) / 43
        torch.testing.assert_close(draw[1].running_mean, means)
        torch.testing.assert_close(draw[1].running_var, variances)
        probabilities.append(draw(problem.inputs).softmax(-1))
    assert not torch.allclose(draws[0][1].running_mean, draws[2][1].running_mean)
    predictor = mola.ensemble(draws)
    torch.testing.assert_close(predictor(problem.inputs), torch.stack(probabilities).mean(0))


def test_a_draw_does_not_depend_on_the_number_of_draws():
    problem = make_problem()
    few = draws_of(problem, samples=2)
    more = draws_of(problem, samples=4)
    assert torch.equal(flat(few[1].parameters()), flat(more[1].parameters()))
    assert not torch.equal(flat(few[0].parameters()), flat(few[1].parameters()))
    moments = moments_of(problem)
    drawn = draw_network(problem.network, moments, 0, 1, 0.5)
    assert torch.equal(flat(drawn.parameters()), flat(few[1].parameters()))


def test_frozen_parameters_stay_where_they_are():
    problem = make_problem()
    problem.network[0].requires_grad_(False)
    draw = draws_of(problem)[0]
    assert torch.equal(draw[0].weight, problem.network[0].weight)
    assert not torch.equal(draw[2].weight, problem.network[2].weight)
    problem.network.requires_grad_(False)
    with pytest.raises(OptionError, match="require gradients"):
        draws_of(problem)


def test_a_learning_rate_that_diverges_is_named_with_its_epoch():
    problem = make_problem()
    problem.inputs = 1e3 * problem.inputs
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    network[0].weight.data.mul_(1e-3)
    with pytest.raises(DataError, match=r"diverged in epoch \d of 6 at learning rate 1e\+06"):
        draws_of(problem, network, learning_rate=1e6)


def test_a_complete_path_is_extended_but_not_shortened_nor_used_for_another_network(tmp_path):
    problem = make_problem()
    path = tmp_path / "path.safetensors"
    moments_of(problem, epochs=4, checkpoint=path)
    extended = moments_of(problem, checkpoint=path)
    for name, tensor in moments_of(problem).tensors().items():
        assert torch.equal(extended.tensors()[name], tensor)
    with pytest.raises(StorageError, match="another training run or another network"):
        moments_of(make_problem(1), checkpoint=path)
    with pytest.raises(StorageError, match="contains 6 epochs, which is more than"):
        moments_of(problem, epochs=3, checkpoint=path)


@pytest.mark.parametrize(("options", "words"), [({"rank": 1}, "rank must be 0"), ({"epochs": 1}, "epochs must be")])
def test_bad_options_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        moments_of(make_problem(), **options)


def test_regression_takes_the_squared_error():
    problem = make_problem()
    targets = problem.inputs[:, [0, 1, 2, 0]].sin()
    loader = [(problem.inputs, targets)]
    options = {"learning_rate": 1e-2, "epochs": 3, "rank": 2, "samples": 4, "loss": "squared-error", "progress": False}
    draws = fit_swag(problem.network, loader, **options)
    predictor = mola.ensemble(draws, likelihood=mola.likelihoods.Gaussian(noise=0.5))
    predicted = mola.calibration.scale_noise(predictor, loader).predict(problem.inputs)
    torch.testing.assert_close(predicted.mean, torch.stack([draw(problem.inputs) for draw in draws]).mean(0))
