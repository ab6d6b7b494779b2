"""Laplace over whole networks: every structure against dense matrices by automatic differentiation."""

import copy
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import mola
from mola.distributed import Team
from mola.errors import DataError, MissingExtraError, MolaError, OptionError, StorageError, StructureTooLargeError
from mola.mixture import stacking_weights
from mola.whole.sums import require_curvlinops

QUIET = {"progress": False}


def convolutional(seed=0, classes=4):
    """Convolution, in-place ReLU, BatchNorm, two linear layers: 177 parameters, 6 of them BatchNorm's."""
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


def jacobian(network, inputs, names=None):
    """(n, C, D) in the order of `names`, by reverse-mode automatic differentiation of the whole batch."""
    free = {name: value.detach() for name, value in network.named_parameters() if names is None or name in names}
    found = jacrev(lambda parameters: functional_call(network, parameters, inputs))(free)
    return torch.cat([found[name].flatten(2) for name in (names or free)], dim=2)


def ggn(network, inputs, names=None):
    rows = jacobian(network, inputs, names)
    probs = torch.softmax(network(inputs).detach(), 1)
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    return torch.einsum("ncp,ncd,ndq->pq", rows, hessian, rows)


def order(posterior, network, index=0):
    """Where each weight of the posterior's vector lies among `named_parameters`."""
    layout, places, start = posterior.components[index].curvature.layout, {}, 0
    for name, value in network.named_parameters():
        places[name] = torch.arange(start, start + value.numel(), dtype=torch.float64).view_as(value)
        start += value.numel()
    parts = [layer.join(places).flatten() for layer in layout.layers] + [
        places[name].flatten() for name, _ in layout.rest
    ]
    return torch.cat(parts).long()


def matrix_of(posterior, index=0):
    """The curvature as a dense matrix, in the posterior's own order."""
    spectrum = posterior.components[index].curvature.spectrum
    if hasattr(spectrum, "vectors"):
        return spectrum.vectors * spectrum.values @ spectrum.vectors.T
    blocks = []
    for layer in spectrum.layers:
        left = torch.eye(len(layer.values)) if layer.left is None else layer.left
        right = torch.eye(layer.values.shape[1]) if layer.right is None else layer.right
        basis = torch.kron(left, right)
        blocks.append(basis * layer.values.flatten() @ basis.T)
    return torch.block_diag(*blocks, torch.diag(spectrum.rest))


def fit(network, loader, **options):
    return mola.fit_whole(network, loader, **(QUIET | options))


STRUCTURES = [{"structure": "kron"}, {"structure": "diag"}, {"structure": "full"}, {"subnetwork": 25}]


# --- curvature ------------------------------------------------------------------------------------------------------


def test_full_is_the_dense_ggn_by_autograd():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), structure="full")
    places = order(posterior, network)
    torch.testing.assert_close(matrix_of(posterior), ggn(network, inputs)[places][:, places], rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's forward mode loads it
def test_full_is_the_ggn_of_curvlinops():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), structure="full")
    operator = require_curvlinops().GGNLinearOperator(
        network, nn.CrossEntropyLoss(reduction="sum"), list(network.parameters()), [(inputs, labels)]
    )
    dense = (operator @ torch.eye(posterior.sizes[0])).detach()
    places = order(posterior, network)
    torch.testing.assert_close(matrix_of(posterior), dense[places][:, places], rtol=1e-10, atol=1e-12)


def test_diag_is_the_diagonal():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), structure="diag")
    expected = ggn(network, inputs).diagonal()[order(posterior, network)]
    torch.testing.assert_close(posterior.components[0].curvature.spectrum.values, expected, rtol=1e-10, atol=1e-14)


def test_kron_of_one_datum_is_exact_in_every_linear_layer():
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)), torch.randn(1, 3)
    posterior = fit(network, [inputs], structure="kron")
    places = order(posterior, network)
    dense, found = ggn(network, inputs)[places][:, places], matrix_of(posterior)
    torch.testing.assert_close(found[:16, :16], dense[:16, :16], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found[16:, 16:], dense[16:, 16:], rtol=1e-10, atol=1e-14)
    assert float(dense[:16, 16:].abs().max()) > 1e-3
    assert float(found[:16, 16:].abs().max()) == 0


