"""Files of strangers: weights that claim more than they hold, names that would become part of a page."""

from __future__ import annotations

import pickle
import zipfile

import pytest
import torch
from torch import nn

import molaplace_lab.models
from molaplace.cli.networks import build_networks
from molaplace.errors import OptionError, StorageError
from molaplace.saving.weights import load_weights, read_state
from molaplace_lab.networks import timm_builder

SCRIPT = "<script>alert(1)</script>"


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def repacked(source, target, *, compressed=False, change=lambda name, content: content, more=()):
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression=kind) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
        for name, content in more:
            new.writestr(name, content)
    return target


@pytest.fixture
def weights(tmp_path):
    torch.save(small().state_dict(), tmp_path / "good.pt")
    return tmp_path / "good.pt"


def test_weights_that_grow_when_read_are_refused(weights, tmp_path):
    bomb = repacked(weights, tmp_path / "bomb.pt", compressed=True, more=[("good/data/9", bytes(2**26))])
    assert bomb.stat().st_size < 2**20
    with pytest.raises(StorageError, match=r"bomb\.pt is \d+,\d+ bytes long but declares an unpacked size of 67,"):
        read_state(bomb)


@pytest.mark.parametrize("count", [2**33, 2**50, 2**62, 2**80])
def test_storages_of_absurd_size_are_refused_in_words(tmp_path, count):
    """The file says how many numbers there are, and does not have them."""
    head = torch.zeros(1)
    torch.save({"1.weight": head}, tmp_path / "one.pt")

    def swollen(name, content):
        if not name.endswith("data.pkl"):
            return content
        # The storage's count of numbers is the last 1 before the persistent id is read.
        place = content.rindex(b"K\x01", 0, content.index(b"Q"))
        length = (count.bit_length() + 8) // 8
        return content[:place] + b"\x8a" + bytes([length]) + count.to_bytes(length, "little") + content[place + 2 :]

    path = repacked(tmp_path / "one.pt", tmp_path / "swollen.pt", change=swollen)
    with pytest.raises(StorageError, match=r"swollen\.pt"):
        load_weights(small(), path)


def test_weights_that_are_stretched_are_refused_in_words(tmp_path):
    """One number can stand for a million million, and for so many classes."""
    state = {name: value.clone() for name, value in molaplace_lab.models.build_network("mlp", 10).state_dict().items()}
    last = list(state)[-1]
    state[last] = torch.zeros(1).expand(10**12)
    torch.save(state, tmp_path / "wide.pt")
    with pytest.raises((StorageError, OptionError), match=r"wide\.pt"):
        build_networks(["mlp"], [str(tmp_path / "wide.pt")])


class Hostile:
    def __reduce__(self):
        return (open, ("it-ran", "w"))


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_objects_in_weights_are_not_made(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps({"1.weight": Hostile()}))
    else:
        torch.save({"1.weight": Hostile()}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(StorageError, match=r"evil\.pt"):
        load_weights(small(), path)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("name", ["hf-hub:stranger/model", "hf_hub:stranger/model", "local-dir:/tmp"])
def test_names_of_timm_fetch_nothing(name):
    with pytest.raises(OptionError, match="Expected the plain name of an architecture"):
        timm_builder(name)
