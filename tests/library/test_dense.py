"""A 1x1 convolution is a linear layer on every pixel: whatever is said of positions is what the flattened network says of rows."""

import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mola
from mola import DataError, HeadError, OptionError, links, positions
from mola.laplace import base, moments
from mola.network import Layout, capture, features, find_head, undisturbed
from mola.tuning import candidates
from tests.conftest import STRUCTURES

FEATURES, CLASSES = 4, 3
FIELDS = ("entropy", "mutual_information", "ood_score", "distance", "far_field", "confidence", "aleatoric")


class Body(nn.Module):
    """Features (n, P, H, W), or (n, T, P), from inputs of the same layout; and a head that is a module of its own."""

    def __init__(self, layer, head):
        super().__init__()
        self.layer, self.head = layer, head

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)))


def made(kind, seed=0, bias=True):
    """A network, inputs, labels, and the axis of the classes."""
    torch.manual_seed(seed)
    if kind == "image":
        network = Body(nn.Conv2d(2, FEATURES, 3, padding=1), nn.Conv2d(FEATURES, CLASSES, 1, bias=bias))
        return network, torch.randn(6, 2, 5, 7), torch.randint(CLASSES, (6, 5, 7)), 1
    if kind == "signal":
        network = Body(nn.Conv1d(2, FEATURES, 3, padding=1), nn.Conv1d(FEATURES, CLASSES, 1, bias=bias))
        return network, torch.randn(6, 2, 11), torch.randint(CLASSES, (6, 11)), 1
    if kind == "volume":
        network = Body(nn.Conv3d(2, FEATURES, 1), nn.Conv3d(FEATURES, CLASSES, 1, bias=bias))
        return network, torch.randn(6, 2, 2, 3, 4), torch.randint(CLASSES, (6, 2, 3, 4)), 1
    network = Body(nn.Linear(2, FEATURES), nn.Linear(FEATURES, CLASSES, bias=bias))
    shape = (6, 9) if kind == "sequence" else (6, 3, 5)
    return network, torch.randn(*shape, 2), torch.randint(CLASSES, shape), -1


KINDS = ("image", "signal", "volume", "sequence", "grid")


def flattened(network, x, axis):
    """The last layer as an nn.Linear, and what it is given at every position."""
    head = nn.Linear(FEATURES, CLASSES, bias=network.head.bias is not None)
    with torch.no_grad():
        head.weight.copy_(network.head.weight.flatten(1))
        if head.bias is not None:
            head.bias.copy_(network.head.bias)
        given = torch.tanh(network.layer(x)).movedim(axis, -1).reshape(-1, FEATURES)
    return nn.Sequential(head), given


def rows_of(values, axis):
    return values.movedim(axis, -1).reshape(-1, values.shape[axis])


def fitted(*arguments, **keywords):
    return mola.fit(*arguments, **keywords, progress=False)


@pytest.fixture(autouse=True)
def _exactly():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def close(first, second, tolerance=1e-10):
    assert first.shape == second.shape
    assert float((first - second).abs().max()) <= tolerance * max(1.0, float(second.abs().max()))


# --- the law -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_rows_of_the_flattened_network(kind, structure):
    network, x, y, axis = made(kind)
    flat, rows = flattened(network, x, axis)
    dense = fitted(network, [(x[:4], y[:4]), (x[4:], y[4:])], structure=structure)
    plain = fitted(flat, [(rows, y.flatten())], structure=structure)
    close(dense.log_evidence(), plain.log_evidence())
    assert dense.components[0].curvature.count == y.numel()
    said, expected = dense.predict(x), plain.predict(rows)
    assert said.probs.shape == network(x).shape
    close(rows_of(said.probs, axis), expected.probs)
    assert torch.equal(said.label.flatten(), expected.label)
    for name in FIELDS:
        assert getattr(said, name).shape == y.shape
        close(getattr(said, name).flatten(), getattr(expected, name), 1e-8)
    close(rows_of(said.logit_mean[0], axis), expected.logit_mean[0])
    close(rows_of(said.logit_variance[0], axis), expected.logit_variance[0])
    close(dense(x), said.probs, 1e-14)
    close(dense.confidence_bound(x).flatten(), plain.confidence_bound(rows))
    close(dense.confidence_bound(x, lemma=True).flatten(1), plain.confidence_bound(rows, lemma=True))