def test_kron_is_what_its_definition_says_and_batchnorm_is_diagonal():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), structure="kron")
    found, places = matrix_of(posterior), order(posterior, network)
    probs = torch.softmax(network(inputs).detach(), 1)
    root = torch.linalg.cholesky(torch.diag_embed(probs) - probs[:, :, None] * probs[:, None] + 1e-15 * torch.eye(4))
    patches = nn.functional.unfold(inputs, 3, padding=1, stride=2)
    patches = torch.cat([patches, torch.ones(len(inputs), 1, 9)], 1)  # (n, I, T)
    between = network[0](inputs).detach()
    gradients = torch.func.vmap(jacrev(lambda z: network[1:](z.clone()[None])[0]))(between).flatten(3)  # (n, C, O, T)
    gradients = torch.einsum("ncr,ncot->nrot", root, gradients)
    across = torch.einsum("nit,njt->ij", patches, patches) / (9 * len(inputs))
    above = torch.einsum("nrot,nrpt->op", gradients, gradients)
    torch.testing.assert_close(found[:30, :30], torch.kron(above, across), rtol=1e-6, atol=1e-8)
    norm = ggn(network, inputs).diagonal()[places][30:36]
    torch.testing.assert_close(found[30:36, 30:36], torch.diag(norm), rtol=1e-10, atol=1e-12)
    layers = posterior.components[0].curvature.layout.layers
    assert [(layer.name, layer.scales) for layer in layers] == [("0", False), ("2", True), ("4", False), ("6", False)]


def test_subnetwork_has_the_largest_variances_and_their_block():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), subnetwork=25, prior_precision=0.3)
    dense, places = ggn(network, inputs), order(posterior, network)
    marks = torch.cat([mark.flatten() for mark in (posterior.subnetwork()[n] for n, _ in network.named_parameters())])
    variance = 1 / (dense.diagonal() + 0.3)
    assert int(marks.sum()) == 25
    assert float(variance[marks].min()) >= float(variance[~marks].max())
    chosen = places[posterior.components[0].curvature.spectrum.chosen]
    torch.testing.assert_close(matrix_of(posterior), dense[chosen][:, chosen], rtol=1e-10, atol=1e-12)
    rows = jacobian(network, inputs)[:, :, chosen]
    inverse = torch.linalg.inv(dense[chosen][:, chosen] + 0.3 * torch.eye(25))
    expected = torch.einsum("ncp,pq,ncq->nc", rows, inverse, rows)
    torch.testing.assert_close(posterior.predict(inputs).logit_variance[0], expected, rtol=1e-9, atol=1e-12)


def test_weights_of_units_that_never_fire_are_chosen_last():
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(9, 3)
    with torch.no_grad():
        network[0].bias[:2] = -100.0  # 2 dead units: 8 weights into them, 6 out of them
    dense = ggn(network, inputs).diagonal()
    alive = int((dense > 0).sum())
    assert alive == len(dense) - 14
    for count in (5, alive, alive + 3):
        marks = fit(network, [inputs], subnetwork=count).subnetwork()
        chosen = dense[torch.cat([marks[name].flatten() for name, _ in network.named_parameters()])]
        assert int((chosen > 0).sum()) == min(count, alive)


def test_subnetwork_of_all_weights_is_full_and_a_share_is_a_number():
    network, (inputs, labels) = convolutional(), data()
    loader = batches(inputs, labels, 6)
    full = fit(network, loader, structure="full")
    everything = fit(network, loader, subnetwork=full.sizes[0])
    torch.testing.assert_close(everything(inputs), full(inputs), rtol=1e-9, atol=1e-12)
    assert fit(network, loader, subnetwork=0.1).sizes == (round(0.1 * full.sizes[0]),)


# --- prediction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_linearised_covariance_is_j_sigma_j(options):
    network, (inputs, labels) = convolutional(), data()
    new = data(seed=5, count=6)[0]
    posterior = fit(network, batches(inputs, labels, 5), prior_precision=0.7, **options)
    places = order(posterior, network)
    if "subnetwork" in options:
        places = places[posterior.components[0].curvature.spectrum.chosen]
    rows, matrix = jacobian(network, new)[:, :, places], matrix_of(posterior)
    expected = torch.einsum("ncp,pq,ndq->ncd", rows, torch.linalg.inv(matrix + 0.7 * torch.eye(len(matrix))), rows)
    moments = posterior._moments(new)[0]
    torch.testing.assert_close(moments.mean, network(new).detach())
    torch.testing.assert_close(moments.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-10)
    centre = torch.eye(4) - 0.25
    torch.testing.assert_close(moments.contrast_covariance, centre @ expected @ centre, rtol=1e-8, atol=1e-10)
    spread = moments.spread.perturb(torch.eye(3))
    drawn = torch.einsum("nsc,nsd->ncd", spread, spread)
    torch.testing.assert_close(drawn, centre @ expected @ centre, rtol=1e-4, atol=1e-5)
    probs = torch.softmax(moments.mean / (1 + torch.pi / 8 * moments.variance).sqrt(), 1)
    torch.testing.assert_close(posterior(new), probs, rtol=1e-10, atol=1e-12)


