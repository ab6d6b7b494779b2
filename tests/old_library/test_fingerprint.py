"""Which network is this: byte by byte, in the coarser of two precisions; and a network that was changed is noticed."""

import copy

import pytest
import torch
from torch import nn

import mola
from mola.network.fingerprint import Watch, same_network, signature

KINDS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FINENESS = {"float64": 3, "float32": 2, "float16": 1, "bfloat16": 1}
X = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
LOADER = [(X, torch.arange(24) % 3)]


def network(seed=0):
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 3)
    ).float()
    made(X)  # gives the statistics something to say
    return made.eval()


def shuffled(made):
    with torch.no_grad():
        made[4].weight.copy_(made[4].weight.flatten()[torch.randperm(128 * 16)].view(16, 128))


def drawn_again(made):
    with torch.no_grad():
        made[4].weight.copy_(torch.randn(16, 128) * made[4].weight.std())


def one_bit(made):
    """The smallest change that a tensor of this precision can have."""
    weight = made[0].weight
    flat = weight.detach().view(-1)
    whole = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.element_size()])
    whole[5] += 1


def statistics(made):
    with torch.no_grad():
        made[1].running_var.mul_(1.5)


CHANGES = {
    "shuffled": shuffled,
    "drawn again": drawn_again,
    "one bit": one_bit,
    "statistics": statistics,
    "two rows swapped": lambda made: made[4].weight.data.copy_(made[4].weight.data.roll(1, 0)),
}


# --- the same network, or another ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", KINDS)
@pytest.mark.parametrize("then", KINDS)
def test_a_network_is_the_same_in_every_precision_and_no_other_network_is(then, now):
    fitted = network().to(KINDS[then])
    saved = signature(fitted)
    moved = copy.deepcopy(fitted).to(KINDS[now])
    assert same_network(moved, saved)
    for name, change in CHANGES.items():
        other = copy.deepcopy(moved)
        change(other)
        assert not same_network(other, saved), name


@pytest.mark.parametrize("then", ["float64", "float32"])
@pytest.mark.parametrize("by_way_of", ["float32", "float16", "bfloat16"])
def test_rounding_is_another_network_in_a_file_and_the_same_in_memory(then, by_way_of):
    fitted = network().to(KINDS[then])
    saved = signature(fitted)
    rounded = copy.deepcopy(fitted).to(KINDS[by_way_of]).to(KINDS[then])
    assert same_network(rounded, saved) == (by_way_of == "float32")  # float64 holds its numbers
    assert Watch(rounded, saved).changed() == []
    one_bit(rounded)
    assert Watch(rounded, saved).changed() == ["0.weight"]


def test_a_network_of_several_precisions_is_compared_tensor_by_tensor():
    fitted = network()
    saved = signature(fitted)
    mixed = copy.deepcopy(fitted)
    mixed[4].half()
    mixed[0].bfloat16()
    assert same_network(mixed, saved)
    assert same_network(copy.deepcopy(mixed).float(), signature(mixed))
    one_bit(mixed)
    assert not same_network(mixed, saved)


def test_the_shape_belongs_to_a_network_and_its_counters_do_not():
    fitted = network()
    saved = signature(fitted)
    fitted[1].num_batches_tracked.add_(7)
    assert same_network(fitted, saved)
    wide, tall = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
    tall.weight.data.copy_(wide.weight.data.view(6, 2))
    assert not same_network(tall, signature(wide))