@pytest.mark.parametrize("link", ["probit-centered", "mean-field", "bridge", "mc"])
def test_every_link_speaks_in_the_layout_of_the_logits(link):
    network, x, y, axis = made("image", bias=False)
    flat, rows = flattened(network, x, axis)
    dense, plain = fitted(network, [(x, y)], link=link), fitted(flat, [(rows, y.flatten())], link=link)
    close(rows_of(dense.predict(x).probs, axis), plain.predict(rows).probs)


@pytest.mark.parametrize("rule", ["threshold", "nll", "distance", "evidence"])
def test_tuning_sees_the_same_rows(rule):
    network, x, y, axis = made("image")
    flat, rows = flattened(network, x, axis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)  # an untrained network
        held_out = None if rule == "evidence" else (x[3:], y[3:])
        own = None if rule == "evidence" else [held_out]
        dense = fitted(network, [(x[:3], y[:3])], own, rule=rule)
        flat_rows = flattened(network, x[3:], axis)[1]
        theirs = None if rule == "evidence" else [(flat_rows, y[3:].flatten())]
        plain = fitted(flat, [(rows[: y[:3].numel()], y[:3].flatten())], theirs, rule=rule)
    assert math.isclose(dense.prior_precision[0], plain.prior_precision[0], rel_tol=1e-6)
    close(rows_of(dense.predict(x).probs, axis), plain.predict(rows).probs, 1e-6)
    close(dense.predict(x).ood_score.flatten(), plain.predict(rows).ood_score, 1e-6)


def test_the_hessian_is_that_of_the_loss_over_all_positions():
    network, x, y, _ = made("image")
    y[0, :2] = -100
    head = {name: value.detach() for name, value in network.head.named_parameters()}

    def loss(weight, bias):
        named = {"weight": weight[:, :, None, None], "bias": bias}
        logits = functional_call(network.head, named, (torch.tanh(network.layer(x)).detach(),))
        return functional.cross_entropy(logits, y, reduction="sum")

    blocks = hessian(loss, (head["weight"][:, :, 0, 0], head["bias"]))
    size, width = CLASSES, FEATURES + 1
    whole = torch.zeros(size, width, size, width)
    whole[:, :-1, :, :-1], whole[:, :-1, :, -1] = blocks[0][0], blocks[0][1]
    whole[:, -1, :, :-1], whole[:, -1, :, -1] = blocks[1][0], blocks[1][1]
    matrix = whole.reshape(size * width, size * width)
    spectrum = {
        one: fitted(network, [(x, y)], structure=one).components[0].curvature.spectrum for one in ("full", "diag")
    }
    for precision in (0.1, 3.0):
        prior = torch.tensor(precision)
        expected = torch.linalg.slogdet(matrix + precision * torch.eye(len(matrix))).logabsdet
        close(spectrum["full"].log_determinant(prior), expected)
        close(spectrum["diag"].log_determinant(prior), (matrix.diagonal() + precision).log().sum())


# --- which positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-100, 255])
@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_ignored_positions_leave_no_trace(kind, ignore_index):
    network, x, y, axis = made(kind)
    flat, rows = flattened(network, x, axis)
    y[torch.rand(y.shape) < 0.4] = ignore_index
    y[2] = ignore_index
    counted = y.flatten() != ignore_index
    dense = fitted(network, [(x[:4], y[:4]), (x[4:], y[4:])], ignore_index=ignore_index)
    plain = fitted(flat, [(rows[counted], y.flatten()[counted])])
    close(dense.log_evidence(), plain.log_evidence())
    assert dense.components[0].curvature.count == int(counted.sum())
    close(rows_of(dense(x), axis), plain(rows))
    with pytest.raises(DataError, match="no row"):
        fitted(network, [(x, torch.full_like(y, ignore_index))], ignore_index=ignore_index)