def test_only_the_last_layer_free_is_the_last_layer_method():
    network, (inputs, labels) = convolutional(), data()
    network.requires_grad_(False)
    network[-1].requires_grad_(True)
    whole = fit(network, batches(inputs, labels, 5), structure="full", prior_precision=0.2)
    last = mola.fit(network, batches(inputs, labels, 5), structure="full", prior_precision=0.2, **QUIET)
    assert whole.sizes == (20,)
    new = data(seed=4)[0]
    mine, theirs = whole.predict(new), last.predict(new)
    torch.testing.assert_close(mine.logit_variance, theirs.logit_variance, rtol=1e-8, atol=1e-10)
    for link in ("probit", "probit-centered", "mean-field", "bridge"):
        torch.testing.assert_close(whole.with_link(link)(new), last.with_link(link)(new), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(whole.log_evidence(), last.log_evidence(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_batches_and_their_order_do_not_matter(options):
    network, (inputs, labels) = convolutional(), data()
    once = fit(network, [(inputs, labels)], **options)
    turned = torch.randperm(len(inputs))
    again = fit(network, batches(inputs[turned], labels[turned], 4), **options)
    torch.testing.assert_close(once(inputs), again(inputs), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        torch.cat([once(some) for some in inputs.split(3)]), once(inputs), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_a_prior_that_says_all_leaves_the_deep_ensemble(options):
    networks, (inputs, labels) = [convolutional(seed) for seed in (0, 1)], data()
    posterior = fit(networks, [(inputs, labels)], prior_precision=1e10, **options)
    plain = mola.ensemble(networks)(inputs)
    torch.testing.assert_close(posterior(inputs), plain, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(posterior.with_link("samples", 4)(inputs), plain, rtol=1e-3, atol=1e-4)
    twice = fit([networks[0]] * 2, [(inputs, labels)], **options)
    torch.testing.assert_close(twice(inputs), fit(networks[0], [(inputs, labels)], **options)(inputs))


@pytest.mark.parametrize("kind", ["batch-1d", "layer", "group", "bias-free", "weight-free"])
def test_normalisations_scale_each_channel(kind):
    norms = {"batch-1d": nn.BatchNorm1d(4), "layer": nn.LayerNorm(5), "group": nn.GroupNorm(2, 4)}
    torch.manual_seed(2)
    norm = norms.get(kind, nn.BatchNorm1d(4))
    network = nn.Sequential(nn.Linear(3, 5), norm, nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    network(torch.randn(20, 4, 3))
    network.eval()
    if kind == "bias-free":
        norm.bias.requires_grad_(False)
    if kind == "weight-free":
        norm.weight.requires_grad_(False)
        network[0].weight.requires_grad_(False)
    inputs, free = torch.randn(7, 4, 3), [name for name, value in network.named_parameters() if value.requires_grad]
    posterior = fit(network, [inputs], structure="full")
    layers = posterior.components[0].curvature.layout.layers
    assert [layer.scales for layer in layers] == [False, True, False]
    start, places = 0, {}
    for name in free:
        size = network.get_parameter(name).numel()
        places[name] = torch.arange(start, start + size).view_as(network.get_parameter(name))
        start += size
    found = torch.cat([layer.join(places).flatten() for layer in layers])
    dense = ggn(network, inputs, free)[found][:, found]
    torch.testing.assert_close(matrix_of(posterior), dense, rtol=1e-10, atol=1e-12)
    blocks = matrix_of(fit(network, [inputs[:1]], structure="kron"))
    middle = slice(layers[0].size, layers[0].size + layers[1].size)
    exact = ggn(network, inputs[:1], free)[found][:, found].diagonal()[middle]
    torch.testing.assert_close(blocks[middle, middle], torch.diag(exact), rtol=1e-9, atol=1e-12)


def test_linear_layers_over_positions_and_other_layers_are_handled():
    """Tokens through one linear layer, a weight used twice, a parameter of no layer: all against dense Jacobians."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift, self.twice = nn.Linear(3, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.randn(4))
            self.unused = nn.Linear(2, 2, bias=False)
            self.head = nn.Linear(4, 3)

        def forward(self, inputs):
            inside = torch.tanh(self.lift(inputs)) * self.scale
            return self.head(torch.tanh(self.twice(torch.tanh(self.twice(inside)))).mean(1))

    torch.manual_seed(3)
    network, inputs = Tokens(), torch.randn(6, 5, 3)
    posterior = fit(network, [inputs[:4], inputs[4:]], structure="full")
    layout, places = posterior.components[0].curvature.layout, order(posterior, network)
    assert [layer.name for layer in layout.layers] == ["lift", "head"]
    torch.testing.assert_close(matrix_of(posterior), ggn(network, inputs)[places][:, places], rtol=1e-10, atol=1e-12)
    assert torch.isfinite(fit(network, [inputs], structure="kron")(inputs)).all()


def test_a_weight_used_by_hand_is_noticed_also_where_logits_sum_to_zero():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, inputs):
            inside = torch.tanh(self.lift(inputs)) + inputs @ self.lift.weight.T
            logits = self.head(inside)
            return logits - logits.mean(1, keepdim=True)

    torch.manual_seed(4)
    network, inputs = Centred(), torch.randn(6, 3)
    posterior = fit(network, [inputs], structure="full")
    layout, places = posterior.components[0].curvature.layout, order(posterior, network)
    assert [layer.name for layer in layout.layers] == ["head"]
    torch.testing.assert_close(matrix_of(posterior), ggn(network, inputs)[places][:, places], rtol=1e-10, atol=1e-12)


def test_data_that_are_gone_in_the_second_pass_are_noticed():
    class Stream:
        def __init__(self, given):
            self.given = iter(given)

        def __iter__(self):
            return self.given

    loader = batches(*data(), 6)
    with pytest.raises(DataError, match="17 data the first time and 0 the second"):
        fit(convolutional(), Stream(loader), subnetwork=10)
    assert fit(convolutional(), Stream(loader), structure="diag").components[0].curvature.count == 17


def test_draws_of_many_logits_with_few_weights_in_float32():
    """A covariance of low rank, rounded, is not positive any more; its draws still have it."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 50)).float()
    inputs = torch.randn(40, 5).float()
    for count in (1, 2, 3):
        posterior = fit(network, [inputs], subnetwork=count, link=mola.links.MonteCarlo(samples=4000))
        moments = posterior._moments(inputs[:3])[0]
        draws = torch.cat(list(moments.draws(4000, torch.Generator().manual_seed(0), "logits")), dim=1)
        variance = (draws - draws.mean(2, keepdim=True)).var(1)
        torch.testing.assert_close(variance, moments.contrast_variance, rtol=0.15, atol=1e-4 * float(variance.max()))


def test_draws_of_weights_converge_to_the_integral():
    torch.manual_seed(0)
    network, inputs = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(9, 2)
    posterior = fit(network, [inputs], structure="full", prior_precision=2.0, link="samples", samples=1500)
    matrix, places = matrix_of(posterior), order(posterior, network)
    covariance = torch.linalg.inv(matrix + 2 * torch.eye(len(matrix)))
    draws = torch.randn(20000, len(matrix)) @ torch.linalg.cholesky(covariance).T
    vectors = torch.zeros_like(draws)
    vectors[:, places] = draws
    names = [(name, value.shape, value.numel()) for name, value in network.named_parameters()]

    def run(vector):
        parts = torch.split(vector, [size for *_, size in names])
        moved = {n: network.get_parameter(n).detach() + p.view(s) for (n, s, _), p in zip(names, parts, strict=True)}
        return torch.softmax(functional_call(network, moved, inputs), 1)

    expected = torch.func.vmap(run)(vectors).mean(0)
    assert float((posterior(inputs) - expected).abs().max()) < 0.03
    assert float((posterior.with_prior_precision(1e8)(inputs) - expected).abs().max()) > 0.05


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_draws_have_the_posterior_covariance(options):
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, [(inputs, labels)], prior_precision=0.5, **options)
    spectrum, matrix = posterior.components[0].curvature.spectrum, matrix_of(posterior)
    drawn = torch.stack([spectrum.deviation(noise, 0.5) for noise in torch.eye(len(spectrum.values))])
    if "subnetwork" in options:
        assert float(drawn.abs().sum(0)[[i for i in range(drawn.shape[1]) if i not in spectrum.chosen]].max()) == 0
        drawn = drawn[:, spectrum.chosen]
    expected = torch.linalg.inv(matrix + 0.5 * torch.eye(len(matrix)))
    torch.testing.assert_close(drawn.T @ drawn, expected, rtol=1e-8, atol=1e-9)


def test_seeds_reproduce_bit_for_bit():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, [(inputs, labels)], structure="diag", link="samples", samples=5, seed=3)
    first = posterior(inputs)
    assert torch.equal(first, posterior(inputs))
    # The same draws; a matrix product of another size may round in another way.
    torch.testing.assert_close(first, torch.cat([posterior(some) for some in inputs.split(4)]), rtol=1e-12, atol=1e-14)
    assert torch.equal(
        first, fit(network, [(inputs, labels)], structure="diag", link="samples", samples=5, seed=3)(inputs)
    )
    assert not torch.equal(first, posterior.with_link("samples", 5, seed=4)(inputs))
    generator = torch.Generator().manual_seed(1)
    other = posterior(inputs, generator=generator)
    assert not torch.equal(first, other)
    assert torch.equal(other, posterior(inputs, generator=generator.manual_seed(1)))


# --- tuning ---------------------------------------------------------------------------------------------------------


class MostConfident:
    """A rule of one's own, on a grid that does not grow."""

    def __init__(self, grid):
        self.grid = grid

    def choose(self, problem, val_loader):
        curve = problem.curve(problem.read(val_loader, "validation loader", True), self.grid)
        best = self.grid[int(curve["confidence"].argmax())]
        return mola.Tuning("own", (best,) * 2, {name: tuple(values.tolist()) for name, values in curve.items()})


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
@pytest.mark.parametrize("link", ["probit", "probit-centered", "mean-field", "samples"])
def test_tuning_scores_what_the_predictor_would_say(options, link):
    networks, (inputs, labels) = [convolutional(seed) for seed in (0, 1)], data(count=9)
    posterior = fit(networks, [(inputs, labels)], link=link, samples=3, **options)
    grid = [0.01, 3.0, 500.0]
    said = [posterior.with_prior_precision(precision)(inputs) for precision in grid]
    confidences = [float(probs.max(1).values.mean()) for probs in said]
    tuned = posterior.tune(iter(batches(inputs, labels, 4)), MostConfident(grid), **QUIET)
    assert tuned.tuning.curve["confidence"] == pytest.approx(confidences, rel=1e-8)
    losses = [float(-probs.gather(1, labels[:, None]).log().mean()) for probs in said]
    assert tuned.tuning.curve["nll"] == pytest.approx(losses, rel=1e-8)
    best = grid[confidences.index(max(confidences))]
    assert tuned.prior_precision == (best, best)
    torch.testing.assert_close(tuned(inputs), said[grid.index(best)])


def test_validation_score_takes_the_best():
    network, (inputs, labels) = convolutional(), data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)  # the grid may grow
        tuned = fit(network, [(inputs, labels)], structure="diag").tune(
            batches(inputs, labels, 6), mola.ValidationScore("nll", [0.1, 10.0, 1e3]), **QUIET
        )
    table = tuned.tuning.curve
    assert tuned.prior_precision[0] == table["prior_precision"][table["nll"].index(min(table["nll"]))]


def test_the_papers_rule_is_met_and_the_evidence_is_largest():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), structure="kron")
    rule = mola.ConfidenceThreshold(confidence=0.29, grid=[1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])
    tuned = posterior.tune(batches(inputs, labels, 5), rule, **QUIET)
    curve = dict(zip(tuned.tuning.curve["prior_precision"], tuned.tuning.curve["confidence"], strict=True))
    (chosen,) = tuned.prior_precision
    assert curve[chosen] >= 0.29
    assert all(confidence < 0.29 for precision, confidence in curve.items() if precision < chosen)
    by_evidence = posterior.tune(rule=mola.Evidence(), **QUIET)
    here = float(by_evidence.log_evidence())
    for factor in (0.9, 1.1):
        assert float(by_evidence.with_prior_precision(by_evidence.prior_precision[0] * factor).log_evidence()) < here


def test_log_evidence_is_the_dense_formula():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, batches(inputs, labels, 5), structure="full", prior_precision=0.4)
    dense, size = ggn(network, inputs), posterior.sizes[0]
    weights = torch.cat([value.detach().flatten() for value in network.parameters()])
    score = -nn.functional.cross_entropy(network(inputs).detach(), labels, reduction="sum")
    expected = score - 0.2 * weights.square().sum() + size / 2 * torch.tensor(0.4).log()
    expected -= torch.logdet(dense + 0.4 * torch.eye(size)) / 2
    torch.testing.assert_close(posterior.log_evidence()[0], expected, rtol=1e-10, atol=1e-9)


