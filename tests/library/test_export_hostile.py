"""A `.pt2` file is read only if it is tensors and a graph: every other way to have PyTorch's reader run code is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from contextlib import suppress

import pytest
import torch
from torch import nn

import mola
from mola.errors import StorageError

MARK = "it-ran"
CODE = f"__import__('os').mkdir('{MARK}')"


class Hostile:
    def __reduce__(self):
        return (os.mkdir, (MARK,))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts of a good file."""
    torch.manual_seed(0)
    inputs = torch.randn(12, 4, dtype=torch.float32)
    posterior = mola.fit(nn.Linear(4, 3).float(), [(inputs, torch.arange(12) % 3)], progress=False)
    path = tmp_path_factory.mktemp("good") / "file.pt2"
    mola.export_torch(posterior, path, inputs[:2], outputs=["label"], check=False)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def edited(content, change):
    document = json.loads(content)
    change(document)
    return json.dumps(document).encode()


def opaque_constant(parts):
    """Unpickled whatever `use_pickle` says, if it looks like a tensor otherwise."""
    weights = json.loads(parts["archive/data/weights/model_weights_config.json"])["config"]
    entry = next(one for one in weights.values() if one["path_name"] == "weight_0")
    name = "archive/data/constants/model_constants_config.json"
    trap = entry | {"path_name": "opaque_obj_0", "use_pickle": False}
    changed = edited(parts[name], lambda document: document["config"].update(trap=trap))
    size = len(parts["archive/data/weights/weight_0"])
    return {name: changed, "archive/data/constants/opaque_obj_0": pickle.dumps(Hostile()).ljust(size, b"\0")}


def opaque_constant_under_a_tensor_s_name(parts):
    return {"archive/data/constants/tensor_0": pickle.dumps(Hostile())} | {
        name: content for name, content in opaque_constant(parts).items() if name.endswith("json")
    }


def old_weights(parts):
    """Versions of torch before 2.9 pickled them; where such a file lies beside the new ones, it is read instead."""
    return {"archive/data/weights/model.pt": pickle.dumps(Hostile())}


def size_expression(parts):
    name = "archive/models/model.json"
    text = parts[name].decode()
    assert "Symbol('s" in text
    return {name: text.replace("Symbol('s", f"{CODE} or Symbol('s").encode()}


def guard(parts):
    name = "archive/models/model.json"
    return {name: edited(parts[name], lambda document: document.update(guards_code=[CODE]))}


def operation(parts):
    name = "archive/models/model.json"
    return {name: parts[name].replace(b"torch.ops.aten.argmax.default", b"torch.os.mkdir")}


def argument(parts):
    name = "archive/models/model.json"
    return {name: parts[name].replace(b'"tensors_0"', f'"tensors_0={CODE}"'.encode())}


def library(parts):
    return {"archive/data/aotinductor/model/model.so": b"anything"}


TRAPS = [
    *(opaque_constant, opaque_constant_under_a_tensor_s_name, old_weights, size_expression),
    *(guard, operation, argument, library),
]


def write(path, parts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("trap", TRAPS)
def test_what_could_run_code_is_refused(trap, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = trap(parts)
    assert any(parts.get(name) != content for name, content in changed.items())
    write("file.pt2", parts | changed)
    with pytest.raises(StorageError, match=r"file\.pt2 holds more than tensors and a graph.*run code"):
        mola.load_exported("file.pt2")
    assert not (tmp_path / MARK).exists()


@pytest.mark.filterwarnings("ignore")
def test_the_traps_are_real(parts, tmp_path, monkeypatch):
    """PyTorch's own reader falls into the one that `use_pickle` does not tell of."""
    monkeypatch.chdir(tmp_path)
    write("file.pt2", parts | opaque_constant(parts))
    with suppress(Exception):  # what it unpickled is no constant
        torch.export.load("file.pt2")
    assert (tmp_path / MARK).exists()


def test_the_good_file_is_read_after_being_packed_anew(parts, tmp_path):
    write(tmp_path / "file.pt2", parts)
    assert mola.load_exported(tmp_path / "file.pt2").outputs == ["label"]


def packed(parts, padding=b""):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name), content)
        archive.writestr(zipfile.ZipInfo("archive/extra/padding"), padding)
    return buffer.getvalue()


def test_an_archive_with_two_tables_of_contents_is_read_by_one_of_them(parts, tmp_path, monkeypatch):
    """Python looks for the table in front of the archive's end, PyTorch where the end says it is: each finds its own parts."""
    monkeypatch.chdir(tmp_path)
    bad = {**parts, **opaque_constant_under_a_tensor_s_name(parts)}
    good = {name: parts.get(name, b"harmless") for name in bad}
    longer = max(len(packed(bad)), len(packed(good)))
    bad, good = (packed(one, b" " * (longer - len(packed(one)))) for one in (bad, good))
    content = bad[:-22] + good
    records = torch._C.PyTorchFileReader(io.BytesIO(content))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("archive/data/constants/tensor_0") == b"harmless"
    assert records.get_record("data/constants/tensor_0") != b"harmless", (
        "the two readers agree, so that this attacks nothing"
    )
    (tmp_path / "file.pt2").write_bytes(content)
    mola.load_exported(tmp_path / "file.pt2")
    assert not (tmp_path / MARK).exists()


def test_an_archive_that_claims_more_than_it_holds_is_refused(parts, tmp_path):
    path = tmp_path / "file.pt2"
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
        archive.writestr("archive/extra/bomb", bytes(2**24))
    with pytest.raises(StorageError, match="claims to hold more than its"):
        mola.load_exported(path)
