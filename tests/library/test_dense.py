"""Dense outputs: a 1x1 convolution is a linear layer on every pixel, so positions are rows of the flattened network."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import molaplace as mola
from molaplace.errors import BoundError, DataError, HeadError, OptionError
from molaplace.likelihoods import CATEGORICAL, Gaussian
from molaplace.network import as_batch, drawn_positions, evaluating, find_head, find_heads, stream
from tests.closeness import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")  # untrained networks

FEATURES = 4
CLASSES = 3
KINDS = ("image", "signal", "volume", "sequence", "grid")
FIELDS = ("entropy", "mutual_information", "ood_score", "distance", "far_field", "confidence", "aleatoric")


class Body(nn.Module):
    def __init__(self, layer, head):
        super().__init__()
        self.layer = layer
        self.head = head

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)))


def made(kind, seed=0, bias=True, outputs=CLASSES):
    """A network, inputs, labels, and the axis of the classes."""
    torch.manual_seed(seed)
    axes = {"signal": 1, "image": 2, "volume": 3}.get(kind)
    if axes is not None:
        layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
        sizes = {1: (11,), 2: (5, 7), 3: (2, 3, 4)}[axes]
        network = Body(layer(2, FEATURES, 3, padding=1), layer(FEATURES, outputs, 1, bias=bias))
        return network, torch.randn(6, 2, *sizes), torch.randint(CLASSES, (6, *sizes)), 1
    network = Body(nn.Linear(2, FEATURES), nn.Linear(FEATURES, outputs, bias=bias))
    sizes = (9,) if kind == "sequence" else (3, 5)
    return network, torch.randn(6, *sizes, 2), torch.randint(CLASSES, (6, *sizes)), -1


def flattened(network, x, axis):
    """The last layer as an nn.Linear, and its input at every position."""
    head = nn.Linear(FEATURES, len(network.head.weight), bias=network.head.bias is not None)
    with torch.no_grad():
        head.weight.copy_(network.head.weight.flatten(1))
        if head.bias is not None:
            head.bias.copy_(network.head.bias)
        features = torch.tanh(network.layer(x)).movedim(axis, -1).reshape(-1, FEATURES)
    return nn.Sequential(head), features


def rows_of(values, axis):
    return values.movedim(axis, -1).reshape(-1, values.shape[axis]).detach()


def fit(*arguments, **keywords):
    return mola.fit(*arguments, **keywords, progress=False)


def close(first, second, tolerance=1e-10):
    assert first.shape == second.shape
    first = first.detach()
    second = second.detach()
    assert float((first - second).abs().max()) <= tolerance * max(1.0, float(second.abs().max()))


def count(posterior):
    return posterior.components[0].layer.sums.count


# --- positions are rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_rows_of_the_flattened_network(kind, structure):
    network, x, y, axis = made(kind)
    flat, rows = flattened(network, x, axis)
    dense = fit(network, [(x[:4], y[:4]), (x[4:], y[4:])], structure=structure)
    plain = fit(flat, [(rows, y.flatten())], structure=structure)
    close(dense.log_evidence(), plain.log_evidence())
    assert count(dense) == y.numel()
    actual = dense.predict(x)
    expected = plain.predict(rows)
    assert actual.probs.shape == network(x).shape
    close(rows_of(actual.probs, axis), expected.probs)
    assert torch.equal(actual.label.flatten(), expected.label)
    for name in FIELDS:
        assert getattr(actual, name).shape == y.shape, name
        close(getattr(actual, name).flatten(), getattr(expected, name), 1e-8)
    close(rows_of(actual.logit_mean[:, 0], axis), expected.logit_mean[:, 0])
    close(rows_of(actual.logit_variance[:, 0], axis), expected.logit_variance[:, 0])
    close(dense(x), actual.probs, 1e-14)
    close(dense.confidence_bound(x).flatten(), plain.confidence_bound(rows))
    lemma = plain.confidence_bound(rows, lemma=True)
    close(dense.confidence_bound(x, lemma=True).transpose(0, 1).flatten(1), lemma.T)


@pytest.mark.parametrize("link", ["probit-centred", "mean-field", "bridge", "mc"])
def test_every_link_keeps_the_layout(link):
    network, x, y, axis = made("image", bias=False)
    flat, rows = flattened(network, x, axis)
    dense = fit(network, [(x, y)], link=link)
    plain = fit(flat, [(rows, y.flatten())], link=link)
    close(rows_of(dense(x), axis), plain(rows))


@pytest.mark.parametrize("rule", ["threshold", "nll", "distance", "evidence"])
def test_tuning_sees_the_same_rows(rule):
    network, x, y, axis = made("image")
    flat, rows = flattened(network, x, axis)
    val = val_rows = None
    if rule != "evidence":
        val = [(x[3:], y[3:])]
        val_rows = [(flattened(network, x[3:], axis)[1], y[3:].flatten())]
    dense = fit(network, [(x[:3], y[:3])], val, rule=rule)
    plain = fit(flat, [(rows[: y[:3].numel()], y[:3].flatten())], val_rows, rule=rule)
    assert math.isclose(dense.prior_precision[0], plain.prior_precision[0], rel_tol=1e-6)
    close(rows_of(dense.predict(x).probs, axis), plain.predict(rows).probs, 1e-6)
    close(dense.predict(x).ood_score.flatten(), plain.predict(rows).ood_score, 1e-6)


# --- which positions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-100, 255])
@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_ignored_positions_change_nothing(kind, ignore_index):
    network, x, y, axis = made(kind)
    flat, rows = flattened(network, x, axis)
    y[torch.rand(y.shape) < 0.4] = ignore_index
    y[2] = ignore_index
    used = y.flatten() != ignore_index
    dense = fit(network, [(x[:4], y[:4]), (x[4:], y[4:])], ignore_index=ignore_index)
    plain = fit(flat, [(rows[used], y.flatten()[used])])
    close(dense.log_evidence(), plain.log_evidence())
    assert count(dense) == int(used.sum())
    close(rows_of(dense(x), axis), plain(rows))
    tuned = dense.tune([(x, y)], rule="nll", progress=False)
    expected = plain.tune([(rows[used], y.flatten()[used])], rule="nll")
    assert math.isclose(tuned.prior_precision[0], expected.prior_precision[0], rel_tol=1e-6)
    with pytest.raises(DataError, match="no row of the training loader has a known label"):
        fit(network, [(x, torch.full_like(y, ignore_index))], ignore_index=ignore_index)


def test_average_does_not_depend_on_the_resolution():
    """Each pixel four times over is no more information: "average" accounts for it, "all" does not."""
    network, x, y, _ = made("volume")
    network.layer = nn.Conv3d(2, FEATURES, 1)
    finer = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
    labels = y.repeat_interleave(2, 2).repeat_interleave(2, 3)
    for positions, same in (("average", True), ("all", False)):
        coarse = fit(network, [(x, y)], positions=positions)
        fine = fit(network, [(finer, labels)], positions=positions)
        assert torch.allclose(coarse.log_evidence(), fine.log_evidence(), rtol=1e-10) is same
        assert torch.allclose(coarse(x), fine(x), rtol=1e-10) is same
    averaged = fit(network, [(x, y)], positions="average")
    every = fit(network, [(x, y)])
    assert (count(averaged), count(every)) == (6, 6 * 24)
    close(averaged.predict(x).distance, every.predict(x).distance)  # the classes are where they were


@pytest.mark.parametrize("positions", ["average", 5])
def test_an_interrupted_fit_continues(tmp_path, positions):
    network, x, y, _ = made("image")
    y[3] = -100
    loader = list(zip(x.split(1), y.split(1), strict=True))

    def interrupted():
        yield from loader[:4]
        raise KeyboardInterrupt

    options = {"checkpoint": tmp_path / "sums", "checkpoint_every": 1, "positions": positions}
    with pytest.raises(KeyboardInterrupt):
        fit(network, interrupted(), **options)
    resumed = fit(network, loader, **options)
    close(resumed.log_evidence(), fit(network, loader, positions=positions).log_evidence(), 1e-12)


# --- predictions ------------------------------------------------------------------------------------------------------


def test_predictions_join_slice_travel_and_refuse_other_sizes():
    network, x, y, _ = made("image")
    posterior = fit(network, [(x, y)])
    whole = posterior.predict(x)
    for actual in (posterior.predict([x[:4], x[4:]]), pickle.loads(pickle.dumps(whole))):
        for name in ("probs", "logit_mean", "logit_variance", *FIELDS):
            close(getattr(actual, name), getattr(whole, name))
    close(whole[2:5].probs, posterior(x[2:5]))
    assert posterior.predict(x[:0]).mutual_information.shape == (0, 5, 7)
    other = torch.randn(2, 2, 4, 4)
    with pytest.raises(DataError, match=r"\(3, 4, 4\).*\(3, 5, 7\).*predict_batches"):
        posterior.predict([x, other])
    assert [tuple(batch.probs.shape) for batch in posterior.predict_batches([x, other])] == [(6, 3, 5, 7), (2, 3, 4, 4)]


@pytest.mark.parametrize("kind", ["image", "grid"])
def test_ensemble_finds_the_axis_of_the_classes(kind):
    networks = [made(kind, seed)[0] for seed in range(2)]
    _, x, _, axis = made(kind)
    actual = mola.ensemble(networks).predict(x)
    expected = (networks[0](x).softmax(axis) + networks[1](x).softmax(axis)) / 2
    close(actual.probs, expected.detach())
    assert actual.label.shape == actual.mutual_information.shape == expected.select(axis, 0).shape


# --- networks and likelihoods -----------------------------------------------------------------------------------------


REGRESSION = ("mean", "variance", "aleatoric", "epistemic", "std")
OTHERS = {
    "bernoulli": ("bernoulli", CLASSES, ("probs", "label", "confidence", "entropy", "mutual_information")),
    "gaussian": (Gaussian(), 2, REGRESSION),
    "heteroscedastic": (Gaussian(heteroscedastic=True), 4, REGRESSION),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_positions_are_rows_under_every_likelihood(kind, name):
    likelihood, outputs, fields = OTHERS[name]
    network, x, _, axis = made(kind, outputs=outputs)
    y = network(x).detach()
    if name == "bernoulli":
        y = torch.randint(2, y.shape).double()
        y[torch.rand(y.shape) < 0.2] = math.nan
    else:
        y = y.narrow(axis, 0, 2) + 0.3 * torch.randn(*y.narrow(axis, 0, 2).shape)
    flat, rows = flattened(network, x, axis)
    dense = fit(network, [(x, y)], likelihood=likelihood)
    plain = fit(flat, [(rows, rows_of(y, axis))], likelihood=likelihood)
    close(dense.log_evidence(), plain.log_evidence())
    actual = dense.predict([x[:4], x[4:]])
    expected = plain.predict(rows)
    assert dense(x).shape == y.shape
    for field in fields:
        assert getattr(actual, field).shape == y.shape
        close(rows_of(getattr(actual, field), axis), getattr(expected, field))
    if fields == REGRESSION:
        close(dense.noise, plain.noise)
        close(actual.log_prob(y).flatten(), expected.log_prob(rows_of(y, axis)))


# --- logits that are resized after the head ----------------------------------------------------------------------------


class Segmenter(nn.Module):
    """Ends as torchvision's segmentation networks do: 1x1 convolutions, then bilinear interpolation, in a mapping."""

    def __init__(self, *, head_first):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1, stride=2)
        self.head = nn.Conv2d(4, 5, 1)
        self.head_first = head_first
        self.auxiliary = nn.Conv2d(4, 5, 1)

    def forward(self, images):
        features = self.body(images).relu()

        def resize(values):
            return functional.interpolate(values, images.shape[-2:], mode="bilinear", align_corners=False)

        out = resize(self.head(features)) if self.head_first else self.head(resize(features))
        return {"out": out, "aux": resize(self.auxiliary(features))}