def test_outliers_may_tune_it_too():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, [(inputs, labels)], structure="diag")
    outliers = [5 * inputs]
    rule = mola.OutlierExposure(outliers, grid=[0.01, 1.0, 100.0, 1e4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)
        tuned = posterior.tune([(inputs, labels)], rule, **QUIET)
    place = tuned.tuning.curve["prior_precision"].index(1.0)
    expected = float(posterior(outliers[0]).max(1).values.mean())
    assert tuned.tuning.curve["outlier_confidence"][place] == pytest.approx(expected, rel=1e-9)


def test_stacking_weights_are_those_of_the_members():
    networks, (inputs, labels) = [convolutional(seed) for seed in (0, 1)], data()
    posterior = fit(networks, [(inputs, labels)], structure="diag", prior_precision=[0.5, 2.0])
    new, truth = data(seed=7, count=40)
    members = [
        fit(one, [(inputs, labels)], structure="diag", prior_precision=p)(new)
        for one, p in zip(networks, (0.5, 2.0), strict=True)
    ]
    expected = stacking_weights(torch.stack([probs[torch.arange(40), truth] for probs in members], 1))
    found = posterior.reweight(batches(new, truth, 15), **QUIET)
    torch.testing.assert_close(found.weights, expected, rtol=1e-6, atol=1e-6)
    assert found.structure == "diag"
    last = mola.fit(networks, [(inputs, labels)], **QUIET)
    held = last._read([(new, truth)], "validation loader", labelled=True, progress=False, team=Team.alone())
    for use in (posterior.reweight, posterior.tune):
        with pytest.raises(mola.DataError, match=r"read by a posterior over last layers.*pass the loader itself"):
            use(held, **QUIET)


# --- files, mixtures, manners ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_save_and_load(tmp_path, options):
    networks, (inputs, labels) = [convolutional(seed) for seed in (0, 1)], data()
    for link in ("mean-field", "samples"):
        posterior = fit(networks, [(inputs, labels)], link=link, samples=3, seed=2, weights=[0.3, 0.7], **options)
        again = mola.WholeMoLA.load(posterior.save(tmp_path / "saved"), copy.deepcopy(networks))
        assert torch.equal(again(inputs), posterior(inputs))
        assert (again.structure, again.prior_precision) == (posterior.structure, posterior.prior_precision)
        torch.testing.assert_close(again.log_evidence(), posterior.log_evidence(), rtol=0, atol=0)
    for network in networks:
        network.requires_grad_(False)  # what is uncertain was decided when it was fitted
    frozen = mola.WholeMoLA.load(tmp_path / "saved", networks).with_link("probit")
    assert torch.equal(frozen(inputs), posterior.with_link("probit")(inputs))


def test_loading_refuses_other_networks_and_other_folders(tmp_path):
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, [(inputs, labels)], structure="diag")
    posterior.save(tmp_path / "whole")
    with pytest.raises(StorageError, match="not the network that was saved"):
        mola.WholeMoLA.load(tmp_path / "whole", convolutional(5))
    with pytest.raises(StorageError, match="saved with 1 network, got 2"):
        mola.WholeMoLA.load(tmp_path / "whole", [network, network])
    mola.fit(network, [(inputs, labels)], **QUIET).save(tmp_path / "last")
    with pytest.raises(StorageError, match=r"holds a saved posterior.*mola.load"):
        mola.WholeMoLA.load(tmp_path / "last", network)
    with pytest.raises(StorageError):
        mola.load(tmp_path / "whole", models=network)


