"""A `.pt2` file can run code in PyTorch's reader, so that it is read only where it is trusted."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from contextlib import suppress

import pytest
import torch
from torch import nn

import mola
from mola.errors import OptionError

MARK = "it-ran"


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


def write(path, parts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="the trap is for the reader of torch 2.13")
def test_a_program_is_not_read_unless_it_is_trusted(parts, tmp_path, monkeypatch):
    """PyTorch's reader falls into the trap, and so does one who trusts the file."""
    monkeypatch.chdir(tmp_path)
    write("file.pt2", parts | opaque_constant(parts))
    with pytest.raises(
        OptionError, match=r"file\.pt2 is a program.*can run code.*trust=True.*ONNX file needs no trust"
    ):
        mola.load_exported("file.pt2")
    assert not (tmp_path / MARK).exists()
    with suppress(Exception):  # what it unpickled is no constant
        mola.load_exported("file.pt2", trust=True)
    assert (tmp_path / MARK).exists()


def test_a_trusted_file_is_read(parts, tmp_path):
    write(tmp_path / "file.pt2", parts)
    assert mola.load_exported(tmp_path / "file.pt2", trust=True).outputs == ["label"]