def test_drawn_positions_depend_on_the_input_alone(monkeypatch):
    network, x, y, _ = made("image")
    twin = made("image")[0]
    y[1, :4] = -100  # 7 of 35 positions are left
    sums = [
        [one.curvature.factors.tensors() for one in fitted([network, twin], loader, positions=10).components]
        for loader in ([(x, y)], list(zip(x.split(1), y.split(1), strict=True)), [(x[:4], y[:4]), (x[4:], y[4:])])
    ]
    posterior = fitted(network, [(x, y)], positions=10)
    assert posterior.components[0].curvature.count == 5 * 10 + 7
    for networks in sums:
        for own in networks:
            for name, tensor in own.items():
                close(tensor, sums[0][0][name], 1e-12)
    more = fitted(network, [(x, y)], positions=1000)
    close(more.log_evidence(), fitted(network, [(x, y)]).log_evidence(), 1e-12)
    drawn = torch.cat([features.chosen_positions(35, 10, index) for index in range(2000)])
    assert float((torch.bincount(drawn) / 2000 - 10 / 35).abs().max()) < 0.05  # all alike


def test_an_average_does_not_mind_how_finely_an_image_is_divided():
    """Each pixel four times over is no more information: the average knows, and all positions as if independent do not."""
    network, x, y, _ = made("volume")
    finer, labels = (
        x.repeat_interleave(2, 3).repeat_interleave(2, 4),
        y.repeat_interleave(2, 2).repeat_interleave(2, 3),
    )
    for positions_used, same in (("average", True), ("all", False)):
        coarse = fitted(network, [(x, y)], positions=positions_used)
        fine = fitted(network, [(finer, labels)], positions=positions_used)
        assert torch.allclose(coarse.log_evidence(), fine.log_evidence(), rtol=1e-10) is same
        assert torch.allclose(coarse(x), fine(x), rtol=1e-10) is same
    averaged, every = fitted(network, [(x, y)], positions="average"), fitted(network, [(x, y)])
    assert (averaged.components[0].curvature.count, every.components[0].curvature.count) == (6, 6 * 24)
    for name, tensor in averaged.components[0].curvature.factors.tensors().items():
        close(24 * tensor, every.components[0].curvature.factors.tensors()[name])
    close(averaged.predict(x).distance, every.predict(x).distance)  # the classes are where they were


def test_held_out_data_keep_some_positions_of_each_input(monkeypatch):
    monkeypatch.setattr(candidates, "POSITIONS_KEPT", 8)
    network, x, y, _ = made("image")
    posterior = fitted(network, [(x, y)])
    seen = []
    for loader in ([(x, y)], list(zip(x.split(1), y.split(1), strict=True))):
        with undisturbed(network):
            heads = [one.head for one in posterior.components]
            kept = candidates.read_held_out([network], heads, loader, where="loader", labelled=True, progress=False)
        seen.append(kept)
    assert len(seen[0]) == 6 * 8
    assert seen[0].independent == 1 / 8
    assert torch.equal(seen[0].features[0], seen[1].features[0])
    assert torch.equal(seen[0].labels, seen[1].labels)


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_positions_of_held_out_data_are_the_same_however_they_are_gathered(size, monkeypatch):
    """Some inputs have fewer positions than are kept, one has none, in the last batch or among others."""
    monkeypatch.setattr(candidates, "POSITIONS_KEPT", 8)
    networks = [made("image", seed)[0] for seed in range(2)]
    _, x, y, _ = made("image")
    posterior = fitted(networks, [(x, y)])
    y[1, :, 1:], y[-1] = -100, -100
    loader = list(zip(x.split(size), y.split(size), strict=True))
    heads, seen = [one.head for one in posterior.components], []
    for gathered in (1, 30, 100, 2**20):  # no input together with another, and all of them
        monkeypatch.setattr(candidates, "GATHERED", gathered)
        with undisturbed(*networks):
            seen.append(
                candidates.read_held_out(networks, heads, loader, where="loader", labelled=True, progress=False)
            )
    first = seen[0]
    assert len(first) == 5 + 4 * 8
    assert first.independent == pytest.approx(5 / 37)
    for other in seen[1:]:
        assert other.independent == first.independent
        assert torch.equal(other.labels, first.labels)
        assert all(map(torch.equal, other.features, first.features))
        assert all(map(torch.equal, other.logits, first.logits))