def test_it_mixes_with_other_predictors():
    network, (inputs, labels) = convolutional(), data()
    whole, last = fit(network, [(inputs, labels)]), mola.fit(network, [(inputs, labels)], **QUIET)
    mixed = mola.Mixture([whole, last, mola.ensemble(network)], [0.5, 0.3, 0.2])
    expected = 0.5 * whole(inputs) + 0.3 * last(inputs) + 0.2 * torch.softmax(network(inputs).detach(), 1)
    torch.testing.assert_close(mixed(inputs), expected)
    prediction = whole.predict(batches(inputs, labels, 5))
    torch.testing.assert_close(prediction.probs, whole(inputs))
    assert float(prediction.mutual_information.min()) >= 0
    assert whole.predict_proba(inputs.numpy()).shape == (17, 4)


@pytest.mark.parametrize("options", [*STRUCTURES, {"structure": "diag", "link": "samples", "samples": 2}], ids=str)
def test_networks_are_left_as_they_were(options):
    network, (inputs, labels) = convolutional(), data()
    network.train()
    network[0].weight.grad = torch.ones_like(network[0].weight)
    before, state = copy.deepcopy(network.state_dict()), torch.random.get_rng_state()
    with torch.inference_mode():
        posterior = fit(network, [(inputs.clone(), labels)], **options)
        posterior(inputs.clone())
    with torch.no_grad():
        posterior.predict(inputs)
    assert network.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(network[0].weight.grad, torch.ones_like(network[0].weight))
    assert network[-1].weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    nn.functional.cross_entropy(network(inputs), labels).backward()


