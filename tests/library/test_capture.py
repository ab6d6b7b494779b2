"""Networks and loaders in; features, outputs and labels as rows out: once, in order, whatever the layout."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mola.errors import DataError, HeadError, OptionError
from mola.likelihoods import BERNOULLI, CATEGORICAL, GAUSSIAN, Gaussian
from mola.network import (
    as_batch,
    capture,
    check_positions,
    drawn_positions,
    evaluating,
    find_head,
    find_heads,
    stream,
)
from tests.witness import unchanged

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(20) % 3
SIZES = [6, 1, 8, 5]
LOADER = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))
FEATURES, CLASSES = 4, 3


def make_network(width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(), nn.ReLU(), nn.Linear(width, 3))


@pytest.fixture
def networks():
    return [make_network(4, 0), make_network(7, 1).eval(), make_network(2, 2)]


def read(networks, loader, likelihood=CATEGORICAL, heads=None, **options):
    with evaluating(*networks):
        if heads is None:
            loader = list(loader)
            heads = find_heads(networks, [None] * len(networks), as_batch(loader[0], "").inputs, likelihood)
        return list(stream(networks, heads, loader, where="training loader", likelihood=likelihood, **options))


def joined(batches, index=0, chunk=4096):
    """Features, outputs and labels of one network, read in chunks."""
    rows = [rows for batch in batches for rows in batch.chunks(chunk)]
    assert all(len(one) <= chunk for one in rows)
    parts = [torch.cat([getattr(one, name)[index] for one in rows]) for name in ("phi", "outputs")]
    return *parts, None if rows[0].labels is None else torch.cat([one.labels for one in rows])


def sizes(batches):
    return [(one.used_inputs, one.inputs) for one in batches]


# --- plain rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 8, 4096])
def test_every_network_sees_every_batch_in_order(networks, chunk):
    with unchanged(*networks):
        got = read(networks, LOADER, labelled=True)
    assert sizes(got) == [(one, one) for one in SIZES]
    for index, network in enumerate(networks):
        features, outputs, labels = joined(got, index, chunk)
        assert torch.equal(labels, Y)
        with torch.no_grad():
            network.eval()
            torch.testing.assert_close(features[:, :-1], network[:-1](X))
            torch.testing.assert_close(outputs, network(X))
        assert bool((features[:, -1] == 1).all())


def test_without_a_head_there_are_outputs_alone(networks):
    phi, outputs, _ = joined(read(networks[:1], [X], heads=[None]))
    assert phi.shape == (20, 0)
    torch.testing.assert_close(outputs, networks[0].eval()(X).detach())
    with pytest.raises(HeadError, match=r"batch 0 of the training loader, networks\[0\]: .*probabilities"):
        read([nn.Sequential(networks[0], nn.Softmax(1))], [X], heads=[None])
    logits = nn.Linear(5, 1)  # which may all lie between 0 and 1
    with torch.no_grad():
        logits.weight.mul_(1e-3)
        logits.bias.fill_(0.5)
    assert joined(read([logits], [X.repeat(5, 1)], BERNOULLI, heads=[None]))[1].shape == (100, 1)


class Masked(nn.Module):
    """Gives a row for each input whose first number is below 100."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(torch.relu(self.body(inputs))[inputs[:, 0] < 100])


def test_a_batch_may_have_no_rows():
    got = read([Masked()], [X[:8], X[:3] + 1000, X[8:]])
    assert [len(one) for one in got] == [8, 0, 12]
    assert len(joined(got)[1]) == 20
    with pytest.raises(DataError, match="no row for any batch"):
        read([Masked()], [X + 1000])


def test_rows_without_any_label_are_dropped():
    network = nn.Linear(5, 2)
    labels = torch.randint(2, (20, 2)).double()
    labels[3], labels[5, 0], labels[7] = torch.nan, -100, -100
    got = read([network], [(X[:10], labels[:10]), (X[10:], labels[10:])], BERNOULLI)
    kept = torch.tensor([index for index in range(20) if index not in (3, 7)])
    features, _, read_labels = joined(got, chunk=4)
    assert torch.equal(features[:, :-1], X[kept])
    assert read_labels[4].isnan().tolist() == [True, False]
    assert sizes(got) == [(8, 10), (10, 10)]