def test_resized_logits_are_those_of_resized_features(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(6, 3, 9, 8)
    labels = torch.randint(5, (6, 9, 8))
    resized = Segmenter(head_first=True)
    plain = Segmenter(head_first=False)
    plain.load_state_dict(resized.state_dict())

    def out(output):
        return output["out"]

    with pytest.raises(HeadError, match="logits=lambda"):
        fit(resized, [(images, labels)])
    actual, expected = (
        fit(network, [(images, labels)], [(images, labels)], rule="nll", logits=out) for network in (resized, plain)
    )
    assert_close(actual.prior_precision, expected.prior_precision, "search")
    for name in ("probs", "logit_variance", "distance"):
        assert_close(getattr(actual.predict(images), name), getattr(expected.predict(images), name), name=name)
    actual.save(tmp_path)
    assert_close(mola.load(tmp_path, resized, logits=out)(images), actual(images))
    assert mola.ensemble(resized, logits=out)(images).shape == (6, 5, 9, 8)


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_use_is_named():
    network, x, y, _ = made("image")
    for options in ({"positions": 0}, {"positions": "some"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            fit(network, [(x, y)], **options)
    coarse = nn.Sequential(nn.AvgPool2d(2), made("image", 1)[0])
    with pytest.raises(HeadError, match=r"same shape.*5, 7, 3.*2, 3, 3"):
        fit([network, coarse], [(x, y)])
    with pytest.raises(HeadError, match=r"same shape.*5, 7, 3.*\(6, 3\)"):
        fit([network, nn.Sequential(nn.Flatten(), nn.Linear(70, CLASSES))], [(x, y)])
    with pytest.raises(BoundError, match="dense outputs"):
        fit(network, [(x, y)]).far_field_limit(x)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    posterior = fit(plain, [(torch.randn(8, 4), torch.randint(CLASSES, (8,)))])
    with pytest.raises(HeadError, match=r"\(batch, classes\).*\(2, 3, 3\)"):  # fitted on one row for each input
        posterior.predict(torch.randn(2, 3, 4))


def test_missing_targets_and_labels():
    network = nn.Sequential(nn.Conv2d(3, 2, 1))
    x = torch.randn(2, 3, 4, 5)
    targets = torch.randn(2, 2, 4, 5)
    targets[1, 0, 2, 2] = -100
    with pytest.raises(DataError, match=r"batch 0 .*targets must be finite"):
        fit(network, [(x, targets)], likelihood="gaussian")
    targets[1, :, 2, 2] = -100
    assert count(fit(network, [(x, targets)], likelihood="gaussian")) == 39
    labels = torch.randint(2, targets.shape)
    missing = torch.rand(targets.shape) < 0.3

    def fitted(value, dtype, **options):
        marked = torch.where(missing, value, labels).to(dtype)
        return fit(network, [(x, marked)], structure="full", likelihood="bernoulli", **options)

    assert torch.equal(fitted(255, torch.uint8, ignore_index=255)(x), fitted(-100, torch.int64)(x))


# --- rows of a loader, and last layers that are refused ---------------------------------------------------------------


def read(networks, loader, likelihood=CATEGORICAL, heads=None, **options):
    with evaluating(*networks):
        if heads is None:
            loader = list(loader)
            heads, _ = find_heads(networks, [None] * len(networks), as_batch(loader[0], "").inputs, likelihood)
        return list(stream(networks, heads, loader, where="training loader", likelihood=likelihood, **options))


def joined(batches, index=0, chunk=4096):
    """Features, outputs and labels of one network, read in chunks."""
    rows = [rows for batch in batches for rows in batch.chunks(2**21 // chunk)]
    assert all(len(row) <= chunk for row in rows)
    parts = [torch.cat([getattr(row, name)[index] for row in rows]) for name in ("phi", "outputs")]
    return *parts, None if rows[0].labels is None else torch.cat([row.labels for row in rows])


@pytest.mark.parametrize("labelled", [True, False])
def test_drawn_positions_depend_on_the_input_alone(labelled):
    networks = [made("image", seed)[0] for seed in range(2)]
    _, x, y, _ = made("image")
    # 7 positions of one input, none of another
    y[1, :4] = -100
    y[3] = -100
    results = []
    for size in (6, 1, 4):
        loader = zip(x.split(size), y.split(size), strict=True)
        got = read(networks, loader if labelled else [x for x, _ in loader], positions=10)
        results.append([tensor for index in range(2) for tensor in joined(got, index, 16)])
        assert len(results[-1][0]) == (4 * 10 + 7 if labelled else 60)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert first is second is None or torch.allclose(first.double(), second.double(), rtol=1e-12, atol=1e-12)
    heads, _ = find_heads(networks, [None, None], x, CATEGORICAL)
    resumed = joined(read(networks, [(x[4:], y[4:])], heads=heads, positions=10, first_batch=1, first_input=4))
    if labelled:
        torch.testing.assert_close(resumed[0], results[0][0][-20:])
    drawn = torch.cat([drawn_positions(35, 10, index) for index in range(2000)])
    assert float((torch.bincount(drawn) / 2000 - 10 / 35).abs().max()) < 0.05
    assert torch.equal(drawn_positions(5, 10, 0), torch.arange(5))
    ranks = [drawn_positions(35, 10, 3 + (rank << 40)).tolist() for rank in range(8)]
    assert len(set(map(tuple, ranks))) == 8


WRONG_LABELS = {
    "extra axis": (lambda y: y[:, None], r"squeeze\(1\)"),
    "one for each input": (lambda y: y[:, 0, 0], r"of shape \(6, 5, 7\).*got labels of shape \(6,\)"),
    "another size": (lambda y: y.repeat_interleave(2, 1), r"got labels of shape \(6, 10, 7\).*size of the outputs"),
    "one-hot": (lambda y: functional.one_hot(y, CLASSES).movedim(-1, 1), "not one-hot"),
    "numbered from 1": (lambda y: y.clamp(min=1) + 1, r"labels must lie in \[0, 2\].*labels - 1.*ignore_index=3"),
    "out of range": (lambda y: y + 2, r"labels must lie in \[0, 2\]"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_dense_labels_of_another_form_are_named(name):
    network, x, y, _ = made("image")
    labels, words = WRONG_LABELS[name]
    with pytest.raises(DataError, match=rf"(?s)batch 0 of the training loader.*{words}"):
        read([network], [(x, labels(y))])


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (
            lambda: nn.Conv2d(FEATURES, CLASSES, 3, padding=1),
            r"kernel_size=\(3, 3\), padding=\(1, 1\).*1x1 convolution",
        ),
        (lambda: nn.Conv2d(FEATURES, CLASSES, 1, stride=2), r"stride=\(2, 2\)"),
        (lambda: nn.Conv2d(FEATURES, 4, 1, groups=2), "groups=2"),
        (
            lambda: nn.ConvTranspose2d(FEATURES, CLASSES, 1),
            r"'layer' returns shape \(6, 4, 5, 7\).*\(6, 3, 5, 7\).*1x1 convolution",
        ),
        (lambda: nn.Sequential(nn.Conv2d(FEATURES, CLASSES, 1), nn.Softmax(1)), r"'head.0'.*applies a softmax"),
        (lambda: nn.Conv2d(FEATURES, 1, 1), "at least 2 classes"),
    ],
)
def test_other_last_layers_are_refused(layer, words):
    network, x, _, _ = made("image")
    network.head = layer()
    with pytest.raises(HeadError, match=words):
        find_head(network, x)
    if isinstance(network.head, nn.Conv2d) and network.head.out_channels > 1:
        with pytest.raises(HeadError, match=r"head 'head' is a Conv2d with"):
            find_head(network, x, "head")


def test_a_dense_head_is_found_before_an_auxiliary_one_and_in_any_memory_format():
    network, x, _, axis = made("image")
    network.auxiliary = nn.Conv2d(2, CLASSES, 1)
    network.register_forward_hook(lambda self, args, out: (self.auxiliary(args[0]), {"logits": out})[1])
    assert find_head(network, x).name == "head"
    nn.utils.parametrizations.weight_norm(network.head)
    last = x.to(memory_format=torch.channels_last)
    phi, outputs, _ = joined(read([network], [last]))
    torch.testing.assert_close(outputs, rows_of(network(x)["logits"], axis))
    torch.testing.assert_close(outputs, phi @ find_head(network, x).weights().T)


def test_probabilities_do_not_change_when_the_memory_of_the_inputs_is_reused():
    network = nn.Conv2d(3, 4, 1)
    inputs = torch.randn(4, 3, 5, 5)
    posterior = mola.fit(network, [(inputs, torch.randint(4, (4, 5, 5)))], progress=False)
    expected = posterior(inputs).clone()
    prediction = posterior.predict(inputs)
    inputs.zero_()
    close(prediction.probs, expected)
