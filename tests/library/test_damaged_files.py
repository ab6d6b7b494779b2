"""A file that differs in any byte is refused or loads the same; documents and weights of attackers are refused in words."""

import copy
import json
import os
import random
import signal
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import molaplace as mola
from molaplace import export
from molaplace.errors import MolaError, StorageError
from molaplace.links import MonteCarlo
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.fit_checkpoint import FitCheckpoint, FitProgress
from molaplace.saving.pretrained import read_config
from molaplace.saving.schema import from_json
from molaplace.saving.weights import load_weights, read_metadata, save_weights
from tests import saved_files
from tests.library.test_saved_posteriors import FAR, posterior, three, tuned
from tests.library.test_saving import IDENTITY, one_batch, refused, small

# --- every kind of file: how it is made, and how it is read -------------------------------------------------------------

PLAIN = {"kind": "swag", "rank": 2, "rates": [0.5, 1.5], "note": None, "inner": {"a": {"b": [{"c": 1}]}}}


@dataclass(frozen=True)
class Entry:
    c: int


@dataclass(frozen=True)
class Inner:
    a: dict[str, tuple[Entry, ...]]


@dataclass(frozen=True)
class Plain:
    rank: int
    rates: tuple[float, float]
    note: str | None
    inner: Inner


def make_plain(folder):
    write_folder(folder, PLAIN, {"a": torch.arange(12.0), "b": torch.ones(2, 2)})


def read_plain(folder):
    document, tensors = read_folder(folder, "swag")
    plain = from_json(Plain, document)
    return torch.cat([torch.tensor([plain.rank, *plain.rates]), tensors["a"], tensors["b"].flatten()])


def make_checkpoint(folder):
    FitCheckpoint(folder).save(IDENTITY, FitProgress(one_batch(3), 4, 20, 18, "abc"), last=True)


def read_checkpoint(folder):
    progress = FitCheckpoint(folder).load(IDENTITY)
    numbers = [progress.batches, progress.inputs, progress.used_inputs, len(progress.checksum)]
    counts = [value for sums in progress.sums for value in (sums.count, sums.log_likelihood or 0)]
    tensors = [sums.tensors[name].flatten() for sums in progress.sums for name in ("gram", "total")]
    return torch.cat([torch.tensor([*numbers, *counts], dtype=torch.float64), *tensors])


def make_posterior(folder):
    networks = three()
    networks[0][2].weight.data *= 3
    posterior(networks, link=MonteCarlo(samples=3), weights=[0.2, 0.3, 0.5], **tuned()).save(folder)


def read_posterior(folder):
    networks = three()
    networks[0][2].weight.data *= 3
    with torch.no_grad():
        return mola.load(folder, networks)(FAR)


KINDS = {
    "plain": (make_plain, read_plain),
    "fit checkpoint": (make_checkpoint, read_checkpoint),
    "posterior": (make_posterior, read_posterior),
}