# --- memory ------------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that is made inside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made_now = function(*args, **(kwargs or {}))
        for one in made_now if isinstance(made_now, (tuple, list)) else (made_now,):
            if isinstance(one, torch.Tensor) and one._base is None:
                self.numel = max(self.numel, one.numel())
        return made_now


def test_no_tensor_is_larger_than_a_batch_of_features_and_some_portions():
    torch.manual_seed(0)
    network = Body(nn.Conv2d(1, 8, 1), nn.Conv2d(8, 30, 1))
    x, y = torch.randn(4, 1, 64, 64), torch.randint(30, (4, 64, 64))
    batch = 4 * 64 * 64 * 30  # the logits; all covariances would be thirty times as much
    with Largest() as fit:
        posterior = fitted(network, [(x, y)], link="probit")
    assert fit.numel <= batch
    for link in ("probit", "mean-field", "mc"):
        with Largest() as predict:
            said = posterior.with_link(link).predict(x)
            # The epistemic part takes longest, and asks no link.
            assert said.probs.numel() == batch if link != "probit" else said.computed()
        assert predict.numel <= max(batch, moments.DRAWS_AT_ONCE, links.PAIRS_AT_ONCE), link


def test_portions_change_nothing(monkeypatch):
    networks = [made("image", seed)[0] for seed in range(2)]
    _, x, y, _ = made("image")
    posterior = fitted(networks, [(x, y)]).with_distance_exponent(1.0)
    whole = posterior.predict(x).computed()
    for rows in (1, 7, 35, 80):
        monkeypatch.setattr(positions, "ROWS_AT_ONCE", rows)
        said = posterior.predict(x)
        assert said.held > 0
        for name in ("probs", "logit_mean", "logit_variance", *FIELDS):
            close(getattr(said, name), getattr(whole, name), 1e-9)
    assert said.computed().held == 0


# --- predictions as values ---------------------------------------------------------------------------------------------------


def test_predictions_join_travel_and_refuse_other_sizes():
    network, x, y, _ = made("image")
    posterior = fitted(network, [(x, y)])
    whole = posterior.predict(x)
    for said in (posterior.predict([x[:4], x[4:]]), pickle.loads(pickle.dumps(whole)), whole.cpu()):
        for name in ("probs", "logit_mean", "logit_variance", *FIELDS):
            close(getattr(said, name), getattr(whole, name))
        assert torch.equal(said.label, whole.label)
    assert "6 inputs at 5 x 7 positions, 3 classes" in repr(whole)
    assert posterior.predict(x[:0]).probs.shape == (0, CLASSES, 5, 7)
    assert posterior.predict(x[:0]).mutual_information.shape == (0, 5, 7)
    other = torch.randn(2, 2, 4, 4)
    with pytest.raises(DataError, match=r"different sizes.*\(3, 5, 7\).*\(3, 4, 4\).*predict_batches"):
        posterior.predict([x, other])
    assert [tuple(one.probs.shape) for one in posterior.predict_batches([x, other])] == [(6, 3, 5, 7), (2, 3, 4, 4)]
    fitted(network, [(x, y), (other, torch.randint(3, (2, 4, 4)))])  # of rows there is one kind


def test_an_ensemble_needs_no_head_to_know_where_classes_stand():
    for kind in ("image", "grid"):
        network, x, _, axis = made(kind)
        said = mola.ensemble([network, made(kind, 1)[0]]).predict(x)
        other = made(kind, 1)[0]
        expected = (network(x).softmax(axis) + other(x).softmax(axis)) / 2
        close(said.probs, expected.detach())
        assert said.label.shape == said.mutual_information.shape == (6, *expected.movedim(axis, -1).shape[1:-1])


