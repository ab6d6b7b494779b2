"""Networks and loaders in; features, outputs and labels as rows out: once, in order, whatever the layout."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mola.errors import DataError, HeadError
from mola.likelihoods import CATEGORICAL
from mola.network import (
    as_batch,
    drawn_positions,
    evaluating,
    find_head,
    find_heads,
    stream,
)

FEATURES, CLASSES = 4, 3


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


WRONG_LABELS = {
    "extra axis": (lambda y: y[:, None], r"squeeze\(1\)"),
    "one for each input": (lambda y: y[:, 0, 0], r"of shape \(6, 5, 7\).*got labels of shape \(6,\)"),
    "another size": (lambda y: y.repeat_interleave(2, 1), r"got labels of shape \(6, 10, 7\).*size of the outputs"),
    "one-hot": (lambda y: functional.one_hot(y, CLASSES).movedim(-1, 1), "not one-hot"),
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
        (lambda: nn.ConvTranspose2d(FEATURES, CLASSES, 1), r"last layer, 'layer'.*without reshaping"),
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