BAD = {
    "infinite": (lambda x, y: (x * torch.inf, y), r", networks\[0\]: features are NaN or infinite for 8 of 8"),
    "out of range": (lambda x, y: (x, y + 2), r": labels must lie in"),
    "bool": (lambda x, y: (x, y == 0), r": expected class indices of an integer type"),
    "too few": (lambda x, y: (x, y[:-1]), r": expected 8 class indices"),
    "too many": (lambda x, y: (x, torch.cat([y, y])), r": expected 8 class indices"),
    "none": (lambda x, y: x, r" has no labels, unlike"),
    "wrong shape": (lambda x, y: (x[:, :3], y), r", networks\[0\]: Sequential failed on inputs of shape \(8, 3\)"),
    "empty": (lambda x, y: (x[:0], y[:0]), r" is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_batch_that_is_to_blame_is_named(name, networks):
    bad, words = BAD[name]
    loader = [bad(x, y) if index == 2 else (x, y) for index, (x, y) in enumerate(LOADER)]
    with unchanged(*networks), pytest.raises(DataError, match=rf"batch 2 of the training loader{words}"):
        joined(read(networks, loader))


def test_labels_are_demanded_or_all_alike(networks):
    with pytest.raises(DataError, match=r"batch 0 of the training loader has no labels\. Yield \(inputs, labels\)"):
        read(networks, [X], labelled=True)
    with pytest.raises(DataError, match=r"batch 8 of the training loader has labels, unlike the batches before"):
        read(networks, [X, (X, Y)], first_batch=7)


def test_networks_that_disagree_about_the_data_are_refused():
    network = nn.Linear(5, 3)
    halves = nn.Sequential(nn.Linear(5, 3))
    halves.register_forward_pre_hook(lambda _, inputs: (inputs[0][::2],))
    with pytest.raises(DataError, match=r"batch 0 of the training loader: .*same shape, got \[\(20, 3\), \(10, 3\)\]"):
        read([network, halves], [X])


def test_a_network_that_returns_another_head_for_some_batches_is_noticed():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            head, other = self.head(x), self.other(x)
            return other if len(x) == 8 else head

    network = Fickle()
    with (
        unchanged(network),
        pytest.raises(HeadError, match=r"batch 2 .*not the output of its head 'head' in this pass"),
    ):
        read([network], LOADER)


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt("disk")], ids=repr)
def test_an_exception_of_the_loader_comes_through_and_no_hook_stays(error, networks):
    def loader():
        yield LOADER[0]
        raise error

    heads = find_heads([network.eval() for network in networks], [None] * 3, X, CATEGORICAL)
    with unchanged(*networks), pytest.raises(type(error), match="disk") as caught:
        read(networks, loader(), heads=heads)
    assert caught.value is error


# --- dense outputs ------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    def __init__(self, layer, head):
        super().__init__()
        self.layer, self.head = layer, head

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


def rows_of(values, axis):
    return values.movedim(axis, -1).flatten(0, -2).detach()


@pytest.mark.parametrize("chunk", [1, 8, 40, 4096])
@pytest.mark.parametrize("kind", ["image", "signal", "volume", "sequence", "grid"])
def test_positions_are_rows(kind, chunk):
    network, x, y, axis = made(kind, bias=kind != "image")
    head = find_head(network, x)
    assert (head.outputs, head.inputs, head.axis, head.dense_axes) == (CLASSES, FEATURES, axis, y.dim() - 1)
    features, expected = rows_of(torch.tanh(network.layer(x)), axis), rows_of(network(x), axis)
    got = read([network], [(x[:4], y[:4]), (x[4:], y[4:])])
    assert sizes(got) == [(4, 4), (2, 2)]
    phi, outputs, labels = joined(got, chunk=chunk)
    assert torch.equal(labels, y.flatten())
    torch.testing.assert_close(phi, head.lift(features), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs, phi @ head.weights().T, rtol=1e-12, atol=1e-12)
    for known in (head, None):
        seen = capture(network, known, x, CATEGORICAL)
        rows = torch.cat([part for _, part in seen.chunks(chunk)])
        torch.testing.assert_close(seen.layout.restore(rows), network(x).detach())
    assert capture(network, head, x[:0], CATEGORICAL).rows()[1].shape == (0, CLASSES)


@pytest.mark.parametrize("ignore_index", [-100, 255])
@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_ignored_positions_are_left_out(kind, ignore_index):
    network, x, y, axis = made(kind)
    y[torch.rand(y.shape) < 0.4] = ignore_index
    y[2], y[4:] = ignore_index, ignore_index
    counted = y.flatten() != ignore_index
    loader = [(x[:4], y[:4]), (x[4:], y[4:])]
    got = read([network], loader, ignore_index=ignore_index)
    _, outputs, labels = joined(got, chunk=10)
    torch.testing.assert_close(outputs, rows_of(network(x), axis)[counted])
    assert torch.equal(labels, y.flatten()[counted])
    assert sizes(got) == [(3, 4), (0, 2)]
    with pytest.raises(DataError, match="no row"):
        read([network], [(x, torch.full_like(y, ignore_index))], ignore_index=ignore_index)