def test_saved_posteriors_remember_positions(tmp_path):
    network, x, y, _ = made("image")
    y[0] = 255
    posterior = fitted(network, [(x, y)], positions="average", ignore_index=255)
    posterior.save(tmp_path / "kept")
    loaded = mola.load(tmp_path / "kept", network)
    close(loaded.predict(x).probs, posterior.predict(x).probs, 1e-14)
    assert loaded.components[0].head == posterior.components[0].head
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)
        assert loaded.tune([(x, y)], "nll").prior_precision == posterior.tune([(x, y)], "nll").prior_precision


@pytest.mark.parametrize("used", ["all", "average", 5])
def test_an_interrupted_fit_goes_on_where_it_was(tmp_path, used, monkeypatch):
    monkeypatch.setattr(base, "GATHERED", (1, 4, 2**18))  # a batch of 35 positions comes in pieces
    network, x, y, _ = made("image")
    y[3] = -100
    loader = list(zip(x.split(1), y.split(1), strict=True))

    def breaking():
        yield from loader[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(network, breaking(), positions=used, checkpoint=tmp_path, checkpoint_every=1)
    with pytest.raises(mola.StorageError, match="positions"):
        fitted(network, loader, positions=7, checkpoint=tmp_path, checkpoint_every=1)
    resumed = fitted(network, loader, positions=used, checkpoint=tmp_path, checkpoint_every=1)
    close(resumed.log_evidence(), fitted(network, loader, positions=used).log_evidence(), 1e-12)


# --- which networks ----------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels, batch normalisation, a skip connection, and an auxiliary head that runs last."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
        )
        self.up = nn.Sequential(nn.Conv2d(14, 5, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(5, 4, 1)
        self.auxiliary = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        high = self.down(x)
        logits = self.head(self.up(torch.cat([high, self.deep(high)], 1)))
        self.auxiliary(high)
        return {"logits": logits}


def test_a_u_net_as_it_is():
    torch.manual_seed(0)
    network = UNet().train()
    x, y = torch.randn(5, 3, 8, 8), torch.randint(4, (5, 8, 8))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    posterior = fitted(network, [(x, y)])
    assert posterior.components[0].head.name == "head"
    assert posterior.predict(x).probs.shape == (5, 4, 8, 8)
    assert network.training
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_a_hugging_face_model_for_tokens_as_it_is():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    }
    model = transformers.BertForTokenClassification(transformers.BertConfig(**shape, num_labels=5))
    tokens, mask = torch.randint(50, (6, 7)), torch.ones(6, 7, dtype=torch.int64)
    mask[0, 4:] = 0
    labels = torch.randint(5, (6, 7)).masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    posterior = fitted(model, [batch])
    assert posterior.components[0].head.name == "classifier"
    assert posterior.components[0].curvature.count == int(mask.sum())
    said = posterior.predict({"input_ids": tokens, "attention_mask": mask})
    assert said.probs.shape == (6, 7, 5)
    assert said.entropy.shape == said.distance.shape == (6, 7)
    close(said.probs.sum(-1), torch.ones(6, 7))


def test_other_memory_formats_and_precisions():
    network, x, y, _ = made("image")
    expected = fitted(network, [(x, y)]).predict(x).probs
    last = x.to(memory_format=torch.channels_last)
    close(fitted(network, [(last, y)]).predict(last).probs, expected)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        coarse = made("image")[0].to(dtype)
        said = fitted(coarse, [(x.to(dtype), y)]).predict(x.to(dtype))
        assert said.probs.dtype == torch.float32
        close(said.probs.double(), expected, tolerance)


def test_a_parametrised_convolution_has_the_weights_that_it_uses():
    network, x, y, _ = made("image")
    plain = fitted(network, [(x, y)]).predict(x)
    nn.utils.parametrizations.weight_norm(network.head)
    close(fitted(network, [(x, y)]).predict(x).probs, plain.probs)


@pytest.mark.export
@pytest.mark.parametrize(
    ("kind", "file", "outputs"),
    [
        ("sequence", "torch", ["probabilities", "label", "entropy", "distance"]),
        pytest.param("image", "onnx", None, marks=pytest.mark.slow),
    ],
)
def test_exports_keep_the_layout(kind, file, outputs, tmp_path):
    """A file of either kind is written from the same trace."""
    torch.set_default_dtype(torch.float32)
    network, x, y, _ = made(kind)
    posterior = fitted(network, [(x, y)])
    if file == "onnx":
        pytest.importorskip("onnxruntime")
        written = mola.export_onnx(posterior, tmp_path / "dense.onnx", x, outputs=outputs)
    else:
        written = mola.export_torch(posterior, tmp_path / "dense.pt2", x, outputs=outputs)
    run = mola.load_exported(written.path, **({} if file == "onnx" else {"trust": True}))
    said, expected = run(x[:2]), posterior.predict(x[:2])
    close(said["probabilities"], expected.probs, 1e-5)
    assert torch.equal(said["label"], expected.label)
    others = [name for name in said if name not in ("probabilities", "label")]
    assert len(others) == (2 if outputs else 5)
    for name in others:
        close(said[name], getattr(expected, name), 1e-4)


# --- other likelihoods -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_yes_or_no_at_every_position(kind):
    network, x, _, axis = made(kind)
    y = torch.randint(2, network(x).shape).double()
    y[torch.rand(y.shape) < 0.2] = math.nan
    flat, rows = flattened(network, x, axis)
    dense = fitted(network, [(x, y)], likelihood="bernoulli")
    plain = fitted(flat, [(rows, rows_of(y, axis))], likelihood="bernoulli")
    close(dense.log_evidence(), plain.log_evidence())
    said, expected = dense.predict(x), plain.predict(rows)
    for name in ("probs", "label", "confidence", "entropy", "mutual_information"):
        assert getattr(said, name).shape == y.shape
        close(rows_of(getattr(said, name), axis), getattr(expected, name))
    close(said.distance.flatten(), expected.distance)
    close(rows_of(dense.confidence_bound(x), axis), plain.confidence_bound(rows))


@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_numbers_at_every_position(kind):
    network, x, _, axis = made(kind)
    y = network(x).detach() + 0.3 * torch.randn(network(x).shape)
    flat, rows = flattened(network, x, axis)
    dense = fitted(network, [(x, y)], likelihood="gaussian")
    plain = fitted(flat, [(rows, rows_of(y, axis))], likelihood="gaussian")
    close(dense.log_evidence(), plain.log_evidence())
    close(dense.noise, plain.noise)
    said, expected = dense.predict([x[:4], x[4:]]), plain.predict(rows)
    assert dense(x).shape == y.shape
    for name in ("mean", "variance", "aleatoric", "epistemic", "std"):
        assert getattr(said, name).shape == y.shape
        close(rows_of(getattr(said, name), axis), getattr(expected, name))
    close(rows_of(said.interval(0.9)[0], axis), expected.interval(0.9)[0])
    close(said.log_prob(y).flatten(), expected.log_prob(rows_of(y, axis)))
    close(said.ood_score.flatten(), expected.ood_score)
    assert "positions" in repr(said)


# --- what cannot be done, in words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (
            lambda: nn.Conv2d(FEATURES, CLASSES, 3, padding=1),
            r"kernel size \(3, 3\), padding \(1, 1\).*1x1 convolution",
        ),
        (lambda: nn.Conv2d(FEATURES, CLASSES, 1, stride=2), r"stride \(2, 2\)"),
        (lambda: nn.Conv2d(FEATURES, CLASSES, 1, padding=1), r"padding \(1, 1\)"),
        (lambda: nn.Conv2d(FEATURES, 4, 1, groups=2), "groups 2"),
        (lambda: nn.ConvTranspose2d(FEATURES, CLASSES, 1), r"last linear layer or convolution, 'layer'.*as it is"),
        (lambda: nn.Sequential(nn.Conv2d(FEATURES, CLASSES, 1), nn.Softmax(1)), r"'head.0'.*applies a softmax"),
        (lambda: nn.Sequential(nn.Conv2d(FEATURES, CLASSES, 1), nn.Upsample(scale_factor=2)), "resizing"),
        (lambda: nn.Conv2d(FEATURES, 1, 1), "at least 2 classes"),
    ],
)
def test_other_last_layers_are_refused(layer, words):
    network, x, y, _ = made("image")
    network.head = layer()
    with pytest.raises(HeadError, match=words):
        fitted(network, [(x, y)])
    if isinstance(network.head, nn.Conv2d) and network.head.out_channels > 1:
        with pytest.raises(HeadError, match=r"head='head' is a Conv2d with"):
            fitted(network, [(x, y)], head="head")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (lambda y: y[:, None], r"shape \(6, 5, 7\).*got labels of shape \(6, 1, 5, 7\).*squeeze\(1\)"),
        (lambda y: y[:, 0, 0], r"a label for each position, of shape \(6, 5, 7\).*got labels of shape \(6,\)"),
        (lambda y: y.repeat_interleave(2, 1), r"got labels of shape \(6, 10, 7\).*size of the outputs"),
        (lambda y: functional.one_hot(y, CLASSES).movedim(-1, 1), "not one-hot"),
        (lambda y: y.double(), "integer type"),
        (lambda y: y + 1, r"labels must lie in \[0, 2\]"),
    ],
)
def test_labels_of_another_form_are_named(labels, words):
    network, x, y, _ = made("image")
    with pytest.raises(DataError, match=words):
        fitted(network, [(x, labels(y))])


