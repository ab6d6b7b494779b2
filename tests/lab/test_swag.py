"""SWAG: moments against numpy over stored snapshots, draws against the formula, statistics against a literal pass."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from molaplace.calibration import scale_noise
from molaplace.errors import DataError, OptionError, StorageError
from molaplace.likelihoods import Bernoulli, Gaussian
from molaplace.saving.schema import sealed
from molaplace_lab.swag import Moments, MultiSwag, Swag
from molaplace_lab.training import fit_multi_swag, fit_swag
from tests.closeness import assert_close
from tests.conftest import make_problem

RATE = 0.05


def with_norm(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 4))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def fit(problem, network=None, **options):
    given = {"learning_rate": RATE, "epochs": 6, "rank": 4, "samples": 5, "progress": False} | options
    return fit_swag(problem.network if network is None else network, problem.loader, **given)


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
    swag = fit_swag(
        problem.network, problem.loader, learning_rate=RATE, epochs=epochs, rank=rank, samples=2, progress=False
    )
    snapshots = walk(problem.network, problem.loader, epochs)
    moments = swag.moments
    np.testing.assert_allclose(flat(moments.mean.values()), snapshots.mean(0), rtol=1e-12)
    variance = (snapshots**2).mean(0) - snapshots.mean(0) ** 2
    np.testing.assert_allclose(flat([moments.variance(name) for name in moments.mean]), variance, rtol=1e-6)
    columns = np.array([snapshots[t] - snapshots[: t + 1].mean(0) for t in range(epochs)])[max(epochs - rank, 0) :]
    found = torch.cat([column.flatten(1) for column in moments.columns.values()], dim=1)
    assert found.shape == ((min(rank, epochs), snapshots.shape[1]))
    if rank:
        np.testing.assert_allclose(found, columns, atol=1e-12)
        if epochs <= rank:
            assert np.all(found.numpy()[0] == 0)  # the first snapshot is its own mean


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
    swag = fit(problem, rank=rank, scale=scale, samples=1)
    moments, count = swag.moments, 1_000
    generator = torch.Generator().manual_seed(7)
    seeds = torch.randint(2**62, (count,), generator=generator).tolist()
    drawn = [moments.draw(seed, scale) for seed in seeds]
    draws = torch.stack([flat(one[name] for name in moments.mean) for one in drawn])
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


def test_batchnorm_statistics_are_those_of_a_literal_pass_and_kept_for_every_draw():
    problem = make_problem(count=43)
    network = with_norm()
    network[3].p = 0.0  # so that the literal pass below needs no random numbers
    loader = problem.batches(8)  # the last batch is smaller
    swag = fit_swag(network, loader, learning_rate=RATE, epochs=3, rank=2, samples=3, progress=False)
    seen = []
    for index in range(3):
        drawn = swag.sample(index)
        literal = copy.deepcopy(network).train()
        literal.load_state_dict(drawn, strict=False)
        means, variances, total = torch.zeros(6), torch.zeros(6), 0
        for inputs, _ in loader:
            hidden = literal[0](inputs).detach()
            means += len(inputs) * hidden.mean(0)
            variances += len(inputs) * hidden.var(0)
            total += len(inputs)
        torch.testing.assert_close(drawn["1.running_mean"], means / total)
        torch.testing.assert_close(drawn["1.running_var"], variances / total)
        literal[1].running_mean.copy_(means / total)
        literal[1].running_var.copy_(variances / total)
        seen.append(literal.eval()(problem.inputs).softmax(-1).detach())
    assert not torch.allclose(swag.statistics["1.running_mean"][0], swag.statistics["1.running_mean"][2])
    torch.testing.assert_close(swag(problem.inputs), torch.stack(seen).mean(0))


def test_frozen_parameters_stay_where_they_are():
    problem = make_problem()
    problem.network[0].requires_grad_(False)
    swag = fit(problem)
    assert set(swag.sample(0)) == {"2.weight", "2.bias"}
    assert torch.equal(swag.network[0].weight, problem.network[0].weight)
    problem.network.requires_grad_(False)
    with pytest.raises(OptionError, match="require gradients"):
        fit(problem)


def test_a_learning_rate_that_diverges_is_named_with_its_epoch():
    problem = make_problem()
    problem.inputs = 1e3 * problem.inputs
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    network[0].weight.data.mul_(1e-3)
    with pytest.raises(DataError, match=r"diverged in epoch \d of 6 at learning rate 1e\+06"):
        fit(problem, network, learning_rate=1e6)


def test_files(tmp_path):
    problem, network = make_problem(), with_norm()
    swag = fit(problem, network)
    swag.save(tmp_path)
    again = Swag.load(tmp_path, with_norm(seed=5))  # any network of that architecture
    assert torch.equal(swag(problem.inputs), again(problem.inputs))
    assert torch.equal(swag.network[1].running_mean, again.network[1].running_mean)
    wider = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Identity(), nn.Linear(7, 4))
    for other in (problem.network, wider):
        with pytest.raises(StorageError, match="does not match Sequential"):
            Swag.load(tmp_path, other)


def test_a_complete_path_is_extended_but_not_shortened_nor_used_for_another_network(tmp_path):
    problem = make_problem()
    fit(problem, epochs=4, checkpoint=tmp_path)
    assert torch.equal(fit(problem, checkpoint=tmp_path)(problem.inputs), fit(problem)(problem.inputs))
    with pytest.raises(StorageError, match="another training run or another network"):
        fit(problem, make_problem(1).network, checkpoint=tmp_path)
    with pytest.raises(StorageError, match="contains 6 epochs, which is more than"):
        fit(problem, epochs=3, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("entry", "value"),
    [("noise", -1.0), ("noise", [0.5, "loud"]), ("scale", [0.0]), ("heteroscedastic", True), ("loudness", 3.0)],
)
def test_damaged_likelihoods_are_refused(tmp_path, entry, value):
    problem = make_problem()
    problem.labels = problem.inputs[:, [0, 1, 2, 0]]
    fit(problem, likelihood=Gaussian(noise=0.4)).save(tmp_path)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    del document["sha256"]
    document["likelihood"][entry] = value
    path.write_text(json.dumps(sealed(document)))
    with pytest.raises(StorageError):
        Swag.load(tmp_path, problem.network)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"rank": 1}, "rank must be 0"),
        ({"epochs": 1}, "epochs must be"),
        ({"samples": 0}, "samples must be"),
        ({"scale": -1.0}, "scale must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        fit(make_problem(), **options)


@pytest.mark.parametrize("kind", ["categorical", "gaussian", "bernoulli"])
def test_multi_swag_is_the_mixture_in_memory_and_on_disk(kind, tmp_path):
    problem = make_problem()
    networks = [nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2)]
    x, y = problem.inputs, problem.inputs[:, [0, 1, 2, 0]].sin()
    likelihood, labels = {
        "categorical": ("categorical", problem.labels),
        "gaussian": (Gaussian(noise=[0.4, 0.9, 1.0, 2.0], location=7.0, scale=3.0), 7 + 3 * y),
        "bernoulli": (Bernoulli(), (y > 0).double()),
    }[kind]
    options = {"learning_rate": 1e-2, "epochs": 3, "rank": 2, "samples": 2, "likelihood": likelihood}
    mixture = fit_multi_swag(networks, [(x, labels)], progress=False, **options)
    mixture = scale_noise(mixture, [(x, labels)]) if kind == "gaussian" else mixture
    first, second = mixture.swags
    assert first.seed != second.seed
    torch.testing.assert_close(mixture(x), (first(x) + second(x)) / 2)
    mixture.save(tmp_path)
    found, expected = MultiSwag.load(tmp_path, networks).predict(x), mixture.predict(x)
    if kind == "gaussian":
        assert found.component_mean.shape == (4, 40, 4)
        assert_close(found.log_prob(labels), expected.log_prob(labels))
        assert 5 < float(found.mean.mean()) < 9
    else:
        assert_close(found.probs, expected.probs)
    with pytest.raises(StorageError, match="2 SWAGs, got 3"):
        MultiSwag.load(tmp_path, [*networks, problem.network])
    with pytest.raises(StorageError, match="saved multi-swag"):
        Swag.load(tmp_path, networks[0])
