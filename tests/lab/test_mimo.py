"""MIMO: independent orders, heads against hand-tiled passes, and MIMO-MoLA against fits on hand-made networks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.demo import LabelledData
from molaplace.errors import MolaWarning, OptionError, StorageError
from molaplace.rules import Threshold
from molaplace_lab.mimo import Mimo, member_rows, train_mimo
from molaplace_lab.training import Shuffled
from tests.closeness import assert_close
from tests.conftest import make_problem


def images(count=24, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 6, 6, generator=generator)
    return inputs, torch.randint(classes, (count,), generator=generator)


def conv_net(classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, classes),
    )


def optimiser(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def trained(members=3, epochs=3, **options):
    inputs, labels = images()
    mimo = Mimo(conv_net(), members, example=inputs[:2])
    loader = Shuffled(LabelledData(inputs, labels), 8)
    return train_mimo(mimo, loader, epochs=epochs, optimiser=optimiser, progress=False, **options)


def by_hand(mimo, batches):
    """Logits of every head, written out: trunk of the channels side by side, then one matrix for each head."""
    trunk = copy.deepcopy(mimo.trunk.network).eval()
    features = trunk(torch.cat(batches, dim=1)).detach()
    return torch.stack([features @ head.weight.T + head.bias for head in mimo.heads]).detach()


def test_heads_agree_with_a_hand_tiled_pass():
    mimo = trained()
    inputs = images(seed=5)[0]
    logits = by_hand(mimo, [inputs] * 3)
    torch.testing.assert_close(mimo.logits(inputs), logits)
    expected = logits.softmax(-1).mean(0)
    torch.testing.assert_close(mimo(inputs), expected)
    for head_logits, network in zip(logits, mimo.networks, strict=True):
        torch.testing.assert_close(network.eval()(inputs), head_logits)
    torch.testing.assert_close(mola.ensemble(mimo.networks)(inputs), expected)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_input_repetition_is_the_share_of_rows_that_agree(share):
    generator = torch.Generator().manual_seed(1)
    drawn = [member_rows(50, 3, 4, share, generator) for _ in range(200)]
    agree = torch.stack([(rows == rows[0]).all(0).double().mean() for rows in drawn]).mean()
    # The rest agree by chance, with probability 1 / 50^2 for three members.
    assert float(agree) == pytest.approx(share + (1 - share) / 50**2, abs=2e-3)


def test_a_step_is_sgd_on_the_mean_over_rows_of_the_sum_over_heads():
    inputs, labels = images()
    mimo = Mimo(conv_net(), 2, example=inputs[:2])
    reference = copy.deepcopy(mimo)
    loader = [(inputs, labels)]
    plain = {"optimiser": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "progress": False}
    drawn = []

    class Spy(nn.Module):
        def forward(self, stacked):
            drawn.append(stacked.detach().clone())
            return stacked

    spied = copy.deepcopy(mimo)
    spied.trunk.network.insert(0, Spy())
    train_mimo(spied, loader, epochs=1, batch_repetition=2, **plain)
    train_mimo(mimo, loader, epochs=1, batch_repetition=2, **plain)
    (stacked,) = drawn
    assert stacked.shape == (48, 4, 6, 6)
    # Which datum each member saw, found by looking.
    rows = [
        torch.tensor([int((inputs == row).flatten(1).all(1).nonzero()) for row in stacked[:, 2 * k : 2 * k + 2]])
        for k in range(2)
    ]
    assert not torch.equal(rows[0], rows[1])
    assert torch.bincount(rows[1]).tolist() == [2] * 24
    trunk = reference.trunk.network.train()
    features = trunk(stacked)
    loss = sum(nn.functional.cross_entropy(reference.heads[k](features), labels[rows[k]]) for k in range(2))
    for trained, expected in zip(mimo.parameters(), reference.parameters(), strict=True):
        (gradient,) = torch.autograd.grad(loss, expected, retain_graph=True)
        torch.testing.assert_close(trained.detach(), (expected - 0.1 * gradient).detach())


def test_new_weights_keep_the_architectures_own_scale():
    """The widened layer gives the variance that the plain one gave; heads have the entries of the old head."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 5))
    mimo = Mimo(network, 4, example=torch.zeros(2, 200))
    inputs = [torch.randn(500, 200) for _ in range(4)]
    plain = network[0](inputs[0]).detach()
    wide = mimo.trunk.network[0](torch.cat(inputs, 1)).detach()
    assert float(wide.var() / plain.var()) == pytest.approx(1, abs=0.05)
    entries = set(network[2].weight.flatten().tolist())
    heads = [head.weight for head in mimo.heads]
    assert all(set(head.flatten().tolist()) <= entries for head in heads)
    assert not torch.equal(heads[0], heads[1])