def test_wrong_use_is_named():
    network, x, y, _ = made("image")
    for wrong in (0, -1, 1.5, "some", True):
        with pytest.raises(OptionError, match="positions"):
            fitted(network, [(x, y)], positions=wrong)
    for wrong in (1.5, None, True):
        with pytest.raises(OptionError, match="ignore_index"):
            fitted(network, [(x, y)], ignore_index=wrong)
    with pytest.raises(OptionError, match="running average"):
        fitted(network, [(x, y)], structure=mola.Kron(running_average=0.9))
    coarse = nn.Sequential(nn.AvgPool2d(2), made("image", 1)[0])
    with pytest.raises(DataError, match=r"models\[1\].*\(2, 3\).*\(5, 7\).*same positions"):
        fitted([network, coarse], [(x, y)])
    with pytest.raises(HeadError, match="axes of positions"):
        fitted([network, nn.Sequential(nn.Flatten(), nn.Linear(70, CLASSES))], [(x, y)])
    with pytest.raises(mola.BoundError, match="many positions"):
        fitted(network, [(x, y)]).far_field_limit(x)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    posterior = fitted(plain, [(torch.randn(8, 4), torch.randint(CLASSES, (8,)))])
    with pytest.raises(HeadError, match=r"\(batch, classes\).*\(2, 3, 3\)"):  # it was fitted on one row for each input
        posterior.predict(torch.randn(2, 3, 4))


