"""Validation data that do not fit are noticed, whoever reads them: labels in another order, labels of nothing, data not held out."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn

import mola
from mola.errors import DataError, MolaWarning
from mola.likelihood import CATEGORICAL
from mola.tuning.data_checks import CHANCE, Remembering, guessed, other_order, shared_rows
from mola.tuning.rules import PAPER_GRID
from tests.conftest import STRUCTURES

pytestmark = [
    pytest.mark.filterwarnings("ignore:the search for the prior precision"),
    pytest.mark.filterwarnings("ignore:.*no interior optimum"),
    pytest.mark.filterwarnings("error:only [0-9.]+% of the labels"),
    pytest.mark.filterwarnings("error:the validation data are"),
]

CLASSES = 3
ORDERS = [order for order in itertools.permutations(range(CLASSES)) if order != tuple(range(CLASSES))]
READERS = {
    **{
        f"tune-{rule}": lambda bench, data, rule=rule: bench.posterior.tune(data, rule=rule)
        for rule in CATEGORICAL.rules
        if rule != "evidence"
    },
    "tune-outliers": lambda bench, data: bench.posterior.tune(data, mola.OutlierExposure([torch.randn(20, 4)])),
    "fit": lambda bench, data: mola.fit(bench.networks, bench.train, data),
    "reweight": lambda bench, data: bench.posterior.reweight(data),
    "fit_whole": lambda bench, data: mola.fit_whole(bench.networks, bench.train, data, structure="diag"),
    "whole-nll": lambda bench, data: bench.whole.tune(data, "nll"),
    **{
        f"temperature-{mode}": lambda bench, data, mode=mode: mola.temperature_scaled(bench.networks, data, mode)
        for mode in ("shared", "members", "pooled")
    },
}  # fmt: skip


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64) * 0.8
    return inputs + 2 * torch.eye(CLASSES, 4, dtype=torch.float64)[labels], labels


def trained(seed, inputs, labels):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, CLASSES)).double()
    optimiser = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    return network.eval()


class Bench:
    def __init__(self):
        self.inputs, self.labels = draw(200, 1)
        self.train = [(self.inputs[start : start + 50], self.labels[start : start + 50]) for start in range(0, 200, 50)]
        self.val = draw(150, 2)
        self.networks = [trained(seed, self.inputs, self.labels) for seed in (0, 1)]
        self.posterior = mola.fit(self.networks, self.train)
        self.whole = mola.fit_whole(self.networks[0], self.train, structure="diag")


@pytest.fixture(scope="module")
def bench():
    return Bench()


@pytest.mark.parametrize("reader", READERS)
def test_labels_in_another_order_are_refused_with_that_order(bench, reader):
    inputs, labels = bench.val
    READERS[reader](bench, [bench.val])  # these fit
    for order in ORDERS:
        moved = torch.tensor(order)[labels]  # class c is now called order[c]
        said = ", ".join(f"{label} -> {order.index(label)}" for label in range(CLASSES))
        with pytest.raises(DataError, match=f"in another order than the outputs of models.*like this: {said}"):
            READERS[reader](bench, [(inputs, moved)])


def test_one_network_of_another_order_among_several_is_named(bench):
    turned = trained(3, bench.inputs, (bench.labels + 1) % CLASSES)
    with pytest.raises(DataError, match=r"than the outputs of models\[1\]"):
        mola.temperature_scaled([bench.networks[0], turned], [bench.val])


@pytest.mark.parametrize("reader", [name for name in READERS if not name.startswith("temperature")])
def test_labels_of_nothing_are_warned_of_and_end_nowhere_far(bench, reader):
    labels = torch.randint(0, CLASSES, (150,), generator=torch.Generator().manual_seed(5))
    with pytest.warns(MolaWarning) as caught:
        found = READERS[reader](bench, [(bench.val[0], labels)])
    assert any("hardly more than guessing (33.3%)" in str(one.message) for one in caught)
    assert min(found.prior_precision) >= min(PAPER_GRID), "and not 1e-25"


@pytest.mark.parametrize("rule", [rule for rule in CATEGORICAL.rules if rule != "evidence"])
def test_no_target_below_what_confidence_can_be_and_no_advice_to_do_what_is_done(bench, rule):
    inputs, _ = bench.val
    answers = bench.networks[0](inputs).argmax(1)
    never = torch.where(torch.arange(150) % 2 == 0, answers + 1, answers + 2) % CLASSES  # always wrong, in no order
    with pytest.warns(MolaWarning) as caught:
        tuned = bench.posterior.tune([(inputs, never)], rule=rule)
    words = "\n".join([str(tuned.tuning), *(str(one.message) for one in caught)])
    assert "confidence -" not in words
    assert f"such as '{rule}'" not in words
    if rule == "threshold":
        assert "target confidence 33.33 %, the lowest there is" in tuned.tuning.rule
    assert min(tuned.prior_precision) >= min(PAPER_GRID)


def test_answers_that_have_nothing_to_do_with_the_labels_are_no_other_order():
    """Few data and many orders: one of them always does well."""
    generator = torch.Generator().manual_seed(0)
    refused = rounds = 0
    for classes, count in itertools.product((2, 3, 5, 10), (2, 5, 10, 20, 50)):
        for _ in range(200):
            rounds += 1
            refused += other_order(torch.randint(0, classes, (count, 2), generator=generator)) is not None
    assert refused <= 1 + 2 * CHANCE * rounds
    assert other_order(torch.tensor([[0, 1], [1, 0]] * 20)).outputs == {0: 1, 1: 0}
    assert other_order(torch.zeros(0, 2, dtype=torch.int64)) is None


def test_guessing_is_told_from_knowing():
    assert guessed(0.1, 1000, 10)
    assert guessed(0.0, 1000, 10)
    assert not guessed(0.15, 1000, 10)
    assert not guessed(1.0, 0, 10)
    for count in range(1, 30):
        for outputs in (2, 3, 10):
            assert guessed(1 / outputs, count, outputs)
            assert not guessed(0.8, count, outputs), (count, outputs)


# --- data that were not held out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_training_data_are_known_again_in_any_batches_and_order(bench, structure, tmp_path):
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    again = [(bench.inputs[part], bench.labels[part]) for part in order.split(33)]
    with pytest.warns(MolaWarning, match="the validation data are the training data"):
        tuned = mola.fit(bench.networks, bench.train, again, structure=structure)
    assert any("are the training data" in note for note in tuned.tuning.notes)
    fitted = mola.fit(bench.networks, bench.train, structure=structure)
    with pytest.warns(MolaWarning, match="the validation data are the training data"):
        fitted.reweight(again)
    loaded = mola.load(fitted.save(tmp_path / "posterior"), bench.networks)
    with pytest.warns(MolaWarning, match="the validation data are the training data"):
        loaded.tune(again, rule="nll")


def test_a_whole_posterior_knows_its_training_data_too(bench):
    with pytest.warns(MolaWarning, match="the validation data are the training data"):
        tuned = bench.whole.tune(bench.train)
    assert any("are the training data" in note for note in tuned.tuning.notes)


def test_other_data_of_the_same_number_are_no_training_data(bench):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3, 8):
            bench.posterior.reweight([draw(200, seed)])


def test_training_and_validation_data_that_were_swapped_deserve_a_word():
    inputs, labels = draw(400, 1)
    flipped = torch.where(
        torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.1, (labels + 1) % CLASSES, labels
    )
    network = trained(0, inputs, labels)
    with pytest.warns(MolaWarning, match="far better on the validation data .* have the two been swapped"):
        tuned = mola.fit(network, [(inputs, flipped)], [draw(400, 9)], rule="nll")
    assert "swapped" in tuned.tuning.notes[0]


@pytest.mark.parametrize("size", [10, 64])
def test_a_part_of_the_training_data_is_known_by_its_rows(bench, size):
    """In batches of which all, or only some, of the rows are remembered."""
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    train = [(bench.inputs[part], bench.labels[part]) for part in order.split(size)]
    some = order[torch.randperm(200, generator=torch.Generator().manual_seed(2))[:120]]
    part = [(bench.inputs[rows], bench.labels[rows]) for rows in some.split(size)]
    with pytest.warns(MolaWarning, match="are among the training data"):
        tuned = mola.fit(bench.networks, train, part)
    assert sum("training data" in note for note in tuned.tuning.notes) == 1
    mola.fit(bench.networks, train, [bench.val])  # others are not taken for these


def test_a_few_blank_rows_in_both_are_no_evidence():
    """One picture in fifty is black, in batches of which few rows are remembered; then the same with any of 200 pictures."""
    generator = torch.Generator().manual_seed(0)
    for kinds in (1, 200):
        common = torch.randn(kinds, 3, generator=generator)

        def data(batches, rows, common=common):
            for _ in range(batches):
                batch = torch.randn(rows, 3, generator=generator)
                chosen = torch.rand(rows, generator=generator) < 0.02
                batch[chosen] = common[torch.randint(len(common), (int(chosen.sum()),), generator=generator)]
                yield batch

        sides = Remembering(list(data(200, 512))), Remembering(list(data(100, 512)))
        for side in sides:
            list(side)
        assert len(set(sides[0].keys) & set(sides[1].keys)) >= min(kinds, 5)
        assert shared_rows(*sides) is None
        part = Remembering([sides[0].loader[index] for index in range(0, 200, 4)])
        list(part)
        assert "among the training data" in shared_rows(sides[0], part)


def test_rows_that_repeat_themselves_in_any_data_are_no_evidence():
    """Categories: 4 columns of 2 values have 16 different rows."""
    generator = torch.Generator().manual_seed(0)
    sides = [Remembering([torch.randint(0, 2, (16, 4), generator=generator) for _ in range(10)]) for _ in range(2)]
    for side in sides:
        assert len(list(side)) == len(side) == 10
    assert shared_rows(*sides) is None
    one = torch.randn(40, 3)
    forms = [
        [(one, one.sum(1))],
        [one],
        [{"labels": one[:, 0], "x": one}],
        [([one, one], one[:, 0])],
        [{"a": {"b": one}}],
    ]
    for first, second in itertools.product(forms, forms):
        pair = Remembering(first), Remembering(second)
        assert [len(list(side)) for side in pair] == [1, 1]
        assert "among the training data" in shared_rows(*pair)
    nothing = Remembering([])
    assert list(nothing) == []
    assert shared_rows(nothing, nothing) is None