def test_a_network_trained_further_is_noticed():
    network, (inputs, labels) = convolutional(), data()
    posterior = fit(network, [(inputs, labels)], structure="diag")
    with torch.no_grad():
        network[0].weight += 0.1
    with pytest.raises(OptionError, match="changed since the posterior was fitted"):
        posterior(inputs)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [*STRUCTURES, {"structure": "diag", "link": "mc"}])
def test_networks_in_half_precision(options, kind):
    """As the same weights in float64, but for the rounding of the network's own arithmetic; layers are known for layers."""
    network, (inputs, labels) = convolutional(classes=3).to(kind), data(classes=3)
    exact = copy.deepcopy(network).double()
    posteriors = [fit(one, [(inputs.to(kind).to(one[0].weight.dtype), labels)], **options) for one in (network, exact)]
    layouts = [posterior.components[0].curvature.layout for posterior in posteriors]
    assert layouts[0] == layouts[1]
    if "subnetwork" not in options:  # rounding may change which weights are chosen
        traces = [float(posterior.components[0].curvature.spectrum.values.sum()) for posterior in posteriors]
        assert traces[0] == pytest.approx(traces[1], rel=0.03)
    found, expected = posteriors[0](inputs.to(kind)), posteriors[1](inputs.to(kind).double())
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < 0.03


