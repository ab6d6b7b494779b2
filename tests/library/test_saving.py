"""Files: what comes back is what went in, a crash loses nothing, and no code in a file runs."""

import json
import multiprocessing
import os
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from molaplace.errors import OptionError, StorageError
from molaplace.fitting import fit
from molaplace.saving import files
from molaplace.saving.files import MARKER, read_folder, replacing, write_folder
from molaplace.saving.fit_checkpoint import FitCheckpoint, FitProgress, batch_checksum
from molaplace.saving.schema import parse
from molaplace.saving.weights import load_weights, read_metadata, read_state, save_weights
from molaplace.structures import Kron
from molaplace.sums import Sums
from tests.saved_files import edit

OLD = (
    {"kind": "swag", "rank": 3, "name": "ü\ud800"},
    {"a": torch.arange(6.0).reshape(2, 3).t(), "empty": torch.empty(0)},
)
NEW = ({"kind": "swag", "rank": 4}, {"a": torch.ones(2, 2, dtype=torch.float64), "b": torch.tensor([True])})


OURS = (MARKER, f"{MARKER}.lock")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in OURS}


def holds(folder, state):
    document, tensors = read_folder(folder, "swag", {"rank": int})
    same = tensors.keys() == state[1].keys() and all(
        torch.equal(tensor, state[1][name]) for name, tensor in tensors.items()
    )
    return same and {name: document[name] for name in state[0]} == state[0]


# --- folders ------------------------------------------------------------------------------------------------------------


def test_a_folder_comes_back_as_it_was(tmp_path):
    folder = write_folder(str(tmp_path / "deep" / "folder"), *OLD)
    assert holds(folder, OLD)
    before = contents(folder)
    assert list(before) == ["swag.safetensors"]
    write_folder(folder, *OLD)
    assert contents(folder) == before
    for name in ("notes.txt", "mine.safetensors"):
        (folder / name).write_text("mine")
    write_folder(folder, *NEW)
    assert holds(folder, NEW)
    assert len(contents(folder)) == 3


def test_what_cannot_be_saved_leaves_the_old_state(tmp_path):
    before = contents(write_folder(tmp_path / "f", *OLD))
    with pytest.raises(ValueError, match="JSON compliant"):
        write_folder(tmp_path / "f", {"kind": "swag", "rank": float("nan")}, {})
    with pytest.raises(StorageError, match="contains a saved swag but no saved mimo"):
        write_folder(tmp_path / "f", {"kind": "mimo"}, {})
    assert contents(tmp_path / "f") == before
    with pytest.raises(StorageError, match="contains no posterior, but a saved swag"):
        read_folder(tmp_path / "f", "posterior")


# --- crashes ------------------------------------------------------------------------------------------------------------

STEPS = [(files, "save_tensors", 1), (json, "dumps", 1), (Path, "write_bytes", 1), (Path, "write_bytes", 2)]
STEPS += [(os, "fsync", call) for call in (1, 2, 3)] + [(Path, "replace", call) for call in (1, 2, 3)]
STEPS += [(Path, "unlink", call) for call in (1, 2)]