def flips(content, rng, count):
    """Contents that differ in one bit: at every place of a small file, at some of a larger one."""
    for index in sorted(rng.sample(range(len(content)), min(count, len(content)))):
        changed = bytearray(content)
        changed[index] ^= 1 << rng.randrange(8)
        yield index, bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_refused_or_changes_nothing(kind, tmp_path):
    make, read = KINDS[kind]
    make(tmp_path / "f")
    expected = read(tmp_path / "f")
    wrong = []
    tried = 0
    refusals = 0
    rng = random.Random(7)
    for path in sorted(path for path in tmp_path.rglob("[!.]*") if path.is_file()):
        content = path.read_bytes()
        for index, changed in flips(content, rng, 80):
            path.write_bytes(changed)
            tried += 1
            try:
                if not torch.equal(read(tmp_path / "f"), expected):
                    wrong.append(f"{path.name} at {index}: another result")
            except MolaError:
                refusals += 1
            except Exception as error:
                wrong.append(f"{path.name} at {index}: {error!r}")
        path.write_bytes(content)
    assert not wrong, "\n".join(wrong)
    assert refusals > 0.8 * tried > 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused(kind, tmp_path):
    make, read = KINDS[kind]
    make(tmp_path / "f")
    for path in sorted(path for path in tmp_path.rglob("[!.]*") if path.is_file()):
        content = path.read_bytes()
        cuts = [content[:length] for length in (*range(0, len(content), 1 + len(content) // 30), len(content) - 1)]
        for changed in [*cuts, content + b"\0", b"\0" + content, content[::-1], bytes(len(content))]:
            path.write_bytes(changed)
            with pytest.raises(StorageError, match=r"readable JSON|truncated or corrupt|not written by molaplace"):
                read(tmp_path / "f")
        path.write_bytes(content)
    read(tmp_path / "f")


# --- documents that nobody would write ----------------------------------------------------------------------------------

MONSTERS = [2**70, -(2**70), 10**400, float("inf"), None, "junk", [], {}, json.loads("[" * 40 + "]" * 40), True, 1e-320]


def spots(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from spots(inner, (*path, key))


def mutated(document, rng):
    """A document with one entry replaced, removed or repeated."""
    document = copy.deepcopy(document)
    *way, last = rng.choice(list(spots(document)))
    holder = document
    for key in way:
        holder = holder[key]
    kind = rng.randrange(4)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, list):
        holder.append(holder[last])
    else:
        holder[last] = rng.choice(MONSTERS)
    return document


@pytest.mark.parametrize("kind", KINDS)
def test_documents_that_nobody_would_write_are_refused_in_words(kind, tmp_path):
    """With a checksum that is right, so that the checks behind it hold alone."""
    make, read = KINDS[kind]
    make(tmp_path / "f")
    (path,) = tmp_path.rglob("[!.]*.safetensors")
    document, tensors = saved_files.read(path)
    rng = random.Random(11)
    wrong = []
    refusals = 0
    for _ in range(150):
        changed = mutated(document, rng)
        saved_files.write(path, changed, tensors)
        try:
            read(tmp_path / "f")
        except MolaError:
            refusals += 1
        except Exception as error:
            names = [key for key in document if changed.get(key) != document[key]]
            wrong.append(f"{names}: {error!r}")
    assert not wrong, "\n".join(wrong)
    assert refusals > 75


FOREIGN = {
    "newer": ({"version": 2}, "version 2.*Update molaplace"),
    "another kind": ({"kind": "mimo"}, "expected a saved swag.*saved mimo"),
    "a list": ({"kind": []}, "damaged at 'kind': expected text"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_documents_are_refused_in_words(name, tmp_path):
    make_plain(tmp_path)
    entries, words = FOREIGN[name]
    saved_files.edit(tmp_path / "swag.safetensors", lambda document, _: document.update(entries))
    with pytest.raises(StorageError, match=words):
        read_plain(tmp_path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"molaplace": "[1]"}, {"molaplace": "{"}], ids=str)
def test_safetensors_of_others_are_refused_in_words(metadata, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "swag.safetensors", metadata)
    with pytest.raises(StorageError, match=r"not written by molaplace|format version None|not readable JSON"):
        read_plain(tmp_path)


def test_an_edited_document_is_refused(tmp_path):
    make_plain(tmp_path)
    path = tmp_path / "swag.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(rb"\"rank\": 2", rb"\"rank\": 3"))
    with pytest.raises(StorageError, match="does not match its checksum"):
        read_plain(tmp_path)
    path.write_bytes(content.replace(b"sha256", b"sha257"))
    with pytest.raises(StorageError, match="checksum"):
        read_plain(tmp_path)
    with pytest.raises(StorageError, match="Pass a folder"):
        read_plain(path)


# --- weights ------------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.system, ("echo ran > $MOLAPLACE_TEST_BOMB",)


@pytest.mark.parametrize("modern", [True, False])
def test_code_in_a_weights_file_is_not_run(tmp_path, monkeypatch, modern):
    monkeypatch.setenv("MOLAPLACE_TEST_BOMB", str(tmp_path / "ran"))
    torch.save({"state_dict": Bomb()}, tmp_path / "w.pt", _use_new_zipfile_serialization=modern)
    refused(small(), tmp_path / "w.pt", "could run code")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["safetensors", "torch", "old torch"])
def test_damaged_weights_are_refused(form, tmp_path):
    path = tmp_path / "damaged"
    source = small(1)
    if form == "safetensors":
        save_weights(source, path)
    else:
        torch.save(source.state_dict(), path, _use_new_zipfile_serialization=form == "torch")
    content = path.read_bytes()
    for length in (0, 5, 9, 100, len(content) // 2, len(content) - 8):
        path.write_bytes(content[:length])
        refused(small(2), path, "damaged is damaged, truncated")
        with pytest.raises(StorageError, match="damaged is"):
            read_metadata(path)
    path.write_bytes(content[:9] + b"?" * 31 + content[40:])
    refused(small(2), path, "damaged, truncated")
    for index, changed in flips(content, random.Random(3), 60):
        path.write_bytes(changed)
        try:
            load_weights(nn.Sequential(*small(2)), path)
        except StorageError:
            continue
        except Exception as error:
            raise AssertionError(f"at {index}") from error


# --- what is no file, or a file without end -------------------------------------------------------------------------------


def zeros(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**42)


@pytest.mark.parametrize("replace", [os.mkfifo, zeros, sparse, os.mkdir])
@pytest.mark.parametrize("name", ["posterior.safetensors", "weights", "exported", "preprocessor"])
def test_devices_pipes_and_endless_files_are_refused_at_once(name, replace, tmp_path):
    make_posterior(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    replace(path)
    read = {
        "weights": lambda: load_weights(nn.Sequential(*small(2)), path),
        "exported": lambda: export.load(path),
        "preprocessor": lambda: read_config(path),
    }
    signal.alarm(60)
    try:
        with pytest.raises(StorageError, match=r"folder, device or pipe|too large to read"):
            read.get(name, lambda: mola.load(tmp_path, three()))()
    finally:
        signal.alarm(0)
