"""Laplace over whole networks: every structure against dense matrices by automatic differentiation."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, jacrev

import molaplace as mola
from molaplace.distributed import Team
from molaplace.errors import DataError, OptionError, StorageError, StructureTooLargeError
from molaplace.links import MonteCarlo
from molaplace.rules import Evidence, Score, Threshold
from tests.witness import unchanged

STRUCTURES = [{"structure": "kron"}, {"structure": "diag"}, {"structure": "full"}, {"subnetwork": 25}]
DRAWS = MonteCarlo(samples=3, over="weights", seed=2)
pytestmark = pytest.mark.filterwarnings(
    "ignore::molaplace.errors.MolaWarning"
)  # tiny data: the grid grows, labels are random


def convolutional(seed=0, classes=4):
    """Convolution, in-place ReLU, BatchNorm, two linear layers: 168 parameters, 6 of them BatchNorm's."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(27, 4),
        nn.Tanh(),
        nn.Linear(4, classes),
    )
    network(torch.randn(30, 1, 6, 6))  # statistics that are not those of the start
    return network.eval()


def data(seed=1, count=17, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 6, 6, generator=generator), torch.randint(classes, (count,), generator=generator)


def batches(inputs, labels, size):
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def fit(network, loader, val_loader=None, **options):
    return mola.whole.fit(network, loader, val_loader, **{"progress": False, **options})


def jacobian(posterior, network, inputs):
    """(n, C, D) in the posterior's order of weights, by reverse-mode automatic differentiation of the whole batch."""
    free = {name: value.detach() for name, value in network.named_parameters()}
    actual = jacrev(lambda parameters: functional_call(network, parameters, inputs))(free)
    structure = posterior.components[0].layer.structure
    places = {}
    start = 0
    for name, value in network.named_parameters():
        places[name] = torch.arange(start, start + value.numel(), dtype=torch.float64).view_as(value)
        start += value.numel()
    holder = copy.deepcopy(network)
    for name, value in holder.named_parameters():
        value.data = places[name]
    order = structure.layout.vector(holder).long()
    return torch.cat([actual[name].flatten(2) for name in free], dim=2)[:, :, order]


def ggn(posterior, network, inputs):
    rows = jacobian(posterior, network, inputs)
    probs = torch.softmax(network(inputs).detach(), 1)
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    return torch.einsum("ncp,ncd,ndq->pq", rows, hessian, rows)


def matrix_of(posterior):
    """The curvature as a dense matrix, in the posterior's order of weights."""
    curvature = posterior.components[0].layer.curvature
    basis = curvature.in_weights(torch.eye(len(curvature.values))).T
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=1e-10)
    return basis * curvature.values @ basis.T


# --- curvature --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STRUCTURES[1:], ids=str)
def test_full_diag_and_subnetwork_are_those_of_the_dense_ggn(options):
    network = convolutional()
    inputs, labels = data()
    posterior = fit(network, batches(inputs, labels, 5), **options)
    dense = ggn(posterior, network, inputs)
    expected = torch.diag(dense.diagonal()) if options == {"structure": "diag"} else dense
    torch.testing.assert_close(matrix_of(posterior), expected, rtol=1e-10, atol=1e-11)


def test_kron_is_the_kfac_of_curvlinops_and_batchnorm_is_diagonal():
    curvlinops = pytest.importorskip("curvlinops", reason="NO CURVLINOPS: `make setup` installs it")
    network = convolutional()
    inputs, labels = data()
    posterior = fit(network, batches(inputs, labels, 5), structure="kron")
    actual = matrix_of(posterior)
    layers = [(0, slice(0, 30)), (4, slice(30, 142)), (6, slice(142, 162))]
    for index, block in layers:
        parameters = list(network[index].parameters())
        operator = curvlinops.KFACLinearOperator(
            network,
            nn.CrossEntropyLoss(reduction="sum"),
            parameters,
            [(inputs, labels)],
            fisher_type="type-2",
            kfac_approx="expand",
            separate_weight_and_bias=False,
            check_deterministic=False,
        )
        operator.compute_kronecker_factors()
        state = operator.state_dict()
        above = state["gradient_covariances"][str(index)]
        across = state["input_covariances"][str(index)]
        torch.testing.assert_close(actual[block, block], torch.kron(above, across), rtol=1e-7, atol=1e-9)
    exact = ggn(posterior, network, inputs).diagonal()[162:]
    torch.testing.assert_close(actual[162:, 162:], torch.diag(exact), rtol=1e-10, atol=1e-12)