def test_float32_networks_predict_in_float32():
    network, (inputs, labels) = convolutional(), data()
    exact = fit(network, [(inputs, labels)])(inputs)
    rough = fit(network.float(), [(inputs.float(), labels)])(inputs.float())
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_in_the_networks_precision_is_no_information(seed):
    """Adding the same to all logits changes nothing: of that direction data say nothing, and rounding must not say something."""
    torch.manual_seed(seed)
    inputs = torch.randn(300, 5)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).float()
    inputs, new = inputs.bfloat16(), (2 * torch.randn(100, 5)).bfloat16()
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs.float()), labels).backward()
        optimiser.step()
    half = copy.deepcopy(network).bfloat16()
    single, exact = copy.deepcopy(half).float(), copy.deepcopy(half).double()

    def variance(one, precision, **options):
        kind = one[0].weight.dtype
        posterior = fit(one, [(inputs.to(kind), labels)], prior_precision=precision, **options)
        return posterior.predict(new.to(kind)).logit_variance.double()

    def far(found, expected):
        return float((found / expected).log().abs().median())

    expected = variance(exact, 1e-3, structure="kron")
    assert far(variance(half, 1e-3, structure="kron"), expected) < 0.02
    with torch.autocast("cpu", torch.bfloat16):
        posterior = fit(single, [(inputs.float(), labels)], prior_precision=1e-3, structure="kron")
    assert far(posterior.predict(new.float()).logit_variance.double(), expected) < 0.02
    for structure in ("kron", "full"):
        found = variance(single, 1e-6, structure=structure)
        assert far(found, variance(exact, 1e-6, structure=structure)) < 0.02, structure