@pytest.mark.parametrize("change", ["shuffled", "drawn again"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_loading_refuses_another_network_in_half_precision(kind, change, tmp_path):
    """Sums of all numbers, compared with a tolerance, let these pass."""
    fitted = network()
    mola.fit(fitted, LOADER).save(tmp_path)
    half = copy.deepcopy(fitted).to(KINDS[kind])
    mola.load(tmp_path, half)
    CHANGES[change](half)
    with pytest.raises(mola.StorageError, match="other layers have changed"):
        mola.load(tmp_path, half)


# --- a network that was changed after it was fitted -----------------------------------------------------------------


def scaled(made):
    with torch.no_grad():
        made[4].weight.mul_(1.5)


def trained(made):
    optimiser = torch.optim.SGD(made.parameters(), lr=0.1)
    nn.functional.cross_entropy(made(X), LOADER[0][1]).backward()
    optimiser.step()


def replaced(made):
    made[0] = nn.Conv2d(1, 8, 3).float()


def another_parameter(made):
    made[4].weight = nn.Parameter(made[4].weight.detach() + 1)


def loaded(made):
    made.load_state_dict(network(5).state_dict(), assign=True)


EDITS = {
    "scaled": scaled,
    "scaled through .data": lambda made: made[4].weight.data.mul_(1.5),
    "the head through .data": lambda made: made[6].weight.data.mul_(1.5),
    "trained": trained,
    "a module replaced": replaced,
    "a parameter replaced": another_parameter,
    "other data": lambda made: setattr(made[0].bias, "data", torch.ones(8, dtype=torch.float32)),
    "another state": loaded,
    "statistics": statistics,
    "statistics replaced": lambda made: setattr(made[1], "running_mean", torch.ones(8, dtype=torch.float32)),
    "trained in channels-last": lambda made: made[0].weight.data.mul_(2),
}


def posteriors(made):
    return {
        "mola": mola.fit(made, LOADER),
        "whole": mola.fit_whole(made, LOADER, structure="diag"),
        "temperature": mola.temperature_scaled(made, LOADER),
    }


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_network_is_noticed_by_predictions_and_files(edit, tmp_path):
    made = network()
    if "channels-last" in edit:
        made = made.to(memory_format=torch.channels_last)
    fitted = posteriors(made)
    for posterior in fitted.values():
        posterior(X)
    EDITS[edit](made)
    for name, posterior in fitted.items():
        for use, argument in ((posterior, X), (posterior.predict, X), (posterior.save, tmp_path / name)):
            with pytest.raises(mola.MolaError, match=r"changed since"):
                use(argument)
        assert not (tmp_path / name).exists()
    last = fitted["mola"]
    for use in (lambda: last.tune(LOADER), lambda: last.reweight(LOADER), lambda: last.with_link("mc")(X)):
        with pytest.raises(mola.HeadError, match=r"models\[0\].*changed since the posterior was fitted"):
            use()


def test_a_single_number_changed_behind_torchs_back_is_noticed_before_anything_is_kept(tmp_path):
    made = network()
    posterior = mola.fit(made, LOADER)
    posterior(X)
    made[4].weight.data[3, 7] += 1e-3
    for use in (lambda: posterior.save(tmp_path / "p"), lambda: posterior.tune(LOADER), posterior.check_networks):
        with pytest.raises(mola.HeadError, match=r"layers other than head '6' changed.*4\.weight"):
            use()


def test_what_is_put_back_is_the_same_network_again():
    made = network()
    posterior = mola.fit(made, LOADER)
    before, kept = posterior(X), made[4].weight.detach().clone()
    scaled(made)
    with pytest.raises(mola.HeadError):
        posterior(X)
    with torch.no_grad():
        made[4].weight.copy_(kept)
    assert torch.equal(posterior(X), before)


def test_moves_copies_and_other_modes_are_no_change(tmp_path):
    made = network()
    posterior = mola.fit(made, LOADER)
    posterior.half()
    posterior(X.half())
    assert copy.deepcopy(posterior)(X.half()).shape == (24, 3)
    posterior.save(tmp_path)  # signs the network that was fitted, in float32
    assert mola.load(tmp_path, network())(X).shape == (24, 3)
    posterior.float()
    posterior(X)
    posterior.check_networks()
    made.train()
    posterior(X)
    with torch.inference_mode():
        posterior(X)


class Counting(nn.Module):
    """A network that keeps a count of its calls among its numbers, as some do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(36, 4), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(torch.relu(self.body(x.flatten(1))))


def test_a_network_that_writes_into_its_buffers_is_not_taken_for_changed(monkeypatch):
    made = Counting().float()
    posterior = mola.fit(made, LOADER)
    posterior(X)
    looked = []
    original = mola.network.fingerprint._record

    def recorded(tensor, *likely):
        looked.append(tensor)
        return original(tensor, *likely)

    monkeypatch.setattr(mola.network.fingerprint, "_record", recorded)
    for _ in range(3):
        posterior(X)
    assert all(tensor is made.calls for tensor in looked), "only what was written to is compared again"
    made.body.weight.data.mul_(2)
    with pytest.raises(mola.HeadError, match=r"body\.weight"):
        posterior(X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_a_likely_record_saves_work_and_changes_nothing(dtype):
    record = mola.network.fingerprint._record
    tensor = torch.randn(4, 3, dtype=torch.float64).to(dtype)
    other = tensor.clone()
    other[1, 2] += 1
    own = record(tensor)
    likely = (own, "", record(other), record(tensor.T.contiguous()), own.replace(" ", "  "), record(tensor.real.half()))
    assert [record(tensor, one) for one in likely] == [own] * len(likely)