@pytest.mark.parametrize("labelled", [True, False])
def test_drawn_positions_depend_on_the_input_alone(labelled):
    networks = [made("image", seed)[0] for seed in range(2)]
    _, x, y, _ = made("image")
    y[1, :4], y[3] = -100, -100  # 7 positions of one input, none of another
    results = []
    for size in (6, 1, 4):
        loader = zip(x.split(size), y.split(size), strict=True)
        got = read(networks, loader if labelled else [x for x, _ in loader], positions=10)
        results.append([tensor for index in range(2) for tensor in joined(got, index, 16)])
        assert len(results[-1][0]) == (4 * 10 + 7 if labelled else 60)
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert first is second is None or torch.allclose(first.double(), second.double(), rtol=1e-12, atol=1e-12)
    heads = find_heads(networks, [None, None], x, CATEGORICAL)
    resumed = joined(read(networks, [(x[4:], y[4:])], heads=heads, positions=10, first_batch=1, first_input=4))
    if labelled:
        torch.testing.assert_close(resumed[0], results[0][0][-20:])
    drawn = torch.cat([drawn_positions(35, 10, index) for index in range(2000)])
    assert float((torch.bincount(drawn) / 2000 - 10 / 35).abs().max()) < 0.05
    assert torch.equal(drawn_positions(5, 10, 0), torch.arange(5))


@pytest.mark.parametrize("kind", ["image", "sequence"])
def test_labels_of_each_output(kind):
    network, x, _, axis = made(kind, outputs=2)
    labels = torch.randint(2, network(x).shape)
    missing = torch.rand(labels.shape) < 0.4
    marked = torch.where(missing, 255, labels)
    _, outputs, got = joined(read([network], [(x, marked)], BERNOULLI, ignore_index=255))
    expected = rows_of(torch.where(missing, torch.nan, labels.double()), axis)
    kept = ~expected.isnan().all(1)
    torch.testing.assert_close(got, expected[kept], equal_nan=True)
    torch.testing.assert_close(outputs, rows_of(network(x), axis)[kept])
    targets = network(x).detach() + 1
    assert torch.equal(joined(read([network], [(x, targets)], GAUSSIAN))[2], rows_of(targets, axis))
    half = targets.narrow(axis, 0, 1)  # one mean and one variance at each position
    assert joined(read([network], [(x, half)], Gaussian(heteroscedastic=True)))[2].shape == (half.numel(), 1)
    targets.movedim(axis, -1)[1, 0, ..., 0] = -100
    with pytest.raises(DataError, match=r"batch 0 .*finite"):
        read([network], [(x, targets)], GAUSSIAN)


WRONG_LABELS = {
    "extra axis": (lambda y: y[:, None], r"squeeze\(1\)"),
    "one for each input": (
        lambda y: y[:, 0, 0],
        r"a label for each position, of shape \(6, 5, 7\).*got labels of shape \(6,\)",
    ),
    "another size": (lambda y: y.repeat_interleave(2, 1), r"got labels of shape \(6, 10, 7\).*size of the outputs"),
    "one-hot": (lambda y: functional.one_hot(y, CLASSES).movedim(-1, 1), "not one-hot"),
    "float": (lambda y: y.double(), "integer type"),
    "out of range": (lambda y: y + 2, r"labels must lie in \[0, 2\].*\. Remove padding"),
    "from 1": (
        lambda y: y + 1,
        r"labels must lie in \[0, 2\].* from 1 to 3\. Class indices start at 0: pass labels - 1\.",
    ),
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
            r"kernel size \(3, 3\), padding \(1, 1\).*1x1 convolution",
        ),
        (lambda: nn.Conv2d(FEATURES, CLASSES, 1, stride=2), r"stride \(2, 2\)"),
        (lambda: nn.Conv2d(FEATURES, 4, 1, groups=2), "groups 2"),
        (
            lambda: nn.ConvTranspose2d(FEATURES, CLASSES, 1),
            r"last layer, 'layer'.*without reshaping",
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
        with pytest.raises(HeadError, match=r"head='head' is a Conv2d with"):
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


def test_networks_at_different_positions_are_refused():
    network, x, _, _ = made("image")
    coarse = nn.Sequential(nn.AvgPool2d(2), made("image", 1)[0])
    with pytest.raises(DataError, match=r"same shape.*5, 7, 3.*2, 3, 3"):
        read([network, coarse], [x])
    head = find_head(network, x)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(70, CLASSES))
    with pytest.raises(DataError, match="same shape"):
        read([network, flat], [x], heads=[head, find_head(flat, x)])


def test_positions_are_checked():
    assert [check_positions(one) for one in ("all", "average", 3)] == ["all", "average", 3]
    for wrong in (0, -1, 1.5, "some", True, None):
        with pytest.raises(OptionError, match="positions"):
            check_positions(wrong)