@pytest.mark.parametrize("options", STRUCTURES, ids=str)
def test_candidates_taken_by_few_give_the_same_curve(options, monkeypatch):
    networks, (inputs, labels) = [convolutional(seed) for seed in (0, 1)], data()
    posterior = fit(networks, [(inputs, labels)], **options)
    curves = []
    for at_once in (2**23, 1):
        monkeypatch.setattr("mola.whole.spectra.NUMBERS_AT_ONCE", at_once)
        tuned = posterior.tune([(inputs, labels)], MostConfident([0.01, 3.0, 500.0]), **QUIET)
        curves.append(tuned.tuning.curve["nll"])
    assert curves[0] == pytest.approx(curves[1], rel=1e-12)


def test_bad_input_is_explained(monkeypatch):
    network, (inputs, labels) = convolutional(), data()
    loader = [(inputs, labels)]
    with pytest.raises(OptionError, match="no parameter that requires gradients"):
        fit(convolutional().requires_grad_(False), loader)
    with pytest.raises(OptionError, match="structure must be one of kron, diag, full"):
        fit(network, loader, structure="kfac")
    with pytest.raises(OptionError, match="full covariance of its weights"):
        fit(network, loader, structure="diag", subnetwork=3)
    for wrong in (0, -1, 1.5, 0.0, True, "all"):
        with pytest.raises(OptionError, match="subnetwork must be a whole number"):
            fit(network, loader, subnetwork=wrong)
    with pytest.raises(OptionError, match="more weights than there are"):
        fit(network, loader, subnetwork=10**6)
    with pytest.raises(DataError, match="two passes over the training data"):
        fit(network, iter(loader), subnetwork=3)
    with pytest.raises(DataError, match=r"batch 0 of the training loader, models\[0\].*NaN"):
        fit(network, [(inputs * torch.nan, labels)], structure="diag")
    with pytest.raises(DataError, match=r"batch 1 of the training loader, models\[0\].*NaN"):
        fit(network, [(inputs, labels), (inputs * torch.nan, labels)], structure="kron")
    with pytest.raises(DataError, match="unlike the batches before it"):
        fit(network, [(inputs, labels), inputs], structure="diag")
    with pytest.raises(DataError, match=r"labels must lie in \[0, 3\]"):
        fit(network, [(inputs, labels + 1)], structure="diag")
    with pytest.raises(DataError, match="same number of classes"):
        fit([network, convolutional(classes=3)], loader)
    unlabelled = fit(network, [inputs], structure="diag")
    with pytest.raises(OptionError, match="needs training labels"):
        unlabelled.log_evidence()
    with pytest.raises(DataError, match="no labels"):
        unlabelled.tune([inputs], **QUIET)
    with pytest.raises(OptionError, match="link must be one of"):
        fit(network, loader, link="sample")
    with pytest.raises(OptionError, match="for all weights of a network use link='samples'"):
        unlabelled.with_link(mola.MonteCarlo(over="weights"))
    with pytest.raises(OptionError, match="samples must be a whole number"):
        fit(network, loader, link="samples", samples=0)
    with pytest.raises(DataError, match="NaN"):
        unlabelled(inputs * torch.nan)
    with pytest.raises(DataError, match="batch 0 of the prediction loader"):
        unlabelled.predict(inputs[:, :, :2])
    with pytest.raises(OptionError, match="passed as rule="):
        unlabelled.tune(mola.ValidationScore("nll"))
    monkeypatch.setattr("mola.whole.sums.free_memory", lambda: 10_000)
    with pytest.raises(StructureTooLargeError, match=r"a \d+ x \d+ matrix of .* GB are free. Use structure 'kron'"):
        fit(network, loader, structure="full")
    with pytest.raises(StructureTooLargeError, match="smaller subnetwork"):
        fit(network, loader, subnetwork=100)


def test_without_curvlinops_kron_says_how_to_get_it(monkeypatch):
    network, (inputs, labels) = convolutional(), data()
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    with pytest.raises(MissingExtraError, match=r"curvlinops-for-pytorch.*mola-torch\[curvature\]"):
        fit(network, [(inputs, labels)])
    assert isinstance(fit(network, [(inputs, labels)], structure="diag"), mola.WholeMoLA)


def test_hooks_are_removed_when_curvlinops_fails(monkeypatch):
    network, (inputs, labels) = convolutional(), data()
    broken = nn.Sequential(network, nn.Identity())

    def fail(*_):
        if torch.is_grad_enabled() and broken.calls > 1:
            raise RuntimeError("broken on purpose")
        broken.calls += 1

    broken.calls = 0
    handle = broken[1].register_forward_hook(fail)
    with pytest.raises(MolaError, match="broken on purpose"):
        fit(broken, [(inputs, labels)] * 3)
    handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in broken.modules())