def test_layouts_go_there_and_back():
    for shape, axis in (((2, 3, 4, 5), 1), ((2, 4, 5, 3), -1), ((2, 4, 3), -1), ((2, 3, 4), 1)):
        values = torch.randn(shape)
        layout = Layout.of(values, axis)
        rows = layout.by_position(values).flatten(0, 1)
        assert torch.equal(layout.outputs(rows), values)
        assert layout.shape(3) == shape
        assert layout.by_position(values).data_ptr() == values.data_ptr()
        for count in (1, 3, layout.count, 2 * layout.count + 1):
            parts = [rows.view(2, -1, 3)[part].flatten(0, 1) for part in layout.portions(count)]
            assert torch.equal(torch.cat(parts), rows)
            assert all(len(part) <= max(count, 1) for part in parts)


def test_heads_are_seen_in_every_pass():
    network, x, _, _ = made("image")
    with undisturbed(network):
        head = find_head(network, x)
        seen = capture(network, head, x[:2])
    assert (head.classes, head.inputs, head.width, head.axis) == (CLASSES, FEATURES, FEATURES + 1, 1)
    assert isinstance(seen, features.DenseFeatures)
    close(seen.logits.flatten(0, 1), head.lift(seen.features.flatten(0, 1)) @ head.weights().T)