def test_subnetwork_has_the_largest_variances_and_dead_units_come_last():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))
    inputs = torch.randn(9, 3)
    with torch.no_grad():
        network[0].bias[:2] = -100.0  # 2 dead units: 8 weights into them, 6 out of them
    full = fit(network, [inputs], structure="full")
    variance = ggn(full, network, inputs).diagonal()
    alive = int((variance > 0).sum())
    assert alive == len(variance) - 14
    for count in (5, alive, alive + 3):
        posterior = fit(network, [inputs], subnetwork=count)
        chosen = posterior.components[0].layer.structure.layout.chosen
        variances_kept = variance[chosen]
        assert posterior.sizes == (count,)
        assert int((variances_kept > 0).sum()) == min(count, alive)
        others = torch.ones_like(variance, dtype=torch.bool).index_fill(0, chosen, False) & (variance > 0)
        assert not others.any() or float(variances_kept[variances_kept > 0].max()) <= float(variance[others].min())
    everything = fit(network, [inputs], subnetwork=len(variance))
    torch.testing.assert_close(everything(inputs), full(inputs), rtol=1e-9, atol=1e-12)
    assert fit(network, [inputs], subnetwork=0.2).sizes == (round(0.2 * len(variance)),)


class Odd(nn.Module):
    """Tokens through one layer, a layer called twice, a weight used by hand, a free parameter, an unused layer; centred logits."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 4)
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2, bias=False)
        self.norm = nn.LayerNorm(4)
        self.by_hand = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, inputs):
        inside = self.norm(torch.tanh(self.lift(inputs)) * self.scale)
        inside = torch.tanh(self.twice(torch.tanh(self.twice(inside))))
        logits = self.head((self.by_hand(inside) + inside @ self.by_hand.weight.T).mean(1))
        return logits - logits.mean(1, keepdim=True)


def test_any_network_is_right_only_plain_layers_are_factored():
    torch.manual_seed(3)
    network = Odd()
    inputs = torch.randn(6, 5, 3)
    posterior = fit(network, [inputs[:4], inputs[4:]], structure="full")
    torch.testing.assert_close(matrix_of(posterior), ggn(posterior, network, inputs), rtol=1e-10, atol=1e-11)
    kron = fit(network, [inputs], structure="kron")
    layers = [block.layer for block in kron.components[0].layer.structure.layout.blocks if block.layer]
    assert layers == ["lift", "head"]
    torch.testing.assert_close(  # one formula, and Jacobians that agree: a strong prior leaves J J' / lambda of both
        *(fitted.with_prior_precision(1e9).predict(inputs).logit_variance * 1e9 for fitted in (kron, posterior)),
        rtol=1e-5,
        atol=1e-6,
    )


# --- prediction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_linearised_covariance_is_j_sigma_j(options):
    network = convolutional()
    inputs, labels = data()
    new = data(seed=5, count=6)[0]
    posterior = fit(network, batches(inputs, labels, 5), prior_precision=0.7, **options)
    rows = jacobian(posterior, network, new)
    matrix = matrix_of(posterior)
    inverse = torch.linalg.inv(matrix + 0.7 * torch.eye(len(matrix)))
    expected = torch.einsum("ncp,pq,ndq->ncd", rows, inverse, rows)
    centre = torch.eye(4) - 0.25
    (part,) = posterior.capture(new).chunks()
    (spread,) = posterior.members(posterior.project(part)).spreads
    torch.testing.assert_close(spread.covariance(), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(spread.covariance(centred=True), centre @ expected @ centre, rtol=1e-8, atol=1e-10)
    drawn = spread.marginal_deviations(torch.eye(3))
    torch.testing.assert_close(
        torch.einsum("nsc,nsd->ncd", drawn, drawn), centre @ expected @ centre, rtol=1e-6, atol=1e-7
    )
    prediction = posterior.predict(new)
    variance = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(prediction.logit_variance[:, 0], variance, rtol=1e-8, atol=1e-10)
    probs = torch.softmax(network(new).detach() / (1 + torch.pi / 8 * variance).sqrt(), 1)
    torch.testing.assert_close(posterior(new), probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prediction.probs, probs, rtol=1e-9, atol=1e-12)
    # Columns of unit noise, one at a time, are columns of a root of the covariance of the weights.
    curvature = posterior.components[0].layer.curvature
    root = curvature.in_weights(torch.diag(curvature.inverse(0.7).sqrt())).T
    torch.testing.assert_close(root @ root.T, inverse, rtol=1e-8, atol=1e-9)
    assert posterior.sample(3, generator=torch.Generator().manual_seed(0)).weights.shape == (3, *posterior.sizes)


def test_only_the_last_layer_free_is_the_last_layer_method():
    network = convolutional()
    inputs, labels = data()
    new = data(seed=4)[0]
    network.requires_grad_(False)
    network[-1].requires_grad_(True)
    whole = fit(network, batches(inputs, labels, 5), structure="full", prior_precision=0.2)
    last = mola.fit(network, batches(inputs, labels, 5), structure="full", prior_precision=0.2, progress=False)
    assert whole.sizes == (20,)
    torch.testing.assert_close(
        whole.predict(new).logit_variance, last.predict(new).logit_variance, rtol=1e-8, atol=1e-10
    )
    for link in ("probit", "probit-centred", "mean-field", "bridge"):
        torch.testing.assert_close(whole.with_link(link)(new), last.with_link(link)(new), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(whole.log_evidence(), last.log_evidence(), rtol=1e-9, atol=1e-9)
    rule = Score("nll", grid=[1e-3, 0.1, 1.0, 10.0])
    curves = [
        fitted.tune(batches(inputs, labels, 5), rule=rule, progress=False).tuning.curve for fitted in (whole, last)
    ]
    assert curves[0]["nll"] == pytest.approx(curves[1]["nll"], rel=1e-8)


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_batches_do_not_matter_and_a_strong_prior_leaves_the_ensemble(options):
    networks = [convolutional(seed) for seed in (0, 1)]
    inputs, labels = data()
    once = fit(networks, [(inputs, labels)], **options)
    order = torch.randperm(len(inputs))
    again = fit(networks, batches(inputs[order], labels[order], 4), **options)
    torch.testing.assert_close(once(inputs), again(inputs), rtol=1e-8, atol=1e-10)
    for posterior in (once, once.with_link(DRAWS), once.with_link("mc")):
        parts = torch.cat([posterior(some) for some in inputs.split(3)])
        torch.testing.assert_close(parts, posterior(inputs), rtol=1e-9, atol=1e-12)
    plain = mola.ensemble(networks)(inputs)
    sure = once.with_prior_precision(1e12)
    torch.testing.assert_close(sure(inputs), plain, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(sure.with_link(DRAWS)(inputs), plain, rtol=1e-4, atol=1e-5)


def test_draws_of_weights_are_those_of_the_linearised_network():
    network = convolutional()
    inputs, labels = data(count=6)
    drawn = MonteCarlo(samples=20_000, over="weights")
    posterior = fit(network, [(inputs, labels)], structure="full", prior_precision=0.5, link=drawn)
    prediction = posterior.predict(inputs)
    torch.testing.assert_close(prediction.probs, posterior(inputs), rtol=1e-9, atol=1e-12)
    expected = posterior.with_link(MonteCarlo(samples=20_000))(inputs)
    torch.testing.assert_close(prediction.probs, expected, rtol=0, atol=0.01)
    assert float((prediction.probs - mola.ensemble(network)(inputs)).abs().max()) > 0.05
    few = posterior.with_link(DRAWS)
    generator = torch.Generator().manual_seed(1)
    other = few(inputs, generator=generator)
    assert torch.equal(few(inputs), few(inputs))
    assert not torch.equal(few(inputs), other)
    assert torch.equal(other, few(inputs, generator=generator.manual_seed(1)))


# --- tuning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["probit", "probit-centred", "mean-field", DRAWS], ids=str)
def test_tuning_scores_what_the_predictor_returns(link):
    networks = [convolutional(seed) for seed in (0, 1)]
    inputs, labels = data(count=9)
    grid = [0.01, 3.0, 500.0]
    for options in STRUCTURES:
        posterior = fit(networks, [(inputs, labels)], link=link, **options)
        probs = [posterior.with_prior_precision(precision)(inputs) for precision in grid]
        tuned = posterior.tune(iter(batches(inputs, labels, 4)), rule=Score("nll", grid=grid), progress=False)
        losses = [float(-prob.gather(1, labels[:, None]).log().mean()) for prob in probs]
        if tuned.temperature == 1:
            assert tuned.tuning.curve["nll"] == pytest.approx(losses, rel=1e-8)
            best = grid[losses.index(min(losses))]
            assert tuned.prior_precision == (best, best)


def test_the_papers_rule_and_the_evidence():
    network = convolutional()
    inputs, labels = data()
    posterior = fit(network, batches(inputs, labels, 5), structure="full", prior_precision=0.4)
    rule = Threshold(confidence=0.29, grid=[1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])
    tuned = posterior.tune(batches(inputs, labels, 5), rule=rule, progress=False)
    curve = dict(zip(tuned.tuning.curve["prior_precision"], tuned.tuning.curve["confidence"], strict=True))
    assert curve[tuned.prior_precision[0]] >= 0.29
    assert all(value < 0.29 for precision, value in curve.items() if precision < tuned.prior_precision[0])
    weights = torch.cat([value.detach().flatten() for value in network.parameters()])
    score = -nn.functional.cross_entropy(network(inputs).detach(), labels, reduction="sum")
    expected = score - 0.2 * weights.square().sum() + len(weights) / 2 * torch.tensor(0.4).log()
    expected -= torch.logdet(ggn(posterior, network, inputs) + 0.4 * torch.eye(len(weights))) / 2
    torch.testing.assert_close(posterior.log_evidence()[0], expected, rtol=1e-10, atol=1e-9)
    best = posterior.tune(rule=Evidence(), progress=False)
    for factor in (0.9, 1.1):
        neighbour = best.with_prior_precision(best.prior_precision[0] * factor)
        assert float(neighbour.log_evidence()) < float(best.log_evidence())
    with pytest.raises(OptionError, match="distances"):
        posterior.tune([(inputs, labels)], rule="distance", progress=False)


def process(rank, path):
    """One of two processes, with its own shard; an assertion that fails on one rank fails the test."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    network = convolutional()
    inputs, labels = data()
    team = Team()
    shard = [(inputs[:6], labels[:6])] if rank == 0 else batches(inputs[6:], labels[6:], 7)
    rule = Score("nll", grid=[0.1, 1.0, 10.0])
    for options in STRUCTURES:
        alone = fit(network, [(inputs, labels)], [(inputs, labels)], rule=rule, **options)
        shared = fit(network, shard, shard, rule=rule, team=team, **options)
        assert shared.tuning.curve["nll"] == pytest.approx(alone.tuning.curve["nll"], rel=1e-8)
        torch.testing.assert_close(shared(inputs), alone(inputs), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(shared.log_evidence(), alone.log_evidence())
    dist.destroy_process_group()


def test_processes_fit_and_tune_together(tmp_path):
    torch.multiprocessing.spawn(process, (tmp_path / "meeting",), nprocs=2)


# --- files and manners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_save_and_load(tmp_path, options):
    networks = [convolutional(seed) for seed in (0, 1)]
    inputs, labels = data()
    posterior = fit(networks, [(inputs, labels)], link=DRAWS, weights=[0.3, 0.7], prior_precision=0.3, **options)
    posterior = posterior.with_temperature(0.8)
    copies = copy.deepcopy(networks)
    for network in copies:
        network.requires_grad_(False)  # the fit has decided what is uncertain
    again = mola.load(posterior.save(tmp_path / "saved"), copies)
    assert (again.structure, again.prior_precision, again.link) == (posterior.structure, (0.3, 0.3), DRAWS)
    torch.testing.assert_close(again(inputs), posterior(inputs), rtol=0, atol=1e-14)
    torch.testing.assert_close(again.log_evidence(), posterior.log_evidence())
    with pytest.raises(StorageError, match="weights differ"):
        mola.load(tmp_path / "saved", networks[::-1])
    with pytest.raises(StorageError, match="2 networks, got 1"):
        mola.load(tmp_path / "saved", networks[0])
    assert isinstance(mola.load(tmp_path / "saved", networks), mola.whole.WholeMoLA)


@pytest.mark.parametrize("options", [*STRUCTURES, {"link": DRAWS}], ids=str)
def test_networks_are_left_as_they_were(options):
    network = convolutional()
    inputs, labels = data()
    network.train()
    network[0].weight.grad = torch.ones_like(network[0].weight)
    with unchanged(network):
        with torch.inference_mode():
            posterior = fit(network, [(inputs.clone(), labels)], **options)
            posterior(inputs.clone())
        posterior.predict(inputs)
    nn.functional.cross_entropy(network(inputs), labels).backward()


def test_bad_input_is_explained():
    network = convolutional()
    inputs, labels = data()
    loader = [(inputs, labels)]
    for error, words, batches_read, options in [
        (OptionError, "requires gradients", loader, {"networks": convolutional().requires_grad_(False)}),
        (OptionError, "full covariance", loader, {"structure": "diag", "subnetwork": 3}),
        *((OptionError, "subnetwork must be", loader, {"subnetwork": wrong}) for wrong in (0, 1.5, 10**6)),
        (OptionError, "only classification", loader, {"likelihood": "gaussian"}),
        (DataError, "two passes", iter(loader), {"subnetwork": 3}),
        (DataError, r"batch 1 .*networks\[0\].*NaN", [*loader, (inputs * torch.nan, labels)], {}),
        (DataError, "unlike the batches before", [*loader, inputs], {}),
        (DataError, "same number of classes", loader, {"networks": [network, convolutional(classes=3)]}),
        (DataError, "Use mola.fit for dense outputs", loader, {"networks": nn.Conv2d(1, 4, 3)}),
    ]:
        with pytest.raises(error, match=words):
            fit(**{"network": options.pop("networks", network), "loader": batches_read, **options})
    unlabelled = fit(network, [inputs], structure="diag")
    with pytest.raises(OptionError, match="needs training labels"):
        unlabelled.log_evidence()
    wide = nn.Sequential(nn.Linear(4, 10**6), nn.Linear(10**6, 4))
    with pytest.raises(StructureTooLargeError, match="is free"):
        fit(wide, [(torch.randn(2, 4), labels[:2])], structure="full")
