"""Labels in another class order are refused with that order; labels at chance and inputs preprocessed differently are warned of."""

import itertools

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, MolaWarning
from molaplace.rules.label_checks import CHANCE, check_class_order
from tests.library.problems import train

CLASSES = 3
ORDERS = [order for order in itertools.permutations(range(CLASSES)) if order != tuple(range(CLASSES))]

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the grid", "ignore:.*no effect", "ignore:.*end of its range")


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64) * 0.8
    return inputs + 2 * torch.eye(CLASSES, 4, dtype=torch.float64)[labels], labels


def trained(seed, inputs, labels):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, CLASSES)).double()
    return train(network, inputs, labels, 100, 0.02)


@pytest.fixture(scope="module")
def posterior():
    inputs, labels = draw(200, 1)
    return mola.fit([trained(seed, inputs, labels) for seed in (0, 1)], [(inputs, labels)], progress=False)


READERS = {
    "tune": lambda posterior, data: posterior.tune(data, rule="nll", progress=False),
    "fit": lambda posterior, data: mola.fit(posterior.networks, [draw(200, 1)], data, progress=False),
    "reweight": lambda posterior, data: posterior.reweight(data, progress=False),
}


@pytest.mark.parametrize("reader", READERS)
def test_labels_in_another_order_are_refused_with_that_order(posterior, reader):
    inputs, labels = draw(150, 2)
    READERS[reader](posterior, [(inputs, labels)])
    for order in ORDERS:
        reordered_labels = torch.tensor(order)[labels]  # class c is now called order[c]
        words = ", ".join(f"{label} -> {order.index(label)}" for label in range(CLASSES))
        with pytest.raises(DataError, match=f"a different order.*networks.*{words}"):
            READERS[reader](posterior, [(inputs, reordered_labels)])


def test_one_network_of_another_order_among_several_is_named(posterior):
    inputs, labels = draw(200, 1)
    other_order = trained(3, inputs, (labels + 1) % CLASSES)
    with pytest.raises(DataError, match=r"Other networks agree with the labels, so leave out networks\[1\]"):
        mola.fit([posterior.networks[0], other_order], [(inputs, labels)], [draw(150, 2)], progress=False)


@pytest.mark.parametrize("reader", READERS)
def test_labels_no_better_than_chance_are_warned_of(posterior, reader):
    labels = torch.randint(0, CLASSES, (150,), generator=torch.Generator().manual_seed(5))
    with pytest.warns(MolaWarning, match="chance"):
        READERS[reader](posterior, [(draw(150, 2)[0], labels)])


def test_predictions_that_have_nothing_to_do_with_the_labels_are_no_other_order():
    """Few data and many orders: one of them always does well."""
    generator = torch.Generator().manual_seed(0)
    refused = rounds = 0
    for classes, count in itertools.product((2, 3, 5, 10), (2, 5, 10, 20, 50)):
        for _ in range(200):
            rounds += 1
            pairs = torch.randint(0, classes, (2, count), generator=generator)
            try:
                check_class_order(pairs[0], [pairs[1]], "loader")
            except DataError:
                refused += 1
    assert refused <= 1 + 2 * CHANCE * rounds
    with pytest.raises(DataError, match="0 -> 1, 1 -> 0"):
        check_class_order(torch.tensor([0, 1] * 20), [torch.tensor([1, 0] * 20)], "loader")


def test_labels_that_occur_once_show_no_order():
    targets = torch.arange(64)
    predicted = torch.randperm(32_000, generator=torch.Generator().manual_seed(0))[:64]
    check_class_order(targets, [predicted], "validation loader")


def test_a_network_at_chance_and_labels_of_one_class_are_warned_of(posterior):
    inputs, labels = draw(150, 2)
    torch.manual_seed(0)
    untrained = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, CLASSES)).double()
    nn.init.zeros_(untrained[2].weight)
    with pytest.warns(
        MolaWarning, match=r"agree with networks\[1\], whereas chance alone would give 33.3%. Check that .* trained"
    ):
        mola.fit([posterior.networks[0], untrained], [draw(200, 1)], [(inputs, labels)], progress=False)
    with pytest.warns(MolaWarning, match="every label in the validation loader is 2"):
        posterior.tune([(inputs[labels == 2], labels[labels == 2])], rule="nll", progress=False)


def test_inputs_preprocessed_differently_are_warned_of(posterior):
    inputs, labels = draw(150, 2)
    with pytest.warns(MolaWarning, match="times as large as those of the training data. Check .* preprocessed"):
        posterior.tune([(16 * inputs, labels)], rule="nll", progress=False)
    with pytest.warns(MolaWarning, match="temperature is 100, at one end of its range"):
        mola.fit(
            posterior.networks, [(1000 * draw(200, 1)[0], draw(200, 1)[1])], [(1000 * inputs, labels)], progress=False
        )