# --- what a review found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["convolution", "linear"])
def test_two_numbers_for_each_of_several_targets_at_many_positions(layer):
    torch.manual_seed(0)
    meaning = mola.Gaussian(heteroscedastic=True)
    if layer == "convolution":
        x, targets = torch.randn(5, 3, 4, 6).double(), torch.randn(5, 2, 4, 6).double()
        head, axis = nn.Conv2d(3, 4, 1).double(), 1
    else:
        x, targets, head, axis = (
            torch.randn(5, 7, 3).double(),
            torch.randn(5, 7, 2).double(),
            nn.Linear(3, 4).double(),
            -1,
        )
    rows = nn.Sequential(nn.Linear(3, 4).double())
    with torch.no_grad():
        rows[0].weight.copy_(head.weight.flatten(1))
        rows[0].bias.copy_(head.bias)
    posterior = mola.fit(nn.Sequential(head), [(x, targets)], likelihood=meaning, progress=False)
    flat, flat_targets = (values.movedim(axis, -1).flatten(0, -2) for values in (x, targets))
    twin = mola.fit(rows, [(flat, flat_targets)], likelihood=meaning, progress=False).predict(flat)
    said = posterior.predict(x)
    assert said.mean.shape == targets.shape
    torch.testing.assert_close(said.variance.movedim(axis, -1).flatten(0, -2), twin.variance)
    torch.testing.assert_close(said.log_prob(targets).flatten(), twin.log_prob(flat_targets))


def test_position_with_some_of_its_targets_left_out_is_refused():
    x, targets = torch.randn(2, 3, 4, 5), torch.randn(2, 2, 4, 5)
    targets[1, 0, 2, 2] = -100
    with pytest.raises(DataError, match=r"batch 0 .* at 1 positions some of the 2 targets"):
        mola.fit(nn.Sequential(nn.Conv2d(3, 2, 1)), [(x, targets)], likelihood="gaussian", progress=False)
    targets[1, :, 2, 2] = -100
    posterior = mola.fit(nn.Sequential(nn.Conv2d(3, 2, 1)), [(x, targets)], likelihood="gaussian", progress=False)
    assert posterior.components[0].curvature.count == 39


def test_labels_of_yes_or_no_are_left_out_one_by_one_by_any_value():
    torch.manual_seed(0)
    x, labels = torch.randn(3, 3, 4, 5).double(), torch.randint(2, (3, 2, 4, 5))
    missing = torch.rand(3, 2, 4, 5) < 0.3
    network = nn.Sequential(nn.Conv2d(3, 2, 1)).double()

    def fitted(value, dtype, **options):
        marked = torch.where(missing, value, labels).to(dtype)
        return mola.fit(network, [(x, marked)], structure="full", likelihood="bernoulli", progress=False, **options)

    expected = fitted(-100, torch.int64)
    assert torch.equal(fitted(255, torch.uint8, ignore_index=255)(x), expected(x))


def test_logits_between_0_and_1_of_a_head_are_not_taken_for_probabilities():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 1, 1))
    with torch.no_grad():
        network[0].weight.mul_(0.05)
        network[0].bias.fill_(0.5)
    x, labels = torch.randn(2, 3, 9, 9), torch.randint(2, (2, 1, 9, 9))
    assert bool(((network(x) > 0) & (network(x) < 1)).all())
    posterior = mola.fit(network, [(x, labels)], likelihood="bernoulli", progress=False)
    assert posterior.predict(x).probs.shape == (2, 1, 9, 9)