class OneHead(nn.Module):
    """A head of a MIMO network as a network made by hand, sharing nothing."""

    def __init__(self, mimo, index):
        super().__init__()
        self.trunk = copy.deepcopy(mimo.trunk.network)
        self.head = copy.deepcopy(mimo.heads[index])
        self.members = mimo.members

    def forward(self, inputs):
        return self.head(self.trunk(torch.cat([inputs] * self.members, dim=1)))


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_mimo_mola_is_the_fit_of_hand_made_networks(structure, tmp_path):
    mimo = trained()
    (inputs, labels) = images()
    validation = images(seed=9)
    loader = list(zip(inputs.split(7), labels.split(7), strict=True))
    by_hand_networks = [OneHead(mimo, index) for index in range(3)]
    rule = Threshold(0.4)
    expected = mola.fit(by_hand_networks, loader, structure=structure, progress=False)
    posterior = mola.fit(mimo.networks, loader, structure=structure, progress=False)
    torch.testing.assert_close(posterior(validation[0]), expected(validation[0]))
    torch.testing.assert_close(posterior.log_evidence(), expected.log_evidence())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MolaWarning)  # the grid may grow
        tuned, wanted = (mixture.tune([validation], rule=rule, progress=False) for mixture in (posterior, expected))
    assert len(set(tuned.prior_precision)) == 1
    assert tuned.prior_precision == wanted.prior_precision
    torch.testing.assert_close(tuned.predict(validation[0]).probs, wanted.predict(validation[0]).probs)
    tuned.save(tmp_path)
    again = mola.load(tmp_path, mimo.networks)
    assert_close(again(validation[0]), tuned(validation[0]))
    with pytest.raises(StorageError, match="3 networks, got 2"):
        mola.load(tmp_path, mimo.networks[:2])


def test_inputs_that_are_not_images_work():
    problem = make_problem()
    mimo = Mimo(problem.network, 2, example=problem.inputs[:3])
    assert mimo.trunk.network[0].in_features == 6
    train_mimo(mimo, problem.loader, epochs=1, optimiser=optimiser, progress=False)
    assert mimo(problem.inputs).shape == (40, 4)
    flattened = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.ReLU(), nn.Linear(5, 3))
    assert Mimo(flattened, 3, example=images()[0])(images()[0]).shape == (24, 3)


class Fixed(nn.Module):
    """A network that scales its channels by a buffer before the first layer: it cannot take more of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2, 1, 1))
        self.rest = conv_net()

    def forward(self, inputs):
        return self.rest(inputs * self.scale)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Fixed(), "cannot be widened at its first layer 'rest.0'"),
        (nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), "no linear or convolutional layer before its head"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)), "grouped convolution"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), nn.Flatten(), nn.Linear(64, 3)),
            "parametrised",
        ),
    ],
    ids=["fixed", "no-trunk", "groups", "parametrised"],
)
def test_architectures_that_cannot_be_widened_are_refused(network, words):
    with pytest.raises(OptionError, match=words):
        Mimo(network.double(), 3, example=images()[0])