@pytest.mark.parametrize(("owner", "name", "call"), STEPS, ids=[f"{step[1]} {step[2]}" for step in STEPS])
def test_a_crash_while_saving_leaves_the_old_state_or_the_new(owner, name, call, tmp_path, monkeypatch):
    original = getattr(owner, name)
    calls = []

    def crash(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt("disk full")
        return original(*args, **kwargs)

    before = contents(write_folder(tmp_path, *OLD))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(KeyboardInterrupt, match="disk full"):
            write_folder(tmp_path, *NEW)
    if name == "unlink" or call == 3:
        assert holds(tmp_path, OLD) or holds(tmp_path, NEW)
    else:
        assert holds(tmp_path, OLD)
        assert {key: value for key, value in contents(tmp_path).items() if key in before} == before
        assert {path.name for path in tmp_path.glob(".*")} <= set(OURS)
    write_folder(tmp_path, *NEW)
    assert holds(tmp_path, NEW)


STATES = (
    {"page": "old", "numbers": "old", "figures/a": "old", "figures/b": "old"},
    {"page": "new", "numbers": "new", "figures/a": "new", "models/0": "new"},
)


def replace_files(folder, state):
    with replacing(folder, "report", ("page",)) as new:
        for name, text in state.items():
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(text)


def visible_files(folder):
    """Contents of all files except those of interrupted replacements."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).as_posix()[0] != "."]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


@pytest.mark.parametrize("outcome", ["killed", "refused"])
def test_a_replacement_that_stops_anywhere_leaves_one_state(outcome, tmp_path, monkeypatch):
    old, new = STATES
    outcomes = []
    for step in range(100):
        folder = tmp_path / str(step)
        replace_files(folder, old)
        (folder / "notes").write_text("the user's")
        finished = stopped_at(step, lambda folder=folder: replace_files(folder, new), refused=outcome == "refused")
        files = visible_files(folder)
        assert files.pop("notes") == "the user's"
        outcomes.append(files)
        if outcome == "refused" and not finished:
            assert files in (old, new)
        assert files in (old, new) or "page" not in files
        if finished:
            break
    assert outcomes[0] == old
    assert outcomes[-1] == new
    assert len(outcomes) > 10


def stopped_at(step, action, *, refused=False):
    """Run an action in a process that is killed at its given change of the file system, or to which this change is refused.

    Returns True if the action was finished before this change.
    """

    def run():
        changes = []

        def watch(event, arguments):
            if event == "os.rename" or (event == "open" and arguments[2] & os.O_CREAT):
                changes.append(event)
                if len(changes) == step + 1 and refused:
                    raise PermissionError(13, "refused")
                if len(changes) == step + 1:
                    os._exit(9)

        sys.addaudithook(watch)
        try:
            action()
        except StorageError:
            os._exit(9)
        os._exit(0 if len(changes) <= step else 9)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode == 0


# --- several processes --------------------------------------------------------------------------------------------------


def write_repeatedly(folder, value, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        write_folder(folder, {"kind": "swag", "rank": value}, {"a": torch.full((200,), float(value))})


def read_repeatedly(folder, seconds, results):
    reads = 0
    errors = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        reads += 1
        try:
            document, tensors = read_folder(folder, "swag", {"rank": int})
            if not torch.equal(tensors["a"], torch.full((200,), float(document["rank"]))):
                errors.append("a mixture of two states")
        except Exception as error:
            errors.append(repr(error))
    results.put((reads, errors))


def test_readers_and_writers_of_one_folder_do_not_disturb_each_other(tmp_path):
    """In 10 seconds on two cores, 77,000 reads beside one writer and 99,000 beside three had no error."""
    context = multiprocessing.get_context("fork")
    write_folder(tmp_path, {"kind": "swag", "rank": 0}, {"a": torch.zeros(200)})
    results = context.SimpleQueue()
    processes = [context.Process(target=read_repeatedly, args=(tmp_path, 1.5, results)) for _ in range(2)]
    processes += [context.Process(target=write_repeatedly, args=(tmp_path, rank, 1.5)) for rank in range(2)]
    for process in processes:
        process.start()
    readings = [results.get() for _ in range(2)]
    for process in processes:
        process.join()
    assert sum(reads for reads, _ in readings) > 50
    assert not [error for _, errors in readings for error in errors]
    read_folder(tmp_path, "swag")


def test_a_file_that_was_changed_is_not_replaced(tmp_path):
    folder = write_folder(tmp_path / "f", *OLD)
    path = folder / "swag.safetensors"
    edit(path, lambda document, _: document.update(rank=5))
    with pytest.raises(StorageError, match=r"swag\.safetensors.*changed since"):
        write_folder(folder, *NEW)
    path.unlink()
    write_folder(folder, *NEW)
    assert holds(folder, NEW)


# --- documents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"[" * 10**5, "9" * 5000, b"\xff\xfe", b""])
def test_unreadable_json_is_refused_in_words(content):
    with pytest.raises(StorageError, match=r"a\.json is not readable JSON"):
        parse(content, "a.json")


# --- weights ------------------------------------------------------------------------------------------------------------


def small(seed=0, width=4, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)).double()


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(
        left[0] == right[0] and torch.equal(left[1], right[1]) for left, right in pairs if "num_batches" not in left[0]
    )


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


FOREIGN = {
    "script": lambda state: {"epoch": 3, "model_state_dict": state, "optimizer": {"lr": 0.1}},
    "DataParallel": lambda state: prefixed("module.", state),
    "lightning, compiled": lambda state: {"state_dict": prefixed("model._orig_mod.", state), "hyper_parameters": {}},
    "AveragedModel": lambda state: {"n_averaged": torch.tensor(7), **prefixed("module.", state)},
    "DataParallel further in": lambda state: {name.replace(".", ".module.", 1): value for name, value in state.items()},
    "before BatchNorm counted": lambda state: {k: v for k, v in state.items() if "num_batches" not in k},
}


@pytest.mark.parametrize("modern", [True, False])
@pytest.mark.parametrize("form", FOREIGN)
def test_weights_of_others_load(form, modern, tmp_path):
    source = small(1).half()
    target = small(2).float()
    source[1].running_mean.normal_()
    torch.save(FOREIGN[form](source.state_dict()), tmp_path / "w.pth", _use_new_zipfile_serialization=modern)
    load_weights(target, tmp_path / "w.pth")
    assert same(source.float(), target)


def test_names_that_only_a_prefix_distinguishes_keep_it(tmp_path):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.module = nn.Sequential()
            self.module.add_module("norm", nn.BatchNorm1d(2))

    network = Nested()
    nn.init.normal_(network.norm.weight)
    state = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}  # as old files
    torch.save(state, tmp_path / "weights.pt")
    loaded = Nested()
    load_weights(loaded, tmp_path / "weights.pt")
    assert torch.equal(loaded.norm.weight, network.norm.weight)
    assert torch.equal(loaded.module.norm.weight, network.module.norm.weight)


def test_saved_weights_load_with_their_metadata(tmp_path):
    source = small(1)
    target = small(2)
    source[3].weight.data = torch.randn(4, 3, dtype=torch.float64).T
    path = save_weights(source, tmp_path / "new" / "w.safetensors", {"network": "small"})
    load_weights(target, path)
    assert same(source, target)
    assert read_metadata(path) == {"format": "pt", "network": "small"}
    assert read_state(path).keys() == source.state_dict().keys()
    load_weights(nn.DataParallel(small(3)), path)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    load_weights(tied, save_weights(tied, path))
    assert len(contents(path.parent)) == 1


def refused(network, path, words):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(StorageError, match=words):
        load_weights(network, path)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_weights_that_do_not_match_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    state = dict(small(1).state_dict())
    save_file({name: value for name, value in state.items() if name != "3.bias"}, path)
    refused(small(2), path, r"1 missing: 3\.bias\. Check that the architecture.*not been changed")
    save_file({**state, "4.weight": torch.ones(1), "fc.bias": torch.ones(1)}, path)
    refused(small(2), path, r"2 unexpected: 4\.weight, fc\.bias")
    save_weights(small(1, classes=5), path)
    refused(
        small(2),
        path,
        r"2 with a different shape or type: 3\.bias has shape \(5,\).*expected \(3,\).*number of classes",
    )
    save_file({**state, "0.weight": state["0.weight"].long()}, path)
    refused(small(2), path, r"0\.weight has shape \(4, 5\) and type torch\.int64")


def test_files_without_weights(tmp_path):
    path = tmp_path / "w.pt"
    refused(small(), tmp_path / "none.pt", "No such file")
    refused(small(), tmp_path, "is a folder")
    path.write_bytes(b"just some text")
    refused(small(), path, "not a file of weights")
    for content, words in (
        (torch.ones(3), "contains a Tensor"),
        ({"epoch": 3, "optimizer": {}}, "contains no weights; found epoch, optimizer"),
        ({"state_dict": small().state_dict(), "args": Namespace(lr=0.1)}, r"could run code.*argparse\.Namespace"),
    ):
        torch.save(content, path)
        refused(small(), path, words)
    with pytest.raises(StorageError, match="metadata"):
        read_metadata(path)
    lazy = nn.Sequential(nn.LazyLinear(3))
    torch.save(nn.Sequential(nn.Linear(2, 3)).state_dict(), path)
    with pytest.raises(StorageError, match="no shape yet"):
        load_weights(lazy, path)
    with pytest.raises(OptionError, match="not tensors with a known shape"):
        save_weights(lazy, path)
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(small()), path)
        refused(small(), path, "TorchScript")


# --- checkpoints of a fit -----------------------------------------------------------------------------------------------

IDENTITY = {"networks": ["ab", "cd"], "heads": [{"name": "2"}, {"name": "fc"}], "structure": {"name": "kron"}}


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(5, 3, generator=generator), "labels": torch.arange(5) % 2}


def one_batch(seed, labels=True):
    x = batch(seed)["x"].double()
    return [Sums({"gram": k * x.T @ x, "total": x.sum(0)}, 5, float(x.sum()) / 3 if labels else None) for k in (1, 2)]


FITS = {
    "kron": {"structure": "kron"},
    "diag": {"structure": "diag"},
    "running average": {"structure": Kron(running_average=0.9)},
    "bernoulli": {"likelihood": "bernoulli"},
    "gaussian": {"likelihood": "gaussian"},
}
LABELS = {
    "bernoulli": lambda: torch.tensor([0.0, 1.0, torch.nan])[torch.randint(3, (7, 2))],
    "gaussian": lambda: torch.randn(7, 2),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("fail_at", [1, 5, 6])
def test_fit_goes_on_from_its_checkpoint(name, fail_at, tmp_path):
    networks = [nn.Sequential(small(seed), nn.Linear(3, 2).double()) for seed in range(2)]
    labels = LABELS.get(name, lambda: torch.arange(7) % 2)
    batches = [(torch.randn(7, 5, dtype=torch.float64), labels()) for _ in range(6)]

    def interrupted():
        yield from batches[:fail_at]
        raise ZeroDivisionError

    options = {**FITS[name], "checkpoint_every": 2, "progress": False}
    expected = fit(networks, batches, **options)
    with pytest.raises(ZeroDivisionError):
        fit(networks, interrupted(), checkpoint=tmp_path / "checkpoint", **options)
    calls = []
    networks[0].register_forward_hook(lambda *_: calls.append(1))
    actual = fit(networks, iter(batches), checkpoint=tmp_path / "checkpoint", **options)
    read = fail_at // 2 * 2
    assert len(calls) == (read > 0) + 6 - read, (
        "the head is found in the first batch, and batches in the sums are not run again"
    )
    assert not (tmp_path / "checkpoint").exists()
    for left, right in zip(actual.components, expected.components, strict=True):
        sums = left.layer.sums
        others = right.layer.sums
        assert (sums.count, sums.log_likelihood, left.likelihood) == (
            others.count,
            others.log_likelihood,
            right.likelihood,
        )
        assert all(torch.equal(tensor, others.tensors[name]) for name, tensor in sums.tensors.items())


CHANGES = {
    "networks": (["ab", "ef"], "network weights"),
    "heads": ([{"name": "2"}, {"name": "head"}], "heads .*'fc'.*'head'"),
    "structure": ({"name": "diag"}, "structure .*'kron'.*'diag'"),
    "likelihood": ("bernoulli", r"likelihood .None"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_checkpoint_of_another_fit_is_refused(name, tmp_path):
    checkpoint = FitCheckpoint(tmp_path)
    checkpoint.save(IDENTITY, FitProgress(one_batch(0)))
    value, words = CHANGES[name]
    with pytest.raises(StorageError, match=f"a fit with different {words}.*delete"):
        checkpoint.load({**IDENTITY, name: value})
    FitCheckpoint(tmp_path, 1, 0, 2).save(IDENTITY, FitProgress(one_batch(0)))
    with pytest.raises(StorageError, match=r"with 2 processes, but this fit has 3"):
        FitCheckpoint(tmp_path, 1, 0, 3).load(IDENTITY)
    with pytest.raises(OptionError, match="checkpoint_every"):
        FitCheckpoint(tmp_path, 0)


def test_changed_data_is_recognised(tmp_path):
    def skip(batches, progress):
        assert not list(FitCheckpoint(tmp_path).resume(batches, progress))

    def progress_after(*batches):
        checksum = ""
        for batch_seen in batches:
            checksum = batch_checksum(checksum, batch_seen)
        return FitProgress([], len(batches), checksum=checksum)

    image = torch.zeros(2, 1, 40, 40, dtype=torch.float32)
    inner = image.clone()
    inner[0, 0, 13, 13] = 1e-30
    labels = torch.tensor([0, 1])
    with pytest.raises(StorageError, match="does not begin with the 1 batches"):
        skip(iter([(inner.flip(0), labels)]), progress_after((inner, labels)))  # inputs and labels in another order
    progress = progress_after((image, labels), batch(1))
    skip(iter([(image.clone(), labels), batch(1)]), progress)
    for others in (
        [(inner, labels), batch(1)],
        [(image, labels.flip(0).numpy()), batch(1)],
        [batch(1), (image, labels)],
        [(image.reshape(2, 1600), labels), batch(1)],
        [(image.double(), labels), batch(1)],
        [(image, labels)],
    ):
        with pytest.raises(StorageError, match="does not begin with the 2 batches"):
            skip(iter(others), progress)
